"""Operators are refused when a task starts, with the operator's name and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import topology
from spark_parts import StartSession

from rekindle.engine.model import State
from rekindle.engine.spark import query
from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain
from rekindle.errors import OperatorFailed, OperatorRefused
from rekindle.streams.epochs import NO_WATERMARK, EpochInput

pytestmark = pytest.mark.spark

SCHEMA = "s STRING, n BIGINT, a ARRAY<STRING>, t TIMESTAMP"


@pytest.fixture(scope="module")
def spark(start_shared: StartSession) -> Iterator[Any]:
    session = start_shared("unsupported")
    yield session
    sessions.stop_session(session, keep_jvm=True)


def chain_of(spark: Any, sql: str) -> SparkChain:
    compiled = topology(f'- {{name: op, inputs: [rows], sql: "{sql}"}}', "op", schema=SCHEMA)
    return SparkChain(compiled.segments[-1], compiled, spark)


def rows_of(spark: Any, sql: str, texts: list[str | None]) -> list[dict[str, Any]]:
    table = pa.table(
        {
            "s": pa.array(texts, pa.string()),
            "n": pa.array([5] * len(texts), pa.int64()),
            "a": pa.array([[text] for text in texts], pa.list_(pa.string())),
            "t": pa.array([0] * len(texts), pa.timestamp("us", "UTC")),
        }
    )
    epoch = EpochInput(0, NO_WATERMARK, NO_WATERMARK, (table,))
    result = chain_of(spark, sql).process(State(), [epoch])
    return [{k: str(v) for k, v in row.items()} for row in result.outputs[0].rows.to_pylist()]


READS = [
    "CAST(s AS TIMESTAMP)",
    "TRY_CAST(s AS TIMESTAMP_LTZ)",
    "to_timestamp(s)",
    "try_to_timestamp(upper(s))",
    "CAST(a[0] AS TIMESTAMP)",
    "s::TIMESTAMP",
    "a[0]::STRING::TIMESTAMP_LTZ",
    "CASE WHEN n > 0 THEN s END::TIMESTAMP",
]


def test_a_string_without_a_date_is_null(spark: Any) -> None:
    texts = ["5:17", "12:34:56", "T09:00:00", " 1:02", "x", None]
    items = ", ".join(f"{read} AS r{at}" for at, read in enumerate(READS))
    rows = rows_of(spark, f"SELECT {items} FROM rows", texts)
    found = {
        text: dict(zip(READS, row.values(), strict=True))
        for text, row in zip(texts, rows, strict=True)
    }
    assert found == {text: dict.fromkeys(READS, "None") for text in texts}


def test_a_string_with_a_date_is_cast_as_in_spark(spark: Any) -> None:
    expected = {
        "2020-01-02 12:34:56": "2020-01-02 12:34:56+00:00",
        " 2020-01-02T12:34:56+02:00": "2020-01-02 10:34:56+00:00",
        "2021": "2021-01-01 00:00:00+00:00",
        "+2021-3": "2021-03-01 00:00:00+00:00",
    }
    rows = rows_of(spark, "SELECT s, CAST(s AS TIMESTAMP) AS x FROM rows", list(expected))
    assert {row["s"]: row["x"] for row in rows} == expected


def test_other_types_are_cast_to_timestamp_as_in_spark(spark: Any) -> None:
    sql = "SELECT CAST(n AS TIMESTAMP) AS x, t > '2020-01-01' AS y, hour(t) AS h FROM rows"
    expected = {"x": "1970-01-01 00:00:05+00:00", "y": "False", "h": "0"}
    assert rows_of(spark, sql, ["x"]) == [expected]


@pytest.mark.parametrize(
    "item",
    [
        "hour(s)",
        "t > regexp_substr(s, 'x')",
        "date_trunc('DAY', concat(s, 'x'))",
        "CAST(array_union(a, a) AS ARRAY<TIMESTAMP>)",
        "to_utc_timestamp(s, 'Asia/Tokyo')",
    ],
)
def test_casts_to_timestamp_that_cannot_give_null_are_refused(spark: Any, item: str) -> None:
    with pytest.raises(
        OperatorRefused, match=r"operator op: .*gets the current date if it has none"
    ):
        chain_of(spark, f"SELECT {item} AS x FROM rows")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("from_json(s, 'MAP<STRING, INT>')", r"column x has the type map<string,int>.*map_entries"),
        ("from_json(s, 'm MAP<STRING, INT>')", r"map<string,int>.*map_entries"),
        ("array(from_json(s, 'MAP<STRING, INT>'))", r"type map<string,int>.*map_entries"),
        ("make_dt_interval(n)", r"interval day to second.*unix_micros"),
        ("make_ym_interval(1)", r"interval year to month.*BIGINT"),
        ("to_timestamp_ntz(t)", r"timestamp_ntz.*use TIMESTAMP"),
        ("try_parse_json(s)", r"variant.*from_json"),
        ("collate(s, 'UNICODE_CI')", r"collate UNICODE_CI.*UTF8_BINARY"),
        ("nullif(NULL, 1)", r"void.*CAST\(NULL AS STRING\)"),
    ],
)
def test_an_unsupported_type_is_refused(spark: Any, item: str, message: str) -> None:
    with pytest.raises(OperatorRefused, match=f"operator op: .*{message}"):
        chain_of(spark, f"SELECT {item} AS x FROM rows")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("format_string('%d', s)", "IllegalFormatConversionException: d != "),
        ("xpath_string(s, 'a/b')", "RuntimeException: Error loading expression 'a/b'$"),
        ("variant_get(parse_json(s), '$.a', 'INT')", r"\[MALFORMED_RECORD_IN_PARSING"),
    ],
)
def test_a_row_that_fails_an_operator_names_the_cause(
    spark: Any, item: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "_JVM_EXIT_TIMEOUT_S", 0.1)  # it does not exit
    with pytest.raises(OperatorFailed, match=rf"^operator op, epochs? 0[^:]*: {message}"):
        rows_of(spark, f"SELECT {item} AS x FROM rows", ["a, b"])


def test_a_refused_query_is_not_logged_with_its_stack(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OperatorRefused, match=r"operator op: .*EPOCH"):
        chain_of(spark, "SELECT EXTRACT(EPOCH FROM t) AS x FROM rows")
    assert "Py4JJavaError" not in "".join(capfd.readouterr())
