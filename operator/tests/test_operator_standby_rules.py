"""The rules of who takes a standby, and which ones end: for any nodes, standbys and slots.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_parts import capacity, node, pod, query

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import Plan, make_plan
from rekindle_operator.recovery.preemption import without_pods
from rekindle_operator.recovery.standbys import (
    SlotToFill,
    Standby,
    in_the_way,
    match,
    starts_as_much,
)

pytestmark = pytest.mark.simulated

TEMPLATES = st.sampled_from([("t", "x"), ("t", "y"), ("u", "x")])


def standby(
    name: str,
    where: str,
    cpu: int = 1,
    *,
    warm: bool = True,
    template: tuple[str, str] = ("t", "x"),
) -> Standby:
    return Standby(
        uid=name,
        node=where,
        requests=ResourceAmounts(cpu, 1, 1),
        group="",
        replica=0,
        namespace="",
        name=name,
        template=template,
        is_warm=warm,
    )


def beside(standbys: list[Standby], **nodes: int) -> Capacity:
    """Nodes by name with so many CPUs, of which standbys use a part."""
    found = capacity(*(node(name, cpu) for name, cpu in nodes.items()))
    used = dict(found.nodes)
    for each in standbys:
        before = used[each.node]
        used[each.node] = replace(before, free=before.free - each.requests)
    return Capacity(used, found.allocatable)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Standby], Capacity]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    nodes = {f"n{i}": size for i, size in enumerate(sizes)}
    made: list[Standby] = []
    for name, size in nodes.items():
        left = size
        for _ in range(draw(st.integers(0, 2))):
            cpu = draw(st.integers(1, 3))
            if cpu <= left:
                left -= cpu
                warm, template = draw(st.booleans()), draw(TEMPLATES)
                made.append(standby(f"s{len(made)}", name, cpu, warm=warm, template=template))
    return made, beside(made, **nodes)


@given(world=worlds(), wanted=st.lists(st.tuples(st.integers(0, 2), TEMPLATES), max_size=6))
def test_no_standby_has_two_slots_and_no_node_two_replicas(
    world: tuple[list[Standby], Capacity], wanted: list[tuple[int, tuple[str, str]]]
) -> None:
    standbys, room = world
    slots = [
        SlotToFill(pod(f"p{i}", 1, group=f"g{group}", replica=i), template)
        for i, (group, template) in enumerate(wanted)
    ]
    found = match(slots, standbys, room)
    assert len({s.uid for s in found.values()}) == len(found)
    by_key = {slot.to_place.key: slot for slot in slots}
    assert all(s.is_warm and s.template == by_key[key].template for key, s in found.items())
    places = [(by_key[key].to_place.group, s.node) for key, s in found.items()]
    assert len(set(places)) == len(places)
    unused = [s for s in standbys if s.is_warm and s not in found.values()]
    for slot in slots:  # no standby is left that an empty-handed slot could have taken
        if slot.to_place.key not in found:
            for each in unused:
                taken = (slot.to_place.group, each.node) in places
                assert taken or each.template != slot.template


def _plans(
    queries: list[tuple[int, list[int]]], standbys: list[Standby], room: Capacity
) -> tuple[Plan, Plan]:
    """Beside the standbys, and without them."""
    pods = {
        f"p{cpu}-{i}": pod(f"p{cpu}-{i}", cpu)
        for i, (_, cpus) in enumerate(queries)
        for cpu in cpus
    }
    down = [
        query(f"q{i}", priority, *(f"p{cpu}-{i}" for cpu in cpus))
        for i, (priority, cpus) in enumerate(queries)
    ]
    free = without_pods(standbys, room)
    return make_plan(down, pods, (), room), make_plan(down, pods, (), free)


QUERIES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)),
    max_size=4,
)


@given(world=worlds(), queries=QUERIES)
def test_without_those_in_the_way_all_fits_that_would_without_any(
    world: tuple[list[Standby], Capacity], queries: list[tuple[int, list[int]]]
) -> None:
    standbys, room = world
    with_them, without = _plans(queries, standbys, room)
    keys = {f"p{cpu}-{i}" for i, (_, cpus) in enumerate(queries) for cpu in cpus}
    pods = {key: pod(key, int(key[1 : key.index("-")])) for key in keys}
    ended = in_the_way(with_them, without, pods, standbys, room)
    if starts_as_much(with_them, without) and len(with_them.nodes) >= len(without.nodes):
        assert ended == [] or not set(with_them.nodes) >= set(without.nodes)
        return
    assert ended, "a query waits for what standbys use"
    assert len({s.uid for s in ended}) == len(ended)
    freed = without_pods(ended, room)
    for name, at in freed.nodes.items():
        here = [pods[key] for key, where in without.nodes.items() if where == name]
        assert at.free.covers(total(each.requests for each in here)) or not here


def test_a_standby_elsewhere_stays() -> None:
    here, there = standby("here", "a", 2), standby("there", "b", 1)
    room = beside([here, there], a=2, b=1)
    with_them, without = _plans([(1, [2])], [here, there], room)
    assert in_the_way(with_them, without, {"p2-0": pod("p2-0", 2)}, [here, there], room) == [here]


def test_one_that_is_not_warm_goes_first() -> None:
    cold, warm = standby("z", "a", 1, warm=False), standby("b", "a", 1)
    room = beside([cold, warm], a=2)
    with_them, without = _plans([(1, [1])], [cold, warm], room)
    assert in_the_way(with_them, without, {"p1-0": pod("p1-0", 1)}, [warm, cold], room) == [cold]
