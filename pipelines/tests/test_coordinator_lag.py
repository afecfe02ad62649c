"""The lag of a query where sources release epochs by clocks that differ."""

from __future__ import annotations

import pytest

from rekindle.coordinator.core.report import SourceHeads
from rekindle.coordinator.tasks.graph import build_graph
from rekindle.topology.model import Partition
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_generation

GOOD, AHEAD = Partition("good", 0), Partition("ahead", 0)
SKEW_S = 12


@pytest.fixture
def heads() -> SourceHeads:
    """Epochs of 1 s, for 300 s; one source's clock is ahead."""
    made = SourceHeads()
    for now in range(300):
        made.advanced(GOOD, now - 1, float(now))
        made.advanced(AHEAD, now - 1 + SKEW_S, float(now))
    return made


def test_a_query_does_not_lag_behind_sources_that_it_does_not_read(heads: SourceHeads) -> None:
    assert heads.lag_s([GOOD], 298, now=299.0, interval_s=1.0) == 0.0
    assert heads.lag_s([GOOD], 288, now=299.0, interval_s=1.0) == 9.0


def test_a_query_of_a_source_that_is_ahead_lags_by_its_clock(heads: SourceHeads) -> None:
    assert heads.lag_s([AHEAD], 298 + SKEW_S, now=299.0, interval_s=1.0) == 0.0
    assert heads.lag_s([AHEAD], 288 + SKEW_S, now=299.0, interval_s=1.0) == 9.0


def test_the_slowest_clock_counts_for_a_query_of_several(heads: SourceHeads) -> None:
    assert heads.lag_s([GOOD, AHEAD], 298, now=299.0, interval_s=1.0) == 0.0
    assert heads.lag_s([GOOD, AHEAD], 288, now=299.0, interval_s=1.0) == 9.0


def test_the_lag_grows_while_a_source_is_stopped(heads: SourceHeads) -> None:
    for now in range(300, 400):
        heads.advanced(AHEAD, now - 1 + SKEW_S, float(now))
    assert heads.lag_s([GOOD], 298, now=399.0, interval_s=1.0) >= 100.0
    assert heads.lag_s([GOOD, AHEAD], 298, now=399.0, interval_s=1.0) >= 100.0


def test_the_lag_grows_while_all_sources_are_stopped(heads: SourceHeads) -> None:
    assert heads.lag_s([GOOD], 298 + SKEW_S, now=300.0, interval_s=1.0) == 0.0
    assert heads.lag_s([GOOD], 298 + SKEW_S, now=399.0, interval_s=1.0) == 99.0


def test_a_query_is_finished_after_the_end_of_all_its_sources(heads: SourceHeads) -> None:
    heads.advanced(GOOD, 300, 301.0, last_epoch=250)
    assert not heads.is_finished([GOOD], 250)
    assert heads.is_finished([GOOD], 251)
    assert not heads.is_finished([GOOD, AHEAD], 251), "the other one has not ended"
    heads.advanced(GOOD, -1, 302.0)  # a replica that starts, and has not opened it
    assert heads.is_finished([GOOD], 251)
    heads.keep([AHEAD])
    assert not heads.is_finished([GOOD], 251)


def test_a_lag_older_than_what_is_kept_is_estimated(heads: SourceHeads) -> None:
    assert heads.lag_s([GOOD], -1, now=299.0, interval_s=1.0) == pytest.approx(298.0)


def test_a_gap_between_polls_is_not_a_lag(heads: SourceHeads) -> None:
    heads.advanced(GOOD, 358, 359.0)  # no responses for 60 s
    heads.advanced(AHEAD, 358 + SKEW_S, 359.0)
    assert heads.lag_s([GOOD], 355, now=359.0, interval_s=1.0) == 2.0
    assert heads.lag_s([GOOD], 300, now=359.0, interval_s=1.0) == 57.0
    assert heads.lag_s([GOOD], 288, now=359.0, interval_s=1.0) == 69.0


def test_partitions_of_earlier_generations_are_forgotten(heads: SourceHeads) -> None:
    heads.keep([AHEAD])
    assert heads.lag_s([GOOD], 298, now=299.0, interval_s=1.0) > 0.0


def test_a_segment_knows_the_sources_that_it_reads_indirectly() -> None:
    generation = make_generation(
        [
            SimulatedSegment("a", partitions=2),
            SimulatedSegment("b"),
            SimulatedSegment("of-a", ("a",)),
            SimulatedSegment("both", ("of-a", "b")),
        ]
    )
    graph = build_graph(generation.topology)
    a, b = (Partition("a", 0), Partition("a", 1)), Partition("b", 0)
    assert graph.sources["a"] == graph.sources["of-a"] == a
    assert set(graph.sources["both"]) == {*a, b}
