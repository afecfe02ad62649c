"""An aggregate list is decomposed into partials that can be merged, or refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.topology.problems import InvalidSql
from rekindle.topology.sql.aggregates import Decomposition, Partial, decompose, parse_aggregates


def decomposed(text: str) -> Decomposition:
    """With the names of the partials replaced by their positions."""
    parts = decompose(text)
    names = {partial.name: f"p{at}" for at, partial in enumerate(parts.partials)}
    outputs = []
    for alias, sql in parts.outputs:
        for name, short in names.items():
            sql = sql.replace(name, short)
        outputs.append((alias, sql))
    return Decomposition(
        tuple(replace(p, name=names[p.name]) for p in parts.partials), tuple(outputs)
    )


def reasons(text: str) -> list[str]:
    with pytest.raises(InvalidSql) as caught:
        parse_aggregates(text)
    return [f.reason for f in caught.value.problems]


def test_an_average_is_a_sum_of_doubles_over_a_count_and_null_for_no_rows() -> None:
    parts = decomposed("avg(dep_delay) AS delay")
    assert parts.partials == (
        Partial("p0", "SUM(CAST(dep_delay AS DOUBLE))", "sum"),
        Partial("p1", "COUNT(dep_delay)", "sum"),
    )
    assert parts.outputs == (("delay", "(p0 / NULLIF(p1, 0))"),)


def test_equal_calls_share_their_partials() -> None:
    parts = decomposed("avg(x) AS a, count(x) AS n, sum(x) AS s, mean(x) AS m, sum(x) * 2 AS d")
    assert [p.sql for p in parts.partials] == ["SUM(CAST(x AS DOUBLE))", "COUNT(x)", "SUM(x)"]
    assert dict(parts.outputs) == {
        "a": "(p0 / NULLIF(p1, 0))",
        "n": "p1",
        "s": "p2",
        "m": "(p0 / NULLIF(p1, 0))",
        "d": "p2 * 2",
    }


def test_the_name_of_a_partial_ignores_its_position() -> None:
    one = decompose("min(x) AS a, max(y) AS b")
    other = decompose("max(y) AS b, avg(z) AS c, min(x) AS a")
    assert {p.name for p in one.partials} < {p.name for p in other.partials}
    assert len({p.name for p in decompose("min(x) AS a, max(x) AS b, sum(x) AS c").partials}) == 3


def test_names_of_partials_stay_as_saved_states_have_them() -> None:
    (partial,) = decompose("count(*) AS n").partials
    assert partial.name == "p_sum_1c3d36e059c4"


@pytest.mark.parametrize(
    ("text", "partial", "merge"),
    [
        ("count(*) AS n", "COUNT(*)", "sum"),
        ("count(x) AS n", "COUNT(x)", "sum"),
        ("count(x, y) AS n", "COUNT(x, y)", "sum"),
        ("count_if(x > 3) AS n", "COUNT_IF(x > 3)", "sum"),
        ("sum(x + 1) AS s", "SUM(x + 1)", "sum"),
        ("min(x) AS s", "MIN(x)", "min"),
        ("max(x) AS s", "MAX(x)", "max"),
        ("bool_and(x) AS b", "BOOL_AND(x)", "min"),
        ("every(x) AS b", "BOOL_AND(x)", "min"),
        ("bool_or(x) AS b", "BOOL_OR(x)", "max"),
        ("some(x) AS b", "BOOL_OR(x)", "max"),
        ("any(x) AS b", "BOOL_OR(x)", "max"),
        ("sum(x) FILTER (WHERE y > 1) AS f", "SUM(x) FILTER(WHERE y > 1)", "sum"),
        ("min(`a b`) AS q", "MIN(`a b`)", "min"),
    ],
)
def test_each_supported_aggregate_has_a_partial(text: str, partial: str, merge: str) -> None:
    parts = decomposed(text)
    assert parts.partials == (Partial("p0", partial, merge),)  # type: ignore[arg-type]
    assert parts.outputs[0][1] == "p0"


def test_a_filter_reaches_both_parts_of_an_average() -> None:
    parts = decomposed("avg(x) FILTER (WHERE y) AS a")
    assert [p.sql for p in parts.partials] == [
        "SUM(CAST(x AS DOUBLE)) FILTER(WHERE y)",
        "COUNT(x) FILTER(WHERE y)",
    ]


def test_scalar_expressions_are_applied_to_partials() -> None:
    parts = decomposed(
        "sum(a) / count(*) AS r, round(avg(x), 2) AS y, greatest(max(a), max(b)) AS g"
    )
    assert dict(parts.outputs) == {
        "r": "p0 / p1",
        "y": "ROUND((p2 / NULLIF(p3, 0)), 2)",
        "g": "GREATEST(p4, p5)",
    }


def test_an_item_without_alias_has_the_name_that_spark_gives_or_is_refused() -> None:
    assert [a.alias for a in parse_aggregates("count(*), avg(delay), mean(x)")] == [
        "count(1)",
        "avg(delay)",
        "mean(x)",
    ]
    assert reasons("sum(a) / count(*)") == ["MissingAlias"]


@pytest.mark.parametrize(
    "text",
    [
        "stddev(x) AS s",
        "percentile(x, 0.5) AS p",
        "collect_list(x) AS c",
        "count(DISTINCT x) AS c",
        "sum(DISTINCT x) AS c",
        "first(x) AS f",
        "max_by(x, y) AS m",
        "try_sum(x) AS t",
        "approx_count_distinct(x) AS a",
        "any_value(x) AS a",
    ],
)
def test_other_aggregates_are_not_supported_yet_and_are_named(text: str) -> None:
    assert reasons(text) == ["NotSupportedYet"]
    with pytest.raises(InvalidSql, match=r"(?i)distinct|" + text.split("(")[0]):
        parse_aggregates(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x AS y", "InvalidAggregate"),
        ("1 AS one", "InvalidAggregate"),
        ("*", "InvalidAggregate"),
        ("sum(x) + y AS z", "InvalidAggregate"),
        ("sum(count(x)) AS z", "InvalidAggregate"),
        ("max(x) OVER (PARTITION BY y) AS z", "InvalidAggregate"),
        ("count(*) AS n FROM t", "InvalidAggregate"),
        ("sum(rand()) AS r", "NonDeterministic"),
        ("max(current_date) AS r", "NonDeterministic"),
        ("sum(foo(x)) AS r", "UnknownFunction"),
        ("sum(x) AS a, min(x) AS A", "DuplicateColumn"),
        ("sum(x AS", "SqlDoesNotParse"),
        ("", "InvalidAggregate"),
    ],
)
def test_an_invalid_aggregate_list_is_refused(text: str, reason: str) -> None:
    assert reason in reasons(text)


@pytest.mark.parametrize(
    "text", ["+".join(["sum(a)"] * 1000) + " AS r", "sum(" + "- " * 200 + "a) AS r"]
)
def test_a_too_deep_aggregate_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        parse_aggregates(text)
    assert [f.reason for f in caught.value.problems] == ["TooDeep"]
