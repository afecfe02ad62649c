"""Figs. 6 to 9: runs with checkpoints, a loss just before the next one, load and replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from engine_parts import BenchTask, CpuMeter

from cec.query import (
    FIRST_EPOCH,
    INTERVAL_EPOCHS,
    NEVER,
    ROW_BYTES,
    CecQuery,
    epoch_input,
    keys_of,
)
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import EpochInput
from rekindle_testing.harness.report import Measurement

KEYS, WINDOW_ROWS, EPOCH_ROWS = 100_000, 10, 5_000
FILL_EPOCHS = INTERVAL_EPOCHS
MIN_RUN_ROWS = 300_000
Q = (1, 2, 4, 8)
U = (125_000, 250_000, 500_000, 1_000_000)
CP_EPOCHS = (1, 2, 5, 10)
LOADS = 3
"""Of each checkpoint; the median counts."""
MAX_LOAD_S = 1.5
MB, KIB = 1e6, 1024


@dataclass(frozen=True, slots=True)
class RunCase:
    """`interval_epochs`: between checkpoints; NEVER: there are none."""

    interval_epochs: int
    distribution: str = "uniform"


@dataclass(slots=True)
class MeasuredRun:
    """Of one case, up to a loss just before the next checkpoint; `ms`: of epochs. `changed_rows`:
    of groups in an epoch, up to the newest checkpoint."""

    case: RunCase
    changed_rows: int = 0
    saved_bytes: list[int] = field(default_factory=list)
    checkpoint_ms: list[float] = field(default_factory=list)
    other_ms: list[float] = field(default_factory=list)
    loaded_rows: int = 0
    read_bytes: int = 0
    load_s: float = 0.0
    load_cpu_s: float = 0.0
    replayed_rows: int = 0
    replay_s: float = 0.0
    replay_cpu_s: float = 0.0

    def recovery(self, name: str) -> Measurement:
        values = {
            "epochs between checkpoints": self.case.interval_epochs,
            "checkpoints": len(self.saved_bytes),
            "KiB of one": round(statistics.fmean(self.saved_bytes) / KIB),
            "rows loaded": self.loaded_rows,
            "MB read": round(self.read_bytes / MB, 2),
            "load s": round(self.load_s, 3),
            "CPU s": round(self.load_cpu_s, 3),
            "rows replayed": self.replayed_rows,
            "MB replayed": round(self.replayed_rows * ROW_BYTES / MB, 1),
            "replay s": round(self.replay_s, 2),
            "its CPU s": round(self.replay_cpu_s, 2),
        }
        return Measurement(name, values, MAX_LOAD_S, self.load_s <= MAX_LOAD_S)

    def pauses(self) -> Measurement:
        values = {
            "checkpoint p50 ms": _p50(self.checkpoint_ms),
            "checkpoint most ms": _most(self.checkpoint_ms),
            "other p50 ms": _p50(self.other_ms),
            "other most ms": _most(self.other_ms),
            "rows loaded": self.loaded_rows,
            "MB read": round(self.read_bytes / MB, 2),
            "load s": round(self.load_s, 3),
        }
        every = self.case.interval_epochs
        name = "no checkpoints" if every == NEVER else f"every {every} epochs"
        return Measurement(f"Figs. 8, 9: {name}", values)

    def by_keys(self) -> Measurement:
        values = {
            "bytes a changed row": round(sum(self.saved_bytes) / self.changed_rows, 1),
            "longest epoch ms": _most(self.checkpoint_ms + self.other_ms),
            "load CPU s": round(self.load_cpu_s, 3),
            "replay CPU s": round(self.replay_cpu_s, 2),
        }
        name = f"{self.case.distribution} keys, every {self.case.interval_epochs} epochs"
        return Measurement(name, values)


def _p50(ms: Sequence[float]) -> float:
    return round(statistics.median(ms), 1) if ms else 0.0


def _most(ms: Sequence[float]) -> float:
    return round(max(ms), 1) if ms else 0.0


class MeasuredRecoveries:
    """Runs that all begin with the same state: `open_windows` of `keys` are open."""

    def __init__(self, query: CecQuery, scale: float) -> None:
        self._query = query
        self._keys = round(KEYS * scale)
        self._min_epochs = round(MIN_RUN_ROWS * scale / EPOCH_ROWS)
        task = query.task(INTERVAL_EPOCHS)
        counts = np.zeros(self._keys, dtype=np.int64)
        for number in range(FIRST_EPOCH, FIRST_EPOCH + FILL_EPOCHS):
            epoch = epoch_input(number, self._keys, self._keys * WINDOW_ROWS // FILL_EPOCHS)
            counts += np.bincount(keys_of(epoch), minlength=self._keys)
            task.offer([epoch])
            task.run_next()
        task.wait_saved()
        (self._filled,) = task.commit_saved_checkpoint()
        task.stop()
        self.open_windows = int(np.count_nonzero(counts % WINDOW_ROWS))
        self._runs: dict[RunCase, MeasuredRun] = {}
        self._measure(RunCase(NEVER))  # warms Spark up

    def run(self, every: int, distribution: str = "uniform") -> MeasuredRun:
        case = RunCase(every, distribution)
        if case not in self._runs:
            self._runs[case] = self._measure(case)
        return self._runs[case]

    def _measure(self, case: RunCase) -> MeasuredRun:
        run = MeasuredRun(case)
        task = self._query.task(case.interval_epochs, begin=self._filled)
        saved = self._live(task, run)
        if saved is not None:
            self._recover(task, saved, run)
        task.stop()
        return run

    def _live(self, task: BenchTask, run: MeasuredRun) -> EntryRef | None:
        """Until the epoch before a checkpoint's, but at least `_min_epochs`, and one checkpoint.
        Returns the newest one."""
        interval, saved = run.case.interval_epochs, list[EntryRef]()
        has_checkpoints, changed_rows = interval != NEVER, 0
        enough = max(self._min_epochs, interval if has_checkpoints else 0) + self._filled.epoch
        while task.epoch < enough or (has_checkpoints and (task.epoch + 2) % interval):
            number = task.epoch + 1
            epoch = self._epoch(number, run.case)
            changed_rows += len(np.unique(keys_of(epoch)))
            task.offer([epoch])
            began = time.perf_counter()
            task.run_next()
            took_ms = (time.perf_counter() - began) * 1000
            is_checkpoint = (number + 1) % interval == 0
            (run.checkpoint_ms if is_checkpoint else run.other_ms).append(took_ms)
            if is_checkpoint:
                run.changed_rows = changed_rows
            saved += task.commit_saved_checkpoint()
        task.wait_saved()
        saved += task.commit_saved_checkpoint()
        run.saved_bytes = [each.bytes for each in saved]
        return saved[-1] if saved else None

    def _recover(self, lost: BenchTask, saved: EntryRef, run: MeasuredRun) -> None:
        times, cpu = [], []
        for _ in range(LOADS):
            began, cpu_began = time.perf_counter(), time.process_time()
            state = lost.restore(saved)
            times.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
        run.load_s, run.load_cpu_s = statistics.median(times), statistics.median(cpu)
        (loaded,) = state.operators.operators.values()
        run.loaded_rows, run.read_bytes = loaded.rows, lost.stored_bytes(saved)
        epochs = [self._epoch(n, run.case) for n in range(saved.epoch + 1, lost.epoch + 1)]
        task = self._query.task(NEVER, max_epochs=64, begin=saved)
        task.offer(epochs)
        meter = CpuMeter()
        began, cpu_before = time.perf_counter(), meter.seconds()
        while task.epoch < lost.epoch:
            task.run_next()
        run.replay_s, run.replay_cpu_s = time.perf_counter() - began, meter.seconds() - cpu_before
        run.replayed_rows = sum(epoch.num_rows for epoch in epochs)
        digests = [
            [operator.digest for operator in each.state.operators.values()] for each in (task, lost)
        ]
        assert digests[0] == digests[1], f"{run.case}: the replay has another state"
        task.stop()

    def _epoch(self, number: int, case: RunCase) -> EpochInput:
        return epoch_input(number, self._keys, EPOCH_ROWS, case.distribution)


def measure_recoveries(query: CecQuery, scale: float) -> Iterator[Measurement]:
    recoveries = MeasuredRecoveries(query, scale)
    yield Measurement("open windows", {"windows": recoveries.open_windows})
    q_epochs = {q: _epochs(q * recoveries.open_windows) for q in Q}
    u_epochs = {u: _epochs(u * scale) for u in U}
    for q, every in q_epochs.items():
        yield recoveries.run(every).recovery(f"Fig. 6, Q of {q} times the open windows")
    for u, every in u_epochs.items():
        yield recoveries.run(every).recovery(f"Fig. 7, U of {round(u * scale):,} rows")
    for every in (NEVER, *sorted({*CP_EPOCHS, *q_epochs.values(), *u_epochs.values()})):
        yield recoveries.run(every).pauses()
    for keys in ("uniform", "zipf"):
        for every in sorted({INTERVAL_EPOCHS, q_epochs[1], q_epochs[8]}):
            yield recoveries.run(every, keys).by_keys()


def _epochs(rows: float) -> int:
    return max(1, round(rows / EPOCH_ROWS))
