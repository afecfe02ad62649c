"""Columns of a row-wise SELECT: resolves the names in it, and derives its output columns.

As in Spark: names are case-insensitive, dots select fields of structs, items may use aliases of
earlier ones, and output columns keep the spelling of the SELECT.

Design: docs/design/compilation.md#row-wise-sql.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlglot import exp

from rekindle.errors import Problem
from rekindle.topology.problems import NOT_SUPPORTED_YET, nearest
from rekindle.topology.schema import (
    Array,
    DataType,
    Field,
    Scalar,
    Schema,
    Struct,
    is_integer,
    is_number,
)
from rekindle.topology.sql.casts_without_date import may_lack_date
from rekindle.topology.sql.ddl import hint_for
from rekindle.topology.sql.functions import WITHOUT_PARENTHESES
from rekindle.topology.sql.inference import (
    infer_types,
    is_timestamp,
    is_too_large_to_infer,
    unsupported_type,
)
from rekindle.topology.sql.tokens import DIALECT, MAX_UNKNOWN

_COMPARISONS = (
    exp.EQ,
    exp.NEQ,
    exp.NullSafeEQ,
    exp.GT,
    exp.GTE,
    exp.LT,
    exp.LTE,
    exp.Between,
    exp.In,
)
_WHOLE = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"(?i)[+-]?(\d+[.]?\d*|[.]\d+)(e[+-]?\d+)?[df]?|[+-]?(nan|inf|infinity)")
MAX_COLUMNS = 4096
"""Maximum number of output columns of a SELECT. A source has at most 2,700, but each `*` repeats
them."""
_GENERATED = {exp.Posexplode: ("pos", "col"), exp.Explode: ("col",)}
"""Spark's names of the columns of generator functions. In sqlglot, outer variants are subclasses of
these classes, and Posexplode is a subclass of Explode."""


@dataclass(frozen=True)
class VisibleColumns:
    """The columns in the scope of one SELECT, by table alias, in the order of `*`."""

    tables: dict[str, list[Field]]

    @classmethod
    def of(cls, select: exp.Select, name: str, schema: Schema) -> VisibleColumns:
        source = (select.args.get("from_") or select.args["from"]).this
        tables = {(source.alias or name).lower(): list(schema)}
        for at, lateral in enumerate(select.args.get("laterals") or ()):
            alias = lateral.args.get("alias")
            names = [c.name for c in (alias.args.get("columns") or ())] if alias else []
            names = names or list(_generated_names(lateral.this) or ())
            table = alias.name if alias is not None and alias.this is not None else ""
            tables[table.lower() or f"<lateral {at}>"] = [Field(n, None) for n in names]
        return cls(tables)

    @cached_property
    def columns(self) -> list[Field]:
        return [f for fields in self.tables.values() for f in fields]

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {f.name.lower(): f for f in reversed(self.columns)}

    def find(self, parts: list[str]) -> tuple[Field, list[str]] | None:
        """The column for a dotted name, and the remaining parts: fields of its struct."""
        if len(parts) > 1 and parts[0].lower() in self.tables:
            table = {f.name.lower(): f for f in self.tables[parts[0].lower()]}
            if parts[1].lower() in table:
                return table[parts[1].lower()], parts[2:]
        if parts[0].lower() in self._by_name:
            return self._by_name[parts[0].lower()], parts[1:]
        return None


def check_columns(select: exp.Select, visible: VisibleColumns) -> list[Problem]:
    """Problems of columns that do not exist, at most about `MAX_UNKNOWN`."""
    aliases = {a.alias.lower() for a in select.expressions if a.alias}
    found: list[Problem] = []
    for column in select.find_all(exp.Column):
        if len(found) >= MAX_UNKNOWN:
            break
        parts = [p.name for p in column.parts]
        if parts[-1] == "*":
            if len(parts) > 1 and parts[0].lower() not in visible.tables:
                found += _missing(visible, parts[:-1])
            continue
        if len(parts) >= 1 and parts[0].lower() in aliases and not column.find_ancestor(exp.Where):
            continue
        found += _missing(visible, parts)
    return found


def check_casts(select: exp.Select, visible: VisibleColumns) -> list[Problem]:
    """Problems of casts to TIMESTAMP of strings inside a larger value, and of comparisons with
    strings: unlike casts of single strings they cannot be rewritten to
    give NULL (`topology.sql.casts_without_date`).
    If types are unknown, Spark checks this later."""
    found = []
    for cast in select.find_all(exp.Cast):
        nested = (part for part in cast.to.find_all(exp.DataType) if part is not cast.to)
        if any(map(is_timestamp, nested)) and _has_string(_type_of(cast.this, visible)):
            what = (
                f"{cast.sql(dialect=DIALECT)} casts strings to TIMESTAMP, and those without a date"
            )
            hint = "cast each by itself: transform(texts, x -> CAST(x AS TIMESTAMP))"
            found.append(Problem("", "NonDeterministic", f"{what} get the current date", hint))
    for node in select.find_all(*_COMPARISONS):
        sides = {side: _type_of_side(side, visible) for side in node.iter_expressions()}
        found += _strings_compared_with_times(sides)
        found += _strings_compared_with_numbers(sides)
    return found


def _type_of_side(side: exp.Condition, visible: VisibleColumns) -> DataType | None:
    """A list has many literals, whose types need no inference."""
    match side.unnest():
        case exp.Literal(is_string=True):
            return Scalar.STRING
        case exp.Literal() as number:
            return Scalar.BIGINT if _WHOLE.fullmatch(number.name) else None
        case _:
            return _type_of(side, visible)


_Sides = Mapping[exp.Condition, DataType | None]


def _strings_compared_with_numbers(sides: _Sides) -> Iterator[Problem]:
    """Spark casts them to numbers; those that are none become NULL, and their rows vanish."""
    numbers = [data_type for data_type in sides.values() if is_number(data_type)]
    if not numbers:
        return
    whole = all(is_integer(data_type) for data_type in numbers)
    for side, data_type in sides.items():
        literal = side.unnest()
        if data_type is not Scalar.STRING or _is_number_in_quotes(literal, whole=whole):
            continue
        text = side.sql(dialect=DIALECT)
        what = f"{text} is compared with a number, and is a STRING"
        hint = f"write CAST({text} AS DOUBLE), which is NULL for other texts"
        yield Problem("", "NotANumber", what, "write a number" if literal.is_string else hint)


def _is_number_in_quotes(side: exp.Expr, *, whole: bool) -> bool:
    """Whether Spark reads a literal as this number; `whole`: as a whole one, without a fraction."""
    if not isinstance(side, exp.Literal):
        return False
    return bool((_WHOLE if whole else _NUMBER).fullmatch(side.name.strip()))


def _strings_compared_with_times(sides: _Sides) -> Iterator[Problem]:
    """Problems of strings that Spark casts to TIMESTAMP because they are compared with one."""
    if not any(data_type is Scalar.TIMESTAMP for data_type in sides.values()):
        return
    for side, data_type in sides.items():
        if data_type is Scalar.STRING and may_lack_date(side):
            text = side.sql(dialect=DIALECT)
            what = f"{text} is cast to TIMESTAMP, and gets the current date if it has none"
            yield Problem("", "NonDeterministic", what, f"write CAST({text} AS TIMESTAMP)")


def _has_string(data_type: DataType | None) -> bool:
    match data_type:
        case Array(element):
            return _has_string(element)
        case Struct(fields):
            return any(_has_string(field.type) for field in fields)
        case _:
            return data_type is Scalar.STRING


def unknown_columns(tree: exp.Expr, columns: Iterable[Field]) -> list[Problem]:
    """Problems of names in an expression over one table: columns, and fields of structs, that do
    not exist."""
    visible = VisibleColumns({"": list(columns)})
    named = ([part.name for part in column.parts] for column in tree.find_all(exp.Column))
    return [problem for parts in named for problem in _missing(visible, parts)]


def _missing(visible: VisibleColumns, parts: list[str]) -> list[Problem]:
    target = visible.find(parts)
    if target is None and parts[0].lower() in WITHOUT_PARENTHESES and len(parts) == 1:
        return []  # a function, which is checked elsewhere
    if target is None:
        what = f"unknown column {'.'.join(parts)}"
        names = [f.name for f in visible.columns]
        return [Problem("", "UnknownColumn", what, nearest(parts[-1], names))]
    field, rest = target
    data_type = field.type
    for part in rest:
        if not isinstance(data_type, Struct):
            return []
        inner = {f.name.lower(): f for f in data_type.fields}
        if part.lower() not in inner:
            what = f"column {field.name} has no field {part}"
            return [
                Problem(
                    "", "UnknownColumn", what, nearest(part, [f.name for f in data_type.fields])
                )
            ]
        data_type = inner[part.lower()].type
    return []


def output_columns(
    select: exp.Select, visible: VisibleColumns, problems: list[Problem]
) -> list[Field] | None:
    """The output columns in order; None, with a problem, if a name is missing or not unique."""
    fields: list[Field] = []
    for item in select.expressions:
        columns = _item_columns(item, visible)
        if columns is None:
            problems.append(_no_name(item.unalias()))
            return None
        problems += _unsupported_types(item, visible)
        fields += columns
        if len(fields) > MAX_COLUMNS:
            what = f"a SELECT has more than {MAX_COLUMNS} columns"
            problems.append(Problem("", "TooMany", what, "select fewer columns"))
            return None
    counts = Counter(f.name.lower() for f in fields)
    duplicates = [name for name, times in counts.items() if times > 1]
    problems += [
        Problem("", "DuplicateColumn", f"column {name} occurs twice", "rename one with AS")
        for name in duplicates
    ]
    problems += [
        Problem(
            "",
            "ReservedColumn",
            f"column {f.name} begins with __",
            "rename it: names with __ are reserved",
        )
        for f in fields
        if f.name.startswith("__")
    ]
    return None if duplicates else fields


def copied_columns(select: exp.Select, visible: VisibleColumns) -> list[str | None]:
    """For each output column the input column that it copies, under any name; None if it is
    computed. The output must be valid (`output_columns`)."""
    input_fields = {id(field) for field in next(iter(visible.tables.values()))}
    copies = copied_fields(select, visible)
    return [f.name if f is not None and id(f) in input_fields else None for f in copies]


def copied_fields(select: exp.Select, visible: VisibleColumns) -> list[Field | None]:
    """For each output column the visible column that it copies, the same object."""
    copies: list[Field | None] = []
    for item in select.expressions:
        tree = item.unalias()
        star = isinstance(tree, exp.Star | exp.Column) and tree.is_star
        if isinstance(tree, exp.Column) and not star:
            target = visible.find([part.name for part in tree.parts])
            copies.append(target[0] if target is not None and not target[1] else None)
        elif star:
            copies += _item_columns(item, visible) or []
        else:
            copies += [None] * len(_item_columns(item, visible, with_types=False) or ())
    return copies


def _no_name(item: exp.Expr) -> Problem:
    text = item.sql(dialect=DIALECT)
    names = "name" if _generated_names(item) is None else "(name, ...), with a name for each column"
    return Problem("", "MissingAlias", f"{text} has no name", f"write {text} AS {names}")


def _unsupported_types(item: exp.Expr, visible: VisibleColumns) -> list[Problem]:
    """Problems of a type that is known not to be supported; the engine finds the others."""
    if item.is_star or isinstance(item, exp.Aliases) or _generated_names(item.unalias()):
        return []
    type_name = unsupported_type(_with_names_of(item.unalias(), visible), visible.columns)
    if type_name is None:
        return []
    text = item.unalias().sql(dialect=DIALECT)
    what = f"{text} has the type {type_name}, which is not supported yet"
    return [Problem("", NOT_SUPPORTED_YET, what, hint_for(type_name))]


def _item_columns(
    item: exp.Expr, visible: VisibleColumns, *, with_types: bool = True
) -> list[Field] | None:
    """The output columns of one item of a SELECT; None if one has no name."""
    if isinstance(item, exp.Star):
        return _without(visible.columns, item)
    if isinstance(item, exp.Column) and isinstance(item.this, exp.Star):
        return _qualified_star(item, visible)
    generated = _generated_names(item.unalias())
    if isinstance(item, exp.Aliases):
        return [Field(str(name.name), None) for name in item.args["expressions"]]
    if generated is not None:
        if len(generated) <= 1 and item.alias:
            return [Field(item.alias, None)]
        return [Field(name, None) for name in generated] or None
    name = item.alias or (item.name if isinstance(item, exp.Column | exp.Dot) else "")
    if not name:
        return None
    return [Field(name, _type_of(item, visible) if with_types else None)]


def _qualified_star(item: exp.Column, visible: VisibleColumns) -> list[Field] | None:
    parts = [p.name for p in item.parts[:-1]]
    if len(parts) == 1 and parts[0].lower() in visible.tables:
        return _without(visible.tables[parts[0].lower()], item.this)
    target = visible.find(parts)
    data_type = _field_type(target[0].type, target[1]) if target is not None else None
    return list(data_type.fields) if isinstance(data_type, Struct) else None


def _without(fields: list[Field], star: exp.Star) -> list[Field]:
    dropped = {c.name.lower() for c in star.args.get("except_") or star.args.get("except") or ()}
    return [f for f in fields if f.name.lower() not in dropped]


def _generated_names(tree: exp.Expr) -> tuple[str, ...] | None:
    """Spark's names of a generator function's columns; () if they depend on its argument, None if
    the expression is not a generator."""
    for generator, names in _GENERATED.items():
        if isinstance(tree, generator):
            return names
    return () if isinstance(tree, exp.UDTF | exp.Inline) else None


def _type_of(item: exp.Expr, visible: VisibleColumns) -> DataType | None:
    tree = item.unalias()
    if isinstance(tree, exp.Column):
        target = visible.find([p.name for p in tree.parts])
        if target is not None:
            return _field_type(target[0].type, target[1])
    if isinstance(tree, _COMPARISONS):  # without inference: quadratic in a chain of comparisons
        return Scalar.BOOLEAN
    if isinstance(tree, exp.Literal) and tree.is_string:
        return Scalar.STRING
    if is_too_large_to_infer(tree):
        return None
    return infer_types([_with_names_of(tree, visible)], visible.columns)[0]


def _with_names_of(tree: exp.Expr, visible: VisibleColumns) -> exp.Expr:
    """A copy in which columns are written like the visible columns, without a table name."""
    tree = tree.copy()
    for column in tree.find_all(exp.Column):
        target = visible.find([p.name for p in column.parts])
        if target is not None and not target[1] and column is not tree:
            column.replace(exp.column(target[0].name, quoted=True))
    return tree


def _field_type(data_type: DataType | None, parts: list[str]) -> DataType | None:
    for part in parts:
        if not isinstance(data_type, Struct):
            return None
        data_type = {f.name.lower(): f.type for f in data_type.fields}.get(part.lower())
    return data_type
