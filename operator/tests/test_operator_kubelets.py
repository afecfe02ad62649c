"""Kubelets as witnesses: whom the operator asks, and whose silence it believes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.topology.model import Slot
from rekindle_operator import names
from rekindle_operator.cluster.amounts import Amounts
from rekindle_operator.cluster.convert import node_view
from rekindle_operator.cluster.model import Endpoint, KubeletWord, NodeView, PodView, Snapshot
from rekindle_operator.recovery.judge import judge_nodes
from rekindle_operator.recovery.kubelets import kubelets_to_ask, silent_kubelets
from rekindle_operator.settings import Timing

TIMING = Timing()
START = 1_800_000_000.0
TICK_S = 0.25
SUSPECTED_S = 1.5  # after which a coordinator reports a task that is silent


def node(name: str, **more: object) -> NodeView:
    made = NodeView(name, f"uid-{name}", 1, True, 0.0, False, (), {}, Amounts(4000, 8 << 30, 50))
    usual = {"kubelet": Endpoint("127.0.0.1", 10250)}
    return replace(made, **{**usual, **more})  # type: ignore[arg-type]


def task(number: int, on: str, owner: str = "uid-t") -> PodView:
    """The one task of its segment."""
    return PodView(
        "default",
        f"t-{number}",
        f"uid-t-{number}",
        1,
        START,
        "Running",
        on,
        Amounts(),
        owner_uid=owner,
        topology="t",
        role=names.ROLE_TASK,
        slot=Slot(f"s{number}", 0, 0),
        incarnation=1,
    )


class Watch:
    """An operator that asks the kubelets of `nodes`, each with one task, on a clock of its own.

    A kubelet of `delays` answers after so many seconds, while it lives and can be reached.
    """

    def __init__(self, delays: Iterable[float]) -> None:
        self.now = START
        self.delays = {f"n{i}": delay for i, delay in enumerate(delays)}
        self.dead_since: dict[str, float] = {}
        self.cut_off = False
        self.words: dict[str, KubeletWord] = {}
        self.answers: list[tuple[float, str]] = []  # when each comes, and whose
        self.silent_tasks: dict[str, float] = {}
        self.nodes = {name: node(name) for name in self.delays}
        self.pods = {name: task(i, name) for i, name in enumerate(self.nodes)}

    def snapshot(self) -> Snapshot:
        reported = {
            self.pods[name].ref: since
            for name, since in self.silent_tasks.items()
            if self.now - since >= SUSPECTED_S
        }
        return Snapshot(
            pods=tuple(self.pods.values()),
            nodes=tuple(self.nodes.values()),
            silent_since=reported,
            kubelets=dict(self.words),
        )

    def lost(self) -> set[str]:
        return set(judge_nodes(self.snapshot(), self.now, TIMING).lost_nodes)

    def tick(self, after_s: float = TICK_S) -> set[str]:
        """What is lost now. A process that was away sends its questions as late as it comes."""
        self.now += after_s
        lost = self.lost()
        stalled = after_s > 2 * TICK_S
        if stalled:
            self.words = {uid: w.excused(self.now) for uid, w in self.words.items()}
            self.answers = [(self.now + self.delays[name], name) for _, name in self.answers]
            heapq.heapify(self.answers)
        while self.answers and self.answers[0][0] <= self.now:
            _, name = heapq.heappop(self.answers)
            if name not in self.dead_since and not self.cut_off:
                self.words[f"uid-{name}"] = self.words[f"uid-{name}"].after_answer()
        waiting = {name for _, name in self.answers}
        for due in kubelets_to_ask(self.snapshot(), self.now, TIMING):
            if due.name not in waiting:
                word = self.words.get(due.uid, KubeletWord(self.now))
                self.words[due.uid] = word.after_question(self.now)
                heapq.heappush(self.answers, (self.now + self.delays[due.name], due.name))
        return lost | self.lost()

    def run(self, seconds: float) -> set[str]:
        lost: set[str] = set()
        for _ in range(round(seconds / TICK_S)):
            lost |= self.tick()
        return lost

    def freeze(self, name: str) -> None:
        self.dead_since[name] = self.silent_tasks[name] = self.now


_DELAYS = st.lists(st.sampled_from([0.0, 0.1, 0.6, 1.0]), min_size=2, max_size=5)
_TICKS = st.lists(st.sampled_from([TICK_S, TICK_S, TICK_S, 0.4, 0.9, 2.9]), max_size=40)


@given(_DELAYS, _TICKS, st.sets(st.integers(0, 4)))
def test_a_node_whose_kubelet_answers_is_not_lost_for_its_only_tasks_silence(
    delays: list[float], ticks: list[float], silent: set[int]
) -> None:
    """Whatever its task does, however late the operator is, and whoever else has died."""
    watch = Watch(delays)
    watch.run(1.0)
    names = list(watch.nodes)
    watch.silent_tasks = {names[i]: watch.now for i in silent if i < len(names)}
    watch.freeze(names[-1])
    for after_s in ticks:
        assert watch.tick(after_s) <= {names[-1]}


@given(_DELAYS, st.integers(0, 40), st.integers(1, 4))
def test_nodes_that_die_with_their_only_tasks_are_lost_in_time_for_a_replacement(
    delays: list[float], ticks_before: int, dead: int
) -> None:
    watch = Watch(delays)
    watch.run(1.5 + ticks_before * TICK_S)
    victims = set(list(watch.nodes)[: min(dead, len(watch.nodes) - 1)])
    for name in victims:
        watch.freeze(name)
    assert watch.run(2.75) == set()
    watch.run(1.75)
    assert watch.lost() == victims


@given(_DELAYS, st.sets(st.integers(0, 4), min_size=1))
def test_an_operator_that_hears_no_kubelet_believes_none_is_silent(
    delays: list[float], silent: set[int]
) -> None:
    watch = Watch(delays)
    watch.run(2.0)
    watch.cut_off = True
    names = list(watch.nodes)
    watch.silent_tasks = {names[i]: watch.now for i in silent if i < len(names)}
    assert watch.run(9.0) == set()


def test_the_tasks_of_a_topology_that_died_as_one_need_no_coordinator_that_hears_another() -> None:
    watch = Watch([0.0, 0.0])
    watch.nodes["spare"] = node("spare")
    watch.delays["spare"] = 0.0
    watch.run(1.5)
    watch.freeze("n0")
    watch.freeze("n1")
    watch.run(4.5)
    assert watch.lost() == {"n0", "n1"}


def test_a_kubelet_that_never_answered_is_no_witness() -> None:
    watch = Watch([0.0, 0.0])
    watch.dead_since["n0"] = watch.now
    watch.run(5.0)
    watch.freeze("n0")
    assert watch.run(9.0) == set()


def test_a_kubelet_that_was_silent_long_before_its_task_is_no_witness() -> None:
    watch = Watch([0.0, 0.0])
    watch.run(2.0)
    watch.dead_since["n0"] = watch.now
    watch.run(40.0)
    watch.freeze("n0")
    assert watch.run(9.0) == set()


def test_a_task_that_starts_is_heard_whatever_its_kubelet_does() -> None:
    watch = Watch([0.0, 0.0])
    watch.run(2.0)
    watch.dead_since["n0"] = watch.now
    assert watch.run(9.0) == set()


def test_a_kubelet_is_asked_often_only_while_a_task_of_its_node_is_silent() -> None:
    nodes = tuple(node(name) for name in "abcdefg")
    asked = {n.uid: KubeletWord(START, START) for n in nodes}
    pods = (task(0, "a"), task(1, "b"))
    quiet = Snapshot(pods=pods, nodes=nodes, kubelets=asked)
    assert kubelets_to_ask(quiet, START + 5, TIMING) == []
    assert [n.name for n in kubelets_to_ask(quiet, START + 10, TIMING)] == ["a", "b"]
    alarmed = replace(quiet, silent_since={pods[0].ref: START})
    due = [n.name for n in kubelets_to_ask(alarmed, START + 1, TIMING)]
    assert due == ["b", "c", "d", "a"], "some to compare it with, and itself"


def test_of_a_large_cluster_those_in_doubt_are_asked_first() -> None:
    nodes = tuple(node(f"n{i:03}") for i in range(200))
    pods = tuple(task(i, n.name) for i, n in enumerate(nodes))
    snapshot = Snapshot(pods=pods, nodes=nodes, silent_since={pods[-1].ref: START})
    due = kubelets_to_ask(snapshot, START, TIMING)
    assert len(due) == 32
    assert nodes[-1] in due


def test_nobody_is_asked_who_says_not_where_or_is_not_ready() -> None:
    nodes = (node("a", kubelet=None), node("b", ready=False))
    snapshot = Snapshot(pods=(task(0, "a"), task(1, "b")), nodes=nodes)
    assert kubelets_to_ask(snapshot, START, TIMING) == []


def test_what_was_not_answered_before_an_excuse_counts_from_it() -> None:
    word = KubeletWord(START, START - 1, START).excused(START + 1)
    words = {"uid-a": word, "uid-b": KubeletWord(START + 2, START + 2)}
    assert silent_kubelets([node("a")], words, START + 2, TIMING) == frozenset()
    words["uid-b"] = KubeletWord(START + 3, START + 3)
    assert silent_kubelets([node("a")], words, START + 3, TIMING) == {"a"}


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
            Endpoint("10.0.0.7", 10250),
        ),
        ({"addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]}, None),
        ({"daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}}}, None),
        ({}, None),
    ],
)
def test_where_a_kubelet_can_be_asked(status: dict[str, object], expected: Endpoint | None) -> None:
    raw = {"metadata": {"name": "a", "uid": "u", "resourceVersion": "1"}, "status": status}
    assert node_view(raw).kubelet == expected
