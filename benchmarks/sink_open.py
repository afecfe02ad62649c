"""Opening a `files` sink that has many epochs: until the next epoch to write is known.

.venv/bin/python benchmarks/sink_open.py [--epochs N ...]

A task opens its sinks after each restart. The last epoch is searched for among the newest names, so
the time must not grow with the age of the sink. "no checkpoint": the task does not know of any
epoch that is in the sink.

Target: 100,000 epochs within 50 ms, and within twice the time of 1,000 epochs plus 5 ms.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.files_sink import FilesSink, encode, file_name
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.kinds.files import FilesSinkSpec
from rekindle_testing.harness.report import Measurement, load_average, report

SCHEMA = pa.schema([("n", pa.int64())])
CHECKPOINT_INTERVAL_EPOCHS = 10
REPEATS = 5
TARGET_MS, MARGIN_MS = 50.0, 5.0


def open_sink(directory: Path) -> FilesSink:
    spec = FilesSinkSpec(url=f"file://{directory}")
    return FilesSink(
        "q",
        spec,
        partition=0,
        topology_uid="uid",
        schema=SCHEMA,
        definition=Definition(
            "d", generation=1, from_epoch=0, checkpoint_interval_epochs=CHECKPOINT_INTERVAL_EPOCHS
        ),
    )


def fill(directory: Path, epochs: int) -> None:
    """A sink as a task leaves it; its files are links, so that this is fast."""
    sink = open_sink(directory)
    sink.last_epoch()
    first = directory / file_name("q", 0, 0, "parquet")
    first.write_bytes(encode(pa.table({"n": [1]}, SCHEMA), "parquet"))
    source = first
    for epoch in range(1, epochs):
        path = directory / file_name("q", 0, epoch, "parquet")
        if epoch % 30_000 == 0:  # file systems limit the links of a file
            source = path
            source.write_bytes(first.read_bytes())
        else:
            path.hardlink_to(source)
    # As a task that wrote them has recorded its epoch range.
    if sink._ranges is not None:
        sink._ranges.acquire(epochs - 1)


def open_ms(directory: Path, epochs: int, checkpointed_epoch: int) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        assert open_sink(directory).last_epoch(checkpointed_epoch) == epochs - 1
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, nargs="*", default=[1000, 100_000])
    counts = parser.parse_args().epochs
    rows: list[Measurement] = []
    shortest = float("inf")
    for epochs in counts:
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent) / "out"
            fill(directory, epochs)
            checkpointed = open_ms(directory, epochs, epochs - CHECKPOINT_INTERVAL_EPOCHS)
            unknown = open_ms(directory, epochs, NO_EPOCH)
        values = {"ms": round(checkpointed, 1), "no checkpoint ms": round(unknown, 1)}
        slowest = max(checkpointed, unknown)
        shortest = min(shortest, slowest)
        met = slowest < min(TARGET_MS, 2 * shortest + MARGIN_MS)
        rows.append(Measurement(f"{epochs:,} epochs", values, TARGET_MS, met))
    report("sink_open", [*rows, load_average()])


if __name__ == "__main__":
    main()
