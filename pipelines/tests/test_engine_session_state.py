"""Session windows without Spark: an oracle, late rows, one call or many."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_parts import (
    GAP,
    SHAPE,
    Mark,
    Row,
    Session,
    epochs_of,
    histories,
    oracle,
    partials_of,
    sessions_of,
)
from test_checkpoints_manifests import MemoryObjects

from rekindle.checkpoints import StateStore, Store
from rekindle.engine import session_state
from rekindle.engine.model import State
from rekindle.engine.session_state import advance
from rekindle.engine.state import compaction, reading, spill
from rekindle.engine.state.compaction import compact_all, join_single_deltas
from rekindle.engine.state.operator import (
    BEGIN_OF_PANES,
    EMPTY,
    OperatorState,
)
from rekindle.engine.state.reading import portions_of_groups
from rekindle.engine.state.runs import HASH, uint64s
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import by_epoch
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK

Epochs = Sequence[tuple[list[Row], Mark]]
END: tuple[list[Row], int] = ([], 10_000)


def played(
    epochs: Epochs,
    sizes: Sequence[int] = (1,),
    between: Callable[[OperatorState], OperatorState] = lambda state: state,
    lacks_us: int = BEGIN_OF_PANES,
) -> tuple[OperatorState, pa.Table, int]:
    """The last state, all sessions, and how many rows were late."""
    state, closed, late, at, turn = EMPTY, [], 0, 0, 0
    while at < len(epochs):
        part = epochs[at : at + sizes[turn % len(sizes)]]
        done = advance(SHAPE, GAP, state, lacks_us, partials_of(part), [mark for _, mark in part])
        state = between(done.state)
        closed.append(done.closed)
        late += done.late
        at, turn = at + len(part), turn + 1
    return state, pa.concat_tables(closed), late


@given(histories)
def test_sessions_are_those_of_the_oracle(drawn: list[Any]) -> None:
    epochs = epochs_of([*drawn, END])
    state, closed, late = played(epochs)
    assert (sessions_of(closed), late) == oracle(epochs)
    assert state.is_empty


@given(
    histories,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(["nothing", "compact", "join", "spill", "restore"]),
)
def test_one_call_for_many_epochs_gives_the_same_bits(
    drawn: list[Any], sizes: list[int], between: str
) -> None:
    """Whatever happens to the state between calls, and however many groups are read at once."""
    epochs = epochs_of(drawn)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        files = RunFiles(Path(directory) / "runs", memory_bytes=0)

        def changed(state: OperatorState) -> OperatorState:
            match between:
                case "compact":
                    return compact_all(SHAPE.run_shape, state)
                case "join":
                    return join_single_deltas(SHAPE.run_shape, state)
                case "spill":
                    return files.spill({"op": state})["op"]
                case "restore":
                    return restored(state, files)
            return state

        end = epochs_of([*drawn, END])[-1:]
        state, closed, late = played([*epochs, *end])
        before_end = played(epochs)[0]
        patched.setattr(reading, "GROUP_ROWS", 1)
        patched.setattr(compaction, "PAGE_ROWS", 2)
        other, found, late_found = played([*epochs, *end], sizes, changed)
        assert digest_table(found) == digest_table(closed)
        assert (late_found, other.digest) == (late, state.digest)
        assert played(epochs, sizes, changed)[0].digest == before_end.digest


def restored(state: OperatorState, files: RunFiles) -> OperatorState:
    store = Store(MemoryObjects.url, objects=MemoryObjects())
    saved = StateStore(store, "u").save("s", 0, 9, 0, ["op"], State({"op": state}), None)
    assert saved.object is not None
    loaded = StateStore(store, "u", files).load(saved.object)[1]
    return loaded.operators.get("op", state)


def written(*epochs: tuple[list[Row], int]) -> list[Session]:
    """`epochs`: rows, and the watermark after them."""
    before, marked = NO_WATERMARK, []
    for number, (rows, after) in enumerate(epochs):
        marked.append((rows, (number, before, after)))
        before = after
    found = sessions_of(played(marked)[1])
    assert found == oracle(marked)[0]
    return found


def at(*times: int) -> list[Row]:
    return [("a", time, 1.0) for time in times]


def test_rows_less_than_the_gap_apart_are_one_session() -> None:
    assert written((at(0, 9, 18), 28)) == [(0, "a", 0, 28, 3)]
    assert written((at(0, 10), 20)) == [(0, "a", 0, 10, 1), (0, "a", 10, 20, 1)]


def test_a_late_row_joins_two_open_sessions() -> None:
    """It is behind the watermark, and so is the end of what it would be alone."""
    assert written((at(0), 5), (at(18), 9), (at(9), 28)) == [(2, "a", 0, 28, 3)]


def test_a_late_row_extends_an_open_session_however_long_that_is() -> None:
    times = [at(t) for t in range(0, 100, 5)]
    epochs = [(rows, t * 5) for t, rows in enumerate(times)]
    assert written(*epochs, (at(2, -9), 95), ([], 105)) == [(21, "a", -9, 105, 22)]


def test_a_late_row_that_extends_nothing_is_dropped() -> None:
    epochs = [(at(0, 30), (0, NO_WATERMARK, 25)), (at(5), (1, 25, 40))]
    _, closed, late = played(epochs)
    assert late == 1
    assert sessions_of(closed) == [(0, "a", 0, 10, 1), (1, "a", 30, 40, 1)]


def test_a_row_of_the_epoch_extends_a_session_that_would_close() -> None:
    assert written((at(0), 5), (at(9), 15), ([], 19)) == [(2, "a", 0, 19, 2)]


def test_a_session_is_written_once() -> None:
    """A row near to it that is not late is in a session of its own."""
    assert written((at(9), 19), (at(12), 19), ([], 30)) == [
        (0, "a", 9, 19, 1),
        (2, "a", 12, 22, 1),
    ]


def test_a_long_session_keeps_as_much_as_a_short_one() -> None:
    state, most, before = EMPTY, 0, NO_WATERMARK
    for epoch in range(400):
        rows: list[Row] = [(key, 3 * epoch, 1.0) for key in "abcde"]
        mark = (epoch, before, 3 * epoch)
        done = advance(SHAPE, GAP, state, BEGIN_OF_PANES, partials_of([(rows, mark)]), [mark])
        state, before = compact_all(SHAPE.run_shape, done.state), 3 * epoch
        most = max(most, state.rows)
    assert most <= 5 * 4
    (closed,) = {s[2:] for s in sessions_of(played_end(state, before))}
    assert closed == (0, 3 * 399 + GAP, 400)


def played_end(state: OperatorState, before: int) -> pa.Table:
    mark = (999, before, END_OF_INPUT)
    return advance(SHAPE, GAP, state, BEGIN_OF_PANES, None, [mark]).closed


def test_many_groups_close_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GROUP_ROWS", 500)
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 50_000)
    files = RunFiles(tmp_path, memory_bytes=0)
    rows: list[Row] = [(f"k{n}", n % 30, 1.0) for n in range(5000)]
    mark = (0, NO_WATERMARK, -100)
    state = advance(SHAPE, GAP, EMPTY, BEGIN_OF_PANES, partials_of([(rows, mark)]), [mark]).state
    done = advance(SHAPE, GAP, state, BEGIN_OF_PANES, None, [(1, -100, END_OF_INPUT)], files)
    assert [s[2] for s in sessions_of(done.closed)] == sorted(n % 30 for n in range(5000))
    assert done.state.is_empty


@given(st.integers(-(2**62), 2**62), st.integers(1, 2**40))
def test_the_most_even_number_is_in_the_range(after: int, more: int) -> None:
    (found,) = session_state._most_even(after, np.array([after + more], dtype=np.int64)).tolist()
    assert after < found <= after + more
    bit = 2 * (found & -found)  # the next number with more zeros
    assert not bit or (after // bit + 1) * bit > after + more


def test_rows_that_are_always_late_are_merged() -> None:
    """By half a gap, so that the cutoff is in their pane half of the time."""
    gap, state, before = 10_000, EMPTY, NO_WATERMARK
    for now in range(0, 40_000, 50):
        rows: list[Row] = [("a", now - gap // 2, 1.0)]
        mark = (now, before, now)
        partials = partials_of([(rows, mark)], gap)
        state = advance(SHAPE, gap, state, BEGIN_OF_PANES, partials, [mark]).state
        before = now
        if now % 500 == 0:
            assert compact_all(SHAPE.run_shape, state).rows < 20


def test_groups_of_a_first_epoch_are_read_at_once() -> None:
    rows: list[Row] = [(f"k{n}", 0, 1.0) for n in range(1000)]
    table = by_epoch(SHAPE, partials_of([(rows, (0, NO_WATERMARK, 100))])).table
    assert len(portions_of_groups(EMPTY, table, uint64s(table.column(HASH)))) == 1


@given(histories, st.integers(-30, 40))
def test_sessions_that_may_lack_rows_are_not_written(drawn: list[Any], lacks_us: int) -> None:
    """What an operator writes that began later, without the rows through a time, is what one
    writes that has all rows."""
    epochs = epochs_of([*drawn, END])
    later = [([row for row in rows if row[1] > lacks_us], mark) for rows, mark in epochs]
    expected = [s for s in sessions_of(played(epochs)[1]) if s[2] >= lacks_us + GAP]
    found = sessions_of(played(later, lacks_us=lacks_us)[1])
    assert found == expected == sessions_of(played(epochs, lacks_us=lacks_us)[1])


@pytest.mark.parametrize("time", [-(2**63) + 12, 2**63 - 3])
def test_a_time_at_the_end_of_64_bits_is_none(time: int) -> None:
    mark = (0, NO_WATERMARK, END_OF_INPUT)
    rows: list[Row] = [("a", 0, 1.0), ("a", time, 1.0)]
    done = advance(SHAPE, GAP, EMPTY, BEGIN_OF_PANES, partials_of([(rows, mark)]), [mark])
    assert done.null_event_time == 1
    assert [s[2:] for s in sessions_of(done.closed)] == [(0, GAP, 1)]


def test_an_epoch_in_which_nothing_happens_keeps_the_state() -> None:
    first = played([(at(0), (0, NO_WATERMARK, 0))])[0]
    second = advance(SHAPE, GAP, first, BEGIN_OF_PANES, None, [(1, 0, 5)])
    assert second.state is first
