"""The same experiment on real nodes, small enough for two cores, beside what the model predicts.

.venv/bin/python -m progressive.real [--modes Progressive Blocking] [--times-faster 6] [--seed 1]
(in benchmarks/; for a machine that does nothing else)

Process nodes with room for one task: three windows and the seven queries of their sets, one
partition each, and source and parser, on eight nodes; operator and coordinator on two more, which
are too small for a task. The seven nodes with sinks are killed, and seven others are added at times
that are drawn as in the model, so many times faster. `until Live`: seconds from the kill, of each
query, from the topology's status. Predicted: by the model, with the measured times of the nodes.
`ratio`: predicted by measured, mean over queries; target: within 0.2 of 1. Writes
build/bench/progressive_real.json and .md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import fmean
from typing import Any

from progressive.experiment import arrivals, lost_queries, window_sets
from progressive.policies import Blocking, Policy, Progressive
from progressive.timing import THRESHOLD, RecoveryTimes, answering
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.directory import temporary_run_directory
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

NAME = "progressive"
WINDOWS, LOST = 3, 7
ONE_TASK, TOO_SMALL = NodeResources("700m", "2Gi"), NodeResources(cpu="450m")
START_TIMEOUT_S, RECOVERY_TIMEOUT_S = 600.0, 600.0
WITHIN = 0.2
SCHEMA = "k BIGINT, v DOUBLE, t TIMESTAMP"


def topology_resource() -> dict[str, Any]:
    place = f"file://{SHARED_MOUNT_PATH}/{NAME}"
    columns = {"k": "integer(1, 50)", "v": "uniform(0, 100)", "t": "timestamp"}
    operators: list[dict[str, Any]] = [
        {"name": "parser", "inputs": ["rows"], "sql": "SELECT k, v, t FROM rows WHERE v >= 1"}
    ]
    queries = []
    for number, of in enumerate(window_sets(WINDOWS), start=1):
        name = f"o{number:02}"
        if len(of) == 1:
            window = {"size": f"{10 * number}s", "slide": "5s", "groupBy": ["k"]}
            window["aggregate"] = "count(*) AS n"
            operators.append({"name": name, "inputs": ["parser"], "window": window})
        else:
            inputs = [f"o{each:02}" for each in of]
            selects = (f"SELECT k, n, window_end FROM {each}" for each in inputs)
            operators.append({"name": name, "inputs": inputs, "sql": " UNION ALL ".join(selects)})
        sink = {"files": {"url": f"{place}/output/q{number}", "format": "parquet"}}
        queries.append({"name": f"q{number}", "from": name, "priority": 1, "sink": sink})
    return {
        "apiVersion": "rekindle.dev/v1alpha1",
        "kind": "StreamTopology",
        "metadata": {"name": NAME},
        "spec": {
            "epochInterval": "1s",
            "checkpoint": {"interval": "5s", "store": f"{place}/checkpoints", "volume": "rekindle"},
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
            "sources": [
                {
                    "name": "rows",
                    "schema": SCHEMA,
                    "eventTime": {"column": "t"},
                    "generator": {"rowsPerSecond": 200, "seed": 7, "columns": columns},
                }
            ],
            "operators": operators,
            "queries": queries,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="*", default=["Progressive", "Blocking"])
    parser.add_argument("--times-faster", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    planned = [at_s / args.times_faster for at_s in arrivals(Random(args.seed))[:LOST]]
    rows: list[Measurement] = []
    with single_task_nodes(topology_resource(), LOST + 1) as (cluster, run):
        for mode in args.modes:
            _set_mode(cluster, mode)
            rows += _recover(cluster, run, mode, planned)
            report("progressive_real", [*rows, load_average()])


@contextmanager
def single_task_nodes(
    resource: dict[str, Any], count: int
) -> Iterator[tuple[EmbeddedCluster, TopologyRun]]:
    """The topology on so many nodes with room for one task each; operator and coordinator are on
    two more, which are too small for one."""
    with (
        temporary_run_directory("bench") as directory,
        EmbeddedCluster(directory, nodes=1, on_progress=print) as cluster,
    ):
        cluster.kubectl("cordon", *cluster.nodes)
        for _ in range(2):
            cluster.add_node(TOO_SMALL)
        cluster.create_claim("rekindle")
        cluster.install()
        with TopologyRun(cluster, resource) as run:
            wait_for("the coordinator's node", lambda: _is_placed(run), 120)
            for _ in range(count):
                cluster.add_node(ONE_TASK)
            yield cluster, run


def _is_placed(run: TopologyRun) -> bool:
    return any(pod.spec.node_name for pod in run.coordinator_pods())


def _set_mode(cluster: EmbeddedCluster, mode: str) -> None:
    patch = json.dumps({"spec": {"recovery": {"mode": mode}}})
    cluster.kubectl("patch", "streamtopology", NAME, "--type=merge", "-p", patch)


def _recover(
    cluster: EmbeddedCluster, run: TopologyRun, mode: str, planned: Sequence[float]
) -> list[Measurement]:
    run.wait_live(START_TIMEOUT_S)
    run.wait_redundant(START_TIMEOUT_S)
    run.wait_checkpoint(after=run.observer.checkpoint_epoch())
    sinks = [f"o{number:02}" for number in range(1, LOST + 1)]
    victims = sorted({pod.spec.node_name for name in sinks for pod in run.task_pods(name)})
    assert len(victims) == LOST, victims
    killed_at = run.observer.now()
    cluster.kill_nodes(victims)
    came = []
    for at_s in planned:
        time.sleep(max(0.0, killed_at + at_s - run.observer.now()))
        cluster.add_node(ONE_TASK)
        came.append(run.observer.now() - killed_at)
    live: dict[str, float] = {}

    def all_live() -> bool:
        for query in run.queries():
            outage = run.observer.history.outage(query, killed_at)
            if outage is not None and outage.live_s is not None:
                live[query] = outage.live_s - killed_at
        return len(live) == len(run.queries())

    wait_for("all queries Live again", all_live, RECOVERY_TIMEOUT_S)
    cluster.delete_lost_nodes()
    predicted = predict(mode, came)
    ratio = fmean(predicted.values()) / fmean(live.values())
    return [
        Measurement(f"{mode}: nodes came after, s", _by_number(came)),
        Measurement(f"{mode}: until Live, s", _by_number(sorted(live.values()))),
        Measurement(f"{mode}: predicted, s", _by_number(sorted(predicted.values()))),
        Measurement(
            f"{mode}: mean",
            {
                "measured": round(fmean(live.values()), 1),
                "predicted": round(fmean(predicted.values()), 1),
                "ratio": round(ratio, 2),
            },
            WITHIN,
            abs(ratio - 1) <= WITHIN,
        ),
    ]


def predict(mode: str, came: Sequence[float]) -> dict[str, float]:
    """By query, seconds from the loss until it is available."""
    queries = lost_queries(windows=WINDOWS, parallelism=1)
    policy: Policy = Blocking(queries, 1) if mode == "Blocking" else Progressive(queries, 1)
    times = RecoveryTimes(since_checkpoint_s=2.5)
    found = answering(queries, policy, came, times)
    return {
        name: answer.since_s
        + max(0.0, answer.backlog_s - (THRESHOLD - 1) * times.latency_s) / answer.catch_up_speed
        for name, answer in found.items()
    }


def _by_number(values: Sequence[float]) -> dict[str, float]:
    return {str(number): round(value, 1) for number, value in enumerate(values, start=1)}


if __name__ == "__main__":
    main()
