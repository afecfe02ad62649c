"""Which files of a log are kept for readers outside of the topology, who have no holds. Pure.

The topology does not need epochs up to the floor any more. The newest files of these epochs are
kept, up to a number of bytes.

Design: docs/design/stream-sinks.md#retention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MIN_RETAINED_FILES = 8
"""If epochs are retained, files are so small that at least this number of them is kept, because
only whole files are removed."""
MIN_FILE_BYTES = 64 << 10


class StoredFile(Protocol):
    """Epochs `first..last`. `spilled`: the name of the object, if it is not on local disk."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def spilled(self) -> str | None: ...


def retained_floor(files: Sequence[StoredFile], floor: int, retain_bytes: int) -> int:
    """The epoch through which a log is truncated: `floor`, or less, so that the newest local files
    up to `floor` are kept, of at most `retain_bytes` together. `files`: oldest first."""
    remaining = retain_bytes
    for file in reversed([f for f in files if f.last <= floor]):
        if file.spilled is not None or file.size > remaining:
            return file.last
        remaining -= file.size
        floor = file.first - 1
    return floor


def file_bytes(limit: int, retain_bytes: int) -> int:
    """The size at which a log file is sealed and the next one begun; `limit`: the size in a log
    that retains nothing."""
    if not retain_bytes:
        return limit
    return min(limit, max(MIN_FILE_BYTES, retain_bytes // MIN_RETAINED_FILES))
