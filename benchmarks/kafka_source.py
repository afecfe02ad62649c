"""Reading a topic: ranges of offsets to rows, without Spark and without cut records.

.venv/bin/python benchmarks/kafka_source.py [--rows N] [--partitions N]

Ten fields, some 250 bytes a record, uncompressed. CPU of this process, librdkafka's threads
included, because other processes share the cores; the broker is another process.

Target: 150,000 rows for a second of CPU, in epochs of 10,000 rows or more.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from confluent_kafka import Producer, admin

from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.source import SourceContext
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.spec import SourceSpec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.report import Measurement, load_average, report

TARGET = 150_000
TOPIC = "bench"
SCHEMA = (
    "id BIGINT, user STRING, page STRING, referrer STRING, country STRING, price DOUBLE, "
    "quantity INT, paid BOOLEAN, at TIMESTAMP, session STRING"
)
VALUE = (
    b'{"id":%d,"user":"user-%06d","page":"/products/%06d/details","referrer":"https://example.org/'
    b'search?q=%06d","country":"NL","price":%d.25,"quantity":%d,"paid":true,'
    b'"at":"2026-01-01T00:%02d:%02d.%06dZ","session":"0123456789abcdef-%06d"}'
)


def send(broker: KafkaBroker, rows: int, partitions: int) -> None:
    settings: dict[str, str | int | float | bool] = {"bootstrap.servers": broker.bootstrap_servers}
    client = admin.AdminClient(settings)
    for future in client.create_topics([admin.NewTopic(TOPIC, partitions, 1)]).values():
        future.result()
    producer = Producer({**settings, "linger.ms": 5, "queue.buffering.max.messages": 500_000})
    for i in range(rows):
        n = i % 1_000_000
        value = VALUE % (i, n, n, n, i % 900, i % 7, i // 60 % 60, i % 60, n, n)
        producer.produce(TOPIC, value, partition=i % partitions)
        if i % 10_000 == 0:
            producer.poll(0)
    producer.flush(120)


def open_topic(broker: KafkaBroker, directory: Path, rows_per_epoch: int) -> KafkaSource:
    document = {
        "checkpoint": {"store": f"file://{directory}/store"},
        "sources": [
            {
                "name": "clicks",
                "schema": SCHEMA,
                "eventTime": {"column": "at"},
                "kafka": {
                    "bootstrapServers": broker.bootstrap_servers,
                    "topic": TOPIC,
                    "format": "json",
                    "maxRowsPerEpoch": rows_per_epoch,
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


def measure(broker: KafkaBroker, directory: Path, rows: int, rows_per_epoch: int) -> Measurement:
    source = open_topic(broker, directory, rows_per_epoch)
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
    what = f"{rows_per_epoch:,} rows an epoch"
    if rows_per_epoch < 10_000:
        return Measurement(what, values)
    return Measurement(what, values, TARGET, rows / cpu >= TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--partitions", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with KafkaBroker(directory / "kafka", on_progress=print) as broker:
            send(broker, args.rows, args.partitions)
            rows = [measure(broker, directory, args.rows, n) for n in (1_000, 10_000, 100_000)]
    report("kafka_source", [*rows, load_average()])


if __name__ == "__main__":
    main()
