"""The join's pairs, without Spark: compared with every row against every row in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joined_rows import (
    AFTER,
    BEFORE,
    Row,
    Written,
    call,
    histories,
    history,
    inputs_of,
    operator,
    oracle,
    pairs_of,
    rows_of,
    written,
)
from test_checkpoints_manifests import MemoryObjects

from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.operators import join as join_module
from rekindle.engine.operators.base import LACKS
from rekindle.engine.state import compaction, lookup
from rekindle.engine.state.compaction import compact_all
from rekindle.engine.state.operator import EMPTY, OperatorState, begins_after
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, EpochInput

JOIN = operator()
Drawn = list[tuple[Any, Any, int]]


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "PAGE_ROWS", 1)
        patch.setattr(compaction, "MAX_SINGLE_DELTAS", 2)
        patch.setattr(lookup, "SHORT_ROWS", 1)
        patch.setattr(join_module, "PAIRS", 3)
        yield


def run(calls: Sequence[Sequence[EpochInput]]) -> tuple[list[Any], dict[str, OperatorState], Any]:
    tables: dict[str, OperatorState] = {}
    found, dropped = [], [0, 0]
    for epochs in calls:
        done = call(JOIN, tables, epochs)
        tables = dict(done.tables)
        found += pairs_of(done.rows)
        dropped[0] += done.dropped.late
        dropped[1] += done.dropped.null_event_time
    return found, tables, tuple(dropped)


def digests(tables: dict[str, OperatorState]) -> list[str]:
    return [tables[name].digest for name in sorted(tables)]


@given(histories)
def test_pairs_equal_those_of_an_oracle(drawn: Drawn) -> None:
    epochs = inputs_of(history(drawn))
    expected, late, untimed = oracle(history(drawn))
    found, _, dropped = run([[epoch] for epoch in epochs])
    assert found == expected
    assert dropped == (late, untimed)


@given(histories, st.data())
def test_one_call_or_many_give_the_same_bits(drawn: Drawn, data: st.DataObject) -> None:
    epochs = inputs_of(history(drawn))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(epochs)))) | {len(epochs)})
    one, tables, _ = run([epochs])
    many, others, _ = run([epochs[a:b] for a, b in pairwise([0, *cuts])])
    assert one == many
    assert digests(tables) == digests(others)


@given(histories, histories)
def test_layout_spill_and_restore_change_no_bit(drawn: Drawn, later: Drawn) -> None:
    epochs = inputs_of(history([*drawn, *later]))
    first, then = epochs[: len(drawn)], epochs[len(drawn) :]
    _, tables, _ = run([[epoch] for epoch in first])
    expected = call(JOIN, tables, then)
    compacted = {name: compact_all(JOIN.tables[name], table) for name, table in tables.items()}
    for layout in (compacted, restored(tables), restored(compacted)):
        found = call(JOIN, layout, then)
        assert digest_table(found.rows) == digest_table(expected.rows)
        assert digests(dict(found.tables)) == digests(dict(expected.tables))


def restored(tables: dict[str, OperatorState]) -> dict[str, OperatorState]:
    memory = MemoryObjects()
    store = StateStore(Store(memory.url, objects=memory), "uid")
    ids = {f"op.{name}": table for name, table in tables.items()}
    ref = store.save("seg", 0, 7, 5, ["op"], State(ids), None)
    assert ref.object is not None
    _, found, _ = store.open(ref.object)  # its runs are fetched when they are read
    assert not any(run.is_available for table in found.operators.values() for run in table.runs())
    return {table.partition(".")[2]: state for table, state in found.operators.items()}


@pytest.mark.parametrize("type", ["Left", "Right", "Full", "Semi", "Anti"])
@given(histories, st.data())
def test_other_joins_equal_an_oracle(type: str, drawn: Drawn, data: st.DataObject) -> None:
    join = operator(type)
    epochs = inputs_of(history(drawn))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(epochs)))) | {len(epochs)})
    tables: dict[str, OperatorState] = {}
    found: list[pa.Table] = []
    for first, end in pairwise([0, *cuts]):
        done = call(join, tables, epochs[first:end])
        tables, found = dict(done.tables), [*found, done.rows]
    rows = [row for table in found for row in rows_of(table)]
    assert sorted(rows, key=repr) == sorted(written(history(drawn), type), key=repr)
    assert [epoch for epoch, _, _ in rows] == sorted(epoch for epoch, _, _ in rows)
    one = call(join, {}, epochs)
    assert rows_of(one.rows) == rows
    assert digests(dict(one.tables)) == digests(tables)


OUTER = ["Left", "Right", "Full", "Anti"]
END: Any = ([], [], 150)
"""An epoch after which nothing that came can match."""


def alone(rows: Sequence[Written]) -> list[Written]:
    """The rows without a match."""
    return [row for row in rows if row[1] is None or row[2] is None]


@pytest.mark.parametrize("type", OUTER)
@given(drawn=histories, later=histories, data=st.data())
def test_a_branch_that_lacks_rows_writes_only_what_matches(
    type: str, drawn: Drawn, later: Drawn, data: st.DataObject
) -> None:
    """And so it does when the input is back, as long as the branch lasts. The stable tables, which
    process the same epochs in full, are not concerned."""
    join, found = operator(type), history([*drawn, *later, END])
    epochs = inputs_of(found)
    stable, rest = call(join, {}, epochs[: len(drawn)]), epochs[len(drawn) :]
    missing = data.draw(st.lists(st.sampled_from([(), (0,), (1,), (0, 1)]), min_size=8, max_size=8))
    tables, tentative = dict(stable.tables), list[Written]()
    for at, epoch in enumerate(rest):
        lacking = missing[at] or ((1,) if at == 0 else ())
        inputs = [t.slice(0, 0) if i in lacking else t for i, t in enumerate(epoch.inputs)]
        fork = replace(epoch, inputs=tuple(inputs), complete=not lacking)
        done = call(join, tables, [fork])
        tables, tentative = dict(done.tables), [*tentative, *rows_of(done.rows)]
    expected = written(found, type)
    assert not alone(tentative)
    assert all(row in expected for row in tentative)
    then = call(join, stable.tables, rest)
    rows = [*rows_of(stable.rows), *rows_of(then.rows)]
    assert sorted(rows, key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("type", OUTER)
@given(drawn=histories, later=histories, bound=st.integers(-5, 50))
def test_a_join_that_begins_anew_writes_what_surely_matches_nothing(
    type: str, drawn: Drawn, later: Drawn, bound: int
) -> None:
    """Rows through `bound` may be missing, all later ones are there."""

    def early(rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if (row[2] or 0) <= bound]

    missed = [(early(left), early(right), step) for left, right, step in drawn]
    join, found = operator(type), history([*missed, *later, END])
    tables = {LACKS: begins_after(EMPTY, bound)}
    rows = rows_of(call(join, tables, inputs_of(found)[len(drawn) :]).rows)
    expected = [
        row
        for row in alone(written(found, type))
        for at, of_side in enumerate(row[1:])
        if of_side is not None and row[0] >= len(drawn)
        if _time(of_side) - (BEFORE if at == 0 else AFTER) > bound
    ]
    assert sorted(alone(rows), key=repr) == sorted(expected, key=repr)


def _time(row: Any) -> int:
    return int(row[2])


def test_spilled_rows_give_the_same_pairs(tmp_path: Any) -> None:
    drawn: Drawn = [([("a", n, n), ("b", n, n)], [("a", n, n + 1)], 1) for n in range(40)]
    epochs = inputs_of(history(drawn))
    _, tables, _ = run([[epoch] for epoch in epochs[:20]])
    spilled = dict(RunFiles(tmp_path, memory_bytes=1).spill(tables))
    assert not any(run.in_memory for table in spilled.values() for run in table.runs())
    expected, found = (call(JOIN, state, epochs[20:]) for state in (tables, spilled))
    assert digest_table(found.rows) == digest_table(expected.rows)


def test_rows_are_kept_for_as_long_as_others_can_match_them() -> None:
    drawn: Drawn = [([("a", 1, 0)], [("b", 2, 0)], 20), ([], [], AFTER), ([], [], BEFORE + 8)]
    epochs = inputs_of(history(drawn))
    _, tables, _ = run([[epoch] for epoch in epochs[:2]])
    assert not tables["left"].is_empty
    _, tables, _ = run([[epoch] for epoch in epochs])
    assert tables["left"].is_empty
    assert tables["right"].is_empty


def test_nothing_is_kept_after_the_end_of_input() -> None:
    epochs = inputs_of(history([([("a", 1, 0)], [("a", 2, 70)], 0)]))
    last = epochs[0]
    end = EpochInput(1, last.watermark, END_OF_INPUT, tuple(t.slice(0, 0) for t in last.inputs))
    _, tables, _ = run([[last], [end]])
    assert all(table.is_empty for table in tables.values())
    assert all(not list(table.runs()) for table in tables.values())


def test_output_is_as_late_as_its_event_time_may_be() -> None:
    assert JOIN.delay_us == AFTER
