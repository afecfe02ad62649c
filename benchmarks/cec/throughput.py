"""Fig. 5: tasks without a log, with a log, with log and checkpoints, which take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import permutations

from engine_parts import CpuMeter
from log_cost import NoLog

from cec.query import FIRST_EPOCH, INTERVAL_EPOCHS, NEVER, CecQuery, epoch_input
from rekindle_testing.harness.report import Measurement

WINDOWS = (1, 1_000)
"""Rows of a window: the paper's fast and slow windows."""
KEYS, ROWS, TURNS, WARM_UP_TURNS = 2, 5_000, 12, 3
MIN_TURNS = 6
"""One in each order."""
MIN_THROUGHPUT = 0.95
NONE, LOG, CHECKPOINTS = "none", "log", "log and checkpoints"


def measure_throughput(query: CecQuery, window_rows: int, scale: float) -> Iterator[Measurement]:
    turns, rows = max(MIN_TURNS, round(TURNS * scale)), max(1_000, round(ROWS * scale))
    tasks = {
        NONE: query.task(NEVER, make_log=NoLog),
        LOG: query.task(NEVER),
        CHECKPOINTS: query.task(INTERVAL_EPOCHS),
    }
    orders, meter = list(permutations(tasks)), CpuMeter()
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(WARM_UP_TURNS + turns):
        first = FIRST_EPOCH + turn * INTERVAL_EPOCHS
        epochs = [
            epoch_input(number, KEYS, rows) for number in range(first, first + INTERVAL_EPOCHS)
        ]
        for name in orders[turn % len(orders)]:
            task = tasks[name]
            task.offer(epochs)
            began, cpu_before = time.perf_counter(), meter.seconds()
            while task.epoch < epochs[-1].epoch:
                task.run_next()
            task.wait_saved()
            took_s = time.perf_counter() - began
            task.commit_saved_checkpoint()
            if turn >= WARM_UP_TURNS:
                seconds[name].append(took_s)
                cpu[name].append(meter.seconds() - cpu_before)
    for name, task in tasks.items():
        task.stop()
        rows_s = INTERVAL_EPOCHS * rows / statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds[NONE], seconds[name], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        values = {
            "rows/s": round(rows_s),
            "output rows/s": round(rows_s / window_rows),
            "of none": round(ratio, 3),
            "from": round(low, 3),
            "to": round(high, 3),
            "CPU by none": round(sum(cpu[name]) / sum(cpu[NONE]), 3),
        }
        target = None if name is NONE else MIN_THROUGHPUT
        met = None if target is None else ratio >= target
        what = f"Fig. 5, windows of {window_rows:,} rows: {name}"
        yield Measurement(what, values, target, met)
