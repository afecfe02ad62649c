"""docs/reference.md is what `make reference` writes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "tools/reference.py"))["page"]()
    assert (ROOT / "docs/reference.md").read_text() == made, "run make reference"
