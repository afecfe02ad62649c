"""Which task moves to an emptier node: the choice alone, on nodes as the planner sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_parts import node, pod

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import NodeView, Taint
from rekindle_operator.recovery.balance import MARGIN, MovableTask, NodeLoads
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity

ZONE = "topology.kubernetes.io/zone"
GPU = ResourceAmounts(100, 100, 10, (("nvidia.com/gpu", 1),))


@dataclass
class World:
    """Tasks on nodes. `moving`: key of a task -> the node of its successor. `foreign`: requests of
    pods of other owners, by node."""

    nodes: Mapping[str, NodeView]
    tasks: dict[str, tuple[PodToPlace, str]] = field(default_factory=dict)
    foreign: Mapping[str, ResourceAmounts] = field(default_factory=dict)
    moving: dict[str, str] = field(default_factory=dict)

    def on(self, name: str) -> list[PodToPlace]:
        """Successors too."""
        here = [task for task, at in self.tasks.values() if at == name]
        return here + [self.tasks[key][0] for key, target in self.moving.items() if target == name]

    def used(self, name: str) -> ResourceAmounts:
        return self.foreign.get(name, ResourceAmounts()) + total(p.requests for p in self.on(name))

    def capacity(self) -> Capacity:
        nodes = {
            name: NodeCapacity(
                view,
                view.allocatable - self.used(name),
                frozenset((p.group, p.replica) for p in self.on(name)),
            )
            for name, view in self.nodes.items()
        }
        return Capacity(nodes, total(n.allocatable for n in self.nodes.values()))

    def find(self, keys: Iterable[str] | None = None) -> tuple[str, str] | None:
        """Key and target of the move that begins next."""
        leaving = {
            name: total(self.tasks[key][0].requests for key in self.moving if self.at(key) == name)
            for name in self.nodes
        }
        chosen = self.tasks if keys is None else keys
        tasks = (
            MovableTask(self.at(k), self.tasks[k][0].requests, self.tasks[k][0]) for k in chosen
        )
        move = NodeLoads(self.capacity(), leaving, self.nodes.keys()).find_move(tasks)
        return None if move is None else (move.task.to_place.key, move.target)

    def at(self, key: str) -> str:
        return self.tasks[key][1]

    def move(self, key: str, target: str) -> None:
        self.tasks[key] = (self.tasks[key][0], target)

    def load(self, name: str) -> float:
        return self.used(name).highest_fraction_of(self.nodes[name].allocatable)

    def highest_load(self) -> float:
        return max(self.load(name) for name in self.nodes)


def world(nodes: Iterable[NodeView], **tasks: Any) -> World:
    """`tasks`: key -> node, or node and pod."""
    placed = {
        key: (pod(key, cpu_m=20, memory=1), at) if isinstance(at, str) else (at[1], at[0])
        for key, at in tasks.items()
    }
    return World({n.name: n for n in nodes}, placed)


A, B, C = (node(name, 100, pods=100) for name in "abc")


def test_a_task_moves_from_the_fullest_node_to_the_emptiest() -> None:
    assert world([A, B, C], x="a", y="a", z="b", w="b", v="b").find() == ("v", "c")


def test_nodes_that_differ_by_one_task_are_left_alone() -> None:
    assert world([A, B], x="a", y="a", z="b").find() is None


def test_a_move_that_wins_less_than_the_margin_is_not_made() -> None:
    small = {key: pod(key, cpu_m=int(50 * MARGIN)) for key in "xyz"}
    assert world([A, B], **{key: ("a", task) for key, task in small.items()}).find() is None


def test_a_task_that_does_not_make_its_node_emptier_stays() -> None:
    """Memory is what fills node a, by pods of others; the task requests CPU."""
    full = world([A, B], x=("a", pod("x", cpu_m=20, memory=0)))
    full.foreign = {"a": ResourceAmounts(0, 90, 1)}
    assert full.find() is None


def test_every_resource_counts() -> None:
    big = {key: ("a", pod(key, cpu_m=1, memory=30)) for key in "xyz"}
    assert world([A, B], **big).find() == ("x", "b")


@pytest.mark.parametrize(
    "target",
    [
        node("b", 100, taints=(Taint("dedicated", "x", "NoSchedule"),)),
        node("b", 15),
        replace(B, allocatable=GPU),
    ],
    ids=["tainted", "too small", "with devices that it does not need"],
)
def test_a_task_moves_only_to_a_node_for_it(target: NodeView) -> None:
    assert world([A, target], x="a", y="a", z="a").find() is None


def test_no_task_joins_another_replica_of_its_partition() -> None:
    replicas = {
        "x": ("a", pod("x", cpu_m=20, group="p", replica=0)),
        "y": ("b", pod("y", cpu_m=1, group="p", replica=1)),
    }
    assert world([A, B], **replicas, z=("a", pod("z", cpu_m=60))).find() == ("z", "b")
    replicas |= {
        "z": ("a", pod("z", cpu_m=60, group="q")),
        "w": ("b", pod("w", group="q", replica=1)),
    }
    assert world([A, B], **replicas).find() is None


def test_no_task_joins_the_zone_of_another_replica_of_its_partition() -> None:
    zones = [node(n, 100, labels={ZONE: z}) for n, z in (("a", "1"), ("b", "2"), ("c", "2"))]
    replicas = {
        "x": ("a", pod("x", cpu_m=40, group="p", replica=0)),
        "z": ("a", pod("z", cpu_m=40, group="q", replica=0)),
        "y": ("b", pod("y", cpu_m=1, group="p", replica=1)),
        "w": ("b", pod("w", cpu_m=1, group="q", replica=1)),
    }
    assert world(zones, **replicas).find() is None
    replicas["w"] = ("a", pod("w", cpu_m=1, group="q", replica=1))
    assert world(zones, **replicas).find() == ("z", "c")


def test_a_task_that_leaves_is_no_reason_for_another_to_leave() -> None:
    moving = world([A, B, C], x="a", y="a", z="b")
    moving.foreign = {"c": ResourceAmounts(10, 1, 1)}
    moving.tasks |= {"v": (pod("v", cpu_m=20), "a")}
    assert moving.find() == ("v", "c")
    moving.moving = {"v": "c"}
    assert moving.find(["x", "y"]) is None


# --- properties -------------------------------------------------------------

_AMOUNTS = st.builds(ResourceAmounts, st.integers(0, 40), st.integers(0, 40), st.just(1))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Tasks of two topologies, t0 and t1, placed anywhere that anti-affinity allows, even where
    they do not fit."""
    names = [f"n{i}" for i in range(draw(st.integers(1, 5)))]
    nodes = {
        name: node(
            name,
            draw(st.integers(20, 100)),
            memory=draw(st.integers(20, 100)),
            pods=draw(st.integers(5, 20)),
            labels={ZONE: draw(st.sampled_from(["", "1", "2"]))},
        )
        for name in names
    }
    made = World(nodes, foreign={n: draw(_AMOUNTS) for n in draw(st.sets(st.sampled_from(names)))})
    for number in range(draw(st.integers(0, 7))):
        group, requests = f"t{number % 2}/p{number}", draw(_AMOUNTS)
        replicas = draw(st.integers(1, min(3, len(names))))
        for replica, at in enumerate(draw(st.permutations(names))[:replicas]):
            key = f"{group}/{replica}"
            made.tasks[key] = (PodToPlace(key, requests, group, replica), at)
    return made


def _check(made: World, highest_before: float) -> None:
    assert made.highest_load() <= highest_before
    for name in made.nodes:
        numbers = {(p.group, p.replica) for p in made.on(name)}
        groups = [group for group, _ in numbers]
        assert len(groups) == len(set(groups)), f"two replicas of a partition are on {name}"


def _shared_zones(made: World) -> int:
    """Pairs of replicas of a partition that are in one zone."""
    zones = [
        (task.group, made.nodes[at].zone) for task, at in made.tasks.values() if made.nodes[at].zone
    ]
    return len(zones) - len(set(zones))


@given(worlds())
def test_moves_end_and_none_raises_the_highest_load(made: World) -> None:
    moves = 0
    while (found := made.find()) is not None:
        loads, shared = sorted(map(made.load, made.nodes), reverse=True), _shared_zones(made)
        key, target = found
        assert made.capacity().nodes[target].fits(made.tasks[key][0])
        made.move(key, target)
        _check(made, loads[0])
        assert sorted(map(made.load, made.nodes), reverse=True) < loads
        assert _shared_zones(made) <= shared
        moves += 1
        assert moves <= 3 * len(made.tasks)


@given(worlds(), st.lists(st.sampled_from(["t0", "t1", "t0 fails", "t1 fails"]), max_size=30))
def test_two_topologies_do_not_push_each_other_forever(made: World, steps: list[str]) -> None:
    """A step begins or ends a move of one topology; some moves fail. Later on all succeed."""
    highest, moves = made.highest_load(), 0
    by_topology = {t: [key for key in made.tasks if key.startswith(t)] for t in ("t0", "t1")}
    idle = 0
    while idle < 2:
        topology, _, fails = (steps.pop(0) if steps else f"t{moves % 2}").partition(" ")
        keys = by_topology[topology]
        if key := next((key for key in made.moving if key in keys), ""):
            target = made.moving.pop(key)
            if not fails:
                made.move(key, target)
            idle = 0
        elif found := made.find(keys):
            made.moving[found[0]] = found[1]
            idle = 0
        elif not steps:
            idle += 1
        _check(made, highest)
        moves += 1
        assert moves <= 30 + 8 * len(made.tasks) + 2
