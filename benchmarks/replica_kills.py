"""Replicas of a replicated, partitioned query are killed with their disks, one after another.

.venv/bin/python benchmarks/replica_kills.py [--kills 30] [--partitions 2]

The query is that of replicated_query.py, under load on an embedded cluster with Spark. Each kill is
`kill -9` of a replica's processes and the loss of its disk; its replacement is another pod, and
begins with the state that the partner lends. The next replica is killed once no replica is
missing: those of the window in turn, each fifth time one of the source.

- *gap*: the longest time between two epochs of the output around a kill (target: an epoch +
  100 ms), of the replicated segment's own sink, and of a query that reads its stream; the same for
  moments without a kill
- *rebuild*: from the kill until the replacement is Live, which includes a checkpoint after the lent
  epoch; all have to begin with the partner's state, none with a checkpoint
- *epochs*: from the end of an epoch until all its rows are in the sink. During a rebuild only the
  partner writes the rows of the partition; the target is 1.5 times the time while no replica is
  missing, in the same run
- *rows*: the sinks are compared with the reference execution; nothing may be lost or repeated

Writes build/bench/replica_kills.json and .md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicated_query import QUERIES, Load, replicated_run, topology_resource

from rekindle import names
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.output_times import (
    WrittenFile,
    intervals,
    latencies,
    percentiles,
    written_files,
)
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

EPOCH_S = 1.0
GAP_TARGET_S = EPOCH_S + 0.1
EPOCH_RATIO_TARGET = 1.5
AROUND_S = 3 * EPOCH_S
QUIET_EPOCHS = 8
REBUILD_TIMEOUT_S = 600
_NOTE = re.compile(r"(\S+), incarnation (\d+): restores epoch -?\d+ of (the checkpoint|replica)")


@dataclass(frozen=True, slots=True)
class Kill:
    """`quiet_s`, `killed_s`, `rebuilt_s`: when no replica was missing any more, when the replica
    was killed, when its replacement was Live; seconds since 1970. `slot`, `incarnation`: of the
    replacement."""

    segment_name: str
    slot: str
    incarnation: int
    quiet_s: float
    killed_s: float
    rebuilt_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--partitions", type=int, default=2)
    options = parser.parse_args()
    load = Load(int(EPOCH_S * 1000), options.partitions)
    with replicated_run("kills", load) as (cluster, run):
        kills = [_kill(cluster, run, number) for number in range(options.kills)]
        run.wait_sinks_advance()
        notes = _NOTE.findall(run.cluster.kubectl("logs", run.coordinator_pod().metadata.name))
        origin = run.cluster.topology(run.name)["metadata"]["creationTimestamp"]
        origin_s = dt.datetime.fromisoformat(origin).timestamp()
        compared = _compare(cluster, run, load)
        folder = cluster.shared / run.name / "output"
        output = {query: written_files(folder / query) for query in QUERIES}
    rows = [row for query in QUERIES for row in _gap_rows(query, output[query], kills)]
    rows += _rebuild_rows(kills, notes)
    rows += [row for query in QUERIES for row in _epoch_rows(query, output[query], origin_s, kills)]
    rows.append(
        Measurement("rows equal to the reference, none lost or repeated", {"rows": compared})
    )
    report("replica_kills", [*rows, load_average()])


def _kill(cluster: EmbeddedCluster, run: TopologyRun, number: int) -> Kill:
    run.wait_redundant(REBUILD_TIMEOUT_S)
    quiet_s = time.time()
    run.wait_sinks_advance(QUIET_EPOCHS, REBUILD_TIMEOUT_S)
    pod = _victim(run, number)
    labels = pod.metadata.labels
    slot = "/".join(labels[label] for label in _SLOT)
    incarnation = int(labels[names.LABEL_INCARNATION])
    killed_s = time.time()
    run.kill_pod_processes(pod)
    cluster.delete_pod(pod)
    replacement = wait_for(
        f"a Live replacement of {pod.metadata.name}",
        lambda: _live_task(run, slot, incarnation),
        REBUILD_TIMEOUT_S,
        0.1,
    )
    segment = labels[names.LABEL_SEGMENT_NAME]
    kill = Kill(segment, slot, replacement["incarnation"], quiet_s, killed_s, time.time())
    rebuild_s = kill.rebuilt_s - killed_s
    print(f"{number + 1}: {pod.metadata.name} rebuilt in {rebuild_s:.1f} s", flush=True)
    return kill


_SLOT = (names.LABEL_SEGMENT, names.LABEL_PARTITION, names.LABEL_REPLICA)


def _victim(run: TopologyRun, number: int) -> Any:
    if number % 5 == 4:
        return _nth(run.task_pods("sessions"), number // 5)
    return _nth(run.task_pods("durations"), number % 5)


def _nth(pods: Sequence[Any], number: int) -> Any:
    return pods[number % len(pods)]


def _live_task(run: TopologyRun, slot: str, incarnation: int) -> dict[str, Any] | None:
    """The task of the slot in the status, if it is Live and of a later incarnation."""
    tasks = (run.observer.status.get("dataPlane") or {}).get("tasks", [])
    return next(
        (
            task
            for task in tasks
            if task["slot"] == slot
            and task["incarnation"] > incarnation
            and task.get("phase") == "Live"
        ),
        None,
    )


def _compare(cluster: EmbeddedCluster, run: TopologyRun, load: Load) -> int:
    """The rows that were compared, through the last epoch of all sinks. The reference execution has
    the same rows, but an end; it lies after that epoch."""
    until = min(run.observer.stable_epochs().values())
    cluster.delete_topology(run.name)  # beside it, the reference execution would get no CPU
    rows = int(load.rows_per_s * EPOCH_S * (until + 5))
    resource = topology_resource(run.name, load, rows)
    reference = Reference(resource, cluster.shared, cluster.directory / "oracle")
    reference.execute()
    return reference.check(resource, until)


def _gap_rows(query: str, files: Sequence[WrittenFile], kills: Sequence[Kill]) -> list[Measurement]:
    moments = {
        "killed": [kill.killed_s for kill in kills],
        "nothing killed": [kill.killed_s - AROUND_S - EPOCH_S for kill in kills],
    }
    rows = []
    for what, times in moments.items():
        gaps = [max(intervals(files, at, at + AROUND_S)) for at in times]
        target = GAP_TARGET_S if what == "killed" else None
        rows.append(_row(f"{query}, {what}: gap, s", gaps, target))
    return rows


def _rebuild_rows(
    kills: Sequence[Kill], notes: Sequence[tuple[str, str, str]]
) -> list[Measurement]:
    origins = {(kill.slot, kill.incarnation): set[str]() for kill in kills}
    for slot, number, origin in notes:
        origins.get((slot, int(number)), set()).add(origin)
    lent = sum(found == {"replica"} for found in origins.values())
    sources = [k.rebuilt_s - k.killed_s for k in kills if k.segment_name == "sessions"]
    windows = [k.rebuilt_s - k.killed_s for k in kills if k.segment_name != "sessions"]
    rows = [_row("rebuild of a window's replica, s", windows, None)]
    if sources:
        rows.append(_row("rebuild of a source's replica, s", sources, None))
    what = "rebuilds from the partner"
    return [*rows, Measurement(what, {"count": lent}, len(kills), lent == len(kills))]


def _epoch_rows(
    query: str, files: Sequence[WrittenFile], origin_s: float, kills: Sequence[Kill]
) -> list[Measurement]:
    before = [
        latency
        for kill in kills
        for latency in latencies(files, origin_s, EPOCH_S, kill.quiet_s, kill.killed_s - EPOCH_S)
    ]
    during = [
        latency
        for kill in kills
        for latency in latencies(files, origin_s, EPOCH_S, kill.killed_s, kill.rebuilt_s)
    ]
    ratio = round(percentiles(during).p99 / percentiles(before).p99, 2)
    met = ratio <= EPOCH_RATIO_TARGET
    pauses = [max(intervals(files, kill.killed_s, kill.rebuilt_s)) for kill in kills]
    return [
        _row(f"{query}, nothing missing: end of an epoch to its rows, s", before, None),
        _row(f"{query}, rebuild: end of an epoch to its rows, s", during, None),
        Measurement(
            f"{query}: p99 of these, rebuild / nothing missing",
            {"ratio": ratio},
            EPOCH_RATIO_TARGET,
            met,
        ),
        _row(f"{query}, rebuild: longest time between two epochs, s", pauses, None),
    ]


def _row(what: str, values: Sequence[float], target: float | None) -> Measurement:
    found = percentiles(values)
    figures = {"p50": round(found.p50, 3), "p99": round(found.p99, 3)}
    figures |= {"max": round(found.worst, 3), "n": len(values)}
    return Measurement(what, figures, target, None if target is None else found.p99 <= target)


if __name__ == "__main__":
    main()
