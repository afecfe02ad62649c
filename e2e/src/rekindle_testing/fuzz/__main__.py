"""`make fuzz COUNT= SEED=`: exit 0 means that every manifest was rejected by the API server,
refused by the operator with a message that names a field, or reconciled."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.fuzz.generator import Case, case
from rekindle_testing.fuzz.session import Failure, FuzzSession, session
from rekindle_testing.paths import ROOT

BUILD = ROOT / "build/fuzz"
BATCH = 80
_SOAK_TOPOLOGIES = 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="manifests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first one")
    parser.add_argument(
        "--soak",
        type=float,
        default=75.0,
        help="seconds without any change of a manifest, at the end",
    )
    options = parser.parse_args(arguments)
    directory = BUILD / str(options.seed)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = time.monotonic()
    with (
        ControlPlane(directory / "plane", on_progress=_print) as control_plane,
        session(control_plane, directory) as running,
    ):
        failures = run(running, options.seed, options.first, options.count, directory)
        if options.soak and not failures:
            failures += _soak(running, options.seed, options.soak)
        lines = summary(running)
    for line in lines:
        _print(line)
    _print(f"{time.monotonic() - began:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


def run(
    running: FuzzSession, seed: int, first: int, count: int, directory: Path, batch: int = BATCH
) -> list[Failure]:
    found: list[Failure] = []
    for start in range(first, first + count, batch):
        cases = [case(seed, n) for n in range(start, min(start + batch, first + count))]
        failures = running.run(cases)
        for failure in failures:
            _report(failure, cases, directory)
        found += failures
        if running.operator_exited():
            break
    return found


def _report(failure: Failure, cases: Sequence[Case], directory: Path) -> None:
    seed = cases[0].seed
    if failure.index is None:
        _print(f"FAILURE: {failure.message}")
        _print(f"  replay: make fuzz SEED={seed} FIRST={cases[0].index} COUNT={len(cases)}")
        return
    one = next(c for c in cases if c.index == failure.index)
    manifest = directory / f"{one.index}.json"
    manifest.write_text(one.body)
    _print(f"FAILURE of manifest {one.index} of seed {seed}: {failure.message}")
    _print(f"  derived from: {one.derived_from}")
    _print(f"  manifest: {manifest}")
    _print(f"  replay: make fuzz SEED={seed} FIRST={one.index} COUNT=1")


def _soak(running: FuzzSession, seed: int, duration_s: float) -> list[Failure]:
    """Nothing is written for topologies that stay the same, however long. A refused dry run is
    repeated, in case a quota has refused it."""
    changes, actions = running.soak([case(seed, n) for n in range(_SOAK_TOPOLOGIES)], duration_s)
    _print(
        f"in {duration_s:g} s without edits: changes {changes or 'none'}, actions {dict(actions)}"
    )
    return [Failure(None, f"changes of settled topologies: {changes}")] if changes else []


def summary(running: FuzzSession) -> list[str]:
    statistics = running.statistics
    latency = sorted(statistics.validated_s) or [0.0]
    passes = running.reconcile_duration_buckets()
    memory = statistics.rss_mib or [0.0]
    return [
        f"created: {_counted(statistics.created)}",
        f"edited: {_counted(statistics.edited)}",
        f"rejections by the API server: {_counted(statistics.rejections)}",
        f"reasons of Valid: {_counted(statistics.reasons)}",
        f"pods seen: {statistics.pods}",
        f"until the condition Valid, s: {_percentiles(latency)}",
        f"passes: {_passes(passes)}",
        f"resident memory, MiB: {memory[0]:.0f} after the first batch, "
        f"{memory[-1]:.0f} after the last",
        f"actions: {dict(running.actions())}",
    ]


def _percentiles(ordered: Sequence[float]) -> str:
    found = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99, 100)}
    return ", ".join(f"p{p} {value:.2f}" for p, value in found.items())


def _passes(buckets: dict[float, int]) -> str:
    total = max(buckets.values(), default=0)
    bounds = [
        f"p{p} within {next(le for le, n in sorted(buckets.items()) if n >= total * p / 100):g} s"
        for p in (50, 99, 100)
        if total
    ]
    return f"{total}, {', '.join(bounds)}"


def _counted(counts: Mapping[Any, int]) -> str:
    found = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} {what}" for what, n in found) or "none"


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
