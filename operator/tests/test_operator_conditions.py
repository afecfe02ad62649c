"""The conditions of a topology: what fails, what is unknown, what a user has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle_operator.reconcile import core
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.coordinator import CoordinatorReplacement, replace_coordinator
from rekindle_operator.reconcile.core import reconcile, reconcile_all
from rekindle_operator.reconcile.isolation import IsolatedTopologies
from rekindle_operator.topology_status import QueryState
from rekindle_testing.fixtures.crd import resource_schema, undeclared_in_status


def test_an_internal_error_is_reported_and_others_recover(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: ReconcileContext) -> CoordinatorReplacement:
        if context.view.name == "bad":
            raise RuntimeError("an internal error")
        return replace_coordinator(context)

    monkeypatch.setattr("rekindle_operator.reconcile.core.replace_coordinator", broken)
    running.add_topology("bad", flights_spec())
    running.kill_node_until_not_ready("a")
    decisions = reconcile_all(running.snapshot(), running.now)
    assert [t.topology_key for t in decisions if t.error is not None] == ["default/bad"]
    actions = [a for t in decisions if t.error is not None for a in t.actions]
    (write,) = (a for a in actions if isinstance(a, WriteStatus))
    conditions = {c["type"]: c for c in write.status["conditions"]}
    assert conditions["Ready"]["status"] == "Unknown"
    assert conditions["Degraded"]["reason"] == "ReconcileFailed"
    assert "an internal error" in conditions["Degraded"]["message"]
    running.settle()
    assert running.status()["redundancy"] == "8/8"
    assert running.query_states("bad") == {}


@pytest.mark.parametrize("step", ["_measure_capacity", "plan_with_standbys", "preempt"])
def test_what_fails_for_all_fails_for_one(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """What concerns all topologies at once leaves out the one with which it fails."""
    original = getattr(core, step)

    def broken(*given: Any) -> Any:
        inputs = next(each for each in given if isinstance(each, list))
        found = (i.plan_input if isinstance(i, core.TopologyNeeds) else i for i in inputs)
        if any(plan_input.context.view.name == "bad" for plan_input in found):
            raise RuntimeError("an internal error")
        return original(*given)

    monkeypatch.setattr(core, step, broken)
    for name in ("bad", "good"):
        running.add_topology(name, flights_spec())
    for name in ("e", "f"):
        running.add_node(name)
    running.kill_node_until_not_ready("a")
    decisions = reconcile_all(running.snapshot(), running.now)
    assert [t.topology_key for t in decisions if t.error is not None] == ["default/bad"]
    running.settle()
    assert running.status()["redundancy"] == running.status("good")["redundancy"] == "8/8"
    assert "an internal error" in running.condition("Degraded", "bad")["message"]
    assert running.query_states("bad") == {}


@given(st.sets(st.text(max_size=2), max_size=40), st.data())
def test_only_what_fails_is_left_out(uids: set[str], data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.sampled_from(sorted(uids)), max_size=2)) if uids else set()
    calls = 0

    def total(inputs: Mapping[str, int]) -> int:
        nonlocal calls
        calls += 1
        if bad & inputs.keys():
            raise RuntimeError("an internal error")
        return sum(inputs.values())

    topologies = IsolatedTopologies()
    given_inputs = {uid: n for n, uid in enumerate(sorted(uids))}
    found = topologies.run_together(total, given_inputs)
    assert topologies.errors.keys() == bad
    left = topologies.without_failed(given_inputs)
    assert left.keys() == uids - bad
    assert found == sum(left.values())
    assert calls <= 3 + 2 * len(bad) * (len(uids) + 1).bit_length()


def test_what_fails_without_any_topology_is_the_fault_of_none() -> None:
    calls = 0

    def broken(inputs: Mapping[str, int]) -> int:
        nonlocal calls
        calls += 1
        raise RuntimeError("a node that cannot be read")

    topologies = IsolatedTopologies()
    with pytest.raises(RuntimeError):
        topologies.run_together(broken, {str(n): n for n in range(1000)})
    assert calls == 2
    assert topologies.errors == {}


def test_a_failed_reconcile_leaves_no_query_live(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an internal error")

    monkeypatch.setattr("rekindle_operator.reconcile.core.replace_coordinator", broken)
    running.settle()
    assert set(running.query_states().values()) == {"Unknown"}
    assert running.status()["queriesLive"] == "0/3"
    assert "an internal error" in running.condition("Degraded")["message"]
    monkeypatch.undo()
    running.settle()
    assert running.status()["phase"] == "Running"
    assert running.condition("Degraded")["status"] == "False"


def test_the_crd_declares_every_field_of_the_status(running: ModelCluster) -> None:
    assert undeclared_in_status(running.status()) == []
    running.kill_node_until_not_ready("a")
    running.apply(reconcile(running.snapshot(), running.now))
    assert running.status()["recovery"]
    assert undeclared_in_status(running.status()) == []


def test_the_crd_enum_has_every_query_state() -> None:
    status = resource_schema()["properties"]["status"]["properties"]
    assert set(QueryState) <= set(status["queries"]["items"]["properties"]["state"]["enum"])


def test_valid_is_unknown_while_the_dry_run_is_pending(running: ModelCluster) -> None:
    running.edit("flights", image="another")
    written = _written(running)
    assert written["Valid"]["status"] == "Unknown"
    assert written["Valid"]["reason"] == "Checking"
    assert written["Ready"]["status"] == "Unknown"
    running.settle()
    assert running.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(
    ("checkpoint", "status", "reason"),
    [
        ({"epoch": 100}, "True", "UpToDate"),
        ({"epoch": 40}, "False", "Overdue"),
        ({"epoch": 40, "nextEpoch": 109}, "True", "UpToDate"),
        ({"epoch": 10, "nextEpoch": 49}, "False", "Overdue"),
    ],
)
def test_overdue_checkpoints_are_reported(
    running: ModelCluster, checkpoint: dict[str, int], status: str, reason: str
) -> None:
    view = running.topologies["flights"]
    report = {**view.data_plane, "headEpoch": 101, "checkpoint": checkpoint}
    changed = replace(view, status={**view.status, "dataPlane": report})
    running.topologies["flights"] = changed
    found = _written(running)["Checkpointed"]
    assert (found["status"], found["reason"]) == (status, reason)


NO_RIGHT = ("StoreUnavailable", "no right to write")
REFUSED = ("EntriesRefused", "entries that were saved are gone")
GARBAGE = ("CleanUpFailed", "it was slow")
LOST = ("Unrestorable", "an object is missing")
STALLED = ("Stalled", "waiting for s/0")
NEWER = ("OfANewerRelease", "a problem that this release does not know")
NOT_RUNNING = "no source has released an epoch"
KEEPS_UP = "checkpoints keep up with the sources"
NO_CAUSE = "the last one is of epoch 40"


@pytest.mark.parametrize(
    ("head", "problems", "status", "reason", "says"),
    [
        (None, [NO_RIGHT], "False", "StoreFailed", NO_RIGHT[1]),
        (None, [REFUSED], "False", "StoreFailed", REFUSED[1]),
        (None, [LOST], "False", "StoreFailed", LOST[1]),
        (None, [GARBAGE, STALLED], "Unknown", "NotRunning", NOT_RUNNING),
        (None, [], "Unknown", "NotRunning", NOT_RUNNING),
        (None, [NEWER], "False", "CheckpointProblem", NEWER[1]),
        (None, [NEWER, NO_RIGHT], "False", "StoreFailed", NO_RIGHT[1]),
        (101, [GARBAGE, NO_RIGHT], "False", "Overdue", NO_RIGHT[1]),
        (101, [REFUSED], "False", "Overdue", REFUSED[1]),
        (101, [GARBAGE, STALLED], "False", "Overdue", NO_CAUSE),
        (101, [NEWER], "False", "CheckpointProblem", NEWER[1]),
        (41, [GARBAGE, LOST], "False", "Unrestorable", LOST[1]),
        (41, [NEWER, LOST], "False", "Unrestorable", LOST[1]),
        (41, [GARBAGE, NEWER], "False", "CheckpointProblem", NEWER[1]),
        (41, [NO_RIGHT, REFUSED, STALLED], "True", "UpToDate", KEEPS_UP),
    ],
)
def test_a_store_that_cannot_be_used_is_explained(
    running: ModelCluster,
    head: int | None,
    problems: list[tuple[str, str]],
    status: str,
    reason: str,
    says: str,
) -> None:
    view = running.topologies["flights"]
    report = {**view.data_plane, "checkpoint": {"epoch": 40}, "headEpoch": head}
    report["checkpointProblems"] = [{"kind": k, "message": m} for k, m in problems]
    changed = replace(view, status={**view.status, "dataPlane": report})
    running.topologies["flights"] = changed
    found = _written(running)["Checkpointed"]
    assert (found["status"], found["reason"]) == (status, reason)
    assert found["message"].endswith(says)


def test_texts_of_problems_decide_no_condition(running: ModelCluster) -> None:
    """Nor do those of an older coordinator, whose problems have texts and no kinds."""
    view = running.topologies["flights"]
    lost = "checkpoint store: cannot be restored: the entry of s/0 at epoch 9: an object is missing"
    report = {**view.data_plane, "headEpoch": 41, "checkpoint": {"epoch": 40}, "problems": [lost]}
    report.pop("checkpointProblems", None)
    changed = replace(view, status={**view.status, "dataPlane": report})
    running.topologies["flights"] = changed
    assert _written(running)["Checkpointed"]["reason"] == "UpToDate"


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ({"problem": "it is slow", "savingFails": True}, "flown/0/0: it is slow"),
        ({"problem": "the checkpoint of epoch 9 is slow"}, NO_CAUSE),
    ],
)
def test_what_keeps_a_task_from_saving_is_explained(
    running: ModelCluster, problem: dict[str, Any], says: str
) -> None:
    view = running.topologies["flights"]
    report = {**view.data_plane, "headEpoch": 101, "checkpoint": {"epoch": 40}}
    report["tasks"] = [{**task, **problem} for task in report["tasks"]]
    changed = replace(view, status={**view.status, "dataPlane": report})
    running.topologies["flights"] = changed
    found = _written(running)["Checkpointed"]
    assert (found["status"], found["reason"]) == ("False", "Overdue")
    assert found["message"].endswith(says)


def _written(cluster: ModelCluster) -> dict[str, Any]:
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    (written,) = (a for a in actions if isinstance(a, WriteStatus))
    return {c["type"]: c for c in written.status["conditions"]}


def test_a_query_whose_sink_is_far_behind_is_not_live(running: ModelCluster) -> None:
    query = next(iter(running.query_states()))
    running.lags_s = {query: 14.0}
    running.pass_time(1.0)
    running.settle()
    states = running.query_states()
    assert states.pop(query) == "CatchingUp"
    assert set(states.values()) == {"Live"}
    running.lags_s = {query: 8.0}  # between both limits
    running.pass_time(1.0)
    running.settle()
    assert running.query_states()[query] == "CatchingUp"
    running.lags_s = {query: 4.0}
    running.pass_time(1.0)
    running.settle()
    assert set(running.query_states().values()) == {"Live"}


def test_a_lag_near_the_limit_is_live_again_after_outdated_reports(running: ModelCluster) -> None:
    running.lags_s = dict.fromkeys(running.query_states(), 8.0)
    running.pass_time(1.0)
    running.settle()
    running.reports_lost = True
    running.pass_time(3.0)
    running.settle()
    assert set(running.query_states().values()) == {"Unknown"}
    running.reports_lost = False
    running.pass_time(1.0)
    running.settle()
    assert set(running.query_states().values()) == {"Live"}
    assert "QueryRestoring" not in running.event_reasons()[-3:]
