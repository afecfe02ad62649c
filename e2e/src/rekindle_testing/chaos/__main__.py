"""`make chaos SEED= ROUNDS=`: random faults on an embedded cluster; exit 0 means that nothing was
lost, repeated or stuck."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import NoReturn

from rekindle_testing.chaos.plan import Fault
from rekindle_testing.chaos.progress import percentile
from rekindle_testing.chaos.run import SeedResult, run_seed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one or more")
    parser.add_argument("--rounds", type=int, default=3, help="of each seed")
    parser.add_argument(
        "--only", nargs="+", choices=[f.value for f in Fault], help="kinds of faults; all if absent"
    )
    parser.add_argument("--standbys", type=int, default=0, help="of one of the topologies")
    options = parser.parse_args(arguments)
    faults = tuple(Fault(value) for value in options.only or [f.value for f in Fault])
    signal.signal(signal.SIGTERM, _exit)
    results = []
    for seed in options.seed:
        result = run_seed(seed, options.rounds, _print, faults=faults, standbys=options.standbys)
        results.append(result)
        if result.failure:
            only = f' FAULTS="{" ".join(options.only)}"' if options.only else ""
            standbys = f" STANDBYS={options.standbys}" if options.standbys else ""
            _print(f"evidence: {result.evidence}")
            _print(f"replay: make chaos SEED={seed} ROUNDS={options.rounds}{only}{standbys}")
    for line in summary(results):
        _print(line)
    return 1 if any(result.failure for result in results) else 0


def summary(results: list[SeedResult]) -> list[str]:
    """The last lines of a run."""
    rounds = [r for result in results for r in result.rounds]
    failed = [result.seed for result in results if result.failure]
    lines = [f"{len(results)} seeds, {len(rounds)} rounds passed, failed seeds: {failed or 'none'}"]
    if rounds:
        for what, values in (
            ("until all queries advance, s", [r.advanced_s for r in rounds]),
            ("until all queries are Live, s", [r.live_s for r in rounds]),
            (
                "longest stall of a Live query in a round, s",
                [r.longest_stall_while_live_s for r in rounds],
            ),
        ):
            p50, p95 = percentile(values, 0.5), percentile(values, 0.95)
            lines.append(f"{what}: p50 {p50:g}, p95 {p95:g}, max {max(values):g}")
    return lines


def _print(text: str) -> None:
    print(text, flush=True)


def _exit(number: int, frame: object) -> NoReturn:
    """SIGTERM cleans up and exits like Ctrl-C."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
