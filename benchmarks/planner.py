"""Which queries the planner starts, compared with the optimum, and how long it takes.

.venv/bin/python benchmarks/planner.py [--effort N] [--solver-seconds S] [--only TEXT]

Instances are generated from their names: operators, queries, resources (the third one is a GPU that
a tenth of the operators need), and how much the queries share: nothing, a third of the operators,
or all of them (heavy: each query needs 10 to 15 % of all). There is capacity for half of them.

Knapsacks without nodes: what the search finds with the effort that the operator has, and with
more, as a part of what HiGHS proves; of its bound, where it proves no optimum in time.
Plans with nodes: how long `make_plan` takes, and what it is worth as a part of the bound of the
sums that packing obeys. Where there is capacity for all (`everything fits`), partitions have two
replicas, and with zones the second one goes to another zone: such a plan is made in each pass while
anything is missing.

Targets: a plan of 10,000 tasks of 1,000 queries for 500 nodes within 1 s of CPU; one of 1,000 tasks
that all fit within 0.3 s, and 1 s of CPU; 0.99 of a proven optimum; 0.97 of the bound of heavy
instances.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from plan_nodes import empty_nodes

from rekindle.knapsack.bound import upper_bound
from rekindle.knapsack.exact import solve_exactly
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.solve import solve
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.plan import DownQuery, make_plan
from rekindle_testing.harness.report import Measurement, load_average, report

OPERATOR_EFFORT = 100_000
PROVEN, OF_HEAVY_BOUND, FIRST_PLAN_S = 0.99, 0.97, 1.0
ALL_FITS_S, ALL_FITS_CPU_S = 0.3, 1.0
TASKS_OF_A_QUERY = 20
TASK = ResourceAmounts(500, 1 << 30, 1)
MAX_LINKS = 100_000  # with more pairs of query and operator the solver ends in no reasonable time


@dataclass(frozen=True, slots=True)
class Size:
    operators: int
    queries: int
    sharing: str  # none, some, heavy
    resources: int
    nodes: int = 0
    zones: int = 0

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes else ""
        zones = f", {self.zones} zones" if self.zones else ""
        return (
            f"{self.operators:,} x {self.queries:,}, sharing {self.sharing}, "
            f"{self.resources} resource{'s' if self.resources > 1 else ''}{nodes}{zones}"
        )


KNAPSACKS = [
    Size(operators, queries, sharing, resources)
    for operators, queries in ((100, 10), (1_000, 100), (3_000, 1_000), (10_000, 1_000))
    for sharing in ("none", "some", "heavy")
    for resources in (1, 3)
]
PLANS = [
    Size(100, 10, "some", 3, 1),
    Size(1_000, 100, "some", 1, 100),
    Size(1_000, 100, "some", 3, 100, 3),
    Size(10_000, 1_000, "some", 1, 500),
    Size(10_000, 1_000, "some", 1, 500, 3),
    Size(10_000, 1_000, "some", 3, 500, 3),
    Size(10_000, 1_000, "none", 1, 1_000, 3),
]
PLANS_OF_ALL = [(tasks, tasks // 10, zones) for tasks in (1_000, 2_000) for zones in (0, 3)]
"""Tasks, nodes, zones."""


def generate(size: Size) -> KnapsackProblem:
    random = Random(f"{size.operators} {size.queries} {size.sharing} {size.resources}")
    every = range(size.operators)
    costs = [[random.choice((250, 500, 1000, 2000)) for _ in every]]
    if size.resources > 1:
        costs.append([random.choice((512, 1024, 2048, 4096, 8192)) for _ in every])
        costs.append([int(random.random() < 0.1) for _ in every])
    priorities = [random.randint(1, 100) for _ in range(size.queries)]
    needs = list(_needs(size, random))
    problem = KnapsackProblem(priorities, needs, costs, [0] * len(costs))
    parts = (0.5, 0.6, 0.2)
    used = problem.used(problem.union(range(size.queries)))
    return replace(problem, capacity=[int(u * p) for u, p in zip(used, parts, strict=False)])


def _needs(size: Size, random: Random) -> Iterator[list[int]]:
    for query in range(size.queries):
        if size.sharing == "heavy":
            number = max(1, int(size.operators * random.uniform(0.10, 0.15)))
            yield sorted(random.sample(range(size.operators), number))
            continue
        private = size.operators if size.sharing == "none" else size.operators * 2 // 3
        own = range(query * private // size.queries, (query + 1) * private // size.queries)
        shared = {
            private + int((size.operators - private) * random.random() ** 2)
            for _ in range(max(2, size.operators // size.queries) * (size.sharing == "some"))
        }
        yield sorted({*own, *shared})


def measure_knapsack(size: Size, effort: int, solver_s: float) -> Measurement:
    problem = generate(size)
    began = time.process_time()
    quick = solve(problem, OPERATOR_EFFORT)
    quick_s = time.process_time() - began
    began = time.process_time()
    found = solve(problem, effort)
    found_s = time.process_time() - began
    best, bound = found, upper_bound(problem)
    solver_used_s = 0.0
    if sum(map(len, problem.merged().needs)) <= MAX_LINKS:
        began = time.process_time()
        exact = solve_exactly(problem, found, 1_000_000, solver_s)
        solver_used_s = time.process_time() - began
        best, bound = exact.queries, min(bound, exact.bound)
    best_value = problem.worth(best)[0]
    is_proven = best_value == bound
    ratios = [problem.worth(of)[0] / bound for of in (quick, found)]
    values = {
        "quick of bound": round(ratios[0], 4),
        "CPU s": round(quick_s, 2),
        "of bound": round(ratios[1], 4),
        "CPU s of it": round(found_s, 2),
        "best of bound": round(best_value / bound, 4),
        "HiGHS s": round(solver_used_s, 2),
    }
    target = PROVEN if is_proven else OF_HEAVY_BOUND
    what = f"{size}{' (proven)' if is_proven else ''}"
    return Measurement(what, values, target, ratios[1] >= target)


def measure_plan(size: Size) -> Measurement:
    problem = generate(size)
    requests = [
        ResourceAmounts(
            cpu,
            problem.costs[1][at] << 20 if size.resources > 1 else 1 << 20,
            1,
            (("nvidia.com/gpu", 1),) if size.resources > 1 and problem.costs[2][at] else (),
        )
        for at, cpu in enumerate(problem.costs[0])
    ]
    pods = {f"{at:05}": PodToPlace(f"{at:05}", r, f"{at}", 0) for at, r in enumerate(requests)}
    queries = [
        DownQuery(("ns/t", f"q{n:04}"), priority, frozenset(f"{at:05}" for at in needs))
        for n, (priority, needs) in enumerate(zip(problem.priorities, problem.needs, strict=True))
    ]
    room = (
        problem.capacity[0] // size.nodes,
        ((problem.capacity[1] << 20) // size.nodes if size.resources > 1 else 1 << 50),
    )
    gpus = problem.capacity[2] if size.resources > 1 else 0
    allocatable = {
        f"node-{at:04}": ResourceAmounts(*room, 110, _gpus(at, gpus, size.nodes))
        for at in range(size.nodes)
    }
    capacity = empty_nodes(allocatable, size.zones)
    began, cpu_began = time.perf_counter(), time.process_time()
    plan = make_plan(queries, pods, [], capacity)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    started = {ranked.key for ranked in plan.starting_now}
    value = sum(query.priority for query in queries if query.key in started)
    bound = problem.worth(solve_exactly(problem, [], 100_000, 20.0).queries)[0]
    values = {"s": round(seconds, 2), "CPU s": round(cpu, 2), "of best sums": value / bound}
    return Measurement(str(size), values, FIRST_PLAN_S, cpu <= FIRST_PLAN_S)


def measure_plan_of_all(tasks: int, number: int, zones: int) -> Measurement:
    pods = {
        f"{at}": PodToPlace(f"{at}", TASK, f"partition-{at // 2}", at % 2) for at in range(tasks)
    }
    queries = [
        DownQuery(
            ("ns/t", f"q{first}"),
            1 + first % 7,
            frozenset(f"{at}" for at in range(first, min(first + TASKS_OF_A_QUERY, tasks))),
        )
        for first in range(0, tasks, TASKS_OF_A_QUERY)
    ]
    room = TASK.scaled(-(-tasks * 5 // (number * 4)))  # for a quarter more than the tasks
    capacity = empty_nodes({f"node-{at}": room for at in range(number)}, zones)
    began, cpu_began = time.perf_counter(), time.process_time()
    plan = make_plan(queries, pods, [], capacity)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    assert len(plan.nodes) == tasks
    values = {"s": round(seconds, 3), "CPU s": round(cpu, 3)}
    met = (seconds < ALL_FITS_S and cpu < ALL_FITS_CPU_S) if tasks <= 1_000 else None
    return Measurement(_named(tasks, number, zones), values, ALL_FITS_S, met)


def _named(tasks: int, nodes: int, zones: int) -> str:
    return f"everything fits: {tasks:,} tasks, {nodes} nodes, {zones or 'no'} zones"


def _gpus(at: int, gpus: int, nodes: int) -> tuple[tuple[str, int], ...]:
    """On every fourth node."""
    with_gpus = max(nodes // 4, 1)
    each = gpus // with_gpus + (at // 4 < gpus % with_gpus)
    return (("nvidia.com/gpu", each),) if at % 4 == 0 and each else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=int, default=3_000_000)
    parser.add_argument("--solver-seconds", type=float, default=20.0)
    parser.add_argument("--only", default="", help="sizes whose names contain this")
    args = parser.parse_args()
    rows = [
        measure_knapsack(size, args.effort, args.solver_seconds)
        for size in KNAPSACKS
        if args.only in str(size)
    ]
    rows += [measure_plan(size) for size in PLANS if args.only in str(size)]
    rows += [measure_plan_of_all(*of) for of in PLANS_OF_ALL if args.only in _named(*of)]
    report("planner", [*rows, load_average()])


if __name__ == "__main__":
    main()
