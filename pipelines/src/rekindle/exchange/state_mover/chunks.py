"""How state and log are cut into chunks, and how a chunk is checked. Pure.

The pieces of a transfer are a header, the runs of the state and the records of the log, in this
order; the log by epoch. Chunks are cut from their bytes as if they were one sequence, so a chunk is
as large as asked, whatever the sizes of pieces are; only the last one is smaller. Which bytes are
in chunk n follows from the sizes alone.

Design: docs/design/state-movement.md#chunks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Slice:
    """`nbytes` bytes of a piece, from `offset` on."""

    piece: int
    offset: int
    nbytes: int


class ChunkPlan:
    """The chunks of one transfer. Memory: one integer for each piece, nothing for a chunk."""

    def __init__(self, sizes: Sequence[int], chunk_bytes: int) -> None:
        """`sizes`: bytes of each piece, in their order. Raises ValueError."""
        if chunk_bytes <= 0 or any(size < 0 for size in sizes):
            raise ValueError(f"chunks of {chunk_bytes} bytes cannot be cut from {sizes[:8]}")
        self.chunk_bytes = chunk_bytes
        self._ends = list(accumulate(sizes))

    @property
    def total_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // self.chunk_bytes)

    def slices(self, number: int) -> tuple[Slice, ...]:
        """The slices of chunk `number`, in order. Raises IndexError."""
        if not 0 <= number < self.chunks:
            raise IndexError(f"chunk {number} of {self.chunks}")
        at = number * self.chunk_bytes
        end = min(at + self.chunk_bytes, self.total_bytes)
        found: list[Slice] = []
        piece = bisect_right(self._ends, at)
        while at < end:
            begin = self._ends[piece - 1] if piece else 0
            upto = min(end, self._ends[piece])
            if upto > at:
                found.append(Slice(piece, at - begin, upto - at))
            at, piece = upto, piece + 1
        return tuple(found)


def chunk_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
