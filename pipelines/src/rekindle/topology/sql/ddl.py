"""Parses the schema of a source, which is written in Spark's DDL.

Has its own grammar, because sqlglot accepts types that Spark does not have and changes spelling.
Supports the types that are equivalent in Spark, Arrow, Parquet and JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from rekindle.errors import Problem
from rekindle.topology.problems import NOT_SUPPORTED_YET, TOO_DEEP, InvalidSql, nearest
from rekindle.topology.schema import Array, DataType, Decimal, Field, Scalar, Schema, Struct

_SIMPLE = {
    "string": Scalar.STRING,
    "bigint": Scalar.BIGINT,
    "long": Scalar.BIGINT,
    "int": Scalar.INT,
    "integer": Scalar.INT,
    "smallint": Scalar.SMALLINT,
    "short": Scalar.SMALLINT,
    "tinyint": Scalar.TINYINT,
    "byte": Scalar.TINYINT,
    "double": Scalar.DOUBLE,
    "float": Scalar.FLOAT,
    "real": Scalar.FLOAT,
    "boolean": Scalar.BOOLEAN,
    "timestamp": Scalar.TIMESTAMP,
    "timestamp_ltz": Scalar.TIMESTAMP,
    "date": Scalar.DATE,
    "binary": Scalar.BINARY,
}
_DECIMAL = frozenset({"decimal", "dec", "numeric"})
_UNSUPPORTED_TYPE_HINTS = {
    "map": "use ARRAY<STRUCT<key: ..., value: ...>>, which map_entries() gives",
    "timestamp_ntz": "use TIMESTAMP",
    "varchar": "use STRING",
    "char": "use STRING",
    "character": "use STRING",
    "interval": "use BIGINT of microseconds, as unix_micros(b) - unix_micros(a)",
    "variant": "use STRING and from_json",
    "void": "use STRING, as CAST(NULL AS STRING)",
    "time": "use STRING",
}
_TYPE_SYNONYMS = {
    **dict.fromkeys(("text", "str", "object"), "STRING"),
    **dict.fromkeys(("datetime", "timestamptz", "datetime64"), "TIMESTAMP"),
    **dict.fromkeys(("bytes", "bytea", "blob"), "BINARY"),
    "int64": "BIGINT",
    "int32": "INT",
    "float64": "DOUBLE",
    "float32": "FLOAT",
}
"""Types of other databases and of data frames, and their equivalents in Spark."""
_CONSTRAINTS = ("not", "null", "comment", "default", "generated", "collate", "primary", "unique")
_MAX_PRECISION = 38
_MAX_DEPTH = 32
"""Arrow supports 50 nested arrays in Parquet files, and 64 in IPC streams."""
_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z0-9_]+)|`(?P<quoted>(?:[^`]|``)+)`|(?P<mark>[<>(),:]))")


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    position: int  # of its first character, counted from 1
    quoted: bool = False


def hint_for(type_name: str) -> str:
    """What to use instead of an unsupported type, given Spark's name of it."""
    hints = _UNSUPPORTED_TYPE_HINTS.items()
    return next((hint for name, hint in hints if type_name.lower().startswith(name)), "")


def ddl_to_schema(ddl: str) -> Schema:
    """`"origin STRING, delay DOUBLE"` -> schema; raises InvalidSql with the position in the
    text."""
    parser = _Parser(ddl)
    fields = [parser.field()]
    while parser.take(","):
        fields.append(parser.field())
    parser.end()
    lower = [f.name.lower() for f in fields]
    twice = [f.name for f in fields if lower.count(f.name.lower()) > 1]
    if twice:
        raise InvalidSql([Problem("", "DuplicateColumn", f"column {twice[-1]} occurs twice")])
    return Schema(tuple(fields))


class _Parser:
    """Recursive descent over the tokens of one DDL text."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens = list(self._scan())
        self._at = 0
        self._depth = 0

    def _scan(self) -> Iterator[_Token]:
        at = 0
        end = len(self._ddl.rstrip())
        while at < end:
            match = _TOKEN.match(self._ddl, at)
            if not match:
                self._fail(f"unexpected {self._ddl[at:].lstrip()[:1]!r}", at + 1)
            quoted = match["quoted"]
            text = match["word"] or match["mark"] or quoted.replace("``", "`")
            position = match.end() - len(match[0].lstrip()) + 1
            yield _Token(text, position, quoted is not None)
            at = match.end()

    def _fail(self, message: str, position: int) -> NoReturn:
        hint = "write it like: origin STRING, delay DOUBLE, tags ARRAY<STRING>"
        raise InvalidSql([Problem("", "InvalidSchema", f"{message} at character {position}", hint)])

    def _peek(self) -> _Token:
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        return _Token("", len(self._ddl) + 1)

    def take(self, mark: str) -> bool:
        if self._peek().text == mark and not self._peek().quoted:
            self._at += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self.take(mark):
            found = self._peek()
            what = f"found {found.text!r}" if found.text else "the text ends"
            self._fail(f"expected {mark!r}, {what}", found.position)

    def _word(self, what: str) -> _Token:
        token = self._peek()
        if not token.text or (not token.quoted and token.text in "<>(),:"):
            found = f"found {token.text!r}" if token.text else "the text ends"
            self._fail(f"expected {what}, {found}", token.position)
        self._at += 1
        return token

    def end(self) -> None:
        token = self._peek()
        if token.text:
            what = ""
            if token.text.lower() in _CONSTRAINTS:
                what = "column constraints and comments cannot be used: "
            elif token.quoted or token.text not in "<>(),:":
                what = "a comma is missing: "
            self._fail(f"{what}unexpected {token.text!r}", token.position)

    def field(self) -> Field:
        name = self._word("a column name").text
        self.take(":")
        return Field(name, self._type())

    def _type(self) -> DataType:
        token = self._word("a type")
        name = token.text.lower()
        if name in _SIMPLE:
            return _SIMPLE[name]
        if name in _DECIMAL:
            return self._decimal()
        if name in ("array", "struct"):
            return self._nested(name, token.position)
        if name in _UNSUPPORTED_TYPE_HINTS:
            what = f"the type {token.text} at character {token.position} is not supported yet"
            raise InvalidSql([Problem("", NOT_SUPPORTED_YET, what, _UNSUPPORTED_TYPE_HINTS[name])])
        hint = nearest(name, [t.upper() for t in (*_SIMPLE, "decimal", "array", "struct")])
        if name in _TYPE_SYNONYMS:
            hint = f"use {_TYPE_SYNONYMS[name]}"
        what = f"unknown type {token.text} at character {token.position}"
        raise InvalidSql([Problem("", "InvalidSchema", what, hint)])

    def _nested(self, name: str, position: int) -> DataType:
        if self._depth == _MAX_DEPTH:
            what = f"types are nested more than {_MAX_DEPTH} deep at character {position}"
            raise InvalidSql([Problem("", TOO_DEEP, what, "use separate columns, or a STRING")])
        self._depth += 1
        data_type = self._struct() if name == "struct" else self._array()
        self._depth -= 1
        return data_type

    def _array(self) -> DataType:
        self._expect("<")
        element = self._type()
        self._expect(">")
        return Array(element)

    def _struct(self) -> DataType:
        self._expect("<")
        fields = [self.field()]
        while self.take(","):
            fields.append(self.field())
        self._expect(">")
        return Struct(tuple(fields))

    def _decimal(self) -> DataType:
        precision, scale = 10, 0
        if self.take("("):
            precision = self._number()
            scale = self._number() if self.take(",") else 0
            self._expect(")")
        if not (1 <= precision <= _MAX_PRECISION and scale <= precision):
            self._fail(f"DECIMAL({precision}, {scale}) is out of range", self._peek().position)
        return Decimal(precision, scale)

    def _number(self) -> int:
        token = self._word("a number")
        if not token.text.isdigit():
            self._fail(f"expected a number, found {token.text!r}", token.position)
        return int(token.text)
