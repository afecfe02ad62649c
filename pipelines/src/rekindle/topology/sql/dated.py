"""Texts that Spark reads as a TIMESTAMP: only those with a date, which mean the same for ever.

Spark reads '5:17' as a time of the day on which it is asked, so a replay on the next day would give
other rows. `only_dated` changes the calls that read a text of any form, so that such a text gives
NULL, as one that cannot be read does. Pure, by tokens, like the rest of the SQL.

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
from rekindle.topology.sql.tokens import first_of_operand, is_clock, tokenize

STARTS_WITH_YEAR = "^[^!-~]*[+-]?[0-9]{4}"
"""Spark takes a year of four digits or more, behind blanks; hours have two at most."""

_TIME_OF_DAY = re.compile(r"[^!-~]*(T|[0-9]{1,2}:)")

_CASTS = frozenset({"cast", "try_cast"})
_TYPES = frozenset({"timestamp", "timestamp_ltz"})
_READS_ANY_FORM = frozenset({"timestamp", "to_timestamp", "to_timestamp_ltz", "try_to_timestamp"})
"""With one argument; with a second one, the format, a missing date is always 1970-01-01."""
_READS_SCHEMA = frozenset({"from_csv", "from_json", "from_xml"})
_READS_VARIANT = frozenset({"try_variant_get", "variant_get"})


def only_dated(sql: str) -> str:
    """`sql` with NULL for texts without a date where they are read as a TIMESTAMP."""
    tokens = tokenize(sql)
    return _render(sql, tokens, _reads(tokens), 0, len(sql))


def may_lack_date(text: exp.Expr) -> bool:
    """Whether it is no literal that begins with a date, or one that is refused by its word."""
    inner = text.unnest()
    if not isinstance(inner, exp.Literal) or not inner.is_string:
        return True
    return re.match(STARTS_WITH_YEAR, inner.name) is None and not is_clock(inner.name)


def check_dates(sql: str, tree: exp.Expr) -> list[Problem]:
    """What is known to read the clock without knowing any column's type."""
    undated = [text for text in _cast_texts(tree) if _TIME_OF_DAY.match(text) is not None]
    what = "as a TIMESTAMP has no date, and Spark would take that of the clock"
    found = [
        Problem("", "NonDeterministic", f"'{text}' {what}", "write its date") for text in undated
    ]
    found += [_without_format(name) for name in _nested_reads(sql)]
    tokens = tokenize(sql)
    unread = (at for at in _colon_casts(tokens) if first_of_operand(tokens, at - 1) is None)
    return found + [_unclear(sql[tokens[at].start :]) for at in unread]


@dataclass(frozen=True, slots=True)
class _Read:
    """The tokens of what is read as a TIMESTAMP; `by_colons`: by `::`, not inside a call."""

    first: int
    last: int
    by_colons: bool = False


def _reads(tokens: Sequence[Token]) -> list[_Read]:
    """In the order of the text, outer ones first."""
    spans = (_argument(tokens, at) for at in range(len(tokens)))
    found = [_Read(*span) for span in spans if span is not None]
    for at in _colon_casts(tokens):
        first = first_of_operand(tokens, at - 1)
        if first is not None:
            found.append(_Read(first, at, by_colons=True))
    return sorted(found, key=lambda read: (read.first, -read.last))


def _colon_casts(tokens: Sequence[Token]) -> Iterator[int]:
    """Each `::` before a TIMESTAMP."""
    for at in range(1, len(tokens) - 1):
        timed = tokens[at + 1].text.lower() in _TYPES
        if tokens[at].token_type is TokenType.DCOLON and timed:
            yield at


def _render(
    sql: str, tokens: Sequence[Token], reads: Sequence[_Read], start: int, stop: int
) -> str:
    """The text from `start` to `stop`, in which these are read."""
    parts: list[str] = []
    left = deque(reads)
    while left:
        read = left.popleft()
        begins, ends = tokens[read.first].start, tokens[read.last - 1].end + 1
        parts.append(sql[start:begins])
        inside = []
        while left and left[0].first < read.last:
            inside.append(left.popleft())
        inner = _render(sql, tokens, inside, begins, ends)
        if read.by_colons:
            parts.append(f"({_guarded(inner)})")
        else:
            alone = _is_call_alone(tokens, read.first, read.last)
            parts.append(inner if alone else _guarded(inner))
        start = ends
    return "".join([*parts, sql[start:stop]])


def _guarded(text: str) -> str:
    """Spark resolves typeof() while it plans, and nothing is left of this for other types."""
    undated = f"NOT (CAST({text} AS STRING) RLIKE '{STARTS_WITH_YEAR}')"
    return f"CASE WHEN typeof({text}) LIKE 'string%' AND {undated} THEN NULL ELSE {text} END"


def _argument(tokens: Sequence[Token], at: int) -> tuple[int, int] | None:
    """The tokens of what is read as a TIMESTAMP, if a call at `at` reads any form."""
    name = tokens[at].text.lower()
    if name not in _CASTS | _READS_ANY_FORM or tokens[at].token_type is TokenType.STRING:
        return None
    if at + 1 >= len(tokens) or tokens[at + 1].token_type is not TokenType.L_PAREN:
        return None
    close = _closing(tokens, at + 1)
    if close is None or close == at + 2:
        return None
    level = list(_outermost(tokens, at + 2, close))
    if name in _CASTS:
        as_ = next((i for i in reversed(level) if tokens[i].token_type is TokenType.ALIAS), None)
        named = as_ is not None and close == as_ + 2 and tokens[as_ + 1].text.lower() in _TYPES
        return (at + 2, as_) if named and as_ is not None and as_ > at + 2 else None
    several = any(tokens[i].token_type is TokenType.COMMA for i in level)
    return None if several else (at + 2, close)


def _is_call_alone(tokens: Sequence[Token], first: int, last: int) -> bool:
    """Whether the argument is itself nothing but a TIMESTAMP that was read."""
    return _argument(tokens, first) is not None and _closing(tokens, first + 1) == last - 1


def _unclear(text: str) -> Problem:
    what = f"it cannot be told what is cast at {text[:40]!r}, and whether that has a date"
    return Problem("", "NonDeterministic", what, "write CAST(... AS TIMESTAMP)")


def _closing(tokens: Sequence[Token], opening: int) -> int | None:
    depth = 0
    for at in range(opening, len(tokens)):
        depth += _step(tokens[at])
        if depth == 0:
            return at
    return None


def _outermost(tokens: Sequence[Token], start: int, end: int) -> Iterator[int]:
    """The tokens between two places that stand in no parentheses there."""
    depth = 0
    for at in range(start, end):
        if depth == 0:
            yield at
        depth += _step(tokens[at])


def _step(token: Token) -> int:
    opens = token.token_type in (TokenType.L_PAREN, TokenType.L_BRACKET)
    closes = token.token_type in (TokenType.R_PAREN, TokenType.R_BRACKET)
    return int(opens) - int(closes)


def _cast_texts(tree: exp.Expr) -> Iterator[str]:
    for node in tree.find_all(exp.Cast):
        inner = node.this.unnest()
        if is_timestamp(node.to) and isinstance(inner, exp.Literal) and inner.is_string:
            yield str(inner.this)


def _nested_reads(sql: str) -> Iterator[str]:
    """Calls that read a TIMESTAMP inside a larger text, in no given format."""
    tokens = tokenize(sql)
    for at in range(len(tokens) - 1):
        name = tokens[at].text.lower()
        if name not in _READS_SCHEMA | _READS_VARIANT:
            continue
        close = _closing(tokens, at + 1) or at + 1
        inside = tokens[at + 2 : close]
        texts = [t.text.lower() for t in inside if t.token_type is TokenType.STRING]
        timed = any(re.search(r"\btimestamp(_ltz)?\b", text) for text in texts)
        if timed and "timestampformat" not in texts:
            yield name


def _without_format(name: str) -> Problem:
    hint = "read it as STRING, and CAST that AS TIMESTAMP: a text without a date gives NULL there"
    if name in _READS_SCHEMA:
        hint += ", or give map('timestampFormat', 'yyyy-MM-dd HH:mm:ss')"
    what = f"{name}() reads a TIMESTAMP without a date as one of today"
    return Problem("", "NonDeterministic", what, hint)
