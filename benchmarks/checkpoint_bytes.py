"""What checkpoints write, and how long the task's loop takes for it: state alone, without Spark.

.venv/bin/python benchmarks/checkpoint_bytes.py [--groups 100000] [--epochs 300]

One window stays open, with `--groups` groups, a count, a maximum and a sum of doubles. Each epoch
changes some of them: drawn from all (uniform), by Zipf's law (zipf), or from a hundred (hot). Every
tenth epoch is a checkpoint, or every sixtieth, as with a `replayTarget` that allows it. Each is
measured with rows of each epoch alone, and with values of groups that change often.

Measured: bytes of the Arrow files that checkpoints write, for each changed row (of a group in an
epoch); the largest checkpoint; CPU time of an epoch, without and with a checkpoint, p50 and most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from rekindle.checkpoints.run_objects import encode_runs
from rekindle.engine.state import compaction
from rekindle.engine.state.compaction import compact, compact_all, join_single_deltas
from rekindle.engine.state.operator import EMPTY, OperatorState, append
from rekindle.engine.state.runs import RunShape, sort
from rekindle.exchange.hashing import hash_rows
from rekindle_testing.harness.report import Measurement, format_row, load_average

SHAPE = RunShape(
    (pa.int64(),),
    (("n", pa.int64(), "sum"), ("m", pa.int64(), "max"), ("s", pa.float64(), "sum")),
)
ROWS = 1_000
HOT = 100
WITHOUT_VALUES = 2.0  # a share that is never reached


def partials(groups: np.ndarray, rng: np.random.Generator) -> pa.Table:
    keys = pa.array(groups.astype(np.int64))
    hashes = pa.array(hash_rows(pa.table({"k": keys}), ["k"]))
    count = len(groups)
    panes, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    columns = [panes, hashes, keys, ones, rng.integers(0, 1_000, count), rng.normal(size=count)]
    return sort(pa.Table.from_arrays([pa.array(c) for c in columns], schema=SHAPE.schema))


def changed(keys: str, groups: int, rng: np.random.Generator) -> np.ndarray:
    match keys:
        case "uniform":
            drawn = rng.integers(0, groups, ROWS)
        case "zipf":
            drawn = rng.zipf(1.2, ROWS) * 7919 % groups
        case _:
            drawn = rng.integers(0, HOT, ROWS) * (groups // HOT)
    return np.unique(drawn)


def filled(groups: int, rng: np.random.Generator) -> OperatorState:
    state = EMPTY
    for first in range(0, groups, 100_000):
        rows = partials(np.arange(first, min(groups, first + 100_000)), rng)
        state = compact(SHAPE, append(state, rows))
    return compact_all(SHAPE, state)


def measure(keys: str, every: int, groups: int, epochs: int, *, values: bool) -> Measurement:
    compaction.MIN_FREQUENT_SHARE = 0.5 if values else WITHOUT_VALUES
    rng = np.random.default_rng(1)
    state = filled(groups, rng)
    saved, sizes, rows_changed = {run.id for run in state.runs()}, list[int](), 0
    ordinary, with_checkpoint = list[float](), list[float]()
    for number in range(1, epochs + 1):
        rows = partials(changed(keys, groups, rng), rng)
        rows_changed += rows.num_rows
        begin = time.process_time()
        state = compact(SHAPE, append(state, rows))
        is_checkpoint = number % every == 0
        if is_checkpoint:
            state = join_single_deltas(SHAPE, state)
        (with_checkpoint if is_checkpoint else ordinary).append(
            1000 * (time.process_time() - begin)
        )
        if is_checkpoint:
            new = [run.table for run in state.runs() if run.id not in saved]
            sizes.append(len(encode_runs(new)) if new else 0)
            saved = {run.id for run in state.runs()}
    name = f"{keys}, every {every}, {'values' if values else 'rows'}"
    return Measurement(
        name,
        {
            "bytes a changed row": sum(sizes) / rows_changed,
            "largest, KiB": max(sizes) / 1024,
            "epoch p50, ms": float(np.median(ordinary)),
            "epoch most, ms": max(ordinary),
            "checkpoint p50, ms": float(np.median(with_checkpoint)),
            "checkpoint most, ms": max(with_checkpoint),
        },
    )


def cases() -> Iterator[tuple[str, int, bool]]:
    for keys in ("hot", "zipf", "uniform"):
        for every in (10, 60):
            yield from ((keys, every, False), (keys, every, True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=300)
    arguments = parser.parse_args()
    print(f"load average {load_average()}")
    for keys, every, values in cases():
        print(format_row(measure(keys, every, arguments.groups, arguments.epochs, values=values)))


if __name__ == "__main__":
    main()
