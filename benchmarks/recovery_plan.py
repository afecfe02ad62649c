"""A recovery plan for many tasks: all of them are missing, and there is capacity for all.

.venv/bin/python benchmarks/recovery_plan.py [--sizes TASKSxNODES ...]

The operator makes a plan in each pass while anything is missing, so a plan must take much less than
a pass. With zone labels a replica goes to another zone than the other one of its partition.

Target: 1,000 tasks on 100 nodes within 0.3 s and 1 s of CPU, with zones as without.
"""

from __future__ import annotations

import argparse
import time

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import NodeView
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import DownQuery, make_plan
from rekindle_testing.harness.report import Measurement, load_average, report

TARGET_S, TARGET_CPU_S = 0.3, 1.0
TASKS_OF_A_QUERY = 20
ZONES = 3
ZONE = "topology.kubernetes.io/zone"
TASK = ResourceAmounts(500, 1 << 30, 1)


def nodes(number: int, tasks: int, with_zones: bool) -> Capacity:
    """With room for a quarter more than the tasks."""
    room = TASK.scaled(-(-tasks * 5 // (number * 4)))
    views = [
        NodeView(
            name=f"node-{at}",
            uid=f"{at}",
            version=1,
            ready=True,
            readiness_changed_at=0.0,
            cordoned=False,
            taints=(),
            labels={ZONE: f"zone-{at % ZONES}"} if with_zones else {},
            allocatable=room,
        )
        for at in range(number)
    ]
    return Capacity({v.name: NodeCapacity(v, room) for v in views}, total(room for _ in views))


def measure(tasks: int, number: int, with_zones: bool) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of a plan of partitions with two replicas each."""
    pods = {
        f"{at}": PodToPlace(f"{at}", TASK, f"partition-{at // 2}", at % 2) for at in range(tasks)
    }
    queries = [
        DownQuery(
            ("ns/t", f"q{first}"),
            1 + first % 7,
            frozenset(f"{at}" for at in range(first, min(first + TASKS_OF_A_QUERY, tasks))),
        )
        for first in range(0, tasks, TASKS_OF_A_QUERY)
    ]
    capacity = nodes(number, tasks, with_zones)
    began, cpu_began = time.perf_counter(), time.process_time()
    plan = make_plan(queries, pods, [], capacity)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    assert len(plan.nodes) == tasks
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", default=["1000x100", "2000x200"])
    rows: list[Measurement] = []
    for size in parser.parse_args().sizes:
        tasks, number = (int(part) for part in size.split("x"))
        for with_zones in (False, True):
            seconds, cpu = measure(tasks, number, with_zones)
            values = {"s": round(seconds, 3), "CPU s": round(cpu, 3)}
            met = (seconds < TARGET_S and cpu < TARGET_CPU_S) if tasks <= 1000 else None
            zones = f"{ZONES} zones" if with_zones else "no zones"
            rows.append(
                Measurement(f"{tasks:,} tasks, {number} nodes, {zones}", values, TARGET_S, met)
            )
    report("recovery_plan", [*rows, load_average()])


if __name__ == "__main__":
    main()
