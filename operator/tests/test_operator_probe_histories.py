"""Probes four times a second, and what they prove, in whole histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_operator_late_reports import (
    ANSWERS,
    NOW,
    TIMING,
    hanging_kubelet,
    node,
    pod,
    with_report,
    world,
)

from rekindle.topology.model import Slot
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.cluster.probes import TICK_S, ProbeState
from rekindle_operator.recovery.kubelets import kubelets_to_probe
from rekindle_operator.recovery.losses import LossAssessment, assess_nodes
from rekindle_operator.recovery.probed_pods import pods_to_probe

pytestmark = pytest.mark.simulated

_LIVE = {"phase": "Live", "stableEpoch": 5}
_IN_FLIGHT_S = 3.0  # a probe without a response


def never(_: float) -> bool:
    return False


def lost_nodes(*of: Any, **more: Any) -> Iterator[tuple[float, set[str]]]:
    """As `assessments`, but the lost nodes."""
    for at, found in assessments(*of, **more):
        yield at, set(found.lost_nodes)


def assessments(
    seen_at: Callable[[float], Snapshot],
    is_dead: Callable[[PodView, float], bool],
    kubelet_is_dead: Callable[[str, float], bool],
    *,
    begin_s: float = -40.0,
    until_s: float = 15.0,
    is_cut_off: Callable[[float], bool] = never,
    response_s: float = 0.0,
) -> Iterator[tuple[float, LossAssessment]]:
    """At each tick from 0 on: the time, and what is lost. All times are in seconds from NOW.
    `begin_s`: when the process began to probe; `is_cut_off`: whether it reaches no node but its
    own; `response_s`: how long a response takes."""
    kubelets, pods = ProbeState(detects_own_isolation=True), ProbeState()
    kubelets.reconnected = pods.reset_timers
    # When a response comes or a probe ends, of which state and uid, when it was sent.
    pending: list[tuple[float, bool, ProbeState, str, float]] = []
    for tick in range(int(begin_s / TICK_S), int(until_s / TICK_S)):
        at = tick * TICK_S
        now = NOW + at

        def seen(at: float = at) -> Snapshot:
            return replace(
                seen_at(at),
                kubelet_probes=kubelets.results,
                pod_probes=pods.results,
                observing_since=NOW + begin_s,
            )

        for probe in [p for p in pending if p[0] <= now]:
            _, responds, state, uid, sent_at = probe
            if responds:
                state.responded(uid, sent_at)
            state.ended(uid, sent_at)
            pending.remove(probe)
        for state in (kubelets, pods):
            state.reset_after_pause(now)
        before = seen()
        own = before.own_node
        local = {n.uid for n in before.nodes if n.name == own}
        kubelets.retain({n.uid for n in before.nodes}, local)
        before = seen()
        due_pods = pods_to_probe(before, pods.busy(now), now, TIMING)
        due_nodes = kubelets_to_probe(before, kubelets.busy(now), now, TIMING)
        probes = [(pods, p.uid, p.node, is_dead(p, at)) for p in due_pods]
        probes += [(kubelets, n.uid, n.name, kubelet_is_dead(n.name, at)) for n in due_nodes]
        for state, uid, *_ in probes:
            state.sent(uid, now)
        for state, uid, on, dead in probes:
            if dead or (is_cut_off(at) and on != own):
                pending.append((now + _IN_FLIGHT_S, False, state, uid, now))
            elif response_s:
                pending.append((now + response_s, True, state, uid, now))
            else:
                state.responded(uid, now)
                state.ended(uid, now)
        if at >= 0:
            yield at, assess_nodes(seen(), now, TIMING)


def first_loss(found: Iterator[tuple[float, set[str]]], name: str) -> float | None:
    return next((at for at, lost in found if name in lost), None)


@pytest.mark.parametrize("number", [0, 3, 12])
@pytest.mark.parametrize("ended_at", [-3.0, 0.0])
@pytest.mark.parametrize(("is_first", "were_ready"), [(False, False), (True, False), (True, True)])
def test_a_pod_that_works_is_found_among_many_that_do_not(
    number: int, ended_at: float, is_first: bool, were_ready: bool
) -> None:
    """Node a is NotReady, with a kubelet that hangs. The coordinator there ends, a task goes on,
    and others have never started, or have ended."""
    healthy = world({}, {})  # a pod on each of the nodes a, b and c; not probed yet
    coordinator = replace(pod("a-first", "a"), role="coordinator", ready=False)
    stuck = [replace(pod(f"n{i}", "a"), ready=False, was_ready=were_ready) for i in range(number)]
    works = replace(pod("works", "a"), ready=False)
    others = (works, coordinator, *stuck) if is_first else (coordinator, *stuck, works)
    snapshot = replace(
        healthy,
        nodes=tuple(replace(n, ready=n.name != "a") for n in healthy.nodes),
        pods=(*healthy.pods[1:], *others),
    )
    found = lost_nodes(
        lambda at: replace(snapshot, report_times={"t": NOW + min(at, -0.5)}),
        lambda p, at: p in stuck or (p == coordinator and at >= ended_at),
        lambda name, at: name == "a" and at > -30,
    )
    assert first_loss(found, "a") is None


def test_a_first_report_that_does_not_know_a_task_yet_loses_no_node() -> None:
    """The coordinator was replaced, and node a is NotReady, with a kubelet that hangs."""
    snapshot = hanging_kubelet(ANSWERS)
    before = with_report(snapshot, dict.fromkeys(("pa", "pb", "pc"), _LIVE))
    after = with_report(snapshot, {"pa": {"phase": "Waiting"}, "pb": _LIVE, "pc": _LIVE})

    def seen_at(at: float) -> Snapshot:
        reported_at = at if at < -5 or at >= 0 else -5.25
        seen = after if at >= 0 else before
        return replace(seen, report_times={"t": NOW + reported_at})

    found = lost_nodes(seen_at, lambda p, at: False, lambda name, at: name == "a" and at > -30)
    assert first_loss(found, "a") is None


def test_a_node_is_lost_although_no_other_one_can_respond() -> None:
    """There are two nodes, and the operator runs on the other one."""
    snapshot = hanging_kubelet(ANSWERS)
    snapshot = replace(
        with_report(snapshot, dict.fromkeys(("pa", "pb"), _LIVE)),
        nodes=tuple(n for n in snapshot.nodes if n.name != "c"),
        pods=tuple(p for p in snapshot.pods if p.node != "c"),
        own_node="b",
    )
    found = lost_nodes(
        lambda at: replace(snapshot, report_times={"t": NOW + min(at, 0.0)}),
        lambda p, at: p.node == "a" and at > 0,
        lambda name, at: name == "a" and at > -30,
    )
    at = first_loss(found, "a")
    assert at is not None
    assert 2.5 < at < 9


@pytest.mark.parametrize(("dead", "ended_at"), [(0, 3.0), (20, 0.25)])
def test_many_silent_nodes_do_not_keep_one_from_being_probed(dead: int, ended_at: float) -> None:
    """On each of many nodes the pod that is probed ends, or all do. On the last node, whose kubelet
    hangs, others go on."""
    names = [f"n{i:02}" for i in range(max(dead, 8) + 1)]
    hangs = names[-1]
    snapshot = replace(
        world({}, {}),
        nodes=(*(node(n) for n in names), node("other")),
        pods=(*(pod(f"{k}{n}", n) for n in names for k in "abc"), pod("other", "other")),
    )

    def is_dead(probed: PodView, at: float) -> bool:
        if probed.node == "other" or at < 0:
            return False
        if probed.node == hangs:
            return probed.uid.startswith("a") and at >= ended_at
        return bool(dead) or probed.uid.startswith("a")

    found = list(
        lost_nodes(
            lambda at: replace(snapshot, report_times={"t": NOW + min(at, 0.0)}),
            is_dead,
            lambda name, at: (
                (name == hangs and at >= -5) or (bool(dead) and name in names and at >= 0)
            ),
        )
    )
    assert first_loss(iter(found), hangs) is None
    if dead:
        at = first_loss(iter(found), names[0])
        assert at is not None
        assert at < 5


def task(name: str, on: str, number: int, topology: str = "t") -> PodView:
    return replace(
        pod(name, on),
        owner_uid=topology,
        topology=topology,
        slot=Slot("s", number, 0),
        incarnation=1,
    )


def with_topologies(
    snapshot: Snapshot, tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Snapshot:
    """`tasks`: by topology and name of the pod, what the coordinator reports of it."""
    slots = {p.name: p.slot.key for p in snapshot.pods if p.slot is not None}
    return replace(
        snapshot,
        topologies=tuple(
            replace(
                snapshot.topologies[0],
                name=name,
                uid=name,
                status={
                    "dataPlane": {
                        "tasks": [
                            {"slot": slots[n], "incarnation": 1, "pod": n, **t}
                            for n, t in of_pods.items()
                        ]
                    }
                },
            )
            for name, of_pods in tasks.items()
        ),
    )


@pytest.mark.parametrize("first_has_ended", [False, True])
@pytest.mark.parametrize("number", [3, 130])
@pytest.mark.parametrize("works", [True, False])
def test_a_process_without_memory_waits_for_responses(
    works: bool, number: int, first_has_ended: bool
) -> None:
    """It leads at once. Node n0 is NotReady, since its kubelet hangs; all reports are of before."""
    names = [f"n{i}" for i in range(number)]
    pods = [task(f"p{n}", n, i) for i, n in enumerate(names)]
    ended = [task("a", "n0", number)] if first_has_ended else []
    snapshot = replace(
        world({}, {}, report_age_s=60.0),
        nodes=tuple(replace(node(n), ready=n != "n0") for n in names),
        pods=(*ended, *pods),
        own_node="n1",
    )
    found = lost_nodes(
        lambda at: snapshot,
        lambda p, at: p.name == "a" or (p.node == "n0" and not works),
        lambda name, at: name == "n0",
        begin_s=0.0,
    )
    at = first_loss(found, "n0")
    if works:
        assert at is None
    else:
        assert at is not None
        assert 2 <= at < 7


@pytest.mark.parametrize("has_fresh_report", [False, True])
@pytest.mark.parametrize("starts", [False, True])
def test_a_task_that_starts_does_not_keep_a_dead_node(starts: bool, has_fresh_report: bool) -> None:
    """Node a dies with a task of v; t, whose coordinator is elsewhere, has a task there that was
    never Live."""
    of_v = [task(f"v{n}", n, i, "v") for i, n in enumerate("abc")]
    of_t = [task(f"t{n}", n, i) for i, n in enumerate("abc")]
    of_t[0] = replace(of_t[0], ready=False, was_ready=False)
    snapshot = replace(world({}, {}), pods=(*of_v, *(of_t if starts else of_t[1:])))

    def seen_at(at: float) -> Snapshot:
        is_suspected = has_fresh_report and at >= 1.75
        suspected = {"suspected": True, "silentSeconds": 1.5} if is_suspected else {}
        here, elsewhere = _LIVE | suspected, {"tb": _LIVE, "tc": _LIVE}
        reports: dict[str, dict[str, Any]] = {
            "v": {p.name: here if p.node == "a" else _LIVE for p in of_v},
            "t": {"ta": {"phase": "Waiting"}, **elsewhere} if starts else elsewhere,
        }
        return replace(
            with_topologies(snapshot, reports),
            report_times={"t": NOW + at, "v": NOW + (at if has_fresh_report else min(at, 0.0))},
            suspects_silent_since={of_v[0].ref: NOW} if is_suspected else {},
        )

    found = lost_nodes(
        seen_at, lambda p, at: p.node == "a" and at >= 0, lambda name, at: name == "a" and at >= 0
    )
    at = first_loss(found, "a")
    assert at is not None
    assert at < 4


@pytest.mark.parametrize("calls_it_silent", [False, True])
@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("begin_s", [-40.0, 0.0])
def test_what_only_one_topology_says_of_a_node_concerns_only_its_pods(
    begin_s: float, works: bool, calls_it_silent: bool
) -> None:
    """Kubernetes calls node a NotReady after 5 s. The coordinator of e says until 30 s that its
    task there responds, or that it has been silent for a moment, each time. The operator reaches
    nothing there; if the node works, it reaches no other one either."""
    of_v, of_e = task("va", "a", 0, "v"), task("ea", "a", 0, "e")
    elsewhere = [task(f"v{n}", n, i, "v") for i, n in enumerate("bc", 1)]
    healthy = replace(world({}, {}), pods=(of_v, of_e, *elsewhere))

    def seen_at(at: float) -> Snapshot:
        is_silent = at >= 1.75
        suspected = {"suspected": True, "silentSeconds": 0.5}
        of_a = _LIVE | (suspected if is_silent and calls_it_silent else {})
        reports = {"v": {p.name: _LIVE for p in elsewhere}, "e": {"ea": of_a}}
        return replace(
            with_topologies(healthy, reports),
            nodes=tuple(replace(n, ready=n.name != "a" or at < 5) for n in healthy.nodes),
            report_times={"v": NOW + at, "e": NOW + at},
            suspects_silent_since={of_e.ref: NOW + at} if "suspected" in of_a else {},
        )

    def is_dead(probed: PodView, at: float) -> bool:
        return at >= 0 and (works or probed.node == "a")

    found = assessments(
        seen_at,
        is_dead,
        lambda name, at: at >= 0 and (works or name == "a"),
        begin_s=begin_s,
        until_s=30,
    )
    results = [(at, assessment) for at, assessment in found]
    lost_at = [at for at, assessment in results if assessment.is_on_lost_node(of_v)]
    assert not any(assessment.is_on_lost_node(of_e) for _, assessment in results)
    if works:
        assert lost_at == []
    else:
        assert 6 <= lost_at[0] <= 7


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_coordinator_that_reaches_no_task_does_not_outweigh_probes(is_ready: bool) -> None:
    """It calls all tasks silent. They respond to the operator; the kubelet of node a hangs."""
    tasks = [task(f"p{n}", n, i) for i, n in enumerate("abc")]
    healthy = replace(world({}, {}), pods=tuple(tasks))

    def seen_at(at: float) -> Snapshot:
        silent = {"suspected": True, "silentSeconds": 1.5} if at >= 1.75 else {}
        return replace(
            with_topologies(healthy, {"t": {p.name: _LIVE | silent for p in tasks}}),
            nodes=tuple(replace(n, ready=n.name != "a" or is_ready) for n in healthy.nodes),
            report_times={"t": NOW + at},
            suspects_silent_since={p.ref: NOW for p in tasks} if silent else {},
        )

    found = lost_nodes(seen_at, lambda p, at: False, lambda name, at: name == "a" and at >= -20)
    assert first_loss(found, "a") is None


@pytest.mark.parametrize("topologies", [1, 48])
def test_pods_of_a_tenant_that_end_together_do_not_hide_a_task_that_works(topologies: int) -> None:
    """Node a is NotReady, with a kubelet that hangs, and no coordinator reports any more."""
    of_e = [
        replace(task(f"e{i}", "a", i, f"e{i % topologies}"), namespace="evil") for i in range(48)
    ]
    works = task("works", "a", 0)
    others = [task(f"p{n}", n, i) for i, n in enumerate("bc", 1)]
    healthy = replace(world({}, {}), pods=(*of_e, works, *others))
    reports: dict[str, dict[str, Any]] = {f"e{i}": {} for i in range(topologies)}
    snapshot = with_topologies(healthy, reports | {"t": {}})
    snapshot = replace(
        snapshot,
        nodes=tuple(replace(n, ready=n.name != "a") for n in snapshot.nodes),
        report_times=dict.fromkeys([*reports, "t"], NOW - 20),
    )
    found = lost_nodes(
        lambda at: snapshot,
        lambda p, at: p.namespace == "evil" and at >= 0,
        lambda name, at: name == "a" and at >= -20,
    )
    assert first_loss(found, "a") is None


@pytest.mark.parametrize("hangs_at", [-20.0, -4.0])
def test_a_task_that_a_hanging_kubelet_did_not_report_as_ready_keeps_its_node(
    hangs_at: float,
) -> None:
    """Node a is still Ready. The coordinator there ends at 0."""
    coordinator = replace(pod("coordinator", "a"), role="coordinator", incarnation=1)
    works = replace(task("works", "a", 0), ready=False, was_ready=False)
    others = [task(f"p{n}", n, i) for i, n in enumerate("bc", 1)]
    snapshot = replace(world({}, {}), pods=(coordinator, works, *others))
    reported = with_report(snapshot, dict.fromkeys(("works", "pb", "pc"), _LIVE))
    found = lost_nodes(
        lambda at: replace(reported, report_times={"t": NOW + min(at, 0.0)}),
        lambda p, at: p == coordinator and at >= 0,
        lambda name, at: name == "a" and at >= hangs_at,
    )
    assert first_loss(found, "a") is None


@pytest.mark.parametrize("name", ["va", "a0"])
@pytest.mark.parametrize(("is_ready", "hangs_at"), [(False, -30.0), (True, -1.0)])
def test_a_pod_that_its_coordinator_calls_silent_hides_no_other_one(
    name: str, is_ready: bool, hangs_at: float
) -> None:
    """It responds to the operator. The kubelet of its node hangs, and a task of v works there,
    whose coordinator is being replaced."""
    of_t = [task(f"p{n}", n, i) for i, n in enumerate("abc")]
    of_v = [task(name, "a", 0, "v"), task("vb", "b", 1, "v")]
    snapshot = world({}, {})
    nodes = tuple(replace(n, ready=n.name != "a" or is_ready) for n in snapshot.nodes)
    suspected = _LIVE | {"suspected": True, "silentSeconds": 1.6}
    reports = {
        "t": {"pa": suspected, "pb": _LIVE, "pc": _LIVE},
        "v": {name: _LIVE, "vb": _LIVE},
    }
    reported = with_topologies(replace(snapshot, nodes=nodes, pods=(*of_t, *of_v)), reports)
    found = lost_nodes(
        lambda at: replace(
            reported,
            report_times={"t": NOW + at, "v": NOW + min(at, 0.0)},
            suspects_silent_since={of_t[0].ref: NOW - 20},
            silence_began_at={of_t[0].ref: NOW - 20},
        ),
        lambda p, at: False,
        lambda name, at: name == "a" and at >= hangs_at,
    )
    assert first_loss(found, "a") is None


@pytest.mark.parametrize(
    ("number", "response_s", "has_owner"),
    [(6, 0.75, True), (12, 0.0, False), (70, 0.75, False), (70, 0.0, True)],
)
@pytest.mark.parametrize(("is_ready", "late_s"), [(False, 0.0), (False, -5.0), (True, -2.0)])
def test_pods_that_end_together_hide_no_other_one(
    number: int, is_ready: bool, late_s: float, response_s: float, has_owner: bool
) -> None:
    """Any user may have arranged it: they have only the label of a topology, and perhaps owners
    that do not exist."""
    end = [
        replace(
            pod(f"e{i:02}", "a"), owner_uid=f"o{i}" if has_owner else None, role=None, topology="x"
        )
        for i in range(number)
    ]
    works = [task("works", "a", 0), task("pb", "b", 1), task("pc", "c", 2)]
    snapshot = world({}, {})
    nodes = tuple(replace(n, ready=n.name != "a" or is_ready) for n in snapshot.nodes)
    snapshot = replace(snapshot, nodes=nodes, pods=(*end, *works))
    reported = with_report(snapshot, {p.name: _LIVE for p in works})
    found = lost_nodes(
        lambda at: replace(reported, report_times={"t": NOW + min(at, late_s)}),
        lambda p, at: p.node == "a" and p.name != "works" and at >= 0,
        lambda name, at: name == "a" and at >= (-1 if is_ready else -35),
        response_s=response_s,
    )
    assert first_loss(found, "a") is None


@pytest.mark.parametrize(("others", "cut_s"), [(8, 7.0), (8, 2.25), (70, 3.25)])
def test_an_operator_that_was_cut_off_loses_no_node_for_that(others: int, cut_s: float) -> None:
    """Three nodes are NotReady, since their kubelets hang."""
    hanging = ("a", "o3", "o7")
    names = ["a", "own", *(f"o{i}" for i in range(others))]
    pods = [task(f"p{n}", n, i) for i, n in enumerate(names)]
    snapshot = replace(
        world({}, {}),
        nodes=tuple(replace(node(n), ready=n not in hanging) for n in names),
        pods=tuple(pods),
        own_node="own",
    )
    reported = with_report(snapshot, {p.name: _LIVE for p in pods})
    found = lost_nodes(
        lambda at: replace(reported, report_times={"t": NOW + min(at, -10.0)}),
        lambda p, at: False,
        lambda name, at: name in hanging and at >= -35,
        is_cut_off=lambda at: 0 <= at < cut_s,
    )
    assert {name for _, lost in found for name in lost} == set()


@pytest.mark.parametrize("topology", ["t", "v"])
def test_a_task_that_starts_and_responds_keeps_its_node(topology: str) -> None:
    """All reports are fresh. Node a is Ready, its kubelet hangs, and another task there is silent
    to its coordinator, and to the operator."""
    silent = task("pa", "a", 0)
    starts = replace(task("sa", "a", 1, topology), ready=False, was_ready=False)
    others = [task(f"p{n}", n, i) for i, n in enumerate("bc", 2)]
    snapshot = replace(world({}, {}), pods=(silent, starts, *others))

    def seen_at(at: float) -> Snapshot:
        suspected = {"suspected": True, "silentSeconds": 1.5} if at >= 1.75 else {}
        reports: dict[str, dict[str, Any]] = {"t": dict.fromkeys(("pb", "pc"), _LIVE), "v": {}}
        reports["t"]["pa"] = _LIVE | suspected
        reports[topology]["sa"] = {"phase": "Waiting"}
        return replace(
            with_topologies(snapshot, reports),
            report_times={"t": NOW + at, "v": NOW + at},
            suspects_silent_since={silent.ref: NOW} if suspected else {},
        )

    found = lost_nodes(
        seen_at, lambda p, at: p == silent and at >= 0, lambda name, at: name == "a" and at >= -10
    )
    assert first_loss(found, "a") is None


def test_pods_without_a_process_hide_no_other_one_from_a_process_without_memory() -> None:
    end = [
        replace(pod(f"e{i:02}", "a"), owner_uid=None, role=None, topology="x") for i in range(25)
    ]
    works = [task("works", "a", 0), task("pb", "b", 1), task("pc", "c", 2)]
    snapshot = world({}, {}, report_age_s=60.0)
    nodes = tuple(replace(n, ready=n.name != "a") for n in snapshot.nodes)
    found = lost_nodes(
        lambda at: replace(snapshot, nodes=nodes, pods=(*end, *works)),
        lambda p, at: p.node == "a" and p.name != "works",
        lambda name, at: name == "a",
        begin_s=0.0,
        response_s=0.25,
    )
    assert first_loss(found, "a") is None


def test_pods_that_are_deleted_one_after_another_keep_no_dead_node() -> None:
    """Node a dies with its kubelet and all pods, and its coordinator is elsewhere, but late."""
    here = [task(f"a{i:02}", "a", i) for i in range(12)]
    others = [task(f"p{n}", n, i) for i, n in enumerate("bc", 12)]
    snapshot = with_report(
        replace(world({}, {}), pods=(*here, *others)),
        {p.name: _LIVE for p in (*here, *others)},
    )

    def seen_at(at: float) -> Snapshot:
        pods = tuple(
            replace(p, terminating=at >= 0 and p in here[: int(at / 1.5) + 1])
            for p in snapshot.pods
        )
        return replace(snapshot, pods=pods, report_times={"t": NOW + min(at, 0.0)})

    found = lost_nodes(
        seen_at, lambda p, at: p.node == "a" and at >= 0, lambda name, at: name == "a" and at >= 0
    )
    at = first_loss(found, "a")
    assert at is not None
    assert at < 5
