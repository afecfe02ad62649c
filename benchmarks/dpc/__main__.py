"""`make bench-dpc`: DPC's experiments on the embedded cluster, with real Spark.

PYTHONPATH=benchmarks .venv/bin/python -m dpc [--parts chain throughput] [--seconds 5]
    [--policies Process/Process Delay/Suspend]

Writes tables (Markdown, CSV, JSON) and pictures (SVG) under build/bench/dpc, after each topology;
what an earlier run has measured of other parts stays there. `scenario` says how it is measured.
Cutting an input needs root and nftables. Exits with 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dpc import plots, tables
from dpc.failures import CHAIN, measure_failures
from dpc.overheads import CHECKPOINTS_S, EPOCHS_S, measure_checkpoints, measure_overheads
from dpc.scenario import bench_cluster
from dpc.tables import AnyRow
from dpc.throughput import measure_throughput
from dpc.topologies import POLICIES, Policy
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.report import BENCH

DIRECTORY = BENCH / "dpc"
FAILURES_S = (5.0, 15.0, 30.0, 60.0)
CHAIN_S = 15.0
CHAIN_POLICIES = ("Process/Process", "Delay/Delay", "Process/Suspend")
"""Those of the paper's Fig. 11."""
PARTS = ("throughput", "failures", "chain", "overheads", "checkpoints")


def main() -> int:
    options = _options()
    if "throughput" in options.parts:
        _measure("throughput", (measure_throughput() for _ in range(1)))
    if set(options.parts) - {"throughput"}:
        with bench_cluster() as cluster:
            for part in PARTS:
                if part in options.parts and part != "throughput":
                    _measure(part, _rows(part, cluster, options))
    print((DIRECTORY / "dpc.md").read_text())
    if missed := tables.missed(tables.read(DIRECTORY)):
        print("missed targets:", *missed, sep="\n  ")
    return 1 if missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--seconds", type=float, nargs="*", default=FAILURES_S, help="durations of failures"
    )
    parser.add_argument("--policies", type=_policy, nargs="*", help=", ".join(map(str, POLICIES)))
    return parser.parse_args()


def _policy(text: str) -> Policy:
    try:
        return Policy.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rows(part: str, cluster: EmbeddedCluster, options: argparse.Namespace) -> Iterator[AnyRow]:
    match part:
        case "failures":
            policies = options.policies or POLICIES
            return measure_failures(cluster, policies, options.seconds)
        case "chain":
            policies = options.policies or [Policy.of(text) for text in CHAIN_POLICIES]
            cuts_s = [CHAIN_S if CHAIN_S in options.seconds else options.seconds[0]]
            return measure_failures(cluster, policies, cuts_s, CHAIN)
        case "overheads":
            return measure_overheads(cluster, EPOCHS_S)
        case _:
            return measure_checkpoints(cluster, CHECKPOINTS_S)


def _measure(part: str, rows: Iterator[AnyRow]) -> None:
    """Measure a part. After each row all of its rows are written, beside the other parts."""
    print(f"\n== {part}", flush=True)
    began = time.monotonic()
    measured: list[AnyRow] = []
    for row in rows:
        print(row, flush=True)
        measured.append(row)
        kept: dict[str, Any] = {part: measured}
        results = replace(tables.read(DIRECTORY), **kept)
        tables.write(results, DIRECTORY)
        plots.draw(results, DIRECTORY)
    print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
