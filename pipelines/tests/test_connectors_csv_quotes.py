"""Quotes that are seen to be closed while a file is read are closed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors.csv_quotes import CsvDialect, QuoteDetector, require_closed_quotes
from rekindle.errors import SchemaMismatch


def needs_check(text: str, size: int = 3, *, ascii_compatible: bool = True, **dialect: str) -> bool:
    file = io.BytesIO(text.encode())
    detector = QuoteDetector(file, CsvDialect(**dialect), ascii_compatible=ascii_compatible)
    while detector.read(size):
        pass
    return detector.needs_check


def is_closed(text: str) -> bool:
    try:
        lines = io.StringIO(text, newline="").readlines()
        require_closed_quotes(lines, "file", CsvDialect())
    except SchemaMismatch:
        return False
    return True


@given(st.text(alphabet='a,"\r\n', max_size=24), st.integers(1, 9))
def test_quotes_are_closed_where_no_check_is_needed(text: str, size: int) -> None:
    assert needs_check(text, size) or is_closed(text)


def test_an_open_quote_needs_a_check_before_the_end_is_read() -> None:
    detector = QuoteDetector(io.BytesIO(b'a,b\n"1,2\n'), CsvDialect(), ascii_compatible=True)
    detector.read(10)
    assert detector.needs_check


@given(
    st.lists(st.lists(st.text(alphabet="ab, \n", max_size=5), min_size=2, max_size=2), max_size=5),
    st.integers(1, 9),
)
def test_quotes_around_values_need_no_check(rows: list[list[str]], size: int) -> None:
    text = "".join(",".join(f'"{value}"' for value in row) + "\r\n" for row in rows)
    assert not needs_check(text, size)


@pytest.mark.parametrize(
    "text",
    ['"a', 'b,"a\n', '"a"b\n', '6" pipe\n', '"a""b"\n', 'a\n"', '""""', '\ufeff"a"\n'],
)
def test_other_quotes_need_a_check(text: str) -> None:
    assert needs_check(text, 1)
    assert needs_check(text, 100)


def test_an_escape_or_another_encoding_needs_a_check() -> None:
    assert needs_check('"a"\n', escape="\\")
    assert needs_check('"a"\n', ascii_compatible=False)
    assert not needs_check("a\n", ascii_compatible=False)


def test_a_file_without_quotes_needs_no_check() -> None:
    assert not needs_check("a,b\n1,2\n")
    assert not needs_check('a,6" pipe\n', quote="")
