"""Makes casts of strings to TIMESTAMP deterministic: strings without a date give NULL.

Spark casts '5:17' to that time of the current day, so a replay on the next day would give other
rows. `time_without_date_as_null` rewrites casts and calls that parse strings without a given
format, so that a string without a date gives NULL, like an invalid one. Pure; works on tokens.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from rekindle.errors import Problem
from rekindle.topology.sql.inference import is_timestamp
from rekindle.topology.sql.tokens import first_of_operand, is_clock_literal, tokenize

STARTS_WITH_YEAR = "^[^!-~]*[+-]?[0-9]{4}"
"""Spark's dates begin with a year of four digits or more, after blanks; hours have at most two."""

_TIME_OF_DAY = re.compile(r"[^!-~]*(T|[0-9]{1,2}:)")

_CASTS = frozenset({"cast", "try_cast"})
_TIMESTAMP_TYPES = frozenset({"timestamp", "timestamp_ltz"})
_PARSES_ANY_FORMAT = frozenset(
    {"timestamp", "to_timestamp", "to_timestamp_ltz", "try_to_timestamp"}
)
"""Functions that parse a string of any format if it is their only argument. With a format as the
second, a missing date is always 1970-01-01."""
_TAKES_SCHEMA = frozenset({"from_csv", "from_json", "from_xml"})
_TAKES_TYPE = frozenset({"try_variant_get", "variant_get"})


def time_without_date_as_null(sql: str) -> str:
    """`sql` that gives NULL for strings without a date where they are cast to TIMESTAMP. Without a
    comment or semicolon at its end, since text is written after it."""
    tokens = tokenize(sql)
    words = [token for token in tokens if token.token_type is not TokenType.SEMICOLON]
    end = words[-1].end + 1 if words else len(sql)
    return _render(sql, tokens, _operands(tokens), 0, end)


def may_lack_date(text: exp.Expr) -> bool:
    """False for literals that begin with a date, and for those that are refused anyway ('now')."""
    inner = text.unnest()
    if not isinstance(inner, exp.Literal) or not inner.is_string:
        return True
    return re.match(STARTS_WITH_YEAR, inner.name) is None and not is_clock_literal(inner.name)


def check_casts_without_date(sql: str, tree: exp.Expr) -> list[Problem]:
    """Problems of casts that certainly use the clock, whatever the types of columns are."""
    without_date = [text for text in _cast_texts(tree) if _TIME_OF_DAY.match(text) is not None]
    what = "as a TIMESTAMP has no date, and Spark would use the current one"
    found = [
        Problem("", "NonDeterministic", f"'{text}' {what}", "write a date too")
        for text in without_date
    ]
    found += [_without_format(name) for name in _nested_parses(sql)]
    tokens = tokenize(sql)
    unclear = (at for at in _colon_casts(tokens) if first_of_operand(tokens, at - 1) is None)
    return found + [_unclear(sql[tokens[at].start :]) for at in unclear]


@dataclass(frozen=True, slots=True)
class _Operand:
    """The tokens of an operand that is cast to TIMESTAMP, from `first` to the one before `end`.
    `by_colons`: by `::`, not by a call."""

    first: int
    end: int
    by_colons: bool = False


def _operands(tokens: Sequence[Token]) -> list[_Operand]:
    """All operands of casts to TIMESTAMP in the order of the text, outer ones before those inside
    them."""
    spans = (_operand_of_call(tokens, at) for at in range(len(tokens)))
    found = [_Operand(*span) for span in spans if span is not None]
    for at in _colon_casts(tokens):
        first = first_of_operand(tokens, at - 1)
        if first is not None:
            found.append(_Operand(first, at, by_colons=True))
    return sorted(found, key=lambda operand: (operand.first, -operand.end))


def _colon_casts(tokens: Sequence[Token]) -> Iterator[int]:
    """The index of each `::` before a TIMESTAMP."""
    for at in range(1, len(tokens) - 1):
        names_timestamp = tokens[at + 1].text.lower() in _TIMESTAMP_TYPES
        if tokens[at].token_type is TokenType.DCOLON and names_timestamp:
            yield at


def _render(
    sql: str, tokens: Sequence[Token], operands: Sequence[_Operand], start: int, stop: int
) -> str:
    """The text from `start` to `stop`, in which these operands give NULL without a date
    (`_guarded`)."""
    parts: list[str] = []
    left = deque(operands)
    while left:
        operand = left.popleft()
        begins, ends = tokens[operand.first].start, tokens[operand.end - 1].end + 1
        parts.append(sql[start:begins])
        inside = []
        while left and left[0].first < operand.end:
            inside.append(left.popleft())
        inner = _render(sql, tokens, inside, begins, ends)
        if operand.by_colons:
            parts.append(f"({_guarded(inner)})")
        else:
            alone = _is_call_alone(tokens, operand.first, operand.end)
            parts.append(inner if alone else _guarded(inner))
        start = ends
    return "".join([*parts, sql[start:stop]])


def _guarded(text: str) -> str:
    """Spark evaluates typeof() when it plans: for other types the CASE is optimised away."""
    without_date = f"NOT (CAST({text} AS STRING) RLIKE '{STARTS_WITH_YEAR}')"
    return f"CASE WHEN typeof({text}) LIKE 'string%' AND {without_date} THEN NULL ELSE {text} END"


def _operand_of_call(tokens: Sequence[Token], at: int) -> tuple[int, int] | None:
    """The first token of the operand and the one after it, if the call at `at` casts to TIMESTAMP
    without a format."""
    name = tokens[at].text.lower()
    if name not in _CASTS | _PARSES_ANY_FORMAT or tokens[at].token_type is TokenType.STRING:
        return None
    if at + 1 >= len(tokens) or tokens[at + 1].token_type is not TokenType.L_PAREN:
        return None
    close = _closing(tokens, at + 1)
    if close is None or close == at + 2:
        return None
    level = list(_outermost(tokens, at + 2, close))
    if name in _CASTS:
        as_ = next((i for i in reversed(level) if tokens[i].token_type is TokenType.ALIAS), None)
        if as_ is None or as_ == at + 2 or close != as_ + 2:
            return None
        return (at + 2, as_) if tokens[as_ + 1].text.lower() in _TIMESTAMP_TYPES else None
    several = any(tokens[i].token_type is TokenType.COMMA for i in level)
    return None if several else (at + 2, close)


def _is_call_alone(tokens: Sequence[Token], first: int, end: int) -> bool:
    """Whether the operand is itself only a cast to TIMESTAMP."""
    return _operand_of_call(tokens, first) is not None and _closing(tokens, first + 1) == end - 1


def _unclear(text: str) -> Problem:
    what = f"cannot determine what is cast at {text[:40]!r}, and whether it has a date"
    return Problem("", "NonDeterministic", what, "write CAST(... AS TIMESTAMP)")


def _closing(tokens: Sequence[Token], opening: int) -> int | None:
    depth = 0
    for at in range(opening, len(tokens)):
        depth += _depth_change(tokens[at])
        if depth == 0:
            return at
    return None


def _outermost(tokens: Sequence[Token], start: int, end: int) -> Iterator[int]:
    """The indices from `start` to `end` of tokens that are not inside parentheses."""
    depth = 0
    for at in range(start, end):
        if depth == 0:
            yield at
        depth += _depth_change(tokens[at])


def _depth_change(token: Token) -> int:
    opens = token.token_type in (TokenType.L_PAREN, TokenType.L_BRACKET)
    closes = token.token_type in (TokenType.R_PAREN, TokenType.R_BRACKET)
    return int(opens) - int(closes)


def _cast_texts(tree: exp.Expr) -> Iterator[str]:
    for node in tree.find_all(exp.Cast):
        inner = node.this.unnest()
        if is_timestamp(node.to) and isinstance(inner, exp.Literal) and inner.is_string:
            yield str(inner.this)


def _nested_parses(sql: str) -> Iterator[str]:
    """Calls that parse a TIMESTAMP inside a larger string, without a format."""
    tokens = tokenize(sql)
    for at in range(len(tokens) - 1):
        name = tokens[at].text.lower()
        if name not in _TAKES_SCHEMA | _TAKES_TYPE:
            continue
        close = _closing(tokens, at + 1) or at + 1
        inside = tokens[at + 2 : close]
        texts = [t.text.lower() for t in inside if t.token_type is TokenType.STRING]
        names_timestamp = any(re.search(r"\btimestamp(_ltz)?\b", text) for text in texts)
        if names_timestamp and "timestampformat" not in texts:
            yield name


def _without_format(name: str) -> Problem:
    hint = "read it as STRING, and CAST that AS TIMESTAMP: without a date it gives NULL"
    if name in _TAKES_SCHEMA:
        hint += ", or give map('timestampFormat', 'yyyy-MM-dd HH:mm:ss')"
    what = f"{name}() gives a TIMESTAMP without a date the current date"
    return Problem("", "NonDeterministic", what, hint)
