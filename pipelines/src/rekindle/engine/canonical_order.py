"""Order and comparison of values as in Spark, for pyarrow. Pure.

Spark's order of doubles is total: −0.0 equals 0.0, and NaN equals itself and is above all others.
Arrow's `min` and `max` skip NaN instead, so floats are mapped to integers of the same order, and
these are compared.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_ALL_BUT_SIGN = np.int64(0x7FFFFFFFFFFFFFFF)


def to_comparable(values: pa.Array) -> pa.Array:
    """float64 -> int64 that compare in Spark's order; NULL stays NULL."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    floats = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False) + 0.0  # −0.0 becomes 0.0
    floats[np.isnan(floats)] = np.nan  # all NaN get the same bits
    bits = floats.view(np.int64)
    # The bits of negative floats ascend while the floats descend, so all but the sign are flipped.
    return pa.array(bits ^ ((bits >> np.int64(63)) & _ALL_BUT_SIGN), pa.int64(), mask=~valid)


def from_comparable(comparable: pa.Array) -> pa.Array:
    """The inverse of `to_comparable`."""
    valid = comparable.is_valid().to_numpy(zero_copy_only=False)
    raw = pc.fill_null(comparable, 0).to_numpy(zero_copy_only=False)
    floats = (raw ^ ((raw >> np.int64(63)) & _ALL_BUT_SIGN)).view(np.float64)
    return pa.array(floats, pa.float64(), mask=~valid)


def sort_rows(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Rows in ascending order of `columns`, NaN and then NULL last."""
    keys = [(name, "ascending") for name in columns]
    return table.take(pc.sort_indices(table, keys))
