"""Whether the quotes of a CSV file are as RFC 4180 writes them.

Arrow's reader takes what follows a stray quote, with all line ends, for one value: rows would be
lost in silence. The check reads a file again, and only one that has quotes at all.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rekindle.errors import SchemaMismatch

_UTF8_BOM = "\xef\xbb\xbf"  # as latin-1 reads it


class QuoteWatch:
    """A binary file for Arrow that remembers whether a quote was read from it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.quotes = False

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self.quotes = self.quotes or b'"' in data
        return data

    def close(self) -> None:
        self._file.close()


def require_closed_quotes(lines: Iterable[str], where: str) -> None:
    """Raises SchemaMismatch with the line in which a value in quotes begins that does not end, or
    is followed by other text. `lines` are read as latin-1, since other columns may be no UTF-8."""
    numbered = _Numbered(lines)
    limit = csv.field_size_limit(sys.maxsize)
    try:
        for _ in csv.reader(numbered, strict=True):
            numbered.first = 0
    except csv.Error as e:
        raise SchemaMismatch(
            f"{where}, line {numbered.first}: a value in quotes does not end, or text follows its "
            "closing quote; put the whole value in quotes, and write each quote inside of it twice"
        ) from e
    finally:
        csv.field_size_limit(limit)


class _Numbered:
    """The lines that have a quote: the others change nothing, neither in a value nor between two.
    `first` is the line of the first one of the row that is being read."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.first = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            if '"' in line:
                self.first = self.first or number
                yield line.removeprefix(_UTF8_BOM) if number == 1 else line
