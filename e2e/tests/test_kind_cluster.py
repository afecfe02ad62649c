"""The commands that a kind cluster gives to `kind` and `docker`, which are scripts here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle_testing.harness.any_cluster import UnsupportedByCluster
from rekindle_testing.harness.cluster_programs import ClusterNotUsable
from rekindle_testing.harness.kind import cluster as kind_cluster
from rekindle_testing.harness.kind.cluster import KindCluster
from rekindle_testing.harness.kind.nodes import KILL_PROCESSES
from rekindle_testing.harness.kind.settings import Settings

IMAGES = ("registry/operator:1", "registry/pipelines:1")
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "kind", "cluster": {"server": "https://127.0.0.1:1"}}],
    "users": [{"name": "kind", "user": {}}],
    "contexts": [{"name": "kind", "context": {"cluster": "kind", "user": "kind"}}],
    "current-context": "kind",
}
_SCRIPT = """#!/bin/bash
echo "{name} $*" >> {log}
case "{name} $*" in
    "kind get clusters") cat {clusters} ;;
    "kind get nodes"*) echo rekindle-e2e-control-plane rekindle-e2e-worker2 rekindle-e2e-worker ;;
    "kind create"*)
        for word; do
            [ "$before" = --kubeconfig ] && cp {kubeconfig} "$word"
            before=$word
        done ;;
    "docker image inspect registry/pipelines:1") exit 1 ;;
esac
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was run since it was asked before; `kubectl` is a script too."""
    programs, log = tmp_path / "programs", tmp_path / "commands"
    programs.mkdir()
    log.touch()
    (tmp_path / "clusters").touch()
    (tmp_path / "kubeconfig").write_text(json.dumps(KUBECONFIG))
    for name in ("docker", "kind", "kubectl"):
        paths = {p: str(tmp_path / p) for p in ("clusters", "kubeconfig")}
        (programs / name).write_text(_SCRIPT.format(name=name, log=log, **paths))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def since() -> list[str]:
        found = log.read_text().splitlines()
        log.write_text("")
        return found

    return since


@pytest.fixture
def cluster(tmp_path: Path, commands: Callable[[], list[str]]) -> Iterator[KindCluster]:
    with KindCluster(tmp_path / "run", Settings(IMAGES), nodes=2) as running:
        commands()
        yield running


def test_a_cluster_is_created_with_given_images(
    tmp_path: Path, commands: Callable[[], list[str]]
) -> None:
    cluster = KindCluster(tmp_path / "run", Settings(IMAGES, "kindest/node:v1.34.0"), nodes=2)
    cluster.start()
    directory = tmp_path / "run"
    assert [c for c in commands() if not c.startswith("kubectl")] == [
        "kind get clusters",
        f"kind create cluster --name rekindle-e2e --config {directory}/kind.json "
        f"--kubeconfig {directory}/kubeconfig --wait 180s --image kindest/node:v1.34.0",
        "docker image inspect registry/operator:1",
        "kind load docker-image registry/operator:1 --name rekindle-e2e",
        "docker image inspect registry/pipelines:1",  # the nodes pull it
        "kind get nodes --name rekindle-e2e",
    ]
    assert sorted(cluster.nodes) == ["rekindle-e2e-worker", "rekindle-e2e-worker2"]
    assert cluster.images == IMAGES
    cluster.stop()
    assert commands() == ["kind delete cluster --name rekindle-e2e"]


def test_images_of_the_checkout_are_loaded_from_their_archives(
    tmp_path: Path, commands: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = {
        name: SimpleNamespace(path=Path(f"/build/{name}.tar"), tag=f"rekindle/{name}:dev")
        for name in ("operator", "pipelines")
    }
    monkeypatch.setattr(kind_cluster, "ensure_image_archives", lambda on_progress: built)
    with KindCluster(tmp_path / "run", Settings()) as cluster:
        assert cluster.images == ("rekindle/operator:dev", "rekindle/pipelines:dev")
    loads = [c for c in commands() if c.startswith("kind load")]
    assert loads == [
        "kind load image-archive /build/operator.tar --name rekindle-e2e",
        "kind load image-archive /build/pipelines.tar --name rekindle-e2e",
    ]


def test_every_node_has_the_shared_directory(cluster: KindCluster) -> None:
    configuration = json.loads((cluster.directory / "kind.json").read_text())
    assert [n["role"] for n in configuration["nodes"]] == ["control-plane", "worker", "worker"]
    mount = {"hostPath": str(cluster.shared), "containerPath": "/mnt/rekindle-shared"}
    assert all(node["extraMounts"] == [mount] for node in configuration["nodes"])
    zones = [node.get("labels") for node in configuration["nodes"]]
    assert zones[1:] == [{"topology.kubernetes.io/zone": f"zone-{z}"} for z in "ab"]


def test_a_cluster_of_a_killed_run_is_deleted_first(
    tmp_path: Path, commands: Callable[[], list[str]]
) -> None:
    (tmp_path / "clusters").write_text("other\nrekindle-e2e\n")
    with KindCluster(tmp_path / "run", Settings(IMAGES)):
        found = [c for c in commands() if c.startswith("kind")]
    assert found[1] == "kind delete cluster --name rekindle-e2e"
    assert found[2].startswith("kind create")


def test_a_second_run_is_refused_and_deletes_nothing(
    tmp_path: Path, cluster: KindCluster, commands: Callable[[], list[str]]
) -> None:
    with pytest.raises(ClusterNotUsable, match="another run uses"):
        KindCluster(tmp_path / "second", Settings(IMAGES)).start()
    assert commands() == []


def test_faults_of_a_node_are_commands_of_docker(
    cluster: KindCluster, commands: Callable[[], list[str]]
) -> None:
    node = cluster.nodes["rekindle-e2e-worker"]
    for fault in (node.freeze, node.thaw, node.partition_network, node.heal_network):
        fault()
    execute = "docker exec rekindle-e2e-worker iptables -t mangle"
    assert commands() == [
        "docker pause rekindle-e2e-worker",
        "docker unpause rekindle-e2e-worker",
        f"{execute} -I PREROUTING 1 -i eth0 -j DROP",
        f"{execute} -I POSTROUTING 1 -o eth0 -j DROP",
        f"{execute} -D PREROUTING -i eth0 -j DROP",
        f"{execute} -D POSTROUTING -o eth0 -j DROP",
    ]
    node.drain()
    cluster.uncordon(node.name)
    assert commands() == [
        "kubectl drain rekindle-e2e-worker --ignore-daemonsets --delete-emptydir-data --force "
        "--timeout=60s",
        "kubectl uncordon rekindle-e2e-worker",
    ]
    cluster.move("t/checkpoints", "t/removed")
    (moved,) = commands()
    shared = "/mnt/rekindle-shared"
    assert moved.endswith(f" mv {shared}/t/checkpoints {shared}/t/removed")
    with pytest.raises(UnsupportedByCluster, match="volume of Docker"):
        node.volume("uid", "data")


def test_killed_nodes_come_back_one_at_a_time(
    cluster: KindCluster, commands: Callable[[], list[str]]
) -> None:
    _answer_as_started(cluster)
    with pytest.raises(UnsupportedByCluster, match="kind cannot add a node"):
        cluster.add_node()
    both = sorted(cluster.nodes)
    cluster.kill_nodes(both)
    assert cluster.nodes == {}
    assert [cluster.add_node() for _ in both] == both
    assert sorted(cluster.nodes) == both
    assert commands() == [f"docker kill {' '.join(both)}", *(f"docker start {n}" for n in both)]


def _answer_as_started(cluster: KindCluster) -> None:
    """A Lease that is newer each time, and Nodes that are Ready."""
    times = iter(range(1000))

    def lease(name: str, namespace: str) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(renew_time=next(times)))

    def node(name: str) -> Any:
        conditions = [SimpleNamespace(type="Ready", status="True")]
        return SimpleNamespace(status=SimpleNamespace(conditions=conditions))

    cluster.coordination = SimpleNamespace(read_namespaced_lease=lease)  # type: ignore[assignment]
    cluster.core_api = SimpleNamespace(read_node=node)  # type: ignore[assignment]


def test_processes_of_a_pod_are_found_by_its_address() -> None:
    """The script that `docker exec` runs in a node, here."""
    address, other = "203.0.113.7", "203.0.113.77"
    pods = [_process("rekindle.task", address), _process("rekindle.task", other)]
    pods.append(_process("pause", address))
    try:
        kill = ["bash", "-c", KILL_PROCESSES, "kill-processes", address]
        assert subprocess.run(kill, check=False).returncode == 0
        assert pods[0].wait(10) == -9
        assert [p.poll() for p in pods[1:]] == [None, None]
        assert subprocess.run(kill, check=False).returncode == 1
    finally:
        for process in pods:
            process.kill()
            process.wait()


def _process(word: str, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "print(flush=True); input()", word]
    process = subprocess.Popen(
        command, env={"POD_IP": address}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "only with NODES=kind"),
        ({"NODES": "kind", "OPERATOR_IMAGE": "operator:1"}, "OPERATOR_IMAGE alone"),
        ({"NODES": "kind", "OPERATOR_IMAGE": "o", "PIPELINES_IMAGE": "p:1"}, "has no tag"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterNotUsable, match=message):
        Settings.of(given)


def test_a_kind_cluster_without_docker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterNotUsable, match="needs docker on PATH"):
        KindCluster(tmp_path / "run", Settings(IMAGES)).start()
