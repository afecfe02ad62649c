"""Decomposes the aggregate list of a window into partial aggregates, which can be merged.

A window aggregates rows to partials, merges partials of epochs and panes, and computes its output
columns from the merged partials; each partial is merged by sum, min or max, which all ignore NULL.
No Spark here: the engine runs the SQL that is generated here.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlglot import exp

from rekindle.errors import Problem
from rekindle.topology.problems import NOT_SUPPORTED_YET, InvalidSql
from rekindle.topology.schema import (
    Field,
    is_nested,
    is_number,
    type_to_ddl,
)
from rekindle.topology.sql import functions
from rekindle.topology.sql.casts_without_date import check_casts_without_date
from rekindle.topology.sql.ddl import hint_for
from rekindle.topology.sql.inference import infer_types, unsupported_type
from rekindle.topology.sql.time_zones import check_zones
from rekindle.topology.sql.tokens import (
    DIALECT,
    MAX_DEPTH,
    calls,
    check_functions,
    depth,
    parse,
    too_deep,
)

Merge = Literal["sum", "min", "max"]

SUPPORTED = "count, count_if, sum, avg, min, max, bool_and, bool_or"
_DISTINCT = (
    "two windows of the same size count exactly: the first with x in groupBy, the second with "
    "count(*) over its rows"
)
_SUPPORTED_NAMES = frozenset({*SUPPORTED.split(", "), "mean", "every", "any", "some"})


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One item: the output column's name and the expression over aggregate calls."""

    alias: str
    expression: exp.Expr = field(compare=False)

    @property
    def sql(self) -> str:
        return self.expression.sql(dialect=DIALECT)


@dataclass(frozen=True, slots=True)
class Partial:
    """A mergeable aggregate: `sql` computes it from the input's columns, `merge` merges two values
    of it. `name`, the state column, depends on these two only, not on the position in the
    list."""

    name: str
    sql: str
    merge: Merge


@dataclass(frozen=True, slots=True)
class Decomposition:
    """`outputs` are (output column, SQL over the partials' names)."""

    partials: tuple[Partial, ...]
    outputs: tuple[tuple[str, str], ...]


def parse_aggregates(text: str) -> tuple[Aggregate, ...]:
    """`"count(*) AS flights, avg(delay)"` -> items; raises InvalidSql with all problems."""
    tree = parse(f"SELECT {text}")
    extra = [key for key, value in tree.args.items() if value and key != "expressions"]
    if not isinstance(tree, exp.Select) or extra or not tree.expressions:
        raise InvalidSql(
            [Problem("", "InvalidAggregate", "is not a list of aggregates", _example())]
        )
    if depth(tree, count_operator_chains=True) > MAX_DEPTH:
        raise InvalidSql([too_deep()])
    problems = (
        check_functions(text, tree, ())
        + check_casts_without_date(text, tree)
        + check_zones(tree)
        + _unsupported(text)
    )
    items: list[Aggregate] = []
    for item in tree.expressions:
        problems += _check_item(item)
        alias = item.alias or _spark_name(item)
        if not alias:
            problems.append(
                Problem(
                    "", "MissingAlias", f"{_sql(item)} has no name", f"write {_sql(item)} AS name"
                )
            )
        items.append(Aggregate(alias or "", item.unalias()))
    problems += _duplicates([i.alias for i in items])
    if problems:
        raise InvalidSql(list(dict.fromkeys(problems)))
    return tuple(items)


def summed_arguments(text: str) -> tuple[tuple[str, str], ...]:
    """The calls of sum and avg in an aggregate list, each with the SQL of its argument."""
    outermost = (c for item in parse_aggregates(text) for c in _outermost_calls(item.expression))
    with_argument = ((call, _argument_of_sum(call)) for call in outermost)
    return tuple((_sql(call), _sql(arg)) for call, arg in with_argument if arg is not None)


def type_problems(item: Aggregate, columns: Iterable[Field]) -> list[Problem]:
    """Problems of types that are known not to be supported; the engine finds the others."""
    fields = list(columns)
    found = [
        not_a_number(_sql(call), type_to_ddl(data_type))
        for call in _outermost_calls(item.expression)
        if (argument := _argument_of_sum(call)) is not None
        for data_type in infer_types([argument], fields)
        if data_type is not None and not is_number(data_type)
    ]
    found += [
        Problem(
            "",
            NOT_SUPPORTED_YET,
            f"{_sql(call)} compares values of the type {type_to_ddl(data_type)}, "
            "which is not supported yet",
            "compare a field or an element of it",
        )
        for call in _outermost_calls(item.expression)
        if (argument := _argument_of_min_max(call)) is not None
        for data_type in infer_types([argument], fields)
        if data_type is not None and is_nested(data_type)
    ]
    name = unsupported_type(item.expression, fields)
    if name is not None and not found:
        what = f"{item.sql} has the type {name}, which is not supported yet"
        found.append(Problem("", NOT_SUPPORTED_YET, what, hint_for(name)))
    return found


def not_a_number(call: str, type_name: str) -> Problem:
    what = f"{call} adds values of the type {type_name}, which are not numbers"
    hint = "write it as a number: CAST(x AS DOUBLE) of a text, unix_micros(x) of a time"
    return Problem("", "NotANumber", what, hint)


def _argument_of_sum(call: exp.Expr) -> exp.Expr | None:
    """The argument of a call of sum or avg; None for others."""
    inner = call.this if isinstance(call, exp.Filter) else call
    return _argument(inner) if _name(inner) in ("sum", "avg") else None


def _argument_of_min_max(call: exp.Expr) -> exp.Expr | None:
    """The argument of a call of min or max; None for others."""
    inner = call.this if isinstance(call, exp.Filter) else call
    return _argument(inner) if _name(inner) in ("min", "max") else None


def decompose(aggregates: str | Sequence[Aggregate]) -> Decomposition:
    """Partials and outputs of an aggregate list. Equal calls share their partials."""
    items = parse_aggregates(aggregates) if isinstance(aggregates, str) else tuple(aggregates)
    names: dict[tuple[str, Merge], str] = {}

    def partial(call: exp.Expr, merge: Merge) -> exp.Expr:
        key = (_sql(call), merge)
        return exp.column(names.setdefault(key, partial_name(*key)))

    outputs = tuple((i.alias, _sql(_replace_calls(i.expression.copy(), partial))) for i in items)
    return Decomposition(
        tuple(Partial(name, sql, merge) for (sql, merge), name in names.items()), outputs
    )


def partial_name(sql: str, merge: Merge) -> str:
    """The column of a partial in the window's state; must not change between releases."""
    return f"p_{merge}_{hashlib.blake2b(sql.encode(), digest_size=6).hexdigest()}"


_PartialOf = Callable[[exp.Expr, Merge], exp.Expr]


def _replace_calls(tree: exp.Expr, partial: _PartialOf) -> exp.Expr:
    """`tree` with each outermost aggregate call replaced by an expression over partials."""
    if _is_call(tree):
        return _output_expression(tree, partial)
    for child in list(tree.iter_expressions()):
        replaced = _replace_calls(child, partial)
        if replaced is not child:
            child.replace(replaced)
    return tree


def _output_expression(call: exp.Expr, partial: _PartialOf) -> exp.Expr:
    where = call.args["expression"] if isinstance(call, exp.Filter) else None
    inner = call.this if where is not None else call

    def filtered(part: exp.Expr) -> exp.Expr:
        return part if where is None else exp.Filter(this=part, expression=where.copy())

    match _name(inner):
        case "avg":
            value = _argument(inner)
            total = exp.Sum(this=exp.cast(value.copy(), "DOUBLE", dialect=DIALECT))
            count = exp.Count(this=value.copy(), big_int=True)
            return exp.Paren(
                this=exp.Div(
                    this=partial(filtered(total), "sum"),
                    expression=exp.Nullif(
                        this=partial(filtered(count), "sum"), expression=exp.Literal.number(0)
                    ),
                )
            )
        case "min" | "bool_and":
            return partial(filtered(_canonical(inner)), "min")
        case "max" | "bool_or":
            return partial(filtered(_canonical(inner)), "max")
        case _:
            return partial(filtered(inner), "sum")


def _canonical(call: exp.Expr) -> exp.Expr:
    """Replace synonyms by one name, so that they share a partial."""
    match _name(call):
        case "bool_and":
            return exp.LogicalAnd(this=_argument(call))
        case "bool_or":
            return exp.LogicalOr(this=_argument(call))
        case _:
            return call


def _argument(call: exp.Expr) -> exp.Expr:
    value = call.expressions[0] if isinstance(call, exp.Anonymous) else call.this
    return value.unnest() if isinstance(call, exp.Any) else value  # type: ignore[no-any-return]


def _name(call: exp.Expr) -> str:
    """The canonical name of an aggregate call, "" if it is not one, "?" if it is unsupported."""
    match call:
        case exp.Count():
            return "count"
        case exp.Sum():
            return "sum"
        case exp.Avg():
            return "avg"
        case exp.Min():
            return "min"
        case exp.Max():
            return "max"
        case exp.CountIf():
            return "count_if"
        case exp.LogicalAnd():
            return "bool_and"
        case exp.LogicalOr() | exp.Any():
            return "bool_or"
        case exp.Anonymous():
            synonyms = {"mean": "avg", "every": "bool_and", "some": "bool_or"}
            name = call.name.lower()
            return synonyms.get(name, "?" if name in functions.AGGREGATE else "")
        case exp.AggFunc() | exp.WithinGroup():
            return "?"
        case _:
            return ""


def _is_call(tree: exp.Expr) -> bool:
    return bool(_name(tree.this if isinstance(tree, exp.Filter) else tree))


def _outermost_calls(tree: exp.Expr) -> list[exp.Expr]:
    if _is_call(tree):
        return [tree]
    return [call for child in tree.iter_expressions() for call in _outermost_calls(child)]


def _check_item(item: exp.Expr) -> list[Problem]:
    tree = item.unalias()
    if isinstance(tree, exp.Star) or (isinstance(tree, exp.Column) and tree.name == "*"):
        return [Problem("", "InvalidAggregate", "* is not an aggregate", _example())]
    for node_class, what in (
        (exp.Window, "analytic functions (OVER)"),
        (exp.Query, "subqueries"),
        (exp.UDTF, "table-generating functions (explode)"),
        (exp.Explode, "table-generating functions (explode)"),
    ):
        if tree.find(node_class):
            return [Problem("", "InvalidAggregate", f"{_sql(tree)}: {what} cannot be used here")]
    found = [f for call in _outermost_calls(tree) for f in _check_call(call)]
    inside = {id(c) for call in _outermost_calls(tree) for c in call.find_all(exp.Column)}
    outside = [c.name for c in tree.find_all(exp.Column) if id(c) not in inside]
    if outside:
        found.append(
            Problem(
                "",
                "InvalidAggregate",
                f"{_sql(tree)}: column {outside[0]} is outside an aggregate",
                f"write e.g. max({outside[0]}); groupBy columns are in the output anyway",
            )
        )
    elif not _outermost_calls(tree):
        found.append(
            Problem("", "InvalidAggregate", f"{_sql(tree)} is not an aggregate", _example())
        )
    return found


def _check_call(call: exp.Expr) -> list[Problem]:
    inner = call.this if isinstance(call, exp.Filter) else call
    if isinstance(inner.this, exp.Distinct):
        return [_not_yet(f"{_sql(inner)}: DISTINCT inside an aggregate", _DISTINCT)]
    parts = [*inner.iter_expressions(), *(call.iter_expressions() if call is not inner else ())]
    if any(_outermost_calls(part) for part in parts if part is not inner):
        return [Problem("", "InvalidAggregate", f"{_sql(call)}: an aggregate inside an aggregate")]
    return []


def _unsupported(text: str) -> list[Problem]:
    names = (call.name for call in calls(text))
    return [
        _not_yet("the aggregate approx_count_distinct", _DISTINCT)
        if name == "approx_count_distinct"
        else _not_yet(f"the aggregate {name}")
        for name in names
        if name in functions.AGGREGATE - _SUPPORTED_NAMES
    ]


def _not_yet(what: str, hint: str = f"this version has {SUPPORTED}") -> Problem:
    return Problem("", NOT_SUPPORTED_YET, f"{what} is not supported yet", hint)


def _spark_name(item: exp.Expr) -> str:
    """Spark's name for a simple item without alias: `avg(delay)`, `count(1)`."""
    name = _name(item)
    if name in ("", "?") or isinstance(item, exp.Filter):
        return ""
    written = item.name if isinstance(item, exp.Anonymous) else name
    value = _argument(item)
    if isinstance(value, exp.Star):
        return f"{written}(1)"
    if isinstance(value, exp.Column) and not item.expressions[1:] and len(value.parts) == 1:
        return f"{written}({value.name})"
    return ""


def _duplicates(names: Sequence[str]) -> list[Problem]:
    lower = [n.lower() for n in names if n]
    return [
        Problem("", "DuplicateColumn", f"column {name} occurs twice", "give each its own alias")
        for name in dict.fromkeys(n for n in lower if lower.count(n) > 1)
    ]


def _sql(tree: exp.Expr) -> str:
    return tree.sql(dialect=DIALECT)


def _example() -> str:
    return "write it like count(*) AS flights, avg(delay) AS delay"
