"""The root of this checkout, with chart, CRD, examples, and `build` for results of runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
