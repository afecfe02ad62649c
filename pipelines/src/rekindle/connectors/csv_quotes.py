"""Checks that all quotes in a CSV file are closed (RFC 4180).

After an unclosed quote, Arrow's reader takes the rest of the file, line ends included, as one
value: rows would be lost silently. All quotes are closed if they are, alternately, right after and
right before a delimiter or line end: `QuoteDetector` finds this out while Arrow reads. A file with
other quotes (doubled, escaped, inside a value) is read a second time by `require_closed_quotes`.
"""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rekindle.errors import SchemaMismatch

_UTF8_BOM = "\xef\xbb\xbf"  # as latin-1 reads it
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """Delimiter, quote character and escape character of a file."""

    delimiter: str = ","
    quote: str | None = '"'
    escape: str | None = None

    def reader(self, lines: Iterable[str], *, strict: bool = False) -> Iterator[list[str]]:
        """The rows of a file. Raises csv.Error."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            escapechar=self.escape,
            strict=strict,
        )


class QuoteDetector:
    """A binary file from which Arrow reads, that inspects the quotes in the bytes read.
    `needs_check`: whether `require_closed_quotes` has to check the file."""

    def __init__(self, file: Any, dialect: CsvDialect, *, ascii_compatible: bool) -> None:
        """`ascii_compatible`: whether bytes below 128 are always ASCII in the file's encoding."""
        self._file = file
        self._quote = dialect.quote.encode() if dialect.quote else None
        self._quote_byte = ord(dialect.quote or "\0")
        self._can_track = ascii_compatible and dialect.escape is None
        self._separators = np.frombuffer(f"{dialect.delimiter}\r\n".encode(), np.uint8)
        self._inside = False  # whether a quoted value is open
        self._before = self._separators[-1:]  # the last byte that was read
        self._closed_last = False  # whether that byte ended a quoted value
        self._needs_check = False

    @property
    def needs_check(self) -> bool:
        """Whether the file has to be checked, by the bytes read so far. True also while a quoted
        value is open: a reader may leave out the last read, which shows that the file has ended."""
        return self._needs_check or self._inside

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        if self._quote is not None and not self._needs_check:
            if self._can_track:
                self._needs_check = not self._track_quotes(np.frombuffer(data, np.uint8))
            else:
                self._needs_check = self._quote in data
        return data

    def _track_quotes(self, data: npt.NDArray[np.uint8]) -> bool:
        """Whether each quote in the next bytes begins or ends a value. Empty `data`: the end of the
        file."""
        if not len(data):
            return not self._inside
        if self._closed_last and data[0] not in self._separators:
            return False
        quotes = np.flatnonzero(data == self._quote_byte)
        begins, ends = quotes[int(self._inside) :: 2], quotes[1 - int(self._inside) :: 2]
        self._closed_last = bool(len(ends)) and int(ends[-1]) == len(data) - 1
        before = np.concatenate([self._before, data])[begins]
        after = data[ends[:-1] + 1 if self._closed_last else ends + 1]
        self._inside ^= bool(len(quotes) % 2)
        self._before = data[-1:]
        beside = np.concatenate([before, after])
        return bool(np.isin(beside, self._separators).all())

    def close(self) -> None:
        self._file.close()


def require_closed_quotes(lines: Iterable[str], where: str, dialect: CsvDialect) -> None:
    """Raises SchemaMismatch, with the line where it begins, for a quoted value that is not closed
    or is followed by other text."""
    numbered = _LinesWithQuotes(lines, dialect.quote or "")
    try:
        with without_csv_field_limit():
            for _ in dialect.reader(numbered, strict=True):
                numbered.row_start = 0
    except csv.Error as e:
        raise SchemaMismatch(
            f"{where}, line {numbered.row_start}: a quoted value is not closed, or text follows "
            "its closing quote; quote the whole value, and double each quote inside it"
        ) from e


def each_line_is_a_row(lines: bytes, dialect: CsvDialect) -> bool:
    """Whether no quoted value contains a line end, and all are closed."""
    if dialect.quote is None:
        return True
    quoted = [f"{line}\n" for line in lines.decode("latin-1").split("\n") if dialect.quote in line]
    try:
        with without_csv_field_limit():
            return sum(1 for _ in dialect.reader(quoted, strict=True)) == len(quoted)
    except csv.Error:
        return False


@contextlib.contextmanager
def without_csv_field_limit() -> Iterator[None]:
    """Lets the module `csv` accept values of any length, not only up to 128 KiB."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


class _LinesWithQuotes:
    """Iterates over the lines that contain a quote; the others do not affect the check.
    `row_start`: number of the line where the row that is being read begins."""

    def __init__(self, lines: Iterable[str], quote: str) -> None:
        self._lines = lines
        self._quote = quote
        self.row_start = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            if self._quote in line:
                self.row_start = self.row_start or number
                yield line.removeprefix(_UTF8_BOM).removeprefix(_BOM) if number == 1 else line
