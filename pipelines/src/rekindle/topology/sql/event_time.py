"""Parses `eventTime.expression`, which computes a source's event time from its raw columns.

A small subset of Spark SQL with the same semantics: `to_timestamp`, `to_utc_timestamp`,
`timestamp_seconds`, `timestamp_millis`, `timestamp_micros`, `concat` and `||`, over columns and
string literals. It is evaluated when a source is read (`rekindle.connectors.event_time`), without
Spark. Pure: text and schema in, a typed tree out.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, assert_never

from rekindle.errors import Problem
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import (
    DataType,
    Scalar,
    Schema,
    is_floating,
    is_integer,
    type_to_ddl,
)
from rekindle.topology.sql.time_formats import TimeFormat, parse_format
from rekindle.topology.sql.time_zones import find_zone, unknown_zone

_UNIT_US_BY_FUNCTION = {
    "timestamp_seconds": 1_000_000,
    "timestamp_millis": 1_000,
    "timestamp_micros": 1,
}
_FUNCTIONS = ("to_timestamp", "to_utc_timestamp", *_UNIT_US_BY_FUNCTION, "concat")
_HINT = "write it like to_timestamp(started, 'dd/MM/yyyy HH:mm') or timestamp_millis(ms)"
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*)|`(?P<name>(?:[^`]|``)+)`|'(?P<text>(?:[^']|'')*)'"
    r"|(?P<mark>\|\||[(),]))"
)
_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*\(")
_QUOTED = re.compile(r"'[^']*'|`[^`]*`")
_FUNCTIONS_OF_PARTS = ("make_timestamp", "make_date", "make_timestamp_ltz")


@dataclass(frozen=True, slots=True)
class Column:
    """A raw column."""

    name: str
    type: DataType | None


@dataclass(frozen=True, slots=True)
class Text:
    """A string literal."""

    value: str
    type: DataType = Scalar.STRING


@dataclass(frozen=True, slots=True)
class Concat:
    """The concatenation of strings and integers; NULL if one of them is."""

    parts: tuple[Expression, ...]
    type: DataType = Scalar.STRING


@dataclass(frozen=True, slots=True)
class UnixTime:
    """A time as the number of units, of `unit_us` microseconds each, since 1970, UTC."""

    number: Column
    unit_us: int
    type: DataType = Scalar.TIMESTAMP


@dataclass(frozen=True, slots=True)
class ParsedTime:
    """A string parsed as a time, UTC if it has no zone; ISO 8601 without `format`."""

    text: Expression
    format: TimeFormat | None
    type: DataType = Scalar.TIMESTAMP


@dataclass(frozen=True, slots=True)
class LocalTime:
    """A local time of a zone, converted to UTC. A time that occurs twice (at the end of daylight
    saving time) is taken as the first of the two; one that does not occur (at its start) is moved
    forward by the skipped hour."""

    time: Expression
    zone: dt.tzinfo
    type: DataType = Scalar.TIMESTAMP


Expression = Column | Text | Concat | UnixTime | ParsedTime | LocalTime


def columns_of(expression: Expression | None) -> set[str]:
    """The names of the raw columns that it reads."""
    match expression:
        case Column(name):
            return {name}
        case Concat(parts):
            return set().union(*map(columns_of, parts))
        case UnixTime(inner) | ParsedTime(inner) | LocalTime(inner):
            return columns_of(inner)
        case Text() | None:
            return set()
        case _:
            assert_never(expression)


def parse_event_time(text: str, schema: Schema) -> Expression:
    """The expression, whose type is TIMESTAMP. Raises InvalidSql."""
    parser = _Parser(text, schema)
    found = parser.expression()
    parser.end()
    if found.type is Scalar.DATE:
        found = ParsedTime(found, None)
    if found.type is not Scalar.TIMESTAMP:
        what = f"{text!r} is {type_to_ddl(found.type)}, not a TIMESTAMP"
        _refuse(what, _to_timestamp_hint(found))
    return found


def _to_timestamp_hint(found: Expression) -> str:
    if is_integer(found.type):
        name = found.name if isinstance(found, Column) else "n"
        return f"write timestamp_seconds({name}) or timestamp_millis({name})"
    return _HINT


def _refuse(message: str, hint: str = _HINT) -> NoReturn:
    raise InvalidSql([Problem("", "InvalidExpression", message, hint)])


def _require_known(function: str) -> None:
    if function == "cast":
        _refuse("CAST cannot be used for event time", "write to_timestamp(column)")
    if function in _FUNCTIONS_OF_PARTS:
        what = f"the function {function} cannot be used for event time"
        hint = "join the columns: to_timestamp(concat(year, '-', month, '-', day), 'yyyy-M-d')"
        raise InvalidSql([Problem("", "UnknownFunction", what, hint)])
    if function not in _FUNCTIONS:
        what = f"the function {function} cannot be used for event time"
        raise InvalidSql([Problem("", "UnknownFunction", what, nearest(function, _FUNCTIONS))])


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str, schema: Schema) -> None:
        self._text = text
        self._schema = schema
        self._tokens = self._scan()
        self._at = 0

    def _scan(self) -> list[re.Match[str]]:
        tokens, at = [], 0
        while at < len(self._text.rstrip()):
            match = _TOKEN.match(self._text, at)
            if match is None:
                found = self._text[at:].lstrip()
                for call in _CALL.finditer(_QUOTED.sub("", self._text)):
                    _require_known(call[1].lower())
                hint = (
                    "numbers and arithmetic cannot be used; write a name with other characters "
                    "than a-z, 0-9 and _ in backquotes"
                )
                _refuse(f"{self._text!r}: unexpected {found[0]!r} at {found[:20]!r}", hint)
            tokens.append(match)
            at = match.end()
        return tokens

    def _take(self, mark: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at]["mark"] == mark:
            self._at += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            _refuse(f"{self._text!r}: expected {mark} {self._place()}")

    def _place(self) -> str:
        if self._at == len(self._tokens):
            return "at the end"
        return f"before {self._tokens[self._at][0].strip()!r}"

    def end(self) -> None:
        if self._at < len(self._tokens):
            _refuse(f"{self._text!r}: the expression should end {self._place()}")

    def expression(self) -> Expression:
        parts = [self._term()]
        while self._take("||"):
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else _concat(parts)

    def _term(self) -> Expression:
        if self._take("("):
            inner = self.expression()
            self._expect(")")
            return inner
        if self._at == len(self._tokens) or self._tokens[self._at]["mark"]:
            _refuse(f"{self._text!r}: expected a column or a function {self._place()}")
        token = self._tokens[self._at]
        self._at += 1
        if token["text"] is not None:
            return Text(token["text"].replace("''", "'"))
        word = token["word"]
        if word is not None and self._take("("):
            return self._call(word.lower())
        return self._column(word or token["name"].replace("``", "`"))

    def _column(self, name: str) -> Column:
        if name not in self._schema.names:
            hint = nearest(name, self._schema.names)
            raise InvalidSql([Problem("", "UnknownColumn", f"unknown column {name}", hint)])
        return Column(name, self._schema.field(name).type)

    def _call(self, name: str) -> Expression:
        _require_known(name)
        arguments = [self.expression()]
        while self._take(","):
            arguments.append(self.expression())
        self._expect(")")
        if name == "concat":
            return _concat(arguments)
        if name in _UNIT_US_BY_FUNCTION:
            return _unix_time(name, arguments)
        return _to_timestamp(arguments) if name == "to_timestamp" else _local(arguments)


def _concat(parts: Sequence[Expression]) -> Concat:
    for part in parts:
        if not (part.type is Scalar.STRING or is_integer(part.type)):
            what = (
                f"{_shown(part)} is {type_to_ddl(part.type)}, and concat takes STRING and integers"
            )
            _refuse(what, "declare the column STRING in the schema")
    return Concat(tuple(parts))


def _unix_time(name: str, arguments: Sequence[Expression]) -> UnixTime:
    number = arguments[0]
    if len(arguments) != 1 or not isinstance(number, Column):
        _refuse(f"{name} takes one column", f"write it like {name}(column)")
    is_fraction = name == "timestamp_seconds" and is_floating(number.type)
    if not (is_fraction or is_integer(number.type)):
        what = f"{number.name} is {type_to_ddl(number.type)}, and {name} takes a whole number"
        _refuse(what, "declare the column BIGINT in the schema")
    return UnixTime(number, _UNIT_US_BY_FUNCTION[name])


def _to_timestamp(arguments: Sequence[Expression]) -> ParsedTime:
    text, *rest = arguments
    if len(rest) > 1 or any(not isinstance(a, Text) for a in rest):
        _refuse("to_timestamp takes a column and a format in quotes")
    accepted = (Scalar.STRING,) if rest else (Scalar.STRING, Scalar.TIMESTAMP, Scalar.DATE)
    if text.type not in accepted:
        what = f"{_shown(text)} is {type_to_ddl(text.type)}, and to_timestamp takes a STRING"
        _refuse(what, _to_timestamp_hint(text) if not rest else "declare it STRING in the schema")
    format = next((parse_format(a.value) for a in rest if isinstance(a, Text)), None)
    return ParsedTime(text, format)


def _local(arguments: Sequence[Expression]) -> LocalTime:
    time, zone = arguments[0], arguments[-1]
    if len(arguments) != 2 or not isinstance(zone, Text):
        hint = "write it like to_utc_timestamp(to_timestamp(t, 'd/M/yyyy HH:mm'), 'Europe/Paris')"
        _refuse("to_utc_timestamp takes a time and a zone in quotes", hint)
    if time.type is not Scalar.TIMESTAMP:
        time = _to_timestamp([time])
    if isinstance(time, ParsedTime) and time.format is not None and time.format.has_zone:
        what = f"the format {time.format.pattern!r} already contains a zone"
        _refuse(what, "use to_timestamp alone")
    return LocalTime(time, _zone(zone.value))


def _zone(name: str) -> dt.tzinfo:
    zone = find_zone(name)
    if zone is None:
        raise InvalidSql([unknown_zone(name)])
    return zone


def _shown(part: Expression) -> str:
    return part.name if isinstance(part, Column) else "an argument"
