"""What a table costs in memory: its rows, and the objects around them.

An epoch of one row is hundreds of times as large as its row: each column has buffers, of 64 bytes
at least, and Arrow and Python objects. A bound that counts rows alone does not bound epochs of few
rows. Knows nothing of epochs.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import pyarrow as pa

TABLE_BYTES = 4 << 10
"""Memory of the objects for one table, and for what refers to it."""
COLUMN_BYTES = 1 << 10
"""Memory of the objects of each column; nested columns have more."""


def object_bytes(columns: int) -> int:
    """Memory of a table whose columns have one Arrow chunk each, without its rows."""
    return TABLE_BYTES + COLUMN_BYTES * columns


def memory_bytes(table: pa.Table) -> int:
    """Approximate bytes of memory; for a slice, only those of the slice. A table without rows is
    assumed to be shared, so its columns are not counted."""
    if not table.num_rows:
        return TABLE_BYTES
    columns = int(table.num_columns)
    chunks = max(1, int(table.column(0).num_chunks)) if columns else 1
    return int(table.nbytes) + chunks * object_bytes(columns)
