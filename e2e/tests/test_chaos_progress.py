"""Chaos runs: what the sinks' files say, against what the status claims."""

from __future__ import annotations

from rekindle_testing.chaos.progress import Progress, StaleClaim, percentile


def _progress() -> Progress:
    return Progress({"a": 2, "b": 1}, window_s=2)


def test_a_query_is_as_far_as_its_slowest_partition() -> None:
    progress = _progress()
    progress.observe(0, {"a": {0: 6, 1: 4}, "b": {0: 8}})
    assert progress.written("a") == 4
    assert (progress.complete, progress.head) == (4, 8)
    assert progress.behind(5) == {"a": 4}


def test_a_partition_without_files_has_written_nothing() -> None:
    progress = _progress()
    progress.observe(0, {"a": {0: 6}, "b": {0: 8}})
    assert progress.complete == -1


def test_live_though_the_sink_is_silent_is_a_stale_claim() -> None:
    progress = _progress()
    progress.observe(10, {"a": {0: 6, 1: 6}, "b": {0: 6}})
    progress.observe(15, {"a": {0: 6, 1: 6}, "b": {0: 8}})
    states = {"a": "Live", "b": "Live"}
    assert progress.stale_claims(15, states) == [StaleClaim("a", 15, 3)]


def test_a_query_that_is_said_to_wait_makes_no_claim() -> None:
    progress = _progress()
    progress.observe(10, {"a": {0: 6, 1: 6}, "b": {0: 6}})
    assert progress.stale_claims(60, {"a": "Waiting", "b": "Unknown"}) == []


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 21)]
    assert percentile(values, 0.5) == 10
    assert percentile(values, 0.95) == 19
    assert percentile([3.0], 0.95) == 3
