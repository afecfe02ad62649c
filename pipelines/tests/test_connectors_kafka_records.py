"""The records that rows become."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from rekindle.connectors.kafka_records import (
    MOST_MS,
    TimeLimits,
    record_keys,
    record_times_ms,
    record_values,
)

AT = dt.datetime(2026, 1, 31, 6, 0, 0, 250_000, tzinfo=dt.UTC)
ROWS = pa.table(
    {
        "name": pa.array(['a"b', None, "é\n"]),
        "id": pa.array([1, 2, None]),
        "at": pa.array([AT, None, AT], pa.timestamp("us", tz="UTC")),
        "raw": pa.array([b"\xff", b"", None]),
        "price": pa.array([Decimal("3.66"), Decimal("0.10"), None]),
    }
)


def test_a_value_is_a_line_of_a_json_file() -> None:
    first, second, third = record_values(ROWS)
    assert first.startswith(b'{"name":"a\\"b","id":1,"at":"2026-01-31T06:00:00.250000Z"')
    assert second.startswith(b'{"name":null,"id":2,"at":null')
    assert b"\n" not in third


@pytest.mark.parametrize(
    ("columns", "keys"),
    [
        ([], [None, None, None]),
        (["name"], [b'a"b', None, "é\n".encode()]),
        (["raw"], [b"\xff", b"", None]),
        (["id"], [b"1", b"2", None]),
        (["price"], [b"3.66", b"0.10", None]),
        (["at"], [b"2026-01-31T06:00:00.250000Z", None, b"2026-01-31T06:00:00.250000Z"]),
        (["id", "name"], [b'{"id":1,"name":"a\\"b"}', b'{"id":2,"name":null}', None]),
    ],
)
def test_keys(columns: list[str], keys: list[Any]) -> None:
    found = list(record_keys(ROWS, columns))
    if len(columns) > 1:
        found, keys = found[:2], keys[:2]
    assert found == keys


def test_a_record_has_the_event_time_of_its_row() -> None:
    time_ms = int(AT.timestamp() * 1000)
    assert record_times_ms(ROWS, "at") == [time_ms, 0, time_ms]
    assert record_times_ms(ROWS, "at", oldest_ms=time_ms + 1) == [0, 0, 0]
    assert record_times_ms(ROWS, "at", newest_ms=time_ms - 1) == [0, 0, 0]
    assert record_times_ms(ROWS, None) == [0, 0, 0]
    assert record_times_ms(ROWS, "gone") == [0, 0, 0]


def test_limits_of_times_leave_room_for_other_clocks() -> None:
    now = 10_000_000
    assert TimeLimits().at(now) == (0, MOST_MS)
    assert TimeLimits(past_ms=3_600_000, future_ms=3_600_000).at(now) == (6_460_000, 13_540_000)
    assert TimeLimits(past_ms=MOST_MS - 1).at(now)[0] == 0
