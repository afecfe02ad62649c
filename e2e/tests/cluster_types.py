"""The types of clusters that failure tests run on; real kubelets where the machine can have them,
and a cluster that exists already where the user asks for it by NODES."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.embedded.components import ComponentSettings
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.packages import ensure_host_prerequisites
from rekindle_testing.harness import flights
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.existing_cluster.cluster import ExistingCluster
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings
from rekindle_testing.harness.nodes import KubeletNodes, NodeKind, ProcessNodes

# What kube-controller-manager and the kubelet have if nobody sets it.
DEFAULT_TIMINGS = ComponentSettings(node_monitor_grace_period_s=50, node_monitor_period_s=5)
LEASE_S = 40


def _cluster_types(*of_kubelets: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """A cluster that is not embedded is there only if the user asks for it."""
    types = [
        pytest.param("process", marks=pytest.mark.cluster),
        pytest.param("kubelet", marks=[pytest.mark.kubelet, *of_kubelets]),
    ]
    if os.environ.get("NODES") == "existing":
        types.append(pytest.param("existing", marks=pytest.mark.external))
    return pytest.mark.parametrize("cluster_type", types, scope="module")


every_cluster_type = _cluster_types()
every_cluster_type_kubelet_marked_long = _cluster_types(pytest.mark.long)
"""Not in `make e2e`, but in `make failures NODES=kubelet`."""


def make_cluster(
    cluster_type: str,
    directory: Path,
    *,
    nodes: int,
    settings: ComponentSettings | None = None,
) -> Cluster:
    """Of any type but kubelets, which all tests share. `nodes` and `settings`: of a cluster that is
    made. An existing one has its own."""
    if cluster_type == "existing":
        return ExistingCluster(directory, ExistingClusterSettings.of(os.environ), print)
    return EmbeddedCluster(
        directory, nodes=nodes, node_kind=ProcessNodes(), settings=settings, on_progress=print
    )


@contextlib.contextmanager
def cluster_of_type(
    cluster_type: str,
    request: pytest.FixtureRequest,
    prepare: Callable[[Cluster], None],
    settings: ComponentSettings | None = None,
) -> Iterator[Cluster]:
    """The cluster that all tests on kubelets share, or a new one of another type."""
    if cluster_type == "kubelet":
        yield request.getfixturevalue("kubelet_cluster")
        return
    directory = request.getfixturevalue("tmp_path_factory").mktemp(cluster_type)
    with make_cluster(cluster_type, directory, nodes=5, settings=settings) as cluster:
        prepare(cluster)
        yield cluster


def kubelet_nodes(lease_duration_s: int = 8) -> KubeletNodes:
    """Skips the test, with the reason, where there can be none."""
    try:
        ensure_host_prerequisites(print)
    except KubeletNodesUnsupported as error:
        pytest.skip(str(error))
    return KubeletNodes(lease_duration_s)


@contextlib.contextmanager
def flights_cluster(directory: Path, kind: NodeKind, **options: Any) -> Iterator[EmbeddedCluster]:
    """With Rekindle, the claim `rekindle` and the input of the flights example."""
    with EmbeddedCluster(directory, node_kind=kind, on_progress=print, **options) as cluster:
        prepare_flights(cluster)
        yield cluster


def prepare_flights(cluster: Cluster) -> None:
    """Rekindle, the claim `rekindle` and the input of the flights example."""
    flights.prepare_input(cluster.shared / "input")
    cluster.create_claim("rekindle")
    cluster.upload("input")
    cluster.install()


def storms_topology(name: str, claim: str = "rekindle") -> dict[str, Any]:
    """The flights example with its smallest query alone, of two replicas."""
    document = flights.topology_resource(name, speedup=86_400)
    spec = document["spec"]
    spec["checkpoint"]["volume"] = claim
    spec["sources"] = [s for s in spec["sources"] if s["name"] == "weather"]
    spec["operators"] = [o for o in spec["operators"] if o["name"] == "storms"]
    spec["queries"] = [q for q in spec["queries"] if q["from"] == "storms"]
    spec["operators"][0]["replicas"] = 2
    return document
