"""Reports of benchmarks can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle_testing.harness import report as module
from rekindle_testing.harness.report import (
    Measurement,
    format_row,
    read_report,
    report,
    to_markdown,
)


def test_a_report_can_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BENCH", tmp_path)
    rows = [
        Measurement("gap", {"max s": 1.2}, target=1.1, met=False),
        Measurement("load average", {"1 min": 0.5}),
    ]
    report("failover", rows)
    assert read_report("failover") == rows


def test_a_line_shows_whether_the_target_was_met() -> None:
    missed, met = (Measurement("gap", {"s": s}, target=1.1, met=s <= 1.1) for s in (1.2, 1.0))
    assert format_row(missed) == "gap  s 1.2  (target 1.1)  MISSED"
    assert format_row(met, width=5) == "gap    s 1  (target 1.1)  ok"
    assert format_row(Measurement("gap", {"s": 1.0})) == "gap  s 1"


def test_what_missed_its_target_is_bold_in_markdown() -> None:
    missed = Measurement("gap", {"s": 1.2}, target=1.1, met=False)
    without_target = Measurement("load", {"1 min": 0.5})
    assert to_markdown([missed, without_target]).splitlines()[2:] == [
        "| gap | **s 1.2** | 1.1 |",
        "| load | 1 min 0.5 |  |",
    ]
