"""Validates and analyses the SQL of a `sql` operator without Spark.

One SELECT, or a UNION ALL of them, each from exactly one of the operator's inputs: projection,
filter, explode, scalar functions. Anything that needs more than one row is refused, with a hint to
the operator that does it.

Design: docs/design/compilation.md#row-wise-sql.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp
from sqlglot.errors import SqlglotError

from rekindle.errors import Problem
from rekindle.topology.problems import InvalidSql, nearest
from rekindle.topology.schema import Field, Schema
from rekindle.topology.sql import functions
from rekindle.topology.sql.casts_without_date import check_casts_without_date
from rekindle.topology.sql.columns import (
    VisibleColumns,
    check_casts,
    check_columns,
    copied_columns,
    output_columns,
)
from rekindle.topology.sql.time_zones import check_zones
from rekindle.topology.sql.tokens import calls, check_functions, parse, tokenize

_PER_ROW = "sql works row by row"
_CLAUSES = {
    "group": ("GROUP BY", "use an operator with window and groupBy"),
    "having": ("HAVING", "filter in a sql operator after the window"),
    "distinct": ("DISTINCT", "use an operator with window, and these columns in groupBy"),
    "order": ("ORDER BY", "a stream has no end to sort at; order where you read the sink"),
    "sort": ("SORT BY", "a stream has no end to sort at; order where you read the sink"),
    "cluster": ("CLUSTER BY", "use keyBy and partitions of an operator"),
    "distribute": ("DISTRIBUTE BY", "use keyBy and partitions of an operator"),
    "limit": ("LIMIT", "a stream has no end; use an operator with window to bound it"),
    "offset": ("OFFSET", "a stream has no end; use an operator with window to bound it"),
    "joins": ("JOIN", "use an operator with join"),
    "with": ("WITH", "write each step as an operator of its own"),
    "windows": ("WINDOW", "use an operator with window"),
    "qualify": ("QUALIFY", "use an operator with window"),
    "hint": ("a hint", "use keyBy and partitions of an operator"),
    "sample": ("TABLESAMPLE", "filter by a hash of columns: WHERE pmod(hash(key), 10) = 0"),
    "pivots": ("PIVOT", "use an operator with window and FILTER in its aggregates"),
}
_SIZE = 'an operator with window: {size: 1h, groupBy: [key], aggregate: "count(*) AS n"}'
_GROUPS_BY_TIME = {
    "tumble": f"use {_SIZE}",
    "hop": f"use {_SIZE.replace('1h', '1h, slide: 10m')}",
    "cumulate": f"windows that grow are not supported yet; use {_SIZE}",
    "session": "sessions are not supported yet",
    "session_window": "sessions are not supported yet",
}
"""Spark's and Flink's functions of time windows, but `window`, which also works row by row."""
_FIRST_WORDS = frozenset({"(", "from", "select", "table", "values", "with"})
_ALLOWED = frozenset({"expressions", "from", "where", "laterals"})


@dataclass(frozen=True, slots=True)
class SelectAnalysis:
    """One SELECT of an operator's SQL: the name of its input, its own output columns, and for each
    of them the input column that it copies, None if it is computed."""

    input: str
    columns: tuple[Field, ...]
    copies: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class SqlAnalysis:
    """Inputs and output of an operator's SQL. `schema` is None if `problems` make it unknown; its
    names are right, its types may be unknown (`rekindle.topology.sql.inference`). `selects`: the
    SELECTs whose columns are known, left to right."""

    problems: tuple[Problem, ...]
    reads: tuple[str, ...]
    schema: Schema | None
    selects: tuple[SelectAnalysis, ...] = ()


def check_sql(sql: str, inputs: Mapping[str, Schema | None]) -> SqlAnalysis:
    """Check `sql` over inputs by name; columns of an input of schema None are not checked."""
    try:
        tree = parse(sql)
    except InvalidSql as error:
        meant = _what_was_meant(sql) or _with_quotes(error.problems, sql, inputs)
        return SqlAnalysis(meant, (), None)
    columns = [f.name for schema in inputs.values() if schema is not None for f in schema]
    problems = (
        check_calls(sql)
        + check_functions(sql, tree, columns)
        + check_casts_without_date(sql, tree)
        + check_zones(tree)
    )
    reads: list[str] = []
    outputs: list[list[Field] | None] = []
    selects: list[SelectAnalysis] = []
    for branch in _branches(tree, problems):
        problems += check_clauses(branch)
        name = _input_of(branch, inputs, problems)
        outputs.append(None)
        if name is None:
            continue
        reads.append(name)
        schema = inputs[name]
        if schema is not None and not _has_other_scopes(branch):
            visible = VisibleColumns.of(branch, name, schema)
            wrong = check_columns(branch, visible)
            problems += wrong or check_casts(branch, visible)
            found = None if wrong else output_columns(branch, visible, problems)
            if found is not None:
                outputs[-1] = found
                copies = tuple(copied_columns(branch, visible))
                selects.append(SelectAnalysis(name, tuple(found), copies))
    unread = [name for name in inputs if name not in reads]
    # A JOIN, or a subquery, reads it, and has been refused.
    if unread and all(p.reason not in ("InvalidFrom", "NotRowWise") for p in problems):
        problems.append(_unread(unread[0], reads))
    result = _union(outputs, problems)
    return SqlAnalysis(tuple(dict.fromkeys(problems)), tuple(reads), result, tuple(selects))


def _what_was_meant(sql: str) -> tuple[Problem, ...]:
    """Problems that say more than where a statement does not parse; none if its words are those of
    a row-wise SELECT."""
    try:
        words = [token.text for token in tokenize(sql)]
    except SqlglotError:
        return ()
    if words and words[0].lower() not in _FIRST_WORDS:
        what, hint = f"does not parse: it begins with {words[0]}", "write SELECT ... FROM input"
        return (Problem("", "SqlDoesNotParse", what, hint),)
    found = check_calls(sql)
    if any(call.name == "window" for call in calls(sql)):
        what = f"window() groups rows by time; {_PER_ROW}"
        found.insert(0, Problem("", "NotRowWise", what, f"use {_SIZE}"))
    return tuple(dict.fromkeys(found))


def _with_quotes(
    problems: Sequence[Problem], sql: str, inputs: Iterable[str]
) -> tuple[Problem, ...]:
    """The problems with a hint to use backquotes, if a name with `-` lacks them."""
    bare = next((n for n in inputs if "-" in n and n in sql and f"`{n}`" not in sql), None)
    if bare is None:
        return tuple(problems)
    return tuple(replace(p, hint=f"write `{bare}` in backquotes") for p in problems)


def _unread(name: str, reads: Sequence[str]) -> Problem:
    example = f"add UNION ALL SELECT ... FROM {name}" if reads else f"select FROM {name}"
    return Problem("", "UnreadInput", f"does not read its input {name}", example)


def _branches(tree: exp.Expr, problems: list[Problem]) -> Iterator[exp.Select]:
    """The SELECTs of a UNION ALL, left to right."""
    match tree:
        case exp.Select():
            yield tree
        case exp.Subquery() if not _extra(tree, {"this"}):
            yield from _branches(tree.this, problems)
        case exp.Union() if not tree.args.get("distinct"):
            for key in _extra(tree, {"this", "expression", "distinct"}):
                problems.append(_refused(key))
            yield from _branches(tree.this, problems)
            yield from _branches(tree.expression, problems)
        case exp.SetOperation():
            problems.append(
                Problem(
                    "",
                    "NotRowWise",
                    f"{tree.key.upper()} compares rows with each other; {_PER_ROW}",
                    "only UNION ALL can be used",
                )
            )
        case _:
            what = f"{tree.key.upper()} is not a SELECT"
            problems.append(
                Problem("", "NotRowWise", what, "write SELECT ... FROM input WHERE ...")
            )


def _extra(tree: exp.Expr, known: set[str]) -> list[str]:
    """Clauses of a node except the known ones, by sqlglot's names without underscores."""
    return [
        key.rstrip("_")
        for key, value in tree.args.items()
        if value and key.rstrip("_") not in known
    ]


def _refused(key: str) -> Problem:
    what, hint = _CLAUSES.get(key, (key.upper(), ""))
    return Problem("", "NotRowWise", f"{what} cannot be used; {_PER_ROW}", hint)


def check_clauses(branch: exp.Select) -> list[Problem]:
    """Clauses, and expressions over other rows, that no row-wise SELECT may have."""
    found = [_refused(key) for key in _extra(branch, set(_ALLOWED))]
    if branch.find(exp.QueryTransform):
        found.append(
            Problem("", "NotRowWise", "TRANSFORM cannot be used", "use functions of Spark SQL")
        )
    if branch.find(exp.Window):
        hint = "use an operator with window; OVER a frame of rows is not supported yet"
        found.append(Problem("", "NotRowWise", f"OVER looks at other rows; {_PER_ROW}", hint))
    if any(query is not branch for query in branch.find_all(exp.Query)):
        what = f"a subquery looks at other rows; {_PER_ROW}"
        hint = (
            "write a step as an operator of its own, a join for rows of another stream; a table to "
        )
        hint += "look values up in has to be a list: IN ('a', 'b'), CASE or map(...)[key]"
        found.append(Problem("", "NotRowWise", what, hint))
    for node in branch.find_all(exp.Placeholder, exp.Parameter):
        what = f"{node.sql()} is a parameter, and there is nothing to bind it to"
        found.append(Problem("", "SqlDoesNotParse", what))
    return found


def _has_other_scopes(branch: exp.Select) -> bool:
    """Whether names may refer to something other than columns of the input."""
    return bool(_extra(branch, set(_ALLOWED))) or any(
        query is not branch for query in branch.find_all(exp.Query)
    )


def check_calls(sql: str) -> list[Problem]:
    """Calls of functions that look at more than one row."""
    found = []
    for call in calls(sql):
        if call.name in functions.AGGREGATE:
            what = f"{call.name}() is an aggregate; {_PER_ROW}"
            found.append(
                Problem("", "NotRowWise", what, "use an operator with window and aggregate")
            )
        elif call.name in _GROUPS_BY_TIME:
            what = f"{call.name}() groups rows by time; {_PER_ROW}"
            found.append(Problem("", "NotRowWise", what, _GROUPS_BY_TIME[call.name]))
        elif call.name in functions.ANALYTIC:
            what = f"{call.name}() looks at other rows; {_PER_ROW}"
            found.append(Problem("", "NotRowWise", what, "use an operator with window"))
    return found


def _input_of(
    branch: exp.Select, inputs: Mapping[str, Schema | None], problems: list[Problem]
) -> str | None:
    """The input that a SELECT reads; None, with a problem, if the operator has no such input."""
    clause = branch.args.get("from_") or branch.args.get("from")
    hint = f"write FROM {next(iter(inputs), 'input')}"
    if clause is None:
        problems.append(Problem("", "InvalidFrom", "a SELECT has no FROM", hint))
        return None
    table = clause.this
    if not isinstance(table, exp.Table) or not isinstance(table.this, exp.Identifier):
        if not isinstance(table, exp.Query):  # a subquery has been reported as such
            what = f"FROM {table.sql(dialect='spark')} is not an input"
            problems.append(Problem("", "InvalidFrom", what, hint))
        return None
    for key in _extra(table, {"this", "alias", "db", "catalog"}):
        problems.append(_refused(key))
    by_lower = {name.lower(): name for name in inputs}
    if table.args.get("db") or table.name.lower() not in by_lower:
        written = ".".join(part.name for part in table.parts)
        what = f"FROM {written} is not an input of this operator"
        problems.append(Problem("", "InvalidFrom", what, nearest(written, inputs)))
        return None
    return by_lower[table.name.lower()]


def _union(outputs: Sequence[list[Field] | None], problems: list[Problem]) -> Schema | None:
    """The output schema, with the names of the first SELECT, as in Spark."""
    known = [fields for fields in outputs if fields is not None]
    widths = {len(fields) for fields in known}
    if len(widths) > 1:
        counts = " and ".join(str(w) for w in sorted(widths))
        what = f"the SELECTs of the UNION ALL have {counts} columns"
        problems.append(Problem("", "UnionMismatch", what, "give each the same columns"))
    if not outputs or outputs[0] is None:
        return None
    return Schema(tuple(outputs[0]))
