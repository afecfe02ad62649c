"""Writing a topic: rows to records in transactions, without a task around the sink.

.venv/bin/python benchmarks/kafka_sink.py [--rows N] [--transactions N]

Ten columns, some 250 bytes a record, keyed, uncompressed. CPU of this process, librdkafka's threads
included, because other processes share the cores; the broker is another process.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from confluent_kafka import admin

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.kafka_sink import KafkaSink
from rekindle.connectors.sink import SinkContext
from rekindle.errors import SinkRefused
from rekindle.streams.epochs import EpochBatch
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.report import Measurement, load_average, report


def rows_of(count: int) -> pa.Table:
    ids = np.arange(count)
    times = ids * 1000 + int(time.time() * 1e6)
    texts = [f"user-{id:06d}" for id in ids]
    return pa.table(
        {
            "id": ids,
            "user": texts,
            "page": [f"/products/{id:06d}/details" for id in ids],
            "referrer": [f"https://example.org/search?q={id:06d}" for id in ids],
            "country": ["NL"] * count,
            "price": ids + 0.25,
            "quantity": pa.array(ids % 7, pa.int32()),
            "paid": ids % 2 == 0,
            "at": pa.array(times, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "session": [f"0123456789abcdef-{id:06d}" for id in ids],
        }
    )


def measure(sink: KafkaSink, first: int, count: int, transactions: int) -> Measurement:
    rows, times = rows_of(count), list[float]()
    cpu = time.process_time()
    for epoch in range(first, first + transactions):
        began = time.perf_counter()
        sink.write(EpochBatch("s", 0, epoch, 0, rows, ""))
        sink.commit(epoch)
        times.append(time.perf_counter() - began)
    rate = count * transactions / (time.process_time() - cpu)
    values = {
        "rows/s of CPU": round(rate),
        "median transaction ms": round(sorted(times)[len(times) // 2] * 1000),
        "MiB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    what = f"{count:,} rows a transaction"
    return Measurement(what, values)


def open_when_ready(broker: KafkaBroker, directory: Path) -> KafkaSink:
    client = admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    client.create_topics([admin.NewTopic("rows", 4, 1)])["rows"].result()
    (directory / "store").mkdir()
    options = {"bootstrapServers": broker.bootstrap_servers, "topic": "rows", "key": ["user"]}
    definition = Definition("d", 1, 0, 1_000_000)
    store = f"file://{directory}/store"
    schema = rows_of(1).schema
    sink = KafkaSink(
        KafkaSinkSpec.model_validate(options),
        SinkContext("q", 0, "uid", schema, definition, "at", 1_000_000, store),
    )
    while True:
        try:
            sink.last_epoch()
            return sink
        except SinkRefused:  # the topic of markers has no leader yet
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--transactions", type=int, default=8)
    given = parser.parse_args()
    found = list[Measurement]()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with KafkaBroker(directory / "kafka", on_progress=print) as broker:
            sink = open_when_ready(broker, directory)
            measure(sink, 0, 1_000, 4)
            for at, count in enumerate(given.rows):
                first = 4 + at * given.transactions
                found.append(measure(sink, first, count, given.transactions))
            sink.close()
    report("kafka_sink", [*found, load_average()])


if __name__ == "__main__":
    main()
