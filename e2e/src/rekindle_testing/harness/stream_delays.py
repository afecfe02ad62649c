"""What the output of a task says about a failure of an input. Pure.

Epoch e of every source is released at `origin + (e + 1) * interval`, whatever the task does. The
*delay* of an epoch is the time from there until its first version arrived, tentative or stable: the
processing delay of new tuples, of which the paper's `Delay_new` is the maximum. What corrects an
epoch that has arrived before does not count. An epoch that was never tentative arrives with its
stable version, so waiting counts in full: by the policies Delay and Suspend
(`rekindle.consistency`), or for an epoch that could not be processed.

Paper: DPC (Balazinska et al. 2005), sections 2 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.streams.epochs import BatchKind

_EPOCHS = (BatchKind.STABLE, BatchKind.TENTATIVE)


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s`: Unix time; `rows`: 0 for UNDO and REC_DONE."""

    at_s: float
    kind: BatchKind
    epoch: int
    rows: int = 0


@dataclass(frozen=True, slots=True)
class EpochClock:
    """When epochs are released: `origin_s` is Unix time."""

    origin_s: float
    interval_s: float

    def delay_s(self, arrival: Arrival) -> float:
        return arrival.at_s - (self.origin_s + (arrival.epoch + 1) * self.interval_s)


@dataclass(frozen=True, slots=True)
class ReaderOutage:
    """What a reader saw of a failure, from when the input was cut off until output was stable and
    current again.

    `delay_new_s`: the largest delay of an epoch; `tentative_epochs`, `tentative_rows`: how many
    arrived, where an epoch that arrives twice counts twice; `stabilized_s`: from the heal until
    output was stable and current again.
    """

    delay_new_s: float
    tentative_epochs: int
    tentative_rows: int
    stabilized_s: float


def first_versions(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The first arrival of each epoch, in the order of arrival."""
    first: dict[int, Arrival] = {}
    for arrival in arrivals:
        if arrival.kind in _EPOCHS:
            first.setdefault(arrival.epoch, arrival)
    return list(first.values())


def delays_s(
    arrivals: Iterable[Arrival], clock: EpochClock, since_s: float, until_s: float
) -> list[float]:
    """Of the epochs that arrived for the first time in `[since_s, until_s]`."""
    return [
        clock.delay_s(arrival)
        for arrival in first_versions(arrivals)
        if since_s <= arrival.at_s <= until_s
    ]


def stable_again_at(
    arrivals: Iterable[Arrival], clock: EpochClock, healed_s: float, current_s: float
) -> float | None:
    """When, after the heal, everything tentative had been corrected and stable epochs came with a
    delay of at most `current_s` again; None: not yet."""
    tentative, current = False, False
    for arrival in arrivals:
        match arrival.kind:
            case BatchKind.TENTATIVE:
                tentative = True
            case BatchKind.RECONCILIATION_DONE:
                tentative = False
            case BatchKind.STABLE:
                current = arrival.at_s >= healed_s and clock.delay_s(arrival) <= current_s
            case BatchKind.UNDO:
                continue
        if arrival.at_s >= healed_s and current and not tentative:
            return arrival.at_s
    return None


def outage(
    arrivals: Sequence[Arrival], clock: EpochClock, cut_s: float, healed_s: float, current_s: float
) -> ReaderOutage | None:
    """None while output is not stable and current again; see `stable_again_at`."""
    end_s = stable_again_at(arrivals, clock, healed_s, current_s)
    if end_s is None:
        return None
    during = [a for a in arrivals if cut_s <= a.at_s <= end_s]
    tentative = [a for a in during if a.kind is BatchKind.TENTATIVE]
    return ReaderOutage(
        delay_new_s=max(delays_s(arrivals, clock, cut_s, end_s), default=0.0),
        tentative_epochs=len(tentative),
        tentative_rows=sum(a.rows for a in tentative),
        stabilized_s=end_s - healed_s,
    )
