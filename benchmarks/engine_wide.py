"""Wide rows: whether a task that is behind catches up, and stays within its pod's memory limit.

.venv/bin/python benchmarks/engine_wide.py [--case NAME]

Each case is a process of its own with the memory plan of a pod, which replays `epochs` of one
second that wait for it, as after a pause of so many seconds, through the task's own loop: Spark,
digests, log. Prints how many times the live rate that is, and the peak of what the process and its
JVM held (anonymous memory, sampled every 50 ms) beside the pod's limit. The last cases have
epochs of 300 MB: a small pod refuses one and names the limit, a pod of that limit takes three.

Targets: catch up at twice the live rate at least; memory below the limit; the message of the
refusal names the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import yaml
from engine_parts import BenchTask, task_config

from rekindle.engine.memory import MIB, needed_bytes, plan_memory
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.task.engine import EngineStarter
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology
from rekindle_testing.harness.report import Measurement, load_average, report

TARGET = 2.0
SAMPLE_S = 0.05
LIVE_S = 1.0
START_TIMEOUT_S = 120.0
COLUMNS = 64


def wide_table(rows: int, width: int) -> pa.Table:
    text = np.random.default_rng(7).integers(97, 123, rows * width, dtype=np.uint8).tobytes()
    strings = [text[n * width : (n + 1) * width].decode() for n in range(rows)]
    return pa.table(
        {
            "n": pa.array(range(rows), pa.int32()),
            "s": strings,
            "t": pa.array([0] * rows, pa.timestamp("us", "UTC")),
        }
    )


def many_columns(rows: int) -> pa.Table:
    rng = np.random.default_rng(7)
    columns = {"t": pa.array([0] * rows, pa.timestamp("us", "UTC"))}
    for at in range(COLUMNS // 2):
        columns[f"v{at}"] = pa.array(rng.standard_normal(rows))
        columns[f"k{at}"] = pa.array(np.char.add("value-", rng.integers(0, 9999, rows).astype(str)))
    return pa.table(columns)


WIDE = "n INT, s STRING, t TIMESTAMP"
MANY = "t TIMESTAMP, " + ", ".join(f"v{n} DOUBLE, k{n} STRING" for n in range(COLUMNS // 2))
FILTER = '- {name: last, inputs: [rows], sql: "SELECT * FROM rows WHERE n IS NOT NULL"}'
ALL = '- {name: last, inputs: [rows], sql: "SELECT *, v0 * 2 AS w FROM rows WHERE v0 > -9"}'
COUNT = (
    "- {name: last, inputs: [rows], window: {size: 5m, groupBy: [n], "
    "aggregate: 'count(*) AS rows, max(s) AS s'}}"
)


@dataclass(frozen=True, slots=True)
class Case:
    schema: str
    operator: str
    table: Callable[[], pa.Table]
    epochs: int
    limit_bytes: int = 1024 * MIB
    refused: bool = False


def _large() -> pa.Table:
    return wide_table(150_000, 2048)


CASES = {
    "3,000 rows x 2 KB": Case(WIDE, FILTER, lambda: wide_table(3000, 2048), 60),
    "3,000 rows x 2 KB, window": Case(WIDE, COUNT, lambda: wide_table(3000, 2048), 60),
    "1,000 rows x 64 columns": Case(MANY, ALL, lambda: many_columns(1000), 60),
    "300 MB an epoch, 1 GiB": Case(WIDE, FILTER, _large, 1, refused=True),
    "300 MB an epoch, limit from the message": Case(
        WIDE, FILTER, _large, 3, needed_bytes(330 * MIB)
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    peak_bytes: int
    python_bytes: int
    jvm_bytes: int
    refusal: str | None


class Memory:
    """Peak memory of this process and its children, while the context is entered."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.python_bytes = 0  # of each alone, which need not be at the same time
        self.jvm_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done.wait(SAMPLE_S):
            python = _anonymous(me)
            jvm = sum(map(_anonymous, me.children(recursive=True)))
            self.python_bytes = max(self.python_bytes, python)
            self.jvm_bytes = max(self.jvm_bytes, jvm)
            self.peak_bytes = max(self.peak_bytes, python + jvm)


def _anonymous(process: psutil.Process) -> int:
    try:
        info = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(info.rss - info.shared)


def run(case: Case, directory: Path) -> Outcome:
    memory = plan_memory(case.limit_bytes)
    compiled = topology(case, directory)
    table = case.table()
    starter = EngineStarter(task_config(compiled, directory, memory))
    chain = starter.chain.result(START_TIMEOUT_S)
    task = BenchTask(compiled, chain, directory, 0, memory=memory, engine=starter)
    task.offer(EpochInput(n, NO_WATERMARK, NO_WATERMARK, (table,)) for n in range(case.epochs))
    refusal = None
    with Memory() as held:
        begin = time.perf_counter()
        try:
            while task.epoch < case.epochs - 1:
                task.run_next()
                task.commit_saved_checkpoint()
        except RuntimeError as error:
            refusal = str(error)
        seconds = time.perf_counter() - begin
    task.stop()
    starter.stop(10)
    return Outcome(seconds, held.peak_bytes, held.python_bytes, held.jvm_bytes, refusal)


def topology(case: Case, directory: Path) -> Topology:
    text = f"""
checkpoint: {{store: "file://{directory}/store"}}
logBudget: 4Gi
sources:
- name: rows
  schema: "{case.schema}"
  eventTime: {{column: t}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}}
operators:
{case.operator}
queries:
- {{name: q, from: last, sink: {{files: {{url: "file:///tmp/sink"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(text)), "bench", skip_cluster_checks=True)


def to_row(name: str, case: Case, outcome: Outcome) -> Measurement:
    ratio = case.epochs * LIVE_S / outcome.seconds
    values = {
        "times live": round(ratio, 1),
        "peak MiB": round(outcome.peak_bytes / MIB),
        "limit MiB": round(case.limit_bytes / MIB),
        "python MiB": round(outcome.python_bytes / MIB),
        "jvm MiB": round(outcome.jvm_bytes / MIB),
    }
    within = outcome.peak_bytes < case.limit_bytes
    if case.refused:
        message = outcome.refusal or ""
        wanted = ("epoch 0", "150,000 rows", "resources.limits.memory")
        names_limit = all(text in message for text in wanted)
        values = {"the message names the limit": names_limit}
        return Measurement(f"{name}: refused", values, 1, names_limit and within)
    # One epoch, or epochs of 300 MB, have to stay within the memory limit only.
    fast = case.epochs == 1 or ratio >= TARGET or case.limit_bytes > 1024 * MIB
    return Measurement(name, values, TARGET, fast and within and outcome.refusal is None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--epochs", type=int, help="behind, at most; each case has its own number")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    most = arguments.epochs or max(case.epochs for case in CASES.values())
    cases = {n: replace(case, epochs=min(case.epochs, most)) for n, case in CASES.items()}
    if arguments.child:
        with tempfile.TemporaryDirectory() as directory:
            case = cases[arguments.case]
            print(json.dumps(asdict(run(case, Path(directory)))))
        return
    rows = []
    for name in [arguments.case] if arguments.case else CASES:
        command = [sys.executable, __file__, "--child", "--case", name, "--epochs", str(most)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        rows.append(to_row(name, cases[name], Outcome(**json.loads(printed.splitlines()[-1]))))
    report("engine_wide", [*rows, load_average()])


if __name__ == "__main__":
    main()
