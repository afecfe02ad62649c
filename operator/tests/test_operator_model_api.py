"""The executor on the model cluster: API errors by verb, late binding, stalled watches."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from flights_example import flights_spec
from model_api import ApiError, ModelOperator
from model_cluster import ModelCluster
from model_objects import rfc3339
from urllib3.exceptions import ReadTimeoutError

from rekindle import names
from rekindle_operator.loop import ControlLoop
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.core import reconcile_all
from rekindle_operator.reconcile.moves import SUCCESSOR_WITHOUT_NODE_S
from rekindle_operator.uncached_check import UncachedCheck

pytestmark = pytest.mark.simulated


@pytest.fixture
def operator(cluster: ModelCluster) -> ModelOperator:
    for name in "abc":
        cluster.add_node(name)
    return ModelOperator(cluster)


def test_a_topology_starts_through_the_api(operator: ModelOperator) -> None:
    operator.run(10.0)
    assert operator.model.status()["phase"] == "Running"
    assert operator.api.calls_of("PATCH", "/pods/"), "gates were opened by patches"


def test_pods_that_bind_late_are_not_replaced(operator: ModelOperator) -> None:
    operator.model.binding_delay_s = 3.0
    operator.run(12.0)
    assert operator.model.status()["phase"] == "Running"
    assert {p.incarnation for p in operator.model.tasks().values()} == {1}


def test_a_topology_starts_when_creating_pods_is_allowed_again(operator: ModelOperator) -> None:
    operator.api.errors = [ApiError("POST", "/pods", 500)]
    operator.run(5.0)
    assert not operator.model.raw_pods
    operator.api.errors.clear()
    operator.run(60.0, step_s=2.0)
    assert operator.model.status()["phase"] == "Running"


def test_a_refused_topology_delays_no_other(operator: ModelOperator) -> None:
    operator.model.add_topology("second", flights_spec())
    operator.api.errors = [ApiError("PATCH", "/flights/status", 403)]
    for name in "def":
        operator.model.add_node(name)
    operator.run(12.0)
    assert operator.model.status("second")["phase"] == "Running"
    assert not operator.model.tasks("flights")


def test_a_new_leader_lists_everything_before_its_first_pass(operator: ModelOperator) -> None:
    works = iter([False, True])
    leader: Any = SimpleNamespace(begin_pass=lambda: 1)
    cache: Any = SimpleNamespace(
        relist_mirrors=lambda: next(works), forget_uncreated_pods=lambda: None
    )
    arguments = (cache, operator.executor, operator.uncached, operator.model.settings, leader)
    terms: list[str] = []
    loop = ControlLoop(*arguments, lambda: 0.0, lambda: terms.append("new"))
    assert not loop._begin_pass()
    assert loop._begin_pass()
    assert loop._begin_pass(), "in the same term nothing is listed again"
    assert terms == ["new"]


def test_no_pass_begins_at_the_end_of_the_process(operator: ModelOperator) -> None:
    """It would find the executor's threads gone."""
    leads: Any = SimpleNamespace(wait_leading=lambda timeout_s: True, begin_pass=lambda: 1)
    passes = threading.Semaphore(0)
    cache: Any = SimpleNamespace(
        relist_mirrors=lambda: True,
        forget_uncreated_pods=lambda: None,
        wait_for_pass_request=lambda timeout_s: True,
    )
    arguments = (cache, operator.executor, operator.uncached, operator.model.settings, leads)
    loop = ControlLoop(*arguments, lambda: 0.0, sleep=lambda seconds: None)
    loop.run_pass = passes.release  # type: ignore[method-assign]
    threading.Thread(target=loop.run, daemon=True).start()
    assert passes.acquire(timeout=10.0)
    loop.end(10.0)
    while passes.acquire(blocking=False):
        pass
    assert not passes.acquire(timeout=0.2)


def test_a_stalled_watch_is_reported(operator: ModelOperator) -> None:
    operator.run(6.0)
    snapshot = replace(operator.snapshot(), stalled_watches=("pods",))
    decisions = reconcile_all(snapshot, operator.model.now, operator.model.settings)
    (written,) = (a for t in decisions for a in t.actions if isinstance(a, WriteStatus))
    (degraded,) = (c for c in written.status["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "WatchStalled")


# --- mirrors that are behind ------------------------------------------------------


@pytest.fixture
def started(running: ModelCluster) -> ModelOperator:
    made = ModelOperator(running)
    made.run(1.0)
    assert running.status()["phase"] == "Running"
    return made


def uids(operator: ModelOperator) -> set[str]:
    return {p.uid for p in operator.model.pods()}


def test_a_stalled_watch_of_leases_replaces_no_coordinator(started: ModelOperator) -> None:
    before = uids(started)
    started.model.stall("leases")
    started.run(9.0)
    assert uids(started) == before


def test_a_node_missing_only_in_the_mirror_keeps_its_pods(started: ModelOperator) -> None:
    before = uids(started)
    started.model.stall("nodes")
    started.cache.nodes.remove_not_found("", "c")
    started.run(3.0)
    assert uids(started) == before
    assert {n.name for n in started.cache.nodes.views()} == {"a", "b", "c"}


def test_pods_missing_only_in_the_mirror_are_not_replaced(started: ModelOperator) -> None:
    before = uids(started)
    started.model.stall("pods")
    for pod in started.cache.pods.views():
        started.cache.pods.remove_not_found(pod.namespace, pod.name)
    started.run(3.0)
    assert uids(started) == before


def test_pods_bound_while_the_mirror_stalls_are_kept(operator: ModelOperator) -> None:
    operator.model.binding = False
    operator.run(2.0)
    opened = {p.uid for p in operator.model.tasks().values() if not p.gates}
    assert opened
    operator.model.stall("pods")
    operator.model.binding = True
    operator.run(9.0)
    assert opened <= uids(operator)


def test_a_node_that_is_gone_is_lost_after_an_uncached_read(started: ModelOperator) -> None:
    started.model.remove_node("b")
    started.run(3.0)
    assert started.api.calls_of("GET", "/nodes/b")
    assert all(p.node != "b" for p in started.model.tasks().values())


def test_a_cordon_that_is_over_removes_no_task(started: ModelOperator) -> None:
    """With two nodes no one takes the successor of a replica."""
    model = started.model
    model.remove_node("c")
    started.run(10.0)
    assert set(model.query_states().values()) == {"Live"}
    cordon = {cordoned: replace(model.nodes["a"], cordoned=cordoned) for cordoned in (True, False)}
    model.nodes["a"] = replace(cordon[True], version=model.next_version())
    started.run(SUCCESSOR_WITHOUT_NODE_S - 5.0, step_s=2.5)
    replicated = {p.name for p in model.tasks().values() if p.node == "a" and "alarms" in p.name}
    model.stall("nodes")
    model.nodes["a"] = replace(cordon[False], version=model.next_version())
    started.run(10.0)
    assert replicated
    assert replicated <= {p.name for p in model.tasks().values() if not p.terminating}


def test_what_cannot_be_read_is_not_deleted(started: ModelOperator) -> None:
    before = uids(started)
    started.api.errors = [ApiError("GET", "/nodes/", 500)]
    started.model.remove_node("b")
    started.run(3.0)
    assert uids(started) == before
    degraded = started.model.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ReadFailed")
    assert "/nodes/b cannot be read: 500" in degraded["message"]
    assert set(started.model.query_states().values()) == {"Unknown"}
    started.api.errors.clear()
    started.run(3.0)
    assert all(p.node != "b" for p in started.model.tasks().values())
    assert started.model.condition("Degraded")["status"] == "False"
    assert started.model.status()["recovery"]["history"][0]["lostNodes"] == ["b"]


def test_a_silent_node_is_quarantined_despite_an_unreadable_pod(started: ModelOperator) -> None:
    model = started.model
    node = next(n for n in "abc" if n != model.coordinator().node)
    victim = next(p for p in model.tasks().values() if p.node == node)
    raw = model.raw_pods[victim.name]
    raw["metadata"] |= {
        "deletionTimestamp": rfc3339(model.now),
        "resourceVersion": str(model.next_version()),
    }
    # Else the pod's replacement may go there, and the model starts it on a frozen node too.
    model.nodes[node] = replace(model.nodes[node], cordoned=True)
    started.api.errors = [ApiError("GET", f"/pods/{victim.name}", 500)]
    model.kill_node_still_ready(node)
    started.run(5.0)
    assert started.model.nodes[node].uid in started.cache.snapshot().quarantined


def test_an_api_server_without_responses_costs_one_timeout(started: ModelOperator) -> None:
    for name in "ab":
        started.model.remove_node(name)
    started.deliver()
    decisions = reconcile_all(started.snapshot(), started.model.now, started.model.settings)
    called: list[str] = []
    now = [0.0]

    def hang(method: str, url: str, *_: Any, **__: Any) -> Any:
        called.append(url)
        now[0] += 5.0
        raise ReadTimeoutError(None, url, "timed out")  # type: ignore[arg-type]

    started.api.call_api = hang  # type: ignore[method-assign]
    uncached = UncachedCheck(started.api, started.cache, max_reads=1, monotonic=lambda: now[0])
    why = uncached.unconfirmed(decisions, started.snapshot())
    assert "does not respond" in why["default/flights"]
    assert len(called) == 1


@pytest.fixture
def two(started: ModelOperator) -> ModelOperator:
    """Two topologies that run, and have both lost node b."""
    for name in "de":
        started.model.add_node(name)
    started.model.add_topology("second", flights_spec())
    started.run(12.0)
    assert started.model.status("second")["phase"] == "Running"
    started.model.remove_node("b")
    return started


class HangingReads:
    """Reads of the pods of one topology get no response until released."""

    def __init__(self, operator: ModelOperator, topology: str) -> None:
        self.called = 0
        self.released = threading.Event()
        call = operator.api.call_api

        def call_api(method: str, url: str, *args: Any, **how: Any) -> Any:
            if method == "GET" and url.endswith(f"%3D{topology}"):
                self.called += 1
                self.released.wait(10.0)
                raise ReadTimeoutError(None, url, "timed out")  # type: ignore[arg-type]
            return call(method, url, *args, **how)

        operator.api.call_api = call_api  # type: ignore[method-assign]


def nodes_of(operator: ModelOperator, topology: str) -> set[str | None]:
    return {p.node for p in operator.model.tasks(topology).values()}


def test_a_read_that_times_out_postpones_its_topology_alone(two: ModelOperator) -> None:
    HangingReads(two, "flights").released.set()
    two.run(3.0)
    assert "b" in nodes_of(two, "flights")
    assert "b" not in nodes_of(two, "second")
    assert two.model.condition("Degraded", "flights")["reason"] == "ReadFailed"


def test_a_read_that_hangs_delays_no_other_topology(two: ModelOperator) -> None:
    reads = HangingReads(two, "flights")
    two.run(3.0)
    assert "b" not in nodes_of(two, "second")
    assert reads.called == 1, "it is not repeated while it hangs"
    assert two.model.condition("Degraded", "flights")["reason"] == "ReadFailed"
    reads.released.set()


def test_a_pod_that_changes_after_the_decision_is_not_deleted(started: ModelOperator) -> None:
    started.model.remove_node("b")
    started.deliver()
    decisions = reconcile_all(started.snapshot(), started.model.now, started.model.settings)
    for raw in started.model.raw_pods.values():
        raw["metadata"]["resourceVersion"] = str(started.model.next_version())
    before = uids(started)
    started.executor.run(decisions)
    assert before <= uids(started)


def test_a_first_start_whose_creates_fail_is_no_recovery(operator: ModelOperator) -> None:
    operator.api.errors = [ApiError("POST", "/pods", 500)]
    operator.run(5.0)
    assert operator.model.status()["phase"] == "Starting"
    operator.api.errors.clear()
    operator.run(60.0, step_s=2.0)
    status = operator.model.status()
    assert status["phase"] == "Running"
    assert "recovery" not in status
    incarnations = {s["slot"]: s["incarnation"] for s in status["slots"]}
    # It may have been created, and have ended, each time.
    assert incarnations.pop(names.COORDINATOR_KEY) == 4
    assert set(incarnations.values()) == {1}


def test_a_pod_that_cannot_be_deleted_delays_no_replacement(operator: ModelOperator) -> None:
    operator.run(10.0)
    model, node = operator.model, operator.model.coordinator().node or ""
    old = {p.name for p in model.tasks().values() if p.node == node}
    kept = min(old)
    operator.api.errors = [ApiError("DELETE", f"/pods/{kept}", 403)]
    model.kill_node_until_not_ready(node)
    operator.run(20.0)
    assert old & set(model.tasks()) == {kept}
    assert model.status()["redundancy"] == "8/8"
    assert 3 <= len(operator.api.calls_of("DELETE", kept)) <= 12, "with back-off"


def test_replacements_start_before_clean_up(operator: ModelOperator) -> None:
    operator.run(10.0)
    operator.model.kill_node_until_not_ready(operator.model.coordinator().node or "")
    operator.api.calls.clear()
    operator.run(5.0)
    created, deleted = (
        operator.api.calls_of("POST", "/pods"),
        operator.api.calls_of("DELETE", "/pods/"),
    )
    assert len(created) == len(deleted) > 1
    before = operator.api.calls[: operator.api.calls.index(deleted[0])]
    assert sum(call in created for call in before) >= len(created) - 2, "those are in progress"
