"""What only real kubelets show: Kubernetes' own patience, limits, evictions, pulls and upgrades.

The other failures of nodes and processes are in test_failures.py, for every kind of node; what an
uninstalled chart leaves is in test_operator_loss.py.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_types import storms_topology

from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.embedded.kubelet_node.node import KubeletNode
from rekindle_testing.fixtures.api_fields import required
from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import NAMESPACE, EmbeddedCluster, pod_processes
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.kubelet, pytest.mark.timeout(900)]

SPEEDUP = 21_600  # a quarter of a day of flights each second: 24 minutes of input
_FILLS_MEMORY = """
import os, time
for _ in range(200):
    if os.fork() == 0:
        held = bytearray(24 << 20)
        time.sleep(30)
        os._exit(0)
    time.sleep(0.05)
"""
GAP_S = 3.0
"""Of a replicated query's output while replicas are rolled; an epoch is a second."""
EVICTED = ("Failed", "Evicted")
"""Phase and reason."""
EVICTED_WITHIN_S = 240
"""A kubelet measures volumes every 10 seconds, and longer apart on a busy machine."""
BACK_WITHIN_S = 40.0
"""After a node is lost. A kubelet's lease lasts as long: Kubernetes has not noticed anything."""


@pytest.fixture(scope="module")
def cluster(kubelet_cluster: EmbeddedCluster) -> EmbeddedCluster:
    kubelet_cluster.restore()
    return kubelet_cluster


@pytest.fixture(scope="module")
def reference(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    found = Reference(
        flights.topology_resource("reference", speedup=SPEEDUP),
        cluster.shared,
        tmp_path_factory.mktemp("oracle"),
    )
    found.execute()
    return found


@pytest.fixture(scope="module")
def shared_run(cluster: EmbeddedCluster, reference: Reference) -> Iterator[TopologyRun]:
    """The reference comes first: beside a topology it would have to wait for the cores."""
    document = flights.topology_resource("flights", speedup=SPEEDUP)
    requests = {"cpu": "500m", "memory": "1Gi"}
    document["spec"]["resources"] = {"requests": requests, "limits": {"memory": "1Gi"}}
    with TopologyRun(cluster, document) as run:
        run.wait_live()
        run.wait_checkpoint()
        yield run


@pytest.fixture
def run(shared_run: TopologyRun, failed: Callable[[], bool]) -> Iterator[TopologyRun]:
    shared_run.wait_live()
    shared_run.wait_redundant()
    yield shared_run
    if failed():
        shared_run.keep_evidence()


def test_the_sinks_equal_the_reference(run: TopologyRun, reference: Reference) -> None:
    run.wait_sinks_advance()
    assert run.verify(reference)


def test_a_topology_is_back_before_kubernetes_notices_a_loss(
    cluster: EmbeddedCluster, run: TopologyRun, reference: Reference
) -> None:
    victim = run.task_pods("routes")[0].spec.node_name
    cluster.apply(_deployment(cluster.node_kind.pipelines_image, victim))
    wait_for("the plain pod", lambda: _plain_pod(run).status.phase == "Running", 60)
    before = {p.metadata.name for p in cluster.tasks(run.name)}
    began = run.observer.add_event("lost", victim)
    cluster.kill_nodes([victim])
    wait_for(
        "a replacement",
        lambda: {p.metadata.name for p in cluster.tasks(run.name)} - before,
        BACK_WITHIN_S,
    )
    replaced_s = run.observer.now() - began
    run.wait_sinks_advance()
    back_s = run.observer.now() - began
    plain = _plain_pod(run)
    conditions = required(cluster.core_api.read_node(victim).status).conditions
    ready = {c.type: c.status for c in required(conditions)}
    print(f"replaced after {replaced_s:.1f} s, all queries back after {back_s:.1f} s")
    assert back_s < BACK_WITHIN_S
    # Meanwhile, to Kubernetes nothing has happened.
    assert ready["Ready"] == "True"
    assert (plain.spec.node_name, plain.status.phase) == (victim, "Running")
    cluster.kubectl("delete", "deployment", "plain")
    cluster.delete_lost_nodes()
    cluster.add_node()
    run.wait_redundant()
    run.verify(reference)


def test_a_task_that_is_killed_for_its_memory_loses_no_rows(
    cluster: EmbeddedCluster, run: TopologyRun, reference: Reference
) -> None:
    pod = run.task_pods("routes")[0]
    before = _jvms(cluster, pod)
    assert before
    run.observer.add_event("lost", f"memory of {pod.metadata.name}")
    # Many small processes: the kernel kills the largest one, which is the task's JVM.
    _exec(run, pod, "python", "-c", _FILLS_MEMORY)
    wait_for("the JVM to be killed", lambda: not before & _jvms(cluster, pod), 60)
    run.wait_sinks_advance(timeout_s=120)
    run.verify(reference)


def test_a_task_that_fills_its_disk_is_evicted_and_loses_no_rows(
    run: TopologyRun, reference: Reference
) -> None:
    pod = run.task_pods("storms")[0].metadata.name
    # Not the Event of the eviction: a kubelet drops Events beyond 25 of an object.
    with contextlib.closing(run.cluster.watch_pod(pod, EVICTED_WITHIN_S)) as changes:
        next(changes)  # the operator deletes the evicted pod: the watch has to begin before
        run.observer.add_event("lost", f"disk of {pod}")
        fill = ("fallocate", "-l", "4G", "/var/lib/rekindle-task/filler")
        run.cluster.kubectl("exec", pod, "--", *fill)
        seen = []
        for changed in changes:
            seen.append((changed.status.phase, changed.status.reason))
            if seen[-1] == EVICTED:
                break
    assert EVICTED in seen
    wait_for("another pod", lambda: pod not in run.container_starts(), 60)
    run.wait_sinks_advance(timeout_s=120)
    run.wait_redundant()
    run.verify(reference)


def test_an_image_that_cannot_be_pulled_stops_no_task(
    cluster: EmbeddedCluster, run: TopologyRun, reference: Reference
) -> None:
    before = run.container_starts()
    run.resource["spec"]["image"] = "rekindle/pipelines:absent"
    run.cluster.apply(run.resource)
    pod = run.task_pods("storms")[0]
    run.observer.add_event("lost", pod.metadata.name)
    run.cluster.core_api.delete_namespaced_pod(pod.metadata.name, NAMESPACE)

    def is_explained() -> bool:
        queries = run.observer.status.get("queries", [])
        return any("ImagePull" in str(query.get("waitingFor")) for query in queries)

    wait_for("the reason in the status", is_explained, 90, 0.25)
    now = run.container_starts()
    assert {n: t for n, t in before.items() if n != pod.metadata.name}.items() <= now.items()
    del run.resource["spec"]["image"]
    run.resource["spec"]["image"] = cluster.node_kind.pipelines_image
    run.cluster.apply(run.resource)
    run.wait_sinks_advance(timeout_s=120)
    run.wait_redundant()
    run.verify(reference)


def test_an_upgraded_image_leaves_no_gap(
    cluster: EmbeddedCluster, shared_run: TopologyRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Beside the flights topology, whose tasks keep their image."""
    document = storms_topology("rolled")
    document["spec"]["sources"][0]["replicas"] = 2
    others, image = shared_run.container_starts(), _next(cluster.node_kind.pipelines_image)
    _tag(cluster, cluster.node_kind.pipelines_image, image)
    reference = Reference(document, cluster.shared, tmp_path_factory.mktemp("rolled"))
    reference.execute()
    with TopologyRun(cluster, document) as run:
        run.wait_live()
        run.wait_redundant()
        run.wait_sinks_advance(epochs=5)
        began = run.observer.now()
        run.resource["spec"]["image"] = image
        run.resource["metadata"]["annotations"] = {"rekindle.dev/roll": "true"}
        cluster.apply(run.resource)

        def is_rolled() -> bool:
            pods = cluster.tasks(run.name)
            return {p.spec.containers[0].image for p in pods} == {image} and run.observer.all_live()

        wait_for("all tasks to have the new image", is_rolled, 240, 1.0)
        run.wait_sinks_advance(epochs=3)
        seconds = run.observer.now() - began
        gap_s = run.longest_pause_s("storm-watch", seconds)
        print(f"rolled in {seconds:.0f} s; longest gap of the replicated query {gap_s:.2f} s")
        run.verify(reference)
    assert gap_s < GAP_S
    assert shared_run.container_starts() == others


def test_an_upgraded_chart_restarts_no_task(
    cluster: EmbeddedCluster, run: TopologyRun, reference: Reference, tmp_path: Path
) -> None:
    image = _next(cluster.node_kind.operator_image)
    _tag(cluster, cluster.node_kind.operator_image, image)
    before = run.container_starts()
    run.cluster.upgrade(_newer_chart(tmp_path), image)
    wait_for("replicas of the new operator alone", lambda: _operator_images(run) == {image}, 60)
    run.wait_sinks_advance(epochs=5)
    assert run.container_starts() == before
    assert "NEWER" in run.cluster.kubectl("get", "topo", run.name)
    run.verify(reference)


def _newer_chart(directory: Path) -> Path:
    """The chart, with a column more in its CRD."""
    chart = directory / "rekindle"
    shutil.copytree(ROOT / "charts" / "rekindle", chart)
    (file,) = (chart / "crds").glob("*.yaml")
    crd = yaml.safe_load(file.read_text())
    column = {"name": "Newer", "type": "string", "jsonPath": ".status.phase"}
    crd["spec"]["versions"][0]["additionalPrinterColumns"].append(column)
    file.write_text(yaml.safe_dump(crd))
    return chart


def _operator_images(run: TopologyRun) -> set[str]:
    return {p.spec.containers[0].image for p in run.cluster.operator_pods()}


def _exec(run: TopologyRun, pod: Any, *command: str) -> None:
    """The program may be killed."""
    with contextlib.suppress(KubectlError):
        run.cluster.kubectl("exec", pod.metadata.name, "--", *command)


def _jvms(cluster: EmbeddedCluster, pod: Any) -> set[int]:
    """Ids of the JVMs in a pod."""
    node = cluster.nodes[pod.spec.node_name]
    found = pod_processes(node, pod.status.pod_ip, program=b"java")
    return set(found)


def _next(image: str) -> str:
    return image.rpartition(":")[0] + ":next"


def _tag(cluster: EmbeddedCluster, image: str, tag: str) -> None:
    for node in cluster.nodes.values():
        assert isinstance(node, KubeletNode)
        node.tag_image(image, tag)


def _deployment(image: str, node: str) -> dict[str, Any]:
    """Of one pod, which the scheduler puts on that node as long as it is there."""
    prefer = {
        "weight": 100,
        "preference": {
            "matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
            ]
        },
    }
    container = {
        "name": "sleep",
        "image": image,
        "args": ["sleep", "3600"],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [prefer]}},
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "plain", "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": {"app": "plain"}},
            "template": {"metadata": {"labels": {"app": "plain"}}, "spec": spec},
        },
    }


def _plain_pod(run: TopologyRun) -> Any:
    pods = wait_for("the pod of the Deployment", lambda: run.cluster.pods("app=plain"), 30)
    return pods[0]
