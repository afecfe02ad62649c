"""How much faster a replay is than the live stream: many epochs a call against one.

.venv/bin/python benchmarks/engine_replay.py [--epochs 256] [--rows 500]

An epoch of one second with `--rows` rows is the live rate; a replay takes all that is waiting, up
to 64 epochs and 200,000 rows a call and never across a checkpoint epoch, which comes every tenth
(docs/design/engine.md#calls); calls of more epochs are what a longer checkpoint interval allows.
Prints rows per second, and how many times the rate of one epoch a call (`times one`) and the live
rate (`times live`) that is.

Measured: a task's own loop, from the first epoch, in memory, until the last is in the output log:
Spark, digests, log, and the saver, which works in the background meanwhile, as in a task. Not
measured: reading the source or the upstream, sinks. Target: ten times the live rate, with the
checkpoints of the default interval.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from engine_parts import BenchTask, make_epoch_input, topology

from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session
from rekindle.streams.epochs import EpochInput
from rekindle_testing.harness.report import Measurement, format_row, load_average, report

TARGET = 10.0
"""Times the live rate."""
SIZES = (1, 4, 10, 64)
"""Epochs of a call."""
FIRST = 640
"""The epoch before it is a checkpoint epoch, whichever of the sizes is the checkpoint interval."""


class Replays:
    """Replays of one query: one chain, a task for each."""

    def __init__(self, kind: str, session: Any, directory: Path) -> None:
        self._compiled = topology(kind, directory)
        self.checkpoint_interval_epochs = self._compiled.spec.checkpoint_interval_epochs
        self._chain = SparkChain(self._compiled.segments[0], self._compiled, session)
        self._directory = directory
        self._count = 0

    def run(self, epochs: Sequence[EpochInput], size: int) -> float:
        """Seconds for all epochs with at most `size` in a call."""
        self._count += 1
        task = BenchTask(
            self._compiled,
            self._chain,
            self._directory / str(self._count),
            FIRST,
            max_epochs=size,
            checkpoint_interval_epochs=max(size, self.checkpoint_interval_epochs),
        )
        task.offer(epochs)
        begin = time.perf_counter()
        while task.epoch < epochs[-1].epoch:
            task.run_next()
            task.commit_saved_checkpoint()
        seconds = time.perf_counter() - begin
        task.wait_saved()  # raises if it failed: the times would lack the cost of saving
        task.stop()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=256)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    rng = np.random.default_rng(7)
    epochs = [make_epoch_input(FIRST + n, arguments.rows, rng) for n in range(arguments.epochs)]
    results: list[Measurement] = []
    with tempfile.TemporaryDirectory() as directory:
        session = start_session("replay", data_dir=Path(directory), cds_archive=arguments.archive)
        session.sparkContext.setLogLevel("ERROR")  # the table is read on the same screen
        for kind in ("sql", "window"):
            replays = Replays(kind, session, Path(directory) / kind)
            replays.run(epochs[:64], 4)  # warms Spark up
            times: dict[int, list[float]] = {size: [] for size in SIZES}
            for _ in range(arguments.rounds):
                for size in SIZES:
                    times[size].append(replays.run(epochs, size))
            best = {size: min(series) for size, series in times.items()}
            for size in SIZES:
                values = {
                    "rows/s": round(arguments.rows * len(epochs) / best[size]),
                    "times one": round(best[1] / best[size], 1),
                    "times live": round(len(epochs) / best[size], 1),
                }
                has_target = size == replays.checkpoint_interval_epochs
                met = values["times live"] >= TARGET if has_target else None
                what = f"{kind}, {size} epochs a call"
                results.append(Measurement(what, values, TARGET if has_target else None, met))
                print(format_row(results[-1]), flush=True)
        stop_session(session)
    report("engine_replay", [*results, load_average()])


if __name__ == "__main__":
    main()
