"""Nodes are lost also while no coordinator reports: kubelet and pod are both silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import (
    NodeView,
    PodEndpoint,
    PodView,
    ProbeResults,
    Snapshot,
    TopologyView,
)
from rekindle_operator.probe import pod_responds
from rekindle_operator.recovery.kubelets import kubelets_to_probe
from rekindle_operator.recovery.losses import Loss, assess_nodes, loss_of_pod
from rekindle_operator.recovery.probed_pods import pods_to_probe
from rekindle_operator.settings import Timing

NOW = 1_800_000_000.0
TIMING = Timing()
ANSWERS = ProbeResults(sent_at=NOW - 0.1, answered_probe_at=NOW - 0.1)
SILENT = ProbeResults(sent_at=NOW - 0.2, answered_probe_at=NOW - 8.0, unanswered_since=NOW - 2.5)


def node(name: str) -> NodeView:
    amounts = ResourceAmounts.parse({"cpu": "4"})
    kubelet = PodEndpoint("127.0.0.1", 10250)
    return NodeView(
        name=name,
        uid=name,
        version=1,
        ready=True,
        readiness_changed_at=NOW - 600,
        cordoned=False,
        taints=(),
        labels={},
        allocatable=amounts,
        kubelet=kubelet,
    )


def pod(name: str, on: str) -> PodView:
    return PodView(
        namespace="default",
        name=name,
        uid=name,
        version=1,
        created_at=NOW - 600,
        phase="Running",
        node=on,
        requests=ResourceAmounts.parse({"cpu": "1"}),
        ready=True,
        was_ready=True,
        owner_uid="t",
        topology="t",
        role="task",
        ip="127.1.1.1",
    )


def world(
    kubelets: Mapping[str, ProbeResults],
    pods: Mapping[str, ProbeResults],
    report_age_s: float = 3.0,
) -> Snapshot:
    """A pod on each of the nodes `a`, `b` and `c`, of a topology without a fresh report."""
    names = ("a", "b", "c")
    topology = TopologyView(
        namespace="default",
        name="t",
        uid="t",
        version=1,
        generation=1,
        creation_timestamp="2026-01-01T00:00:00Z",
        deleting=False,
        spec={},
        status={},
    )
    return Snapshot(
        topologies=(topology,),
        nodes=tuple(node(n) for n in names),
        pods=tuple(pod(f"p{n}", n) for n in names),
        report_times={"t": NOW - report_age_s},
        kubelet_probes=kubelets,
        pod_probes={f"p{n}": results for n, results in pods.items()},
    )


def lost(snapshot: Snapshot) -> set[str]:
    return set(assess_nodes(snapshot, NOW, TIMING).lost_nodes)


ALL = dict.fromkeys("abc", ANSWERS)


def test_a_node_is_lost_when_kubelet_and_pod_are_silent() -> None:
    assert lost(world({**ALL, "a": SILENT}, {**ALL, "a": SILENT})) == {"a"}


def test_most_nodes_may_be_lost_at_once() -> None:
    dead = {"a": SILENT, "b": SILENT, "c": ANSWERS}
    assert lost(world(dead, dead)) == {"a", "b"}
    assert lost(world(dead, {"a": SILENT, "b": SILENT})) == {"a", "b"}


@pytest.mark.parametrize(
    ("kubelets", "pods"),
    [
        ({**ALL, "a": SILENT}, ALL),
        (ALL, {**ALL, "a": SILENT}),
        ({**ALL, "a": SILENT}, {"b": ANSWERS, "c": ANSWERS}),
    ],
    ids=["pod responds", "kubelet responds", "pod was never probed"],
)
def test_one_signal_is_not_enough(
    kubelets: Mapping[str, ProbeResults], pods: Mapping[str, ProbeResults]
) -> None:
    assert lost(world(kubelets, pods)) == set()


def test_an_operator_without_responses_is_isolated_itself() -> None:
    dead = dict.fromkeys("abc", SILENT)
    assert lost(world(dead, dead)) == set()


def test_a_pod_that_never_responded_is_not_silent() -> None:
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 20)
    long_ago = replace(SILENT, answered_probe_at=NOW - 90)
    for results in (never, long_ago):
        assert lost(world({**ALL, "a": SILENT}, {**ALL, "a": results})) == set()


def hanging_kubelet(results: ProbeResults) -> Snapshot:
    """Node a is NotReady, and its kubelet silent. `results`: of the probes of its pod."""
    snapshot = world({**ALL, "a": SILENT}, {**ALL, "a": results})
    nodes = tuple(replace(n, ready=n.name != "a") for n in snapshot.nodes)
    pods = tuple(
        replace(p, slot=Slot("s", index, 0), incarnation=1) for index, p in enumerate(snapshot.pods)
    )
    return replace(snapshot, nodes=nodes, pods=pods)


def with_report(snapshot: Snapshot, tasks: Mapping[str, Mapping[str, Any]]) -> Snapshot:
    """Half a second old. `tasks`: of pods, what it says of them, beside the slot."""
    slots = {p.name: p.slot.key for p in snapshot.pods if p.slot is not None}
    reports = [{"slot": slots[n], "incarnation": 1, "pod": n, **t} for n, t in tasks.items()]
    status: dict[str, Any] = {"dataPlane": {"tasks": reports}}
    topologies = tuple(replace(t, status=status) for t in snapshot.topologies)
    return replace(snapshot, topologies=topologies, report_times={"t": NOW - 0.5})


@pytest.mark.parametrize("answered_ago_s", [0.5, 1.9, 9.0])
def test_a_not_ready_node_is_kept_until_a_pod_is_silent(answered_ago_s: float) -> None:
    """Its kubelet hangs, and the coordinator is being restarted."""
    at = NOW - answered_ago_s
    for unanswered_s, is_lost in ((0.1, False), (1.8, False), (2.3, True)):
        results = ProbeResults(NOW - 0.1, at, unanswered_since=NOW - unanswered_s)
        if unanswered_s < answered_ago_s:
            assert lost(hanging_kubelet(results)) == ({"a"} if is_lost else set())


def test_the_first_report_of_a_new_coordinator_may_lack_a_response() -> None:
    """It does not wait for tasks that were never reported as ready."""
    waits = with_report(hanging_kubelet(ANSWERS), {"pa": {"phase": "Waiting"}})
    assert lost(waits) == set(), "the pod responds to the operator"
    silent = with_report(
        hanging_kubelet(ANSWERS),
        {
            "pa": {"phase": "Live", "stableEpoch": 5, "suspected": True, "silentSeconds": 1.6},
            "pb": {"phase": "Live", "stableEpoch": 5},
        },
    )
    for silent_s, is_lost in ((1.6, False), (4.0, True)):
        since = {silent.pods[0].ref: NOW - 0.5 - silent_s}
        seen = replace(silent, suspects_silent_since=since)
        assert lost(seen) == ({"a"} if is_lost else set()), "the report counts"


def test_a_pause_of_the_operator_neither_loses_nor_keeps_a_not_ready_node() -> None:
    """It resets its timers, and what it knows of reports is as old as before."""
    suspected = {"phase": "Live", "stableEpoch": 5, "suspected": True, "silentSeconds": 1.5}
    silent = ProbeResults(NOW - 0.1, NOW - 50, unanswered_since=NOW - 50)
    reported = with_report(hanging_kubelet(silent), {"pa": suspected})
    ref = reported.pods[0].ref
    for silent_s, is_lost in ((1.6, False), (4.0, True)):
        reset = replace(
            reported,
            suspects_silent_since={ref: NOW},
            silence_began_at={ref: NOW - 0.5 - silent_s},
        )
        assert lost(reset) == ({"a"} if is_lost else set())


def test_a_pod_with_the_labels_of_another_keeps_no_node() -> None:
    """Any user may create one, on any node."""
    dead = hanging_kubelet(ProbeResults(NOW - 0.1, NOW - 50, unanswered_since=NOW - 50))
    live = {"phase": "Live", "stableEpoch": 5}
    reported = with_report(dead, {"pb": live, "pc": live})
    assert lost(reported) == {"a"}
    other = replace(reported.pods[1], name="other", uid="other", node="a", ip="", ready=False)
    assert lost(replace(reported, pods=(*reported.pods, other))) == {"a"}


def test_a_coordinator_s_labels_keep_no_node() -> None:
    dead = hanging_kubelet(ProbeResults(NOW - 0.1, NOW - 50, unanswered_since=NOW - 50))
    live = {"phase": "Live", "stableEpoch": 5}
    reported = with_report(dead, {"pb": live, "pc": live})
    (topology,) = reported.topologies
    data_plane = {**topology.status["dataPlane"], "fence": 7}
    reported = replace(reported, topologies=(replace(topology, status={"dataPlane": data_plane}),))
    coordinator = replace(
        reported.pods[1],
        name=names.coordinator_pod_name("t", 7),
        uid="c",
        node="a",
        role="coordinator",
        slot=None,
        incarnation=7,
    )
    assert lost(replace(reported, pods=(*reported.pods, coordinator))) == set()
    forged = replace(coordinator, name="other")
    assert lost(replace(reported, pods=(*reported.pods, forged))) == {"a"}


def test_a_silent_task_loses_no_node_on_which_another_topologys_pod_responds() -> None:
    """Whose coordinator is being restarted."""
    silent = ProbeResults(NOW - 0.1, NOW - 5.5, unanswered_since=NOW - 5)
    suspected = {"phase": "Live", "stableEpoch": 5, "suspected": True, "silentSeconds": 2.0}
    snapshot = with_report(hanging_kubelet(silent), {"pa": suspected})
    snapshot = replace(snapshot, suspects_silent_since={snapshot.pods[0].ref: NOW - 5})
    assert lost(snapshot) == {"a"}
    other = replace(snapshot.pods[0], name="pu", uid="pu", owner_uid="u", topology="u")
    with_other = replace(
        snapshot,
        pods=(*snapshot.pods, other),
        topologies=(
            *snapshot.topologies,
            replace(snapshot.topologies[0], name="u", uid="u", status={}),
        ),
        report_times={**snapshot.report_times, "u": NOW - 4},
        pod_probes={**snapshot.pod_probes, "pu": ANSWERS},
    )
    assert lost(with_other) == set()


def test_a_kubelet_that_never_responded_leaves_it_to_the_pods() -> None:
    """They are silent since the first unanswered probe after the last response of any of them. A
    response more than 30 s ago keeps no node."""
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 90)
    for answered_s, unanswered_s, is_lost in (
        (9.0, 1.8, False),
        (9.0, 2.3, True),
        (40.0, 1.0, True),
    ):
        results = ProbeResults(NOW - 0.1, NOW - answered_s, unanswered_since=NOW - unanswered_s)
        snapshot = hanging_kubelet(results)
        snapshot = replace(snapshot, kubelet_probes={**snapshot.kubelet_probes, "a": never})
        assert lost(snapshot) == ({"a"} if is_lost else set())
    ended = ProbeResults(NOW - 0.1, NOW - 9, unanswered_since=NOW - 5)
    both = hanging_kubelet(ended)
    both = replace(
        both,
        kubelet_probes={**both.kubelet_probes, "a": never},
        pods=(*both.pods, pod("goes on", "a")),
        pod_probes={**both.pod_probes, "goes on": ProbeResults(NOW - 3, NOW - 3)},
    )
    assert lost(both) == set()


def test_briefly_silent_tasks_do_not_make_most_nodes_dead() -> None:
    """Four of five nodes are NotReady. Tasks respond, or did a moment ago, on three of them."""
    nodes = tuple(replace(node(n), ready=n == "e") for n in "abcde")
    pods = tuple(
        replace(pod(f"p{n}", n), slot=Slot("s", i, 0), incarnation=1) for i, n in enumerate("abcde")
    )
    snapshot = replace(world({}, {}), nodes=nodes, pods=pods, kubelet_probes={}, pod_probes={})
    live: dict[str, Any] = {"phase": "Live", "stableEpoch": 5}
    suspected: dict[str, Any] = {**live, "suspected": True, "silentSeconds": 1.6}
    tasks: dict[str, dict[str, Any]] = {
        "pa": suspected,
        "pb": suspected,
        "pc": live,
        "pd": {"phase": "Waiting"},
        "pe": live,
    }
    reported = with_report(snapshot, tasks)
    since = {p.ref: NOW - 2.1 for p in pods[:2]}
    assert lost(replace(reported, suspects_silent_since=since)) == set()


def test_pods_of_a_not_ready_node_are_probed_at_each_tick() -> None:
    """A fresh report may not know of them."""
    hangs = with_report(hanging_kubelet(replace(ANSWERS, sent_at=NOW - 0.5)), {})
    assert [p.uid for p in pods_to_probe(hangs, set(), NOW, TIMING)] == ["pa"]


def test_pods_are_probed_at_each_tick_while_their_kubelet_does_not_respond() -> None:
    """But not for ever: a network policy may keep the operator from all kubelets."""
    probed = {n: replace(ANSWERS, sent_at=NOW - 1) for n in "abc"}
    for unanswered_s, expected in ((0.2, []), (1.0, ["pa"]), (61.0, [])):
        kubelet = ProbeResults(NOW - 0.1, None, unanswered_since=NOW - unanswered_s)
        snapshot = world({**ALL, "a": kubelet}, probed, report_age_s=0.5)
        assert [p.uid for p in pods_to_probe(snapshot, set(), NOW, TIMING)] == expected


def test_many_urgent_probes_leave_room_for_the_others() -> None:
    dead = [f"d{n}" for n in range(80)]
    works = [f"w{n}" for n in range(20)]
    lasting = replace(
        world({}, {}),
        nodes=tuple(replace(node(n), ready=n in works) for n in [*dead, *works]),
        pods=tuple(pod(f"p{n}", n) for n in [*dead, *works]),
        report_times={"t": NOW - 0.1},
    )
    probed = [p.node for p in pods_to_probe(lasting, set(), NOW, TIMING)]
    assert len(probed) == 64
    assert sum(n in works for n in probed) == 16


def test_a_pod_that_nobody_probes_any_more_is_not_silent() -> None:
    """It was probed only while its node was NotReady; a single probe was lost then."""
    results = ProbeResults(NOW - 12, NOW - 12.5, unanswered_since=NOW - 12)
    snapshot = world({**ALL, "a": SILENT}, {**ALL, "a": results})
    assert lost(snapshot) == set()


def test_a_fresh_report_is_believed_instead() -> None:
    silent = {**ALL, "a": SILENT}
    assert lost(world(silent, silent, report_age_s=0.5)) == set()


def test_nodes_without_a_report_are_probed_at_once() -> None:
    quiet = {n: replace(ANSWERS, sent_at=NOW - 1) for n in "abc"}
    late = world(quiet, quiet)
    assert {n.name for n in kubelets_to_probe(late, set(), NOW, TIMING)} == set("abc")
    assert {p.node for p in pods_to_probe(late, set(), NOW, TIMING)} == set("abc")
    reported = world(quiet, quiet, report_age_s=0.5)
    assert pods_to_probe(reported, set(), NOW, TIMING) == []


def test_one_pod_of_each_node_is_probed_at_intervals() -> None:
    snapshot = world(ALL, {}, report_age_s=0.5)
    both = replace(snapshot, pods=(*snapshot.pods, pod("second", "a")))
    probed = pods_to_probe(both, set(), NOW, TIMING)
    assert sorted(p.node or "" for p in probed) == ["a", "b", "c"]
    assert "pb" not in {p.uid for p in pods_to_probe(both, {"pb"}, NOW, TIMING)}


def test_pods_of_a_node_that_is_not_ready_are_probed() -> None:
    """Kubernetes marks them as not ready, and they may run on."""
    snapshot = world(ALL, {n: replace(ANSWERS, sent_at=NOW - 1) for n in "abc"})
    marked = replace(snapshot.pods[0], ready=False)
    pods = (marked, *snapshot.pods[1:])
    assert "pa" in {p.uid for p in pods_to_probe(replace(snapshot, pods=pods), set(), NOW, TIMING)}
    for ended in (replace(marked, phase="Failed"), replace(marked, was_ready=False)):
        pods = (ended, *snapshot.pods[1:])
        probed = pods_to_probe(replace(snapshot, pods=pods), set(), NOW, TIMING)
        assert "pa" not in {p.uid for p in probed}


def test_pods_that_a_hanging_kubelet_never_reported_as_ready_are_probed() -> None:
    """They run, and respond to their coordinator."""
    snapshot = world({**ALL, "a": SILENT}, {n: replace(ANSWERS, sent_at=NOW - 1) for n in "bc"})
    never_ready = replace(snapshot.pods[0], ready=False, was_ready=False)
    ready = replace(never_ready, uid="zz", name="zz", ready=True)
    nodes = tuple(replace(n, ready=n.name != "a") for n in snapshot.nodes)
    hangs = replace(snapshot, pods=(never_ready, *snapshot.pods[1:]), nodes=nodes)
    assert "pa" in {p.uid for p in pods_to_probe(hangs, set(), NOW, TIMING)}
    assert lost(hangs) == {"a"}
    responds = replace(hangs, pod_probes={**hangs.pod_probes, "pa": ANSWERS})
    assert lost(responds) == set()
    both = replace(hangs, pods=(*hangs.pods, ready))
    on_a = [p.uid for p in pods_to_probe(both, set(), NOW, TIMING) if p.node == "a"]
    assert on_a == ["zz"], "rather one that was ready"


def test_neighbours_of_silent_pods_are_probed_on_any_number_of_nodes() -> None:
    names = [f"n{i}" for i in range(40)]
    pods = [pod(f"p{n}", n) for n in names]
    answering = {p.uid: replace(ANSWERS, sent_at=NOW - 1) for p in pods}
    snapshot = replace(
        world({}, {}),
        nodes=tuple(node(n) for n in names),
        pods=(*pods, pod("q", "n7")),
        pod_probes={**answering, "pn7": SILENT},
    )
    assert "q" in {p.uid for p in pods_to_probe(snapshot, set(), NOW, TIMING)}


def test_a_pod_that_is_silent_for_long_is_probed_after_its_neighbours() -> None:
    long_ago = ProbeResults(NOW - 1, NOW - 31, unanswered_since=NOW - 31)
    snapshot = world({}, {"a": long_ago, "b": ANSWERS, "c": ANSWERS})
    snapshot = replace(snapshot, pods=(*snapshot.pods, pod("pa2", "a")))
    responding = replace(ANSWERS, sent_at=NOW - 1)
    probed = pods_to_probe(snapshot, set(), NOW, TIMING)
    assert {p.uid for p in probed if p.node == "a"} == {"pa", "pa2"}, "none has responded lately"
    probes = {**snapshot.pod_probes, "pa2": responding}
    probed = pods_to_probe(replace(snapshot, pod_probes=probes), set(), NOW, TIMING)
    assert [p.uid for p in probed if p.node == "a"] == ["pa2"]


def test_if_a_pod_is_silent_the_others_of_its_node_are_probed() -> None:
    """Its container may have ended, while the node's kubelet hangs."""
    snapshot = world({**ALL, "a": SILENT}, {**ALL, "a": SILENT})
    neighbours = (pod("pa2", "a"), pod("pa3", "a"))
    both = replace(snapshot, pods=(*snapshot.pods, *neighbours))
    assert lost(both) == set()
    unanswered = ProbeResults(NOW, None, unanswered_since=NOW)
    for since, is_lost in ((NOW - 1.2, True), (NOW - 0.1, False)):
        silent = ProbeResults(NOW - 0.1, None, unanswered_since=since)
        all_probed = {**both.pod_probes, "pa2": silent, "pa3": silent}
        assert lost(replace(both, pod_probes=all_probed)) == ({"a"} if is_lost else set())
    assert "pa2" in {p.uid for p in pods_to_probe(both, set(), NOW, TIMING)}
    probed = replace(both, pod_probes={**both.pod_probes, "pa2": unanswered})
    assert "pa3" in {p.uid for p in pods_to_probe(probed, {"pa2"}, NOW, TIMING)}
    for responding in (ANSWERS, replace(ANSWERS, sent_at=NOW, unanswered_since=NOW)):
        assert lost(replace(both, pod_probes={**both.pod_probes, "pa3": responding})) == set()
    since = NOW - TIMING.pod_silent_s / 4 + 0.1
    brief = replace(
        both, pod_probes={**both.pod_probes, "pa": replace(SILENT, unanswered_since=since)}
    )
    assert {p.uid for p in pods_to_probe(brief, set(), NOW, TIMING)} <= {"pa", "pb", "pc"}


def test_a_pod_that_never_responded_is_probed_last() -> None:
    """Anybody may create a pod with a topology's label; where no process listens, it never
    responds."""
    snapshot = world({}, {})
    forged = replace(pod("!", "a"), owner_uid=None)
    snapshot = replace(snapshot, pods=(forged, *snapshot.pods))
    assert "!" in {p.uid for p in pods_to_probe(snapshot, set(), NOW, TIMING)}
    unanswered = ProbeResults(sent_at=NOW - 11, unanswered_since=NOW - 11)
    probed = pods_to_probe(replace(snapshot, pod_probes={"!": unanswered}), set(), NOW, TIMING)
    assert "pa" in {p.uid for p in probed}
    both = {"!": unanswered, "pa": replace(ANSWERS, sent_at=NOW - 1)}
    probed = pods_to_probe(replace(snapshot, pod_probes=both), set(), NOW, TIMING)
    assert [p.uid for p in probed if p.node == "a"] == ["pa"]


def peers_only(snapshot: Snapshot) -> Snapshot:
    """The same pods, as replicas of the operator; there is no topology."""
    peers = tuple(
        replace(p, topology=None, role=None, owner_uid=None, helm_release="rekindle")
        for p in snapshot.pods
    )
    return replace(snapshot, topologies=(), report_times={}, pods=peers)


def test_the_node_of_a_silent_replica_of_the_operator_is_lost() -> None:
    silent = {**ALL, "a": SILENT}
    assert lost(peers_only(world(silent, silent))) == {"a"}
    assert lost(peers_only(world(silent, ALL))) == set()


def test_a_replica_of_the_operator_is_probed_until_it_responds() -> None:
    probed = peers_only(world(ALL, {**ALL, "a": SILENT}))
    assert [p.node for p in pods_to_probe(probed, set(), NOW, TIMING)] == ["a"]


def test_kubelets_of_nodes_with_replicas_of_the_operator_are_probed() -> None:
    never_probed = peers_only(world({}, {}))
    assert {n.name for n in kubelets_to_probe(never_probed, set(), NOW, TIMING)} == set("abc")


def test_a_pod_that_starts_or_ends_is_not_probed() -> None:
    snapshot = world(ALL, {})
    changed = (
        replace(snapshot.pods[0], ready=False, was_ready=False),
        replace(snapshot.pods[1], terminating=True),
        replace(snapshot.pods[2], ip=""),
    )
    assert pods_to_probe(replace(snapshot, pods=changed), set(), NOW, TIMING) == []


def test_a_process_that_accepts_and_says_nothing_is_silent() -> None:
    async def probe() -> tuple[bool, bool]:
        async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 503 busy\r\n\r\n")
            writer.close()

        async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.3)
            writer.close()

        found = []
        for behaviour in (respond, hang):
            server = await asyncio.start_server(behaviour, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            found.append(await pod_responds("127.0.0.1", port, 0.2))
            server.close()
        return found[0], found[1]

    assert asyncio.run(probe()) == (True, False)


def test_nodes_of_operator_replicas_are_lost_while_most_nodes_are_not_ready() -> None:
    """Nobody reports on these nodes, and their kubelets responded before."""
    dead = {"a": SILENT, "b": SILENT, "c": ANSWERS}
    snapshot = peers_only(world(dead, {}))
    one_ready = tuple(replace(n, ready=n.name == "c") for n in snapshot.nodes)
    assert lost(replace(snapshot, nodes=one_ready)) == {"a", "b"}
    responding = replace(snapshot, nodes=one_ready, kubelet_probes=ALL)
    assert lost(responding) == set(), "the control plane has failed, not the nodes"


def test_nodes_that_never_responded_to_this_operator_are_lost_while_most_are_not_ready() -> None:
    """They joined and died before it became the leader, and their tasks have reported nothing."""
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 10)
    dead = {"a": never, "b": never, "c": ANSWERS}

    def lost_with(kubelets: Mapping[str, ProbeResults], pods: Mapping[str, ProbeResults]) -> object:
        snapshot = world(kubelets, pods)
        nodes = tuple(replace(n, ready=n.name == "c") for n in snapshot.nodes)
        return lost(replace(snapshot, nodes=nodes))

    assert lost_with(dead, dead) == {"a", "b"}
    assert lost_with(dead, ALL) == set(), "pods respond"
    assert lost_with(ALL, dead) == set(), "kubelets respond"
    silent = dict.fromkeys("abc", never)
    assert lost_with(silent, silent) == set(), "nobody responds: this operator may be cut off"


@pytest.mark.parametrize("silent_while_ready_s", [5, 600])
def test_nodes_out_of_reach_are_not_lost_while_most_are_not_ready(
    silent_while_ready_s: float,
) -> None:
    """A NetworkPolicy admits the operator to one node only, and the control plane fails."""
    not_ready_since = NOW - 60
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=not_ready_since - silent_while_ready_s)
    snapshot = world({"a": never, "b": never, "c": ANSWERS}, {"a": never, "b": never})
    snapshot = replace(
        snapshot,
        nodes=tuple(replace(n, ready=n.name == "c") for n in snapshot.nodes),
        readiness_seen_at=dict.fromkeys("abc", not_ready_since),
    )
    assert lost(snapshot) == (set() if silent_while_ready_s > 300 else {"a", "b"})


def test_a_task_never_accepted_by_a_silent_kubelet_is_replaced() -> None:
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 2.5)
    snapshot = world({**ALL, "a": never}, {})
    assessment = assess_nodes(snapshot, NOW, TIMING)
    waiting = replace(snapshot.pods[0], ready=False, was_ready=False)
    taken = replace(waiting, accepted_by_kubelet=True)
    young = replace(waiting, uid="young")
    since = {waiting.uid: NOW - 6, young.uid: NOW - 2}
    snapshot = replace(snapshot, pods_ungated_at=since)
    losses = [loss_of_pod(p, assessment, snapshot, NOW, TIMING) for p in (waiting, taken, young)]
    # It is bound, but replaced like a pod that no node has taken.
    assert losses == [Loss.UNBOUND, None, None]


def usable(snapshot: Snapshot) -> set[str]:
    return set(assess_nodes(snapshot, NOW, TIMING).usable_nodes)


def test_a_node_whose_kubelet_does_not_respond_gets_nothing() -> None:
    """Nothing runs there that would make it lost, and Kubernetes still calls it Ready."""
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 2.5)
    snapshot = world({**ALL, "a": never}, ALL)
    assert lost(snapshot) == set()
    assert usable(snapshot) == {"b", "c"}


def test_a_kubelet_out_of_reach_excludes_its_node_only_for_a_while() -> None:
    never = ProbeResults(sent_at=NOW - 0.2, unanswered_since=NOW - 90)
    assert usable(world({**ALL, "a": never}, ALL)) == set("abc")


def test_all_nodes_are_probed_while_a_report_is_late() -> None:
    snapshot = world({n: replace(ANSWERS, sent_at=NOW - 2) for n in "abc"}, ALL)
    spare = replace(snapshot, nodes=(*snapshot.nodes, node("d")))
    assert "d" in {n.name for n in kubelets_to_probe(spare, set(), NOW, TIMING)}
    reported = replace(spare, report_times={"t": NOW - 0.5})
    assert "d" not in {n.name for n in kubelets_to_probe(reported, set(), NOW, TIMING)}


def test_an_excluded_node_is_probed_until_it_responds() -> None:
    never = ProbeResults(sent_at=NOW - 1, unanswered_since=NOW - 2.5)
    quiet = replace(world({"d": never}, {}, report_age_s=0.5), nodes=(node("d"),), pods=())
    assert [n.name for n in kubelets_to_probe(quiet, set(), NOW, TIMING)] == ["d"]
    assert kubelets_to_probe(quiet, set(), NOW + 90, TIMING) == []
