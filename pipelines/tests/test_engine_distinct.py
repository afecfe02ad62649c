"""What `distinct` writes, without Spark: every row is compared with every row in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from distinct_rows import WITHIN, Row, call, histories, history, inputs_of, operator, oracle
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints_manifests import MemoryObjects

from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.operators import distinct as distinct_module
from rekindle.engine.operators.base import LACKS, ONLY_TABLE
from rekindle.engine.operators.distinct import DistinctOperator
from rekindle.engine.state import compaction, keeping, lookup
from rekindle.engine.state.compaction import compact_all
from rekindle.engine.state.operator import EMPTY, OperatorState, begins_after
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, EpochInput

END: Any = ([], 100)
"""An epoch after which nothing that came can be repeated."""
KEEPS = [operator("First"), operator("Last")]
Drawn = list[tuple[Any, int]]
of_each = pytest.mark.parametrize("made", KEEPS, ids=["First", "Last"])


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "PAGE_ROWS", 1)
        patch.setattr(compaction, "MAX_SINGLE_DELTAS", 2)
        patch.setattr(lookup, "SHORT_ROWS", 1)
        patch.setattr(distinct_module, "LAST_ROWS", 1)
        patch.setattr(distinct_module, "PORTION", 3)
        yield


def run(
    made: DistinctOperator,
    calls: Sequence[Sequence[EpochInput]],
    tables: dict[str, OperatorState] | None = None,
) -> tuple[pa.Table, dict[str, OperatorState], tuple[int, int]]:
    tables = tables or {}
    found, late, untimed = [], 0, 0
    for epochs in calls:
        done = call(made, tables, epochs)
        tables = dict(done.tables)
        found.append(done.rows)
        late += done.dropped.late
        untimed += done.dropped.null_event_time
    return pa.concat_tables(found), tables, (late, untimed)


def rows_of(made: DistinctOperator, rows: pa.Table) -> list[tuple[int, Row]]:
    view = made.view(rows)
    times = view.column("t").cast(pa.int64()).to_pylist()
    columns = [view.column(name).to_pylist() for name in ("k", "d", "n")]
    tags = view.column("tags").to_pylist()
    assert tags == [[n] * (n % 3) for n in columns[2]]
    found = zip(*columns, times, strict=True)
    return list(zip(rows.column("__e").to_pylist(), found, strict=True))


def cut(epochs: Sequence[EpochInput], data: st.DataObject) -> list[Sequence[EpochInput]]:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(epochs)))) | {len(epochs)})
    return [epochs[a:b] for a, b in pairwise([0, *cuts])]


def test_a_row_that_is_replaced_in_its_epoch_takes_the_place_of_earlier_ones() -> None:
    """Of the second epoch, the first row is less than `within` after that of the first epoch, and
    is itself replaced by the second one, which is not."""
    found = history([([("a", None, 0, 0)], 0), ([("a", None, 1, 8), ("a", None, 2, 16)], 90)])
    rows, _, _ = run(made := operator("Last"), [inputs_of(found)])
    assert rows_of(made, rows) == oracle(found, "Last")[0]
    assert [row for _, row in rows_of(made, rows)] == [("a", None, 2, 16)]


@of_each
@given(drawn=histories, data=st.data())
def test_rows_equal_those_of_an_oracle(
    made: DistinctOperator, drawn: Drawn, data: st.DataObject
) -> None:
    found = history([*drawn, END])
    expected, late, untimed = oracle(found, "Last" if made.keeps_last else "First")
    rows, _, dropped = run(made, cut(inputs_of(found), data))
    assert repr(rows_of(made, rows)) == repr(expected)
    assert dropped == (late, untimed)


@of_each
@given(drawn=histories)
def test_rows_of_other_keys_with_equal_hashes_are_told_apart(
    made: DistinctOperator, drawn: Drawn
) -> None:
    found = history([*drawn, END])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "hash_rows", lambda table, _: np.zeros(len(table), np.uint64))
        rows, _, _ = run(made, [[epoch] for epoch in inputs_of(found)])
    expected, _, _ = oracle(found, "Last" if made.keeps_last else "First")
    assert repr(rows_of(made, rows)) == repr(expected)


@of_each
@given(drawn=histories, data=st.data())
def test_one_call_or_many_give_the_same_bits(
    made: DistinctOperator, drawn: Drawn, data: st.DataObject
) -> None:
    epochs = inputs_of(history([*drawn, END]))
    one, tables, _ = run(made, [epochs])
    many, others, _ = run(made, cut(epochs, data))
    assert digest_table(one) == digest_table(many)
    assert tables[ONLY_TABLE].digest == others[ONLY_TABLE].digest


@of_each
@given(drawn=histories, later=histories)
def test_layout_and_restore_change_no_bit(
    made: DistinctOperator, drawn: Drawn, later: Drawn
) -> None:
    epochs = inputs_of(history([*drawn, *later, END]))
    first, then = epochs[: len(drawn)], epochs[len(drawn) :]
    _, tables, _ = run(made, [[epoch] for epoch in first])
    expected = call(made, tables, then)
    compacted = {name: compact_all(made.tables[name], table) for name, table in tables.items()}
    for layout in (compacted, restored(tables), restored(compacted)):
        found = call(made, layout, then)
        assert digest_table(found.rows) == digest_table(expected.rows)
        assert found.tables[ONLY_TABLE].digest == expected.tables[ONLY_TABLE].digest


def restored(tables: dict[str, OperatorState]) -> dict[str, OperatorState]:
    memory = MemoryObjects()
    store = StateStore(Store(memory.url, objects=memory), "uid")
    ids = {f"op.{name}": table for name, table in tables.items()}
    ref = store.save("seg", 0, 7, 5, ["op"], State(ids), None)
    if ref.object is None:
        return {}
    _, found, _ = store.open(ref.object)  # its runs are fetched when they are read
    assert not any(run.is_available for table in found.operators.values() for run in table.runs())
    return {table.partition(".")[2]: state for table, state in found.operators.items()}


@of_each
def test_spilled_rows_give_the_same_rows(made: DistinctOperator, tmp_path: Any) -> None:
    drawn: Drawn = [([("a", 0.0, n, 7 * n), ("b", 0.0, n, 12 * n)], 7) for n in range(60)]
    epochs = inputs_of(history(drawn))
    _, tables, _ = run(made, [[epoch] for epoch in epochs[:30]])
    spilled = dict(RunFiles(tmp_path, memory_bytes=1).spill(tables))
    assert not any(run.in_memory for table in spilled.values() for run in table.runs())
    expected, found = (call(made, state, epochs[30:]) for state in (tables, spilled))
    assert found.rows.num_rows
    assert digest_table(found.rows) == digest_table(expected.rows)


@of_each
def test_nothing_is_kept_after_the_end_of_input(made: DistinctOperator) -> None:
    (epoch,) = inputs_of(history([([("a", 0.0, 1, 0), ("a", 0.0, 2, 5), ("b", None, 3, 70)], 0)]))
    end = EpochInput(1, epoch.watermark, END_OF_INPUT, (epoch.inputs[0].slice(0, 0),))
    rows, tables, _ = run(made, [[epoch], [end]])
    assert not list(tables[ONLY_TABLE].runs())
    assert rows.num_rows == 2


@of_each
def test_a_key_of_many_rows_keeps_few(made: DistinctOperator) -> None:
    """Of rows of an epoch two at most are kept for each `within`."""
    drawn: Drawn = [([("a", 0.0, n, 3 * e) for n in range(50)], 3) for e in range(40)]
    _, tables, _ = run(made, [[epoch] for epoch in inputs_of(history(drawn))])
    kept = compact_all(made.tables[ONLY_TABLE], tables[ONLY_TABLE])
    assert kept.rows < 40


def test_a_row_that_is_not_written_takes_the_place_of_an_earlier_one() -> None:
    made = operator("Last")
    drawn: Drawn = [([("a", 0.0, 1, 0)], 0), ([("a", 0.0, n, n) for n in (1, 5, 10)], 0), END]
    rows, _, _ = run(made, [[epoch] for epoch in inputs_of(history(drawn))])
    assert [row for _, row in rows_of(made, rows)] == [("a", 0.0, 10, 10)]


def test_a_row_is_written_that_begins_anew_with_all_that_is_later() -> None:
    """Of rows through the bound others may be missing; later ones are compared with all of them."""
    made = operator("Last")
    tables = {LACKS: begins_after(EMPTY, 12)}
    drawn: Drawn = [([("a", 0.0, 1, 12), ("b", 0.0, 2, 13), ("c", 0.0, 3, 14)], 0)]
    drawn += [([("c", 0.0, 4, 15)], 0), ([], 100)]
    rows, _, _ = run(made, [[epoch] for epoch in inputs_of(history(drawn))], tables)
    assert [row for _, row in rows_of(made, rows)] == [("b", 0.0, 2, 13), ("c", 0.0, 4, 15)]


@of_each
def test_output_is_as_late_as_its_event_time_may_be(made: DistinctOperator) -> None:
    assert made.delay_us == (WITHIN if made.keeps_last else 0)
