"""Adds system columns to the user's SQL without changing the rest of its text. Pure.

A row's epoch, and the watermark that decides whether it is late, are columns, so that plans contain
no epoch as a literal (compiled code is cached by plan). The columns are inserted before each select
list and excluded from `*`, at the positions of the tokens.

Design: docs/design/engine.md#sql.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot.tokenizer_core import Token, TokenType

from rekindle.topology.sql.tokens import quote, tokenize

# A `*` after one of these means columns; after any other token it is a product.
_BEFORE_STAR = {TokenType.SELECT, TokenType.COMMA, TokenType.L_PAREN, TokenType.DOT, TokenType.ALL}
_NAMES = (TokenType.VAR, TokenType.IDENTIFIER)


def with_system_columns(sql: str, columns: Sequence[str]) -> str:
    """`sql` with system `columns` first in each SELECT. `x.*` is only changed if x is the input of
    its SELECT, not if x is a struct column."""
    if not columns:
        return sql
    tokens = tokenize(sql)
    names = ", ".join(map(quote, columns))
    result, done, input_name = [], 0, ""
    for at, token in enumerate(tokens):
        if token.token_type is TokenType.SELECT:
            input_name = _input_name(tokens, at)
        insertion = _insertion(tokens, at, input_name, names)
        if insertion is None:
            continue
        position, text = insertion
        result += [sql[done:position], text]
        done = position
    return "".join([*result, sql[done:]])


def _input_name(tokens: Sequence[Token], select: int) -> str:
    """The name by which columns can be qualified in the SELECT at this index, in lower case: the
    alias in its FROM, or the input's name. There are no subqueries."""
    depth = 0
    for at in range(select + 1, len(tokens) - 1):
        match tokens[at].token_type:
            case TokenType.L_PAREN:
                depth += 1
            case TokenType.R_PAREN:
                depth -= 1
            case TokenType.FROM if depth == 0 and not _is_comparison(tokens, at):
                return tokens[_alias(tokens, at + 1)].text.lower()
    return ""


def _is_comparison(tokens: Sequence[Token], at: int) -> bool:
    """Whether this FROM is that of `a IS DISTINCT FROM b`."""
    return tokens[at - 1].token_type is TokenType.DISTINCT


def _alias(tokens: Sequence[Token], table: int) -> int:
    """The index of the table's alias, or else of its name: for `FROM x y` and `FROM x AS y` that of
    y."""
    after = [token.token_type for token in tokens[table + 1 : table + 3]]
    if len(after) == 2 and after[0] is TokenType.ALIAS:
        return table + 2
    return table + 1 if after and after[0] in _NAMES else table


def _insertion(
    tokens: Sequence[Token], at: int, input_name: str, names: str
) -> tuple[int, str] | None:
    """The position and text to insert for the token at `at`; None if nothing is inserted.
    `input_name`: the name of the input of its SELECT."""
    token = tokens[at]
    if token.token_type is TokenType.SELECT:
        if at + 1 < len(tokens) and tokens[at + 1].token_type is TokenType.ALL:
            token = tokens[at + 1]
        return token.end + 1, f" {names},"
    if token.token_type is TokenType.STAR and _is_star(tokens, at, input_name):
        opening = at + 2 if _is_except_list(tokens, at) else None
        if opening is not None:
            return tokens[opening].end + 1, f"{names}, "
        return token.end + 1, f" EXCEPT ({names})"
    return None


def _is_star(tokens: Sequence[Token], at: int, input_name: str) -> bool:
    """Whether a `*` means the columns of an input, not a product or a struct's fields."""
    before = tokens[at - 1].token_type if at else None
    if before not in _BEFORE_STAR:
        return False
    if before is TokenType.DOT:
        has_one_part = at < 3 or tokens[at - 3].token_type is not TokenType.DOT  # x.*, not x.y.*
        return has_one_part and tokens[at - 2].text.lower() == input_name
    return True


def _is_except_list(tokens: Sequence[Token], at: int) -> bool:
    return (
        at + 2 < len(tokens)
        and tokens[at + 1].token_type is TokenType.EXCEPT
        and tokens[at + 2].token_type is TokenType.L_PAREN
    )
