"""Claims as users have them: other owners, fsGroup, a server that is slow or does not respond."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_types import flights_cluster, kubelet_nodes, storms_topology

from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.fuse_volume import FuseVolume
from rekindle_testing.harness.nodes import POD_USER, NodeResources
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.kubelet, pytest.mark.timeout(600)]

HANGS_S = 25.0
SLOW_BYTES_PER_S = 100_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volumes")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[FuseVolume]:
    """Serves the directory that all pods share. It is mounted before the nodes start, which see no
    later mounts."""
    with FuseVolume(directory / "shared", directory / "behind", directory / "logs") as volume:
        yield volume


@pytest.fixture(scope="module")
def slow(directory: Path) -> Iterator[FuseVolume]:
    with FuseVolume(
        directory / "slow",
        directory / "behind-slow",
        directory / "logs-slow",
        write_bytes_per_s=SLOW_BYTES_PER_S,
    ) as volume:
        volume.directory.chmod(0o777)
        yield volume


@pytest.fixture(scope="module")
def cluster(directory: Path, server: FuseVolume, slow: FuseVolume) -> Iterator[EmbeddedCluster]:
    resources = NodeResources(cpu="2", memory="8Gi")
    with flights_cluster(directory, kubelet_nodes(), nodes=2, resources=resources) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def reference(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    found = Reference(
        storms_topology("reference"), cluster.shared, tmp_path_factory.mktemp("oracle")
    )
    found.execute()
    return found


def test_a_claim_that_pods_may_not_write_is_explained(
    cluster: EmbeddedCluster, directory: Path
) -> None:
    volume = _root_owned(cluster, directory / "root-owned")
    cluster.create_claim("root-owned", volume)
    with TopologyRun(cluster, storms_topology("root-owned", claim="root-owned")) as run:
        wait_for("the reason in the status", lambda: _mentions(run, "Permission denied"), 90, 0.5)
        assert not run.observer.all_live()
        assert _mentions(run, str(POD_USER))


def test_an_fs_group_makes_a_claim_writable(cluster: EmbeddedCluster, directory: Path) -> None:
    volume = _root_owned(cluster, directory / "grouped")
    cluster.create_claim("grouped", volume, local=True)
    document = storms_topology("grouped", claim="grouped")
    document["spec"]["podTemplate"] = {"spec": {"securityContext": {"fsGroup": POD_USER}}}
    with TopologyRun(cluster, document) as run:
        run.wait_live()
        run.wait_checkpoint()


def test_a_volume_that_does_not_respond_loses_no_rows(
    cluster: EmbeddedCluster, server: FuseVolume, reference: Reference
) -> None:
    with TopologyRun(cluster, storms_topology("hanging")) as run:
        run.wait_live()
        run.wait_checkpoint()
        before = run.container_starts()
        until = run.observer.add_event("lost", "the volume") + HANGS_S
        server.hang()
        try:
            wait_for("the sink's reason", lambda: _mentions(run, "does not respond"), 60)
            checkpointed = functools.partial(run.observer.message, "Checkpointed")
            wait_for("the store's reason", lambda: "does not respond" in checkpointed(), 60)
            wait_for("a while", lambda: run.observer.now() > until, HANGS_S + 5)
        finally:
            server.resume()
        run.wait_sinks_advance(timeout_s=120)
        assert run.container_starts() == before
        wait_for("no more problem", lambda: not _mentions(run, "does not respond"), 30)
        run.verify(reference)


def test_a_topology_goes_on_with_a_slow_volume(cluster: EmbeddedCluster, slow: FuseVolume) -> None:
    flights.prepare_input(slow.backing_directory / "input")
    cluster.create_claim("slow", slow.directory)
    with TopologyRun(cluster, storms_topology("slow", claim="slow")) as run:
        run.wait_live()
        run.wait_checkpoint()
        run.wait_sinks_advance(epochs=20, timeout_s=120)


def _root_owned(cluster: EmbeddedCluster, directory: Path) -> Path:
    """A directory of root's with the input, which others may only read."""
    directory.mkdir(mode=0o755)
    flights.prepare_input(directory / "input")
    return directory


def _mentions(run: TopologyRun, text: str) -> bool:
    return text in json.dumps(run.observer.status)
