"""Chaos runs: the sinks' files compared with the states in the status."""

from __future__ import annotations

from rekindle_testing.chaos.progress import SinkPace, StallWhileLive, percentile


def _progress() -> SinkPace:
    return SinkPace({"a": 2, "b": 1}, file_interval_s=2)


def test_a_query_is_as_far_as_its_slowest_partition() -> None:
    progress = _progress()
    progress.observe(0, {"a": {0: 6, 1: 4}, "b": {0: 8}})
    assert progress.written("a") == 4
    assert (progress.written_through, progress.newest_written) == (4, 8)
    assert progress.behind(5) == {"a": 4}


def test_a_partition_without_files_has_written_nothing() -> None:
    progress = _progress()
    progress.observe(0, {"a": {0: 6}, "b": {0: 8}})
    assert progress.written_through == -1


def test_live_while_the_sink_writes_nothing_is_a_stall() -> None:
    progress = _progress()
    progress.observe(10, {"a": {0: 6, 1: 6}, "b": {0: 6}})
    progress.observe(15, {"a": {0: 6, 1: 6}, "b": {0: 8}})
    states = {"a": "Live", "b": "Live"}
    assert progress.find_stalls_while_live(15, states) == [
        StallWhileLive("a", at_s=15, overdue_s=3)
    ]


def test_a_waiting_query_is_not_stalled() -> None:
    progress = _progress()
    progress.observe(10, {"a": {0: 6, 1: 6}, "b": {0: 6}})
    assert progress.find_stalls_while_live(60, {"a": "Waiting", "b": "Unknown"}) == []


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 21)]
    assert percentile(values, 0.5) == 10
    assert percentile(values, 0.95) == 19
    assert percentile([3.0], 0.95) == 3
