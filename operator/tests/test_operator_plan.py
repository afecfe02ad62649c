"""Plan and pack: profit density (docs/design/recovery.md#plan), capacity, anti-affinity, spares."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_parts import capacity, node, pod, query, started

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import Taint, Toleration
from rekindle_operator.recovery.affinity import matches, required_terms
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity, pack
from rekindle_operator.recovery.plan import SpareReplica, make_plan


def test_the_papers_density_prefers_queries_that_share_operators() -> None:
    """Su and Zhou 2017, section 5: the priority of a query is divided by the cost of its missing
    partitions, each shared by the queries that use it (C_k / f_k). Alone each of A and B costs
    4 + 1; together they share the 4."""
    pods = {n: pod(n, cpu) for n, cpu in (("shared", 4), ("a", 1), ("b", 1), ("c", 4))}
    queries = [query("A", 10, "shared", "a"), query("B", 10, "shared", "b"), query("C", 10, "c")]
    plan = make_plan(queries, pods, [], capacity(node("n", 6)))
    assert started(plan) == ["A", "B"]
    assert [r.key[1] for r in plan.waiting] == ["C"]


def test_remaining_capacity_goes_to_the_next_best_query() -> None:
    pods = {n: pod(n, cpu) for n, cpu in (("big", 5), ("huge", 8), ("small", 1))}
    queries = [query("B", 100, "big"), query("H", 100, "huge"), query("S", 1, "small")]
    assert started(make_plan(queries, pods, [], capacity(node("n", 6)))) == ["B", "S"]


@pytest.mark.parametrize("priority", [0, 1])
def test_one_costly_query_does_not_go_before_many_cheap_ones_of_its_priority(priority: int) -> None:
    pods = {"costly": pod("costly", 6)} | {f"p{n}": pod(f"p{n}") for n in range(6)}
    cheap = [query(f"cheap-{n}", priority, f"p{n}") for n in range(6)]
    queries = [query("a-costly", priority, "costly"), *cheap]
    plan = make_plan(queries, pods, [], capacity(node("n", 6)))
    assert started(plan) == [q.key[1] for q in cheap]


def test_of_equal_sums_the_one_with_more_queries_is_taken() -> None:
    """The dense query leaves room for one of those that share all of `big`."""
    pods = {name: pod(name) for name in ("dense", "a", "b", "c", "d")}
    queries = [
        query("dense", 2, "dense"),
        query("big", 2, "a", "b", "c", "d"),
        query("first", 0, "a", "b", "c"),
        query("second", 0, "b", "c", "d"),
    ]
    assert set(started(make_plan(queries, pods, [], capacity(node("n", 4))))) == {
        "big",
        "first",
        "second",
    }


def test_a_second_resource_can_be_the_short_one() -> None:
    pods = {"a": pod("a", 1, memory=60), "b": pod("b", 1, memory=60)}
    plan = make_plan([query("A", 2, "a"), query("B", 1, "b")], pods, [], capacity(node("n", 50)))
    assert started(plan) == ["A"]


def test_the_number_of_pods_is_a_resource() -> None:
    pods = {"a": pod("a"), "b": pod("b")}
    plan = make_plan(
        [query("A", 2, "a"), query("B", 1, "b")], pods, [], capacity(node("n", 50, pods=1))
    )
    assert started(plan) == ["A"]


def test_replicas_of_one_partition_never_share_a_node() -> None:
    replicas = [pod(f"r{r}", group="p", replica=r) for r in range(3)]
    assert pack(replicas, capacity(node("a", 9), node("b", 9))) is None
    placement = pack(replicas, capacity(node("a", 9), node("b", 9), node("c", 9)))
    assert placement is not None
    assert len(set(placement.nodes.values())) == 3


def test_taints_and_selectors_are_obeyed() -> None:
    tainted = node("tainted", 9, taints=(Taint("dedicated", "x", "NoSchedule"),))
    labelled = node("labelled", 9, labels={"disk": "ssd"})
    everywhere = capacity(tainted, labelled)
    tolerant = Toleration("dedicated", "Equal", "x", "")
    placed = pack(
        [PodToPlace("t", ResourceAmounts(1), "t", 0, tolerations=(tolerant,))], capacity(tainted)
    )
    assert placed is not None
    assert pack([pod("i")], capacity(tainted)) is None
    chosen = pack(
        [PodToPlace("s", ResourceAmounts(1), "s", 0, node_selector=(("disk", "ssd"),))], everywhere
    )
    assert chosen is not None
    assert chosen.nodes == {"s": "labelled"}
    assert (
        pack(
            [PodToPlace("s", ResourceAmounts(1), "s", 0, node_selector=(("disk", "hdd"),))],
            everywhere,
        )
        is None
    )


def test_the_search_finds_what_best_fit_misses() -> None:
    sizes = [4, 3, 3, 2, 2, 2]  # 8 + 8 exactly
    placement = pack(
        [pod(f"i{n}", s) for n, s in enumerate(sizes)], capacity(node("a", 8), node("b", 8))
    )
    assert placement is not None


def test_spares_wait_until_a_query_has_waited_long() -> None:
    pods = {"a": pod("a", 4), "b": pod("b", 4)}
    spare = SpareReplica(pod("spare", 1, group="run", replica=1), priority=5)
    nodes = capacity(node("n", 6))
    held = make_plan([query("Q", 1, "a", "b")], pods, [spare], nodes)
    assert dict(held.nodes) == {}
    given_up = make_plan(
        [query("Q", 1, "a", "b", capacity_reservation_is_over=True)], pods, [spare], nodes
    )
    assert dict(given_up.nodes) == {"spare": "n"}


def test_a_query_that_fits_nowhere_delays_no_spare() -> None:
    pods = {"a": pod("a", 40)}
    spare = SpareReplica(pod("spare", 1), priority=5)
    plan = make_plan([query("Q", 1, "a")], pods, [spare], capacity(node("n", 6)))
    assert dict(plan.nodes) == {"spare": "n"}


def test_a_spare_takes_what_no_waiting_query_could_use() -> None:
    """Capacity of nodes that the query cannot use, and what is left after all that it lacks."""
    big = PodToPlace("big", ResourceAmounts(8, 1, 1), "big", 0, node_selector=(("disk", "ssd"),))
    spare = SpareReplica(pod("spare", 1, group="run", replica=1), priority=5)
    plain, ssd = node("plain", 8), node("ssd", 8, labels={"disk": "ssd"})
    used = NodeCapacity(ssd, ssd.allocatable - ResourceAmounts(4, 1, 1))
    nodes = Capacity(
        {"plain": NodeCapacity(plain, ResourceAmounts(1, 9, 9)), "ssd": used}, ssd.allocatable
    )
    plan = make_plan([query("Q", 1, "big")], {"big": big}, [spare], nodes)
    assert dict(plan.nodes) == {"spare": "plain"}


def test_a_query_that_lacks_a_device_reserves_no_cpu() -> None:
    gpu = PodToPlace("g", ResourceAmounts(1, 1, 1, (("gpu", 1),)), "g", 0)
    spare = SpareReplica(pod("spare", 1, group="run", replica=1), priority=5)
    whole = ResourceAmounts(8, 100, 10, (("gpu", 1),))
    taken = NodeCapacity(replace(node("n", 8), allocatable=whole), ResourceAmounts(4, 99, 9))
    plan = make_plan([query("Q", 1, "g")], {"g": gpu}, [spare], Capacity({"n": taken}, whole))
    assert dict(plan.nodes) == {"spare": "n"}


@given(
    missing=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    nodes=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), min_size=1, max_size=3
    ),
    spares=st.lists(st.integers(1, 3), max_size=3),
    data=st.data(),
)
def test_no_spare_takes_what_a_waiting_query_may_need(
    missing: list[int], nodes: Any, spares: list[int], data: Any
) -> None:
    """Whatever capacity the nodes get: what would fit without the spares fits beside them."""
    pods = {
        f"i{n}": PodToPlace(
            f"i{n}", ResourceAmounts(cpu, 1, 1), f"i{n}", 0, node_selector=(("disk", "ssd"),)
        )
        for n, cpu in enumerate(missing)
    }
    made = {}
    for n, (free, used, has_ssd) in enumerate(nodes):
        labels = {"disk": "ssd"} if has_ssd else {}
        made[f"n{n}"] = NodeCapacity(
            node(f"n{n}", free + used, labels=labels), ResourceAmounts(free, 90, 9)
        )
    available = Capacity(made, total(b.node.allocatable for b in made.values()))
    extra = [SpareReplica(pod(f"s{n}", cpu), priority=5) for n, cpu in enumerate(spares)]
    plan = make_plan([query("Q", 1, *pods)], pods, extra, available)
    if plan.starting_now:
        return  # nothing waits
    if not all(available.fits_when_empty(i) for i in pods.values()):
        return  # it waits for more than capacity
    taken = dict.fromkeys(made, 0)
    for n, cpu in enumerate(spares):
        if (place := plan.nodes.get(f"s{n}")) is not None:
            taken[place] += cpu
    freed = {
        name: data.draw(st.integers(0, used))
        for name, (_, used, _) in zip(made, nodes, strict=True)
    }
    later = {
        name: made[name].free.cpu_m + freed[name]
        for name, (_, _, ssd) in zip(made, nodes, strict=True)
        if ssd
    }
    if _fits(missing, list(later.values())):
        assert _fits(missing, [free - taken[name] for name, free in later.items()])


def test_quantities_read_as_kubernetes_writes_them() -> None:
    assert ResourceAmounts.parse(
        {"cpu": "250m", "memory": "1Gi", "pods": "110"}
    ) == ResourceAmounts(250, 1 << 30, 110)
    assert ResourceAmounts.parse({"cpu": 2, "memory": "1500M"}, pods=1) == ResourceAmounts(
        2000, 1_500_000_000, 1
    )


_PARTS = st.dictionaries(
    st.sampled_from(["p", "q", "r", "s", "t"]), st.integers(1, 5), min_size=1, max_size=5
)


@given(
    sizes=_PARTS,
    nodes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    data=st.data(),
)
def test_no_waiting_query_fits_and_no_node_is_overcommitted(
    sizes: Any, nodes: Any, data: Any
) -> None:
    """I6 and I8, against packing by brute force."""
    pods = {name: pod(name, cpu) for name, cpu in sizes.items()}
    needs = st.sets(st.sampled_from(sorted(pods)), min_size=1)
    queries = [
        query(f"q{n}", data.draw(st.integers(0, 9)), *data.draw(needs))
        for n in range(data.draw(st.integers(1, 4)))
    ]
    wanted = {n for d in queries for n in d.needs}
    pods = {k: v for k, v in pods.items() if k in wanted}
    made = [node(f"n{i}", cpu) for i, cpu in enumerate(nodes)]
    plan = make_plan(queries, pods, [], capacity(*made))

    free = {n.name: n.allocatable.cpu_m for n in made}
    for key, place in plan.nodes.items():
        free[place] -= sizes[key]
    assert min(free.values()) >= 0
    by_name = {d.key: d for d in queries}
    for ranked in plan.starting_now:
        assert by_name[ranked.key].needs <= set(plan.nodes), "all of a query or nothing"
    for ranked in plan.waiting:
        left = [sizes[n] for n in by_name[ranked.key].needs - set(plan.nodes)]
        assert left
        assert not _fits(left, list(free.values())), f"{ranked.key} would fit"
    assert len(plan.starting_now) + len(plan.waiting) == len(queries)


@given(
    sizes=_PARTS,
    nodes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_plan_is_worth_no_less_than_the_best_single_query(
    sizes: Any, nodes: Any, data: Any
) -> None:
    pods = {name: pod(name, cpu) for name, cpu in sizes.items()}
    needs = st.sets(st.sampled_from(sorted(pods)), min_size=1)
    queries = [
        query(f"q{n}", data.draw(st.integers(0, 99)), *data.draw(needs))
        for n in range(data.draw(st.integers(1, 4)))
    ]
    wanted = {n for d in queries for n in d.needs}
    pods = {k: v for k, v in pods.items() if k in wanted}
    plan = make_plan(
        queries, pods, [], capacity(*(node(f"n{i}", cpu) for i, cpu in enumerate(nodes)))
    )
    priorities = {d.key: d.priority for d in queries}
    singles = [d.priority for d in queries if _fits([sizes[n] for n in d.needs], list(nodes))]
    assert sum(priorities[r.key] for r in plan.starting_now) >= max(singles, default=0)


def test_a_small_dense_query_displaces_no_important_one() -> None:
    pods = {"s": pod("s", 10), "b": pod("b", 1000)}
    plan = make_plan(
        [query("small", 2, "s"), query("big", 100, "b")], pods, [], capacity(node("n", 1000))
    )
    assert started(plan) == ["big"]


@given(
    sizes=_PARTS,
    nodes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    spares=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=4),
    priority=st.integers(0, 9),
)
def test_a_spare_that_fits_nowhere_changes_no_placement(
    sizes: Any, nodes: Any, spares: Any, priority: int
) -> None:
    pods = {name: pod(name, cpu) for name, cpu in sizes.items()}
    queries = [query(f"q{name}", n, name) for n, name in enumerate(pods)]
    available = capacity(*(node(f"n{i}", cpu) for i, cpu in enumerate(nodes)))
    others = [
        SpareReplica(pod(f"s{n}", cpu, group="run", replica=n), priority=rank)
        for n, (cpu, rank) in enumerate(spares)
    ]
    nowhere = PodToPlace("z", ResourceAmounts(1, 1, 1), "z", 1, node_selector=(("disk", "none"),))
    without = make_plan(queries, pods, others, available)
    impossible = make_plan(queries, pods, [*others, SpareReplica(nowhere, priority, "")], available)
    assert impossible.unplaced == {**without.unplaced, "z": "disk none: no node"}
    assert replace(impossible, unplaced=without.unplaced) == without


def _fits(sizes: list[int], free: list[int]) -> bool:
    for choice in product(range(len(free)), repeat=len(sizes)):
        used = [0] * len(free)
        for size, place in zip(sizes, choice, strict=True):
            used[place] += size
        if all(u <= f for u, f in zip(used, free, strict=True)):
            return True
    return False


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("operator", "values", "cores", "fits"),
    [
        ("In", ["4", "8"], "8", True),
        ("In", ["4"], "8", False),
        ("In", ["4"], None, False),
        ("NotIn", ["4"], "8", True),
        ("NotIn", ["4"], "4", False),
        ("NotIn", ["4"], None, True),
        ("Exists", [], "4", True),
        ("Exists", [], None, False),
        ("DoesNotExist", [], "4", False),
        ("DoesNotExist", [], None, True),
        ("Gt", ["4"], "16", True),
        ("Gt", ["4"], "4", False),
        ("Gt", ["4"], "many", False),
        ("Lt", ["16"], "4", True),
        ("Lt", ["16"], None, False),
    ],
)
def test_node_affinity_is_read_as_the_scheduler_reads_it(
    operator: str, values: list[str], cores: str | None, fits: bool
) -> None:
    labels = {} if cores is None else {"cores": cores}
    terms = required_terms(affinity(expression("cores", operator, *values)))
    assert matches(terms, "n", labels) is fits


def test_terms_are_alternatives_and_their_requirements_are_not() -> None:
    name = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}
    fast, both = expression("disk", "In", "fast"), name | expression("disk", "In", "fast")
    assert matches(required_terms(affinity(fast, name)), "n", {})
    assert not matches(required_terms(affinity(both)), "n", {})
    assert matches(required_terms(affinity(both)), "n", {"disk": "fast"})
    assert not matches(required_terms(affinity({})), "n", {})
    assert matches(required_terms(None), "n", {})


def test_a_task_is_packed_only_where_its_node_affinity_lets_it() -> None:
    terms = required_terms(affinity(expression("disk", "In", "fast")))
    wanted = PodToPlace("i", ResourceAmounts(1, 1, 1), "i", 0, affinity=terms)
    nodes = capacity(node("a", 9), node("b", 2, labels={"disk": "fast"}))
    placement = pack([wanted], nodes)
    assert placement is not None
    assert placement.nodes == {"i": "b"}
    assert pack([wanted], capacity(node("a", 9))) is None


def test_an_overcommitted_node_reduces_no_other_capacity() -> None:
    over, well = node("a", 4), node("b", 4)
    nodes = {
        "a": NodeCapacity(over, ResourceAmounts(-3, 50, 5)),
        "b": NodeCapacity(well, ResourceAmounts(4, 50, 5)),
    }
    placement = pack([pod("i", 4)], Capacity(nodes, ResourceAmounts(8, 200, 20)))
    assert placement is not None
    assert placement.nodes == {"i": "b"}


def test_a_query_that_fits_no_node_leaves_the_others_spread() -> None:
    pods = {f"x{n}": pod(f"x{n}", 5, memory=5) for n in range(4)}
    nowhere = PodToPlace("z", ResourceAmounts(1, 1, 1), "z", 0, node_selector=(("disk", "none"),))
    nodes = capacity(*(node(f"n{n}", 50) for n in range(4)))
    plan = make_plan(
        [query("q", 1, *pods), query("other", 9, "z", capacity_reservation_is_over=True)],
        {**pods, "z": nowhere},
        [],
        nodes,
    )
    assert sorted(plan.nodes.values()) == ["n0", "n1", "n2", "n3"]
