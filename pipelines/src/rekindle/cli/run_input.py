"""Describes the input of a run before it starts, and warns of what is probably not intended. Pure.

Numbers that are read in a wrong unit give times far in the past or future: the run succeeds, but
its windows are useless. A replay that is too slow would be noticed only after days."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rekindle.cli.formatting import readable_duration
from rekindle.reference import OpenedSource, SourcesOpened

_PLAUSIBLE_FROM_US = int(np.datetime64("1980-01-01", "us").astype(np.int64))
_PLAUSIBLE_UNTIL_US = int(np.datetime64("2100-01-01", "us").astype(np.int64))
_TOO_MANY_EPOCHS = 1_000_000


def describe_input(opened: SourcesOpened) -> list[str]:
    """A line for each source and one for the run, then the warnings."""
    duration = _duration(opened.last_epoch + 1, opened)
    return [
        *(f"source {source.name}: {_summary(source)}" for source in opened.sources),
        f"epochs 0 to {opened.last_epoch:,}, which take {duration} in a cluster",
        *(f"warning: source {s.name}: {what}" for s in opened.sources for what in _unlikely(s)),
        *(f"warning: source {s.name}: {what}" for s in opened.sources for what in _idle(s)),
        *(f"warning: source {s.name}: {what}" for s in opened.sources for what in _slow(s, opened)),
    ]


def _summary(source: OpenedSource) -> str:
    summary = source.summary
    rows = "unbounded" if summary.rows is None else f"{summary.rows:,} rows"
    if summary.first_us is None:
        return f"{rows}, no event time"
    end = f"to {_iso(summary.last_us)}" if summary.last_us is not None else "on"
    return f"{rows}, event time from {_iso(summary.first_us)} {end}"


def _unlikely(source: OpenedSource) -> Iterator[str]:
    """Event times outside of plausible years. A generator computes them as its spec says, so its
    times are not checked."""
    first_us, last_us = source.summary.first_us, source.summary.last_us
    if source.generated or first_us is None or last_us is None:
        return
    hint = (
        "check the unit in eventTime.expression: timestamp_seconds, timestamp_millis, "
        "timestamp_micros"
    )
    if last_us < _PLAUSIBLE_FROM_US:
        yield f"all event times are before 1980; {hint}"
    elif last_us >= _PLAUSIBLE_UNTIL_US:
        yield f"it has event times after 2099; {hint}"


def _idle(source: OpenedSource) -> Iterator[str]:
    if number := source.idle_partitions:
        subject = "1 partition has" if number == 1 else f"{number} partitions have"
        yield f"{subject} no rows: the input has too few files or row groups; lower partitions"


def _slow(source: OpenedSource, opened: SourcesOpened) -> Iterator[str]:
    if source.last_epoch is None or source.speed_field is None:
        return
    epochs = min(source.last_epoch, opened.last_epoch) + 1
    if epochs >= _TOO_MANY_EPOCHS:
        field, value = source.speed_field
        yield (
            f"{field} {value:g} makes {epochs:,} epochs, which take {_duration(epochs, opened)} in "
            f"a cluster; raise {field}"
        )


def _duration(epochs: int, opened: SourcesOpened) -> str:
    return readable_duration(epochs * opened.epoch_interval_us / 1_000_000)


def _iso(time_us: int) -> str:
    return str(np.datetime64(time_us // 1_000_000, "s"))
