"""Probes four times a second, and what they prove, in whole histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

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

from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.cluster.probes import TICK_S, ProbeState
from rekindle_operator.recovery.kubelets import kubelets_to_probe
from rekindle_operator.recovery.late_reports import pods_to_probe
from rekindle_operator.recovery.losses import assess_nodes

_BEGIN_S = -50.0
_LIVE = {"phase": "Live", "stableEpoch": 5}


def lost_nodes(
    seen_at: Callable[[float], Snapshot],
    is_dead: Callable[[PodView, float], bool],
    kubelet_is_dead: Callable[[str, float], bool],
    until_s: float = 15.0,
) -> Iterator[tuple[float, set[str]]]:
    """At each tick from 0 on: the time, and the lost nodes. All times are in seconds from NOW."""
    kubelets, pods = ProbeState(detects_own_isolation=True), ProbeState()
    for tick in range(int(_BEGIN_S / TICK_S), int(until_s / TICK_S)):
        at = tick * TICK_S
        now = NOW + at

        def seen(at: float = at) -> Snapshot:
            return replace(seen_at(at), kubelet_probes=kubelets.results, pod_probes=pods.results)

        for probed in pods_to_probe(seen(), pods.busy(now), now, TIMING):
            pods.sent(probed.uid, now)
            if not is_dead(probed, at):
                pods.responded(probed.uid, now)
            pods.ended(probed.uid, now)
        for probed_node in kubelets_to_probe(seen(), kubelets.busy(now), now, TIMING):
            kubelets.sent(probed_node.uid, now)
            if not kubelet_is_dead(probed_node.name, at):
                kubelets.responded(probed_node.uid, now)
            kubelets.ended(probed_node.uid, now)
        if at >= 0:
            yield at, set(assess_nodes(seen(), now, TIMING).lost_nodes)


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
