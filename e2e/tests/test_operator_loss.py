"""All replicas of the operator die together, and their Node objects stay."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_types import cluster_of_type, every_cluster_type

from rekindle_testing.embedded.components import ComponentSettings
from rekindle_testing.fixtures.api_fields import name_of, required
from rekindle_testing.harness.any_cluster import OPERATOR_LEASE, Cluster
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.waiting import DeadlineError, wait_for

pytestmark = [every_cluster_type, pytest.mark.failures, pytest.mark.timeout(600)]

# As Kubernetes' default: until then the scheduler considers dead nodes Ready, and nothing but the
# operator's own watch replaces its replicas.
NODE_GRACE_S = 50


@pytest.fixture(scope="module")
def cluster(cluster_type: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    slow = ComponentSettings(node_monitor_grace_period_s=NODE_GRACE_S)
    with cluster_of_type(cluster_type, request, Cluster.install, slow) as cluster:
        yield cluster


def test_uninstalling_leaves_nothing_and_installing_again_works(cluster: Cluster) -> None:
    # Before the test that kills nodes: pods of a dead node would stay for minutes.
    cluster.leading_operator_pod()
    assert _lease(cluster).metadata.owner_references
    cluster.uninstall()

    with contextlib.suppress(DeadlineError):
        wait_for("the operator's deletion", lambda: not _installed(cluster), 90, 0.25)
    assert _installed(cluster) == []
    if isinstance(cluster, EmbeddedCluster):  # another one may have more in a namespace
        wait_for("all else to be deleted", lambda: not _objects(cluster), 60, 0.5)
    cluster.install()
    cluster.leading_operator_pod()


def test_the_operator_restarts_when_all_its_replicas_die(cluster: Cluster) -> None:
    cluster.leading_operator_pod()
    before = {p.metadata.uid: p.spec.node_name for p in cluster.operator_pods()}
    victims = sorted(set(before.values()))
    assert len(victims) == 3, "replicas are spread over nodes"
    renewed = _lease(cluster).spec.renew_time
    began = time.monotonic()
    cluster.kill_nodes(victims)

    def leads_again() -> bool:
        lease = _lease(cluster)
        holder = lease.spec.holder_identity
        living = {p.metadata.name for p in cluster.operator_pods() if p.metadata.uid not in before}
        return holder in living and lease.spec.renew_time > renewed

    wait_for("another replica that leads", leads_again, 90, 0.25)
    took_s = time.monotonic() - began
    print(f"the operator was back after {took_s:.1f} s")
    assert took_s < NODE_GRACE_S, cluster.describe_system()
    objects = {name_of(node) for node in cluster.core_api.list_node().items}
    assert objects >= set(victims), "objects of dead nodes must stay"
    lost = {uid for uid, node in before.items() if node in victims}
    wait_for(
        "all lost replicas to be replaced",
        lambda: not lost & {p.metadata.uid for p in cluster.operator_pods()},
        60,
        0.25,
    )


def _objects(cluster: EmbeddedCluster) -> list[str]:
    """All but those that every namespace has."""
    kinds = (
        *("pods", "deployments", "daemonsets", "services", "secrets", "configmaps", "leases"),
        *("serviceaccounts", "roles", "rolebindings", "poddisruptionbudgets"),
    )
    found = []
    for namespace in (cluster.namespace, cluster.operator_namespace):
        names = cluster.kubectl("get", ",".join(kinds), "-n", namespace, "-o", "name").split()
        found += [n for n in names if n not in _OF_EVERY_NAMESPACE]
    of_cluster = "clusterroles,clusterrolebindings,priorityclasses"
    names = cluster.kubectl("get", of_cluster, "-o", "name").split()
    return found + [n for n in names if "rekindle" in n]


_OF_EVERY_NAMESPACE = {
    "configmap/kube-root-ca.crt",
    "service/kubernetes",
    "serviceaccount/default",
}


def _installed(cluster: Cluster) -> list[str]:
    """The operator's pods, as name, node and deletion, and its Leases."""
    pods = cluster.operator_pods()
    leases = cluster.coordination.list_namespaced_lease(cluster.operator_namespace).items
    return [
        *(f"{p.metadata.name} {p.spec.node_name} {p.metadata.deletion_timestamp}" for p in pods),
        *(f"{name_of(lease)} of {required(lease.spec).holder_identity}" for lease in leases),
    ]


def _lease(cluster: Cluster) -> Any:
    return cluster.coordination.read_namespaced_lease(OPERATOR_LEASE, cluster.operator_namespace)
