"""A lost replica borrows 10 MB, 100 MB and 1 GB of state from its partner, which goes on.

.venv/bin/python benchmarks/state_movement.py [--megabytes 10 100 1000]

Real task processes with Spark and the coordinator's real core on this machine, without a cluster: a
source, and two replicas of a window that never closes. Its groups have names of 1,000 bytes, and
come within a minute; from then on 1,000 small groups change in each epoch. One replica is killed
with its disk, once a checkpoint has all of the state.

- *fetch*: from the restore point until all of the state is fetched, beside the start of Spark.
  *kill to serving*: until readers may read it. *kill to Live*: until it has caught up, and the
  partition has a checkpoint after the lent epoch
- *memory* of the Python processes, without mapped files: the most while state is fetched, above
  what it was before, for the lender in the seconds before the kill, for the newcomer before it has
  a restore point (target: 128 MiB, whatever the state's size)
- *epochs* of the partner, from the end of an epoch until a poll, every few hundredths of a second,
  finds it computed

Writes build/bench/state_movement.json and .md.
"""

from __future__ import annotations

import argparse
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rekindle.protocol import TaskPhase
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.output_times import WrittenFile, latencies, percentiles
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.task_processes import ReplicaProcess, TaskProcesses, task_processes

NAME_BYTES, ROW_BYTES = 1_000, 1_040
FILL_S, LEAST_ROWS_PER_S, CHANGED_GROUPS = 60, 1_000, 1_000
BEFORE_S, TIMEOUT_S = 20.0, 900.0
POLL_S = 0.01
EPOCH_S = 1.0
MEMORY_TARGET_MIB = 128
MIB = 2**20
_MISSING = re.compile(r"^rekindle_task_missing_state_bytes\S* (\S+)$", re.MULTILINE)


def make_spec(directory: Path, groups: int, rows_per_s: int) -> dict[str, Any]:
    name = f"rpad(CAST(n AS STRING), {NAME_BYTES}, '-')"
    changed = f"CAST(n % {CHANGED_GROUPS} AS STRING)"
    key = f"CASE WHEN n < {groups} THEN {name} ELSE {changed} END"
    columns = {"n": "sequence", "t": "timestamp"}
    return {
        "epochInterval": "1s",
        "checkpoint": {"interval": "10s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "rows",
                "schema": "n BIGINT, t TIMESTAMP",
                "eventTime": {"column": "t"},
                "generator": {"rowsPerSecond": rows_per_s, "columns": columns},
            }
        ],
        "operators": [
            {
                "name": "named",
                "inputs": ["rows"],
                "replicas": 2,
                "sql": f"SELECT {key} AS k, t FROM rows",
            },
            {
                "name": "counts",
                "inputs": ["named"],
                "replicas": 2,
                "window": {"size": "1000d", "groupBy": ["k"], "aggregate": "count(*) AS rows"},
            },
        ],
        "queries": [
            {
                "name": "counts",
                "from": "counts",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            }
        ],
    }


@dataclass(slots=True)
class Movement:
    """What was seen of one rebuild: when, by the monotonic clock, the newcomer had a restore point,
    had fetched the state, served readers, and was Live. Memory in MiB."""

    killed: float
    begun: float = 0.0
    fetched: float = 0.0
    serves: float = 0.0
    live: float = 0.0
    missing_bytes: float = 0.0  # the most that was seen
    lender_mib: float = 0.0
    newcomer_before_mib: float = 0.0
    newcomer_mib: float = 0.0

    def observe(self, lender: ReplicaProcess, newcomer: ReplicaProcess) -> None:
        now, response = time.monotonic(), newcomer.response
        memory_mib = _anonymous_mib(newcomer)
        if response is None or response.lent_from is None:
            self.newcomer_before_mib = memory_mib
            return
        self.begun = self.begun or now
        missing_bytes = _missing_bytes(newcomer)
        self.missing_bytes = max(self.missing_bytes, missing_bytes)
        if self.missing_bytes and not missing_bytes:
            self.fetched = self.fetched or now
        if newcomer.phase is not None and newcomer.phase.serves:
            self.serves = self.serves or now
        if newcomer.phase is TaskPhase.LIVE:
            self.live = self.live or now
        if not self.fetched:
            self.lender_mib = max(self.lender_mib, _anonymous_mib(lender))
            self.newcomer_mib = max(self.newcomer_mib, memory_mib)


def _missing_bytes(replica: ReplicaProcess) -> float:
    with urllib.request.urlopen(f"http://{replica.address}:8080/metrics", timeout=2) as stream:
        found = _MISSING.search(stream.read().decode())
    return float(found[1]) if found is not None else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[10, 100, 1000])
    rows = [row for megabytes in parser.parse_args().megabytes for row in _measured(megabytes)]
    report("state_movement", [*rows, load_average()])


def _measured(megabytes: int) -> list[Measurement]:
    groups = megabytes * 1_000_000 // ROW_BYTES
    rows_per_s = max(LEAST_ROWS_PER_S, groups // FILL_S)
    filled_epoch = groups // rows_per_s + 1
    with temporary_run_directory("movement") as directory:
        spec = make_spec(directory, groups, rows_per_s)
        with task_processes(directory, spec) as tasks:
            tasks.poll_until(
                lambda: tasks.all_live() and tasks.committed_epoch() > filled_epoch, TIMEOUT_S
            )
            lost, partner = (r for r in tasks.replicas.values() if _is_replicated(tasks, r))
            began = time.monotonic()
            lender_mib = 0.0
            while time.monotonic() < began + BEFORE_S:
                _poll(tasks)
                lender_mib = max(lender_mib, _anonymous_mib(partner))
            movement = _rebuild(tasks, lost, partner)
            rows = _movement_rows(megabytes, movement, lender_mib)
            rows.append(_epoch_row(megabytes, tasks, partner, began, movement))
    return rows


def _is_replicated(tasks: TaskProcesses, replica: ReplicaProcess) -> bool:
    return sum(slot.segment == replica.slot.segment for slot in tasks.replicas) > 1


def _rebuild(tasks: TaskProcesses, lost: ReplicaProcess, partner: ReplicaProcess) -> Movement:
    lost.kill()
    movement = Movement(time.monotonic())
    newcomer = tasks.start(lost.slot)
    while not movement.live:
        assert time.monotonic() < movement.killed + TIMEOUT_S, (
            tasks.restore_points,
            newcomer.response,
        )
        _poll(tasks)
        movement.observe(partner, newcomer)
    assert movement.begun, f"the state was restored from a checkpoint: {tasks.restore_points}"
    return movement


def _poll(tasks: TaskProcesses) -> None:
    tasks.poll_all()
    time.sleep(POLL_S)


def _anonymous_mib(replica: ReplicaProcess) -> float:
    memory = psutil.Process(replica.process.pid).memory_info()
    return float(memory.rss - memory.shared) / MIB


def _movement_rows(
    megabytes: int, movement: Movement, lender_before_mib: float
) -> list[Measurement]:
    moved_mb, fetch_s = movement.missing_bytes / 1e6, movement.fetched - movement.begun
    figures = {
        "moved MB": moved_mb,
        "fetch s": fetch_s,
        "MB/s fetched": moved_mb / max(fetch_s, POLL_S),
        "kill to serving s": movement.serves - movement.killed,
        "kill to Live s": movement.live - movement.killed,
    }
    before_after = {
        "lender": (lender_before_mib, movement.lender_mib),
        "newcomer": (movement.newcomer_before_mib, movement.newcomer_mib),
    }
    what = f"{megabytes} MB"
    rows = [Measurement(f"{what}: movement", {k: round(v, 2) for k, v in figures.items()})]
    for party, (before, most) in before_after.items():
        grown = round(most - before, 1)
        values = {"before MiB": round(before, 1), "grown MiB": grown}
        met = grown <= MEMORY_TARGET_MIB
        rows.append(Measurement(f"{what}: memory of the {party}", values, MEMORY_TARGET_MIB, met))
    return rows


def _epoch_row(
    megabytes: int, tasks: TaskProcesses, partner: ReplicaProcess, began: float, movement: Movement
) -> Measurement:
    """Latencies of the partner's epochs before the kill and until the newcomer was Live."""
    computed = []
    newest = 0
    for at_s, epoch in partner.advanced_at:
        # Computed epochs in place of written files, for `latencies`.
        computed += [
            WrittenFile(at_s, e, partition=0, rows=0) for e in range(newest + 1, epoch + 1)
        ]
        newest = epoch
    figures: dict[str, float] = {}
    for when, since, until in (
        ("before", began, movement.killed),
        ("during", movement.killed, movement.live),
    ):
        found = percentiles(latencies(computed, tasks.origin_s, EPOCH_S, since, until))
        figures |= {f"{when} p50 s": round(found.p50, 3), f"{when} p99 s": round(found.p99, 3)}
    figures["longest pause s"] = round(partner.longest_pause_s(movement.killed), 3)
    return Measurement(f"{megabytes} MB: epochs of the partner", figures)


if __name__ == "__main__":
    main()
