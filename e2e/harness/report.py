"""How benchmarks say what they measured: a table for people, JSON for the next comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
        figures = "  ".join(f"{k} {v:g}" for k, v in row.figures.items())
        verdict = "" if row.held is None else ("  ok" if row.held else "  MISSED")
        bar = "" if row.bar is None else f"  (bar {row.bar:g}){verdict}"
        print(f"{row.what:{width}}  {figures}{bar}")
    path = ROOT / "build" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=2, default=dict) + "\n")
