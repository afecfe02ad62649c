"""Failures on the embedded cluster: real control plane, real Spark, real kills.

Every test ends with the same question: did the sinks get, row by row, what a run without failures
would have written? The runs share one cluster; each has a topology of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import flights
from harness.cluster import EmbeddedCluster, wait_for
from harness.run import Run, kill_processes

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900)]

SPEEDUP = 86_400  # a day of flights each second: 366 epochs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("failures"), nodes=5, report=print) as cluster:
        flights.prepare_input(cluster.shared / "input")
        cluster.make_volume("rekindle")
        cluster.install()
        yield cluster


def test_kill_9_of_every_kind_of_process_loses_and_repeats_nothing(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    with Run(cluster, flights.manifest("killed", speedup=SPEEDUP)) as run:
        run.wait_live()
        run.wait_checkpoint()
        for segment in ("flown", "alarms", "routes", "storms"):
            run.kill_pod_processes(run.task_pods(segment)[0])
            run.wait_advanced()
        before = run.incarnations()
        coordinator = run.coordinator_pod()
        run.kill_pod_processes(coordinator)
        run.wait_advanced(epochs=5)
        operator = next(iter(cluster.core.list_namespaced_pod("rekindle-system").items))
        kill_processes(operator.spec.node_name, operator.status.pod_ip, cluster)
        run.wait_advanced(epochs=5)
        assert run.incarnations() == before, "killing coordinator or operator touched tasks"
        assert run.verify(tmp_path) > 0


def test_a_torn_output_log_is_cut_and_written_again(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    with Run(cluster, flights.manifest("torn", speedup=SPEEDUP)) as run:
        run.wait_live()
        run.wait_checkpoint()
        pod = run.task_pods("flown")[0]
        node = cluster.nodes[pod.spec.node_name]
        logs = sorted((node.directory / "data").rglob(f"*{pod.metadata.uid}*/**/*.log"))
        records = [log for log in logs if log.stat().st_size and "stream" in str(log)]
        assert records, f"no output log of {pod.metadata.name} under {node.directory}"
        run.kill_pod_processes(pod)
        os.truncate(records[-1], records[-1].stat().st_size - 7)
        run.wait_advanced(epochs=5)
        assert run.verify(tmp_path) > 0


def test_a_store_that_fails_writes_for_ten_seconds_loses_nothing(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    with Run(cluster, flights.manifest("storeless", speedup=SPEEDUP)) as run:
        run.wait_live()
        run.wait_checkpoint()
        store = cluster.shared / "storeless" / "checkpoints"
        away = store.with_name("checkpoints-away")
        store.rename(away)
        began = run.observer.now()
        try:
            wait_for("ten seconds without a store", lambda: run.observer.now() > began + 10, 15)
        finally:
            away.rename(store)
        epoch = run.checkpoint_epoch()
        run.wait_checkpoint(after=epoch, timeout_s=60)
        run.kill_pod_processes(run.task_pods("routes")[0])
        run.wait_advanced()
        assert run.verify(tmp_path) > 0


def test_loss_of_one_node_then_of_three_of_five_loses_and_repeats_nothing(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    with Run(cluster, flights.manifest("nodes", speedup=SPEEDUP)) as run:
        run.wait_live()
        run.wait_checkpoint()
        victim = run.task_pods("routes")[0].spec.node_name
        cluster.kill_nodes([victim])
        run.observer.mark("lost", victim)
        run.wait_advanced()
        cluster.add_node()
        run.wait_redundant()
        victims = sorted(cluster.nodes)[:3]
        cluster.kill_nodes(victims)
        run.observer.mark("lost", ", ".join(victims))
        for _ in victims:
            cluster.add_node()
        run.wait_advanced(timeout_s=180)
        run.wait_redundant()
        assert run.verify(tmp_path) > 0


def test_a_node_that_wakes_up_as_a_zombie_changes_nothing(
    cluster: EmbeddedCluster, tmp_path: Path
) -> None:
    with Run(cluster, flights.manifest("zombie", speedup=SPEEDUP)) as run:
        run.wait_live()
        run.wait_checkpoint()
        name = run.task_pods("storms")[0].spec.node_name
        node = cluster.nodes[name]
        node.freeze()
        began = run.observer.mark("lost", f"{name} freezes")
        wait_for("20 s of silence", lambda: run.observer.now() > began + 20, 30)
        node.thaw()
        run.observer.mark("joined", f"{name} wakes")
        run.wait_advanced(epochs=5, timeout_s=120)
        run.wait_redundant()
        assert run.verify(tmp_path) > 0


def test_an_edit_touches_only_what_changed(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    document = flights.manifest("edited", speedup=SPEEDUP)
    with Run(cluster, document) as run:
        run.wait_live()
        run.wait_checkpoint()
        before = run.incarnations()
        spec = document["spec"]
        spec["queries"][1]["priority"] = 75
        url = spec["queries"][0]["sink"]["files"]["url"].replace("delay-alarms", "all-flown")
        added = {"name": "all-flown", "from": "flown", "priority": 5}
        spec["queries"].append(added | {"sink": {"files": {"url": url, "format": "parquet"}}})
        cluster.apply(document)
        run.wait_advanced()
        wait_for(
            "rows of the added query",
            lambda: any((cluster.shared / "edited" / "output" / "all-flown").glob("*.parquet")),
            60,
        )
        assert run.incarnations() == before, "adding a query touched tasks"
        assert {q["name"]: q["priority"] for q in run.observer.status["queries"]}[
            spec["queries"][1]["name"]
        ] == 75
        spec["queries"] = [q for q in spec["queries"] if q["name"] != "all-flown"]
        removed = spec["queries"].pop()
        spec["operators"] = [o for o in spec["operators"] if o["name"] != removed["from"]]
        cluster.apply(document)
        wait_for(
            f"the tasks of {removed['from']} to be gone",
            lambda: not run.task_pods(removed["from"]),
            60,
        )
        run.wait_advanced()
        kept = {n: t for n, t in before.items() if f"-{removed['from']}-" not in n}
        assert run.incarnations() == kept, "removing a query touched other tasks"
        assert run.verify(tmp_path) > 0
