"""Times of detection and replacement of losses, and gaps in the output, on the embedded cluster.

- freeze -> `suspected` in the topology's status (target: 2 s), -> first replacement pod (target:
  5 s), for a node with two tasks, and for one with a single task, which counts as the node's
  silence if its kubelet is silent too (docs/decisions/0025);
- freeze of the coordinator's node -> the next coordinator's pod (no target);
- the gap in a replicated query's output when one replica is killed (target: one epoch + 100 ms),
  both for the replicated segment's own sink and for a query that reads the replicated stream,
  and for comparison the same without a loss (no target);
- the leading operator and the coordinator among six of nine nodes that die at once: -> no query
  is reported as Live in the status (target: 3 s), -> first replacement pod of a task (targets: 5 s
  median, 8 s). Another replica of the operator survives.

Except for the last, tasks have their own nodes, so that only their loss is measured: the loss of a
node that also runs the coordinator or the leading operator is detected when their Leases expire
(docs/design/recovery.md). The other nodes are too small for a task, and the nodes for tasks are
cordoned until operator and coordinator are placed.

Writes build/bench/cluster_failover.json.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH, Cluster
from rekindle_testing.harness.cluster import NAMESPACE, EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.harness.report import Measurement, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

ROUNDS = 3
BURST_NODES = 9
BURST_LOST = 6
OPERATORS = 3  # the chart's default
GAP_TARGET_S = 1.1  # an epoch + 100 ms
TASK_NODES = 3
OTHER_NODES = 2
TOO_SMALL_FOR_TASKS = NodeResources(cpu="450m")


def topology_resource(name: str) -> dict[str, Any]:
    """A generator, a replicated segment with a sink, and a reader of its stream with another."""
    place = f"file://{SHARED_MOUNT_PATH}/{name}"
    columns = {"k": "integer(1, 50)", "v": "uniform(0, 100)", "t": "timestamp"}
    return {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": name},
        "spec": {
            "epochInterval": "1s",
            "checkpoint": {"interval": "5s", "store": f"{place}/checkpoints", "volume": "rekindle"},
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            "sources": [
                {
                    "name": "rows",
                    "replicas": 2,
                    "schema": "k BIGINT, v DOUBLE, t TIMESTAMP",
                    "eventTime": {"column": "t"},
                    "generator": {"rowsPerSecond": 1000, "seed": 7, "columns": columns},
                }
            ],
            "operators": [
                {"name": "twin", "inputs": ["rows"], "replicas": 2, "sql": "SELECT * FROM rows"},
                {"name": "single", "inputs": ["twin"], "sql": "SELECT k, v * 2 AS w FROM twin"},
            ],
            "queries": [
                {
                    "name": f"from-{node}",
                    "from": node,
                    "priority": 1,
                    "sink": {"files": {"url": f"{place}/output/{node}", "format": "parquet"}},
                }
                for node in ("twin", "single")
            ],
        },
    }


def main() -> None:
    rows = _rows_of_single_losses()
    report("cluster_failover", rows)  # the second part may fail
    rows += _rows_of_burst()
    report("cluster_failover", rows)


def _rows_of_single_losses() -> list[Measurement]:
    with (
        temporary_run_directory("bench") as directory,
        EmbeddedCluster(directory, nodes=TASK_NODES, on_progress=print) as cluster,
    ):
        for_tasks = list(cluster.nodes)
        cluster.control_plane.kubectl("cordon", *for_tasks)
        for _ in range(OTHER_NODES):
            cluster.add_node(TOO_SMALL_FOR_TASKS)
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(cluster, topology_resource("failover")) as run:
            wait_for("the coordinator's node", lambda: coordinators_node(run), 60)
            cluster.control_plane.kubectl("uncordon", *for_tasks)
            run.wait_live()
            run.wait_checkpoint()
            undisturbed = [_gaps(run, None) for _ in range(ROUNDS)]
            gaps = [_gaps(run, replica % 2) for replica in range(ROUNDS)]
            losses = [_freeze(run, tasks=2) for _ in range(ROUNDS)]
            single = [_freeze(run, tasks=1) for _ in range(ROUNDS)]
            coordinators = [_freeze_coordinator(run) for _ in range(ROUNDS)]
    return [
        _row("freeze to suspected in status, s", [a for a, _ in losses], 2.0),
        _row("freeze to first replacement pod, s", [b for _, b in losses], 5.0),
        _row("single task: freeze to suspected in status, s", [a for a, _ in single], 2.0),
        _row("single task: freeze to first replacement pod, s", [b for _, b in single], 5.0),
        _row("coordinator's node: freeze to the next coordinator's pod, s", coordinators, None),
        _row("longest gap, the replicated segment's sink, s", [a for a, _ in gaps], GAP_TARGET_S),
        _row("longest gap, a reader of that stream, s", [b for _, b in gaps], GAP_TARGET_S),
        _row("nothing killed: the replicated segment's sink, s", [a for a, _ in undisturbed], None),
        _row("nothing killed: a reader of that stream, s", [b for _, b in undisturbed], None),
    ]


def _rows_of_burst() -> list[Measurement]:
    with (
        temporary_run_directory("bench") as directory,
        EmbeddedCluster(directory, nodes=BURST_NODES, on_progress=print) as cluster,
    ):
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(cluster, topology_resource("burst")) as run:
            run.wait_live()
            run.wait_checkpoint()
            bursts = [_lose_most(run) for _ in range(ROUNDS)]
    unknown, replaced = [a for a, _ in bursts], [b for _, b in bursts]
    what = "leader and coordinator among 6 of 9 nodes"
    return [
        _row(f"{what}: to no query called Live, s", unknown, 3.0),
        _row(f"{what}: to first replacement pod, s", replaced, 8.0),
        _row(f"{what}: to first replacement pod, median, s", [statistics.median(replaced)], 5.0),
    ]


def _lose_most(run: TopologyRun) -> tuple[float, float]:
    """Kill six of nine nodes at once; seconds until no query is called Live, and until a task has
    a replacement."""
    run.wait_redundant()
    run.wait_sinks_advance()
    cluster = run.cluster
    wait_for("all replicas of the operator to be ready", lambda: _operators_ready(cluster), 120)
    leader = cluster.leading_operator_pod().spec.node_name
    operators = {p.spec.node_name for p in cluster.operator_pods()}
    before = {p.metadata.name: p.spec.node_name for p in cluster.tasks(run.name)}
    first = [leader, run.coordinator_pod().spec.node_name]
    victims = _choose(first, sorted(cluster.nodes), operators, set(before.values()))
    began = run.observer.now()
    cluster.kill_nodes(victims)
    unknown_at: float | None = None
    replaced_at: float | None = None

    def both() -> bool:
        nonlocal unknown_at, replaced_at
        queries = cluster.status(run.name).get("queries", [])
        if unknown_at is None and all(q.get("state") != "Live" for q in queries):
            unknown_at = run.observer.now()
        names = {p.metadata.name for p in cluster.tasks(run.name)}
        if replaced_at is None and names - before.keys():
            replaced_at = run.observer.now()
        return unknown_at is not None and replaced_at is not None

    wait_for("no query called Live, and a replacement pod", both, 90, every_s=0.05)
    for _ in victims:
        cluster.add_node()
    run.wait_live()
    assert unknown_at is not None
    assert replaced_at is not None
    return unknown_at - began, replaced_at - began


def _operators_ready(cluster: Cluster) -> bool:
    """Whether all replicas of the operator are Ready, on nodes that were not killed."""
    ready = [
        p
        for p in cluster.operator_pods()
        if p.spec.node_name in cluster.nodes
        and any(c.type == "Ready" and c.status == "True" for c in p.status.conditions or ())
    ]
    return len(ready) == OPERATORS


def _choose(
    first: Sequence[str], nodes: Sequence[str], operators: set[str], busy: Collection[str]
) -> list[str]:
    """The nodes to kill: `first`, then nodes with tasks (`busy`), then others. At least one node
    with a replica of the operator survives."""
    victims = list(dict.fromkeys(first))
    for node in sorted(set(nodes) - set(victims), key=lambda n: (n not in busy, n)):
        if len(victims) < BURST_LOST and not operators <= {*victims, node}:
            victims.append(node)
    assert len(victims) == BURST_LOST, "one replica of the operator has to survive"
    return victims


def _row(what: str, values: list[float], target: float | None) -> Measurement:
    figures = {"median": round(statistics.median(values), 2), "max": round(max(values), 2)}
    return Measurement(
        what, figures, target=target, met=None if target is None else max(values) <= target
    )


def _gaps(run: TopologyRun, replica: int | None) -> tuple[float, float]:
    """Kill one replica of `twin`, or none; the longest pause between two sink files around it."""
    run.wait_redundant()
    run.wait_sinks_advance()
    began = run.observer.now()
    if replica is not None:
        run.kill_pod_processes(run.task_pods("twin")[replica])
    run.wait_sinks_advance(epochs=8)
    last_s = run.observer.now() - began + 3  # also the pauses just before the kill
    return run.longest_pause_s("twin", last_s), run.longest_pause_s("single", last_s)


def _freeze(run: TopologyRun, tasks: int) -> tuple[float, float]:
    """Freeze a node with this number of tasks; seconds until one of them is suspected, and until a
    replacement exists."""
    run.wait_redundant()
    _place_on_two_nodes(run)
    run.wait_sinks_advance()
    pods = run.cluster.tasks(run.name)
    before = {p.metadata.name for p in pods}
    name = next(node for node, count in _tasks_by_node(run).items() if count == tasks)
    pod = next(p for p in pods if p.spec.node_name == name)
    began = run.observer.now()
    run.cluster.nodes[name].freeze()

    def suspected() -> float | None:
        tasks = (run.cluster.status(run.name).get("dataPlane") or {}).get("tasks", [])
        ours = [t for t in tasks if t.get("pod") == pod.metadata.name]
        return run.observer.now() if any(t.get("suspected") for t in ours) else None

    def replaced() -> float | None:
        now = {p.metadata.name for p in run.cluster.tasks(run.name)}
        return run.observer.now() if now - before else None

    at_suspected = wait_for("suspected", suspected, 20, every_s=0.02)
    at_replaced = wait_for("a replacement pod", replaced, 40, every_s=0.05)
    run.cluster.kill_nodes([name])
    run.cluster.add_node()
    run.wait_live()
    return at_suspected - began, at_replaced - began


def _tasks_by_node(run: TopologyRun) -> Counter[str]:
    alive = (p for p in run.cluster.tasks(run.name) if p.metadata.deletion_timestamp is None)
    return Counter(p.spec.node_name for p in alive if p.spec.node_name in run.cluster.nodes)


def _place_on_two_nodes(run: TopologyRun) -> None:
    """Move a task so that the tasks are on two nodes, if the scheduler has spread them over
    three."""
    if 2 in _tasks_by_node(run).values():
        return
    single = run.task_pods("single")[0]
    kubectl = run.cluster.kubectl
    kubectl("cordon", single.spec.node_name)
    run.cluster.core_api.delete_namespaced_pod(single.metadata.name, NAMESPACE)
    wait_for("two tasks on a node", lambda: 2 in _tasks_by_node(run).values(), 60)
    kubectl("uncordon", single.spec.node_name)
    run.wait_live()
    run.wait_redundant()


def coordinators_node(run: TopologyRun) -> str | None:
    pods = run.coordinator_pods()
    return pods[0].spec.node_name if pods else None


def _freeze_coordinator(run: TopologyRun) -> float:
    """Freeze the coordinator's node, which may carry the leading operator; seconds until the next
    coordinator has a pod."""
    run.wait_redundant()
    run.wait_sinks_advance()
    before = {p.metadata.name for p in run.coordinator_pods()}
    name = run.coordinator_pod().spec.node_name

    def replaced() -> float | None:
        now = {p.metadata.name for p in run.coordinator_pods()}
        return run.observer.now() if now - before else None

    began = run.observer.now()
    run.cluster.nodes[name].freeze()
    at_replaced = wait_for("another coordinator", replaced, 90, every_s=0.05)
    run.cluster.kill_nodes([name])
    run.cluster.add_node()
    run.wait_live()
    run.wait_sinks_advance()
    return at_replaced - began


if __name__ == "__main__":
    main()
