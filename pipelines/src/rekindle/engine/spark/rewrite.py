"""Adds system columns to the user's SQL without changing the rest of its text. Pure.

A row's epoch, and the watermark that decides whether it is late, are columns, so that plans contain
no epoch as a literal (compiled code is cached by plan). The columns are inserted before each select
list and excluded from `*`, at the positions of the tokens.

Design: docs/design/engine.md#sql.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlglot.tokenizer_core import Token, TokenType

from rekindle.topology.sql.tokens import tokenize

_BEFORE_STAR = {TokenType.SELECT, TokenType.COMMA, TokenType.L_PAREN, TokenType.DOT, TokenType.ALL}


def quote(name: str) -> str:
    """A name as a Spark identifier."""
    return "`" + name.replace("`", "``") + "`"


def with_system_columns(sql: str, relations: Iterable[str], columns: Sequence[str]) -> str:
    """`sql` with system `columns` first in each SELECT.

    `relations` are the operator's inputs; aliases in FROM count too. `x.*` of a struct column x is
    not changed.
    """
    if not columns:
        return sql
    tokens = tokenize(sql)
    names = ", ".join(map(quote, columns))
    tables = {name.lower() for name in relations} | set(_aliases(tokens))
    result, done = [], 0
    for at in range(len(tokens)):
        insertion = _insertion(tokens, at, tables, names)
        if insertion is None:
            continue
        position, text = insertion
        result += [sql[done:position], text]
        done = position
    return "".join([*result, sql[done:]])


def _insertion(
    tokens: Sequence[Token], at: int, tables: set[str], names: str
) -> tuple[int, str] | None:
    """The position and text to insert for the token at `at`; None if nothing."""
    token = tokens[at]
    if token.token_type is TokenType.SELECT:
        if at + 1 < len(tokens) and tokens[at + 1].token_type is TokenType.ALL:
            token = tokens[at + 1]
        return token.end + 1, f" {names},"
    if token.token_type is TokenType.STAR and _is_star(tokens, at, tables):
        opening = at + 2 if _is_except_list(tokens, at) else None
        if opening is not None:
            return tokens[opening].end + 1, f"{names}, "
        return token.end + 1, f" EXCEPT ({names})"
    return None


def _is_star(tokens: Sequence[Token], at: int, tables: set[str]) -> bool:
    """Whether a `*` means the columns of an input, not a product or a struct's fields."""
    before = tokens[at - 1].token_type if at else None
    if before not in _BEFORE_STAR:
        return False
    if before is TokenType.DOT:
        whole = at < 3 or tokens[at - 3].token_type is not TokenType.DOT
        return whole and tokens[at - 2].text.lower() in tables
    return True


def _is_except_list(tokens: Sequence[Token], at: int) -> bool:
    return (
        at + 2 < len(tokens)
        and tokens[at + 1].token_type is TokenType.EXCEPT
        and tokens[at + 2].token_type is TokenType.L_PAREN
    )


def _aliases(tokens: Sequence[Token]) -> Iterable[str]:
    """The aliases of tables in FROM: `FROM x y` and `FROM x AS y` give y."""
    for at, token in enumerate(tokens):
        if token.token_type is TokenType.FROM and at + 2 < len(tokens):
            alias = at + 3 if tokens[at + 2].token_type is TokenType.ALIAS else at + 2
            if alias < len(tokens):
                yield tokens[alias].text.lower()
