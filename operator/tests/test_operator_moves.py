"""Planned moves: what happens to tasks and coordinators on a node that is cordoned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec, with_replicas
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import (
    Action,
    CreatePod,
    DeletePod,
    EnsureObject,
    OpenGate,
)
from rekindle_operator.reconcile.core import reconcile, reconcile_all
from rekindle_operator.reconcile.moves import LATE_S, MOVES_AT_ONCE, SUCCESSOR_WITHOUT_NODE_S
from rekindle_operator.reconcile.schedule import ScheduledAction, schedule
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build

pytestmark = pytest.mark.simulated

SINGLE, SUCCESSOR = "flights-storms-0-0-1", "flights-storms-0-8-1"
"""The only task of its segment, and the successor that it gets in a move: 8 is the other number of
replica 0 (`Slot.alternate`)."""


def cordon(cluster: ModelCluster, *nodes: str, cordoned: bool = True) -> None:
    for node in nodes:
        version = cluster.next_version()
        cluster.nodes[node] = replace(cluster.nodes[node], cordoned=cordoned, version=version)


def passes(cluster: ModelCluster) -> Iterator[list[Action]]:
    """The actions of each pass, before they are done, until there are none."""
    for _ in range(60):
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        if not actions and not cluster.kubelets_and_scheduler():
            return
        yield actions
        cluster.apply(actions)
        cluster.kubelets_and_scheduler()
    raise AssertionError("does not converge")


def node_of_single(cluster: ModelCluster) -> str:
    node = cluster.tasks()[SINGLE].node
    assert node is not None
    return node


def gated(cluster: ModelCluster) -> list[PodView]:
    return [p for p in cluster.tasks().values() if names.GATE in p.gates]


def is_live(cluster: ModelCluster, pod: PodView) -> bool:
    """Also if it is suspected."""
    return any(
        (t["slot"], t["incarnation"], t["phase"])
        == (pod.slot.key if pod.slot else "", pod.incarnation, "Live")
        for t in cluster.status(pod.topology or "")["dataPlane"]["tasks"]
    )


def has_written(cluster: ModelCluster, pod: PodView) -> bool:
    """Whether its sinks are as far as its log: the model reports so, unless a step has set another
    `durableEpoch`."""
    return "durableEpoch" not in cluster.task_reports.get(pod.name, {})


def test_a_cordoned_node_is_left_by_all_and_no_query_leaves_live(running: ModelCluster) -> None:
    for node in "abc":
        cordon(running, node)
        for _ in passes(running):
            assert set(running.query_states().values()) == {"Live"}
        assert not [p for p in running.tasks().values() if p.node == node]
        assert running.coordinator().node != node
        assert running.status()["redundancy"] == "8/8"
        cordon(running, node, cordoned=False)
    assert "recovery" not in running.status()


def test_a_task_stays_until_its_successor_is_live(running: ModelCluster) -> None:
    running.task_reports[SUCCESSOR] = {"phase": "CatchingUp"}
    cordon(running, node_of_single(running))
    running.settle()
    assert {SINGLE, SUCCESSOR} <= running.tasks().keys()
    running.task_reports.clear()
    running.settle()
    assert SUCCESSOR in running.tasks()
    assert SINGLE not in running.tasks()


def test_a_task_stays_until_the_sinks_of_its_successor_are_as_far(running: ModelCluster) -> None:
    running.task_reports[SINGLE] = {"durableEpoch": 100}
    running.task_reports[SUCCESSOR] = {"durableEpoch": 50}
    cordon(running, node_of_single(running))
    running.settle()
    assert SINGLE in running.tasks()
    running.task_reports[SUCCESSOR] = {"durableEpoch": 99}
    running.settle()
    assert SINGLE not in running.tasks()


@pytest.mark.parametrize(
    "report",
    [
        {"suspected": True, "silentSeconds": 2.0, "durableEpoch": 100},
        {"phase": "Waiting"},
        {"phase": "Restoring", "durableEpoch": 40},
        {"durableEpoch": None},
    ],
    ids=["suspected", "waiting", "restoring", "no durable epoch"],
)
def test_a_bad_report_does_not_replace_a_task_by_one_whose_sinks_are_behind(
    running: ModelCluster, report: dict[str, Any]
) -> None:
    running.task_reports[SINGLE] = {"stableEpoch": 101, "durableEpoch": 100}
    running.task_reports[SUCCESSOR] = {"stableEpoch": 101, "durableEpoch": 50}
    cordon(running, node_of_single(running))
    running.settle()
    running.task_reports[SINGLE] = {"stableEpoch": 101, **report}
    running.settle()
    assert SINGLE in running.tasks()
    running.task_reports[SUCCESSOR] = {"stableEpoch": 101, "durableEpoch": 100}
    running.settle()
    assert SINGLE not in running.tasks()


def test_a_successor_that_reports_no_sinks_does_not_take_over(running: ModelCluster) -> None:
    running.task_reports[SUCCESSOR] = {"durableEpoch": None}
    cordon(running, node_of_single(running))
    running.settle()
    assert {SINGLE, SUCCESSOR} <= running.tasks().keys()


def test_a_task_stays_while_its_successor_and_it_disagree(running: ModelCluster) -> None:
    running.task_reports[SUCCESSOR] = {"untrusted": True}
    node = node_of_single(running)
    cordon(running, node)
    running.settle()
    assert {SINGLE, SUCCESSOR} <= running.tasks().keys()
    running.pass_time(LATE_S + 1)
    running.settle()
    assert "replicas disagree" in running.condition("Valid")["message"]
    running.task_reports.clear()
    running.settle()
    assert SINGLE not in running.tasks()


def test_a_replica_that_an_edit_removes_stays_until_the_others_have_written(
    running: ModelCluster,
) -> None:
    alarms = [p for p in running.tasks().values() if p.segment_name == "alarms"]
    stay, go = ([p.name for p in alarms if p.slot and p.slot.replica == r] for r in (0, 1))
    running.task_reports |= {name: {"stableEpoch": 60, "durableEpoch": 50} for name in stay}
    running.task_reports |= {name: {"stableEpoch": 60, "durableEpoch": 60} for name in go}
    running.edit("flights", operators=with_replicas(1)["operators"])
    running.settle()
    assert set(go) <= running.tasks().keys()
    running.task_reports.clear()
    running.settle()
    assert not set(go) & running.tasks().keys()


def test_a_task_moves_back_and_forth_between_two_numbers(running: ModelCluster) -> None:
    found = []
    for _ in range(3):
        pod = next(p for p in running.tasks().values() if p.segment_name == "storms")
        found.append(pod.name)
        cordon(running, pod.node or "")
        running.settle()
        cordon(running, pod.node or "", cordoned=False)
        running.settle()
    assert found == [SINGLE, SUCCESSOR, "flights-storms-0-0-2"]


def test_a_moved_task_that_is_lost_is_replaced_under_its_number(running: ModelCluster) -> None:
    node = node_of_single(running)
    cordon(running, node)
    running.settle()
    cordon(running, node, cordoned=False)
    running.kill_node_until_not_ready(running.tasks()[SUCCESSOR].node or "")
    running.settle()
    assert "flights-storms-0-8-2" in running.tasks()


def test_a_successor_is_no_longer_needed_once_the_node_is_uncordoned(running: ModelCluster) -> None:
    running.task_reports[SUCCESSOR] = {"phase": "CatchingUp"}
    node = node_of_single(running)
    cordon(running, node)
    running.settle()
    cordon(running, node, cordoned=False)
    running.settle()
    assert SINGLE in running.tasks()
    assert SUCCESSOR not in running.tasks()


def test_a_successor_takes_the_place_of_a_task_that_is_lost_meanwhile(
    running: ModelCluster,
) -> None:
    running.task_reports[SUCCESSOR] = {"phase": "Restoring"}
    cordon(running, node_of_single(running))
    running.settle()
    running.kill_node_until_not_ready(node_of_single(running))
    running.settle()
    storms = [p.name for p in running.tasks().values() if p.segment_name == "storms"]
    assert storms == [SUCCESSOR]


def test_a_successor_on_a_drained_node_is_made_anew(running: ModelCluster) -> None:
    for name in (SUCCESSOR, "flights-storms-0-8-2"):
        running.task_reports[name] = {"phase": "CatchingUp"}
    cordon(running, node_of_single(running))
    running.settle()
    cordon(running, running.tasks()[SUCCESSOR].node or "")
    running.settle()
    assert {SINGLE, "flights-storms-0-8-2"} <= running.tasks().keys()


def test_only_a_few_tasks_move_at_once(running: ModelCluster) -> None:
    running.add_node("d")
    cordon(running, "a", "b")
    for pod in running.tasks().values():
        assert pod.slot is not None
        successor = pod.name.replace(f"-{pod.slot.replica}-1", f"-{pod.slot.alternate.replica}-1")
        running.task_reports[successor] = {"phase": "CatchingUp"}
    created = sum(isinstance(a, CreatePod) for actions in passes(running) for a in actions)
    assert created == MOVES_AT_ONCE + 1, "and the coordinator"


def test_a_task_without_a_node_for_its_successor_stays(running: ModelCluster) -> None:
    cordon(running, *"abc")
    running.settle()
    running.pass_time(SUCCESSOR_WITHOUT_NODE_S + 1)
    running.settle()
    message = running.condition("Valid")["message"]
    assert "flown/0/0 (successor: usable nodes: none)" in message
    assert running.event_reasons().count("Moving") == len({p.slot for p in gated(running)})
    assert set(running.query_states().values()) == {"Live"}
    assert len([p for p in running.tasks().values() if p.node is not None]) == 8


def test_a_task_with_a_live_partner_goes_when_no_node_takes_its_successor(
    running: ModelCluster,
) -> None:
    """Of two nodes: the other one has the partner already."""
    running.remove_node("c")
    running.settle()
    assert set(running.query_states().values()) == {"Live"}
    cordon(running, "a")
    for _ in range(4):
        running.settle()
        running.pass_time(SUCCESSOR_WITHOUT_NODE_S + 1)
        for _ in passes(running):
            assert running.query_states()["delay-alarms"] == "Live"
    replicated = {p.segment_name for p in running.tasks().values() if p.node == "a"}
    assert not replicated & {"flown", "alarms", "delays"}


def test_a_task_whose_partner_has_not_written_stays_without_a_node_for_its_successor(
    running: ModelCluster,
) -> None:
    running.remove_node("c")
    running.settle()
    alarms = {p.name: p for p in running.tasks().values() if p.segment_name == "alarms"}
    on_a = {name for name, p in alarms.items() if p.node == "a"}
    running.task_reports |= {
        name: {"stableEpoch": 60, "durableEpoch": 60 if name in on_a else 50} for name in alarms
    }
    cordon(running, "a")
    for _ in range(4):
        running.settle()
        running.pass_time(SUCCESSOR_WITHOUT_NODE_S + 1)
    assert on_a <= running.tasks().keys()


def test_a_drain_that_a_quota_stops_names_node_task_and_reason(running: ModelCluster) -> None:
    node = node_of_single(running)
    running.quota = 0
    cordon(running, node)
    for _ in range(6):
        running.settle()
        running.pass_time(4.0)
    message = running.condition("Valid")["message"]
    waits = f"a drain of node {node} waits for "
    assert waits in message
    assert "storms/0/0" in message
    assert "(successor: API server: exceeded quota)" in message
    notes = [e.note for e in running.events if e.reason == "DrainWaits"]
    assert [note for note in notes if waits in note and "storms/0/0" in note]
    assert len(notes) < 6, "one for each task that is found to wait"
    running.quota = None
    for _ in range(6):
        running.pass_time(31.0)
        running.settle()
    assert "waits" not in running.condition("Valid")["message"]
    assert not [p for p in running.tasks().values() if p.node == node]


def test_a_task_with_a_live_partner_makes_room_in_a_full_quota(running: ModelCluster) -> None:
    running.quota = len(running.raw_pods)
    node = next(p for p in running.tasks().values() if p.segment_name == "alarms").node or ""
    cordon(running, node)
    for _ in range(40):
        for _ in passes(running):
            assert set(running.query_states().values()) == {"Live"}
        running.pass_time(10.0)
    assert {p.segment_name for p in running.tasks().values() if p.node == node} <= {
        "storms",
        "routes",
    }
    assert "recovery" not in running.status()
    alarms = [p for p in running.tasks().values() if p.segment_name == "alarms"]
    assert len(alarms) == 4
    assert all(p.node for p in alarms)


def left_on(cluster: ModelCluster, *nodes: str) -> set[str]:
    """Names of segments with tasks there."""
    return {p.segment_name for p in cluster.tasks().values() if p.node in nodes}


@pytest.mark.parametrize("stuck", ["refused", "unbound"])
def test_successors_that_cannot_start_keep_no_others_from_starting(
    running: ModelCluster, stuck: str
) -> None:
    for name in "def":
        running.add_node(name)
    bad = {"storms", "flown", "alarms"}
    if stuck == "refused":
        running.refused_segments |= bad
    else:
        running.unbound_segments |= bad
    cordon(running, "a", "b", "c")
    for _ in range(12):
        running.settle()
        running.pass_time(6.0)
    assert "storms" in left_on(running, "a", "b", "c")
    assert "routes" not in left_on(running, "a", "b", "c")
    assert "waits for" in running.condition("Valid")["message"]


def test_successors_that_never_get_live_keep_no_others_from_starting(
    running: ModelCluster,
) -> None:
    for name in "def":
        running.add_node(name)
    slow = ("flown-0-8", "flown-0-9", "storms-0-8", "alarms-0-8", "alarms-0-9", "alarms-1-8")
    for name, incarnation in itertools.product(slow, (1, 2)):
        running.task_reports[f"flights-{name}-{incarnation}"] = {"phase": "Restoring"}
    cordon(running, "a", "b", "c")
    for _ in range(4):
        running.settle()
        running.pass_time(LATE_S + 1)
    assert "routes" not in left_on(running, "a", "b", "c")
    message = running.condition("Valid")["message"]
    assert "(successor: it runs and does not become live)" in message


def test_not_all_successors_start_at_once_when_capacity_returns(running: ModelCluster) -> None:
    cordon(running, "a", "b", "c")
    for _ in range(8):
        running.settle()
        running.pass_time(SUCCESSOR_WITHOUT_NODE_S + 1)
    waiting = gated(running)
    assert len(waiting) > MOVES_AT_ONCE
    running.task_reports = {p.name: {"phase": "Restoring"} for p in waiting}
    for name in "def":
        running.add_node(name)
    running.settle()
    assert len([p for p in running.tasks().values() if p.node in ("d", "e", "f")]) == MOVES_AT_ONCE
    running.task_reports.clear()
    running.settle()
    assert not left_on(running, "a", "b", "c")
    assert set(running.query_states().values()) == {"Live"}


def test_a_task_that_dies_while_it_moves_is_a_recovery(running: ModelCluster) -> None:
    running.task_reports[SUCCESSOR] = {"phase": "Restoring"}
    node = node_of_single(running)
    cordon(running, node)
    running.settle()
    running.remove_node(node)
    running.settle()
    assert running.status()["phase"] == "Recovering"
    entry = running.status()["recovery"]["history"][0]
    assert entry["lostNodes"] == [node]
    assert "storm-watch" in {q["name"] for q in entry["queries"]}
    assert "NodeLost" in running.event_reasons()
    running.task_reports.clear()
    running.settle()
    assert running.status()["phase"] == "Running"


def blocking(cluster: ModelCluster, **priorities: int) -> ModelCluster:
    """A topology that runs with recovery mode Blocking."""
    spec = flights_spec() | {"recovery": {"mode": "Blocking"}}
    for query in spec["queries"]:
        query["priority"] = priorities.get(query["name"].replace("-", "_"), query["priority"])
    cluster.add_topology("flights", spec)
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    assert set(cluster.query_states().values()) == {"Live"}
    return cluster


def test_successors_without_a_node_keep_no_lost_task_from_coming_back() -> None:
    cluster = blocking(ModelCluster())
    node = node_of_single(cluster)
    cordon(cluster, *(name for name in "abc" if name != node))
    cluster.settle()
    assert gated(cluster), "of partitions whose other replica is there"
    del cluster.raw_pods[SINGLE]
    cluster.settle()
    assert cluster.tasks()["flights-storms-0-0-2"].node == node
    assert set(cluster.query_states().values()) == {"Live"}


@pytest.mark.parametrize(("storms", "routes"), [(300, 200), (200, 300)])
def test_successors_of_the_most_valuable_query_get_a_node_first(storms: int, routes: int) -> None:
    cluster = blocking(ModelCluster(), storm_watch=storms, route_report=routes)
    cordon(cluster, "a", "b", "c")
    for _ in range(6):
        cluster.settle()
        cluster.pass_time(SUCCESSOR_WITHOUT_NODE_S + 1)
    names = {p.segment_name: p.name for p in gated(cluster)}
    cluster.add_node("d", cpu_m=600)
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    opened = [a.name for a in actions if isinstance(a, OpenGate)]
    assert opened == [names["storms" if storms > routes else "routes"]]


def test_a_coordinator_works_until_the_next_one_has_its_lease(running: ModelCluster) -> None:
    old = running.coordinator()
    running.binding = False
    cordon(running, old.node or "")
    running.settle()
    coordinators = running.pods_of("flights", names.ROLE_COORDINATOR)
    assert {p.incarnation for p in coordinators} == {1, 2}
    running.pass_time(20.0)
    running.settle()
    assert {1} < {p.incarnation for p in running.pods_of("flights", names.ROLE_COORDINATOR)}
    running.binding = True
    running.settle()
    assert [p.node != old.node for p in running.pods_of("flights", names.ROLE_COORDINATOR)] == [
        True
    ]


def test_a_coordinator_stays_if_its_node_is_uncordoned_before_another_one_is_bound(
    running: ModelCluster,
) -> None:
    old = running.coordinator()
    running.binding = False
    cordon(running, old.node or "")
    running.settle()
    running.pass_time(20.0)
    running.settle()
    cordon(running, old.node or "", cordoned=False)
    for _ in range(3):
        running.settle()
        running.pass_time(5.0)
    assert [p.name for p in running.pods_of("flights", names.ROLE_COORDINATOR)] == [old.name]
    running.binding = True
    cordon(running, old.node or "")
    running.settle()
    assert running.coordinator().node not in (None, old.node)


def roll(cluster: ModelCluster) -> None:
    """Request it, with another image."""
    cluster.edit("flights", image="rekindle/pipelines:0.2.0")
    cluster.topologies["flights"] = replace(cluster.topologies["flights"], roll=True)


def test_a_roll_does_not_take_a_task_that_moves(running: ModelCluster) -> None:
    running.task_reports[SINGLE] = {"stableEpoch": 101, "durableEpoch": 100}
    running.task_reports[SUCCESSOR] = {"stableEpoch": 101, "durableEpoch": 50}
    cordon(running, node_of_single(running))
    running.settle()
    roll(running)
    running.settle()
    assert {SINGLE, SUCCESSOR} <= running.tasks().keys()
    running.task_reports.clear()
    running.settle()
    storms = [p for p in running.tasks().values() if p.segment_name == "storms"]
    assert [p.image for p in storms] == ["rekindle/pipelines:0.2.0"]


def test_a_move_that_waits_does_not_stop_a_roll(running: ModelCluster) -> None:
    running.refused_segments.add("storms")
    cordon(running, node_of_single(running))
    running.settle()
    roll(running)
    running.settle()
    outdated = {p.segment_name for p in running.tasks().values() if p.generation == 1}
    assert outdated == {"storms"}


def test_no_successor_is_created_that_could_not_read_from_running_tasks(
    running: ModelCluster,
) -> None:
    running.stream_conflict = [2, 3]
    node = node_of_single(running)
    running.pass_time(1.0)
    running.settle()
    cordon(running, node)
    running.settle()
    assert SUCCESSOR not in running.tasks()
    assert f"a drain of node {node} waits for " in running.condition("Valid")["message"]


def is_budget(action: Any) -> bool:
    return isinstance(action, EnsureObject) and action.kind == "PodDisruptionBudget"


def test_a_disruption_budget_comes_with_the_coordinator(cluster: ModelCluster) -> None:
    cluster.add_node("a")
    actions = [a for done in passes(cluster) for a in done]
    budget = next(a.manifest for a in actions if isinstance(a, EnsureObject) and is_budget(a))
    selector = budget["spec"]["selector"]["matchLabels"].items()
    for raw in cluster.raw_pods.values():
        assert selector <= raw["metadata"]["labels"].items()
    assert budget["metadata"]["ownerReferences"]


def test_nothing_waits_for_the_budget(cluster: ModelCluster) -> None:
    """An admission policy may refuse it."""
    cluster.add_node("a")
    budgets, scheduled = set[str](), list[ScheduledAction]()
    while not budgets:
        cluster.apply(s.action for s in scheduled)
        scheduled = schedule(reconcile_all(cluster.snapshot(), cluster.now))
        assert scheduled
        budgets = {s.key for s in scheduled if is_budget(s.action)}
    assert not [s for s in scheduled if budgets & set(s.after)]
    assert scheduled.index(next(s for s in scheduled if s.key in budgets)) > max(
        at for at, s in enumerate(scheduled) if isinstance(s.action, CreatePod)
    )


_NODES = st.sampled_from("abcde")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cordon"), _NODES),
        st.tuples(st.just("uncordon"), _NODES),
        st.tuples(st.just("slow"), st.sampled_from(["Restoring", "CatchingUp"])),
        st.tuples(st.just("slow sinks"), st.sampled_from([None, -9])),
        st.tuples(st.just("suspect"), st.sampled_from(["storms-0-0", "alarms-0-1", "routes-0-8"])),
        st.tuples(st.just("fast"), st.none()),
        st.tuples(st.just("bind"), st.booleans()),
        st.tuples(st.just("silence"), st.booleans()),
        st.tuples(st.just("quota"), st.booleans()),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 4.0, 70.0])),
    ),
    max_size=12,
)


def _do(cluster: ModelCluster, step: tuple[str, Any]) -> None:
    match step:
        case ("cordon", node):
            cordon(cluster, node)
        case ("uncordon", node):
            cordon(cluster, node, cordoned=False)
        case ("slow", phase):
            _report_of_next(cluster, {"phase": phase})
        case ("slow sinks", durable):
            _report_of_next(cluster, {"stableEpoch": 9, "durableEpoch": durable})
        case ("suspect", base):
            for name in cluster.tasks():
                if name.startswith(f"flights-{base}-"):
                    suspected = {"suspected": True, "silentSeconds": 2.0}
                    cluster.task_reports[name] = cluster.task_reports.get(name, {}) | suspected
        case ("fast", _):
            cluster.task_reports.clear()
        case ("bind", value):
            cluster.binding = value
        case ("quota", value):
            cluster.quota = len(cluster.raw_pods) if value else None
        case ("silence", value):
            cluster.reports_lost = value
        case ("pass", seconds):
            cluster.pass_time(seconds)


def _report_of_next(cluster: ModelCluster, report: dict[str, Any]) -> None:
    """Of pods that are still to be created."""
    for base in ("storms-0", "alarms-0", "routes-0"):
        for replica, incarnation in itertools.product((0, 1, 8, 9), range(1, 5)):
            name = f"flights-{base}-{replica}-{incarnation}"
            if name not in cluster.raw_pods:
                cluster.task_reports[name] = report


def _check_deletions(cluster: ModelCluster, actions: list[Action]) -> None:
    """No live task is deleted that is the last live one of its partition, or whose sinks are
    further than those of the others."""
    pods = {p.name: p for p in cluster.tasks().values()}
    deleted = {a.name for a in actions if isinstance(a, DeletePod)}
    for name in deleted & pods.keys():
        pod = pods[name]
        if not is_live(cluster, pod) or pod.slot is None:
            continue
        written = has_written(cluster, pod)
        others = [
            p
            for p in pods.values()
            if p.slot is not None
            and (p.slot.segment, p.slot.partition) == (pod.slot.segment, pod.slot.partition)
            and p.name not in deleted
            and not p.terminating
            and is_live(cluster, p)
            and not cluster.task_reports.get(p.name, {}).get("suspected")
            and has_written(cluster, p) >= written
        ]
        assert others, f"{name} is deleted, and no other replica can replace it"


@copy_of_one_build
def _on_five_nodes() -> ModelCluster:
    made = ModelCluster()
    made.add_topology("flights", flights_spec())
    for name in "abcde":
        made.add_node(name)
    made.settle()
    return made


@given(steps=_STEPS)
def test_no_history_of_cordons_deletes_the_last_live_replica(steps: Any) -> None:
    cluster = _on_five_nodes()
    suspected = False
    for step in steps:
        _do(cluster, step)
        reports = f"{cluster.task_reports} {cluster.status()['dataPlane']}"  # the old one, if lost
        was_suspected, suspected = suspected, "suspected" in reports
        for actions in passes(cluster):
            _check_deletions(cluster, actions)
            if not (suspected or was_suspected):
                assert not set(cluster.query_states().values()) - {"Live", "Unknown"}
    for step in (("fast", None), ("bind", True), ("silence", False), ("quota", False)):
        _do(cluster, step)
    for node in "abc":
        cordon(cluster, node, cordoned=False)
    for _ in range(3):
        cluster.pass_time(31.0)  # what was refused is tried again
        for actions in passes(cluster):
            _check_deletions(cluster, actions)
    cordoned = {n for n, node in cluster.nodes.items() if node.cordoned}
    assert not [p.name for p in cluster.tasks().values() if p.node in cordoned]
    assert cluster.status()["redundancy"] == "8/8"
    assert len(cluster.tasks()) == 8
    assert set(cluster.query_states().values()) == {"Live"}


@pytest.mark.parametrize("replica", range(8))
def test_a_replica_has_two_numbers(replica: int) -> None:
    slot = Slot("s", 0, replica)
    assert slot.alternate.alternate == slot
    assert slot.alternate.replica_index == slot.replica_index == replica


def test_a_refused_successor_takes_one_incarnation(running: ModelCluster) -> None:
    running.quota = len(running.raw_pods)
    cordon(running, node_of_single(running))
    for _ in range(4):
        running.settle()
        running.pass_time(31.0)
    assert SINGLE in running.tasks()
    running.quota = None
    running.settle()
    assert SUCCESSOR in running.tasks()
