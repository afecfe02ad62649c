"""The paper's experiments on recoveries, in simulated time with the real planner.

.venv/bin/python -m progressive [--samples 180] [--seed 1] [--until-s 480]   (in benchmarks/)

In each sample eight nodes arrive at random times (Fig. 3), and the 75 partitions of Fig. 4 that
were lost are started by each policy (Fig. 5): the paper's best case (all nodes after three
minutes), the plan of Rekindle, topological order, `Blocking`, and a scheduler alone (in no order).
With equal priorities, once with all times of arrival equally likely and once with three minutes as
the likeliest one; and with priorities of 1 to 15. Equal seeds have equal results. Writes
build/bench/progressive.json, .md and two pictures, fig3.svg and fig5.svg.

Targets: the area under the number of available queries over time, until `--until-s` after the
failure, is at least 1.5 times that of `Blocking`, and within 1.15 of the best case. Rows of their
own say how near the plan is to the best one for the nodes that are there.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from progressive.experiment import (
    BEST_CASE_S,
    FIRST_S,
    NEW_NODES,
    SLOTS_OF_A_NODE,
    LostQuery,
    arrivals,
    lost_queries,
)
from progressive.plots import draw_arrivals, draw_recoveries
from progressive.policies import Blocking, InOrder, Policy, Progressive, best_values, value_of
from progressive.timing import (
    INTERVAL_S,
    Interval,
    RecoveryTimes,
    answering,
    intervals,
    placements,
)
from rekindle_testing.harness.report import BENCH, Measurement, report

BEST_CASE, REKINDLE, IN_ORDER, BLOCKING, ALONE = (
    "BestCase",
    "Rekindle",
    "operator-centric",
    "Blocking",
    "scheduler alone",
)
OF_BLOCKING, OF_BEST_CASE = 1.5, 1.15
TABLE_S = range(150, 400, 30)
ORDERS = 10  # of priorities, each for as many of the samples


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    mode_s: float | None = None
    with_priorities: bool = False


SETTINGS = (
    Setting("all times equally likely"),
    Setting("three minutes likeliest", mode_s=BEST_CASE_S),
    Setting("priorities 1 to 15", with_priorities=True),
)

Runs = Mapping[str, Sequence[Sequence[Interval]]]
"""By policy, of each sample."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=180)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--until-s", type=int, default=480)
    args = parser.parse_args()
    random = Random(f"optimality {args.seed}")
    rows = [
        optimality("equal priorities", [lost_queries()]),
        optimality("priorities 1 to 15", [shuffled_priorities(random) for _ in range(3)]),
    ]
    for setting in SETTINGS:
        times = sample_arrivals(setting, args.samples, args.seed)
        runs = simulate(setting, times, args.seed, args.until_s)
        rows += measurements(setting, runs, args.until_s)
        if setting is SETTINGS[0]:
            draw_arrivals([at_s for sample in times for at_s in sample], BENCH / "fig3.svg")
            draw_recoveries(runs, times[0], BENCH / "fig5.svg")
    report("progressive", rows)


def sample_arrivals(setting: Setting, samples: int, seed: int) -> list[tuple[float, ...]]:
    random = Random(f"arrivals {seed}")
    return [arrivals(random, setting.mode_s) for _ in range(samples)]


def simulate(setting: Setting, times: Sequence[tuple[float, ...]], seed: int, until_s: int) -> Runs:
    random = Random(f"orders {seed}")
    found: dict[str, list[list[Interval]]] = {
        name: [] for name in (BEST_CASE, REKINDLE, IN_ORDER, BLOCKING, ALONE)
    }
    of_samples = -(-len(times) // ORDERS)
    queries, planned = lost_queries(), Progressive(lost_queries())
    for number, sample in enumerate(times):
        if setting.with_priorities and number % of_samples == 0:
            queries = shuffled_priorities(random)
            planned = Progressive(queries)
        names = sorted({name for query in queries for name in query.partitions})
        in_no_order = random.sample(names, len(names))
        policies: dict[str, tuple[Policy, Sequence[float]]] = {
            BEST_CASE: (planned, [BEST_CASE_S] * NEW_NODES),
            REKINDLE: (planned, sample),
            IN_ORDER: (InOrder(names), sample),
            BLOCKING: (Blocking(queries), sample),
            ALONE: (InOrder(in_no_order), sample),
        }
        for name, (policy, at_s) in policies.items():
            answers = answering(queries, policy, at_s, RecoveryTimes())
            found[name].append(intervals(queries, answers, RecoveryTimes(), until_s))
    return found


def shuffled_priorities(random: Random) -> list[LostQuery]:
    number = len(lost_queries())
    return lost_queries(random.sample(range(1, number + 1), number))


def optimality(name: str, of: Sequence[Sequence[LostQuery]]) -> Measurement:
    """What the plan has started with each number of nodes, which come one by one, as a part of the
    highest sum of priorities that fits: what started earlier is never moved."""
    arriving = [FIRST_S + number for number in range(NEW_NODES)]
    slots = [SLOTS_OF_A_NODE * number for number in range(1, NEW_NODES + 1)]
    ratios: list[float] = []
    for queries in of:
        placed: dict[str, str] = {}
        reached = []
        for _, started in placements(Progressive(queries), arriving):
            placed |= started
            reached.append(value_of(queries, placed))
        best = best_values(queries, slots)
        ratios += [ours / most for ours, most in zip(reached, best, strict=True)]
    values = {"lowest": round(min(ratios), 3), "mean": round(fmean(ratios), 3)}
    return Measurement(f"what runs with 1 to 8 nodes, of the best that fits, {name}", values)


def measurements(setting: Setting, runs: Runs, until_s: int) -> list[Measurement]:
    rows = [
        Measurement(f"{setting.name}: {name}", figures(of_samples, setting, until_s))
        for name, of_samples in runs.items()
    ]
    if not setting.with_priorities:
        rows += [
            Measurement(f"{setting.name}: {name}, available after", available_after(of_samples))
            for name, of_samples in runs.items()
        ]
    areas = {name: fmean(area(of, setting) for of in samples) for name, samples in runs.items()}
    of_blocking = areas[REKINDLE] / areas[BLOCKING]
    of_best = areas[BEST_CASE] / areas[REKINDLE]
    return [
        *rows,
        Measurement(
            f"{setting.name}: area of Rekindle by that of Blocking",
            {
                "ratio": round(of_blocking, 2),
                "by that of a scheduler alone": round(areas[REKINDLE] / areas[ALONE], 2),
            },
            OF_BLOCKING,
            of_blocking >= OF_BLOCKING,
        ),
        Measurement(
            f"{setting.name}: area of BestCase by that of Rekindle",
            {"ratio": round(of_best, 2)},
            OF_BEST_CASE,
            of_best <= OF_BEST_CASE,
        ),
    ]


def area(run: Sequence[Interval], setting: Setting) -> float:
    """Query-seconds; with priorities weighted by them."""
    counts = (i.available_priority if setting.with_priorities else i.available for i in run)
    return float(sum(counts) * INTERVAL_S)


def figures(runs: Sequence[Sequence[Interval]], setting: Setting, until_s: int) -> dict[str, float]:
    """`until available`: mean over queries, weighted by priorities if they differ."""
    last = [run[-1] for run in runs]
    total = max(i.available_priority if setting.with_priorities else i.available for i in last)
    areas = sorted(area(run, setting) for run in runs)
    answered = [i.relative_latency for run in runs for i in run if i.relative_latency is not None]
    return {
        "until available, mean s": round(until_s - fmean(areas) / total, 1),
        "all available after, mean s": round(fmean(all_available_s(run) for run in runs), 1),
        "area, query-minutes": round(fmean(areas) / 60, 1),
        "quartiles from": round(areas[len(areas) // 4] / 60, 1),
        "to": round(areas[len(areas) * 3 // 4] / 60, 1),
        "highest relative latency, mean": round(
            fmean(
                max((i.relative_latency for i in run if i.relative_latency is not None), default=1)
                for run in runs
            ),
            1,
        ),
        "relative latency, mean": round(fmean(answered), 2) if answered else 0.0,
    }


def available_after(runs: Sequence[Sequence[Interval]]) -> dict[str, float]:
    """Fig. 5(b): means, by seconds."""
    means = {at[0].at_s: fmean(i.available for i in at) for at in zip(*runs, strict=True)}
    return {f"{at_s:g} s": round(means[at_s], 1) for at_s in TABLE_S if at_s in means}


def all_available_s(run: Sequence[Interval]) -> float:
    most = max(i.available for i in run)
    return next(i.at_s for i in run if i.available == most)


if __name__ == "__main__":
    main()
