"""The state of one window operator: partial aggregates of its open windows, in buckets. Pure.

A window consists of panes of one slide each. Spark aggregates the rows of each (group, pane, epoch)
to partials; this module merges them into the open windows of the pane and removes the windows that
close. The merge order is fixed (first the state, then epochs in order and panes in order, for each
group and window, on one thread), so one call over many epochs gives the same bits as one call for
each epoch. That makes released output recoverable without saving state first. Unchanged buckets
keep the same table object.

A state table has the columns `__w` (window start, microseconds), the group's `__k0..`, and the
partials, whose names are hashes of what they compute; rows are in the order of first appearance.

Design: docs/design/engine.md#windows, docs/design/determinism.md.
Paper: FlameStream (Trofimov et al. 2019), section V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.canonical_order import from_order_bits, order_bits, sort_rows
from rekindle.engine.epochs import EPOCH
from rekindle.engine.model import BUCKETS
from rekindle.engine.window_assigners import WindowAssigner
from rekindle.errors import StateMismatch
from rekindle.exchange.hashing import hash_rows

WINDOW, ROWS, BUCKET = "__w", "__n", "__b"
_PANE, _ROW = "__p", "__r"
_EPOCH_FIELD = pa.field(EPOCH, pa.int64())
LATE = -(2**63) + 1
"""`__w` of the group that counts late rows, all of whose windows are closed."""
UNTIMED = -(2**63) + 2
"""`__w` of the group that counts rows without event time."""

Buckets = Mapping[int, pa.Table]


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The layout of a window operator's state."""

    windows: WindowAssigner
    keys: tuple[pa.DataType, ...]
    partials: tuple[tuple[str, pa.DataType, Literal["sum", "min", "max"]], ...]
    exact: tuple[tuple[str, int], ...] = ()
    """Sums of decimals that are kept as two partials (`engine.exact_sums`): name and scale."""

    @property
    def key_names(self) -> list[str]:
        return [f"__k{i}" for i in range(len(self.keys))]

    @property
    def schema(self) -> pa.Schema:
        """Schema of the state's tables."""
        keys = list(zip(self.key_names, self.keys, strict=True))
        partials = [(name, state_type(kind, merge)) for name, kind, merge in self.partials]
        return pa.schema([(WINDOW, pa.int64()), *keys, *partials])


@dataclass(frozen=True, slots=True)
class Advance:
    """`closed` has `__e` and the state's columns, ordered by (epoch, window end, keys)."""

    buckets: Buckets
    closed: pa.Table
    late: int
    untimed: int


def state_type(kind: pa.DataType, merge: str) -> pa.DataType:
    """Decimal sums have full precision, so that an overflow does not depend on how many epochs are
    merged at once."""
    if merge == "sum" and pa.types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    return kind


def advance(
    shape: WindowShape,
    buckets: Buckets,
    partials: pa.Table | None,
    watermarks: Sequence[tuple[int, int, int]],
) -> Advance:
    """Merge `partials` (columns `__k*`, `__w`: pane start, `__e`, `__n`, partials), close windows.

    `watermarks` are (epoch, watermark before, watermark) of the call's epochs in order. A window
    closes in the first epoch whose watermark reaches its end; rows for it in later epochs are late,
    so merging all epochs first and closing afterwards is equivalent to epoch by epoch.
    """
    panes, late, untimed = _split_markers(partials)
    rows = None if panes is None else _in_windows(shape, panes, watermarks)
    ends = np.array([w for _, _, w in watermarks], dtype=np.int64)
    dirty = _closing(shape, buckets, ends.max(initial=np.iinfo(np.int64).min))
    if rows is not None:
        dirty |= set(np.unique(rows.column(BUCKET).to_numpy()).tolist())
    if not dirty:
        return Advance(buckets, _no_rows(shape), late, untimed)

    merged = _merge(shape, {b: buckets[b] for b in sorted(dirty) if b in buckets}, rows)
    window_end = shape.windows.ends(merged.column(WINDOW).to_numpy())
    closes = np.searchsorted(ends, window_end, side="left")
    is_open = closes == len(ends)
    numbers = np.array([e for e, _, _ in watermarks], dtype=np.int64)
    closed = merged.filter(pa.array(~is_open))
    closed = closed.append_column(EPOCH, pa.array(numbers[closes[~is_open]]))
    closed = sort_rows(closed, [EPOCH, WINDOW, *shape.key_names]).drop_columns([BUCKET])
    remaining = merged.filter(pa.array(is_open)) if len(closed) else merged
    return Advance(_rebuild(buckets, dirty, remaining), closed, late, untimed)


def conform(shape: WindowShape, buckets: Buckets, operator: str) -> Buckets:
    """Saved state with columns in the order of this shape, matched by name. Raises StateMismatch if
    a column is missing, unknown or of another type."""
    return {bucket: _conform(shape.schema, table, operator) for bucket, table in buckets.items()}


def _conform(wanted: pa.Schema, table: pa.Table, operator: str) -> pa.Table:
    kept = {field.name: field.type for field in table.schema}
    needed = {field.name: field.type for field in wanted}
    for name in [*needed, *kept]:
        if kept.get(name) == needed.get(name):
            continue
        have, need = (str(columns.get(name, "missing")) for columns in (kept, needed))
        raise StateMismatch(
            f"operator {operator}: its saved state is incompatible with this release: column "
            f"{name} is {have} in the state and {need} in this release; run the image that saved "
            "it, or rename the operator to start with empty state"
        )
    return table if table.schema.names == wanted.names else table.select(wanted.names)


def _no_rows(shape: WindowShape) -> pa.Table:
    return shape.schema.append(_EPOCH_FIELD).empty_table()


def _split_markers(partials: pa.Table | None) -> tuple[pa.Table | None, int, int]:
    """The partials of panes, and the numbers of dropped rows (late, untimed)."""
    if partials is None or not partials.num_rows:
        return None, 0, 0
    panes = partials.column(WINDOW).to_numpy()
    marked = panes <= UNTIMED
    late = untimed = 0
    if marked.any():
        counts = partials.column(ROWS).to_numpy()
        late, untimed = (int(counts[panes == m].sum()) for m in (LATE, UNTIMED))
        partials = partials.filter(pa.array(~marked))
    return (partials if partials.num_rows else None), late, untimed


def _in_windows(
    shape: WindowShape, panes: pa.Table, watermarks: Sequence[tuple[int, int, int]]
) -> pa.Table:
    """One row for each pane and open window of it, in merge order, with buckets."""
    pane = panes.column(WINDOW).to_numpy()
    epoch = panes.column(EPOCH).to_numpy()
    numbers = np.array([e for e, _, _ in watermarks], dtype=np.int64)
    before = np.array([b for _, b, _ in watermarks], dtype=np.int64)
    late = before[np.searchsorted(numbers, epoch)]
    which, starts = shape.windows.windows_over(pane)
    still_open = shape.windows.ends(starts) > late[which]
    which, starts = which[still_open], starts[still_open]
    rows = panes if _is_identity(which, len(pane)) else panes.take(pa.array(which))
    rows = rows.select([*shape.schema.names, EPOCH]).cast(shape.schema.append(_EPOCH_FIELD))
    rows = rows.set_column(0, WINDOW, pa.array(starts))
    rows = rows.append_column(_PANE, pa.array(pane[which]))
    rows = sort_rows(rows, [EPOCH, _PANE, WINDOW, *shape.key_names]).select(shape.schema.names)
    bucket = (hash_rows(rows, shape.key_names) % np.uint64(BUCKETS)).astype(np.int8)
    return rows.append_column(BUCKET, pa.array(bucket))


def _is_identity(which: npt.NDArray[np.int64], rows: int) -> bool:
    return len(which) == rows and bool((which == np.arange(rows)).all())


def _closing(shape: WindowShape, buckets: Buckets, watermark: int) -> set[int]:
    """Buckets with a window that ends at or before `watermark`."""
    return {bucket for bucket, table in buckets.items() if _first_end(shape, table) <= watermark}


def _first_end(shape: WindowShape, table: pa.Table) -> int:
    first = pc.min(table.column(WINDOW)).as_py()
    return int(shape.windows.ends(np.array([first], dtype=np.int64))[0])


def _merge(shape: WindowShape, old: Buckets, rows: pa.Table | None) -> pa.Table:
    tables = [
        table.append_column(BUCKET, pa.array(np.full(table.num_rows, bucket, dtype=np.int8)))
        for bucket, table in old.items()
    ]
    if rows is None:
        return pa.concat_tables(tables)
    return _aggregate(shape, pa.concat_tables([*tables, rows]))


def _aggregate(shape: WindowShape, table: pa.Table) -> pa.Table:
    """Merge in row order for each (bucket, window, group), with groups in the order of first
    appearance, which Arrow does not guarantee."""
    by = [BUCKET, WINDOW, *shape.key_names]
    table = table.combine_chunks()
    for at, field in enumerate(table.schema):
        if _is_order_bits(shape, field.name):
            doubles = table.column(at).cast(pa.float64()).combine_chunks()
            table = table.set_column(at, field.name, order_bits(doubles))
    table = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    aggregations = [(_ROW, "min"), *((name, merge) for name, _, merge in shape.partials)]
    aggregated = table.group_by(by, use_threads=False).aggregate(aggregations)
    aggregated = aggregated.take(pc.sort_indices(aggregated.column(f"{_ROW}_min")))
    columns: dict[str, Any] = {BUCKET: aggregated.column(BUCKET)}
    for field in shape.schema:
        merge = next((m for n, _, m in shape.partials if n == field.name), None)
        column = aggregated.column(field.name if merge is None else f"{field.name}_{merge}")
        if _is_order_bits(shape, field.name):
            column = from_order_bits(column.combine_chunks())
        columns[field.name] = column.cast(field.type) if column.type != field.type else column
    return pa.table(columns)


def _is_order_bits(shape: WindowShape, name: str) -> bool:
    return any(
        n == name and merge != "sum" and pa.types.is_floating(kind)
        for n, kind, merge in shape.partials
    )


def _rebuild(buckets: Buckets, dirty: set[int], remaining: pa.Table) -> Buckets:
    """New tables for the dirty buckets, copied so that they do not share memory."""
    bucket_of = remaining.column(BUCKET).to_numpy()
    order = np.argsort(bucket_of, kind="stable")
    bounds = np.searchsorted(bucket_of[order], np.arange(BUCKETS + 1))
    plain = remaining.drop_columns([BUCKET]).combine_chunks()
    result = {b: t for b, t in buckets.items() if b not in dirty}
    for bucket in dirty:
        first, last = bounds[bucket], bounds[bucket + 1]
        if first < last:
            result[bucket] = plain.take(pa.array(order[first:last]))
    return dict(sorted(result.items()))
