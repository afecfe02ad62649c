"""Times of a column do not depend on the other values of the column."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors.conversions import TextRules, convert

UTC = pa.timestamp("us", "UTC")
TEXTS = [
    "2013-01-31",
    "2013-01-31 06:00:00",
    " 2013-01-31T06:00:00.25",
    "2013-01-31T06:00:00Z",
    "2013-01-31 06:00:00+05:30",
    "+12013-01-31T06:00:00",
    "",
    None,
    "soon",
]


def micros(texts: list[str | None], kind: pa.DataType) -> list[int | None] | None:
    """None if a text is not a time."""
    try:
        found = convert(pa.array(texts, pa.string()), kind, TextRules())
    except ValueError:
        return None
    return list(found.cast(pa.int64()).to_pylist())


@given(st.lists(st.sampled_from(TEXTS), max_size=4), st.sampled_from([UTC, pa.timestamp("us")]))
def test_a_time_does_not_depend_on_other_rows(texts: list[str | None], kind: pa.DataType) -> None:
    alone = [micros([text], kind) for text in texts]
    together = [one for times in alone if times is not None for one in times]
    assert micros(texts, kind) == (None if None in alone else together)
