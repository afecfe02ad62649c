"""Failures on clusters of every kind: real control plane, real Spark, real kills.

After every failure comes the same question: did the sinks get, row by row, what a run without
failures would have written? All tests of a class share one topology.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from cluster_types import every_cluster_type, every_cluster_type_kubelet_marked_long

from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.harness import flights
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH, Cluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.spark,
    pytest.mark.failures,
    pytest.mark.timeout(900),
]

SPEEDUP = 43_200  # half a day of flights each second: the input lasts 12 minutes
CHECKPOINT_EPOCHS = 10  # the example's checkpoint interval
_TORN_BYTES = 7
ADDED = "all-flown"  # the query that an edit adds


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """For all topologies here: they differ only in names and folders, and in one query."""
    document = flights.topology_resource("reference", speedup=SPEEDUP)
    _add_query_and_raise_priority(document["spec"])
    found = Reference(document, cluster.shared, tmp_path_factory.mktemp("oracle"))
    found.execute()
    return found


@pytest.fixture(scope="class")
def shared_run(
    request: pytest.FixtureRequest, cluster: Cluster, reference: Reference
) -> Iterator[TopologyRun]:
    """One topology for the tests of a class, which follow each other on it. The reference comes
    first: beside a topology it would have to wait for the cores."""
    with TopologyRun(
        cluster, flights.topology_resource(request.cls.topology, speedup=SPEEDUP)
    ) as run:
        run.wait_live()
        run.wait_checkpoint()
        yield run


@pytest.fixture
def run(shared_run: TopologyRun, failed: Callable[[], bool]) -> Iterator[TopologyRun]:
    shared_run.wait_live()
    yield shared_run
    if failed():
        shared_run.keep_evidence()


@every_cluster_type_kubelet_marked_long
class TestProcesses:
    topology = "processes"

    @pytest.mark.long  # of processes alone: test_task_process.py; test_stream_sinks.py kills one
    def test_a_killed_task_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        run.kill_pod_processes(run.task_pods("alarms")[0])
        run.wait_sinks_advance()
        run.verify(reference)

    @pytest.mark.long  # of processes alone: test_task_process.py
    def test_a_torn_log_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        _tear_log(run, "flown")
        run.wait_sinks_advance()
        run.verify(reference)

    @pytest.mark.long  # of the cores alone: `make simulate`, whose stores fail
    def test_a_failing_store_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        _remove_store(run, seconds=10)
        run.wait_checkpoint(after=run.observer.checkpoint_epoch())
        run.wait_sinks_advance()
        run.verify(reference)

    @pytest.mark.long  # of the cores alone: test_coordinator_lost_state.py
    def test_state_that_others_delete_is_saved_again(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        # Just after a checkpoint: one that is saved later may need nothing of what is deleted.
        run.wait_checkpoint(after=run.observer.checkpoint_epoch())
        _delete_state(run)
        run.kill_pod_processes(run.coordinator_pod())  # the next one collects garbage first
        _wait_checkpointed(run, "Unrestorable")
        _wait_checkpointed(run, "UpToDate")
        for pod in run.task_pods("storms"):
            run.kill_pod_processes(pod)
        run.wait_sinks_advance()
        run.verify(reference)

    @pytest.mark.long  # with simulated tasks: test_coordinator_api.py
    def test_a_killed_coordinator_restarts_no_task(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        before = run.container_starts()
        run.kill_pod_processes(run.coordinator_pod())
        run.wait_sinks_advance(epochs=5)
        assert run.container_starts() == before
        run.verify(reference)

    @pytest.mark.long  # with an API server alone: test_operator_api.py
    def test_a_killed_operator_restarts_no_task(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        before = run.container_starts()
        run.kill_pod_processes(run.cluster.leading_operator_pod())
        run.wait_sinks_advance(epochs=5)
        assert run.container_starts() == before
        run.verify(reference)


def _tear_log(run: TopologyRun, segment: str) -> None:
    """Kill a task and cut the end of its output log, until one has come back and found that.

    A task that takes more than ten seconds to start again is replaced, and its log goes as well.
    """
    for _ in range(3):
        pod = run.task_pods(segment)[0]
        log = run.cluster.nodes[pod.spec.node_name].volume(pod.metadata.uid, "data") / "log"
        files = sorted(f for f in log.rglob("*.log") if f.stat().st_size > _TORN_BYTES)
        assert files, f"no output log of {pod.metadata.name}"
        run.kill_pod_processes(pod)
        os.truncate(files[-1], files[-1].stat().st_size - _TORN_BYTES)
        end = partial(_outcome_of_torn, run, segment, pod.metadata.name)
        if wait_for("the torn log to be found", end, 120, 0.5) == "cut":
            return
        run.wait_redundant()
    pytest.fail(f"each torn task of {segment} was replaced before it had started again")


def _outcome_of_torn(run: TopologyRun, segment: str, name: str) -> str | None:
    """It was `cut` once the pod has found its log torn; it is `gone` if the pod was replaced."""
    if name not in {p.metadata.name for p in run.task_pods(segment)}:
        return "gone"
    try:
        text = run.cluster.kubectl("logs", name)
    except KubectlError:  # between two containers
        return None
    return "cut" if "output log ends before damage" in text else None


def _remove_store(run: TopologyRun, seconds: float) -> None:
    """Writes to the checkpoint store fail for so long, at least until the status reports it. The
    directory is renamed, since root ignores permissions."""
    store, removed = f"{run.name}/checkpoints", f"{run.name}/checkpoints-removed"

    def is_reported() -> bool:
        plane = run.observer.status["dataPlane"]
        kinds = {problem["kind"] for problem in plane.get("checkpointProblems", [])}
        fails = "StoreUnavailable" in kinds or "EntriesRefused" in kinds
        return fails or any(task.get("savingFails") for task in plane.get("tasks", []))

    assert not is_reported()
    run.cluster.move(store, removed)
    until = run.observer.now() + seconds
    try:
        wait_for("the failed write in the status", is_reported, 30)
        wait_for(f"{seconds} s without a store", lambda: run.observer.now() > until, seconds + 5)
    finally:
        run.cluster.move(removed, store)


def _delete_state(run: TopologyRun) -> None:
    """Like an expiry rule of a bucket: all that the checkpoints have until now."""
    uid = run.cluster.topology(run.name)["metadata"]["uid"]
    run.cluster.move(f"{run.name}/checkpoints/{uid}/state", f"{run.name}/expired")


def _wait_checkpointed(run: TopologyRun, reason: str) -> None:
    wait_for(
        f"{run.name}: condition Checkpointed, {reason}",
        lambda: run.observer.reason("Checkpointed") == reason,
        60,
        0.25,
    )


@every_cluster_type
class TestNodes:
    topology = "nodes"

    def test_a_lost_node_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        victim = run.task_pods("routes")[0].spec.node_name
        run.cluster.kill_nodes([victim])
        run.observer.add_event("lost", victim)
        run.wait_sinks_advance()
        run.cluster.add_node()
        run.wait_redundant()
        run.verify(reference)

    @pytest.mark.long  # a drain deletes tasks: test_planned_moves.py
    def test_a_deleted_task_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        run.delete_pod(run.task_pods("flown")[0])
        run.wait_sinks_advance()
        run.wait_redundant()
        run.verify(reference)

    @pytest.mark.long  # test_planned_moves.py drains every node
    def test_a_drained_node_loses_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        node = run.task_pods("routes")[0].spec.node_name
        run.cluster.nodes[node].drain()
        # It loses nothing; "lost", since `verify` requires such events before the end of input.
        run.observer.add_event("lost", f"{node} is drained")
        run.wait_sinks_advance()
        run.cluster.uncordon(node)
        run.wait_redundant()
        run.verify(reference)

    @pytest.mark.long  # a node that is cut off comes back in the same way, and has worked meanwhile
    def test_a_thawed_node_changes_no_rows(self, run: TopologyRun, reference: Reference) -> None:
        node = run.task_pods("storms")[0].spec.node_name
        run.cluster.nodes[node].freeze()
        _mark_and_wait(run, 20, f"{node} freezes")
        run.cluster.nodes[node].thaw()
        run.observer.add_event("joined", f"{node} wakes")
        run.wait_sinks_advance()
        run.wait_redundant()
        run.verify(reference)

    def test_a_reconnected_node_changes_no_rows(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        node = run.task_pods("alarms")[0].spec.node_name
        run.cluster.nodes[node].partition_network()  # its tasks go on, and still reach the sinks
        _mark_and_wait(run, 15, f"the network of {node} is partitioned")
        run.cluster.nodes[node].heal_network()
        run.observer.add_event("joined", f"{node} is back")
        run.wait_sinks_advance()
        run.wait_redundant()
        run.verify(reference)

    def test_the_loss_of_three_of_five_nodes_loses_no_rows(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        victims = sorted(run.cluster.nodes)[:3]
        run.cluster.kill_nodes(victims)
        run.observer.add_event("lost", ", ".join(victims))
        for _ in victims:
            run.cluster.add_node()
        run.wait_sinks_advance()
        run.wait_redundant()
        run.verify(reference)


def _mark_and_wait(run: TopologyRun, seconds: float, what: str) -> None:
    until = run.observer.add_event("lost", what) + seconds
    wait_for(f"{seconds} s after {what}", lambda: run.observer.now() > until, seconds + 10)


@every_cluster_type_kubelet_marked_long
class TestEdits:
    topology = "edited"

    def test_an_added_query_restarts_no_task(self, run: TopologyRun, reference: Reference) -> None:
        before = run.container_starts()
        _add_query_and_raise_priority(run.resource["spec"])
        edited = max(run.observer.stable_epochs().values())
        run.cluster.apply(run.resource)
        run.wait_sinks_advance()
        start = wait_for("rows of the added query", lambda: run.written_epochs(ADDED), 60)[0]
        run.wait_sinks_reach(start + 3)
        assert run.container_starts() == before
        priorities = {q["name"]: q["priority"] for q in run.observer.status["queries"]}
        assert priorities["storm-watch"] == 75
        # It has all rows from the epoch after a checkpoint, soon after the edit, not from epoch 0.
        assert start % CHECKPOINT_EPOCHS == 0
        assert edited < start <= edited + 3 * CHECKPOINT_EPOCHS
        run.verify(reference, {ADDED: start})

    def test_removed_queries_stop_only_their_tasks(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        before = run.container_starts()
        removed = _remove_queries(run.resource["spec"], ADDED, "route-report")
        run.cluster.apply(run.resource)
        ended = {n for n in before if f"-{removed}-" in n}
        wait_for(f"{ended} to be deleted", lambda: not ended & run.container_starts().keys(), 90)
        run.wait_sinks_advance()
        assert run.container_starts() == {n: t for n, t in before.items() if n not in ended}
        run.verify(reference)

    @pytest.mark.long  # with an API server alone: test_operator_api.py
    def test_a_resumed_topology_continues_where_it_stopped(
        self, run: TopologyRun, reference: Reference
    ) -> None:
        run.resource["spec"]["suspend"] = True
        run.cluster.apply(run.resource)
        wait_for("no tasks while suspended", lambda: not run.cluster.tasks(run.name), 90)
        run.resource["spec"]["suspend"] = False
        run.cluster.apply(run.resource)
        run.wait_sinks_advance()
        run.verify(reference)


@every_cluster_type_kubelet_marked_long
def test_problems_that_tasks_find_name_their_field(
    cluster: Cluster,
) -> None:
    """Input that does not fit its schema, and SQL that the compiler takes and Spark refuses."""
    document = _misfit()
    _write_rows(cluster, "k")
    with TopologyRun(cluster, document) as run:
        message = partial(run.observer.message, "Valid")
        wait_for("the source's problem", lambda: "spec.sources[0]: " in message(), 60)
        assert "has a field v; the file has k" in message()
        wait_for("the operator's problem", lambda: "spec.operators[0]: " in message(), 60)
        assert run.observer.condition_status("Ready") == "False"

        _write_rows(cluster, "k", "v")
        document["spec"]["operators"][0]["sql"] = "SELECT make_date(k, v, v) AS d FROM rows"
        cluster.apply(document)
        run.wait_live()
        wait_for("Valid", lambda: run.observer.condition_status("Valid") == "True", 10)
        wait_for("rows", lambda: run.written_epochs("days"), 60)


def _misfit() -> dict[str, Any]:
    shared = f"file://{SHARED_MOUNT_PATH}"
    files = {"url": f"{shared}/misfit.json", "format": "json", "rowsPerSecond": 100}
    sink = {"files": {"url": f"{shared}/misfit/output/days", "format": "json"}}
    sql = "SELECT make_date(k, v, v, v) AS d FROM rows"
    spec = {
        "checkpoint": {"store": f"{shared}/misfit/checkpoints", "volume": "rekindle"},
        "sources": [{"name": "rows", "schema": "k INT, v INT", "files": files}],
        "operators": [{"name": "days", "inputs": ["rows"], "sql": sql}],
        "queries": [{"name": "days", "from": "days", "priority": 1, "sink": sink}],
    }
    kind = {"apiVersion": "rekindle.dev/v1alpha1", "kind": "StreamTopology"}
    return {**kind, "metadata": {"name": "misfit"}, "spec": spec}


def _write_rows(cluster: Cluster, *columns: str) -> None:
    row = json.dumps(dict.fromkeys(columns, 1))
    (cluster.shared / "misfit.json").write_text(f"{row}\n" * 3000)
    cluster.upload("misfit.json")


def _add_query_and_raise_priority(spec: dict[str, Any]) -> None:
    spec["queries"][1]["priority"] = 75
    url = spec["queries"][0]["sink"]["files"]["url"].replace("delay-alarms", ADDED)
    sink = {"files": {"url": url, "format": "parquet"}}
    spec["queries"].append({"name": ADDED, "from": "flown", "priority": 5, "sink": sink})


def _remove_queries(spec: dict[str, Any], *names: str) -> str:
    """Remove queries, and the operator that only the last one used; returns the operator's name."""
    operator = next(q["from"] for q in spec["queries"] if q["name"] == names[-1])
    spec["queries"] = [q for q in spec["queries"] if q["name"] not in names]
    spec["operators"] = [o for o in spec["operators"] if o["name"] != operator]
    return str(operator)
