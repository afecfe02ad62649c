"""Blocks of whole lines of a file: parts that can be read again, each alone.

Before a block is parsed again, the digest of its bytes is verified, so that it gives the same rows
as the first time, or an error if the file has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from rekindle.errors import SchemaMismatch

BLOCK_BYTES = 4 * 1024**2
MAX_LINE_BYTES = 128 * 1024**2
"""A longer line is refused: the file probably has no lines, and a block is read into memory as a
whole."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DIGEST_BYTES = 16


class NotReadableInBlocks(SchemaMismatch):
    """The file has to be read from its beginning, as a whole."""


class LineTooLong(NotReadableInBlocks):
    """A line is longer than the limit."""


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file: `size` bytes from `offset` on, which have `rows` rows."""

    offset: int
    size: int
    rows: int
    digest: str


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def blocks_of_lines(
    file: BinaryIO, block_bytes: int, max_line_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of blocks of about `block_bytes`, or of one line if that is longer; without a
    byte order mark. Raises LineTooLong for a line of more than `max_line_bytes`."""
    first = file.read(len(BYTE_ORDER_MARK))
    rest = [first.removeprefix(BYTE_ORDER_MARK)]
    offset = len(first) - len(rest[0])
    while data := file.read(block_bytes):
        whole, newline, tail = data.rpartition(b"\n")
        if not newline:
            rest.append(data)
            if sum(map(len, rest)) > max_line_bytes:
                raise LineTooLong(f"a line has more than {max_line_bytes:,} bytes")
            continue
        block = b"".join((*rest, whole, newline))
        yield offset, block
        offset += len(block)
        rest = [tail]
    if last := b"".join(rest):
        yield offset, last
