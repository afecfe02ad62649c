"""Measures of a failure: delays of new results, tentative rows, when output is stable again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams.epochs import BatchKind
from rekindle_testing.harness.stream_delays import (
    Arrival,
    EpochClock,
    delays_s,
    first_versions,
    outage,
    stable_again_at,
)

CLOCK = EpochClock(origin_s=1000.0, interval_s=0.5)
CURRENT_S = 0.6
"""Output is current while its epochs arrive with no more than this delay."""
EPOCHS = (BatchKind.STABLE, BatchKind.TENTATIVE)


def at(epoch: int, delay_s: float, kind: BatchKind = BatchKind.STABLE, rows: int = 10) -> Arrival:
    """`delay_s` after the epoch's release."""
    return Arrival(1000.0 + (epoch + 1) * 0.5 + delay_s, kind, epoch, rows)


def test_a_delay_counts_from_the_release_of_the_epoch() -> None:
    assert CLOCK.delay_s(Arrival(1003.25, BatchKind.STABLE, 5)) == 0.25


def failure() -> list[Arrival]:
    """Cut after epoch 1, healed with epoch 9: epochs 2 to 8 tentative, and corrected."""
    before = [at(0, 0.1), at(1, 0.1)]
    tentative = [at(2, 2.7, BatchKind.TENTATIVE, 6)]
    tentative += [at(e, max(0.1, 2.7 - (e - 2) * 0.5), BatchKind.TENTATIVE, 6) for e in range(3, 9)]
    healed = at(9, 0.2).at_s
    corrected = [Arrival(healed, BatchKind.UNDO, 2)]
    corrected += [Arrival(healed + 0.1, BatchKind.STABLE, e, 10) for e in range(2, 10)]
    return [
        *before,
        *tentative,
        *corrected,
        Arrival(healed + 0.2, BatchKind.RECONCILIATION_DONE, 9),
    ]


def test_a_failure_has_its_longest_delay_and_tentative_rows() -> None:
    cut_s, healed_s = at(1, 0.2).at_s, at(8, 0.4).at_s
    found = outage(failure(), CLOCK, cut_s, healed_s, CURRENT_S)
    assert found is not None
    assert round(found.delay_new_s, 3) == 2.7
    assert (found.tentative_epochs, found.tentative_rows) == (7, 42)
    assert round(found.stabilized_s, 3) == 0.5


def test_corrections_are_no_new_results() -> None:
    delays = delays_s(failure(), CLOCK, 0.0, 2000.0)
    assert len(delays) == 10
    assert max(delays) < 2.8


def test_an_epoch_that_was_never_tentative_counts_in_full() -> None:
    arrivals = [at(0, 0.1), at(2, 0.1, BatchKind.TENTATIVE), at(1, 9.0)]
    assert round(max(delays_s(arrivals, CLOCK, 0.0, 2000.0)), 3) == 9.0


def test_output_is_not_stable_before_its_corrections_end() -> None:
    *almost, done = failure()
    healed_s = at(8, 0.4).at_s
    assert stable_again_at(almost, CLOCK, healed_s, CURRENT_S) is None
    assert stable_again_at([*almost, done], CLOCK, healed_s, CURRENT_S) == done.at_s


def test_output_that_is_stable_and_late_is_not_current() -> None:
    arrivals = [at(0, 0.1), at(1, 5.0), at(2, 4.5), at(3, 4.0)]
    assert stable_again_at(arrivals, CLOCK, at(1, 4.0).at_s, CURRENT_S) is None


def test_what_is_stable_before_the_heal_does_not_count() -> None:
    arrivals = [at(0, 0.1), at(1, 0.1)]
    assert stable_again_at(arrivals, CLOCK, at(1, 0.2).at_s, CURRENT_S) is None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.floats(1000, 1020),
        st.sampled_from(list(BatchKind)),
        st.integers(0, 20),
        st.integers(0, 100),
    ),
    max_size=40,
).map(lambda arrivals: sorted(arrivals, key=lambda a: a.at_s))


@given(ARRIVALS)
def test_each_epoch_has_one_first_version(arrivals: list[Arrival]) -> None:
    first = first_versions(arrivals)
    epochs = [a.epoch for a in arrivals if a.kind in EPOCHS]
    assert sorted(a.epoch for a in first) == sorted(set(epochs))
    for arrival in first:
        same = [a for a in arrivals if a.epoch == arrival.epoch and a.kind in EPOCHS]
        assert arrival.at_s == min(a.at_s for a in same)


@given(ARRIVALS, st.floats(1000, 1010), st.floats(0, 10))
def test_the_end_of_a_failure_is_an_arrival_after_the_heal(
    arrivals: list[Arrival], cut_s: float, seconds: float
) -> None:
    healed_s = cut_s + seconds
    found = outage(arrivals, CLOCK, cut_s, healed_s, CURRENT_S) if arrivals else None
    if found is None:
        assert stable_again_at(arrivals, CLOCK, healed_s, CURRENT_S) is None
    else:
        assert found.stabilized_s >= 0
        assert found.tentative_rows <= sum(a.rows for a in arrivals)
