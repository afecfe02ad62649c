"""`make nightly`: everything there is, one step after the other, and one summary of all of it.

A step that fails ends nothing. Its output is in build/nightly/<step>.log.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle_testing.paths import ROOT

DIRECTORY = ROOT / "build" / "nightly"
_ALL = ("--hypothesis-profile=nightly", "--platform")


def _make(target: str, *variables: str) -> Sequence[str]:
    return ("make", "--no-print-directory", target, *variables)


def _tests(markers: str, *more: str) -> Sequence[str]:
    return (sys.executable, "-m", "pytest", "-m", markers, *_ALL, *more)


STEPS: Mapping[str, Sequence[str]] = {
    "lint": _make("lint"),
    "unit": _make("unit", f"PYTEST_ARGS={' '.join(_ALL)}"),
    "simulate": _make("simulate", "SEEDS=500"),
    "mutants": _make("mutants"),
    "programs": _make("programs", "LONG=", f"PYTEST_ARGS={' '.join(_ALL)}"),
    "cluster": _tests("cluster"),
    "kubelets": _tests("kubelet and not smoke"),
    "smoke": _make("smoke"),
    "demo": _make("demo"),
    "chaos": _make("chaos", "SEED=1 2 3", "ROUNDS=8"),
    "fuzz": _make("fuzz"),
    "bench": _make("bench"),
    "bench-flux": _make("bench-flux"),
    "bench-dpc": _make("bench-dpc"),
    "bench-cec": _make("bench-cec"),
}


@dataclass(frozen=True, slots=True)
class StepResult:
    step: str
    exit_code: int
    seconds: float
    last_line: str

    def __str__(self) -> str:
        how = "passed" if self.exit_code == 0 else f"FAILED ({self.exit_code})"
        return f"{self.step:12} {how:12} {self.seconds:7.0f} s  {self.last_line}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nightly", description=__doc__)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    options = parser.parse_args(arguments)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    results = [_run(step) for step in options.steps]
    failed = [result for result in results if result.exit_code]
    for line in ("", *map(str, results), f"{len(failed)} of {len(results)} steps failed"):
        print(line, flush=True)
    return 1 if failed else 0


def _run(step: str) -> StepResult:
    log = DIRECTORY / f"{step}.log"
    print(f"{step}: log in {log.relative_to(ROOT)}", flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        code = subprocess.call(STEPS[step], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return StepResult(step, code, time.monotonic() - began, last.strip("= ")[:100])


if __name__ == "__main__":
    sys.exit(main())
