"""The query of the paper, its rows, and tasks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from engine_parts import MINUTE_US, BenchTask, topology

from rekindle.engine.memory import plan_memory
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.state.spill import RunFiles
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import EpochInput
from rekindle.streams.log import OutputLog

SCHEMA = "k BIGINT, price BIGINT, filler STRING, t TIMESTAMP"
FILLER = "x" * 72
ROW_BYTES = 100
INTERVAL_EPOCHS = 10
"""Between checkpoints, by default."""
FIRST_EPOCH = INTERVAL_EPOCHS
NEVER = 10**9
"""An interval that is longer than every run."""


def epoch_input(number: int, keys: int, rows: int, distribution: str = "uniform") -> EpochInput:
    """The same for the same arguments; a minute of event time, the watermark a minute behind."""
    rng = np.random.default_rng([number, keys, rows])
    if distribution == "zipf":
        drawn = rng.zipf(1.2, rows) * 7919 % keys
    else:
        drawn = rng.integers(0, keys, rows)
    start = number * MINUTE_US
    times = start + rng.integers(0, MINUTE_US, rows)
    table = pa.table(
        {
            "k": drawn,
            "price": rng.integers(1, 10_000, rows),
            "filler": pa.repeat(FILLER, rows),
            "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
        }
    )
    return EpochInput(number, start - 2 * MINUTE_US, start - MINUTE_US, (table,))


def keys_of(epoch: EpochInput) -> Any:
    return epoch.inputs[0].column("k").to_numpy()


class CecQuery:
    """Tasks of one query, which share its chain and its store."""

    def __init__(self, window_rows: int, session: Any, directory: Path) -> None:
        window = f"{{rows: {window_rows}, groupBy: [k], aggregate: avg(price) AS price}}"
        operator = f"- {{name: last, inputs: [rows], window: {window}}}"
        self._compiled = topology("window", directory, operator, schema=SCHEMA)
        self._memory = plan_memory()
        files = RunFiles(directory / "state", self._memory.state_bytes)
        self._chain = SparkChain(
            self._compiled.segments[0], self._compiled, session, run_files=files
        )
        self._directory = directory
        self._count = 0

    def task(
        self,
        interval_epochs: int,
        *,
        max_epochs: int = 1,
        begin: EntryRef | None = None,
        make_log: type[OutputLog] = OutputLog,
    ) -> BenchTask:
        self._count += 1
        return BenchTask(
            self._compiled,
            self._chain,
            self._directory / str(self._count) / "task",  # one name, so one UID in the store
            FIRST_EPOCH if begin is None else begin.epoch + 1,
            max_epochs=max_epochs,
            checkpoint_interval_epochs=interval_epochs,
            memory=self._memory,
            make_log=make_log,
            begin=begin,
        )
