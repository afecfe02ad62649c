"""From the loss of an unreplicated task to its first complete result, without and with a standby.

.venv/bin/python benchmarks/standby.py [--kills 3] [--standbys 0 1]

A window without a replica on an embedded cluster with Spark, with room for one more pod. Its
processes are killed with -9, or its pod is deleted by force: without a standby its container
restarts, or another pod is started; with one the standby continues as the task. Each time the next
kill waits until the topology is Running, and the standby is warm.

- *first result*: from the kill until the first epoch after it is in the sink (target with a
  standby: 5 s); an epoch takes 1 s
Writes build/bench/standby.json and .md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from replicated_query import Load, replicated_run, topology_resource

from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.output_times import completed_at, percentiles, written_files
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

TARGET_S = 5.0
START_TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--standbys", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    load = Load(1000, 1)
    rows = []
    with replicated_run("standby", load, _resource(0)) as (cluster, run):
        for standbys in options.standbys:
            cluster.apply(_resource(standbys))
            _wait_until_quiet(run, standbys)
            for how in ("processes killed", "pod deleted"):
                times = [_lose(cluster, run, how, standbys) for _ in range(options.kills)]
                rows.append(_row(f"{how}, {standbys} standbys", times, standbys))
    report("standby", [*rows, load_average()])


def _resource(standbys: int) -> dict[str, Any]:
    """A source and a window, each in one task."""
    resource = topology_resource("standby", Load(1000, 1))
    spec = resource["spec"]
    spec |= {"replicas": 1, "recovery": {"standby": standbys}}
    spec["operators"], spec["queries"] = spec["operators"][:1], spec["queries"][:1]
    return resource


def _wait_until_quiet(run: TopologyRun, standbys: int) -> None:
    wanted = f"{standbys}/{standbys}" if standbys else None

    def is_quiet() -> bool:
        status: dict[str, Any] = run.observer.status
        return status.get("phase") == "Running" and status.get("standby") == wanted

    wait_for("Running, with warm standbys", is_quiet, START_TIMEOUT_S, every_s=0.25)
    run.wait_sinks_advance(5, START_TIMEOUT_S)


def _lose(cluster: EmbeddedCluster, run: TopologyRun, how: str, standbys: int) -> float:
    """Seconds until the first complete result."""
    _wait_until_quiet(run, standbys)
    folder = cluster.shared / run.name / "output" / "direct"
    (pod,) = run.task_pods("durations")
    killed_at = time.time()
    if how == "pod deleted":
        cluster.delete_pod(pod)
    else:
        run.kill_pod_processes(pod)
    newest = max(completed_at(written_files(folder)))

    def first_result() -> float | None:
        found = completed_at(f for f in written_files(folder) if f.at_s > killed_at)
        later = [at for epoch, at in found.items() if epoch > newest]
        return min(later, default=None)

    at = wait_for("a result", first_result, START_TIMEOUT_S, every_s=0.2)
    (after,) = wait_for("one task", lambda: run.task_pods("durations"), 60)
    print(f"{how}, {standbys} standbys: {at - killed_at:.1f} s, {after.metadata.name}", flush=True)
    return at - killed_at


def _row(what: str, times: list[float], standbys: int) -> Measurement:
    found = percentiles(times)
    figures = {"p50 s": round(found.p50, 2), "max s": round(found.worst, 2), "n": len(times)}
    target = TARGET_S if standbys else None
    return Measurement(what, figures, target, found.worst <= TARGET_S if standbys else None)


if __name__ == "__main__":
    main()
