"""Every aggregate of every type, over its edge cases, equals Spark's batch result, or is refused
before the first row."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import MINUTE, topology
from schema_parts import arrow_schema_of

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
def spark(tmp_path_factory: pytest.TempPathFactory, cds_archive: Path) -> Iterator[Any]:
    data = tmp_path_factory.mktemp("table")
    session = sessions.start_session("table", data_dir=data, cds_archive=cds_archive)
    yield session
    sessions.stop_session(session)


def chain_of(spark: Any, kind: str, items: str) -> SparkChain:
    window = f'{{size: 1m, groupBy: [k], aggregate: "{items}"}}'
    operators = f"- {{name: w, inputs: [rows], window: {window}}}"
    compiled = topology(operators, "w", schema=f"k STRING, x {kind}, t TIMESTAMP")
    return SparkChain(compiled.segments[-1], compiled, spark)


def rows_of(kind: str) -> pa.Table:
    """All cases of a type, each a group; each with a NULL too, and one of NULLs alone."""
    cases = {name: [*values, None] for name, values in CASES[kind].items()}
    cases["nulls"] = [None, None]
    cases["one"] = [next(iter(CASES[kind].values()))[0]]
    keys = [name for name, values in cases.items() for _ in values]
    values = [value for values in cases.values() for value in values]
    schema = arrow_schema_of(f"k STRING, x {kind}, t TIMESTAMP")
    columns = {"k": keys, "x": values, "t": [dt.datetime.fromtimestamp(0, UTC)] * len(keys)}
    return pa.table(columns, schema=schema)


def batch(spark: Any, kind: str, items: str) -> pa.Table:
    """Spark's batch result for the same rows. Its avg of decimals is a DECIMAL."""
    spark.createDataFrame(rows_of(kind)).coalesce(1).createOrReplaceTempView("table_rows")
    if kind.startswith("DECIMAL"):
        items = items.replace("avg(x)", "avg(CAST(x AS DOUBLE))")
    return spark.sql(f"SELECT k, {items} FROM table_rows GROUP BY k").toArrow()


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by("k").combine_chunks()


@pytest.mark.parametrize("kind", CASES)
def test_aggregates_are_those_of_spark(spark: Any, kind: str) -> None:
    items = ", ".join(f"{aggregate} AS a{at}" for at, aggregate in enumerate(accepted(kind)))
    chain, rows = chain_of(spark, kind, items), rows_of(kind)
    expected = in_order(batch(spark, kind, items))
    one = [EpochInput(0, watermark_before=NO_WATERMARK, watermark=2 * MINUTE, inputs=(rows,))]
    last = len(rows) - 1
    each = [
        EpochInput(e, NO_WATERMARK, 2 * MINUTE if e == last else NO_WATERMARK, (rows.slice(e, 1),))
        for e in range(len(rows))
    ]
    for epochs in (one, each):
        output = chain.process(State(), epochs).outputs[-1].rows
        found = in_order(output.select(expected.column_names))
        assert digest_table(found) == digest_table(expected), (found, expected)


@pytest.mark.parametrize(("kind", "aggregate"), REFUSED)
def test_aggregates_without_result_are_refused(spark: Any, kind: str, aggregate: str) -> None:
    with pytest.raises((InvalidTopology, OperatorRefused), match=r"spec\.operators|operator w: "):
        chain_of(spark, kind, f"{aggregate} AS a")
