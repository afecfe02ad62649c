"""The summary of chaos runs."""

from __future__ import annotations

from pathlib import Path

from rekindle_testing.chaos.__main__ import summary
from rekindle_testing.chaos.run import RoundResult, SeedResult


def _round(number: int, advanced_s: float) -> RoundResult:
    return RoundResult(
        number, advanced_s, live_s=advanced_s + 1, rows=100, longest_stall_while_live_s=0.5
    )


def test_the_summary_has_percentiles_over_all_seeds() -> None:
    first = SeedResult(1, (_round(1, 4.0), _round(2, 6.0)))
    second = SeedResult(2, (_round(1, 20.0),))
    lines = summary([first, second])
    assert lines[0] == "2 seeds, 3 rounds passed, failed seeds: none"
    assert lines[1] == "until all queries advance, s: p50 6, p95 20, max 20"


def test_the_summary_names_the_seeds_that_failed() -> None:
    failed = SeedResult(3, (), "round 1: stuck", Path("build/chaos/3"))
    assert summary([failed]) == ["1 seeds, 0 rounds passed, failed seeds: [3]"]
