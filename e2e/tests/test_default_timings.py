"""A lost node with Kubernetes' own timings: a topology is back while Kubernetes still waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from node_kinds import flights_cluster, kubelet_nodes

from rekindle_testing.embedded.components import Settings
from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import NAMESPACE, EmbeddedCluster
from rekindle_testing.harness.nodes import NodeShape
from rekindle_testing.harness.run import Run
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.kubelet, pytest.mark.failures, pytest.mark.timeout(900)]

# What kube-controller-manager and the kubelet have if nobody sets it.
DEFAULTS = Settings(node_monitor_grace_period_s=50, node_monitor_period_s=5)
LEASE_S = 40
BACK_WITHIN_S = 40.0
"""Before Kubernetes has noticed anything."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    kind = kubelet_nodes(lease_duration_s=LEASE_S)
    directory, shape = tmp_path_factory.mktemp("defaults"), NodeShape(cpu="2", memory="8Gi")
    with flights_cluster(directory, kind, nodes=5, shape=shape, settings=DEFAULTS) as cluster:
        yield cluster


def test_a_topology_is_back_before_kubernetes_notices_the_loss(cluster: EmbeddedCluster) -> None:
    with Run(cluster, flights.manifest("defaults", speedup=43_200)) as run:
        run.wait_live()
        run.wait_checkpoint()
        victim = run.task_pods("routes")[0].spec.node_name
        assert victim is not None
        cluster.apply(_deployment(cluster.kind.pipelines_image, victim))
        wait_for("the plain pod", lambda: _plain(cluster)[0].status.phase == "Running", 60)
        before = {p.metadata.name for p in cluster.tasks(run.name)}
        began = run.observer.mark("lost", victim)
        cluster.kill_nodes([victim])
        wait_for(
            "a replacement",
            lambda: {p.metadata.name for p in cluster.tasks(run.name)} - before,
            BACK_WITHIN_S,
        )
        replaced_s = run.observer.now() - began
        run.wait_advanced()
        back_s = run.observer.now() - began
        (plain,) = _plain(cluster)
        ready = {c.type: c.status for c in cluster.core.read_node(victim).status.conditions}
        print(f"replaced after {replaced_s:.1f} s, all queries back after {back_s:.1f} s")
        assert back_s < BACK_WITHIN_S
        # Meanwhile, to Kubernetes nothing has happened.
        assert ready["Ready"] == "True"
        assert (plain.spec.node_name, plain.status.phase) == (victim, "Running")


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


def _plain(cluster: EmbeddedCluster) -> list[Any]:
    return wait_for("the pod of the Deployment", lambda: cluster.pods("app=plain"), 30)
