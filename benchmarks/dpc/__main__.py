"""`make bench-dpc`: DPC's experiments on the embedded cluster, with real Spark.

PYTHONPATH=benchmarks .venv/bin/python -m dpc [--parts chain throughput] [--seconds 5]
    [--policies Process/Process Delay/Suspend]

A policy is what new input is subject to during a failure, and during the correction
(`topologies.Policy`).

Writes tables (Markdown, CSV, JSON) and pictures (SVG) under build/bench/dpc, after each topology;
what an earlier run has measured of other parts stays there. `scenario` says how it is measured.
Cutting an input needs root and nftables. Exits with 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dpc import plots, tables
from dpc.failures import chain_settings, failure_settings, measure_failures, wait_settings
from dpc.overheads import CHECKPOINTS_S, EPOCHS_S, measure_checkpoints, measure_overheads
from dpc.scenario import bench_cluster
from dpc.tables import AnyRow
from dpc.throughput import measure_throughput
from dpc.topologies import POLICIES, Policy
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.report import BENCH

DIRECTORY = BENCH / "dpc"
FAILURES_S = (5.0, 15.0, 30.0, 60.0)
WAITS_FAILURE_S, CHAIN_FAILURE_S = 5.0, 15.0
WAIT_POLICIES = ("Process/Process", "Delay/Delay")
"""As in the paper's Fig. 9, which names only the policy during the failure, before the `/`."""
CHAIN_POLICIES = ("Process/Process", "Delay/Delay", "Process/Suspend")
"""Those of the paper's Fig. 11."""
PARTS = ("throughput", "waits", "failures", "chain", "overheads", "checkpoints")
"""`waits`: Fig. 9, several maxDelays; `failures`: Fig. 10, failures of several lengths; `chain`:
Fig. 11, chains of one to four tasks."""


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
        "--seconds", type=float, nargs="*", default=FAILURES_S, help="of the part failures"
    )
    parser.add_argument("--policies", type=_policy, nargs="*", help=", ".join(map(str, POLICIES)))
    return parser.parse_args()


def _policy(text: str) -> Policy:
    try:
        return Policy.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _policies(texts: Sequence[str]) -> list[Policy]:
    return [Policy.of(text) for text in texts]


def _rows(part: str, cluster: EmbeddedCluster, options: argparse.Namespace) -> Iterator[AnyRow]:
    match part:
        case "waits":
            settings = wait_settings(options.policies or _policies(WAIT_POLICIES), WAITS_FAILURE_S)
            return measure_failures(cluster, settings, [WAITS_FAILURE_S])
        case "failures":
            settings = failure_settings(options.policies or POLICIES, options.seconds)
            return measure_failures(cluster, settings, options.seconds)
        case "chain":
            settings = chain_settings(
                options.policies or _policies(CHAIN_POLICIES), CHAIN_FAILURE_S
            )
            return measure_failures(cluster, settings, [CHAIN_FAILURE_S])
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
