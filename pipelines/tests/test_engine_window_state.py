"""The state of a window without Spark: merging, closing, buckets, one call or many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.engine.canonical_order import from_order_bits, order_bits
from rekindle.engine.model import BUCKETS
from rekindle.engine.window_assigners import HoppingAssigner
from rekindle.engine.window_state import LATE, UNTIMED, Buckets, WindowShape, advance, conform
from rekindle.errors import StateMismatch
from rekindle.exchange.hashing import hash_rows
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

SIZE, SLIDE = 40, 10
SHAPE = WindowShape(
    HoppingAssigner(SIZE, SLIDE),
    keys=(pa.string(),),
    partials=(
        ("p0", pa.float64(), "sum"),
        ("p1", pa.int64(), "sum"),
        ("p2", pa.float64(), "min"),
        ("p3", pa.float64(), "max"),
        ("p4", pa.string(), "max"),
    ),
)
NAMES = ("__k0", "__w", "__e", "__n", "p0", "p1", "p2", "p3", "p4")
KINDS = dict(
    zip(
        NAMES,
        [
            *(pa.string(), pa.int64(), pa.int64(), pa.int64()),
            *(pa.float64(), pa.int64(), pa.float64(), pa.float64(), pa.string()),
        ],
        strict=True,
    )
)


def state_table(**columns: Any) -> pa.Table:
    values = {"__w": [0], "__k0": ["a"], "p0": [1.5], "p1": [2], "p2": [0.5], "p3": [9.0]}
    return pa.table(values | {"p4": ["z"]} | columns)


def test_saved_columns_are_matched_by_name() -> None:
    saved = state_table()
    reordered = saved.select(["p3", "p2", "__k0", "p1", "p4", "__w", "p0"])
    assert conform(SHAPE, {3: reordered}, "op") == {3: saved}


def test_compatible_saved_state_keeps_its_table() -> None:
    saved = state_table()
    assert conform(SHAPE, {3: saved}, "op")[3] is saved


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (
            state_table().drop_columns(["p2"]),
            "column p2 is missing in the state and double in this release",
        ),
        (state_table(p1=[1.0]), "column p1 is double in the state and int64 in this release"),
        (state_table(p9=[1]), "column p9 is int64 in the state and missing in this release"),
    ],
)
def test_incompatible_saved_state_is_refused(saved: pa.Table, said: str) -> None:
    with pytest.raises(StateMismatch, match=f"operator op: .*{said}"):
        conform(SHAPE, {0: saved}, "op")


doubles = st.one_of(
    st.none(), st.floats(-1e15, 1e15), st.sampled_from([math.nan, -0.0, 0.1, 1e15, -1e15, 1e-3])
)
partial = st.tuples(
    st.sampled_from(["a", "b", "c", None]),
    st.integers(-3, 3).map(lambda n: n * 10),
    doubles,
    st.one_of(st.none(), st.integers(-9, 9)),
    doubles,
    doubles,
    st.one_of(st.none(), st.text(max_size=2)),
)
epochs = st.lists(
    st.tuples(st.lists(partial, max_size=12), st.integers(0, 25)), min_size=1, max_size=6
)


def table(rows: Sequence[Sequence[Any]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(NAMES)
    arrays = [
        pa.array(list(c), KINDS[n], from_pandas=False) for n, c in zip(NAMES, columns, strict=True)
    ]
    return pa.table(arrays, names=list(NAMES))


def history(drawn: list[tuple[list[Any], int]]) -> list[tuple[pa.Table, tuple[int, int, int]]]:
    """Epochs with increasing watermarks; each (group, pane) once in an epoch, as from Spark."""
    result, before, after = [], NO_WATERMARK, -30
    for number, (rows, step) in enumerate(drawn):
        once = {(key, pane): (key, pane, number, 1, *rest) for key, pane, *rest in rows}
        late = [(k, LATE if p + SIZE <= before else p, *r) for k, p, *r in once.values()]
        after += step
        result.append((table(late), (number, before, after)))
        before = after
    return result


def play(
    steps: Sequence[tuple[pa.Table, tuple[int, int, int]]], sizes: Sequence[int]
) -> tuple[Buckets, list[str]]:
    buckets: Buckets = {}
    closed, at, turn = [], 0, 0
    while at < len(steps):
        part = steps[at : at + sizes[turn % len(sizes)]]
        step = advance(SHAPE, buckets, pa.concat_tables([t for t, _ in part]), [m for _, m in part])
        buckets = step.buckets
        closed.append(step.closed)
        at, turn = at + len(part), turn + 1
    rows = pa.concat_tables(closed)
    return buckets, [digest_table(rows.filter(pa.compute.equal(rows["__e"], e))) for e in range(9)]


@given(epochs, st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_one_call_for_many_epochs_gives_the_same_bits(drawn: list[Any], sizes: list[int]) -> None:
    steps = history(drawn)
    one, one_closed = play(steps, [1])
    for calls in (sizes, [len(steps)]):
        many, many_closed = play(steps, calls)
        assert many_closed == one_closed
        assert {b: digest_table(t) for b, t in many.items()} == {
            b: digest_table(t) for b, t in one.items()
        }


@given(epochs)
@settings(max_examples=40, deadline=None)
def test_windows_close_once_with_the_sums_of_their_panes(drawn: list[Any]) -> None:
    steps = history(drawn)
    number, before = len(steps), steps[-1][1][2]
    steps.append((table([]), (number, before, END_OF_INPUT)))
    expected: dict[Any, int] = {}
    for rows, (_, late, _) in steps:
        for row in rows.to_pylist():
            for start in range(row["__w"] - SIZE + SLIDE, row["__w"] + 1, SLIDE):
                if row["__w"] > UNTIMED and start + SIZE > late:
                    key = (start, row["__k0"])
                    expected[key] = expected.get(key, 0) + (row["p1"] or 0)
    got: dict[Any, int] = {}
    buckets: Buckets = {}
    for rows, mark in steps:
        step = advance(SHAPE, buckets, rows, [mark])
        buckets = step.buckets
        for row in step.closed.to_pylist():
            assert (row["__w"], row["__k0"]) not in got
            assert mark[1] < row["__w"] + SIZE <= mark[2]
            got[row["__w"], row["__k0"]] = row["p1"] or 0
    assert got == expected
    assert not buckets


def test_untouched_buckets_keep_their_table() -> None:
    names = [f"key-{i}" for i in range(200)]
    rows = table([(k, 0, 0, 1, 1.0, 1, 1.0, 1.0, "x") for k in names])
    first = advance(SHAPE, {}, rows, [(0, NO_WATERMARK, -100)])
    assert len(first.buckets) > 50
    assert all(b in range(BUCKETS) for b in first.buckets)
    more = table([("key-7", 0, 1, 1, 1.0, 1, 1.0, 1.0, "x")])
    second = advance(SHAPE, first.buckets, more, [(1, -100, -90)])
    touched = int(hash_rows(more, ["__k0"])[0]) % BUCKETS
    for bucket, state in second.buckets.items():
        assert (state is first.buckets[bucket]) == (bucket != touched)
    third = advance(SHAPE, second.buckets, None, [(2, -90, -80)])
    assert third.buckets is second.buckets


def test_dropped_rows_are_counted_and_never_kept() -> None:
    rows = table(
        [
            (None, LATE, 0, 3, 1.0, 1, 1.0, 1.0, None),
            (None, UNTIMED, 0, 2, 1.0, 1, 1.0, 1.0, None),
        ]
    )
    step = advance(SHAPE, {}, rows, [(0, NO_WATERMARK, END_OF_INPUT)])
    assert (step.late, step.untimed, step.closed.num_rows, step.buckets) == (3, 2, 0, {})


def test_closed_windows_come_in_the_order_of_epoch_end_and_keys() -> None:
    rows = table([(k, w, 0, 1, 1.0, 1, 1.0, 1.0, "x") for w in (10, 0) for k in (None, "b", "a")])
    marks = [(0, NO_WATERMARK, 20), (1, 20, 45)]
    closed = advance(SHAPE, {}, rows, marks).closed
    assert closed.column_names == [*SHAPE.schema.names, "__e"]
    order = [(r["__e"], r["__w"], r["__k0"]) for r in closed.to_pylist()]
    bounds = sorted({(e, w) for e, w, _ in order})
    assert order == [(e, w, k) for e, w in bounds for k in ("a", "b", None)]


@pytest.mark.parametrize(("merge", "expected"), [("min", 1.0), ("max", math.nan)])
def test_nan_is_greater_than_every_number_as_in_spark(merge: str, expected: float) -> None:
    name = "p2" if merge == "min" else "p3"
    values = [math.nan, 1.0, None, math.inf]
    parts = [table([("a", 0, e, 1, 0.0, 0, v, v, "")]) for e, v in enumerate(values)]
    marks = [(e, NO_WATERMARK, NO_WATERMARK) for e in range(4)]
    (state,) = advance(SHAPE, {}, pa.concat_tables(parts), marks).buckets.values()
    got = state.column(name)[-1].as_py()
    assert got == expected or (math.isnan(got) and math.isnan(expected))


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=30))
def test_order_bits_sort_as_spark_does_and_read_back(values: list[float | None]) -> None:
    array = pa.array(values, pa.float64(), from_pandas=False)
    bits = order_bits(array)
    assert digest_table(pa.table({"v": from_order_bits(bits)})) == digest_table(
        pa.table({"v": array})
    )
    pairs = [(b, v) for b, v in zip(bits.to_pylist(), values, strict=True) if v is not None]
    ranked = [v for _, v in sorted(pairs, key=lambda p: p[0])]
    assert ranked == sorted(
        ranked, key=lambda v: (math.isnan(v), 0.0 if math.isnan(v) else v)
    ) or any(math.isnan(v) for v in ranked)
