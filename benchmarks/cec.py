"""`make bench-cec`: the experiments of CEC (Sebepou and Magoutis 2011), Figs. 5 to 9.

.venv/bin/python benchmarks/cec.py [--scale 0.1] [--cores 1] [--parts throughput recovery]

One task's own loop, output log, saver and checkpoint store on the local disk, in this process and a
JVM, all on `--cores` cores; one epoch a call, as in a task that is Live, as fast as it can. Rows of
100 bytes (item, price, time, and a filler) are in memory when the clock starts. The query is the
paper's: the average price of an item over windows of a number of rows. `--scale` multiplies keys,
rows and turns.

What corresponds to what. State is saved by pages and deltas at checkpoint epochs, in the
background, not window by window in the output log (docs/decisions/0064-rare-checkpoints.md):

- Fig. 5, native, G_open/Disk: a task without log and checkpoints; one with its output log; one with
  log and a checkpoint every tenth epoch, each waited for. They take turns of ten epochs; the ratio
  is the median over turns. No G_open is written, so the second one is less than the paper's.
- Fig. 6, Q: a checkpoint each time Q times as many rows of state have changed as windows are open.
  The paper's Q bounds the tuples of the output queue that a restart reads (extent); here a restart
  reads all rows of pages and deltas (`rows loaded`), which compaction bounds, whatever the Q.
- Fig. 7, U: a checkpoint after U rows of input. That is what `replayTarget` chooses, in time.
- EC-load time: `load`, from the entry until all state is local. (A task begins before: epochs wait
  only for what they read.) Files may be in the page cache. Replay: the epochs until the one before
  the next checkpoint epoch, so the longest there is, in calls of up to 64 epochs; its state has
  to be equal to the one that was lost. The rows are in memory: reading upstream is not measured.
- Figs. 8, 9, CP: the time between checkpoints. There is no CI: an epoch waits for a checkpoint only
  while deltas are joined, and the saver uses the same cores. Response time: of an epoch. Extent:
  `rows loaded` and `MB read`.

Not in the paper: the same with keys by Zipf's law. Structured Streaming has no windows of rows.

Targets: throughput with a log, and with checkpoints, at least 0.95 of that without (the paper: a
loss of less than 10 %); `load` at most 1.5 s (the paper: 3.5 to 27 s).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from engine_parts import MINUTE_US, BenchTask, cpu_s, topology
from log_cost import NoLog

from rekindle.engine.memory import plan_memory
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session
from rekindle.engine.state.spill import RunFiles
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import EpochInput
from rekindle.streams.log import OutputLog
from rekindle.topology.model import Topology
from rekindle_testing.harness.report import BENCH, Measurement, format_row, load_average, report

SCHEMA = "k BIGINT, price BIGINT, filler STRING, t TIMESTAMP"
FILLER = "x" * 72
ROW_BYTES = 100
INTERVAL_EPOCHS = 10
FIRST_EPOCH = INTERVAL_EPOCHS
NEVER = 10**9
"""An interval that is longer than every run."""
MIN_THROUGHPUT, MAX_LOAD_S = 0.95, 1.5

FAST, SLOW = 1, 1_000
THROUGHPUT_KEYS, THROUGHPUT_ROWS, TURNS, WARM_UP_TURNS = 2, 10_000, 18, 3

KEYS, WINDOW_ROWS, EPOCH_ROWS = 100_000, 10, 5_000
FILL_EPOCHS = INTERVAL_EPOCHS
MIN_RUN_ROWS = 500_000
Q = (1, 2, 4, 8)
U = (125_000, 250_000, 500_000, 1_000_000)
CP_EPOCHS = (1, 2, 5, 10)
LOADS = 3
"""Of each checkpoint; the median counts."""
MB, KIB = 1e6, 1024


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


class Query:
    """Tasks of one query, which share its chain and its store."""

    def __init__(self, window_rows: int, session: Any, directory: Path) -> None:
        window = f"{{rows: {window_rows}, groupBy: [k], aggregate: avg(price) AS price}}"
        operator = f"- {{name: last, inputs: [rows], window: {window}}}"
        self._compiled: Topology = topology("window", directory, operator, schema=SCHEMA)
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


# -- Fig. 5 ----------------------------------------------------------------------------------------

NONE, LOG, CHECKPOINTS = "none", "log", "log and checkpoints"


def measure_throughput(query: Query, window_rows: int, scale: float) -> Iterator[Measurement]:
    turns, warm_up = max(2, round(TURNS * scale)), max(1, round(WARM_UP_TURNS * scale))
    rows = max(1_000, round(THROUGHPUT_ROWS * scale))
    tasks = {
        NONE: query.task(NEVER, make_log=NoLog),
        LOG: query.task(NEVER),
        CHECKPOINTS: query.task(INTERVAL_EPOCHS),
    }
    orders = list(permutations(tasks))
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warm_up + turns):
        first = FIRST_EPOCH + turn * INTERVAL_EPOCHS
        epochs = [
            epoch_input(number, THROUGHPUT_KEYS, rows)
            for number in range(first, first + INTERVAL_EPOCHS)
        ]
        for name in orders[turn % len(orders)]:
            task = tasks[name]
            task.offer(epochs)
            began, cpu_before = time.perf_counter(), cpu_s()
            while task.epoch < epochs[-1].epoch:
                task.run_next()
            task.wait_saved()
            took_s = time.perf_counter() - began
            task.commit_saved_checkpoint()
            if turn >= warm_up:
                seconds[name].append(took_s)
                cpu[name].append(cpu_s() - cpu_before)
    for name, task in tasks.items():
        task.stop()
        rows_s = INTERVAL_EPOCHS * rows / statistics.median(seconds[name])
        values = dict[str, float]()
        values |= {"rows/s": round(rows_s), "output rows/s": round(rows_s / window_rows)}
        ratios = [a / b for a, b in zip(seconds[NONE], seconds[name], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        values |= {"of none": round(ratio, 3), "from": round(low, 3), "to": round(high, 3)}
        values["CPU by none"] = round(sum(cpu[name]) / sum(cpu[NONE]), 3)
        target = None if name is NONE else MIN_THROUGHPUT
        met = None if target is None else ratio >= target
        what = f"Fig. 5, windows of {window_rows:,} rows: {name}"
        yield Measurement(what, values, target, met)


# -- Figs. 6 to 9 ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    interval_epochs: int
    distribution: str = "uniform"


@dataclass(slots=True)
class Run:
    """Of one case, up to a loss just before the next checkpoint; `ms`: of epochs."""

    case: Case
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

    def recovery(self) -> Measurement:
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
        return Measurement(self.case.name, values, MAX_LOAD_S, self.load_s <= MAX_LOAD_S)

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
        return Measurement(f"Figs. 8, 9: {self.case.name}", values)

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


class Recoveries:
    """Runs that all begin with the same state: `open_windows` of `keys` are open."""

    def __init__(self, query: Query, scale: float) -> None:
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
        self.run(Case("warm-up", NEVER))

    def run(self, case: Case) -> Run:
        run = Run(case)
        task = self._query.task(case.interval_epochs, begin=self._filled)
        saved = self._live(task, run)
        if saved is not None:
            self._recover(task, saved, run)
        task.stop()
        return run

    def _live(self, task: BenchTask, run: Run) -> EntryRef | None:
        """Until the epoch before a checkpoint's, but at least `_min_epochs`, and one checkpoint.
        Returns the newest one."""
        interval, saved = run.case.interval_epochs, list[EntryRef]()
        has_checkpoints = interval != NEVER
        enough = max(self._min_epochs, interval if has_checkpoints else 0) + self._filled.epoch
        while task.epoch < enough or (has_checkpoints and (task.epoch + 2) % interval):
            number = task.epoch + 1
            epoch = self._epoch(number, run.case)
            run.changed_rows += len(np.unique(keys_of(epoch)))
            task.offer([epoch])
            began = time.perf_counter()
            task.run_next()
            took_ms = (time.perf_counter() - began) * 1000
            is_checkpoint = (number + 1) % interval == 0
            (run.checkpoint_ms if is_checkpoint else run.other_ms).append(took_ms)
            saved += task.commit_saved_checkpoint()
        task.wait_saved()
        saved += task.commit_saved_checkpoint()
        run.saved_bytes = [each.bytes for each in saved]
        return saved[-1] if saved else None

    def _recover(self, lost: BenchTask, saved: EntryRef, run: Run) -> None:
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
        began, cpu_before = time.perf_counter(), cpu_s()
        while task.epoch < lost.epoch:
            task.run_next()
        run.replay_s, run.replay_cpu_s = time.perf_counter() - began, cpu_s() - cpu_before
        run.replayed_rows = sum(epoch.num_rows for epoch in epochs)
        digests = [
            [operator.digest for operator in each.state.operators.values()] for each in (task, lost)
        ]
        assert digests[0] == digests[1], f"{run.case.name}: the replay has another state"
        task.stop()

    def _epoch(self, number: int, case: Case) -> EpochInput:
        return epoch_input(number, self._keys, EPOCH_ROWS, case.distribution)


def measure_recoveries(query: Query, scale: float) -> Iterator[Measurement]:
    recoveries = Recoveries(query, scale)
    yield Measurement("open windows", {"windows": recoveries.open_windows})
    of_q = {q: max(1, round(q * recoveries.open_windows / EPOCH_ROWS)) for q in Q}
    cases = [
        *(Case(f"Fig. 6, Q of {q} times the open windows", every) for q, every in of_q.items()),
        *(Case(f"Fig. 7, U of {round(u * scale):,} rows", _epochs(u * scale)) for u in U),
    ]
    found = []
    for case in cases:
        found.append(recoveries.run(case))
        yield found[-1].recovery()
    none = recoveries.run(Case("no checkpoints", NEVER))
    often = [recoveries.run(Case(f"every {n} epochs", n)) for n in CP_EPOCHS]
    yield from (run.pauses() for run in (none, *often, *found))
    compared = {*CP_EPOCHS[-1:], of_q[1], of_q[8]}
    zipf = [recoveries.run(Case("zipf", every, "zipf")) for every in sorted(compared)]
    uniform = {r.case.interval_epochs: r for r in (*often, *found)}
    yield from (uniform[every].by_keys() for every in sorted(compared))
    yield from (run.by_keys() for run in zipf)


def _epochs(rows: float) -> int:
    return max(1, round(rows / EPOCH_ROWS))


# -- report ----------------------------------------------------------------------------------------


def tables(rows: Sequence[Measurement]) -> str:
    """A Markdown table for each group of rows with the same values; what missed its target is
    bold."""
    lines: list[str] = []
    for names, group in groupby(rows, lambda row: tuple(row.values)):
        lines += [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for row in group:
            what = f"**{row.what}**" if row.met is False else row.what
            lines.append(f"| {what} | {' | '.join(f'{v:,.10g}' for v in row.values.values())} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--cores", type=int, default=1)
    parts = ("throughput", "recovery")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    # Before the first thread, so that all threads and the JVM inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    rows: list[Measurement] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        session = start_session("cec", data_dir=directory, memory=plan_memory())
        session.sparkContext.setLogLevel("ERROR")  # the table is read on the same screen
        if "throughput" in args.parts:
            for window_rows in (FAST, SLOW):
                query = Query(window_rows, session, directory / f"windows-{window_rows}")
                for row in measure_throughput(query, window_rows, args.scale):
                    rows.append(row)
                    print(format_row(row), flush=True)
        if "recovery" in args.parts:
            query = Query(WINDOW_ROWS, session, directory / "recovery")
            for row in measure_recoveries(query, args.scale):
                rows.append(row)
                print(format_row(row), flush=True)
        stop_session(session)
    rows.append(load_average())
    report("cec", rows)
    (BENCH / "cec.md").write_text(tables(rows))


if __name__ == "__main__":
    main()
