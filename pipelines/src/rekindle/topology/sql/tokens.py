"""Finds the functions that SQL calls from its tokens, with names as written.

sqlglot's tree replaces synonyms (`now()` becomes `CURRENT_TIMESTAMP()`), so it does not have the
name that the user wrote, nor whether Spark knows it.

Design: docs/design/compilation.md#row-wise-sql.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokenizer_core import Token, TokenType

from rekindle.errors import Problem
from rekindle.topology.problems import NOT_SUPPORTED_YET, TOO_DEEP, InvalidSql, nearest
from rekindle.topology.sql import functions

DIALECT = "spark"
_PARSER_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What sqlglot raises besides its own errors, when calls lack arguments."""
_UNSPECIFIC = "Invalid expression / Unexpected token"
"""sqlglot's message for most errors."""
MAX_DEPTH = 100
"""Maximum depth of a syntax tree, since functions here, in sqlglot and in Spark are recursive.
sqlglot allows fewer nested parentheses."""
MAX_UNKNOWN = 20
"""Maximum number of unknown names of one kind that are reported: finding a similar name for the
hint takes milliseconds, and the operator validates all topologies in one thread."""
CLOCK_LITERALS = frozenset({"now", "today", "tomorrow", "yesterday"})
_WITH_LENGTH = frozenset({"char", "character", "varchar"})
_BEFORE_LIST = frozenset({"like", "ilike", "rlike"})
_LISTS = frozenset({"any", "all", "some"})  # LIKE ANY (...) is not an aggregate
_ORDERED = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between)
_TYPED_LITERALS = frozenset({"date", "timestamp", "timestamp_ltz", "timestamp_ntz", "x"})
_NOT_CALLS = frozenset(
    """
    all and as between by case distinct div else end escape except exists filter from group having
    ilike in is like not on or order over partition rlike select then using values view when where
    union intersect minus with limit join sort cluster distribute tablesample
    """.split()  # noqa: SIM905 - a table of words
)


@dataclass(frozen=True, slots=True)
class Call:
    """A function call: its name in lower case and whether it has arguments."""

    name: str
    has_arguments: bool


def quote(name: str) -> str:
    """A name as a Spark identifier."""
    return "`" + name.replace("`", "``") + "`"


def parse(sql: str) -> exp.Expr:
    """The single statement of `sql`; raises InvalidSql with line and column."""
    try:
        statements = [s for s in sqlglot.parse(sql, dialect=DIALECT) if s is not None]
    except ParseError as error:
        raise InvalidSql([_parse_problem(error)]) from error
    except RecursionError as error:
        raise InvalidSql([too_deep()]) from error
    except (SqlglotError, *_PARSER_ERRORS) as error:
        raise InvalidSql([Problem("", "SqlDoesNotParse", f"does not parse: {error}")]) from error
    if len(statements) != 1:
        what = "is empty" if not statements else "has more than one statement"
        raise InvalidSql([Problem("", "SqlDoesNotParse", what, "write exactly one SELECT")])
    _refuse_trailing_commas(sql)
    if depth(statements[0], count_operator_chains=False) > MAX_DEPTH:
        raise InvalidSql([too_deep()])
    return statements[0]


def depth(tree: exp.Expr, *, count_operator_chains: bool) -> int:
    """Number of nodes from the root to the deepest leaf. Without `count_operator_chains`,
    `a + b + c` is as deep as `a + b`: sqlglot processes those in a loop."""
    deepest, left = 0, [(tree, 1)]
    while left:
        node, at = left.pop()
        deepest = max(deepest, at)
        for child in node.iter_expressions():
            chained = isinstance(node, exp.Binary) and type(child) is type(node)
            left.append((child, at if chained and not count_operator_chains else at + 1))
    return deepest


def too_deep() -> Problem:
    hint = "write a part of it as a separate operator"
    return Problem("", TOO_DEEP, "expressions are nested too deep", hint)


def _refuse_trailing_commas(sql: str) -> None:
    """sqlglot accepts `SELECT a, FROM t`; Spark does not."""
    tokens = tokenize(sql)
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        ends = after is None or after.token_type in (TokenType.FROM, TokenType.R_PAREN)
        if token.token_type is TokenType.COMMA and ends:
            what = f"does not parse at line {token.line}, column {token.col}, near ','"
            raise InvalidSql([Problem("", "SqlDoesNotParse", what, "remove the comma")])


def _parse_problem(error: ParseError) -> Problem:
    first = error.errors[0] if error.errors else {}
    where = f" at line {first.get('line')}, column {first.get('col')}" if first else ""
    near = f", near {first['highlight']!r}" if first.get("highlight") else ""
    what = str(first.get("description") or error).rstrip(".").replace(_UNSPECIFIC, "")
    return Problem("", "SqlDoesNotParse", f"does not parse{where}{near}{what and f': {what}'}")


def tokenize(sql: str) -> list[Token]:
    return list(_tokens(sql))


@functools.lru_cache(maxsize=4)
def _tokens(sql: str) -> tuple[Token, ...]:
    """Cached, since each check goes through the tokens of the same statement."""
    return tuple(sqlglot.tokenize(sql, read=DIALECT))


def calls(sql: str) -> Iterator[Call]:
    """Every name before an opening parenthesis, in lower case, in order."""
    tokens = tokenize(sql)
    for at in range(len(tokens) - 1):
        name = tokens[at].text.lower()
        if tokens[at + 1].token_type is not TokenType.L_PAREN or not _is_word(tokens[at]):
            continue
        previous = tokens[at - 1].text.lower() if at else ""
        if name in _NOT_CALLS or previous == "as":
            continue
        if previous in _BEFORE_LIST and name in _LISTS:
            continue
        closed = at + 2 < len(tokens) and tokens[at + 2].token_type is TokenType.R_PAREN
        yield Call(name, has_arguments=not closed)


def bare_words(sql: str) -> Iterator[str]:
    """Words that are not function names, qualified names or aliases."""
    tokens = tokenize(sql)
    for at, token in enumerate(tokens):
        after = tokens[at + 1].token_type if at + 1 < len(tokens) else None
        before = tokens[at - 1].text.lower() if at else ""
        if _is_word(token) and token.token_type is not TokenType.IDENTIFIER:
            if after in (TokenType.L_PAREN, TokenType.DOT) or before in (".", "as"):
                continue
            yield token.text.lower()


def first_of_operand(tokens: Sequence[Token], last: int) -> int | None:
    """The first token of the operand of a `::` after the token `last`; None if that is unclear.
    Only dots, calls, subscripts and other `::` have a higher precedence."""
    first = _first_of_primary(tokens, last)
    while first is not None and first >= 2:
        if tokens[first - 1].token_type is TokenType.COLON:
            return None
        if tokens[first - 1].token_type not in (TokenType.DOT, TokenType.DCOLON):
            break
        first = _first_of_primary(tokens, first - 2)
    return first


def _first_of_primary(tokens: Sequence[Token], last: int) -> int | None:
    match tokens[last].token_type:
        case TokenType.R_PAREN:
            opening = _opening(tokens, last, TokenType.L_PAREN, TokenType.R_PAREN)
            called = opening is not None and opening > 0 and _is_called(tokens[opening - 1])
            return opening - 1 if opening is not None and called else opening
        case TokenType.R_BRACKET:
            opening = _opening(tokens, last, TokenType.L_BRACKET, TokenType.R_BRACKET)
            return first_of_operand(tokens, opening - 1) if opening else None
        case TokenType.END:
            return _opening(tokens, last, TokenType.CASE, TokenType.END)
        case TokenType.STRING:
            typed = last > 0 and tokens[last - 1].text.lower() in _TYPED_LITERALS
            adjacent = last > 0 and tokens[last - 1].token_type is TokenType.STRING
            return None if adjacent else last - typed
        case TokenType.NUMBER | TokenType.IDENTIFIER:
            return last
        case _:
            return last if _is_word(tokens[last]) else None


def _opening(tokens: Sequence[Token], last: int, opens: TokenType, closes: TokenType) -> int | None:
    depth = 0
    for at in range(last, -1, -1):
        depth += (tokens[at].token_type is closes) - (tokens[at].token_type is opens)
        if depth == 0:
            return at
    return None


def _is_called(token: Token) -> bool:
    return _is_word(token) and token.text.lower() not in _NOT_CALLS


def _is_word(token: Token) -> bool:
    if token.token_type in (TokenType.STRING, TokenType.NUMBER):
        return False
    return token.text.replace("_", "a").isalnum() and not token.text[0].isdigit()


def check_functions(sql: str, tree: exp.Expr, columns: Iterable[str]) -> list[Problem]:
    """Problems of functions that no operator may call: unknown and non-deterministic ones. Words in
    `columns` are columns, not functions without parentheses."""
    found: list[Problem] = []
    unknown: set[str] = set()
    column_names = {c.lower() for c in columns}
    for call in calls(sql):
        reads_clock = call.name in functions.CLOCK_WITHOUT_ARGUMENTS and not call.has_arguments
        if call.name in functions.NON_DETERMINISTIC or reads_clock:
            found.append(_non_deterministic(f"{call.name}()"))
        elif not (call.name in functions.KNOWN or call.name in unknown):
            unknown.add(call.name)
            if len(unknown) > MAX_UNKNOWN:
                break
            hint = nearest(call.name, functions.KNOWN)
            found.append(Problem("", "UnknownFunction", f"unknown function {call.name}()", hint))
    found += [
        _non_deterministic(word)
        for word in bare_words(sql)
        if word in functions.WITHOUT_PARENTHESES and word not in column_names
    ]
    texts = [*_time_arguments(sql), *_cast_or_compared(tree)]
    found += [
        _non_deterministic(f"'{text}' as a point in time")
        for text in texts
        if is_clock_literal(text)
    ]
    found += [_length_problem(text) for text in _types_with_length(sql)]
    return list(dict.fromkeys(found))


def _types_with_length(sql: str) -> Iterator[str]:
    """Types with a length that Spark ignores in a CAST, like VARCHAR(5)."""
    tokens = tokenize(sql)
    for at in range(1, len(tokens) - 2):
        called = tokens[at + 1].token_type is TokenType.L_PAREN
        cast = tokens[at - 1].token_type is TokenType.ALIAS
        if called and cast and tokens[at].text.lower() in _WITH_LENGTH:
            yield f"{tokens[at].text.upper()}({tokens[at + 2].text})"


def _length_problem(text: str) -> Problem:
    what = f"the type {text} is not supported yet: Spark would neither truncate nor pad the string"
    return Problem("", NOT_SUPPORTED_YET, what, "use STRING, with left(text, n) or rpad(text, n)")


def is_clock_literal(text: str) -> bool:
    """Whether Spark reads the clock for this text if it is cast to a time: `now`, `today` and the
    like, in any case, with blanks around and a time zone after it."""
    return text.strip().lower().partition(" ")[0] in CLOCK_LITERALS


def _time_arguments(sql: str) -> Iterator[str]:
    """String literals that are arguments of functions that cast to times: `to_date('today')`."""
    tokens = tokenize(sql)
    open_calls: list[str] = []
    for at, token in enumerate(tokens):
        if token.token_type is TokenType.L_PAREN:
            open_calls.append(tokens[at - 1].text.lower() if at else "")
        elif token.token_type is TokenType.R_PAREN and open_calls:
            open_calls.pop()
        elif token.token_type is TokenType.STRING and {*open_calls[-1:]} & functions.CASTS_TO_TIME:
            yield token.text


def _cast_or_compared(tree: exp.Expr) -> Iterator[str]:
    """String literals in casts and in comparisons by order. Other comparisons are left out: in
    `day = 'today'` the string is probably a value of the column."""
    for node in tree.find_all(exp.Cast, *_ORDERED):
        for child in [node.this] if isinstance(node, exp.Cast) else node.iter_expressions():
            inner = child.unnest()
            if isinstance(inner, exp.Literal) and inner.is_string:
                yield str(inner.this)


def _non_deterministic(what: str) -> Problem:
    return Problem(
        "",
        "NonDeterministic",
        f"{what} gives another result when an epoch is computed again",
        "recovery computes epochs again and must get the same rows; use the event-time column or a "
        "hash of the row's columns",
    )
