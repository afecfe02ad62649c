"""`make bench`: runs all benchmarks; tables on stdout, JSON and Markdown under build/bench.

At the end: benchmarks that did not finish, and missed targets. Exits with 1 if there are any.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rekindle_testing.harness.report import format_row, read_report

HERE = Path(__file__).resolve().parent
NO_BENCHMARKS = {"run", "engine_parts", "plan_nodes", "replicated_query"}


def main() -> int:
    names = sys.argv[1:] or sorted({p.stem for p in HERE.glob("*.py")} - NO_BENCHMARKS)
    failed: list[str] = []
    missed: list[str] = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            failed.append(name)  # what is under build/bench is of an earlier run
        else:
            missed += [
                f"{name}: {format_row(row)}" for row in read_report(name) if row.met is False
            ]
    if failed:
        print(f"\ndid not finish: {', '.join(failed)}")
    if missed:
        print("\nmissed targets:", *missed, sep="\n  ")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
