"""The generator: independent epochs, equal on every machine, and messages for wrong columns."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_parts import topology_schema

from rekindle.connectors.registry import open_source
from rekindle.connectors.source import ReplayableSource, SourceSummary
from rekindle.engine.memory import plan_memory
from rekindle.errors import EpochTooLarge, SourceFailed
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK
from rekindle.topology.generator.expressions import ExpressionError, GeneratorCall, parse_expression
from rekindle.topology.model import Node
from rekindle.topology.schema import Field, Scalar, Schema
from rekindle.topology.spec import SourceSpec

SECOND = 1_000_000
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("t", UTC),
        ("i", pa.int32()),
        ("u", pa.float64()),
        ("g", pa.float64()),
        ("c", pa.string()),
        ("k", pa.string()),
        ("b", pa.bool_()),
        ("m", pa.float64()),
    ]
)
COLUMNS = {
    "n": "sequence",
    "t": "timestamp(2013-01-01 00:00:00, 2s)",
    "i": "integer(-5, 50)",
    "u": "uniform(0, 100)",
    "g": "normal(10, 2)",
    "c": "choice(EWR, 'JFK, NY', LGA)",
    "k": "key(key-, 7)",
    "b": "boolean(0.25)",
    "m": "null(0.1, uniform(0, 1))",
}


def generator(
    schema: pa.Schema = SCHEMA, columns: Any = None, lateness: str = "1s", **more: Any
) -> ReplayableSource:
    has_time = "t" in schema.names
    spec = {
        "name": "g",
        "schema": "-",
        "generator": {"rowsPerSecond": 1000, "columns": columns or COLUMNS, **more},
        **({"eventTime": {"column": "t", "lateness": lateness}} if has_time else {}),
    }
    source = SourceSpec.model_validate(spec)
    event_time = "t" if has_time else None
    node = Node(
        "g",
        "id-g",
        source,
        inputs=(),
        schema=topology_schema(schema),
        event_time=event_time,
        partitions=1,
    )
    return open_source(source, node, SECOND, Path("/nonexistent"))


def test_the_summary_of_generated_rows_is_before_jitter() -> None:
    start_us = 1_356_998_400 * SECOND
    assert generator().summary == SourceSummary(None, start_us, None)
    assert generator(rows=3001).summary == SourceSummary(3001, start_us, start_us + 3 * SECOND)
    assert generator(rows=10**30).summary == SourceSummary(10**30, start_us, 2**63 - 1)
    timeless = generator(pa.schema([("n", pa.int64())]), {"n": "sequence"}, rows=5)
    assert timeless.summary == SourceSummary(5, None, None)


def test_epochs_are_independent_and_consecutive() -> None:
    one = generator(rowsPerSecond=333.3)
    another = generator(rowsPerSecond=333.3)
    forward = [one.cut(e).rows for e in range(20)]
    assert another.cut(13).rows.equals(forward[13])
    assert pa.concat_tables(forward).column("n").to_pylist() == list(range(6666))
    assert forward[0].schema == SCHEMA


@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.7, 3.0, 997.5]))
def test_rows_do_not_depend_on_where_epochs_begin(epoch: int, span: int, rate: float) -> None:
    source = generator(rowsPerSecond=rate)
    parts = pa.concat_tables([source.cut(epoch + i).rows for i in range(span)])
    spec = {"name": "g", "schema": "-", "eventTime": {"column": "t"}}
    spec |= {"generator": {"rowsPerSecond": rate, "columns": COLUMNS}}
    wide_spec = SourceSpec.model_validate(spec)
    node = Node(
        "g",
        "id-g",
        wide_spec,
        inputs=(),
        schema=topology_schema(SCHEMA),
        event_time="t",
        partitions=1,
    )
    wide = open_source(wide_spec, node, SECOND * span, Path("/nonexistent"))
    if epoch % span == 0:
        assert parts.equals(wide.cut(epoch // span).rows)


def test_seeds_and_columns_have_their_own_random_numbers() -> None:
    rows = generator().cut(0).rows
    assert not rows.equals(generator(seed=1).cut(0).rows)
    twice = {"a": "uniform(0, 1)", "b": "uniform(0, 1)"}
    schema = pa.schema([("a", pa.float64()), ("b", pa.float64())])
    both = generator(schema, twice).cut(0).rows
    assert not both.column("a").equals(both.column("b"))


def test_values_follow_the_expressions() -> None:
    rows = pa.concat_tables([generator().cut(e).rows for e in range(20)])
    low_high = pc.min_max(rows.column("i")).as_py()
    assert low_high == {"min": -5, "max": 50}
    assert set(rows.column("c").to_pylist()) == {"EWR", "JFK, NY", "LGA"}
    assert set(rows.column("k").to_pylist()) == {f"key-{i}" for i in range(7)}
    assert 0.23 < pc.mean(rows.column("b").cast(pa.int8())).as_py() < 0.27
    assert 0.08 < rows.column("m").null_count / rows.num_rows < 0.12
    assert abs(pc.mean(rows.column("g")).as_py() - 10) < 0.1
    assert abs(pc.stddev(rows.column("g")).as_py() - 2) < 0.1
    assert 49 < pc.mean(rows.column("u")).as_py() < 51


def test_the_first_values_never_change() -> None:
    rows = generator().cut(0).rows.slice(0, 3).to_pydict()
    assert rows["i"] == FIRST["i"]
    assert rows["u"] == FIRST["u"]
    assert rows["g"] == FIRST["g"]


FIRST = {
    "i": [-2, 30, 7],
    "u": [88.87099757247732, 76.37100331166829, 27.872165927746718],
    "g": [10.347097838817687, 10.476790951581211, 10.662056666384395],
}


def test_the_watermark_bounds_the_event_times_that_follow() -> None:
    source = generator(columns={**COLUMNS, "t": "timestamp(2013-01-01 00:00:00, 900ms)"})
    for epoch in range(5):
        watermark = source.cut(epoch).watermark
        later = source.cut(epoch + 1).rows.column("t").cast(pa.int64())
        assert pc.min(later).as_py() >= watermark
    schema = pa.schema([("n", pa.int64())])
    assert generator(schema, {"n": "sequence"}).cut(0).watermark == NO_WATERMARK


def test_event_times_bound_all_rows_through_an_epoch() -> None:
    source = generator(
        columns={**COLUMNS, "t": "timestamp(2013-01-01 00:00:00, 900ms)"}, lateness="5s"
    )
    newest = NO_WATERMARK
    for epoch in range(5):
        cut = source.cut(epoch)
        newest = max(newest, pc.max(cut.rows.column("t").cast(pa.int64())).as_py())
        times = source.event_times(epoch)
        assert newest <= times.newest_us == cut.watermark + 5_000_000
        assert times.watermark == cut.watermark
    assert source.event_times(-1).newest_us == NO_WATERMARK


def test_a_bounded_generator_ends() -> None:
    source = generator(rows=2500)
    assert source.last_epoch == 2
    assert [source.cut(e).rows.num_rows for e in range(4)] == [1000, 1000, 500, 0]
    assert source.cut(2).watermark < END_OF_INPUT == source.cut(3).watermark
    assert generator(rows=2000).last_epoch == 1
    assert generator().last_epoch is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no expression for n"),
        ({"n": "sequence", "x": "sequence"}, "x not in the schema"),
        ({"n": "sequenze"}, "columns.n: 'sequenze': unknown function sequenze; write sequence"),
        ({"n": "integer(1)"}, "integer needs 2 arguments"),
        ({"n": "integer(a, b)"}, "'a' is not an integer"),
        ({"n": "integer(9, 1)"}, "9 is above 1"),
        ({"n": "uniform(9, 1.5)"}, "9 is above 1.5"),
        ({"n": "choice(a, b)"}, "does not give BIGINT"),
        ({"n": "null(2, sequence)"}, "2.0 is not a probability"),
        ({"n": "sequence(1, 2"}, "lacks a closing parenthesis"),
        ({"n": "timestamp"}, "the schema has BIGINT"),
        ({"n": "uniform(0, 3)"}, "'uniform(0, 3)': uniform gives DOUBLE, and the schema has"),
        ({"n": "null(0.5, normal(0, 1))"}, "normal gives DOUBLE, and the schema has BIGINT"),
        ({"n": "integer(0, 100000000000000000000)"}, "does not give BIGINT"),
        ({"n": "integer(-9223372036854775808, 9223372036854775807)"}, "does not give BIGINT"),
        ({"n": "sequence(100000000000000000000)"}, "does not give BIGINT"),
        ({"n": "key(1, 100000000000000000000)"}, "does not give BIGINT"),
    ],
)
def test_a_bad_column_is_named(columns: dict[str, str], message: str) -> None:
    columns = columns or {"": ""}
    with pytest.raises(SourceFailed) as caught:
        generator(pa.schema([("n", pa.int64())]), columns)
    assert message in str(caught.value)


def test_a_value_that_does_not_fit_later_is_named_with_its_epoch() -> None:
    schema = pa.schema([("n", pa.int8())])
    source = generator(schema, {"n": "sequence"}, rowsPerSecond=100)
    assert source.cut(0).rows.num_rows == 100
    message = r"source g: generator.columns.n: 'sequence': no int8 value for some row of epoch 1"
    with pytest.raises(SourceFailed, match=message):
        source.cut(1)


@pytest.mark.parametrize(
    ("kind", "expression"),
    [
        (pa.int64(), "sequence(9223372036854775800)"),
        (pa.int64(), "sequence(-9223372036854775800, -1)"),
        (pa.string(), "sequence(9223372036854775800)"),
        (pa.decimal128(19), "sequence(0, 1000000000000000000)"),
        (UTC, "timestamp(0000-01-01 00:00:00, 106751991d)"),
    ],
    ids=str,
)
def test_a_value_outside_64_bits_is_named(kind: pa.DataType, expression: str) -> None:
    source = generator(pa.schema([("n", kind)]), {"n": expression})
    with pytest.raises(SourceFailed, match=r"columns.n: '.*': no .* value for some row of epoch 0"):
        source.cut(0)


def test_a_time_outside_64_bits_is_named() -> None:
    columns = {"t": "timestamp(9999-12-31 23:59:59)"}
    source = generator(pa.schema([("t", UTC)]), columns, rowsPerSecond=1)
    newest = (2**63 - 253_402_300_799 * SECOND) // SECOND
    assert source.cut(newest).rows.num_rows == 1
    with pytest.raises(SourceFailed, match=r"columns.t: .*: no .* value for some row of epoch"):
        source.cut(newest + 1)


@pytest.mark.parametrize(
    "bounds", [(-(2**63), 2**63 - 2), (-(2**63) + 1, 2**63 - 1), (0, 2**63 - 1), (-(2**63),) * 2]
)
def test_integers_may_reach_both_ends_of_bigint(bounds: tuple[int, int]) -> None:
    low, high = bounds
    rows = generator(pa.schema([("n", pa.int64())]), {"n": f"integer({low}, {high})"}).cut(0).rows
    found = rows.column("n").to_pylist()
    assert all(low <= number <= high for number in found)
    quarters = {(number - low) * 4 // (high - low + 1) for number in found}
    assert quarters == ({0, 1, 2, 3} if high > low else {0})


def test_a_sequence_may_end_where_bigint_ends() -> None:
    columns = {"n": f"sequence({-(2**63)}, {2**62})"}
    rows = generator(pa.schema([("n", pa.int64())]), columns, rows=4).cut(0).rows
    assert rows.column("n").to_pylist() == [-(2**63), -(2**62), 0, 2**62]


@pytest.mark.parametrize(
    ("kind", "expression"),
    [
        (pa.float64(), "uniform(-1.7e308, 1.7e308)"),
        (pa.string(), "uniform(-1.7e308, 1.7e308)"),
        (pa.float32(), "uniform(0, 1e300)"),
        (pa.float64(), "normal(1e308, 1e308)"),
        (pa.float32(), "normal(0, 1e38)"),
    ],
    ids=str,
)
def test_a_range_with_infinite_values_is_refused(kind: pa.DataType, expression: str) -> None:
    with pytest.raises(SourceFailed, match="does not give"):
        generator(pa.schema([("n", kind)]), {"n": expression})


def test_a_watermark_is_never_before_all_times() -> None:
    schema, columns = pa.schema([("t", UTC)]), {"t": "timestamp(0000-01-01 00:00:00)"}
    source = generator(schema, columns, lateness="106751991d")
    assert source.cut(0).watermark == NO_WATERMARK


@pytest.mark.parametrize("kind", [pa.float32(), pa.decimal128(7, 2), pa.string()])
def test_doubles_are_converted_to_other_fractional_types(kind: pa.DataType) -> None:
    columns = {"a": "uniform(0, 100)", "b": "normal(0, 10)"}
    rows = generator(pa.schema([("a", kind), ("b", kind)]), columns).cut(0).rows
    assert rows.num_rows == 1000


def test_an_event_time_that_is_no_timestamp_expression_is_refused() -> None:
    schema = pa.schema([("t", UTC)])
    with pytest.raises(SourceFailed, match="the event time has to be a timestamp"):
        generator(schema, {"t": "choice(2013-01-01T00:00:00Z)"})


def test_expressions_parse() -> None:
    assert parse_expression(" null( 0.1 , choice('it''s', b c) ) ") == GeneratorCall(
        "null", ("0.1", GeneratorCall("choice", ("it's", "b c")))
    )
    assert parse_expression("timestamp()") == GeneratorCall("timestamp", ())
    for bad in ("", "(a)", "f(a", "f(a b, )", "f(a) b", "f('a)", "f(a (b))c"):
        with pytest.raises(ExpressionError):
            parse_expression(bad)


@pytest.mark.parametrize(("rows", "rate"), [(None, 0.1), (None, 3), (1, 0.7), (7, 0.1), (7, 3)])
def test_a_generator_names_its_next_epoch_to_cut(rows: int | None, rate: float) -> None:
    more: dict[str, Any] = {} if rows is None else {"rows": rows}
    source = generator(rowsPerSecond=rate, **more)
    cuts = [source.cut(e) for e in range(-1, 100)]
    changes = [
        e
        for e, (before, cut) in enumerate(itertools.pairwise(cuts))
        if cut.rows.num_rows or cut.watermark != before.watermark
    ]
    for epoch in range(80 if rows is None else 100):
        assert source.next_epoch_to_cut(epoch) == next((e for e in changes if e >= epoch), None)


def test_a_too_large_epoch_is_refused_before_it_is_made() -> None:
    spec = {
        "name": "s",
        "schema": "-",
        "generator": {"rowsPerSecond": 1e9, "columns": {"n": "sequence"}},
    }
    schema = Schema((Field("n", Scalar.BIGINT),))
    source_spec = SourceSpec.model_validate(spec)
    node = Node("s", "s", source_spec, inputs=(), schema=schema, event_time=None, partitions=1)
    memory = plan_memory(with_jvm=False)
    source = open_source(node.spec, node, SECOND, Path("unused"), memory)  # type: ignore[arg-type]
    with pytest.raises(EpochTooLarge, match=r"source s: epoch 0 \(1,000,000,000 rows\) is larger"):
        source.cut(0)
