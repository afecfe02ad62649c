"""Results of benchmarks: tables for users, JSON for comparisons."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rekindle_testing.paths import ROOT

BENCH = ROOT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement; `met`: whether it met its target (None: it has no target)."""

    what: str
    values: Mapping[str, float]
    target: float | None = None
    met: bool | None = None


def report(name: str, rows: Sequence[Measurement]) -> None:
    """Print the table and write build/bench/<name>.json and <name>.md."""
    width = max(len(r.what) for r in rows)
    for row in rows:
        print(format_row(row, width))
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=2, default=dict) + "\n")
    path.with_suffix(".md").write_text(to_markdown(rows))


def to_markdown(rows: Sequence[Measurement]) -> str:
    """A table with a line for each row; what missed its target is bold."""
    lines = ["| what | measured | target |", "|---|---|---|"]
    for row in rows:
        values = ", ".join(f"{k} {v:g}" for k, v in row.values.items())
        measured = f"**{values}**" if row.met is False else values
        target = "" if row.target is None else f"{row.target:g}"
        lines.append(f"| {row.what} | {measured} | {target} |")
    return "\n".join(lines) + "\n"


def format_row(row: Measurement, width: int = 0) -> str:
    values = "  ".join(f"{k} {v:g}" for k, v in row.values.items())
    result = "" if row.met is None else ("  ok" if row.met else "  MISSED")
    target = "" if row.target is None else f"  (target {row.target:g}){result}"
    return f"{row.what:{width}}  {values}{target}"


def read_report(name: str) -> list[Measurement]:
    """The rows of the newest `report` of this name."""
    return [Measurement(**row) for row in json.loads(_path(name).read_text())]


def load_average() -> Measurement:
    """The load of the machine, which affects all measured times."""
    return Measurement("load average", {"1 min": round(os.getloadavg()[0], 1)})


def _path(name: str) -> Path:
    return BENCH / f"{name}.json"
