"""Throughput over time while a node is lost and its replicas are rebuilt, as in figure 8 of Flux.

.venv/bin/python benchmarks/catch_up.py [--partitions 2] [--epoch-ms 250] [--phase-s 20]

The query of replicated_query.py on an embedded cluster, on nodes with two tasks each. After one
phase the node of a replica is killed, with the source's replica if they share it; no other node
takes new pods. After another phase a standby node joins, and the replicas are rebuilt there from
their partners. The picture has the rate of rows in the sink of the replicated operator, its
partitions stacked, in bins of 250 ms, as Flux (Shah et al. 2004), section 5.4, has the rates of its
producers.

The output has a stall if the rows of an epoch are written more than an epoch interval and 100 ms
after those of the epoch before.

Writes build/bench/catch_up.json, .md and .svg.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from replicated_query import Load, replicated_run

from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.output_times import (
    WrittenFile,
    intervals,
    percentiles,
    rows_per_s,
    written_files,
)
from rekindle_testing.harness.report import BENCH, Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun

NAME = "catch_up"
BIN_S = 0.25
STALL_MARGIN_S = 0.1
REBUILD_TIMEOUT_S = 600
FULL = "benchmark.rekindle.dev/full"
"""The taint of nodes that take no more pods."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds since 1970: when the first phase began, the node was killed, the standby node joined,
    no replica was missing any more, and the last phase ended."""

    began: float
    killed: float
    standby: float
    rebuilt: float
    ended: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--epoch-ms", type=int, default=250)
    parser.add_argument("--phase-s", type=float, default=20.0)
    options = parser.parse_args()
    load = Load(options.epoch_ms, options.partitions)
    with replicated_run("catch-up", load) as (cluster, run):
        times = _lose_and_rebuild(cluster, run, options.phase_s)
        output = cluster.shared / run.name / "output"
        files = written_files(output / "direct")
    _draw(files, times, BENCH / f"{NAME}.svg")
    report(NAME, [*_rows(files, times, load.epoch_s), load_average()])


def _lose_and_rebuild(cluster: EmbeddedCluster, run: TopologyRun, phase_s: float) -> Times:
    began = time.time()
    time.sleep(phase_s)
    victim = run.task_pods("durations")[0].spec.node_name
    # Not cordoned: tasks leave nodes that are.
    for node in cluster.nodes:
        cluster.kubectl("taint", "nodes", node, f"{FULL}=:NoSchedule")
    killed = time.time()
    cluster.kill_nodes([victim])
    time.sleep(phase_s)
    standby = time.time()
    cluster.add_node()
    run.wait_redundant(REBUILD_TIMEOUT_S)
    rebuilt = time.time()
    time.sleep(phase_s)
    return Times(began, killed, standby, rebuilt, time.time())


def _rows(files: Sequence[WrittenFile], times: Times, epoch_s: float) -> list[Measurement]:
    limit_s = epoch_s + STALL_MARGIN_S
    phases = {
        "before the loss": (times.began, times.killed),
        "a node is lost": (times.killed, times.standby),
        "catch-up": (times.standby, times.rebuilt),
        "after catch-up": (times.rebuilt, times.ended),
    }
    rows = []
    for what, (since, until) in phases.items():
        pauses = percentiles(intervals(files, since, until))
        written = sum(file.rows for file in files if since <= file.at_s < until)
        figures = {
            "seconds": round(until - since, 1),
            "rows/s": round(written / (until - since)),
            "between epochs p50 s": round(pauses.p50, 3),
            "p99 s": round(pauses.p99, 3),
            "max s": round(pauses.worst, 3),
        }
        disturbed = times.killed <= since < times.rebuilt
        met = pauses.worst <= limit_s if disturbed else None
        rows.append(Measurement(what, figures, limit_s if disturbed else None, met))
    return rows


def _draw(files: Sequence[WrittenFile], times: Times, path: Path) -> None:
    """The rates of the partitions, stacked, over the seconds since the first phase began."""
    figure = Figure(figsize=(10, 4))
    axes = figure.add_subplot()
    partitions = sorted({file.partition for file in files})
    # Bins that begin between two epochs: otherwise a little jitter would look like a pause.
    since = min(file.at_s for file in files if file.at_s >= times.began) + BIN_S / 2
    rates = [
        rows_per_s([f for f in files if f.partition == p], since, times.ended, BIN_S)
        for p in partitions
    ]
    seconds = [since - times.began + number * BIN_S for number in range(len(rates[0]))]
    labels = [f"partition {p}" for p in partitions]
    axes.stackplot(seconds, *rates, labels=labels, step="post", alpha=0.7)
    for text, at_s in {
        "node lost": times.killed,
        "standby joins": times.standby,
        "no replica missing": times.rebuilt,
    }.items():
        axes.axvline(at_s - times.began, color="#757575", linestyle="--", linewidth=1)
        axes.annotate(text, (at_s - times.began, 1.01), xycoords=("data", "axes fraction"))
    axes.set_xlim(0, times.ended - times.began)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"rows/s in the sink, by {BIN_S * 1000:.0f} ms")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    main()
