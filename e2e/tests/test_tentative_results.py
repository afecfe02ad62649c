"""A query with a finite `maxDelay` loses an input on a real cluster: it goes on without it, says
so, and is corrected. Its sinks get what a run without failures would have written; a reader of
tentative results gets them, and their corrections.

Design: docs/design/consistency.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from cluster_types import every_cluster_type
from tail_process import Tail, expected_rows

from rekindle_testing.harness import flights
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH, Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.failures, pytest.mark.timeout(900)]

SPEEDUP = 86_400
NAME = "tentative"
TENTATIVE_EPOCHS = 3

T = TypeVar("T")


def resource() -> dict[str, Any]:
    """Rows of both sources together, a flight or an hour of weather each, counted by day."""
    document = flights.topology_resource(NAME, SPEEDUP)
    spec = document["spec"]
    both = " UNION ALL ".join(
        f"SELECT origin, time_hour FROM {s}" for s in ("departures", "weather")
    )
    daily = {"size": "24h", "groupBy": ["origin"], "aggregate": "count(*) AS observations"}
    output = f"file://{SHARED_MOUNT_PATH}/{NAME}/output/observations"
    return document | {
        "spec": spec
        | {
            "maxDelay": "2s",
            "operators": [
                {"name": "both", "inputs": ["departures", "weather"], "replicas": 2, "sql": both},
                {"name": "daily", "inputs": ["both"], "keyBy": ["origin"], "partitions": 2}
                | {"window": daily},
            ],
            "queries": [
                {"name": "observations", "from": "daily", "sink": {"files": {"url": output}}},
                {"name": "board", "from": "daily", "sink": {"stream": {"tentative": True}}},
            ],
        }
    }


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def _state(run: TopologyRun) -> str:
    return run.observer.states().get("observations", "")


def _tentative_epochs(run: TopologyRun) -> dict[str, int]:
    """The newest tentative epoch of each task that has one."""
    tasks = run.observer.status.get("dataPlane", {}).get("tasks", [])
    return {t["slot"]: t["tentativeEpoch"] for t in tasks if "tentativeEpoch" in t}


def _without_weather(run: TopologyRun, what: str, condition: Callable[[], T | None]) -> T:
    """Wait for a condition, and kill the source meanwhile as soon as it has started again."""

    def check() -> T | None:
        for pod in run.task_pods("weather"):
            # There is no process, or no longer, while its container starts.
            with contextlib.suppress(AssertionError, ProcessLookupError):
                run.cluster.kill_processes(pod)
        return condition()

    return wait_for(what, check, 60, 0.5)


@every_cluster_type
def test_results_go_on_without_an_input_and_are_corrected(
    cluster: Cluster, cluster_type: str, tmp_path: Any
) -> None:
    """The lost source has no replica."""
    reference = Reference(resource(), cluster.shared, tmp_path)
    reference.execute()
    with TopologyRun(cluster, resource()) as run:
        run.wait_live()
        run.wait_checkpoint()
        tail = Tail(cluster, run.name, "board", "--tentative")
        try:
            _without_weather(run, "the query is Tentative", lambda: _state(run) == "Tentative")
            assert all("weather" in query["waitingFor"] for query in run.observer.status["queries"])
            first = _without_weather(run, "tentative epochs", lambda: _tentative_epochs(run))
            goal = min(first.values()) + TENTATIVE_EPOCHS
            _without_weather(
                run,
                f"tentative epochs after {goal}",
                lambda: max(_tentative_epochs(run).values(), default=-1) > goal,
            )
            run.wait_live()
            wait_for("all is corrected", lambda: not _tentative_epochs(run), 60, 0.25)
            tail.wait(max(run.observer.stable_epochs().values()) + 5)
            assert run.verify(reference) > 0
        finally:
            errors = tail.end()
        assert tail.kinds() >= {"STABLE", "TENTATIVE", "UNDO", "CORRECTED", "REC_DONE"}, errors
        through = tail.through()
        expected = expected_rows(tmp_path / "reference" / "observations", through)
        assert tail.rows(through) == expected
