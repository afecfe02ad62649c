"""`make bench`: every benchmark in turn; tables on stdout, JSON under build/bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NO_BENCHMARKS = {"run", "engine_parts"}


def main() -> int:
    names = sys.argv[1:] or sorted({p.stem for p in HERE.glob("*.py")} - NO_BENCHMARKS)
    failed = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\ndid not finish: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
