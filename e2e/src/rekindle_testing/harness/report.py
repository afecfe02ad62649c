"""How benchmarks say what they measured: a table for people, JSON for the next comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rekindle_testing.paths import ROOT

BENCH = ROOT / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement; `held` says whether it kept its bar (None: it has no bar)."""

    what: str
    figures: Mapping[str, float]
    bar: float | None = None
    held: bool | None = None


def report(name: str, rows: Sequence[Row]) -> None:
    """Print the table and write build/bench/<name>.json."""
    width = max(len(r.what) for r in rows)
    for row in rows:
        print(line(row, width))
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=2, default=dict) + "\n")


def line(row: Row, width: int = 0) -> str:
    figures = "  ".join(f"{k} {v:g}" for k, v in row.figures.items())
    verdict = "" if row.held is None else ("  ok" if row.held else "  MISSED")
    bar = "" if row.bar is None else f"  (bar {row.bar:g}){verdict}"
    return f"{row.what:{width}}  {figures}{bar}"


def reported(name: str) -> list[Row]:
    """What the newest `report` of this name wrote."""
    return [Row(**row) for row in json.loads(_path(name).read_text())]


def load_average() -> Row:
    """What else the machine did: figures of time mean little without it."""
    return Row("load average", {"1 min": round(os.getloadavg()[0], 1)})


def _path(name: str) -> Path:
    return BENCH / f"{name}.json"
