"""How long a query pauses when its ancestor dies, while another reader of it has waited for long.

.venv/bin/python benchmarks/long_wait.py [--waits 100 1000] [--times 2] [--epoch-ms 100]

A source, a window with groups (the ancestor), and two windows that read it: `live`, and `late`,
which waits for capacity and will need all epochs. Real task processes and the coordinator's real
core, without a cluster. After each number of epochs the ancestor is killed, in its pod, whose disk
has its log, and with its pod, whose log is in the checkpoint store alone. `pause`: the longest time
between two epochs of `live` from the kill until all tasks are live again; `computed again`: epochs
of the ancestor between the entry that it restores and its newest one. `no reader waits`: the same
while `late` has its pod, the pause of a normal restore. Target: 1.5 times that pause.

Writes build/bench/long_wait.json and .md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from rekindle.topology.model import Slot
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.task_processes import TaskProcesses, task_processes

NAME = "long_wait"
INTERVAL_EPOCHS = 20
FIRST_EPOCHS = 200
"""Computed before the first kill, while no reader waits."""
TARGET = 1.5
START_S, RETURN_S = 180.0, 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waits", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--epoch-ms", type=int, default=100)
    options = parser.parse_args()
    rows: list[Measurement] = []
    normal: dict[str, float] = {}
    for waits in ([], sorted(options.waits)):
        with temporary_run_directory("bench") as directory:
            spec = make_spec(directory, options.epoch_ms)
            waiting = ("late",) if waits else ()
            with task_processes(directory, spec, waiting=waiting) as tasks:
                for wait in waits or [FIRST_EPOCHS]:
                    _wait_for_epoch(tasks, wait, wait * options.epoch_ms / 1000)
                    what = f"{wait} epochs waited" if waits else "no reader waits"
                    rows += _kills(tasks, what, options.times, normal)
                    report(NAME, [*rows, load_average()])


def make_spec(directory: Path, epoch_ms: int) -> dict[str, Any]:
    names = ["live", "late"]
    columns = {"k": "integer(1, 500)", "t": "timestamp"}
    return {
        "epochInterval": f"{epoch_ms}ms",
        "checkpoint": {
            "interval": f"{INTERVAL_EPOCHS * epoch_ms}ms",
            "store": f"file://{directory}/store",
            "volume": "v",
        },
        "sources": [
            {
                "name": "rows",
                "schema": "k BIGINT, t TIMESTAMP",
                "eventTime": {"column": "t"},
                "generator": {"rowsPerSecond": 1000, "columns": columns},
            }
        ],
        "operators": [
            {"name": "counts", "inputs": ["rows"], "window": _window("1s", "count(*) AS n")},
            *(
                {"name": name, "inputs": ["counts"], "window": _window("5s", "sum(n) AS n")}
                for name in names
            ),
        ],
        "queries": [
            {
                "name": name,
                "from": name,
                "sink": {"files": {"url": f"file://{directory}/{name}", "format": "parquet"}},
            }
            for name in names
        ],
    }


def _window(size: str, aggregate: str) -> dict[str, Any]:
    return {"size": size, "groupBy": ["k"], "aggregate": aggregate}


def _wait_for_epoch(tasks: TaskProcesses, epoch: int, seconds: float) -> None:
    def is_there() -> bool:
        return tasks.all_live() and _epoch(tasks, _slot(tasks, "counts")) >= epoch

    tasks.poll_until(is_there, START_S + 3 * seconds)


def _kills(
    tasks: TaskProcesses, what: str, times: int, normal: dict[str, float]
) -> list[Measurement]:
    """`normal`: the pause without a reader that waits, by kind of kill; filled by the first."""
    rows = []
    for kind in ("process", "pod"):
        found = [_kill(tasks, in_pod=kind == "process") for _ in range(times)]
        pause_s = median(pause for pause, _ in found)
        limit_s = TARGET * normal.setdefault(kind, pause_s)
        figures = {
            "pause p50 s": round(pause_s, 1),
            "max s": round(max(pause for pause, _ in found), 1),
            "computed again": max(epochs for _, epochs in found),
            "of a normal one": round(pause_s / normal[kind], 2),
        }
        rows.append(Measurement(f"{what}, {kind}", figures, TARGET, pause_s <= limit_s))
    return rows


def _kill(tasks: TaskProcesses, *, in_pod: bool) -> tuple[float, int]:
    """The pause of `live` in seconds, and the epochs that the ancestor computed again."""
    slot = _slot(tasks, "counts")
    until = time.monotonic() + 5.0
    tasks.poll_until(lambda: time.monotonic() > until, 60)  # what is shipped is named
    before, began = _epoch(tasks, slot), time.monotonic()
    if in_pod:
        tasks.replicas[slot].crash()
    else:
        tasks.replicas[slot].kill()
        tasks.start(slot)

    def is_back() -> bool:
        return tasks.all_live() and _epoch(tasks, slot) > before + INTERVAL_EPOCHS

    tasks.poll_until(is_back, RETURN_S)
    response = tasks.replicas[slot].response
    assert response is not None
    restored = response.restored_from if response.restored_from is not None else -1
    live = tasks.replicas[_slot(tasks, "live")]
    at = [since for since, _ in live.advanced_at]
    last_before = max(since for since in at if since <= began)
    return live.longest_pause_s(last_before), max(0, before - restored)


def _slot(tasks: TaskProcesses, name: str) -> Slot:
    topology = tasks.generation.topology
    return next(s for s in tasks.replicas if topology.segment(s.segment).name == name)


def _epoch(tasks: TaskProcesses, slot: Slot) -> int:
    response = tasks.replicas[slot].response
    return response.stable_epoch if response is not None else -1


if __name__ == "__main__":
    main()
