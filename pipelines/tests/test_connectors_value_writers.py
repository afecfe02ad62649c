"""What a Kafka sink writes is what a Kafka source of the same format reads."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_server import SchemaServer

from rekindle.arrow_types import arrow_schema, topology_type
from rekindle.connectors.avro_encoding import encode_avro
from rekindle.connectors.avro_values import PREFIX, AvroValues
from rekindle.connectors.csv_values import CsvValues
from rekindle.connectors.csv_writer import encode_csv
from rekindle.connectors.record_values import ValueDecoder
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.connectors.value_writers import AvroWriter, open_writer
from rekindle.errors import SourceFailed, SourceRefused
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.kinds.kafka_security import SchemaRegistrySpec
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec
from rekindle.topology.schema import Field, Schema
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.written_avro import written_avro_schema

SCALARS = (
    "l BIGINT, i INT, h SMALLINT, y TINYINT, d DOUBLE, f FLOAT, t BOOLEAN, s STRING, "
    "m DECIMAL(38,5), p DECIMAL(3,3), at TIMESTAMP, day DATE"
)
NESTED = f"{SCALARS}, b BINARY, list ARRAY<BIGINT>, inner STRUCT<x: INT, y: ARRAY<STRING>>"
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["NA", "", " a", 'q"q', "a,b", "x\ny", "\ufeff", "null"]
)


def _whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _decimal(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**precision - 1
    return st.integers(-most, most).map(lambda n: Decimal(f"{n}E-{scale}"))


_FINITE = st.floats(allow_nan=False, allow_infinity=True)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "l": _whole(64),
    "i": _whole(32),
    "h": _whole(16),
    "y": _whole(8),
    "d": _FINITE,
    "f": st.floats(allow_nan=False, width=32),
    "t": st.booleans(),
    "s": _TEXT,
    "m": _decimal(38, 5),
    "p": _decimal(3, 3),
    "at": st.datetimes(),
    "day": st.dates(),
    "b": st.binary(max_size=4),
    "list": st.lists(st.none() | _whole(64), max_size=3),
    "inner": st.fixed_dictionaries(
        {"x": st.none() | _whole(32), "y": st.none() | st.lists(_TEXT, max_size=2)}
    ),
}


def tables(ddl: str) -> st.SearchStrategy[pa.Table]:
    schema = arrow_schema(ddl_to_schema(ddl))
    row = st.fixed_dictionaries({name: st.none() | VALUES[name] for name in schema.names})
    return st.lists(row, max_size=4).map(lambda rows: pa.Table.from_pylist(rows, schema=schema))


def avro_schema(schema: pa.Schema) -> str:
    return written_avro_schema(Schema(tuple(Field(f.name, topology_type(f.type)) for f in schema)))


def read_csv(values: list[bytes], schema: pa.Schema) -> pa.Table:
    options = KafkaSourceSpec.model_validate(
        {"bootstrapServers": "b:1", "topic": "t", "format": "csv"}
    )
    decoded = ValueDecoder(CsvValues(schema, options), schema).decode(values)
    assert decoded.bad == {}
    return pa.Table.from_batches([decoded.rows])


@given(tables(NESTED))
def test_avro_is_read_as_it_was_written(rows: pa.Table) -> None:
    text = avro_schema(rows.schema)
    values = encode_avro(rows)
    decoded = ValueDecoder(AvroValues(rows.schema, text, None), rows.schema).decode(values)
    assert decoded.bad == {}
    assert pa.Table.from_batches([decoded.rows]).equals(rows)
    parsed = fastavro.parse_schema(json.loads(text))
    for value, row in zip(values, rows.to_pylist(), strict=True):
        stream = io.BytesIO(value)
        assert fastavro.schemaless_reader(stream, parsed, None) == row
        assert stream.read() == b""


def test_no_two_records_of_avro_have_one_name() -> None:
    for ddl in (
        "a STRUCT<b: STRUCT<x: INT>>, a_b STRUCT<y: INT>",
        "a ARRAY<STRUCT<x: INT>>, a_item STRUCT<y: INT>",
        "a STRUCT<a: STRUCT<a: ARRAY<STRUCT<a: INT>>>>, item STRUCT<item: INT>",
        "string STRUCT<string: STRUCT<long: INT>>, Row STRUCT<Row: INT>",
    ):
        schema = arrow_schema(ddl_to_schema(ddl))
        text = avro_schema(schema)
        fastavro.parse_schema(json.loads(text))
        rows = pa.Table.from_pylist([dict.fromkeys(schema.names)], schema=schema)
        decoder = ValueDecoder(AvroValues(schema, text, None), schema)
        assert decoder.decode(encode_avro(rows)).rows.to_pylist() == rows.to_pylist()


@given(tables(SCALARS))
def test_csv_is_read_as_it_was_written(rows: pa.Table) -> None:
    assert read_csv(encode_csv(rows), rows.schema).to_pylist() == rows.to_pylist()


@given(st.lists(st.none() | _TEXT, min_size=1, max_size=4))
def test_a_single_text_of_csv_is_read_as_it_was_written(texts: list[str | None]) -> None:
    rows = pa.table({"s": pa.array(texts, pa.string())})
    assert read_csv(encode_csv(rows), rows.schema).to_pylist() == rows.to_pylist()


def test_avro_keeps_the_sign_of_zero_and_slices() -> None:
    rows = pa.table(
        {"d": [1.0, 0.0, -0.0], "m": pa.array([Decimal("1.5"), None, Decimal("-2.5")])}
    ).slice(1)
    assert [value[1:9] for value in encode_avro(rows)] == [
        bytes(8),
        bytes(7) + b"\x80",
    ]
    assert encode_avro(rows)[1][9:] == b"\x02\x02\xe7"


def test_raw_values_are_the_bytes_of_the_column() -> None:
    options = KafkaSinkSpec.model_validate(
        {"bootstrapServers": "b:1", "topic": "t", "format": "raw", "valueColumn": "v"}
    )
    rows = pa.table({"k": [1, 2, 3], "v": ["é", None, ""]})
    assert open_writer(options, rows.schema).encode(rows) == ["é".encode(), None, b""]


class TestRegistry:
    ROWS = pa.table({"id": [1, 2]})

    def writer(self, server: SchemaServer) -> AvroWriter:
        registry = SchemaRegistry(SchemaRegistrySpec(url=server.url))
        return AvroWriter(registry, "a.b", self.ROWS.schema)

    def test_a_schema_is_registered_once(self) -> None:
        with SchemaServer({7: {}}) as server:
            writer = self.writer(server)
            values = [*writer.encode(self.ROWS), *writer.encode(self.ROWS)]
            assert self.writer(server).encode(self.ROWS) == values[:2]
            schema = avro_schema(self.ROWS.schema)
            assert server.registered == {("a.b-value", schema): 8}
            assert server.requests == [
                "/subjects/a.b-value",
                "/subjects/a.b-value/versions",
                "/subjects/a.b-value",
            ]
            assert all((value or b"").startswith(PREFIX.pack(0, 8)) for value in values)

    def test_who_may_not_register_finds_what_is_there(self) -> None:
        with SchemaServer({}, refuses=403) as server:
            with pytest.raises(SourceRefused, match="refuses the user"):
                self.writer(server).encode(self.ROWS)
            server.registered["a.b-value", avro_schema(self.ROWS.schema)] = 3
            assert (self.writer(server).encode(self.ROWS)[0] or b"")[:5] == PREFIX.pack(0, 3)

    @pytest.mark.parametrize(
        ("status", "says", "message"),
        [
            (409, "", "not compatible with the schema .* the subject's compatibility$"),
            (409, "type of\nid changed", "not compatible with .*: type of id changed$"),
            (422, "Invalid schema", "the schema is refused: Invalid schema$"),
            (500, "", "HTTP 500$"),
            (500, "x" * 9_999, "HTTP 500: x{500}$"),
        ],
    )
    def test_what_the_registry_refuses_is_said_in_its_words(
        self, status: int, says: str, message: str
    ) -> None:
        with (
            SchemaServer({}, refuses=status, says=says) as server,
            pytest.raises(SourceFailed, match=message),
        ):
            self.writer(server).encode(self.ROWS)

    def test_a_registry_that_is_away_is_asked_again(self) -> None:
        writer = AvroWriter(
            SchemaRegistry(SchemaRegistrySpec(url="http://127.0.0.1:1")), "t", self.ROWS.schema
        )
        for _ in range(2):
            with pytest.raises(SourceFailed, match=r"127\.0\.0\.1:1"):
                writer.encode(self.ROWS)
