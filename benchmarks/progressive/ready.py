"""From a new node's Ready to the first result of the query that waits for it.

.venv/bin/python -m progressive.ready [--nodes 1 4] [--times 3]
(in benchmarks/; for a machine that does nothing else)

Four windows without replicas, each on a process node with room for one task. So many of these nodes
are killed; when their queries wait for capacity, as many nodes join at once. A node counts from the
time at which it is Ready, a query from the first epoch that its sink has after that: an epoch takes
1 s. There is no figure with a standby: it has a slot, and a query that waits would have got that.
Writes build/bench/progressive_ready.json and .md.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from replicated_query import Load, topology_resource

from progressive.real import ONE_TASK, single_task_nodes
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.output_times import percentiles, written_files
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

NAME = "ready"
QUERIES = 4
START_TIMEOUT_S = 600.0
TARGET_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, QUERIES])
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    rows: list[Measurement] = []
    with single_task_nodes(_resource(), QUERIES + 1) as (cluster, run):
        for nodes in args.nodes:
            times: list[float] = []
            for _ in range(args.times):
                times += _join(cluster, run, nodes)
                print(f"{nodes} nodes: {', '.join(f'{each:.1f}' for each in times)} s", flush=True)
            found = percentiles(times)
            figures = {"p50 s": round(found.p50, 1), "max s": round(found.worst, 1)}
            met = found.worst <= TARGET_S
            rows.append(Measurement(f"{nodes} nodes at once", figures, TARGET_S, met))
            report("progressive_ready", [*rows, load_average()])


def _resource() -> dict[str, Any]:
    resource = topology_resource(NAME, Load(1000, 1))
    spec = resource["spec"]
    (window, _), (query, _) = spec["operators"], spec["queries"]
    place = query["sink"]["files"]["url"].rpartition("/")[0]
    names = [f"w{number}" for number in range(1, QUERIES + 1)]
    spec |= {
        "replicas": 1,
        "operators": [{**window, "name": name} for name in names],
        "queries": [
            {
                **query,
                "name": name,
                "from": name,
                "sink": {"files": {"url": f"{place}/{name}", "format": "parquet"}},
            }
            for name in names
        ],
    }
    return resource


def _join(cluster: EmbeddedCluster, run: TopologyRun, count: int) -> list[float]:
    """Seconds, of each query that was lost."""
    run.wait_live(START_TIMEOUT_S)
    run.wait_redundant(START_TIMEOUT_S)
    run.wait_checkpoint(after=run.observer.checkpoint_epoch())
    lost = run.queries()[:count]
    cluster.kill_nodes([run.task_pods(name)[0].spec.node_name for name in lost])

    wait_for(
        "queries that wait",
        lambda: all(run.observer.states().get(name) != "Live" for name in lost),
        120,
    )
    time.sleep(10)  # the loss is handled: what is measured begins with the node
    nodes = [cluster.launch_node(ONE_TASK) for _ in lost]

    def ready(number: int) -> float:
        nodes[number].wait_ready()
        return time.time()

    with ThreadPoolExecutor(count) as pool:
        ready_at = dict(
            zip((node.name for node in nodes), pool.map(ready, range(count)), strict=True)
        )
    cluster.delete_lost_nodes()
    run.wait_live(START_TIMEOUT_S)
    times = []
    for name in lost:
        since = ready_at[run.task_pods(name)[0].spec.node_name]
        folder = cluster.shared / NAME / "output" / name
        times.append(min(file.at_s for file in written_files(folder) if file.at_s > since) - since)
    return times


if __name__ == "__main__":
    main()
