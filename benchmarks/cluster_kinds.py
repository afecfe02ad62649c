"""A lost node on real kubelets, beside the same on process nodes, in one table.

For each kind of node, the node of a query's only task is killed: seconds to `suspected` in the
topology's status, to the first replacement pod, to the first new rows of that query. Then for each
of these the ratio of the medians (target: 1.5).

A killed process node closes its connections, a killed kubelet node falls silent. Operator and
coordinator have nodes of their own, as in cluster_failover. Needs root and the images of
`make images`. Writes build/bench/cluster_kinds.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime

from cluster_failover import (
    OTHER_NODES,
    TASK_NODES,
    TOO_SMALL_FOR_TASKS,
    coordinators_node,
    topology_resource,
)

from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.nodes import KubeletNodes, NodeKind, ProcessNodes
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

ROUNDS = 5
STARTED = "a started task, from its container's start"
RATIO_TARGET = 1.5
Times = Mapping[str, float]


def main() -> None:
    measured = {kind.name: _losses(kind) for kind in (ProcessNodes(), KubeletNodes())}
    rows = [load_average()]
    for what in measured["process"][0]:
        medians = {}
        for kind, losses in measured.items():
            seconds = [loss[what] for loss in losses]
            medians[kind] = statistics.median(seconds)
            figures = {"median": round(medians[kind], 2), "max": round(max(seconds), 2)}
            prefix = "" if what == STARTED else "kill to "
            rows.append(Measurement(f"{kind}: {prefix}{what}, s", figures))
        ratio = round(medians["kubelet"] / medians["process"], 2)
        met = ratio <= RATIO_TARGET
        rows.append(Measurement(f"kubelet / process: {what}", {"ratio": ratio}, RATIO_TARGET, met))
    report("cluster_kinds", rows)


def _losses(kind: NodeKind) -> Sequence[Times]:
    with (
        temporary_run_directory("bench") as directory,
        EmbeddedCluster(directory, nodes=TASK_NODES, node_kind=kind, on_progress=print) as cluster,
    ):
        for_tasks = list(cluster.nodes)
        cluster.control_plane.kubectl("cordon", *for_tasks)
        for _ in range(OTHER_NODES):
            cluster.add_node(TOO_SMALL_FOR_TASKS)
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(cluster, topology_resource("kinds")) as run:
            wait_for("the coordinator's node", lambda: coordinators_node(run), 60)
            cluster.control_plane.kubectl("uncordon", *for_tasks)
            run.wait_live()
            run.wait_checkpoint()
            return [_lose_node(run) for _ in range(ROUNDS)]


def _lose_node(run: TopologyRun) -> Times:
    run.wait_redundant()
    run.wait_sinks_advance()
    alone = run.task_pods("single")[0]
    before = {p.metadata.name for p in run.cluster.tasks(run.name)}
    began = run.observer.now()
    newest = run.written_epochs("single")[-1]
    run.cluster.kill_nodes([alone.spec.node_name])
    found: dict[str, float] = {}

    def all_seen() -> bool:
        now = run.observer.now() - began
        tasks = (run.cluster.status(run.name).get("dataPlane") or {}).get("tasks", [])
        seen = {
            "suspected": any(
                t.get("suspected") and t.get("pod") == alone.metadata.name for t in tasks
            ),
            "first replacement pod": bool(
                {p.metadata.name for p in run.cluster.tasks(run.name)} - before
            ),
            # The lost task may have written one more epoch just before it was killed.
            "first new rows": run.written_epochs("single")[-1] > newest + 1,
        }
        for what, is_seen in seen.items():
            if is_seen:
                found.setdefault(what, now)
        return len(found) == len(seen)

    wait_for("suspicion, replacement and rows", all_seen, 120, every_s=0.02)
    run.cluster.add_node()
    run.wait_live()
    return {**found, STARTED: _start_s(run)}


def _start_s(run: TopologyRun) -> float:
    """Of the newest pod: from the start of its container until Spark is ready and the state is
    restored, by the task's own log. The start is known to the second, and rounded down."""
    pod = run.task_pods("single")[-1]
    began: datetime = pod.status.container_statuses[0].state.running.started_at
    text = run.cluster.kubectl("logs", "--timestamps", pod.metadata.name)
    line = next(line for line in text.splitlines() if "started after epoch" in line)
    return (_time(line.split()[0]) - began).total_seconds()


def _time(text: str) -> datetime:
    """RFC 3339 with nanoseconds."""
    return datetime.fromisoformat(f"{text[:26].rstrip('Z')}+00:00")


if __name__ == "__main__":
    main()
