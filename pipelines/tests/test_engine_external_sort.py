"""Rows sorted outside memory."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.external_sort import ExternalSort
from rekindle.engine.state import spill
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.digest import digest_table

SCHEMA = pa.schema([("epoch", pa.int64()), ("key", pa.string()), ("x", pa.float64())])
rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.none() | st.text(max_size=4),
        st.none() | st.sampled_from([math.nan, -1.0, 0.5, math.inf]),
    ),
    unique_by=repr,
    max_size=30,
)


def table(drawn: list[Any]) -> pa.Table:
    columns = zip(*drawn, strict=True) if drawn else ((), (), ())
    pairs = zip(columns, SCHEMA, strict=True)
    arrays = [pa.array(list(c), f.type, from_pandas=False) for c, f in pairs]
    return pa.table(arrays, schema=SCHEMA)


@given(rows, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 40, 10_000]))
def test_rows_in_files_have_the_order_of_rows_in_memory(
    drawn: list[Any], sizes: list[int], buffer_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(spill, "MIN_BUFFER_BYTES", buffer_bytes)
        in_memory = ExternalSort(SCHEMA, SCHEMA.names, None)
        in_files = ExternalSort(SCHEMA, SCHEMA.names, RunFiles(Path(directory), memory_bytes=0))
        at, turn = 0, 0
        while at < len(drawn):
            part = table(drawn[at : at + sizes[turn % len(sizes)]])
            in_memory.add(part)
            in_files.add(part)
            at, turn = at + part.num_rows, turn + 1
        assert digest_table(in_files.sorted()) == digest_table(in_memory.sorted())
        assert in_files.sorted().schema == SCHEMA


def test_a_row_may_be_larger_than_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 1_000)
    sort = ExternalSort(SCHEMA, ["key"], RunFiles(tmp_path, memory_bytes=0))
    for letter in "cab":
        sort.add(table([(0, letter * 10_000, None)]))
    assert [key[0] for key in sort.sorted().column("key").to_pylist()] == ["a", "b", "c"]
