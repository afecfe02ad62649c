"""Losses are assessed on evidence, and evidence has an age (docs/decisions/0027)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle_operator.cluster.model import LeaseView, ProbeResults, TopologyView
from rekindle_operator.cluster.reports import PREEXISTING_AGE_S, ReportAges
from rekindle_operator.reconcile.actions import CreatePod, DeletePod, QuarantineNode
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.recovery.losses import assess_nodes


def changes(cluster: ModelCluster) -> list[object]:
    """What a pass would make, delete, or remember as lost."""
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    return [a for a in actions if isinstance(a, CreatePod | DeletePod | QuarantineNode)]


def lost_nodes(cluster: ModelCluster) -> set[str]:
    timing = cluster.settings.timing
    return set(assess_nodes(cluster.snapshot(), cluster.now, timing).lost_nodes)


def nodes_with_two_tasks(cluster: ModelCluster) -> list[str]:
    """Without the coordinator's."""
    tasks_on: dict[str, int] = defaultdict(int)
    for pod in cluster.tasks().values():
        tasks_on[pod.node or ""] += 1
    return [n for n, tasks in tasks_on.items() if tasks > 1 and n != cluster.coordinator().node]


# --- NotReady ------------------------------------------------------------------


def test_nodes_that_are_only_called_not_ready_lose_nothing(running: ModelCluster) -> None:
    before = running.pods()
    running.turn_not_ready(*"abc")
    running.settle()
    assert {p.uid for p in running.pods()} == {p.uid for p in before}
    degraded = running.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NodesNotReady")
    assert "3 of 3 nodes are NotReady" in degraded["message"]
    assert running.event_reasons().count("NodesNotReady") == 1
    assert set(running.query_states().values()) == {"Live"}


def test_the_control_planes_problem_is_over_when_nodes_are_ready(running: ModelCluster) -> None:
    running.turn_not_ready(*"abc")
    running.settle()
    running.turn_ready(*"abc")
    running.settle()
    assert running.condition("Degraded")["status"] == "False"


def test_a_not_ready_node_with_responding_tasks_keeps_them(running: ModelCluster) -> None:
    running.turn_not_ready("b")
    assert changes(running) == []


def test_a_not_ready_node_whose_tasks_are_silent_for_a_moment_keeps_them(
    running: ModelCluster,
) -> None:
    """Its kubelet hangs, and the network loses packets."""
    (victim, *_) = nodes_with_two_tasks(running)
    running.turn_not_ready(victim)
    running.kill_node_still_ready(victim)
    snapshot, now, timing = running.snapshot(), running.now, running.settings.timing
    for silent_s, is_lost in ((1.6, False), (2.9, False), (3.1, True)):
        since = dict.fromkeys(snapshot.suspects_silent_since, now - silent_s)
        seen = replace(snapshot, suspects_silent_since=since)
        assert (victim in assess_nodes(seen, now, timing).lost_nodes) is is_lost


def test_a_node_that_dies_among_nodes_called_not_ready_is_lost(running: ModelCluster) -> None:
    (victim, *_) = nodes_with_two_tasks(running)
    running.turn_not_ready(*"abc")
    running.kill_node_still_ready(victim)
    running.pass_time(4.0)
    assert lost_nodes(running) == {victim}


def with_tasks_that_never_started(running: ModelCluster, kubelets_respond: bool) -> str:
    """Nodes died long ago, and their objects stay; of the others one dies before the tasks that
    were just started there respond, and one is called NotReady while its tasks respond."""
    for name in "defgh":
        running.add_node(name)
        running.kill_node_until_not_ready(name)
    running.kubelets_respond = kubelets_respond
    here = running.coordinator().node
    victim, alive = [n for n in nodes_with_two_tasks(running) if n != here]
    running.stuck |= {p.name for p in running.tasks().values() if p.node == victim}
    running.kill_node_until_not_ready(victim)
    running.suspects_silent_since.clear()
    running.turn_not_ready(alive)
    running.pass_time(1.0)
    return victim


@pytest.mark.parametrize("kubelets_respond", [True, False])
def test_one_task_that_responds_keeps_no_other_node(
    running: ModelCluster, kubelets_respond: bool
) -> None:
    victim = with_tasks_that_never_started(running, kubelets_respond)
    assert lost_nodes(running) & set("abc") == {victim}
    running.settle()
    assert not [p for p in running.tasks().values() if p.node == victim]


def test_the_nodes_whose_tasks_respond_are_named(running: ModelCluster) -> None:
    running.turn_not_ready(*"abc")
    running.settle()
    assert "(a, b, c)" in running.condition("Degraded")["message"]


def with_an_isolated_coordinator(running: ModelCluster) -> tuple[str, ...]:
    """It gets responses only of tasks on its own node, and suspects none yet. Returns the other
    nodes."""
    here = running.coordinator().node
    for pod in running.tasks().values():
        if pod.node != here:
            running.task_reports[pod.name] = {"suspected": False, "silentSeconds": 1.6}
    return tuple(n for n in running.nodes if n != here)


def test_a_task_that_an_isolated_coordinator_does_not_hear_proves_nothing(
    running: ModelCluster,
) -> None:
    running.kubelets_respond = running.pods_respond = False
    victim, _ = with_an_isolated_coordinator(running)
    running.turn_not_ready(victim)
    running.pass_time(1.0)
    assert lost_nodes(running) == {victim}


@pytest.mark.parametrize("number", [1, 2])
def test_a_kubelet_outweighs_an_isolated_coordinator(running: ModelCluster, number: int) -> None:
    others = with_an_isolated_coordinator(running)
    running.turn_not_ready(*others[:number])
    running.pass_time(1.0)
    assert not lost_nodes(running)
    assert changes(running) == []


def test_tasks_that_start_on_nodes_called_not_ready_are_kept(running: ModelCluster) -> None:
    here = running.coordinator().node
    running.stuck |= {p.name for p in running.tasks().values() if p.node != here}
    running.turn_not_ready(*"abc")
    running.pass_time(1.0)
    assert not lost_nodes(running)


def test_a_silent_kubelet_among_nodes_whose_tasks_respond_is_lost(running: ModelCluster) -> None:
    """Its tasks had just been started, so no coordinator has heard of them."""
    here = running.coordinator().node
    victim = next(n for n in nodes_with_two_tasks(running) if n != here)
    running.stuck |= {p.name for p in running.tasks().values() if p.node == victim}
    running.turn_not_ready(*"abc")
    running.kill_node_still_ready(victim)
    running.suspects_silent_since.clear()
    running.pass_time(4.0)
    assert lost_nodes(running) == {victim}


@pytest.mark.parametrize("kubelets_respond", [True, False])
def test_most_nodes_not_ready_without_a_report_lose_none(
    running: ModelCluster, kubelets_respond: bool
) -> None:
    running.kubelets_respond = kubelets_respond
    running.reports_lost = True
    running.pass_time(5.0)
    running.settle()
    running.turn_not_ready(*"abc")
    assert changes(running) == []


def test_most_nodes_not_ready_are_lost_once_a_report_arrives(
    running: ModelCluster,
) -> None:
    running.kubelets_respond = False
    for name in "ab":
        running.kill_node_until_not_ready(name)
    running.settle()
    running.pass_time(1.0)
    running.settle()
    assert {p.node for p in running.tasks().values()} <= {"c", None}


# --- a coordinator against a kubelet ------------------------------------------


def test_a_coordinator_loses_no_node_whose_kubelet_responds(running: ModelCluster) -> None:
    """The silent tasks are replaced on other nodes; all others may still use the node."""
    (victim, *_) = nodes_with_two_tasks(running)
    reported = {p.name for p in running.tasks().values() if p.node == victim}
    for pod in running.tasks().values():
        if pod.name in reported:
            running.suspects_silent_since[pod.ref] = running.now
    running.pass_time(3.5)
    assessment = assess_nodes(running.snapshot(), running.now, running.settings.timing)
    assert not assessment.lost_nodes
    assert victim in assessment.usable_nodes
    done = changes(running)
    assert {a.name for a in done if isinstance(a, DeletePod)} == reported
    assert not [a for a in done if isinstance(a, DeletePod) and a.grace_s == 0]
    running.settle()
    assert {p.node for p in running.tasks().values()} <= set(running.nodes) - {victim}
    assert running.status()["redundancy"] == "8/8"


def test_the_last_response_of_a_kubelet_that_stopped_with_its_tasks_keeps_no_node(
    running: ModelCluster,
) -> None:
    (victim, *_) = nodes_with_two_tasks(running)
    running.kill_node_still_ready(victim)
    running.pass_time(0.2)
    snapshot = replace(
        running.snapshot(),
        kubelet_probes={
            **running.kubelet_probes(),
            running.nodes[victim].uid: ProbeResults(running.now, running.now),
        },
        report_times=dict.fromkeys(running.report_times, running.now + 2.9),
    )
    now = running.now + 2.9
    assert not assess_nodes(snapshot, now, running.settings.timing).unreachable_by_coordinator
    later = assess_nodes(snapshot, now + 0.2, running.settings.timing)
    assert later.newly_silent == {victim}


# --- the age of a report ---------------------------------------------------------


def test_the_last_report_before_reports_stop_loses_no_task(
    running: ModelCluster,
) -> None:
    (victim, *_) = nodes_with_two_tasks(running)
    for pod in running.tasks().values():
        if pod.node == victim:
            running.suspects_silent_since[pod.ref] = running.now - 1.5
    running.reports_lost = True
    for _ in range(10):
        running.pass_time(0.5)
        assert changes(running) == []


def test_a_node_that_responds_before_any_action_is_kept(
    running: ModelCluster,
) -> None:
    """What was decided was not done: the API server did not confirm it, or was unavailable."""
    (victim, *_) = nodes_with_two_tasks(running)
    running.quarantined[running.nodes[victim].uid] = running.now
    running.pass_time(1.0)
    assert changes(running) == []


@pytest.mark.parametrize(("responded_ago_s", "is_lost"), [(8.0, False), (10.5, True), (None, True)])
def test_the_first_response_ends_a_quarantine_for_good(
    running: ModelCluster, responded_ago_s: float | None, is_lost: bool
) -> None:
    """Also once nobody probes the node any more: tasks may have been placed there since."""
    now, node = running.now, next(iter(running.nodes.values()))
    at = now - responded_ago_s if responded_ago_s is not None else None
    snapshot = replace(
        running.snapshot(),
        pods=tuple(p for p in running.snapshot().pods if p.node != node.name),
        quarantined={node.uid: now - 10.0},
        kubelet_probes={node.uid: ProbeResults(now, at)},
        readiness_seen_at={},
    )
    assessment = assess_nodes(snapshot, now, running.settings.timing)
    assert (node.name in assessment.lost_nodes) == is_lost
    assert (node.name in assessment.usable_nodes) != is_lost


def test_a_silence_counts_up_to_the_last_report(running: ModelCluster) -> None:
    (victim, *_) = nodes_with_two_tasks(running)
    running.kill_node_still_ready(victim)
    running.pass_time(3.5)
    assert [a.node for a in changes(running) if isinstance(a, QuarantineNode)] == [victim]


def test_without_a_report_no_query_is_live(running: ModelCluster) -> None:
    running.reports_lost = True
    running.pass_time(2.0)
    running.settle()
    assert set(running.query_states().values()) == {"Live"}
    running.pass_time(1.0)
    running.settle()
    assert set(running.query_states().values()) == {"Unknown"}
    assert running.status()["phase"] == "Unknown"
    for kind in ("Available", "Redundant", "Consistent", "Ready"):
        assert running.condition(kind)["status"] == "Unknown", kind
    assert "no report from the coordinator since 2027" in running.condition("Ready")["message"]


def test_a_report_that_is_late_on_a_busy_machine_still_counts(running: ModelCluster) -> None:
    """No renewal of the Lease has come, and nothing is known to be lost."""
    running.reports_lost = True
    running.now += 4.0
    running.settle()
    assert set(running.query_states().values()) == {"Live"}
    assert running.condition("Ready")["status"] == "True"
    running.now += 2.5
    running.apply(reconcile(running.snapshot(), running.now))
    assert set(running.query_states().values()) == {"Unknown"}


def test_a_late_report_of_a_lost_coordinator_does_not_count(running: ModelCluster) -> None:
    running.reports_lost = True
    running.now += 3.0
    coordinator = running.coordinator()
    running.delete_pod(coordinator.name, coordinator.uid, None)
    running.apply(reconcile(running.snapshot(), running.now))
    assert set(running.query_states().values()) == {"Unknown"}


def test_a_late_report_decides_nothing(running: ModelCluster) -> None:
    running.reports_lost = True
    running.now += 4.0
    cordoned = next(p.node for p in running.tasks().values() if p.node)
    running.nodes[cordoned] = replace(running.nodes[cordoned], cordoned=True)
    assert changes(running) == []


def test_a_task_that_was_never_ready_is_starting_and_not_unknown(running: ModelCluster) -> None:
    for raw in running.raw_pods.values():
        raw["status"].pop("conditions")
    running.reports_lost = True
    running.pass_time(3.0)
    running.settle()
    assert set(running.query_states().values()) == {"Restoring"}


def test_a_query_with_replicas_that_ran_is_not_called_down_without_a_report(
    running: ModelCluster,
) -> None:
    """Its other replicas were starting when reports stopped."""
    replicas = defaultdict(list)
    for name, pod in running.tasks().items():
        assert pod.slot is not None
        replicas[pod.slot.segment, pod.slot.partition].append(name)
    for names in replicas.values():
        for name in sorted(names)[1:]:
            running.raw_pods[name]["status"].pop("conditions")
    running.reports_lost = True
    running.pass_time(3.0)
    running.settle()
    assert set(running.query_states().values()) == {"Unknown"}
    assert "QueryLost" not in running.event_reasons()


def test_an_hour_without_a_report_writes_the_status_once(running: ModelCluster) -> None:
    running.reports_lost = True
    running.pass_time(3.0)
    running.settle()
    version = running.topologies["flights"].version
    for _ in range(60):
        running.pass_time(60.0)
        running.settle()
    assert running.topologies["flights"].version == version


def test_queries_are_live_again_with_a_new_report(running: ModelCluster) -> None:
    running.reports_lost = True
    running.pass_time(10.0)
    running.settle()
    running.reports_lost = False
    running.pass_time(1.0)
    running.settle()
    assert running.status()["phase"] == "Running"
    assert "recovery" not in running.status()


def test_reports_that_are_always_late_are_ignored(running: ModelCluster) -> None:
    running.report_delay_s = 5.0
    for _ in range(12):
        running.pass_time(1.0)
        running.settle()
    assert set(running.query_states().values()) == {"Unknown"}


def test_a_recovery_does_not_end_in_unknown_states(running: ModelCluster) -> None:
    alone = running.tasks()["flights-storms-0-0-1"]  # has no partner
    running.kill_node_until_not_ready(str(alone.node))
    actions = reconcile(running.snapshot(), running.now, running.settings)
    running.apply(actions)
    running.reports_lost = True
    running.pass_time(5.0)
    running.settle()
    assert running.condition("Recovering")["status"] == "True"


# --- without a coordinator --------------------------------------------------------


@pytest.fixture
def wide(cluster: ModelCluster) -> ModelCluster:
    """Nine nodes of a task or two each."""
    for name in "abcdefghi":
        cluster.add_node(name, cpu_m=1200, memory=3 << 30)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    return cluster


def test_six_nodes_and_the_coordinator_are_lost_in_time(
    wide: ModelCluster,
) -> None:
    here = wide.coordinator().node or ""
    others = [n for n in wide.nodes if n != here and any(p.node == n for p in wide.pods())]
    victims = {here, *others[:5]}
    for node in victims:
        wide.kill_node_still_ready(node)
    wide.suspects_silent_since.clear()  # no coordinator reports their silence
    made = []
    for _ in range(8):
        wide.pass_time(0.5)
        made = [a for a in changes(wide) if isinstance(a, CreatePod)]
        if made:
            break
    assert wide.now - wide.died_at[here] <= 4.0
    used = {p.node for p in wide.tasks().values()}
    assert {a.node for a in changes(wide) if isinstance(a, QuarantineNode)} == victims & used | {
        here
    }
    assert sum(a.is_coordinator for a in made) == 1


@pytest.mark.parametrize("silent", ["kubelets", "pods"])
def test_one_signal_is_not_enough_without_reports(running: ModelCluster, silent: str) -> None:
    if silent == "kubelets":
        running.pods_respond = False
    else:
        running.kubelets_respond = False
    victim = running.coordinator().node or ""
    running.kill_node_still_ready(victim)
    running.suspects_silent_since.clear()
    for raw in running.raw_pods.values():
        if "coordinator" in raw["metadata"]["name"]:
            raw["spec"]["nodeName"] = next(n for n in running.nodes if n != victim)
    running.reports_lost = True
    for _ in range(10):
        running.pass_time(0.5)
        assert not [a for a in changes(running) if isinstance(a, QuarantineNode)]


def test_a_pod_that_responds_saves_its_node(running: ModelCluster) -> None:
    running.reports_lost = True
    (victim, *_) = nodes_with_two_tasks(running)
    responding = next(p for p in running.tasks().values() if p.node == victim)
    running.kill_node_still_ready(victim)
    running.suspects_silent_since.clear()
    for _ in range(10):
        running.pass_time(0.5)
        results = {
            **running.pod_probes(running.pods()),
            responding.uid: ProbeResults(running.now, running.now),
        }
        snapshot = replace(running.snapshot(), pod_probes=results)
        assert not assess_nodes(snapshot, running.now, running.settings.timing).lost_nodes


def test_an_isolated_operator_loses_no_node(
    running: ModelCluster,
) -> None:
    own, *others = running.nodes
    running.reports_lost = True
    for node in others:
        running.kill_node_still_ready(node)
    running.suspects_silent_since.clear()
    for _ in range(10):
        running.pass_time(0.5)
        snapshot = replace(running.snapshot(), own_node=own)
        assert not assess_nodes(snapshot, running.now, running.settings.timing).lost_nodes


# --- whatever the other signals are ---------------------------------------------

_NODES = st.frozensets(st.sampled_from("abc"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(unready=_NODES, silent_kubelets=_NODES, silent_pods=_NODES, age_s=st.floats(0, 2.4))
def test_a_node_with_a_responding_task_is_never_lost(
    running: ModelCluster,
    unready: frozenset[str],
    silent_kubelets: frozenset[str],
    silent_pods: frozenset[str],
    age_s: float,
) -> None:
    now = running.now + age_s
    long_ago = ProbeResults(now, now - 20, unanswered_since=now - 20)
    kubelets = {
        node.uid: long_ago if name in silent_kubelets else ProbeResults(now, now)
        for name, node in running.nodes.items()
    }
    pods = {
        p.uid: long_ago if p.node in silent_pods else ProbeResults(now, now) for p in running.pods()
    }
    nodes = tuple(replace(n, ready=n.name not in unready) for n in running.nodes.values())
    snapshot = replace(running.snapshot(), nodes=nodes, kubelet_probes=kubelets, pod_probes=pods)
    assert not assess_nodes(snapshot, now, running.settings.timing).lost_nodes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(silent=st.frozensets(st.integers(0, 7)), age_s=st.floats(2.6, 3600), unready=_NODES)
def test_an_old_report_loses_no_node_whose_kubelet_responds(
    running: ModelCluster, silent: frozenset[int], age_s: float, unready: frozenset[str]
) -> None:
    """However many tasks it calls silent, and whatever Kubernetes thinks of the nodes."""
    pods = sorted(running.tasks().values(), key=lambda p: p.name)
    now = running.now + age_s
    responding = ProbeResults(now, now)
    nodes = tuple(replace(n, ready=n.name not in unready) for n in running.nodes.values())
    snapshot = replace(
        running.snapshot(),
        nodes=nodes,
        suspects_silent_since={pods[i].ref: running.now - 1.5 for i in silent},
        kubelet_probes={n.uid: responding for n in nodes},
        pod_probes={p.uid: responding for p in pods},
    )
    assert not assess_nodes(snapshot, now, running.settings.timing).lost_nodes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(silent=st.frozensets(st.integers(0, 7)), for_s=st.floats(0, 60), ago_s=st.floats(0, 2.9))
def test_no_report_loses_a_node_whose_kubelet_responds(
    running: ModelCluster, silent: frozenset[int], for_s: float, ago_s: float
) -> None:
    pods = sorted(running.tasks().values(), key=lambda p: p.name)
    now = running.now
    snapshot = replace(
        running.snapshot(),
        suspects_silent_since={pods[i].ref: now - for_s for i in silent},
        quarantined=dict.fromkeys((n.uid for n in running.nodes.values()), now - 10.0),
        kubelet_probes={n.uid: ProbeResults(now, now - ago_s) for n in running.nodes.values()},
    )
    assessment = assess_nodes(snapshot, now, running.settings.timing)
    assert not assessment.lost_nodes
    assert assessment.usable_nodes.keys() == running.nodes.keys()


# --- whose report it is ------------------------------------------------------------


def topology(fence: int, report: int | None, version: int = 1) -> TopologyView:
    status = {"dataPlane": {"fence": fence, **({"report": report} if report else {})}}
    return TopologyView(
        "default",
        "t",
        "uid",
        version,
        generation=1,
        creation_timestamp="",
        deleting=False,
        spec={},
        status=status,
    )


def lease(holder: int, report: int | None, seen_at: float) -> LeaseView:
    """`report`: the number of the report that it names."""
    return LeaseView("default", "t-coordinator", 1, str(holder), seen_at, report_number=report)


@pytest.mark.parametrize(
    ("holder", "named", "as_of"),
    [
        (2, 7, 5.0),
        (2, 8, 0.0),  # the watch of topologies is behind
        (2, -1, 0.0),  # the newest report could not be written
        (3, 7, 0.0),  # its successor
        (2, None, 5.0),  # of an earlier release
    ],
)
def test_a_lease_confirms_only_the_report_that_it_names(
    holder: int, named: int | None, as_of: float
) -> None:
    ages, view = watching(), topology(fence=2, report=7)
    ages.observe(view, now=0.0)
    assert ages.as_of([view], [lease(holder, named, 5.0)]) == {"uid": as_of}


def watching() -> ReportAges:
    """Of a process that was there before the first report."""
    ages = ReportAges()
    ages.observe(replace(topology(0, None), status={}), now=-1.0)
    return ages


def test_a_preexisting_report_proves_nothing() -> None:
    ages, view, now = ReportAges(), topology(2, 7), 1000.0
    ages.observe(view, now)
    stale = {"uid": now - PREEXISTING_AGE_S}
    assert ages.as_of([view], []) == stale
    assert ages.as_of([view], [lease(2, 7, now)]) == stale, "the Lease was found as well"
    assert ages.as_of([view], [lease(2, 7, now + 1.0)]) == stale, "it is the same version"
    renewed = replace(lease(2, 7, now + 2.0), version=2)
    assert ages.as_of([view], [renewed]) == {"uid": now + 2.0}


def test_a_report_that_changes_after_the_start_is_fresh() -> None:
    ages = ReportAges()
    ages.observe(topology(2, 7), now=1000.0)
    ages.observe(topology(2, 8, version=2), now=1003.0)
    assert ages.as_of([], []) == {"uid": 1003.0}


def test_a_report_that_was_removed_proves_nothing() -> None:
    ages, view = watching(), topology(2, 7)
    ages.observe(view, now=0.0)
    removed = replace(view, status={}, version=2)
    ages.observe(removed, now=4.0)
    stale = {"uid": 4.0 - PREEXISTING_AGE_S}
    assert ages.as_of([removed], [lease(2, 7, 5.0)]) == stale, "its Lease confirms no other"
    ages.observe(replace(removed, version=3), now=6.0)
    assert ages.as_of([removed], []) == stale
    ages.observe(topology(2, 8, version=4), now=8.0)
    assert ages.as_of([], []) == {"uid": 8.0}


def test_a_coordinator_whose_pod_is_gone_and_has_a_successor_confirms_nothing_more() -> None:
    """Cut off from some nodes, it would report their tasks as silent."""
    ages, view = watching(), topology(2, 7)
    ages.observe(view, now=0.0)
    assert ages.as_of([view], [lease(2, 7, 4.0)], {"uid": {2}}) == {"uid": 4.0}
    drained = ages.as_of([view], [lease(2, 7, 5.0)], {"uid": {2, 3}})
    assert drained == {"uid": 5.0}, "it goes on until the other one takes over"
    assert ages.as_of([view], [lease(2, 7, 7.0)], {"uid": {3}}) == {"uid": 5.0}
    ages.observe(topology(2, 8, version=2), now=8.0)
    assert ages.as_of([view], [], {"uid": {3}}) == {"uid": 5.0}
    assert ages.as_of([view], [], {"uid": set()}) == {"uid": 5.0}, "the successor's is gone, too"
    assert ages.as_of([view], [], {"uid": {4}}) == {"uid": 5.0}
    ages.observe(topology(4, 1, version=3), now=9.0)
    assert ages.as_of([view], [], {"uid": {4}}) == {"uid": 9.0}
    ages.forget("uid")
    ages.observe(topology(1, 1), now=10.0)
    assert ages.as_of([view], [], {"uid": {1}})["uid"] <= 10.0, "another resource of this uid"


def test_a_report_that_is_read_again_is_not_fresher() -> None:
    ages = watching()
    ages.observe(topology(2, 7), now=0.0)
    ages.observe(topology(2, 7, version=2), now=4.0)
    assert ages.as_of([], []) == {"uid": 0.0}
    ages.observe(topology(2, 8, version=3), now=6.0)
    assert ages.as_of([], []) == {"uid": 6.0}
    ages.forget("uid")
    assert ages.as_of([], []) == {}
