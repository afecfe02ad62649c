"""What the benchmarks of replicas share: a replicated, partitioned query on an embedded cluster.

A row is a session of a user that has ended, as in the experiment of Flux (Shah et al. 2004),
section 5.4: a source in two replicas, then the longest and the mean session of each user in two
partitions of two replicas, repartitioned by user. The query `direct` has the sink of these four
tasks; `reader` is computed by one more task from their stream. A window closes in each epoch, so
each has rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

QUERIES = ("direct", "reader")
USERS, WINDOW_EPOCHS = 1000, 10
TASK_NODES, OTHER_NODES = 4, 2
START_TIMEOUT_S = 600
TOO_SMALL_FOR_TASKS = NodeResources(cpu="450m")


@dataclass(frozen=True, slots=True)
class Load:
    """`partitions`: of the replicated operator."""

    epoch_ms: int
    partitions: int = 2
    rows_per_s: int = 4000

    @property
    def epoch_s(self) -> float:
        return self.epoch_ms / 1000


def topology_resource(name: str, load: Load, rows: int | None = None) -> dict[str, Any]:
    """`rows`: of the source, which else has no end."""
    epoch_ms = load.epoch_ms
    place = f"file://{SHARED_MOUNT_PATH}/{name}"
    window = {"size": f"{WINDOW_EPOCHS * epoch_ms}ms", "slide": f"{epoch_ms}ms"}
    columns = {"user": f"integer(1, {USERS})", "duration": "integer(1, 3600)", "t": "timestamp"}
    generator: dict[str, Any] = {"rowsPerSecond": load.rows_per_s, "seed": 7, "columns": columns}
    aggregate = "max(duration) AS longest, avg(duration) AS mean"
    return {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": name},
        "spec": {
            "epochInterval": f"{epoch_ms}ms",
            "replicas": 2,
            "checkpoint": {"interval": "5s", "store": f"{place}/checkpoints", "volume": "rekindle"},
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            "sources": [
                {
                    "name": "sessions",
                    "schema": "user BIGINT, duration BIGINT, t TIMESTAMP",
                    "eventTime": {"column": "t"},
                    "generator": generator if rows is None else {**generator, "rows": rows},
                }
            ],
            "operators": [
                {
                    "name": "durations",
                    "inputs": ["sessions"],
                    "keyBy": ["user"],
                    "partitions": load.partitions,
                    "window": {**window, "groupBy": ["user"], "aggregate": aggregate},
                },
                {
                    "name": "copy",
                    "inputs": ["durations"],
                    "keyBy": ["user"],
                    "partitions": 1,
                    "replicas": 1,
                    "sql": "SELECT user, longest, mean FROM durations",
                },
            ],
            "queries": [
                {
                    "name": query,
                    "from": node,
                    "priority": 1,
                    "sink": {"files": {"url": f"{place}/output/{query}", "format": "parquet"}},
                }
                for query, node in zip(QUERIES, ("durations", "copy"), strict=True)
            ],
        },
    }


@contextmanager
def replicated_run(
    name: str, load: Load, resource: dict[str, Any] | None = None
) -> Iterator[tuple[EmbeddedCluster, TopologyRun]]:
    """The topology, or another one, redundant and with a checkpoint. Coordinator and operator are
    on nodes that are too small for tasks, so that nothing else is lost with a task's node."""
    with (
        temporary_run_directory("bench") as directory,
        EmbeddedCluster(directory, nodes=TASK_NODES, on_progress=print) as cluster,
    ):
        for_tasks = list(cluster.nodes)
        cluster.kubectl("cordon", *for_tasks)
        for _ in range(OTHER_NODES):
            cluster.add_node(TOO_SMALL_FOR_TASKS)
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(cluster, resource or topology_resource(name, load)) as run:
            wait_for("the coordinator's node", lambda: _is_placed(run), 60)
            cluster.kubectl("uncordon", *for_tasks)
            run.wait_live(START_TIMEOUT_S)
            run.wait_redundant(START_TIMEOUT_S)
            run.wait_checkpoint()
            yield cluster, run


def _is_placed(run: TopologyRun) -> bool:
    return any(pod.spec.node_name for pod in run.coordinator_pods())
