"""What buffering costs a task: its loop with the output log, without files, and without any log.

.venv/bin/python benchmarks/log_cost.py [--epochs 60] [--rows 1000 10000 100000]

Three tasks of the same query share this process and its JVM, and take turns in every order, epoch
by epoch: one with the output log on disk, one that keeps what readers are sent in memory alone
(Arrow IPC, without checksums, until the next checkpoint), and one that keeps nothing, as a task
without readers could. Each tenth epoch is a checkpoint, after which the log is truncated.

`log`: CPU of the calls of the log (append, truncate), by all CPU of the task with the log, Python
and JVM; `files`: the same without the encoding that readers need anyway. They are of one run, so
load hardly changes them. `CPU by memory`, `CPU by none` are ratios of whole tasks, which vary by
what the JVM compiles and collects meanwhile. Not in it: what the kernel needs to write pages to the
disk later. Target: `files`, what the paper's adaptive buffering would save, is at most 0.02.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from engine_parts import BenchTask, CpuMeter, make_epoch_input, topology

from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session
from rekindle.streams import records
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.log import OutputLog
from rekindle_testing.harness.report import Measurement, format_row, load_average, report

TARGET = 0.02
FIRST_EPOCH, WARM_UP_EPOCHS = 100, 20
DISK, MEMORY, NONE = "disk", "memory", "none"


class MeasuredLog(OutputLog):
    """The output log, and what its calls cost."""

    cpu_s = encoding_s = 0.0
    appended_bytes = most_bytes = 0

    def append(self, batch: EpochBatch) -> bool:
        began, bytes_before = time.thread_time(), self.local_bytes
        is_new = super().append(batch)
        self.cpu_s += time.thread_time() - began
        self.appended_bytes += self.local_bytes - bytes_before
        self.most_bytes = max(self.most_bytes, self.local_bytes)
        return is_new

    def truncate(self, floor: int) -> None:
        began = time.thread_time()
        super().truncate(floor)
        self.cpu_s += time.thread_time() - began


class MemoryLog(OutputLog):
    """What readers are sent, in memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._payloads: dict[int, pa.Buffer] = {}
        self.encoding_s = 0.0

    def append(self, batch: EpochBatch) -> bool:
        began = time.thread_time()
        self._payloads[batch.epoch] = records.encode_rows(batch.rows)
        self.encoding_s += time.thread_time() - began
        return True

    def truncate(self, floor: int) -> None:
        self._payloads = {e: p for e, p in self._payloads.items() if e > floor}


class NoLog(OutputLog):
    def append(self, batch: EpochBatch) -> bool:
        return True

    def truncate(self, floor: int) -> None:
        pass


LOGS: dict[str, type[OutputLog]] = {DISK: MeasuredLog, MEMORY: MemoryLog, NONE: NoLog}


@dataclass(slots=True)
class Usage:
    cpu_s: dict[str, float]
    ms: dict[str, list[float]]


class Tasks:
    """One for each kind of log."""

    def __init__(self, kind: str, session: Any, directory: Path) -> None:
        self._logs: dict[str, OutputLog] = {}
        self._tasks = {name: self._task(name, kind, session, directory / name) for name in LOGS}
        self._cpu = CpuMeter()

    def _task(self, name: str, kind: str, session: Any, directory: Path) -> BenchTask:
        def make_log(*args: Any, **options: Any) -> OutputLog:
            return self._logs.setdefault(name, LOGS[name](*args, **options))

        compiled = topology(kind, directory)
        chain = SparkChain(compiled.segments[-1], compiled, session)
        return BenchTask(compiled, chain, directory, FIRST_EPOCH, make_log=make_log)

    def run(self, epochs: list[EpochInput]) -> Usage:
        usage = Usage(dict.fromkeys(LOGS, 0.0), {name: [] for name in LOGS})
        orders = list(permutations(LOGS))
        for number, one in enumerate(epochs):
            for name in orders[number % len(orders)]:
                task = self._tasks[name]
                task.offer([one])
                cpu_before, began = self._cpu.seconds(), time.perf_counter()
                task.run_next()
                usage.ms[name].append((time.perf_counter() - began) * 1000)
                task.wait_saved()
                task.commit_saved_checkpoint()
                usage.cpu_s[name] += self._cpu.seconds() - cpu_before
        return usage

    def measure(self, what: str, epochs: list[EpochInput]) -> Measurement:
        self.run(epochs[:WARM_UP_EPOCHS])
        disk, memory = self._logs[DISK], self._logs[MEMORY]
        assert isinstance(disk, MeasuredLog)
        assert isinstance(memory, MemoryLog)
        disk.cpu_s = memory.encoding_s = 0.0
        disk.appended_bytes = disk.most_bytes = 0
        measured = epochs[WARM_UP_EPOCHS:]
        usage = self.run(measured)
        files = (disk.cpu_s - memory.encoding_s) / usage.cpu_s[DISK]
        values = {
            "files": round(files, 4),
            "log": round(disk.cpu_s / usage.cpu_s[DISK], 4),
            "ms of log": round(disk.cpu_s * 1000 / len(measured), 2),
            "CPU by memory": round(usage.cpu_s[DISK] / usage.cpu_s[MEMORY], 3),
            "CPU by none": round(usage.cpu_s[DISK] / usage.cpu_s[NONE], 3),
            "p50 ms": round(median(usage.ms[DISK]), 1),
            "p50 ms, memory": round(median(usage.ms[MEMORY]), 1),
            "p50 ms, none": round(median(usage.ms[NONE]), 1),
            "KiB an epoch": round(disk.appended_bytes / len(measured) / 1024, 1),
            "MiB at most": round(disk.most_bytes / 2**20, 1),
        }
        return Measurement(what, values, TARGET, files <= TARGET)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        session = start_session("log-cost", data_dir=Path(directory))
        session.sparkContext.setLogLevel("ERROR")  # the table is read on the same screen
        for kind in ("sql", "window"):
            for rows in args.rows:
                rng = np.random.default_rng(rows)
                numbers = range(FIRST_EPOCH, FIRST_EPOCH + WARM_UP_EPOCHS + args.epochs)
                epochs = [make_epoch_input(number, rows, rng) for number in numbers]
                tasks = Tasks(kind, session, Path(directory) / f"{kind}-{rows}")
                results.append(tasks.measure(f"{kind}, {rows:,} rows an epoch", epochs))
                tasks.stop()
                print(format_row(results[-1]), flush=True)
        stop_session(session)
    report("log_cost", [*results, load_average()])


if __name__ == "__main__":
    main()
