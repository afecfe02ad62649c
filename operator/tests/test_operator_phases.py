"""Tables of phases, and the typed status (docs/design/recovery.md#phases)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_cluster import ModelCluster

from rekindle.transitions import InvalidTransition
from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.reconcile.core import reconcile, reconcile_all
from rekindle_operator.reconcile.phases import (
    QUERY_TRANSITIONS,
    SLOT_TRANSITIONS,
    TOPOLOGY_TRANSITIONS,
    QueryChange,
    SlotEvent,
    SlotPhase,
    next_slot_phase,
    next_topology_phase,
    query_changes,
)
from rekindle_operator.topology_status import (
    QueryState,
    TopologyPhase,
    TopologyStatus,
    read_topology_status,
)


def test_every_phase_and_state_has_a_row() -> None:
    assert set(SLOT_TRANSITIONS) == set(SlotPhase)
    assert set(QUERY_TRANSITIONS) == {None, *QueryState}
    assert set(TOPOLOGY_TRANSITIONS) == {None, *TopologyPhase}
    assert all(set(row) == set(QueryState) for row in QUERY_TRANSITIONS.values())


def test_a_slot_passes_from_loss_to_an_open_gate() -> None:
    phase = next_slot_phase(SlotPhase.BOUND, SlotEvent.LOSS_FOUND, "")
    phase = next_slot_phase(phase, SlotEvent.POD_CREATED, "")
    assert next_slot_phase(phase, SlotEvent.GATE_OPENED, "") is SlotPhase.OPEN


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (SlotPhase.BOUND, SlotEvent.POD_CREATED),
        (SlotPhase.OPEN, SlotEvent.POD_CREATED),
        (SlotPhase.GATED, SlotEvent.POD_CREATED),
        (SlotPhase.NO_POD, SlotEvent.GATE_OPENED),
        (SlotPhase.LOST, SlotEvent.GATE_OPENED),
        (SlotPhase.LOST, SlotEvent.LOSS_FOUND),
    ],
)
def test_a_decision_outside_the_table_raises(phase: SlotPhase, event: SlotEvent) -> None:
    with pytest.raises(InvalidTransition, match="pod p-1 is Running"):
        next_slot_phase(phase, event, "pod p-1 is Running")


def test_an_invalid_decision_is_reported_with_details(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is done for the topology: a pod too many would be worse."""

    def replace_all(context: Any, states: Any, coordinator_refused: Any) -> Any:
        return tuple(s.check_event(SlotEvent.POD_CREATED) for s in states)

    monkeypatch.setattr("rekindle_operator.reconcile.core.replacements", replace_all)
    (failed,) = (d for d in reconcile_all(running.snapshot(), running.now) if d.error is not None)
    assert isinstance(failed.error, InvalidTransition)
    assert "incarnation 1 is reserved" in str(failed.error)


@pytest.mark.parametrize(
    ("before", "after", "is_known_live", "announced"),
    [
        (None, QueryState.LIVE, True, (QueryChange.LIVE,)),
        (QueryState.LIVE, QueryState.WAITING, True, (QueryChange.LOST,)),
        (QueryState.LIVE, QueryState.CATCHING_UP, True, (QueryChange.RESTORING,)),
        (QueryState.RESTORING, QueryState.CATCHING_UP, True, ()),
        (QueryState.WAITING, QueryState.RESTORING, True, (QueryChange.RESTORING,)),
        (QueryState.UNKNOWN, QueryState.WAITING, True, (QueryChange.LOST,)),
        (QueryState.UNKNOWN, QueryState.WAITING, False, ()),
        (QueryState.UNKNOWN, QueryState.LIVE, True, ()),
        (QueryState.UNKNOWN, QueryState.LIVE, False, (QueryChange.LIVE,)),
        (QueryState.LIVE, QueryState.LIVE, True, ()),
    ],
)
def test_a_change_of_a_query_is_announced_once(
    before: QueryState | None,
    after: QueryState,
    is_known_live: bool,
    announced: tuple[QueryChange, ...],
) -> None:
    assert query_changes(before, after, is_known_live, "") == announced


def test_a_topology_that_ran_does_not_start_again() -> None:
    with pytest.raises(InvalidTransition, match="generation 3"):
        next_topology_phase(TopologyPhase.DEGRADED, TopologyPhase.STARTING, "generation 3")
    starting = TopologyPhase.STARTING
    assert next_topology_phase(TopologyPhase.SUSPENDED, starting, "") is starting


def test_a_status_is_read_as_it_was_written(running: ModelCluster) -> None:
    running.kill_node_until_not_ready("a")
    running.settle()
    raw = running.status()
    status = read_topology_status(raw)
    assert status.recovery.to_json() == raw["recovery"]
    assert [c.to_json() for c in status.conditions.values()] == raw["conditions"]
    assert [q.to_json() for q in status.queries.values()] == raw["queries"]


def test_entries_that_cannot_be_read_are_left_out() -> None:
    raw = {
        "phase": "Molten",
        "conditions": ["x", {"status": "True"}],
        "queries": [{"name": "q", "state": "Molten"}, 3],
        "recovery": {"history": [{"lostNodes": 4}, None]},
        "slots": [{"slot": "a/0/0", "incarnation": "much"}],
        "generations": [{"generation": "x"}, 1],
    }
    status = read_topology_status(raw)
    assert status.phase is TopologyPhase.UNKNOWN
    assert status.queries["q"].state is None
    assert replace(status, phase=None, queries={}) == TopologyStatus()


def test_a_history_without_a_start_fails_no_pass(running: ModelCluster) -> None:
    view = running.topologies["flights"]
    status = {**view.status, "recovery": {"history": [{"mode": "Progressive"}]}}
    running.topologies["flights"] = replace(view, status=status)
    assert reconcile(running.snapshot(), running.now)
    assert not any(d.error for d in reconcile_all(running.snapshot(), running.now))


def _fail_once(cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as broken:
        broken.setattr("rekindle_operator.reconcile.core.replacements", fail)
        cluster.apply(reconcile(cluster.snapshot(), cluster.now))
    assert cluster.condition("Degraded")["reason"] == "ReconcileFailed"


def test_a_topology_whose_first_pass_fails_starts(
    cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_once(cluster, monkeypatch)
    assert cluster.status()["phase"] == "Pending"
    cluster.settle()
    assert cluster.status()["phase"] == "Starting"


def test_a_failed_pass_while_starting_loses_no_pods(
    cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pods are reserved and were never created."""
    cluster.quota = 0
    cluster.settle()
    assert cluster.status()["phase"] == "Starting"
    _fail_once(cluster, monkeypatch)
    cluster.uncreated_pods = UncreatedPods({})  # another operator leads
    cluster.apply(reconcile(cluster.snapshot(), cluster.now))
    assert cluster.status()["phase"] == "Starting"
    assert cluster.condition("Recovering")["status"] == "False"


def test_a_failed_pass_that_resumes_a_topology_loses_no_pods(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.edit("flights", suspend=True)
    running.settle()
    running.edit("flights", suspend=False)
    running.apply(reconcile(running.snapshot(), running.now))  # the dry run
    _fail_once(running, monkeypatch)
    running.settle()
    assert running.status()["phase"] == "Running"
    assert not running.status().get("recovery")


def test_a_late_first_report_does_not_end_the_start(cluster: ModelCluster) -> None:
    for name in "ab":
        cluster.add_node(name, cpu_m=800)  # not for every query
    cluster.settle()
    assert cluster.status()["phase"] == "Starting"
    cluster.reports_lost = True
    cluster.pass_time(10.0)
    cluster.settle()
    assert "Unknown" in cluster.query_states().values()
    cluster.reports_lost = False
    cluster.pass_time(1.0)
    cluster.settle()
    assert cluster.status()["phase"] == "Starting"
