"""The failure tests' harness on a cluster that exists already: here an embedded one, of which it
knows the kubeconfig alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.cluster_programs import ClusterNotUsable
from rekindle_testing.harness.existing_cluster.cluster import ExistingCluster
from rekindle_testing.harness.existing_cluster.leftovers import LEASE
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings
from rekindle_testing.harness.nodes import ProcessNodes
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.run import TopologyRun
from rekindle_testing.waiting import DeadlineError, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.failures,
    pytest.mark.long,
    pytest.mark.timeout(1500),
]

SPEEDUP = 4 * 86_400  # four days of flights each second: 92 epochs
CLASS = "network-share"
_UNSTABLE = ("events", "componentstatuses")  # kinds that change by themselves


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the StorageClass of the cluster provides."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def existing(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """Somebody's cluster, without Rekindle."""
    with EmbeddedCluster(
        tmp_path_factory.mktemp("existing"), nodes=5, on_progress=print
    ) as cluster:
        yield cluster


@pytest.fixture
def share(existing: EmbeddedCluster, volume: Path) -> Iterator[None]:
    """A StorageClass whose claims get `volume`."""
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": "kubernetes.io/no-provisioner",
    }
    path = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": CLASS},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": CLASS,
            "hostPath": {"path": str(volume)},
        },
    }
    existing.apply(storage, path)
    yield
    existing.kubectl("delete", "pv", CLASS)


@pytest.fixture
def environment(existing: EmbeddedCluster) -> dict[str, str]:
    return {
        "NODES": "existing",
        "KUBECONFIG": str(existing.kubeconfig),
        "OPERATOR_IMAGE": ProcessNodes.operator_image,
        "PIPELINES_IMAGE": ProcessNodes.pipelines_image,
        "STORAGE_CLASS": CLASS,
    }


def _all_objects(cluster: EmbeddedCluster) -> set[str]:
    """Kind, namespace and name of everything, and of nodes what the harness may change."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    wanted = ",".join(k for k in kinds if not k.startswith(_UNSTABLE))
    columns = "KIND:.kind,NAMESPACE:.metadata.namespace,NAME:.metadata.name"
    found = cluster.kubectl(
        "get", wanted, "-A", "--no-headers", "-o", f"custom-columns={columns}", timeout_s=120
    )
    nodes = cluster.kubectl(
        "get", "nodes", "--no-headers", "-o", "custom-columns=:.metadata.labels,:.spec"
    )
    return {" ".join(line.split()) for line in (found + nodes).splitlines()}


def _wait_for_nothing_left(cluster: EmbeddedCluster, before: set[str]) -> None:
    """The API server removes the APIService of a CRD some time after it."""
    with contextlib.suppress(DeadlineError):
        wait_for("the objects of before", lambda: _all_objects(cluster) == before, 30, 1)
    now = _all_objects(cluster)
    assert (sorted(now - before), sorted(before - now)) == ([], [])


def test_flights_survive_what_an_api_can_do_and_nothing_is_left(
    existing: EmbeddedCluster,
    share: None,
    volume: Path,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    before = _all_objects(existing)
    with ExistingCluster(
        tmp_path / "run", ExistingClusterSettings.of(environment), print
    ) as cluster:
        cluster.create_claim("rekindle")
        flights.prepare_input(cluster.shared / "input")
        cluster.upload("input")
        cluster.install()
        document = flights.topology_resource("existing", speedup=SPEEDUP)
        reference = Reference(document, cluster.shared, tmp_path / "oracle")
        reference.execute()
        with TopologyRun(cluster, document) as run:
            run.wait_live()
            run.wait_checkpoint()
            run.delete_pod(run.task_pods("storms")[0])
            run.wait_sinks_advance()
            node = run.task_pods("routes")[0].spec.node_name
            cluster.nodes[node].drain()
            # It loses nothing; "lost", since `verify` requires such events before the end of input.
            run.observer.add_event("lost", f"{node} is drained")
            run.wait_sinks_advance()
            cluster.uncordon(node)
            run.wait_redundant()
            run.wait_sinks_reach(reference.last_epoch, timeout_s=600)
            rows = run.verify(reference)
        print(f"{rows} rows compared through epoch {reference.last_epoch}")
    _wait_for_nothing_left(existing, before)
    assert list(volume.iterdir()) == []


_RUN_AND_WAIT = """
import os, sys, time
from pathlib import Path
from rekindle_testing.harness.existing_cluster.cluster import ExistingCluster
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings
cluster = ExistingCluster(Path(sys.argv[1]), ExistingClusterSettings.of(os.environ), lambda _: None)
cluster.start()
cluster.create_claim("rekindle")
cluster.install()
next(iter(cluster.nodes.values())).drain()
print(cluster.namespace, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_has_left_is_removed_by_the_next(
    existing: EmbeddedCluster, share: None, environment: dict[str, str], tmp_path: Path
) -> None:
    before = _all_objects(existing)
    killed = subprocess.Popen(
        [sys.executable, "-c", _RUN_AND_WAIT, str(tmp_path / "killed")],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert killed.stdout is not None
        namespace = killed.stdout.readline().strip()
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
    assert namespace
    assert len(_all_objects(existing) - before) > 10

    with pytest.raises(ClusterNotUsable, match="runs these tests in namespace"):
        ExistingCluster(tmp_path / "early", ExistingClusterSettings.of(environment), print).start()
    long_ago = json.dumps({"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}})
    existing.kubectl("patch", "lease", LEASE, "-n", namespace, "--type=merge", "-p", long_ago)
    with ExistingCluster(tmp_path / "next", ExistingClusterSettings.of(environment), print):
        pass
    _wait_for_nothing_left(existing, before)
