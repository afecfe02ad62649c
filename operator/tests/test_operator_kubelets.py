"""Probes of kubelets: which the operator probes, and whose silence counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubelet_parts import START, node, task

from rekindle_operator.cluster.convert import node_view
from rekindle_operator.cluster.model import (
    PodEndpoint,
    ProbeResults,
    Snapshot,
    TopologyView,
)
from rekindle_operator.cluster.probes import TICK_S, ProbeState
from rekindle_operator.recovery.kubelets import kubelets_to_probe
from rekindle_operator.recovery.losses import assess_nodes
from rekindle_operator.settings import Timing

pytestmark = pytest.mark.simulated

TIMING = Timing()


class ProbingOperator:
    """It probes the kubelets of `nodes`, each with one task, on its own clock.

    A kubelet of `delays` responds after so many seconds, while it lives and can be reached.
    """

    def __init__(self, delays: Iterable[float], suspected_s: float = 1.5) -> None:
        self.now = START
        self.delays = {f"n{i}": delay for i, delay in enumerate(delays)}
        self.suspected_s = suspected_s  # after which a coordinator reports a task that is silent
        self.dead: set[str] = set()
        self.isolated = False  # from all nodes but its own, which is the first
        self.quarantined: dict[str, float] = {}
        self.last_report_at: float | None = None  # None: the coordinator reports
        self.probes = ProbeState(detects_own_isolation=True)
        # When response and deadline of each probe come, by node and when it was sent. Without a
        # response: the probe did not arrive.
        self.pending: dict[tuple[str, float], tuple[float, float]] = {}
        self.silent_tasks: dict[str, float] = {}
        self.nodes = {name: node(name) for name in self.delays}
        self.pods = {name: task(i, name) for i, name in enumerate(self.nodes)}

    def snapshot(self) -> Snapshot:
        reported = {
            self.pods[name].ref: since
            for name, since in self.silent_tasks.items()
            if self.now - since >= self.suspected_s
        }
        return Snapshot(
            pods=tuple(self.pods.values()),
            nodes=tuple(self.nodes.values()),
            suspects_silent_since=reported if self.last_report_at is None else {},
            report_times={"uid-t": self.last_report_at or self.now},
            pod_probes={pod.uid: self._pod_results(name) for name, pod in self.pods.items()},
            kubelet_probes=self.probes.results,
            quarantined=self.quarantined,
            own_node=next(iter(self.nodes)),
        )

    def _pod_results(self, name: str) -> ProbeResults:
        """Of its pod, which is probed at each tick."""
        if name not in self.dead:
            return ProbeResults(self.now, self.now)
        died_at = self.silent_tasks.get(name, self.now)
        return ProbeResults(self.now, died_at, min(self.now, died_at + TICK_S))

    def lost(self) -> set[str]:
        return set(assess_nodes(self.snapshot(), self.now, TIMING).lost_nodes)

    def tick(self, after_s: float = TICK_S, lose_response_of: str = "") -> set[str]:
        """Nodes that were lost meanwhile. A process that was paused sends what it had to send only
        after the pause, and reads responses as late."""
        self.now += after_s
        lost = self.lost()
        self._probe(after_s, lose_response_of)
        return lost | self.lost()

    def _probe(self, after_s: float, lose_response_of: str = "") -> None:
        self.probes.retain({n.uid for n in self.nodes.values()}, local={"uid-n0"})
        self.probes.reset_after_pause(self.now)
        for (name, sent_at), (response_at, until) in list(self.pending.items()):
            at = response_at if after_s <= 2 * TICK_S else max(response_at, self.now + TICK_S)
            self.pending[name, sent_at] = at, until
            if at <= self.now and self._is_reached(name) and name != lose_response_of:
                self.probes.responded(f"uid-{name}", sent_at)
                self._close(name, sent_at)
            elif until <= self.now or name == lose_response_of:
                self._close(name, sent_at)
        for due in kubelets_to_probe(self.snapshot(), self.probes.busy(self.now), self.now, TIMING):
            self.probes.sent(due.uid, self.now)
            arrives = self._is_reached(due.name)
            response_at = self.now + self.delays[due.name] if arrives else inf
            until = self.now + 2 * TIMING.kubelet_silent_s
            self.pending[due.name, self.now] = response_at, until

    def _is_reached(self, name: str) -> bool:
        own = name == next(iter(self.nodes))
        return name not in self.dead and (own or not self.isolated)

    def _close(self, name: str, sent_at: float) -> None:
        self.probes.ended(f"uid-{name}", sent_at)
        del self.pending[name, sent_at]

    def run(self, seconds: float) -> set[str]:
        lost: set[str] = set()
        for _ in range(round(seconds / TICK_S)):
            lost |= self.tick()
        return lost

    def probe_only(self, seconds: float) -> None:
        """As `run`, but nobody asks which nodes are lost: that changes nothing of the state."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self._probe(TICK_S)

    def freeze(self, *names: str) -> None:
        self.dead |= set(names)
        self.silent_tasks |= dict.fromkeys(names, self.now)


_DELAYS = st.lists(st.sampled_from([0.0, 0.1, 0.6, 1.0]), min_size=3, max_size=5)
_TICKS = st.lists(st.sampled_from([TICK_S, TICK_S, TICK_S, 0.4, 0.9, 2.9]), max_size=40)


@given(
    _DELAYS, _TICKS, st.sets(st.integers(0, 4)), st.sampled_from([1.5, 3.0, 5.0]), st.integers(0, 9)
)
def test_a_node_whose_kubelet_responds_is_not_lost(
    delays: list[float], ticks: list[float], silent: set[int], suspected_s: float, missed_at: int
) -> None:
    """Whatever its task does, whatever response gets lost, however late the operator and the
    suspicion are, and whoever else has died."""
    operator = ProbingOperator(delays, suspected_s)
    operator.probe_only(9.0)
    names = list(operator.nodes)
    operator.silent_tasks = {names[i]: operator.now for i in silent if i < len(names)}
    operator.freeze(names[-1])
    for number, after_s in enumerate(ticks):
        missed = names[1] if number == missed_at else ""
        assert operator.tick(after_s, missed) <= {names[-1]}


@given(st.integers(0, 20), st.integers(0, 8), st.integers(0, 4))
def test_a_kubelet_that_is_cut_off_for_a_moment_is_not_silent(
    ticks_before: int, ticks_silent: int, ticks_cut: int
) -> None:
    """The probes that it did not get have no response yet; later ones have one."""
    operator = ProbingOperator([0.0] * 3)
    operator.probe_only(9.0 + ticks_before * TICK_S)
    operator.silent_tasks = {"n1": operator.now}
    lost = operator.run(ticks_silent * TICK_S)
    operator.dead = {"n1"}
    lost |= operator.run(ticks_cut * TICK_S)
    operator.dead = set()
    assert lost | operator.run(9.0) == set()


@given(_DELAYS, st.integers(0, 60), st.integers(1, 4))
def test_dead_nodes_with_single_tasks_are_lost_in_time(
    delays: list[float], ticks_before: int, dead: int
) -> None:
    operator = ProbingOperator(delays)
    operator.probe_only(1.5 + ticks_before * TICK_S)
    others = list(operator.nodes)[1:]  # one of them lives, and so does the operator's own
    victims = set(others[: min(dead, len(others) - 1)])
    operator.freeze(*victims)
    assert operator.run(2.75) == set()
    operator.probe_only(1.75)
    assert operator.lost() == victims


@given(_DELAYS, st.sets(st.integers(0, 4), min_size=1))
def test_the_kubelet_of_its_own_node_proves_nothing(delays: list[float], silent: set[int]) -> None:
    operator = ProbingOperator(delays)
    operator.probe_only(2.0)
    operator.isolated = True
    names = list(operator.nodes)
    operator.silent_tasks = {names[i]: operator.now for i in silent if i < len(names)}
    assert operator.run(9.0) == set()


@given(st.sampled_from([4, 12, 70]), st.integers(0, 8), st.integers(0, 30))
def test_when_the_operator_can_be_reached_again_no_node_is_lost(
    nodes: int, ticks_before: int, ticks_isolated: int
) -> None:
    """Nodes that it has not probed since respond as well, but cannot have done so yet."""
    operator = ProbingOperator([0.05] * nodes)
    operator.probe_only(9.0 + ticks_before * TICK_S)
    operator.silent_tasks = {f"n{i}": operator.now for i in range(1, nodes)}
    operator.isolated = True
    lost = operator.run(ticks_isolated * TICK_S)
    operator.isolated = False
    assert lost | operator.run(6.0) == set()


def test_a_node_that_died_while_the_operator_was_isolated_is_lost_soon_after() -> None:
    operator = ProbingOperator([0.05] * 40)
    operator.probe_only(9.0)
    operator.isolated = True
    operator.probe_only(5.0)
    operator.freeze("n1")
    operator.probe_only(5.0)
    operator.isolated = False
    assert operator.run(1.25) == set()
    assert operator.run(1.5) == {"n1"}


@pytest.mark.parametrize("slow_s", [0.8, 1.1, 1.4, 2.0])
@pytest.mark.parametrize("nodes", [4, 20])
def test_a_node_that_responds_late_keeps_no_other_from_being_lost(
    nodes: int, slow_s: float
) -> None:
    operator = ProbingOperator([0.05, 0.05, 0.05, slow_s, *[0.05] * (nodes - 4)])
    operator.probe_only(9.0)
    operator.freeze("n1")
    for tick in range(20):
        operator.tick(TICK_S + (0.0, 0.02, 0.01)[tick % 3])
    assert operator.lost() == {"n1"}


@pytest.mark.parametrize(("nodes", "dead"), [(100, 98), (200, 100), (400, 100)])
def test_many_nodes_that_die_with_their_coordinator_are_lost_in_time(nodes: int, dead: int) -> None:
    """Then all nodes are suspects."""
    operator = ProbingOperator([0.05] * nodes)
    operator.probe_only(14.0)
    victims = {f"n{i}" for i in range(1, dead + 1)}
    operator.freeze(*victims)
    operator.last_report_at = operator.now
    operator.probe_only(9.0)
    assert operator.lost() == victims


def test_dead_nodes_leave_time_for_probes_of_the_others() -> None:
    """Their objects stay, and they are probed until they may get pods again."""
    operator = ProbingOperator([0.0] * 230)
    operator.probe_only(12.0)
    dead = {f"n{i}" for i in range(80, 230)}
    for name in dead:
        del operator.pods[name]  # replaced elsewhere
    operator.dead = dead
    operator.quarantined = dict.fromkeys((f"uid-{n}" for n in dead), operator.now)
    for _ in range(120):
        operator.probe_only(TICK_S)
        results = operator.probes.results
        for i in range(1, 80):
            answered_probe_at = results[f"uid-n{i}"].answered_probe_at
            assert answered_probe_at is not None
            assert operator.now - answered_probe_at < TIMING.probe_interval_s + 5


def test_a_hundred_nodes_that_die_at_once_are_lost_in_time() -> None:
    operator = ProbingOperator([0.0] * 110)
    operator.probe_only(4.0)
    victims = {f"n{i}" for i in range(10, 110)}
    operator.freeze(*victims)
    operator.probe_only(4.5)
    assert operator.lost() == victims


def test_a_clock_that_was_set_back_makes_no_kubelet_silent() -> None:
    operator = ProbingOperator([0.0, 1.0, 0.0])
    operator.probe_only(2.0)
    operator.now -= 60
    operator.silent_tasks = {"n1": operator.now - 5}
    assert operator.run(9.0) == set()


def test_a_reset_timer_counts_from_then_on() -> None:
    operator = ProbingOperator([0.0] * 3)
    operator.probe_only(2.0)
    operator.freeze("n1")
    operator.probe_only(2.5)
    operator.probes.reset_timers(operator.now)
    assert operator.run(1.25) == set()
    assert operator.run(1.0) == {"n1"}


def test_tasks_lost_together_need_no_responding_task() -> None:
    operator = ProbingOperator([0.0] * 4)
    del operator.pods["n0"], operator.pods["n3"]
    operator.probe_only(1.5)
    operator.freeze("n1", "n2")
    operator.probe_only(4.5)
    assert operator.lost() == {"n1", "n2"}


def test_a_kubelet_that_never_responded_is_no_signal() -> None:
    operator = ProbingOperator([0.0] * 3)
    operator.dead = {"n1"}
    operator.probe_only(5.0)
    operator.freeze("n1")
    assert operator.run(9.0) == set()


def test_a_kubelet_silent_long_before_is_no_signal() -> None:
    operator = ProbingOperator([0.0] * 3)
    operator.probe_only(2.0)
    operator.dead = {"n1"}
    operator.probe_only(40.0)
    operator.freeze("n1")
    assert operator.run(9.0) == set()


def test_a_responding_task_keeps_its_node() -> None:
    operator = ProbingOperator([0.0] * 3)
    operator.probe_only(2.0)
    operator.dead = {"n1"}
    operator.silent_tasks = {"n2": operator.now}
    assert operator.run(9.0) == set()


def test_kubelets_are_probed_at_each_tick_only_on_suspicion() -> None:
    nodes = tuple(node(name) for name in "abcdefg")
    probed = {n.uid: ProbeResults(START, START) for n in nodes}
    pods = (task(0, "a"), task(1, "b"))
    quiet = Snapshot(pods=pods, nodes=nodes, kubelet_probes=probed, own_node="c")
    assert probe(quiet, START + 5) == []
    assert probe(quiet, START + 10) == ["a", "b", "d"]
    alarmed = replace(quiet, suspects_silent_since={pods[0].ref: START})
    assert probe(alarmed, START + 0.5) == ["b", "d", "e", "a"], (
        "some to compare it with, and itself"
    )
    assert probe(alarmed, START + 1)[:4] == ["b", "d", "e", "a"]
    assert set(probe(alarmed, START + 1)) == set("abcdefg"), "tasks may have to go to any of them"
    unanswered = replace(
        quiet,
        kubelet_probes=probed | {"uid-b": ProbeResults(START, START - 9, unanswered_since=START)},
    )
    assert probe(unanswered, START + 1) == ["a", "d", "e", "b"]


def test_a_node_is_probed_for_as_long_as_its_quarantine_may_last() -> None:
    nodes = tuple(node(name) for name in "abc")
    probed = {n.uid: ProbeResults(START, START) for n in nodes}
    snapshot = Snapshot(nodes=nodes, kubelet_probes=probed, quarantined={"uid-b": START - 58})
    assert probe(snapshot, START + 0.5) == []
    assert probe(snapshot, START + 1) == ["a", "b", "c"], "with others to compare it with"
    assert probe(snapshot, START + 2) == [], "a minute is over"


def probe(snapshot: Snapshot, now: float) -> list[str]:
    return [n.name for n in kubelets_to_probe(snapshot, frozenset(), now, TIMING)]


def test_a_kubelet_without_an_address_is_not_probed() -> None:
    nodes = (node("a", kubelet=None), node("b"))
    snapshot = Snapshot(pods=(task(0, "a"), task(1, "b")), nodes=nodes)
    assert probe(snapshot, START) == ["b"]


def test_a_node_that_is_not_ready_is_probed_at_each_tick() -> None:
    nodes = (node("a", ready=False), node("b"), node("c"))
    probed = {n.uid: ProbeResults(START, START) for n in nodes}
    snapshot = Snapshot(pods=(task(0, "a"), task(1, "b")), nodes=nodes, kubelet_probes=probed)
    assert probe(snapshot, START + 1) == ["b", "c", "a"], "with others to compare it with"


def test_a_response_to_an_earlier_probe_leaves_the_later_one_unanswered() -> None:
    probes = ProbeState()
    for at in (START, START + 1, START + 2):
        probes.sent("a", at)
    probes.responded("a", START)
    assert probes.results["a"] == ProbeResults(START + 2, START, unanswered_since=START + 1)
    probes.responded("a", START + 2)
    probes.responded("a", START + 1)  # by another connection
    assert probes.results["a"] == ProbeResults(START + 2, START + 2)
    probes.sent("a", START + 3)
    probes.sent("a", START + 4)
    probes.reset_timers(START + 5)
    probes.responded("a", START + 3)
    assert probes.results["a"] == ProbeResults(START + 4, START + 3, unanswered_since=START + 5)


def test_a_node_that_was_not_probed_since_a_reset_is_not_avoided() -> None:
    nodes = tuple(node(name) for name in "abc")
    responding = ProbeResults(START + 3, START + 3)
    for sent_at, avoided in ((START - 1, set()), (START + 1, {"uid-b"})):
        unanswered = ProbeResults(sent_at, START - 9, unanswered_since=START)
        snapshot = Snapshot(
            nodes=nodes, kubelet_probes={"uid-a": responding, "uid-b": unanswered}, own_node="c"
        )
        usable = assess_nodes(snapshot, START + 3, TIMING).usable_nodes
        assert {n.uid for n in nodes if n.name not in usable} == avoided


def test_a_late_response_does_not_undo_a_reset() -> None:
    probes = ProbeState(detects_own_isolation=True)
    for at in (START, START + 1):
        for uid in "ab":
            probes.sent(uid, at)
    probes.reset_timers(START + 5)
    probes.responded("b", START + 1)
    probes.responded("a", START)
    assert probes.results["a"].unanswered_probe_since is None


@pytest.mark.parametrize(("answered_after_s", "is_reset"), [(0.52, False), (1.0, True)])
def test_one_late_response_is_not_taken_for_a_cut(answered_after_s: float, is_reset: bool) -> None:
    """Two ticks may be a little longer than 0.5 s; the first probe of them has no response yet."""
    probes = ProbeState(detects_own_isolation=True)
    for uid in "ab":
        probes.sent(uid, START)
    probes.sent("a", START + answered_after_s)
    probes.responded("a", START + answered_after_s)
    assert (probes.results["b"].unanswered_since != START) == is_reset


def test_a_clock_that_was_set_back_leaves_no_times_of_before() -> None:
    probes = ProbeState()
    probes.reset_after_pause(START + 3600)
    probes.sent("a", START + 3600)
    probes.reset_timers(START + 3600)
    probes.reset_after_pause(START)
    assert probes.busy(START) == set()
    probes.responded("a", START + 3600)
    probes.ended("a", START + 3600)
    probes.sent("a", START)
    probes.sent("a", START + 1)
    probes.responded("a", START)
    assert probes.results["a"] == ProbeResults(START + 1, START, unanswered_since=START + 1)


def test_a_probe_without_a_response_does_not_hold_up_the_next() -> None:
    probes = ProbeState()
    probes.sent("a", START)
    assert probes.busy(START + TICK_S) == {"a"}
    assert probes.busy(START + 2 * TICK_S) == set()
    probes.sent("a", START + 2 * TICK_S)
    probes.ended("a", START)
    assert probes.busy(START + 3 * TICK_S) == {"a"}
    probes.ended("a", START + 2 * TICK_S)
    assert probes.busy(START + 3 * TICK_S) == set()


def test_results_of_a_deleted_node_are_forgotten() -> None:
    probes = ProbeState()
    for uid in ("a", "b"):
        probes.sent(uid, START)
    probes.retain({"b"})
    assert probes.results == {"b": ProbeResults(START, unanswered_since=START)}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {
                "addresses": [
                    {"type": "Hostname", "address": "a"},
                    {"type": "InternalIP", "address": "10.0.0.7"},
                    {"type": "InternalIP", "address": "fd00::7"},
                ],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            },
            PodEndpoint("10.0.0.7", 10250),
        ),
        ({"addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]}, None),
        ({"daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}}}, None),
        ({}, None),
    ],
)
def test_the_address_of_a_kubelet(status: dict[str, object], expected: PodEndpoint | None) -> None:
    raw = {"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}, "status": status}
    assert node_view(raw).kubelet == expected


def test_a_pod_that_has_not_responded_makes_no_report_credible() -> None:
    pods = (task(0, "a"), task(1, "a"), task(2, "b"))
    report = [{"slot": p.slot.key, "incarnation": 1, "phase": "Waiting"} for p in pods if p.slot]
    responded = {**report[2], "phase": "Live", "stableEpoch": 7}
    silent = {pods[0].ref: START, pods[1].ref: START}

    def lost(tasks: list[dict[str, object]]) -> set[str]:
        status = {"dataPlane": {"fence": 1, "tasks": tasks}}
        topology = TopologyView(
            namespace="default",
            name="t",
            uid="uid-t",
            version=1,
            generation=1,
            creation_timestamp="",
            deleting=False,
            spec={},
            status=status,
        )
        reports = {"uid-t": START + 5}
        nodes = node("a"), node("b")
        snapshot = Snapshot(
            (topology,), pods, nodes, suspects_silent_since=silent, report_times=reports
        )
        return set(assess_nodes(snapshot, START + 5, TIMING).lost_nodes)

    assert lost(report) == set()
    assert lost([*report[:2], responded]) == {"a"}
