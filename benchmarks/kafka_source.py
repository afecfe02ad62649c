"""Reading a topic: ranges of offsets to rows, without Spark and without cut records.

.venv/bin/python benchmarks/kafka_source.py [--rows N] [--partitions N] [--formats json,csv,...]

Ten fields, some 250 bytes a record as JSON, uncompressed; `avro` with the number of its schema, of
which a registry is asked once; `raw` is the JSON text as one column. CPU of this process,
librdkafka's threads included, because other processes share the cores; the broker is another
process.

Targets: 150,000 rows of JSON for a second of CPU, 100,000 of Avro, in epochs of 10,000 rows or
more.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import resource
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fastavro
from confluent_kafka import Producer, admin
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rekindle.connectors.avro_values import PREFIX
from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.source import SourceContext
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.spec import SourceSpec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.report import Measurement, load_average, report

TARGETS = {"json": 150_000, "avro": 100_000}
SCHEMA = (
    "id BIGINT, user STRING, page STRING, referrer STRING, country STRING, price DOUBLE, "
    "quantity INT, paid BOOLEAN, at TIMESTAMP, session STRING"
)
VALUE = (
    b'{"id":%d,"user":"user-%06d","page":"/products/%06d/details","referrer":"https://example.org/'
    b'search?q=%06d","country":"NL","price":%d.25,"quantity":%d,"paid":true,'
    b'"at":"2026-01-01T00:%02d:%02d.%06dZ","session":"0123456789abcdef-%06d"}'
)

CSV_VALUE = (
    b"%d,user-%06d,/products/%06d/details,https://example.org/search?q=%06d,NL,%d.25,%d,true,"
    b"2026-01-01T00:%02d:%02d.%06dZ,0123456789abcdef-%06d"
)
FIELDS = {
    "id": "long",
    "user": "string",
    "page": "string",
    "referrer": ["null", "string"],
    "country": "string",
    "price": "double",
    "quantity": "int",
    "paid": "boolean",
    "at": {"type": "long", "logicalType": "timestamp-micros"},
    "session": "string",
}
AVRO = {
    "type": "record",
    "name": "Click",
    "fields": [{"name": name, "type": type_} for name, type_ in FIELDS.items()],
}
BEGIN_US = 1_767_225_600_000_000


def value_of(format: str, i: int) -> bytes:
    n = i % 1_000_000
    numbers = (i, n, n, n, i % 900, i % 7, i // 60 % 60, i % 60, n, n)
    if format == "csv":
        return CSV_VALUE % numbers
    if format in ("json", "raw"):
        return VALUE % numbers
    record = {
        "id": i,
        "user": f"user-{n:06d}",
        "page": f"/products/{n:06d}/details",
        "referrer": f"https://example.org/search?q={n:06d}",
        "country": "NL",
        "price": i % 900 + 0.25,
        "quantity": i % 7,
        "paid": True,
        "at": BEGIN_US + i % 3_600_000_000,
        "session": f"0123456789abcdef-{n:06d}",
    }
    if format == "protobuf":
        encoded: bytes = MESSAGE(**record).SerializeToString()
        return encoded
    data = io.BytesIO()
    fastavro.schemaless_writer(data, PARSED, record)
    return PREFIX.pack(0, 1) + data.getvalue()


PARSED = fastavro.parse_schema(AVRO)


def message_file() -> descriptor_pb2.FileDescriptorProto:
    kinds = descriptor_pb2.FieldDescriptorProto
    types = {"double": kinds.TYPE_DOUBLE, "int": kinds.TYPE_INT32, "boolean": kinds.TYPE_BOOL}
    made = descriptor_pb2.FileDescriptorProto(name="click.proto", syntax="proto3")
    message = made.message_type.add(name="Click")
    for number, (name, type_) in enumerate(FIELDS.items(), 1):
        default = kinds.TYPE_INT64 if name in ("id", "at") else kinds.TYPE_STRING
        field = message.field.add(name=name, number=number, label=kinds.LABEL_OPTIONAL)
        field.type = types.get(str(type_), default)
    return made


FILE = message_file()
POOL = descriptor_pool.DescriptorPool()
POOL.Add(FILE)
MESSAGE = message_factory.GetMessageClass(POOL.FindMessageTypeByName("Click"))


class Registry(BaseHTTPRequestHandler):
    """Of one schema."""

    def do_GET(self) -> None:
        body = json.dumps({"schema": json.dumps(AVRO)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def send(broker: KafkaBroker, format: str, rows: int, partitions: int) -> None:
    settings: dict[str, str | int | float | bool] = {"bootstrap.servers": broker.bootstrap_servers}
    client = admin.AdminClient(settings)
    for future in client.create_topics([admin.NewTopic(format, partitions, 1)]).values():
        future.result()
    producer = Producer({**settings, "linger.ms": 5, "queue.buffering.max.messages": 500_000})
    for i in range(rows):
        producer.produce(format, value_of(format, i), partition=i % partitions)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush(120)


def open_topic(
    broker: KafkaBroker, directory: Path, registry: str, format: str, rows_per_epoch: int
) -> KafkaSource:
    raw = {"schema": "line STRING", "eventTime": {"column": "at"}}
    more: dict[str, Any] = {"timestampColumn": "at"} if format == "raw" else {}
    if format == "avro":
        more["schemaRegistry"] = {"url": registry}
    schema = SCHEMA
    if format == "protobuf":
        files = descriptor_pb2.FileDescriptorSet(file=[FILE])
        more["protobufDescriptors"] = base64.b64encode(files.SerializeToString()).decode()
        more["protobufMessage"] = "Click"
        schema = SCHEMA.replace("at TIMESTAMP", "at BIGINT")
    document = {
        "checkpoint": {"store": f"file://{directory}/store"},
        "sources": [
            {
                "name": "clicks",
                "schema": schema,
                "eventTime": {"column": "t", "expression": "timestamp_micros(at)"}
                if format == "protobuf"
                else {"column": "at"},
                **(raw if format == "raw" else {}),
                "kafka": {
                    "bootstrapServers": broker.bootstrap_servers,
                    "topic": format,
                    "format": format,
                    "maxRowsPerEpoch": rows_per_epoch,
                    **more,
                },
            }
        ],
        "queries": [
            {"name": "q", "from": "clicks", "sink": {"files": {"url": f"file://{directory}/out"}}}
        ],
    }
    topology = compile_topology(load_spec(document), "bench", skip_cluster_checks=True)
    node = topology.nodes["clicks"]
    assert isinstance(node.spec, SourceSpec)
    assert node.spec.kafka is not None
    return KafkaSource(node.spec.kafka, SourceContext(node.spec, node, 1_000_000, directory))


def measure(source: KafkaSource, format: str, rows: int, rows_per_epoch: int) -> Measurement:
    reach, read, slowest = source.ends(None), 0, 0.0
    cpu, began = time.process_time(), time.perf_counter()
    while read < rows:
        epoch_began = time.perf_counter()
        read += source.read(reach.start, reach.end).table.num_rows
        reach = source.ends(reach.end)
        slowest = max(slowest, time.perf_counter() - epoch_began)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - began
    source.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    values = {
        "rows/s of CPU": round(rows / cpu),
        "rows/s": round(rows / wall),
        "slowest epoch ms": round(slowest * 1000),
        "MiB at most": memory,
    }
    what, target = f"{format}, {rows_per_epoch:,} rows an epoch", TARGETS.get(format)
    if rows_per_epoch < 10_000 or target is None:
        return Measurement(what, values)
    return Measurement(what, values, target, rows / cpu >= target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--formats", default="json,csv,raw,avro,protobuf")
    args = parser.parse_args()
    rows = list[Measurement]()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registry = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with KafkaBroker(directory / "kafka", on_progress=print) as broker:
            for format in args.formats.split(","):
                send(broker, format, args.rows, args.partitions)
                for count in (1_000, 10_000, 100_000):
                    source = open_topic(broker, directory, registry, format, count)
                    rows.append(measure(source, format, args.rows, count))
    server.shutdown()
    report("kafka_source", [*rows, load_average()])


if __name__ == "__main__":
    main()
