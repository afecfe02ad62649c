"""A response from an address proves something only about the node and the pods that have it now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kubelet_parts import START, node, task
from kubernetes import client

from rekindle_operator.cluster.addresses import (
    without_reused_ips,
    without_reused_kubelet_addresses,
)
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.model import PodEndpoint, PodView

ADDRESS = PodEndpoint("10.0.0.7", 10250)
DEAD = node("dead", kubelet=ADDRESS, created_at=START, ready=False)
NEW = node("new", kubelet=ADDRESS, created_at=START + 60)


def test_the_newest_node_has_the_address() -> None:
    other = node("other", kubelet=PodEndpoint("10.0.0.8", 10250), created_at=START)
    assert without_reused_kubelet_addresses([NEW, other, DEAD]) == (
        NEW,
        other,
        replace(DEAD, kubelet=None),
    )


def test_kubelets_on_other_ports_are_others() -> None:
    beside = replace(DEAD, kubelet=PodEndpoint(ADDRESS.host, 10251))
    assert without_reused_kubelet_addresses([beside, NEW]) == (beside, NEW)


def pod(number: int, on: str, ip: str, **changes: Any) -> PodView:
    made = replace(task(number, on), ip=ip, created_at=START + number)
    return replace(made, **changes)


def addresses(*pods: PodView) -> list[str]:
    return [p.ip for p in without_reused_ips(pods)]


def test_the_newest_pod_has_the_address() -> None:
    assert addresses(pod(1, "dead", "10.1.0.3"), pod(2, "new", "10.1.0.3")) == ["", "10.1.0.3"]
    foreign = PodView(
        namespace="x",
        name="x",
        uid="x",
        version=1,
        created_at=START + 9,
        phase="Running",
        node="new",
        requests=ResourceAmounts(),
        ip="10.1.0.3",
    )
    assert addresses(pod(1, "dead", "10.1.0.3"), foreign) == ["", "10.1.0.3"]


def test_pods_in_the_network_of_their_node_share_its_address() -> None:
    assert addresses(pod(1, "a", "10.0.0.7"), pod(2, "a", "10.0.0.7")) == ["10.0.0.7"] * 2


def test_the_address_of_a_pod_that_has_ended_is_free() -> None:
    ended = pod(2, "new", "10.1.0.3", phase="Succeeded")
    assert addresses(pod(1, "a", "10.1.0.3"), ended) == ["10.1.0.3", ""]


def raw_node(name: str, created: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "resourceVersion": "1",
            "creationTimestamp": created,
        },
        "status": {
            "addresses": [{"type": "InternalIP", "address": ADDRESS.host}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": ADDRESS.port}},
        },
    }


def test_a_snapshot_has_each_address_once() -> None:
    cluster = ClusterCache(client.ApiClient(), None, lambda: START)
    cluster.nodes.put(raw_node("dead", "2026-01-01T00:00:00Z"))
    cluster.nodes.put(raw_node("new", "2026-01-01T00:01:00Z"))
    kubelets = {n.name: n.kubelet for n in cluster.snapshot().nodes}
    assert kubelets == {"dead": None, "new": ADDRESS}
