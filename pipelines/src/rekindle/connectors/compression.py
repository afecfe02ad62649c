"""Opens text files that may be compressed; each is read whole, or refused.

The end of a file's name says how it is compressed, and its first bytes have to say the same. A file
of several streams, as `pbzip2` or `cat` write it, is read to its end: Python's own readers of
bzip2 and xz take a damaged stream that is not the first for the end of the file.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, cast

from rekindle.errors import SchemaMismatch, SourceFailed

_READ_BYTES = 256 << 10
_SHOWN_ENTRIES = 3
_END_RECORD_BYTES = 22


class DamagedStream(Exception):
    """The content is not what its compression allows."""


DECOMPRESSION_ERRORS = (
    DamagedStream,
    EOFError,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)

_Content = AbstractContextManager[BinaryIO]


@dataclass(frozen=True, slots=True)
class _Compression:
    """`starts`: how its files begin; `open`: None if it is not supported."""

    name: str
    suffix: str
    starts: tuple[bytes, ...]
    open: Callable[[BinaryIO, str], _Content] | None = None


@contextlib.contextmanager
def open_decompressed(fs: Any, path: str, where: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed. Raises SourceFailed if they are not what the name says,
    and DECOMPRESSION_ERRORS while they are read."""
    open_content = _opener(fs, path, where)
    with fs.open(path, "rb") as file:
        if open_content is None:
            yield file
            return
        with open_content(file, where) as content:
            _require_once(content, where)
            yield content


def _require_once(content: Any, where: str) -> None:
    """Check that what was compressed is not compressed itself."""
    inner = _starting_like(content.peek(_START_BYTES))
    if inner is not None:
        raise SourceFailed(f"{where}: it is compressed twice, inside with {inner.name}: unpack it")


def _starting_like(start: bytes) -> _Compression | None:
    return next((c for c in _COMPRESSIONS if start.startswith(c.starts)), None)


def is_named_as_compressed(path: str) -> bool:
    return _named(path) is not None


def _named(path: str) -> _Compression | None:
    return next((c for c in _COMPRESSIONS if path.lower().endswith(c.suffix)), None)


def _opener(fs: Any, path: str, where: str) -> Callable[[BinaryIO, str], _Content] | None:
    """None if the file is not compressed."""
    with fs.open(path, "rb") as file:
        start = file.read(_START_BYTES)
    named = _named(path)
    found = _starting_like(start)
    if found is None:
        if named is not None and named.open is not None:
            raise SourceFailed(
                f"{where}: the name ends with {named.suffix}, and the content is not "
                f"{named.name}: copy the file again, or name it by what it is"
            )
        found = named if named is not None and _is_binary(start) else None
    if found is None:
        return None
    if found.open is None:
        raise SourceFailed(
            f"{where}: the file is compressed with {found.name}, which is not supported: compress "
            "it with gzip, bzip2 or xz, or not at all"
        )
    if found is not named:
        raise SourceFailed(
            f"{where}: the file is compressed with {found.name}: end its name with {found.suffix}"
        )
    return found.open


def _is_binary(start: bytes) -> bool:
    """Whether it has bytes that no text has."""
    return any(byte < 32 and byte not in b"\t\n\r" for byte in start)


def _streams(start: Callable[[], Any], padding_bytes: int, file: BinaryIO, _: str) -> _Content:
    contents = _contents(file, start, padding_bytes)
    return cast(_Content, io.BufferedReader(_Reader(contents), _READ_BYTES))


class _Reader(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _contents(file: BinaryIO, start: Callable[[], Any], padding_bytes: int) -> Iterator[bytes]:
    """What the streams of a file contain. `start` makes the decompressor of a stream; zero bytes
    may follow one, in multiples of `padding_bytes`."""
    data = file.read(_READ_BYTES)
    while data:
        stream = start()
        while not stream.eof:
            if stream.needs_input and not data and not (data := file.read(_READ_BYTES)):
                raise DamagedStream("the last stream has no end")
            yield _decompressed(stream, data)
            data = b""
        data = stream.unused_data or file.read(_READ_BYTES)
        if padding_bytes:
            data = _after_padding(file, data, padding_bytes)


def _decompressed(stream: Any, data: bytes) -> bytes:
    try:
        return bytes(stream.decompress(data, _READ_BYTES))
    except (OSError, lzma.LZMAError) as e:
        raise DamagedStream(str(e)) from e


def _after_padding(file: BinaryIO, data: bytes, multiple: int) -> bytes:
    padding = 0
    while data:
        rest = data.lstrip(b"\0")
        padding += len(data) - len(rest)
        data = rest or file.read(_READ_BYTES)
        if rest:
            break
    if padding % multiple:
        raise DamagedStream(f"{padding} zero bytes after a stream are no multiple of {multiple}")
    return data


@contextlib.contextmanager
def _zip_entry(file: BinaryIO, where: str) -> Iterator[BinaryIO]:
    """The only entry of an archive."""
    try:
        opened = zipfile.ZipFile(file)
    except ValueError as e:  # of a store that reads files from their beginning only
        raise SourceFailed(
            f"{where}: {e}; a zip archive is read from its end: unpack it, or compress it with gzip"
        ) from e
    with opened as archive:
        names = archive.namelist()
        if len(names) != 1 or names[0].endswith("/"):
            listed = f": {', '.join(names[:_SHOWN_ENTRIES])}" if names else ""
            raise SchemaMismatch(
                f"{where}: the archive has {len(names)} entries{listed}; a zip archive of a source "
                "has one file and no folder: unpack it"
            )
        if archive.infolist()[0].header_offset or not _ends_with(file, archive.comment):
            raise DamagedStream("something precedes or follows the archive")
        try:
            content = archive.open(names[0])
        except (RuntimeError, NotImplementedError) as e:  # encrypted, or another compression
            raise SchemaMismatch(
                f"{where}: {e}; a zip archive of a source is not encrypted, and compressed in the "
                "usual way: unpack it"
            ) from e
        with content:
            yield cast(BinaryIO, content)


def _ends_with(file: BinaryIO, comment: bytes) -> bool:
    """Whether the end record, and its comment, are the end of the file."""
    file.seek(-len(comment) - _END_RECORD_BYTES, io.SEEK_END)
    return file.read(4) == b"PK\x05\x06"


def _gzip(file: BinaryIO, _: str) -> _Content:
    return cast(_Content, gzip.GzipFile(fileobj=file))


_BZIP2 = tuple(
    b"BZh%d%b" % (level, first)
    for level in range(1, 10)
    for first in (b"1AY&SY", b"\x17rE8P\x90")  # of a block; of the end, if there is none
)

_COMPRESSIONS = (
    _Compression("gzip", ".gz", (b"\x1f\x8b\x08",), _gzip),
    _Compression("bzip2", ".bz2", _BZIP2, partial(_streams, bz2.BZ2Decompressor, 0)),
    _Compression(
        "xz",
        ".xz",
        (b"\xfd7zXZ\0",),
        partial(_streams, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4),
    ),
    _Compression(
        "LZMA",
        ".lzma",
        (b"]\0\0",),
        partial(_streams, partial(lzma.LZMADecompressor, lzma.FORMAT_ALONE), 0),
    ),
    _Compression("zip", ".zip", (b"PK\x03\x04", b"PK\x05\x06"), _zip_entry),
    _Compression("Zstandard", ".zst", (b"\x28\xb5\x2f\xfd",)),
    _Compression("Zstandard", ".zstd", (b"\x28\xb5\x2f\xfd",)),
    _Compression("LZ4", ".lz4", (b"\x04\x22\x4d\x18",)),
    _Compression("Snappy", ".snappy", (b"\xff\x06\0\0sNaPpY",)),
    _Compression("Snappy", ".sz", (b"\xff\x06\0\0sNaPpY",)),
    _Compression("compress", ".z", (b"\x1f\x9d",)),
    _Compression("Brotli", ".br", ()),
    _Compression("7-Zip", ".7z", (b"7z\xbc\xaf\x27\x1c",)),
)
_START_BYTES = 64
