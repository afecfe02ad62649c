"""Any topology file gives problems or a topology, never a traceback."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import InvalidTopology, Problem
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.problems import InvalidSql
from rekindle.topology.sql.aggregates import parse_aggregates
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.joins import analyze_join, parse_condition
from rekindle.topology.sql.row_wise import check_sql
from rekindle_testing.fixtures.bad_manifests import good_manifest

SCHEMA = ddl_to_schema("n BIGINT, tags ARRAY<STRUCT<k: INT>>, s STRUCT<f: STRING>, ts TIMESTAMP")
WORDS = st.sampled_from(
    """
    SELECT * FROM rows WHERE n s s.f rows.* tags explode( posexplode( ) , AS x y ( ) LATERAL VIEW
    OUTER UNION ALL CASE WHEN THEN ELSE END 1 'now' TIMESTAMP INTERVAL HOUR CAST( STRING ) + - / %
    AND OR NOT NULL IS IN EXISTS( OVER GROUP BY LIMIT count( sum( avg( FILTER ( any( some( DISTINCT
    transform( -> k ` `a b` ; . : :: ? ${x} /*+ */ -- EXCEPT JOIN ON LIKE VALUES STRUCT< > [ ] { }
    |> @ # $ " inline( stack( map( named_struct( if( date_trunc( rand() VALUES WITH q LIKE ANY
    """.split()  # noqa: SIM905 - a table of words
)
TEXTS = st.lists(WORDS, max_size=14).map(" ".join)
_JOINED = "a.n = b.n AND a.n a.* b.n b.ts , OR > a b . n ( ) `a`.n a.s.f b.tags * AS x SELECT"
JOINED = st.lists(st.one_of(st.sampled_from(_JOINED.split()), WORDS), max_size=10).map(" ".join)
_SINK = "file:///var/lib/rekindle/output/alarms"
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from(["", "x", "1h", "0s", "trips", "paid", "hourly", _SINK, "é"]),
    st.just([]),
    st.just({}),
    st.lists(st.sampled_from(["trips", "paid", "hourly", "busy", "nobody"]), max_size=3),
    TEXTS,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in children:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += places(child, (*path, key))
    return found


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    manifest = copy.deepcopy(good_manifest())
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(places(manifest)))
        target: Any = manifest
        for part in parents:
            target = target[part]
        target[last] = draw(JUNK)
    return manifest


@given(manifests())
def test_any_manifest_is_compiled_or_refused_with_problems(manifest: dict[str, Any]) -> None:
    problems = []
    try:
        name, spec = load_topology(manifest)
        topology = compile_topology(spec, name)
    except InvalidTopology as error:
        problems = error.problems
    assert problems or topology.segments
    assert all(p.reason and p.message for p in problems)


@given(st.one_of(TEXTS, TEXTS.map(lambda t: f"SELECT {t} FROM rows"), st.text(max_size=20)))
def test_any_sql_is_accepted_or_refused(sql: str) -> None:
    report = check_sql(sql, {"rows": SCHEMA})
    assert report.problems or report.schema is not None


@given(st.one_of(TEXTS, TEXTS.map(lambda t: f"sum({t}) AS x"), st.text(max_size=20)))
def test_any_aggregate_list_is_accepted_or_refused(text: str) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        parsed = bool(parse_aggregates(text))
    except InvalidSql as error:
        problems = error.problems
    assert problems or parsed


@given(st.one_of(TEXTS, st.text(max_size=30)))
def test_any_ddl_is_accepted_or_refused(text: str) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        parsed = bool(ddl_to_schema(text).names)
    except InvalidSql as error:
        problems = error.problems
    assert problems or parsed


@given(JOINED, JOINED)
def test_any_join_gives_problems_or_columns(on: str, select: str) -> None:
    for condition in (on, "a.n = b.n", f"a.n = b.n AND {on}"):
        try:
            parse_condition(condition, ["a", "b"])
        except InvalidSql:
            continue
        for columns in (select, "a.n", f"a.n AS x, {select}"):
            found = analyze_join(condition, columns, {"a": SCHEMA, "b": SCHEMA}, ["a", "b"])
            assert found.problems or found.output is not None
            assert found.output is None or len(found.copies) == len(found.output.fields)
