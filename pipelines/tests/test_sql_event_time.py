"""What is refused in an expression for event time, and what to write instead."""

from __future__ import annotations

import pytest

from rekindle.topology.problems import InvalidSql
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.event_time import parse_event_time

SCHEMA = ddl_to_schema("s STRING, year INT, month INT, day INT, ms BIGINT")


@pytest.mark.parametrize(
    ("expression", "message", "hint"),
    [
        ("make_timestamp(year, month, day, 0, 0, 0)", "function make_timestamp", "join the col"),
        ("make_date(year, month, day)", "function make_date", "join the columns: to_timestamp(c"),
        ("timestamp_seconds(ms / 1000)", "unexpected '/'", "numbers and arithmetic cannot be"),
        ("to_timestamp(s - t)", "unexpected '-'", "backquotes"),
        ("concat(s, 'at (', 1)", "unexpected '1'", "numbers and arithmetic cannot be used"),
        ("to_timestamp(s, '%Y-%m-%d')", "has %Y", "write it like yyyy-MM-dd HH:mm:ss"),
        ("to_timestamp(s, 'YYYY-MM-dd')", "has YYYY", "write yyyy"),
        ("to_timestamp(s, 'yyyy-MM-DD')", "has DD", "write dd"),
        ("to_timestamp(s, 'yyyy-MM-dd E')", "has E", "use y, M, d, "),
    ],
)
def test_a_mistake_is_named_with_what_to_write(expression: str, message: str, hint: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        parse_event_time(expression, SCHEMA)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert hint in problem.hint
