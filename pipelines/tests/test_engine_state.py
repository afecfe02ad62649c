"""An operator's state against a plain dictionary: bits do not depend on pages, deltas, portions."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.state import compaction, layout, reading
from rekindle.engine.state import operator as pages
from rekindle.engine.state import panes as combining
from rekindle.engine.state.operator import EMPTY, Delta, OperatorState
from rekindle.engine.state.reading import read
from rekindle.engine.state.remote import AwaitedRun, RemoteRun, RunFacts
from rekindle.engine.state.runs import BUCKETS, Run, RunShape, bucket_of, fold, sort
from rekindle.engine.state.spill import RunFiles
from rekindle.exchange.hashing import hash_rows

PANE_US = 10
SHAPE = RunShape(
    keys=(pa.string(), pa.float64()),
    partials=(
        ("s", pa.float64(), "sum"),
        ("n", pa.int64(), "sum"),
        ("low", pa.float64(), "min"),
        ("high", pa.timestamp("us", "UTC"), "max"),
        ("word", pa.string(), "max"),
        ("d", pa.decimal128(10, 2), "sum"),
        ("b", pa.bool_(), "min"),
    ),
)
KEYS = [(k, g) for k in ("a", "b", None) for g in (0.0, math.nan, 1.5)]
HASHES = [0, 1, 2**63, 2**63, 2**64 - 1, 2**54, 2**54, 5 << 54, 5 << 54 | 1]
"""Of KEYS; some are equal, some in one bucket."""

doubles = st.one_of(
    st.none(), st.floats(-1e15, 1e15), st.sampled_from([math.nan, -0.0, 0.1, 1e15, -1e15, 1e-3])
)
row = st.tuples(
    st.integers(-4, 40),  # pane
    st.integers(0, len(KEYS) - 1),  # and then a value of each partial
    doubles,
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    doubles,
    st.one_of(st.none(), st.integers(-9, 9)),
    st.one_of(st.none(), st.text(max_size=2)),
    st.one_of(st.none(), st.integers(-999, 999)),
    st.one_of(st.none(), st.booleans()),
)
epoch = st.lists(row, max_size=5).map(lambda rows: list({r[:2]: r for r in rows}.values()))
epochs = st.lists(epoch, min_size=1, max_size=5)
few_groups = st.lists(
    st.lists(row.map(lambda r: (r[0] % 2, r[1] % 6, *r[2:])), max_size=6).map(
        lambda rows: list({r[:2]: r for r in rows}.values())
    ),
    min_size=1,
    max_size=12,
)
"""Epochs of groups that change often."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PAGE_ROWS", 4)
    monkeypatch.setattr(compaction, "MAX_SINGLE_DELTAS", 2)
    monkeypatch.setattr(compaction, "MAX_JOINED_DELTAS", 2)
    monkeypatch.setattr(compaction, "JOIN_BYTES", 1000)
    monkeypatch.setattr(compaction, "FREQUENT_ROWS", 2)
    monkeypatch.setattr(compaction, "MIN_FREQUENT_SHARE", 0.0)
    monkeypatch.setattr(compaction, "MAX_VALUE_DELTAS", 2)
    monkeypatch.setattr(compaction, "PRUNE_PAGES_PER_CALL", 2)
    monkeypatch.setattr(reading, "READ_PAGES", 2)
    monkeypatch.setattr(combining, "WINDOW_ROWS", 8)
    monkeypatch.setattr(combining, "TREE_NODE_ROWS", 12)


def table(rows: Sequence[Any]) -> pa.Table:
    columns: list[list[Any]] = [[] for _ in SHAPE.schema]
    for pane, key, s, n, low, high, word, d, b in rows:
        values = (pane * PANE_US, HASHES[key], *KEYS[key], s, n, low, high, word, d, b)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    columns[9] = [None if v is None else v * 100 for v in columns[9]]
    arrays = [
        pa.array(c, f.type, from_pandas=False) for c, f in zip(columns, SHAPE.schema, strict=True)
    ]
    return pa.table(arrays, schema=SHAPE.schema)


def comparable(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Values that are equal if their bits are, in the order of rows; NaNs are one value."""

    def exact(value: Any) -> Any:
        if isinstance(value, float):
            return "NaN" if math.isnan(value) else value.hex()
        return value

    return [tuple(exact(v) for v in r.values()) for r in rows.to_pylist()]


def merged(one: Any, other: Any, merge: str) -> Any:
    """One step of a left fold, as Spark does it."""
    if one is None or other is None:
        return other if one is None else one
    if merge == "sum":
        if isinstance(one, int):
            return (one + other + 2**63) % 2**64 - 2**63
        return one + other
    rank = [(isinstance(v, float) and math.isnan(v), v) for v in (one, other)]
    at = (0 if rank[0] <= rank[1] else 1) if merge == "min" else (0 if rank[0] >= rank[1] else 1)
    if rank[0][0] and rank[1][0]:
        at = 0
    return (one, other)[at]


class Model:
    """(pane, key) -> its row."""

    def __init__(self) -> None:
        self.groups: dict[Any, list[Any]] = {}

    def add(self, rows: Sequence[Any]) -> None:
        for values in table(rows).to_pylist():
            key = (values["__w"], values["__h"], values["__k0"], str(values["__k1"]))
            before = self.groups.get(key)
            first = [values["__w"], values["__h"], values["__k0"], values["__k1"]]
            now = []
            for at, (name, kind, merge) in enumerate(SHAPE.partials):
                start = before[4 + at] if before is not None else None
                value = merged(start, values[name], merge)
                now.append(
                    value + 0.0 if pa.types.is_floating(kind) and value is not None else value
                )
            self.groups[key] = first + now

    def comparable(self, first: int, end: int) -> set[Any]:
        kept = [v for k, v in self.groups.items() if first <= k[0] < end]
        names = SHAPE.schema.names
        return {
            tuple(("NaN" if math.isnan(v) else v.hex()) if isinstance(v, float) else v for v in row)
            for row in kept
            if len(row) == len(names)
        }


def played(drawn: Sequence[Any], steps: Sequence[str]) -> OperatorState:
    """Appends epochs; after each of them, one of `steps`."""
    state = EMPTY
    for number, rows in enumerate(drawn):
        state = pages.append(state, sort(table(rows)))
        check(state)
        match steps[number % len(steps)]:
            case "compact":
                state = compaction.compact(SHAPE, state)
            case "all":
                state = compaction.compact_all(SHAPE, state)
            case "join":
                state = compaction.join_single_deltas(SHAPE, state)
        check(state)
    return state


def check(state: OperatorState) -> None:
    """What must hold for every state."""
    starts = [(p.pane, p.bucket) for p in state.pages]
    assert starts == sorted(set(starts))
    assert len(state.pages) == len(state.folded_through) == len(state.pending)
    order = [(d.seq, not d.has_values) for d in state.deltas]
    assert order == sorted(set(order))
    levels = [d.level for d in state.deltas]
    assert levels == sorted(levels, reverse=True)
    live = np.zeros(len(state.pages), dtype=np.int64)
    for delta in state.deltas:
        at = pages.pages_of(state, delta.run.panes, delta.run.buckets())
        counts = (delta.seq > state.folded_through[at]) & (
            delta.run.panes >= state.first_live_pane_us
        )
        np.add.at(live, at[counts], 1)
    assert live.tolist() == state.pending.tolist()
    for place, page in enumerate(state.pages):
        if page.run is not None:
            assert set(pages.pages_of(state, page.run.panes, page.run.buckets())) == {place}
    known = [run.panes for run in state.runs()]
    everything = np.unique(np.concatenate(known)) if known else np.zeros(0, dtype=np.int64)
    assert state.panes.tolist() == everything[everything >= state.first_live_pane_us].tolist()


steps = st.lists(st.sampled_from(["compact", "all", "join", "none"]), min_size=1, max_size=5)


@given(epochs, steps, st.integers(-5, 20), st.integers(0, 45))
def test_state_holds_the_left_folds_of_its_epochs(
    drawn: Any, steps: Any, first: int, length: int
) -> None:
    state, model = played(drawn, steps), Model()
    for rows in drawn:
        model.add(rows)
    low, high = first * PANE_US, (first + length) * PANE_US
    got = comparable(read(SHAPE, state, low, high))
    assert len(got) == len(set(got))
    assert set(got) == model.comparable(low, high)


def same_as_model(drawn: Sequence[Any], steps: Sequence[str]) -> bool:
    state, model = played(drawn, steps), Model()
    for rows in drawn:
        model.add(rows)
    return set(comparable(read(SHAPE, state, -1000, 1000))) == model.comparable(-1000, 1000)


@given(few_groups, steps)
def test_values_are_the_left_folds_of_groups_that_change_often(drawn: Any, steps: Any) -> None:
    assert same_as_model(drawn, steps)


def _without_base(shape: RunShape, state: OperatorState, *args: Any) -> pa.Table:
    state = replace(state, pages=tuple(replace(page, run=None) for page in state.pages))
    return reading.read_groups(shape, state, *args)


def _of_newest_only(shape: RunShape, state: OperatorState, *args: Any) -> pa.Table:
    return reading.read_groups(shape, replace(state, deltas=state.deltas[-1:]), *args)


def _without_flags(shape: RunShape, tables: Sequence[pa.Table], *_: Any) -> pa.Table:
    return fold(shape, tables)


def _by_hash(rows: pa.Table, groups: pa.Table) -> Any:
    return np.isin(rows.column("__h").to_numpy(), groups.column("__h").to_numpy())


def _values_last(state: OperatorState, group: Sequence[Delta]) -> list[Delta]:
    return [replace(d, has_values=not d.has_values) for d in _JOINED(state, group)]


_JOINED = compaction._joined
PLANTED = {
    "values lack the base": (compaction, "read_groups", _without_base),
    "values lack earlier deltas": (compaction, "read_groups", _of_newest_only),
    "pages add what values replace": (compaction, "fold", _without_flags),
    "reads add what values replace": (reading, "fold", _without_flags),
    "a join adds what values replace": (compaction, "of_rows", lambda t, _: np.zeros(0, bool)),
    "a join keeps what values replace": (
        compaction,
        "without_replaced",
        lambda rows, _: np.arange(rows.num_rows),
    ),
    "groups are told apart by hash alone": (compaction, "are_in", _by_hash),
    "rows are taken for values": (compaction, "_joined", _values_last),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_of_values_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "COMPACTION_RATIO", 0.2)
    monkeypatch.setattr(*PLANTED[bug])
    assert not all(is_right(*history(seed)) for seed in range(HISTORIES))


def is_right(drawn: Sequence[Any], steps: Sequence[str]) -> bool:
    try:
        return same_as_model(drawn, steps)
    except (AssertionError, IndexError, ValueError):
        return False


@given(few_groups, steps)
def test_a_layout_keeps_which_rows_are_values(drawn: Any, steps: Any) -> None:
    state = played(drawn, [*steps, "join"])
    runs = list(state.runs())
    facts = [
        layout.ObjectFacts(sum(r.rows for r in runs), sum(r.nbytes for r in runs), SHAPE.schema)
    ]
    encoded = layout.encode(state, lambda run: (0, runs.index(run)), facts)
    decoded = layout.decode(encoded, {(0, at): run for at, run in enumerate(runs)})
    assert [d.has_values for d in decoded.deltas] == [d.has_values for d in state.deltas]
    if not any(d.has_values for d in state.deltas):
        del encoded["deltas"]["values"]  # as releases with format 3 wrote it
        decoded = layout.decode(encoded, {(0, at): run for at, run in enumerate(runs)})
    found = read(SHAPE, decoded, -1000, 1000)
    assert comparable(found) == comparable(read(SHAPE, state, -1000, 1000))


def test_histories_are_right_without_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "COMPACTION_RATIO", 0.2)
    assert all(same_as_model(*history(seed)) for seed in range(HISTORIES))


HISTORIES = 25
"""Tried until a planted bug is found."""


def history(seed: int) -> tuple[list[Any], list[str]]:
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(rng.integers(4, 12)):
        places = {(int(rng.integers(2)), int(rng.integers(6))) for _ in range(rng.integers(1, 7))}
        drawn.append(
            [(*at, float(rng.normal() * 1e6), 1, 0.5, 1, "w", 1, True) for at in sorted(places)]
        )
    names = ("compact", "join", "join", "none", "all")
    return drawn, [names[rng.integers(len(names))] for _ in range(rng.integers(1, 6))]


@given(epochs, steps, steps, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_layout_and_portions_do_not_change_the_rows_or_their_order(
    drawn: Any, some: Any, others: Any, sizes: list[int]
) -> None:
    one = read(SHAPE, played(drawn, some), -1000, 1000)
    assert comparable(read(SHAPE, played(drawn, others), -1000, 1000)) == comparable(one)
    portions: list[list[Any]] = []
    at = 0
    while at < len(drawn):
        size = sizes[len(portions) % len(sizes)]
        portions.append([row for rows in drawn[at : at + size] for row in rows])
        at += size
    assert comparable(read(SHAPE, played(portions, others), -1000, 1000)) == comparable(one)


@given(epochs, steps, st.integers(-5, 45))
def test_dropped_panes_are_gone_and_others_stay(drawn: Any, steps: Any, floor: int) -> None:
    half = len(drawn) // 2
    state = played(drawn[:half], steps)
    state = pages.drop(state, floor * PANE_US)
    check(state)
    model = Model()
    for rows in drawn[:half]:
        model.add([r for r in rows if r[0] >= floor])
    for rows in drawn[half:]:
        later = [r for r in rows if r[0] >= floor]
        model.add(later)
        state = pages.append(state, sort(table(later)))
        state = compaction.compact(SHAPE, state)
        check(state)
    assert set(comparable(read(SHAPE, state, -1000, 1000))) == model.comparable(-1000, 1000)
    everything = pages.drop(state, 10_000)
    assert everything.is_empty
    assert not list(everything.runs())


def test_rows_of_a_group_are_added_in_their_order() -> None:
    """Many rows: a sort that is not stable keeps the order of a few."""
    random = np.random.default_rng(1)
    groups = random.integers(0, 3, 3_000)
    values = random.normal(size=3_000) * 10.0 ** random.integers(-3, 16, 3_000)
    shape = RunShape((pa.int64(),), (("s", pa.float64(), "sum"),))
    for panes in ([0] * 3_000, random.integers(0, 2, 3_000) * PANE_US):
        # With equal hashes, keys decide.
        for hashes in (groups.astype(np.uint64) << np.uint64(54), np.zeros(3_000, np.uint64)):
            columns = [pa.array(panes, pa.int64()), pa.array(hashes), pa.array(groups)]
            rows = pa.Table.from_arrays([*columns, pa.array(values)], schema=shape.schema)
            expected: dict[tuple[int, int], float] = {}
            for pane, group, value in zip(panes, groups.tolist(), values.tolist(), strict=True):
                place = int(pane), group
                expected[place] = expected.get(place, 0.0) + value
            halves = [rows.slice(0, 1_234), rows.slice(1_234)]
            found = {
                (r[0], r[2]): r[3]
                for r in zip(*fold(shape, halves).to_pydict().values(), strict=True)
            }
            assert found == expected


COUNTS = RunShape((pa.int64(),), (("n", pa.int64(), "sum"),))


def counts(which: Any, pane: Any = 0) -> pa.Table:
    """A row with the count 1 for each of these groups, in one or in many panes."""
    panes, keys = np.broadcast_arrays(np.asarray(pane, dtype=np.int64), np.asarray(which))
    hashes = pa.array(hash_rows(pa.table({"k": keys}), ["k"]))
    columns = [pa.array(panes), hashes, pa.array(keys), pa.array(np.ones(len(keys), np.int64))]
    return sort(pa.table(columns, schema=COUNTS.schema))


def test_an_epoch_compacts_in_proportion_to_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PAGE_ROWS", 20)
    rng = np.random.default_rng(1)
    state, written, known = EMPTY, 0, set()
    groups, shape, rows = 1_000, COUNTS, counts
    state = compaction.compact(shape, pages.append(state, rows(np.arange(groups))))
    largest = 0
    for _ in range(50):
        known = {run.id for run in state.runs()}
        which = rng.choice(groups, 40, replace=False)
        state = compaction.compact(shape, pages.append(state, rows(which)))
        new = sum(page.rows for page in state.pages if page.run and page.run.id not in known)
        written += new
        largest = max(largest, new)
    assert written <= pages.COMPACTION_RATIO * 50 * 40
    assert largest <= 200
    assert state.rows <= 3 * groups
    total = read(shape, state, 0, 1).column("n").to_numpy().sum()
    assert total == groups + 50 * 40


class Unread:
    """A store from which nothing is read."""

    def fetch(self) -> None:
        raise AssertionError("a run is read that is not here")

    def prioritize(self) -> None: ...


def restored(state: OperatorState) -> tuple[OperatorState, list[tuple[AwaitedRun, Run]]]:
    """A saved state with all runs remote, and what they await."""
    state = compaction.join_single_deltas(COUNTS, state)
    facts = {r: RunFacts(r.rows, r.nbytes, r.pane_range, r.schema) for r in state.runs()}
    awaited = [(AwaitedRun(found, Unread()), run) for run, found in facts.items()]
    remote: dict[object, Run] = {run.id: RemoteRun(place, run.id) for place, run in awaited}
    return replace(state.with_runs(remote), complete=False), awaited


@pytest.mark.parametrize("lazy", [False, True])
def test_compaction_goes_on_after_a_catch_up(monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """Calls were large while the state was fetched, so that much waits on one page."""
    monkeypatch.setattr(compaction, "PAGE_ROWS", 256)
    rng, groups = np.random.default_rng(1), 2_000
    state, awaited = EMPTY, list[tuple[AwaitedRun, Run]]()
    for _ in range(5):
        state = compaction.compact(COUNTS, pages.append(state, counts(rng.choice(groups, 500))))
    if lazy:
        state, awaited = restored(state)
    for _ in range(4):
        large = counts(np.tile(np.arange(groups), 10))
        state = compaction.compact(COUNTS, pages.append(state, large))
    for place, run in awaited:
        place.arrive(run)
    for _ in range(60):
        state = compaction.compact(COUNTS, pages.append(state, counts(rng.choice(groups, 50))))
    check(state)
    assert state.rows <= 3 * groups
    total = read(COUNTS, state, 0, 1).column("n").to_numpy().sum()
    assert total == 5 * 500 + 40 * groups + 60 * 50


def test_new_panes_are_compacted_while_older_ones_are_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "PAGE_ROWS", 256)
    groups, state = np.arange(2_000), EMPTY
    for _ in range(5):
        state = compaction.compact(COUNTS, pages.append(state, counts(groups[::4], 1)))
    state, awaited = restored(state)
    before = len(state.pages)
    for number in range(40):
        state = compaction.compact(COUNTS, pages.append(state, counts(groups, 5 + number // 20)))
    assert len(state.pages) > before + 8
    assert state.rows <= 3 * 2 * len(groups)
    for place, run in awaited:
        place.arrive(run)
    check(state)
    total = read(COUNTS, state, 0, 10).column("n").to_numpy().sum()
    assert total == 5 * 500 + 40 * len(groups)


def test_too_much_that_waits_makes_a_call_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state does not grow with the input for as long as the store is away."""
    monkeypatch.setattr(compaction, "WAITING_BYTES", 100_000)
    state, _ = restored(compaction.compact(COUNTS, pages.append(EMPTY, counts(np.arange(500)))))
    states = [state]

    def grow() -> None:
        for _ in range(100):
            appended = pages.append(states[-1], counts(np.arange(500)))
            states.append(compaction.compact(COUNTS, appended))

    with pytest.raises(AssertionError, match="a run is read that is not here"):
        grow()
    state = states[-1]
    assert 100_000 < state.nbytes < 200_000


def test_a_join_copies_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the state is kept: all deltas together may be larger than memory."""
    monkeypatch.setattr(compaction, "PAGE_ROWS", 64)
    monkeypatch.setattr(compaction, "MAX_JOINED_DELTAS", 8)
    monkeypatch.setattr(compaction, "JOIN_BYTES", 8_000)
    monkeypatch.setattr(compaction, "FREQUENT_ROWS", 4)
    monkeypatch.setattr(compaction, "MIN_FREQUENT_SHARE", 0.5)
    rng = np.random.default_rng(1)
    state = compaction.compact(COUNTS, pages.append(EMPTY, counts(np.arange(5_000))))
    for number in range(100):
        known = {delta.run.id for delta in state.deltas}
        state = pages.append(state, counts(rng.choice(5_000, 50, replace=False)))
        state = compaction.compact(COUNTS, state)
        state = compaction.join_single_deltas(COUNTS, state) if number % 5 == 4 else state
        fresh = [d.run.nbytes for d in state.deltas if d.run.id not in known]
        assert sum(fresh) <= 2 * 8_000
    assert {delta.level for delta in state.deltas} >= {1, 2}
    assert len(state.deltas) <= 6 * 8
    check(state)
    total = read(COUNTS, state, 0, 1).column("n").to_numpy().sum()
    assert total == 5_000 + 100 * 50


def test_rows_of_the_far_future_do_not_keep_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in each epoch has a wrong clock; all other windows close soon."""
    monkeypatch.setattr(compaction, "PAGE_ROWS", 256)
    monkeypatch.setattr(compaction, "MAX_SINGLE_DELTAS", 32)
    monkeypatch.setattr(compaction, "MAX_JOINED_DELTAS", 512)
    state = EMPTY
    for number in range(100):
        groups = np.arange(201)
        pane = np.where(groups == 200, 10**15, number // 10)
        state = compaction.compact(COUNTS, pages.append(state, counts(groups, pane)))
        state = pages.drop(state, number // 10 - 1)
        state = compaction.join_single_deltas(COUNTS, state) if number % 10 == 9 else state
        check(state)
        assert state.rows < 8_000
    assert read(COUNTS, state, 10**15, 10**15 + 1).column("n").to_pylist() == [100]


def test_a_group_that_changes_often_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others are not saved again: sums of doubles too, for each of ten epochs."""
    for name, value in (
        ("PAGE_ROWS", 256),
        ("MAX_SINGLE_DELTAS", 32),
        ("MAX_JOINED_DELTAS", 512),
        ("JOIN_BYTES", 1 << 20),
        ("FREQUENT_ROWS", 4),
        ("MIN_FREQUENT_SHARE", 0.5),
        ("MAX_VALUE_DELTAS", 8),
    ):
        monkeypatch.setattr(compaction, name, value)
    shape = RunShape((pa.int64(),), (("n", pa.int64(), "sum"), ("s", pa.float64(), "sum")))
    rng = np.random.default_rng(1)

    def rows(groups: Any) -> pa.Table:
        found = counts(groups)
        doubles = pa.array(rng.normal(size=found.num_rows))
        return found.append_column("s", doubles).cast(shape.schema)

    state = compaction.compact_all(shape, pages.append(EMPTY, rows(np.arange(20_000))))
    saved, written, appended = {run.id for run in state.runs()}, 0, 0
    for number in range(200):
        changed = rng.choice(np.arange(0, 20_000, 200), 50, replace=False)
        state = compaction.compact(shape, pages.append(state, rows(changed)))
        appended += len(changed)
        if number % 10 == 9:
            state = compaction.join_single_deltas(shape, state)
            check(state)
            written += sum(run.rows for run in state.runs() if run.id not in saved)
            saved |= {run.id for run in state.runs()}
    assert written < appended / 3
    total = read(shape, state, 0, 1)
    assert total.column("n").to_numpy().sum() == 20_000 + appended


def test_pages_that_hardly_change_do_not_keep_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late rows for a large old pane, which are not worth a compaction of its pages."""
    monkeypatch.setattr(compaction, "PAGE_ROWS", 256)
    monkeypatch.setattr(compaction, "PRUNE_PAGES_PER_CALL", 64)
    state = compaction.compact(COUNTS, pages.append(EMPTY, counts(np.arange(10_000), 1)))
    state = compaction.compact_all(COUNTS, state)
    rng = np.random.default_rng(1)
    for number in range(100):
        groups = np.append(rng.choice(500, 200, replace=False), number)
        pane = np.where(np.arange(201) == 200, 1, 2)
        state = compaction.compact(COUNTS, pages.append(state, counts(groups, pane)))
        state = compaction.join_single_deltas(COUNTS, state) if number % 10 == 9 else state
        assert sum(d.run.rows for d in state.deltas) < 5_000
    check(state)
    assert read(COUNTS, state, 1, 2).column("n").to_numpy().sum() == 10_100


@given(st.integers(-100, 100), st.integers(1, 700))
def test_tree_nodes_of_a_window_are_its_panes_in_order(first: int, count: int) -> None:
    nodes = combining.tree_nodes_of(first, count)
    size = [combining.FAN_OUT**level for level, _ in nodes]
    at = first
    for (_, number), panes in zip(nodes, size, strict=True):
        assert number * panes == at
        at += panes
    assert at == first + count
    assert len(nodes) <= 2 * combining.FAN_OUT * 3


@given(
    st.lists(epoch, min_size=2, max_size=3),
    st.sampled_from([1, 5, 16, 17, 33]),
    st.lists(st.integers(100, 320), min_size=2, max_size=3),
)
def test_windows_do_not_depend_on_those_closed_before(
    drawn: Any, count: int, marks: list[int]
) -> None:
    """Kept tree nodes, several windows at once, and rows that come between give the same bits."""
    state, plain, before = EMPTY, EMPTY, -(2**63)
    for number, rows in enumerate(drawn):
        fresh = sort(table(rows))
        touched = np.unique(fresh.column("__w").to_numpy())
        state = combining.without_stale_tree_nodes(pages.append(state, fresh), touched, PANE_US)
        state = compaction.compact(SHAPE, state)
        after = max(before, marks[number % len(marks)])
        starts = combining.closing_windows(state.panes, PANE_US, count, before, after)
        state, got = combining.windows(SHAPE, state, PANE_US, count, starts)
        plain = pages.append(plain, fresh)
        alone = [
            combining.windows(SHAPE, plain, PANE_US, count, np.array([start]))[1]
            for start in starts.tolist()
        ]
        assert comparable(got) == [row for each in alone for row in comparable(each)]
        assert set(got.column("__w").to_pylist()) <= {s * PANE_US for s in starts.tolist()}
        before = after


def test_memory_does_not_grow_with_the_windows_that_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a gap in the input, or at its end, as many close as a window has panes."""
    monkeypatch.setattr(combining, "MAX_WINDOWS", 16)
    for limit in ("WINDOW_ROWS", "TREE_NODE_ROWS"):
        monkeypatch.setattr(combining, limit, 4096)
    state = pages.append(EMPTY, counts(np.arange(1)))
    closed: list[int] = []
    tracemalloc.start()
    try:
        starts = np.arange(-511, 1)
        combining.each_window(COUNTS, state, PANE_US, 512, starts, lambda t: closed.append(len(t)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(closed) == 512
    assert peak < 256 << 10


@given(
    st.sets(st.integers(-30, 30), max_size=8),
    st.integers(1, 9),
    st.integers(-400, 400),
    st.integers(0, 400),
)
def test_windows_close_between_two_watermarks(
    numbers: set[int], count: int, before: int, more: int
) -> None:
    panes = np.array(sorted(n * PANE_US for n in numbers), dtype=np.int64)
    after = before + more
    expected = {
        start
        for n in numbers
        for start in range(n - count + 1, n + 1)
        if before < (start + count) * PANE_US <= after
    }
    assert combining.closing_windows(panes, PANE_US, count, before, after).tolist() == sorted(
        expected
    )
    every = {s for n in numbers for s in range(n - count + 1, n + 1)}
    found = combining.closing_windows(panes, PANE_US, count, -(2**63), 2**63 - 1)
    assert found.tolist() == sorted(every)


@pytest.mark.parametrize("partitions", [2, 3, 64])
def test_each_partition_has_rows_in_all_parts_of_the_buckets(partitions: int) -> None:
    """The bits of the hash that give the partition are not those of the bucket."""
    hashes = hash_rows(pa.table({"k": range(64_000)}), ["k"])
    for partition in (0, partitions - 1):
        mine = bucket_of(hashes[hashes % np.uint64(partitions) == partition])
        assert len(np.unique(mine * 64 // BUCKETS)) == 64


def test_equal_hashes_of_different_keys_stay_apart() -> None:
    rows = [(0, key, 1.0, 1, 1.0, 1, "x", 1, True) for key in (2, 3, 2, 3, 5, 6)]
    folded = fold(SHAPE, [table(rows)])
    assert sorted(folded.column("n").to_pylist()) == [1, 1, 2, 2]
    assert BUCKETS == 1024


def test_wide_rows_are_folded_in_portions_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 rows may be some kilobytes, or more than the task's memory."""
    for limit in ("WINDOW_ROWS", "TREE_NODE_ROWS"):
        monkeypatch.setattr(combining, limit, 1 << 18)
    for limit in ("WINDOW_BYTES", "TREE_NODE_BYTES"):
        monkeypatch.setattr(combining, limit, 1 << 20, raising=False)
    monkeypatch.setattr(compaction, "PAGE_ROWS", 4096)
    shape = RunShape((pa.int64(),), (("word", pa.string(), "max"),))
    state, groups = EMPTY, np.arange(2000)
    for pane in range(4):
        rows = counts(groups, pane * PANE_US).drop_columns(["n"])
        rows = rows.append_column("word", pa.array(["x" * 1000] * len(groups)))
        state = compaction.compact(shape, pages.append(state, rows))
    runs = [page.run for page in state.pages if page.run is not None]
    assert max(run.nbytes for run in runs) <= 2 << 20
    closed: list[int] = []
    starts = np.arange(-3, 4)
    combining.each_window(shape, state, PANE_US, 4, starts, lambda t: closed.append(t.nbytes))
    assert sum(closed) > 14 * 10**6
    assert max(closed) <= 2 << 20


def test_tree_nodes_are_in_files_while_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first window that closes after a restore computes all of them in one call."""
    monkeypatch.setattr("rekindle.engine.state.spill.MIN_BUFFER_BYTES", 1_000)
    panes, groups = np.meshgrid(np.arange(128) * PANE_US, np.arange(14))
    state = pages.append(EMPTY, counts(groups.ravel(), panes.ravel()))
    files, starts, closed = RunFiles(tmp_path, memory_bytes=0), np.arange(1), list[pa.Table]()
    found = combining.each_window(COUNTS, state, PANE_US, 128, starts, closed.append, files)
    assert sum(node.nbytes for node in found.tree_nodes.values()) > 3 * files.buffer_bytes
    in_memory = [node.nbytes for node in found.tree_nodes.values() if node.in_memory]
    assert sum(in_memory) <= files.buffer_bytes
    same = combining.windows(COUNTS, state, PANE_US, 128, starts)[1]
    assert pa.concat_tables(closed).equals(same)
