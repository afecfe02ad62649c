"""The output log of a partition in the checkpoint store: which objects a task that starts in a new
pod can use, and where a task that ships its log goes on. Pure.

The log is shipped in *pieces*: consecutive epochs each, a log file of its own. The name of a piece
has all that is known of it before it is read: its epochs, its size, the digest of its bytes, and
the chained digests of the output before and after it. So pieces that follow one another are found
by their names, and a sequence of them is trusted only if it ends with the chained digest of the
committed entry from which a task restores: what a diverged replica has shipped, or the same segment
before an edit, is not used.

Design: docs/design/checkpoints.md#output-logs.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from rekindle.streams.log_reading import EncodedEpoch
from rekindle.streams.tail import Tail, append_epoch

_PIECE = re.compile(
    r"(?P<key>[^/]+/\d+)/shipped/(?P<first>\d{12})-(?P<last>\d{12})_(?P<bytes>\d+)"
    r"_(?P<before>-?\d+\.[0-9a-f]*)_(?P<after>-?\d+\.[0-9a-f]*)_(?P<digest>[0-9a-f]{32})"
)
_LOGS = "logs/"


@dataclass(frozen=True, slots=True)
class Piece:
    """Epochs `first` to `last` of a partition's output, in `bytes` bytes with this digest.
    `before`, `after`: the chained digests before and after them."""

    first: int
    last: int
    bytes: int
    before: str
    after: str
    digest: str


def content_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def pieces_prefix(key: str) -> str:
    """Begin of the names of a partition's pieces; `key`: as in `Manifest.entries`."""
    return f"{_LOGS}{key}/shipped/"


def piece_name(key: str, piece: Piece) -> str:
    before, after = (chained.replace(":", ".") for chained in (piece.before, piece.after))
    epochs = f"{piece.first:012d}-{piece.last:012d}"
    return f"{pieces_prefix(key)}{epochs}_{piece.bytes}_{before}_{after}_{piece.digest}"


def parse_piece_name(name: str) -> tuple[str, Piece] | None:
    """The key of the partition, and the piece; of a name with or without the topology's UID."""
    match = _PIECE.fullmatch(name.partition(_LOGS)[2])
    if match is None:
        return None
    first, last, size = map(int, match.group("first", "last", "bytes"))
    before, after = (match[name].replace(".", ":") for name in ("before", "after"))
    return match["key"], Piece(first, last, size, before, after, match["digest"])


def is_content_of(name: str, data: bytes) -> bool:
    """Whether these are the bytes of the piece of this name."""
    found = parse_piece_name(name)
    return found is not None and (found[1].bytes, found[1].digest) == (
        len(data),
        content_digest(data),
    )


# -- in a new pod --------------------------------------------------------------------------------


def path_to(pieces: Iterable[Piece], epoch: int, chained: str) -> tuple[Piece, ...]:
    """Pieces without a gap, oldest first, that end with `epoch` and its chained digest; as far back
    as any do. Empty if none end there."""
    ending, firsts = _reachable(pieces)
    path: list[Piece] = []
    at = epoch, chained
    while at in firsts:
        best = min(ending[at], key=lambda p: firsts.get((p.first - 1, p.before), p.first))
        path.append(best)
        at = best.first - 1, best.before
    return tuple(reversed(path))


def held_epochs_of(pieces: Iterable[Piece]) -> tuple[int, int] | None:
    """First and last epoch of the sequence of pieces that ends last; of several, of the longest."""
    _, firsts = _reachable(pieces)
    if not firsts:
        return None
    last, first = max((last, -first) for (last, _), first in firsts.items())
    return -first, last


def _reachable(
    pieces: Iterable[Piece],
) -> tuple[Mapping[tuple[int, str], Sequence[Piece]], Mapping[tuple[int, str], int]]:
    """By end (epoch and chained digest): the pieces that end there, and the first epoch of the
    longest sequence that does."""
    ending = defaultdict[tuple[int, str], list[Piece]](list)
    for piece in pieces:
        if piece.first <= piece.last:
            ending[piece.last, piece.after].append(piece)
    firsts: dict[tuple[int, str], int] = {}
    for end in sorted(ending):  # what a piece follows ends before it
        firsts[end] = min(firsts.get((p.first - 1, p.before), p.first) for p in ending[end])
    return ending, firsts


# -- shipping ------------------------------------------------------------------------------------


@dataclass(slots=True)
class PieceWriter:
    """Makes pieces of consecutive epochs. `chained`: the chained digest before the next one; if it
    is not known, any, since nothing precedes the first piece."""

    chained: str
    _before: str = ""
    _first: int | None = None
    _last: int = 0
    _tail: Tail = field(default_factory=lambda: Tail(0))
    _data: bytearray = field(default_factory=bytearray)

    @property
    def size(self) -> int:
        return len(self._data)

    def add(self, epoch: EncodedEpoch, known: str | None = None) -> None:
        """`known`: the chained digest after the epoch, where the task knows it."""
        if self._first is None:
            self._first, self._before = epoch.epoch, self.chained
            self._last = epoch.epoch - 1
            self._tail = Tail(epoch.epoch)
        assert epoch.epoch == self._last + 1, "epochs are consecutive"
        self._encode(epoch)
        self._last = epoch.epoch
        self.chained = known or epoch.chained_after(self.chained)

    def take(self) -> tuple[Piece, bytes] | None:
        """The piece of the epochs that were added since the last one; None if none were."""
        if self._first is None:
            return None
        data = bytes(self._data)
        digest = content_digest(data)
        piece = Piece(self._first, self._last, len(data), self._before, self.chained, digest)
        self._first, self._data = None, bytearray()
        return piece, data

    def _encode(self, epoch: EncodedEpoch) -> None:
        payload = pa.py_buffer(b"") if epoch.payload is None else epoch.payload
        appended = append_epoch(self._tail, epoch.watermark, epoch.digest, payload, idle=epoch.idle)
        for offset, data in appended.writes:
            self._data[offset : offset + len(data)] = memoryview(data)
        self._tail = appended.tail
