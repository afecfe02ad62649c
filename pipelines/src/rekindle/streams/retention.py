"""Which files of a log are kept for readers outside of the topology, who hold nothing. Pure.

A floor says what the topology no longer needs. Of that, the newest files stay, up to a number of
bytes.

Design: docs/design/stream-sinks.md#retention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

FILES = 8
"""A log whose epochs are kept has files of at most this part of what is kept, because only whole
files go."""
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
    """The highest epoch that is removed of those through `floor`, so that the newest local files
    below it stay that have at most `retain_bytes` together. `files`: oldest first."""
    left = retain_bytes
    for file in reversed([f for f in files if f.last <= floor]):
        if file.spilled is not None or file.size > left:
            return file.last
        left -= file.size
        floor = file.first - 1
    return floor


def file_bytes(limit: int, retain_bytes: int) -> int:
    """The size from which on a file is followed by another; `limit`: without readers outside."""
    if not retain_bytes:
        return limit
    return min(limit, max(MIN_FILE_BYTES, retain_bytes // FILES))
