"""Every aggregate of every type, over its edge cases, equals Spark's batch result, or is refused
before the first row."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import MINUTE, topology
from schema_parts import arrow_schema_of
from spark_parts import StartSession

from rekindle.engine.model import State
from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain
from rekindle.errors import InvalidTopology, OperatorRefused
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_WATERMARK, EpochInput

pytestmark = pytest.mark.spark

UTC = dt.UTC
BIG, LOW = Decimal("9" * 38), Decimal("-" + "9" * 38)
TINY, BELOW = Decimal("0." + "9" * 38), Decimal("-0." + "9" * 38)


def integers(bits: int) -> dict[str, list[Any]]:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return {"extremes": [least, most, 0], "overflow": [most, most, most], "low": [least, least]}


FLOATS: dict[str, list[Any]] = {
    "nan": [1.0, math.nan, -1.0],
    "zeros": [-0.0, 0.0, -0.0],
    "negative zero": [-0.0, None],
    "infinities": [math.inf, 1.0, -math.inf],
    "infinity": [math.inf, 1.0],
}
CASES: dict[str, dict[str, list[Any]]] = {
    "TINYINT": integers(8),
    "SMALLINT": integers(16),
    "INT": integers(32),
    "BIGINT": integers(64),
    "FLOAT": FLOATS | {"extremes": [3.4028234663852886e38, 3.4028234663852886e38]},
    "DOUBLE": FLOATS | {"extremes": [1.7976931348623157e308, 1.7976931348623157e308, -1.0]},
    "DECIMAL(10, 2)": {"extremes": [Decimal("99999999.99"), Decimal("-99999999.99")]},
    "DECIMAL(28, 3)": {"extremes": [Decimal("9" * 25 + ".999")] * 3},
    "DECIMAL(38, 0)": {
        "extremes": [BIG, LOW, Decimal(1)],
        "overflow": [BIG, BIG, Decimal(1)],
        "low": [LOW, LOW],
        "borrow": [Decimal(10**20), Decimal(-1), Decimal(-(10**37))],
    },
    "DECIMAL(38, 38)": {"extremes": [TINY, BELOW, TINY], "overflow": [TINY, TINY]},
    "STRING": {"words": ["b", "", "a"], "numbers": ["1", "x", " 2.5 "], "wide": ["ü", "z", "é"]},
    "BOOLEAN": {"mixed": [True, False, None], "true": [True, True], "false": [False]},
    "DATE": {"extremes": [dt.date(1, 1, 1), dt.date(9999, 12, 31)]},
    "TIMESTAMP": {
        "extremes": [dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, tzinfo=UTC)]
    },
    "BINARY": {"bytes": [b"\xff", b"", b"a\x00"]},
    "ARRAY<INT>": {"lists": [[1], [], [2]]},
    "STRUCT<a: INT>": {"structs": [{"a": 1}, {"a": 2}]},
}
COUNTS = ("count(x)", "count_if(x IS NULL)")
ORDERED = ("min(x)", "max(x)", "max(x) FILTER (WHERE false)")
ADDED = ("sum(x)", "avg(x)", "sum(x) FILTER (WHERE false)", "avg(x) FILTER (WHERE false)")
LOGICAL = ("bool_and(x)", "bool_or(x)", "bool_and(x) FILTER (WHERE false)")
NUMBERS = ("TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL")


def accepted(kind: str) -> tuple[str, ...]:
    found: tuple[str, ...] = COUNTS
    if not kind.startswith(("ARRAY", "STRUCT")):
        found += ORDERED
    if kind.startswith(NUMBERS):
        found += ADDED
    return found + (LOGICAL if kind == "BOOLEAN" else ())


REFUSED = [
    (kind, aggregate)
    for kind in CASES
    for aggregate in (*ORDERED[:2], *ADDED[:2], *LOGICAL[:2])
    if aggregate not in accepted(kind)
]


@pytest.fixture(scope="module")
def spark(start_shared: StartSession) -> Iterator[Any]:
    session = start_shared("table")
    yield session
    sessions.stop_session(session, keep_jvm=True)


FAMILIES = {
    "integers": ["TINYINT", "SMALLINT", "INT", "BIGINT"],
    "floats": ["FLOAT", "DOUBLE"],
    "decimals": [kind for kind in CASES if kind.startswith("DECIMAL")],
    "others": [kind for kind in CASES if not kind.startswith(NUMBERS)],
}
"""Types that are columns of one query; the code that Spark generates has a maximum size."""


def chain_of(spark: Any, kinds: list[str], items: str) -> SparkChain:
    window = f'{{size: 1m, groupBy: [k], aggregate: "{items}"}}'
    operators = f"- {{name: w, inputs: [rows], window: {window}}}"
    compiled = topology(operators, "w", schema=schema_of(kinds))
    return SparkChain(compiled.segments[-1], compiled, spark)


def schema_of(kinds: list[str]) -> str:
    columns = (f"x{at} {kind}" for at, kind in enumerate(kinds))
    return ", ".join(("k STRING", *columns, "t TIMESTAMP"))


def rows_of(kinds: list[str]) -> pa.Table:
    """All cases of each type, each a group, in which the other types are NULL; each with a NULL
    too, and one of NULLs alone."""
    rows: list[dict[str, Any]] = [{"k": "nulls"}, {"k": "nulls"}]
    for at, kind in enumerate(kinds):
        cases = {name: [*values, None] for name, values in CASES[kind].items()}
        cases["one"] = [next(iter(CASES[kind].values()))[0]]
        rows += (
            {"k": f"{kind} {name}", f"x{at}": value}
            for name, values in cases.items()
            for value in values
        )
    start = dt.datetime.fromtimestamp(0, UTC)
    return pa.Table.from_pylist(
        [row | {"t": start} for row in rows], schema=arrow_schema_of(schema_of(kinds))
    )


def items_of(kinds: list[str]) -> dict[str, str]:
    """By output column: its aggregate."""
    return {
        f"x{at}_{n}": re.sub(r"\bx\b", f"x{at}", aggregate)
        for at, kind in enumerate(kinds)
        for n, aggregate in enumerate(accepted(kind))
    }


def batch(spark: Any, kinds: list[str], items: dict[str, str]) -> pa.Table:
    """Spark's batch result for the same rows. Its avg of decimals is a DECIMAL."""
    spark.createDataFrame(rows_of(kinds)).coalesce(1).createOrReplaceTempView("table_rows")
    text = as_sql(items)
    for at, kind in enumerate(kinds):
        if kind.startswith("DECIMAL"):
            text = text.replace(f"avg(x{at})", f"avg(CAST(x{at} AS DOUBLE))")
    return spark.sql(f"SELECT k, {text} FROM table_rows GROUP BY k").toArrow()


def as_sql(items: dict[str, str]) -> str:
    return ", ".join(f"{aggregate} AS {name}" for name, aggregate in items.items())


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by("k").combine_chunks()


@pytest.mark.parametrize("family", FAMILIES)
def test_aggregates_are_those_of_spark(spark: Any, family: str) -> None:
    kinds = FAMILIES[family]
    items, rows = items_of(kinds), rows_of(kinds)
    chain = chain_of(spark, kinds, as_sql(items))
    expected = in_order(batch(spark, kinds, items))
    one = [EpochInput(0, watermark_before=NO_WATERMARK, watermark=2 * MINUTE, inputs=(rows,))]
    last = len(rows) - 1
    each = [
        EpochInput(e, NO_WATERMARK, 2 * MINUTE if e == last else NO_WATERMARK, (rows.slice(e, 1),))
        for e in range(len(rows))
    ]
    for epochs in (one, each):
        output = chain.process(State(), epochs).outputs[-1].rows
        found = in_order(output.select(expected.column_names))
        assert found["k"] == expected["k"]
        for name, aggregate in items.items():
            got, wanted = (table.select(["k", name]) for table in (found, expected))
            kind = kinds[int(name[1 : name.index("_")])]
            assert digest_table(got) == digest_table(wanted), (kind, aggregate, got, wanted)


@pytest.mark.parametrize(("kind", "aggregate"), REFUSED)
def test_aggregates_without_result_are_refused(spark: Any, kind: str, aggregate: str) -> None:
    with pytest.raises((InvalidTopology, OperatorRefused), match=r"spec\.operators|operator w: "):
        chain_of(spark, [kind], f"{aggregate.replace('(x)', '(x0)')} AS a")
