"""What the operators of `chains` have to write, in plain Python, from all rows of their inputs: it
shares no code with the operators.

Each row is a tuple of integers: times in microseconds, None for NULL. An input's rows are `Arrived`
in the order in which they arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.topology.model import Node
from rekindle.topology.spec import DistinctSpec, JoinSpec, OperatorSpec

Fields = Mapping[str, Any]
Mark = tuple[int, int, int]
"""An epoch, and the watermarks before and after it."""
Written = dict[int, Counter[tuple[Any, ...]]]
"""By epoch, rows and how often each of them is written."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A row of an input. `place`: in its epoch."""

    epoch: int
    place: int
    fields: Fields


def plain_results(
    node: Node, inputs: Sequence[Sequence[Arrived]], times: Sequence[str], marks: Sequence[Mark]
) -> Written:
    """What an operator writes in the epochs of `marks`. `times`: the column of the event time of
    each input."""
    spec = node.spec
    assert isinstance(spec, OperatorSpec)
    before = {epoch: watermark for epoch, watermark, _ in marks}
    in_time = [
        [row for row in rows if row.fields[time] >= before[row.epoch]]
        for rows, time in zip(inputs, times, strict=True)
    ]
    written: Written = {epoch: Counter() for epoch, _, _ in marks}
    if spec.join is not None:
        found = _joined(node, spec.join, in_time, times, marks)
    elif spec.distinct is not None:
        found = _distinct(spec.distinct, in_time[0], times[0], marks)
    else:
        assert spec.window is not None
        assert spec.window.session is not None
        found = _sessions(spec.window.session, inputs[0], times[0], marks)
    for epoch, row in found:
        written[epoch][row] += 1
    return written


_Found = Iterator[tuple[int, tuple[Any, ...]]]


def _first_after(marks: Sequence[Mark], time: int) -> int | None:
    """The first epoch whose watermark is after a time."""
    return next((epoch for epoch, _, after in marks if after > time), None)


def _joined(
    node: Node,
    spec: JoinSpec,
    inputs: Sequence[Sequence[Arrived]],
    times: Sequence[str],
    marks: Sequence[Mark],
) -> _Found:
    """Rows of the first input match those of the second with the same `k`, from `before` earlier to
    `after` later, with an `n` that is not less."""
    assert spec.select is not None
    early_us, late_us = spec.before or 0, spec.after or 0
    by_key: dict[Any, list[Arrived]] = {}
    for other in inputs[1]:
        by_key.setdefault(other.fields["k"], []).append(other)
    for row in inputs[0]:
        time, matched = row.fields[times[0]], False
        for other in by_key.get(row.fields["k"], []) if row.fields["k"] is not None else []:
            apart = other.fields[times[1]] - time
            if -early_us <= apart <= late_us and row.fields["n"] <= other.fields["n"]:
                matched = True
                if spec.type != "Anti":
                    pair = {node.inputs[0]: row.fields, node.inputs[1]: other.fields}
                    yield max(row.epoch, other.epoch), _selected(spec.select, pair)
        if not matched and spec.type in ("Left", "Anti"):
            epoch = _first_after(marks, time + late_us)
            if epoch is not None:
                yield epoch, _selected(spec.select, {node.inputs[0]: row.fields})


def _selected(select: str, pair: Mapping[str, Fields]) -> tuple[Any, ...]:
    columns = (item.partition(" AS ")[0].strip().split(".") for item in select.split(","))
    return tuple(pair[stream][column] if stream in pair else None for stream, column in columns)


def _distinct(
    spec: DistinctSpec, rows: Sequence[Arrived], time: str, marks: Sequence[Mark]
) -> _Found:
    by_key: dict[Any, list[Arrived]] = {}
    for row in rows:
        by_key.setdefault(row.fields["k"], []).append(row)
    for of_key in by_key.values():
        written: list[int] = []
        for at, row in enumerate(of_key):
            when = row.fields[time]
            if spec.keep == "First":
                if all(abs(when - other) >= spec.within for other in written):
                    written.append(when)
                    yield row.epoch, tuple(row.fields.values())
                continue
            later = (
                (when, at) < (other.fields[time], number)
                and other.fields[time] < when + spec.within
                for number, other in enumerate(of_key)
            )
            epoch = _first_after(marks, when + spec.within - 1)
            if epoch is not None and not any(later):
                yield epoch, tuple(row.fields.values())


def _sessions(gap_us: int, rows: Sequence[Arrived], time: str, marks: Sequence[Mark]) -> _Found:
    by_epoch: dict[int, list[Arrived]] = {}
    for row in rows:
        by_epoch.setdefault(row.epoch, []).append(row)
    open_times: dict[Any, list[int]] = {}
    for epoch, before, after in marks:
        for row in by_epoch.get(epoch, []):
            open_times.setdefault(row.fields["k"], []).append(row.fields[time])
        for key, times in open_times.items():
            remaining: list[int] = []
            for session in _chains(times, gap_us):
                end = session[-1] + gap_us
                if before < end <= after:
                    yield epoch, (session[0], end, key, len(session))
                elif end > after:
                    remaining += session
            open_times[key] = remaining


def _chains(times: Sequence[int], gap_us: int) -> list[list[int]]:
    chains: list[list[int]] = []
    for time in sorted(times):
        if chains and time - chains[-1][-1] < gap_us:
            chains[-1].append(time)
        else:
            chains.append([time])
    return chains
