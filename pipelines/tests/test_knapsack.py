"""Set-union knapsacks: greedy ≤ search ≤ exact ≤ bound, and never over capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.knapsack import solve as solving
from rekindle.knapsack.bound import upper_bound
from rekindle.knapsack.exact import best_known, solve_exactly
from rekindle.knapsack.greedy import Greedy, item_prices, scarcities
from rekindle.knapsack.instance import InvalidInstance, parse_instance
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.search import Search
from rekindle.knapsack.solve import reduced, solve


@st.composite
def problems(draw: st.DrawFn, max_queries: int = 6) -> KnapsackProblem:
    items, resources = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    queries = draw(st.integers(1, max_queries))
    sets = st.sets(st.integers(0, items - 1), max_size=items)
    row = st.lists(st.integers(0, 9), min_size=items, max_size=items)
    return KnapsackProblem(
        [draw(st.integers(0, 50)) for _ in range(queries)],
        [sorted(draw(sets)) for _ in range(queries)],
        [draw(row) for _ in range(resources)],
        [draw(st.integers(0, 9 * items)) for _ in range(resources)],
    )


def by_brute_force(problem: KnapsackProblem) -> int:
    queries = range(len(problem.needs))
    sets = (of for n in range(len(queries) + 1) for of in combinations(queries, n))
    return max(problem.worth(of)[0] for of in sets if problem.fits(of))


def by_greedy(problem: KnapsackProblem) -> list[int]:
    return Greedy(problem).run(item_prices(problem, scarcities(problem)))


@pytest.fixture
def no_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a few queries are solved as many are."""
    monkeypatch.setattr(solving, "_FEW", 0)


@given(problems())
def test_a_few_queries_are_solved_exactly(problem: KnapsackProblem) -> None:
    found = solve(problem, 0)
    assert problem.fits(found)
    assert len(set(found)) == len(found)
    assert problem.worth(found)[0] == by_brute_force(problem)


@given(problem=problems(), effort=st.sampled_from([0, 300, 20_000]))
@pytest.mark.usefixtures("no_enumeration")
def test_greedy_search_optimum_and_bound_are_in_this_order(
    problem: KnapsackProblem, effort: int
) -> None:
    possible, kept = reduced(problem)
    greedy = [possible[q] for q in by_greedy(kept)]
    found = solve(problem, effort)
    assert problem.fits(greedy)
    assert problem.fits(found)
    best = by_brute_force(problem)
    value = problem.worth(found)[0]
    assert problem.worth(greedy)[0] <= value <= best <= upper_bound(problem)
    assert value >= max((problem.priorities[q] for q in possible), default=0)
    assert not any(problem.fits([*found, q]) for q in possible if q not in found)
    assert solve(problem, effort) == found


@given(problems())
def test_the_solver_proves_what_brute_force_finds(problem: KnapsackProblem) -> None:
    exact = solve_exactly(problem, [], max_nodes=1000)
    assert problem.fits(exact.queries)
    assert problem.worth(exact.queries)[0] == exact.bound == by_brute_force(problem)


@given(problem=problems(), more=st.integers(0, 20), resource=st.integers(0, 2))
def test_more_capacity_is_never_worth_less(
    problem: KnapsackProblem, more: int, resource: int
) -> None:
    capacity = list(problem.capacity)
    capacity[resource % len(capacity)] += more
    larger = replace(problem, capacity=capacity)
    assert larger.worth(solve(larger, 0))[0] >= problem.worth(solve(problem, 0))[0]


@given(problem=problems(), data=st.data())
@pytest.mark.usefixtures("no_enumeration")
def test_no_set_is_returned_that_was_not_accepted(
    problem: KnapsackProblem, data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.integers(0, len(problem.needs) - 1)))
    asked: list[frozenset[int]] = []

    def accept(queries: Sequence[int]) -> bool:
        asked.append(frozenset(queries))
        assert problem.fits(queries)
        return set(queries) <= allowed

    found = solve(problem, 5_000, accept)
    assert set(found) <= allowed
    assert not found or frozenset(found) in asked


@given(problem=problems(), effort=st.integers(0, 5_000))
def test_a_search_never_loses_what_it_began_with(problem: KnapsackProblem, effort: int) -> None:
    start = by_greedy(problem)
    found = Search(problem, scarcities(problem)).run(start, effort)
    assert problem.fits(found)
    assert problem.worth(found) >= problem.worth(start)


@given(problems())
def test_merged_items_change_no_set(problem: KnapsackProblem) -> None:
    merged = problem.merged()
    queries = range(len(problem.needs))
    for of in (of for n in range(3) for of in combinations(queries, n)):
        assert merged.used(merged.union(of)) == problem.used(problem.union(of))


def test_what_is_not_scarce_costs_nothing() -> None:
    """A GPU is scarce, CPU is not: two queries that need much CPU and one GPU are worth more than
    one that needs little CPU and two GPUs."""
    problem = KnapsackProblem([10, 10, 15], [[0], [1], [2]], [[40, 40, 1], [1, 1, 2]], [100, 2])
    assert sorted(by_greedy(problem)) == [0, 1]


def test_density_divides_a_cost_among_all_that_need_it() -> None:
    """Su and Zhou 2017, section 5: PD_i."""
    problem = KnapsackProblem([10, 10, 10], [[0, 1], [0, 2], [3]], [[4, 1, 1, 4]], [6])
    assert Greedy(problem).run(item_prices(problem, [1.0])) == [0, 1]


INSTANCE = {
    "capacity": {"cpu": 2, "memory": "4Gi"},
    "operators": {
        "clean": {"cpu": "500m", "memory": "1Gi"},
        "hot": {"cpu": 1.5},
        "daily": {"cpu": "1", "memory": "4Gi"},
    },
    "queries": {
        "alerts": {"priority": 100, "operators": ["clean", "hot"]},
        "report": {"priority": 10, "operators": ["clean", "daily"]},
    },
}


def test_an_instance_is_read_with_quantities() -> None:
    instance = parse_instance(INSTANCE)
    queries, bound = best_known(instance.problem, 0, 100)
    assert [instance.query_names[q] for q in queries] == ["alerts"]
    assert (instance.problem.worth(queries)[0], bound) == (100, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": {"cpu": "x"}}, "capacity.cpu: 'x' is not a quantity"),
        ({"capacity": {"cpu": -1}}, "capacity.cpu: -1 is negative"),
        ({"capacity": {"cpu": 1}}, "operators.clean.memory: capacity does not have"),
        ({"operators": []}, r"operators: must be an object, not \[\]"),
        ({"queries": {"q": {"priority": 1.5, "operators": []}}}, "queries.q.priority: must be"),
        ({"queries": {"q": {"priority": 1, "operators": ["no"]}}}, "there is no operator 'no'"),
        ({"queries": {"q": {"priority": 1, "needs": []}}}, "queries.q: unknown field needs"),
        ({"nodes": 3}, "the instance: unknown field nodes"),
    ],
)
def test_what_is_wrong_with_an_instance_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInstance, match=message):
        parse_instance(INSTANCE | change)
