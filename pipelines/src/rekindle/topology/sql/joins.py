"""Analyses the SQL of a join without Spark: its condition, and its list of columns.

Both name a column by its input, `orders.id`: the engine gives Spark each pair of rows as one row
with a struct for each input. So their text is run as it is written.

Design: docs/design/compilation.md#row-wise-sql.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from rekindle.errors import Problem
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import DataType, Schema, type_to_ddl
from rekindle.topology.sql.casts_without_date import check_casts_without_date
from rekindle.topology.sql.columns import (
    VisibleColumns,
    check_casts,
    check_columns,
    copied_fields,
    output_columns,
)
from rekindle.topology.sql.row_wise import check_calls, check_clauses
from rekindle.topology.sql.time_zones import check_zones
from rekindle.topology.sql.tokens import DIALECT, check_functions, parse, quote

Column = tuple[int, str]
"""The index of an input, and one of its columns."""


@dataclass(frozen=True, slots=True)
class JoinCondition:
    """`equal`: the equalities between a column of the first input and one of the second;
    `has_more`: whether pairs for which these hold may still not match."""

    equal: tuple[tuple[str, str], ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class JoinAnalysis:
    """`used`: the columns of each input that condition and list name. `output`: None if `problems`
    make it unknown; `copies`: for each of its columns the one that it copies, if any."""

    problems: tuple[Problem, ...]
    used: tuple[tuple[str, ...], ...]
    output: Schema | None
    copies: tuple[Column | None, ...]


def parse_condition(text: str, inputs: Sequence[str]) -> JoinCondition:
    """Raises InvalidSql."""
    tree = _expressions(text)
    if len(tree.expressions) != 1 or tree.expressions[0].alias:
        raise InvalidSql([_not_a_condition()])
    conjuncts = list(_conjuncts(tree.expressions[0]))
    found = [_equality(conjunct, inputs) for conjunct in conjuncts]
    equal = [pair for pair in found if pair is not None]
    return JoinCondition(tuple(dict.fromkeys(equal)), has_more=len(equal) < len(found))


def all_columns(inputs: Sequence[str]) -> str:
    """The list of columns of a join that has none."""
    return ", ".join(f"{quote(name)}.*" for name in inputs)


def analyze_join(
    on: str, select: str, inputs: Mapping[str, Schema], selected: Sequence[str]
) -> JoinAnalysis:
    """`on` has been parsed (`parse_condition`); `selected`: the inputs that `select` may name."""
    visible = VisibleColumns({name.lower(): list(schema) for name, schema in inputs.items()})
    problems = _check(on, _expressions(on), visible, inputs)
    try:
        chosen = _expressions(select)
    except InvalidSql as error:
        return JoinAnalysis((*problems, *error.problems), ((), ()), None, ())
    of_output = {name: inputs[name] for name in selected}
    # Each input has fields of its own: two streams of one source may share theirs.
    shown = VisibleColumns({n.lower(): [replace(f) for f in inputs[n]] for n in selected})
    problems += (found := _check(select, chosen, shown, of_output))
    fields = None if found else output_columns(chosen, shown, problems)
    if fields is None or problems:
        return JoinAnalysis(tuple(dict.fromkeys(problems)), ((), ()), None, ())
    places = {
        id(field): (list(inputs).index(name), field.name)
        for name in selected
        for field in shown.tables[name.lower()]
    }
    copies = tuple(
        None if field is None else places.get(id(field)) for field in copied_fields(chosen, shown)
    )
    trees = (_expressions(on), chosen)
    used = tuple(
        tuple(field.name for field in schema if _is_used((at, field.name), trees, inputs))
        for at, schema in enumerate(inputs.values())
    )
    return JoinAnalysis((), used, Schema(tuple(fields)), copies)


def key_problems(condition: JoinCondition, schemas: Sequence[Schema]) -> list[Problem]:
    """Problems of the columns that have to be equal, which are hashed under their exact names."""
    found: list[Problem] = []
    for names in condition.equal:
        types: list[DataType | None] = []
        for name, schema in zip(names, schemas, strict=True):
            if name not in schema.names:
                what = f"unknown column {name}"
                hint = nearest(name, schema.names)
                found.append(Problem("", "UnknownColumn", what, hint))
            else:
                types.append(schema.field(name).type)
        if len(types) == 2 and None not in types and types[0] != types[1]:
            first, second = (type_to_ddl(data_type) for data_type in types)
            what = f"{names[0]} is {first} and {names[1]} is {second}"
            hint = "cast one of them in an sql operator before the join"
            found.append(Problem("", "InvalidJoin", f"keys have different types: {what}", hint))
    return found


def _expressions(text: str) -> exp.Select:
    tree = parse(f"SELECT {text}")
    extra = [key for key, value in tree.args.items() if value and key != "expressions"]
    if not isinstance(tree, exp.Select) or extra or not tree.expressions:
        raise InvalidSql([_not_a_condition()])
    return tree


def _not_a_condition() -> Problem:
    hint = "write expressions, like orders.id = payments.order"
    return Problem("", "SqlDoesNotParse", "is more than expressions over both inputs", hint)


def _conjuncts(tree: exp.Expr) -> list[exp.Expr]:
    inner = tree.unnest()
    if isinstance(inner, exp.And):
        return [*_conjuncts(inner.left), *_conjuncts(inner.right)]
    return [inner]


def _equality(conjunct: exp.Expr, inputs: Sequence[str]) -> tuple[str, str] | None:
    if not isinstance(conjunct, exp.EQ):
        return None
    sides = [_column(side.unnest(), inputs) for side in (conjunct.left, conjunct.right)]
    by_input = dict(side for side in sides if side is not None)
    return (by_input[0], by_input[1]) if by_input.keys() == {0, 1} else None


def _column(tree: exp.Expr, inputs: Sequence[str]) -> Column | None:
    """A whole column of an input that the expression is."""
    if not isinstance(tree, exp.Column) or tree.is_star or len(tree.parts) != 2:
        return None
    name = tree.parts[0].name.lower()
    at = next((at for at, known in enumerate(inputs) if known.lower() == name), None)
    return None if at is None else (at, tree.parts[1].name)


def _check(
    text: str, tree: exp.Select, visible: VisibleColumns, inputs: Mapping[str, Schema]
) -> list[Problem]:
    names = [name for schema in inputs.values() for name in schema.names]
    sql = f"SELECT {text}"
    problems = [
        *check_calls(sql),
        *check_functions(sql, tree, names),
        *check_casts_without_date(sql, tree),
        *check_zones(tree),
        *check_clauses(tree),
    ]
    stars = (item for item in tree.expressions if isinstance(item, exp.Star))
    problems += [_names_no_input(inputs) for _ in stars]
    columns = (c for c in tree.find_all(exp.Column) if not isinstance(c.parent, exp.Star))
    problems += [p for c in columns if (p := _unqualified(c, inputs)) is not None]
    return problems or check_columns(tree, visible) or check_casts(tree, visible)


def _names_no_input(inputs: Mapping[str, Schema]) -> Problem:
    return Problem("", "InvalidJoin", "* names no input", f"write {all_columns(list(inputs))}")


def _unqualified(column: exp.Column, inputs: Mapping[str, Schema]) -> Problem | None:
    """Of a name that does not begin with an input."""
    first = column.parts[0].name.lower()
    if len(column.parts) > 1 and any(first == name.lower() for name in inputs):
        return None
    text = column.sql(dialect=DIALECT)
    hint = f"write {next(iter(inputs))}.{column.parts[-1].name}, with the input that has it"
    return Problem("", "InvalidJoin", f"{text} does not begin with the name of an input", hint)


def _is_used(column: Column, trees: Sequence[exp.Select], inputs: Mapping[str, Schema]) -> bool:
    names, (at, wanted) = list(inputs), column
    for tree in trees:
        for found in tree.find_all(exp.Column):
            if found.parts[0].name.lower() != names[at].lower():
                continue
            if found.is_star or found.parts[1].name.lower() == wanted.lower():
                return True
    return False
