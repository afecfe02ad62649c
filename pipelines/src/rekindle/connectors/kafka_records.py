"""The records of a topic that rows become, and what is kept of those that are no rows. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from json.encoder import encode_basestring

import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from rekindle.connectors.dead_letters import DeadLetter, Headers
from rekindle.connectors.json_writer import encode_lines

Key = bytes | None
MOST_MS = (1 << 63) - 1
_CLOCKS_DIFFER_MS = 60_000
_SHOWN_CHARS = 1024


def record_values(rows: pa.Table) -> list[bytes]:
    """One JSON object for each row. Raises UnencodableValue."""
    return encode_lines(rows).split(b"\n")[:-1]


def record_keys(rows: pa.Table, columns: Sequence[str]) -> Sequence[Key]:
    """The keys of the rows: of one column its value (the bytes of a STRING or BINARY, otherwise
    what JSON has, without quotes), and none for NULL; of several a JSON object. Raises
    UnencodableValue."""
    if not columns:
        return list(repeat(None, rows.num_rows))
    if len(columns) > 1:
        return record_values(rows.select(list(columns)))
    column = rows.column(columns[0])
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return list(column.cast(pa.binary()).to_pylist())
    before = len(f"{{{encode_basestring(columns[0])}:".encode())
    values = record_values(rows.select(list(columns)))
    return [_without_quotes(value[before:-1]) for value in values]


def _without_quotes(value: bytes) -> Key:
    if value == b"null":
        return None
    return json.loads(value).encode() if value.startswith(b'"') else value


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Which times of records a topic takes, and does not remove at once: from so long before the
    present to so long after it; None: any."""

    past_ms: int | None = None
    future_ms: int | None = None

    def at(self, now_ms: int) -> tuple[int, int]:
        """The oldest and the newest time, without those that another clock may take for older or
        newer."""
        oldest, newest = 0, MOST_MS
        if self.past_ms is not None:
            oldest = max(0, now_ms - self.past_ms + _CLOCKS_DIFFER_MS)
        if self.future_ms is not None:
            newest = now_ms + self.future_ms - _CLOCKS_DIFFER_MS
        return oldest, newest


def record_times_ms(
    rows: pa.Table, event_time: str | None, oldest_ms: int = 0, newest_ms: int = MOST_MS
) -> Sequence[int]:
    """Unix times; 0, which is the time of writing, for rows without one, or with one before
    `oldest_ms` or after `newest_ms`."""
    if event_time is None or event_time not in rows.schema.names:
        return list(repeat(0, rows.num_rows))
    times_us = rows.column(event_time).cast(pa.int64()).to_pylist()
    times = (None if time is None else time // 1000 for time in times_us)
    return [0 if time is None or not oldest_ms <= time <= newest_ms else time for time in times]


def dead_letter(message: Message, error: str) -> DeadLetter:
    """A record that is no row."""
    kind, time_ms = message.timestamp()
    return DeadLetter(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        None if kind == TIMESTAMP_NOT_AVAILABLE else time_ms,
        _bytes(message.key()),
        _bytes(message.value()),
        error[:_SHOWN_CHARS],  # it may have the value, which may be large
        _readable_headers(message),
    )


def _readable_headers(message: Message) -> Headers:
    try:
        headers = message.headers() or []
    except UnicodeDecodeError:
        return ()
    return tuple((header[0], _bytes(header[1])) for header in headers)


def _bytes(data: bytes | str | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
