"""The shortest test of what is installed: both images, and one loss on a small cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cluster_types import flights_cluster, kubelet_nodes, storms_topology

from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.images.build import find_container_engine
from rekindle_testing.images.errors import NoContainerEngine
from rekindle_testing.paths import ROOT

pytestmark = [pytest.mark.smoke, pytest.mark.kubelet, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def container_engine() -> None:
    try:
        find_container_engine(print)
    except NoContainerEngine as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cluster(
    container_engine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    directory = tmp_path_factory.mktemp("smoke")
    with flights_cluster(directory, kubelet_nodes(), nodes=3) as cluster:
        yield cluster


def test_both_images_are_built_and_start(container_engine: None) -> None:
    command = [sys.executable, "-m", "rekindle_testing.images"]
    environment = {**os.environ, "ARCHIVES": "1"}  # image files too: kubelet nodes load them
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr


def test_a_lost_node_loses_no_rows(
    cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with TopologyRun(cluster, storms_topology("smoke")) as run:
        run.wait_live()
        run.wait_checkpoint()
        victim = run.task_pods("storms")[0].spec.node_name
        cluster.kill_nodes([victim])
        run.observer.add_event("lost", victim)
        run.wait_sinks_advance(epochs=10)
        run.wait_redundant()
        reference = Reference(run.resource, cluster.shared, tmp_path_factory.mktemp("oracle"))
        reference.execute()
        run.verify(reference)
