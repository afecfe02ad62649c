"""Moves to emptier nodes: `spec.recovery.rebalance`, on the model cluster."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from hypothesis import example, given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.convert import required_node
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod, OpenGate
from rekindle_operator.reconcile.core import reconcile
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build
from rekindle_testing.fixtures.crd import undeclared_in_status

pytestmark = pytest.mark.simulated

STEP_S = 10.0
SETTLED_S = 70.0
LONG_S = 900.0
LONG_STEP_S = 30.0
"""Between passes while nothing is to happen, or no test looks at the time when it happens."""


def rebalanced_spec() -> dict[str, Any]:
    return flights_spec() | {"recovery": {"rebalance": True}}


@copy_of_one_build
def recovered() -> ModelCluster:
    """Three of five nodes were lost, and are back since now."""
    made = ModelCluster()
    made.add_topology("flights", rebalanced_spec())
    for name in "abcde":
        made.add_node(name)
    made.settle()
    for name in "cde":
        made.kill_node_until_not_ready(name)
    made.settle()
    made.pass_time(SETTLED_S)
    made.settle()
    assert made.status()["phase"] == "Running"
    for name in "cde":
        made.add_node(name)
    made.settle()
    return made


@pytest.fixture
def packed() -> ModelCluster:
    return recovered()


def passes(cluster: ModelCluster, seconds: float, step_s: float = STEP_S) -> Iterator[list[Action]]:
    """The actions of each pass, before they are done, while time passes."""
    for _ in range(int(seconds / step_s)):
        for _ in range(60):
            actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
            if not actions and not cluster.kubelets_and_scheduler():
                break
            yield actions
            cluster.apply(actions)
            cluster.kubelets_and_scheduler()
        else:
            raise AssertionError("does not converge")
        cluster.pass_time(step_s)


def wait(cluster: ModelCluster, seconds: float, step_s: float = STEP_S) -> list[Action]:
    """All actions. No query leaves `Live`."""
    done = []
    for actions in passes(cluster, seconds, step_s):
        assert set(cluster.query_states().values()) == {"Live"}
        done += actions
    return done


def wait_any(cluster: ModelCluster, seconds: float, step_s: float = STEP_S) -> list[Action]:
    return [action for actions in passes(cluster, seconds, step_s) for action in actions]


def created(actions: list[Action]) -> list[str]:
    return [a.name for a in actions if isinstance(a, CreatePod)]


def slow_successors(cluster: ModelCluster, **report: Any) -> None:
    """All successors that are still to be created report this, and are not live."""
    for pod in cluster.tasks().values():
        assert pod.slot is not None
        other = pod.slot.alternate.replica
        for incarnation in range(1, 4):
            base = f"flights-{pod.segment_name}-{pod.slot.partition}-{other}"
            cluster.task_reports[f"{base}-{incarnation}"] = {"phase": "CatchingUp", **report}
    cluster.task_reports = {
        name: report
        for name, report in cluster.task_reports.items()
        if name not in cluster.raw_pods
    }


def begin(cluster: ModelCluster, **report: Any) -> PodView:
    """Wait until a move has begun. Returns its successor, which has a node and reports this."""
    slow_successors(cluster, **report)
    wait(cluster, SETTLED_S)
    (found,) = (p for p in cluster.tasks().values() if p.replaces)
    assert found.node is not None
    return found


def reasons(cluster: ModelCluster) -> list[str]:
    return [r for r in cluster.event_reasons() if r.startswith(("Rebalanc", "Moving"))]


def tasks_by_node(cluster: ModelCluster) -> list[int]:
    return sorted(Counter(p.node for p in cluster.tasks().values()).values())


def cordon(cluster: ModelCluster, node: str, cordoned: bool = True) -> None:
    version = cluster.next_version()
    cluster.nodes[node] = replace(cluster.nodes[node], cordoned=cordoned, version=version)


def test_tasks_spread_over_nodes_that_have_come_back(packed: ModelCluster) -> None:
    assert tasks_by_node(packed) == [4, 4]
    for actions in passes(packed, LONG_S, LONG_STEP_S):
        assert set(packed.query_states().values()) == {"Live"}
        assert len(packed.tasks()) - sum(isinstance(a, DeletePod) for a in actions) <= 9
    assert tasks_by_node(packed) == [1, 1, 2, 2, 2]
    assert packed.status()["redundancy"] == "8/8"
    assert "rebalancing" not in packed.status()
    assert reasons(packed) == ["Rebalancing", "Rebalanced"] * 4
    assert not wait(packed, LONG_S, LONG_STEP_S)


def test_without_the_field_nothing_moves(packed: ModelCluster) -> None:
    packed.edit("flights", recovery={})
    assert not created(wait(packed, 3 * SETTLED_S))


def test_tasks_and_nodes_settle_before_each_move(packed: ModelCluster) -> None:
    settle_s, began_at = packed.settings.timing.rebalance_settle_s, packed.now
    wait(packed, LONG_S)
    times = sorted(p.created_at for p in packed.tasks().values() if p.replaces)
    assert len(times) == 4
    assert all(b - a >= settle_s for a, b in itertools.pairwise([began_at, *times]))


def test_a_task_stays_until_its_successor_is_live(packed: ModelCluster) -> None:
    successor = begin(packed)
    wait(packed, 2 * SETTLED_S)
    assert {successor.name, successor.replaces} <= packed.tasks().keys()
    entry = packed.status()["rebalancing"]
    assert entry["from"] == packed.tasks()[successor.replaces].node
    assert entry["to"] == successor.node
    assert undeclared_in_status(packed.status()) == []
    packed.task_reports.clear()
    wait(packed, STEP_S)
    assert successor.name in packed.tasks()
    assert successor.replaces not in packed.tasks()


def test_an_operator_that_starts_goes_on_with_the_move(packed: ModelCluster) -> None:
    """All that one knows is in the cluster: a snapshot has nothing else."""
    successor = begin(packed)
    packed.uncreated_pods = packed.uncreated_pods.without_topology("uid-flights")
    packed.unsuitable = type(packed.unsuitable)({})
    packed.phases, packed.failing, packed.creating_containers = {}, {}, {}
    assert not created(wait(packed, SETTLED_S))
    packed.task_reports.clear()
    wait(packed, STEP_S)
    assert successor.replaces not in packed.tasks()
    assert reasons(packed)[-1] == "Rebalanced"


def _drain_another_node(cluster: ModelCluster, successor: PodView) -> None:
    source = cluster.tasks()[successor.replaces].node
    cordon(cluster, next(n for n in "ab" if n != source))


def _drain_the_target(cluster: ModelCluster, successor: PodView) -> None:
    cordon(cluster, successor.node or "")


def _lose_the_target(cluster: ModelCluster, successor: PodView) -> None:
    cluster.kill_node_until_not_ready(successor.node or "")


def _lose_another_task(cluster: ModelCluster, successor: PodView) -> None:
    source = cluster.tasks()[successor.replaces].node
    lost = next(p for p in cluster.tasks().values() if p.node not in (source, successor.node))
    del cluster.raw_pods[lost.name]


def _switch_off(cluster: ModelCluster, successor: PodView) -> None:
    cluster.edit("flights", recovery={})


def _take_too_long(cluster: ModelCluster, successor: PodView) -> None:
    cluster.pass_time(cluster.settings.timing.rebalance_timeout_s)


def _query_is_behind(cluster: ModelCluster, successor: PodView) -> None:
    cluster.lags_s = {"storm-watch": 60.0}
    cluster.settle()


@pytest.mark.parametrize(
    "trouble",
    [
        _drain_another_node,
        _drain_the_target,
        _lose_the_target,
        _lose_another_task,
        _switch_off,
        _take_too_long,
        _query_is_behind,
    ],
)
def test_the_task_stays_if_there_is_trouble(packed: ModelCluster, trouble: Any) -> None:
    successor = begin(packed)
    trouble(packed, successor)
    packed.settle()
    assert successor.name not in packed.tasks()
    assert successor.replaces in packed.tasks()
    assert packed.status()["rebalancing"]["message"]
    assert undeclared_in_status(packed.status()) == []
    assert {"Rebalancing", "RebalancingFailed"} <= set(reasons(packed))


def test_a_move_that_failed_is_not_tried_again_at_once(packed: ModelCluster) -> None:
    _take_too_long(packed, begin(packed))
    packed.settle()
    wait_s = 6 * packed.settings.timing.rebalance_timeout_s
    assert not created(wait(packed, wait_s - LONG_STEP_S, LONG_STEP_S))
    assert created(wait(packed, SETTLED_S + LONG_STEP_S))


def test_the_successor_of_a_task_that_is_lost_takes_its_place(packed: ModelCluster) -> None:
    successor = begin(packed)
    source = packed.tasks()[successor.replaces].node
    packed.kill_node_until_not_ready(source or "")
    packed.settle()
    assert successor.name in packed.tasks()
    packed.task_reports.clear()
    packed.settle()
    assert successor.name in packed.tasks()
    assert set(packed.query_states().values()) == {"Live"}
    assert packed.status()["redundancy"] == "8/8"


def test_a_drain_of_the_node_goes_on_with_the_successor(packed: ModelCluster) -> None:
    successor = begin(packed)
    cordon(packed, packed.tasks()[successor.replaces].node or "")
    packed.settle()
    assert successor.name in packed.tasks()
    packed.task_reports.clear()
    wait(packed, 2 * STEP_S)
    assert successor.name in packed.tasks()
    assert successor.replaces not in packed.tasks()


def _begin_without_node(cluster: ModelCluster) -> PodView:
    """The successor, gated: another pod has taken its node."""
    for actions in passes(cluster, 2 * SETTLED_S):
        if new := [a for a in actions if isinstance(a, CreatePod)]:
            node = required_node(new[0].manifest["spec"]["affinity"]) or ""
            small = replace(cluster.nodes[node].allocatable, cpu_m=100)
            cluster.nodes[node] = replace(cluster.nodes[node], allocatable=small)
            break
    cluster.apply(actions)
    cluster.settle()
    (found,) = (p for p in cluster.tasks().values() if p.replaces)
    assert names.GATE in found.gates
    return found


def test_the_task_stays_if_the_node_does_not_take_its_successor(packed: ModelCluster) -> None:
    successor = _begin_without_node(packed)
    done = wait(packed, SETTLED_S)
    assert not [a for a in done if isinstance(a, OpenGate)]
    assert successor.name not in packed.tasks()
    assert successor.replaces in packed.tasks()
    assert "a drain of node" not in packed.condition("Valid")["message"], "no drain waits"


@pytest.mark.parametrize("how", ["lost", "drained", "deleted"])
def test_a_successor_without_a_node_is_made_anew_for_any_node(
    packed: ModelCluster, how: str
) -> None:
    """It requires the node that it was to move to."""
    successor = _begin_without_node(packed)
    old = packed.tasks()[successor.replaces]
    match how:
        case "lost":
            packed.kill_node_until_not_ready(old.node or "")
        case "drained":
            cordon(packed, old.node or "")
        case _:
            del packed.raw_pods[old.name]
    packed.settle()
    packed.pass_time(STEP_S)
    packed.settle()
    assert successor.name not in packed.tasks()
    assert packed.status()["redundancy"] == "8/8"
    assert set(packed.query_states().values()) == {"Live"}


def test_nothing_moves_while_another_topology_waits(packed: ModelCluster) -> None:
    large = flights_spec() | {"resources": {"requests": {"cpu": "3800m", "memory": "1Gi"}}}
    packed.add_topology("larger", large)
    done = wait_any(packed, 3 * SETTLED_S)
    assert not [n for n in created(done) if n.startswith("flights")]


def test_a_refused_successor_is_tried_again_later(packed: ModelCluster) -> None:
    packed.quota = len(packed.raw_pods)
    done = wait_any(packed, 3 * SETTLED_S)
    assert len(set(created(done))) == 1
    assert reasons(packed) == ["Rebalancing", "RebalancingFailed"]
    packed.quota = None
    wait(packed, packed.settings.timing.rebalance_retry_s)
    assert reasons(packed)[-2:] == ["Rebalancing", "Rebalanced"]


def test_a_node_that_refuses_the_successor_is_avoided(packed: ModelCluster) -> None:
    packed.refused_by_kubelets = "alarms"
    wait(packed, 2 * packed.settings.timing.rebalance_retry_s)
    failed = [e.note.partition(":")[0] for e in packed.events if e.reason == "RebalancingFailed"]
    assert len(failed) == len(set(failed)) == 2
    assert set(packed.query_states().values()) == {"Live"}


_NODES = st.sampled_from("abcde")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cordon"), _NODES),
        st.tuples(st.just("uncordon"), _NODES),
        st.tuples(st.just("kill"), _NODES),
        st.tuples(st.just("return"), _NODES),
        st.tuples(st.just("slow"), st.sampled_from(["Restoring", "CatchingUp"])),
        st.tuples(st.just("fast"), st.none()),
        st.tuples(st.just("bind"), st.booleans()),
        st.tuples(st.just("silence"), st.booleans()),
        st.tuples(st.just("switch"), st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from([STEP_S, SETTLED_S, 3 * SETTLED_S])),
    ),
    max_size=8,
)


def _do(cluster: ModelCluster, step: tuple[str, Any]) -> Iterator[list[Action]]:
    match step:
        case ("cordon", node):
            cordon(cluster, node)
        case ("uncordon", node):
            cordon(cluster, node, cordoned=False)
        case ("kill", node):
            cluster.kill_node_until_not_ready(node)
        case ("return", node) if node in cluster.dead:
            cluster.add_node(node)
        case ("slow", phase):
            slow_successors(cluster, phase=phase)
        case ("fast", _):
            cluster.task_reports.clear()
        case ("bind", value):
            cluster.binding = value
        case ("silence", value):
            cluster.reports_lost = value
        case ("switch", value):
            cluster.edit("flights", recovery={"rebalance": value})
        case ("pass", seconds):
            yield from passes(cluster, seconds, min(seconds, SETTLED_S))
            return
    yield from passes(cluster, STEP_S)


SPREAD = [1, 1, 2, 2, 2]
"""How many tasks each node has, in the end."""


def _live(cluster: ModelCluster) -> dict[str, PodView]:
    report = cluster.status().get("dataPlane", {}).get("tasks", ())
    live = {(t["slot"], t["incarnation"]) for t in report if t["phase"] == "Live"}
    return {
        name: p
        for name, p in cluster.tasks().items()
        if p.slot is not None and (p.slot.key, p.incarnation) in live
    }


def _check(cluster: ModelCluster, actions: list[Action]) -> None:
    """No live task is deleted that is the last live one of its partition; one move at a time."""
    live = _live(cluster)
    deleted = {a.name for a in actions if isinstance(a, DeletePod)}
    stay = {
        (p.slot.segment, p.slot.partition) for n, p in live.items() if n not in deleted and p.slot
    }
    for name in deleted & live.keys():
        slot = live[name].slot
        assert slot is not None
        is_dead = live[name].node in cluster.dead
        assert is_dead or (slot.segment, slot.partition) in stay, f"{name} is deleted"
    pods = cluster.tasks()
    moving = [p for p in pods.values() if p.replaces in pods and not p.terminating]
    assert len([p for p in moving if p.name not in deleted and p.replaces not in deleted]) <= 1


@given(steps=_STEPS)
@example(steps=[("slow", "Restoring"), ("pass", 70.0), ("pass", 210.0), ("cordon", "a")])
def test_after_any_history_tasks_are_spread_and_none_was_lost_by_a_move(steps: Any) -> None:
    cluster = recovered()
    for step in steps:
        for actions in _do(cluster, step):
            _check(cluster, actions)
    _end_all_trouble(cluster)
    # After a move that took long and failed, the next one waits for six times as long.
    timing = cluster.settings.timing
    until = cluster.now + timing.rebalance_retry_s + LONG_S + 6 * timing.rebalance_timeout_s
    is_spread = False
    while not is_spread and cluster.now < until:
        for actions in passes(cluster, SETTLED_S, SETTLED_S):
            _check(cluster, actions)
        is_spread = tasks_by_node(cluster) == SPREAD and "rebalancing" not in cluster.status()
    assert is_spread
    assert cluster.status()["redundancy"] == "8/8"
    assert set(cluster.query_states().values()) == {"Live"}
    assert not wait(cluster, 3 * SETTLED_S, SETTLED_S)


def _end_all_trouble(cluster: ModelCluster) -> None:
    cluster.task_reports.clear()
    cluster.binding = True
    cluster.reports_lost = False
    cluster.edit("flights", recovery={"rebalance": True})
    for node in "abcde":
        cordon(cluster, node, cordoned=False)
        if node in cluster.dead:
            cluster.add_node(node)


def test_two_topologies_spread_out_and_come_to_rest() -> None:
    cluster = ModelCluster()
    for name in ("flights", "others"):
        cluster.add_topology(name, rebalanced_spec())
    for node in "ab":
        cluster.add_node(node)
    cluster.settle()
    for node in "cd":
        cluster.add_node(node)
    moves = [
        n for n in created(wait_any(cluster, 2 * LONG_S, LONG_STEP_S)) if "coordinator" not in n
    ]
    assert len(moves) <= 16 + 10, "sixteen tasks at the start, and at most ten moves"
    both = [*cluster.tasks("flights").values(), *cluster.tasks("others").values()]
    assert sorted(Counter(p.node for p in both).values()) == [4, 4, 4, 4]
    assert not wait_any(cluster, LONG_S / 2, LONG_STEP_S)
