"""The best set of queries by HiGHS, a solver of mixed integer programs.

It needs `highspy` and NumPy, which pods lack: for the command line, tests and benchmarks alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite

from rekindle.knapsack.bound import upper_bound
from rekindle.knapsack.greedy import Greedy, item_prices, scarcities
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.solve import solve

_MAX_LINKS = 100_000  # with more pairs of query and item, the solver takes minutes for one node


@dataclass(frozen=True, slots=True)
class ExactResult:
    queries: list[int]
    bound: int


def best_known(problem: KnapsackProblem, effort: int, max_nodes: int) -> tuple[list[int], int]:
    """Queries in the order in which to start them, and what no set of queries is worth more than.
    `max_nodes`: of the solver, if there is one; 0: none."""
    found, bound = solve(problem, effort), upper_bound(problem)
    if max_nodes > 0 and sum(map(len, problem.merged().needs)) <= _MAX_LINKS:
        try:
            exact = solve_exactly(problem, found, max_nodes)
        except ModuleNotFoundError:  # highspy is not installed
            return found, bound
        if problem.worth(exact.queries) > problem.worth(found):
            taken, prices = set(exact.queries), item_prices(problem, scarcities(problem))
            order = Greedy(problem).run(prices, first=exact.queries)
            found = [q for q in order if q in taken]
        bound = min(bound, exact.bound)
    return found, bound


def solve_exactly(
    problem: KnapsackProblem, start: Sequence[int], max_nodes: int, max_seconds: float = inf
) -> ExactResult:
    """From `start`, a set that fits. Bounded by nodes of the search tree, so that equal inputs give
    equal results; `max_seconds` is for benchmarks."""
    import highspy

    merged = problem.merged()
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.999)  # priorities are integers
    solver.setOptionValue("mip_max_nodes", max_nodes)
    solver.setOptionValue("time_limit", max_seconds)
    queries, users = len(merged.needs), merged.users()
    for query, priority in enumerate(merged.priorities):
        solver.addVar(0.0, 1.0)
        solver.changeColIntegrality(query, highspy.HighsVarType.kInteger)
        solver.changeColCost(query, -float(priority))
    # An item of one query is part of that query. Others are there if one of their queries is.
    columns, shared = list[int](), list[int]()
    for item, of in enumerate(users):
        if len(of) == 1:
            columns.append(of[0])
            continue
        column = queries + len(shared)
        columns.append(column)
        shared.append(item)
        solver.addVar(0.0, 1.0)
        for query in of:
            solver.addRow(0.0, highspy.kHighsInf, 2, [column, query], [1.0, -1.0])
    for costs, capacity in zip(merged.costs, merged.capacity, strict=True):
        scale, row = max(capacity, 1), defaultdict[int, float](float)
        for item, cost in enumerate(costs):
            if cost:
                row[columns[item]] += cost / scale
        solver.addRow(-highspy.kHighsInf, capacity / scale, len(row), [*row], [*row.values()])
    chosen, present = set(start), merged.union(start)
    solution = highspy.HighsSolution()
    solution.col_value = [
        *(float(query in chosen) for query in range(queries)),
        *(float(item in present) for item in shared),
    ]
    solver.setSolution(solution)
    solver.run()
    info, values = solver.getInfo(), solver.getSolution().col_value
    taken = [query for query in range(queries) if len(values) and values[query] > 0.5]
    if problem.worth(taken) < problem.worth(start) or not problem.fits(taken):
        taken = list(start)  # what it found fits within its tolerance alone
    value, total = problem.worth(taken)[0], sum(problem.priorities)
    dual = -info.mip_dual_bound
    bound = max(min(floor(dual + 1e-6), total), value) if isfinite(dual) else total
    return ExactResult(taken, bound)
