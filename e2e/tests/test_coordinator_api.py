"""The coordinator's process against a real API server, with simulated tasks behind real sockets.

The rights are those that the operator gives it; the status has to pass the real CRD. All tests use
the same topology, and each begins with a working coordinator.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import yaml

from rekindle import names
from rekindle.checkpoints import ManifestStore, Store
from rekindle.coordinator.checkpoints.retention import oldest
from rekindle.protocol import Endpoint, PollRequest
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Slot, partition_of
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.resources.access import coordinator_access
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.process_node.indexes import IndexReservation
from rekindle_testing.fixtures.fleet import Fleet
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.api

T = TypeVar("T")
EXAMPLE = ROOT / "examples/flights/topology.yaml"


class Cluster:
    """One topology in a namespace of its own: objects that the operator would make,
    simulated tasks, and as many coordinator processes as tests want; `incarnation`: of the newest
    one."""

    def __init__(self, api: ControlPlane, directory: Path) -> None:
        self.api, self.directory = api, directory
        self.namespace = "coordinator"
        self._network = IndexReservation(None)
        self.net = f"{self._network.index}.0"  # all addresses begin with 127.<net>
        api.kubectl("create", "namespace", self.namespace)
        resource = yaml.safe_load(EXAMPLE.read_text())
        resource["spec"]["epochInterval"] = "200ms"
        resource["spec"]["checkpoint"]["interval"] = "1s"
        resource["spec"]["checkpoint"]["store"] = f"file://{directory / 'store'}"
        self.resource = resource
        self.uid = str(self.create(resource)["metadata"]["uid"])
        name, spec = load_topology(resource)
        self.name = name
        self.manifests = ManifestStore(Store(f"file://{directory / 'store'}"), self.uid)
        topology = compile_topology(spec, name, skip_cluster_checks=True)
        self.fleet = Fleet(topology, self.net, directory / "store", self.uid)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.incarnation = 0

    def create(self, document: dict[str, Any]) -> dict[str, Any]:
        done = self.api.kubectl(
            "create", "-n", self.namespace, "-o", "json", "-f", "-", stdin=json.dumps(document)
        )
        found: dict[str, Any] = json.loads(done)
        return found

    def get(self, kind: str, name: str) -> dict[str, Any]:
        done = self.api.kubectl(
            *("get", kind, name, "-n", self.namespace, "-o", "json", "--show-managed-fields")
        )
        found: dict[str, Any] = json.loads(done)
        return found

    def prepare(self) -> None:
        """Create what the operator makes for a topology: generation record, access, pods."""
        topology = {
            "name": self.name,
            "uid": self.uid,
            "generation": 1,
            "origin": "2026-01-01T00:00:00Z",
            "spec": self.resource["spec"],
        }
        self.create(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": f"{self.name}-g1",
                    "labels": {
                        names.LABEL_TOPOLOGY: self.name,
                        names.LABEL_GENERATION: "1",
                    },
                },
                "data": {"topology.json": json.dumps(topology)},
            }
        )
        view = TopologyView(
            self.namespace,
            self.name,
            self.uid,
            version=1,
            generation=1,
            creation_timestamp="2026-01-01T00:00:00Z",
            deleting=False,
            spec={},
            status={},
        )
        for document in coordinator_access(view):
            self.create(document)
        self.create_pods(self.fleet.tasks)

    def pod_name(self, slot: Slot) -> str:
        incarnation = self.fleet.tasks[slot].incarnation
        return f"{self.name}-{slot.segment}-{slot.partition}-{slot.replica}-{incarnation}"

    def create_pods(self, slots: Iterable[Slot]) -> None:
        """Pods that run, at the addresses of the simulated tasks."""
        pods = [self._pod(slot) for slot in slots]
        every = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
        self.api.kubectl("create", "-n", self.namespace, "-f", "-", stdin=every)
        apply = ("apply", "--server-side", "--subresource=status", "-n", self.namespace, "-f", "-")
        self.api.kubectl(*apply, stdin=every)

    def _pod(self, slot: Slot) -> dict[str, Any]:
        labels = {
            "topology": self.name,
            "role": "task",
            "segment": slot.segment,
            "partition": str(slot.partition),
            "replica": str(slot.replica),
            "incarnation": str(self.fleet.tasks[slot].incarnation),
        }
        owner = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
        }
        address = self.fleet.addresses[slot]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.pod_name(slot),
                "labels": {f"{names.OWN_PREFIX}{k}": v for k, v in labels.items()},
                "ownerReferences": [owner],
            },
            "spec": {"containers": [{"name": "task", "image": "none"}]},
            "status": {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }

    def start_newer_coordinator(self, by: int = 1) -> subprocess.Popen[bytes]:
        self.incarnation += by
        return self.start_coordinator(self.incarnation)

    def start_coordinator(self, incarnation: int) -> subprocess.Popen[bytes]:
        user = f"system:serviceaccount:{self.namespace}:{self.name}-coordinator"
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.api.user_kubeconfig(user)),
            "REKINDLE_TOPOLOGY": self.name,
            "REKINDLE_NAMESPACE": self.namespace,
            "REKINDLE_TOPOLOGY_UID": self.uid,
            "REKINDLE_INCARNATION": str(incarnation),
            "REKINDLE_BIND": f"127.{self.net}.{200 + incarnation}",
        }
        with (self.directory / f"coordinator-{incarnation}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rekindle.coordinator"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)
        return process

    def data_plane(self) -> dict[str, Any]:
        status = self.get("topo", self.name).get("status") or {}
        found: dict[str, Any] = status.get("dataPlane") or {}
        return found

    def row(self, slot: Slot) -> dict[str, Any]:
        rows = self.data_plane().get("tasks", [])
        return next((r for r in rows if r["slot"] == slot.key), {})

    def restore_epoch(self, slot: Slot) -> int:
        """Of the oldest entry that the newest manifest keeps for the partition."""
        manifest = self.manifests.newest()
        return oldest(manifest.entries[partition_of(slot).key]).epoch if manifest else -1

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.api.kubectl("delete", "namespace", self.namespace, "--wait=false")
        self._network.release()


@pytest.fixture(scope="module")
def shared(api_server: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(api_server, tmp_path_factory.mktemp("coordinator"))
    try:
        with made.fleet:
            made.prepare()
            yield made
    finally:
        made.close()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """With a coordinator that writes the status, all tasks Live."""
    if not shared.processes or shared.processes[-1].poll() is not None:
        shared.start_newer_coordinator()
        eventually(lambda: shared.data_plane().get("fence") == shared.incarnation)
    eventually(lambda: {t.phase for t in shared.fleet.tasks.values()} == {"Live"})
    # All tasks are threads here: on a busy machine they may have been silent together for a while.
    eventually(lambda: not shared.data_plane()["problems"])
    return shared


def last_poll(cluster: Cluster, slot: Slot) -> PollRequest:
    poll = cluster.fleet.tasks[slot].last_poll
    assert poll is not None
    return poll


def test_the_status_passes_the_crd_and_names_every_task(cluster: Cluster) -> None:
    eventually(lambda: cluster.data_plane().get("checkpoint", {}).get("epoch", -1) >= 9)
    status = cluster.data_plane()
    slots = {s.key for s in cluster.fleet.tasks}
    assert {t["slot"] for t in status["tasks"]} == slots
    assert {t["phase"] for t in status["tasks"]} == {"Live"}
    assert not any(t["suspected"] for t in status["tasks"])
    known = (status["fence"], status["generation"], status["problems"])
    assert known == (cluster.incarnation, 1, [])
    assert {q["name"] for q in status["queries"]} == {"delay-alarms", "storm-watch", "route-report"}
    assert status["headEpoch"] >= 9
    lease = cluster.get("lease", f"{cluster.name}-coordinator")
    assert lease["spec"]["holderIdentity"] == str(cluster.incarnation)
    managed = cluster.get("topo", cluster.name)["metadata"]["managedFields"]
    of_status = {m["manager"] for m in managed if m.get("subresource") == "status"}
    assert of_status == {names.COORDINATOR_FIELD_MANAGER}


def test_a_coordinator_needs_little_memory(cluster: Cluster) -> None:
    eventually(lambda: cluster.data_plane().get("checkpoint", {}).get("epoch", -1) >= 9)
    process = psutil.Process(cluster.processes[-1].pid)
    cpu_before, began = sum(process.cpu_times()[:2]), time.monotonic()
    polls_before = sum(cluster.fleet.polls(s) for s in cluster.fleet.tasks)
    enough = polls_before + 12 * len(cluster.fleet.tasks)
    eventually(lambda: sum(cluster.fleet.polls(s) for s in cluster.fleet.tasks) >= enough)
    elapsed = time.monotonic() - began
    cpu = (sum(process.cpu_times()[:2]) - cpu_before) / elapsed
    polls = (sum(cluster.fleet.polls(s) for s in cluster.fleet.tasks) - polls_before) / elapsed
    memory = process.memory_full_info()
    print(
        f"coordinator: rss {memory.rss / 2**20:.0f} MiB, uss {memory.uss / 2**20:.0f} MiB, "
        f"cpu {100 * cpu:.1f} % of a core at {polls:.0f} polls/s"
    )
    assert memory.rss < 140 * 2**20


def test_a_frozen_task_is_suspected_within_two_seconds(cluster: Cluster) -> None:
    slot = next(s for s in cluster.fleet.tasks if s.replica == 1)
    stream = cluster.fleet.topology.segment(slot.segment).stream
    eventually(lambda: cluster.row(slot).get("phase") == "Live")
    cluster.fleet.tasks[slot].frozen = True
    frozen = time.time()
    row = eventually(lambda: (r := cluster.row(slot)).get("suspected") and r)
    seen_s = time.time() - frozen
    suspected_s = datetime.fromisoformat(row["suspectedSince"]).timestamp() - frozen
    print(f"suspected after {suspected_s:.2f} s, in the status read after {seen_s:.2f} s")
    assert suspected_s < 2.0
    others = [s for s in cluster.fleet.tasks if s != slot]
    assert all(time.monotonic() - cluster.fleet.polled_at[s] < 1.0 for s in others)

    def all_know() -> bool:
        """The status may be written before each reader is polled again."""
        return all(
            [e.suspected for e in upstream.endpoints] == [False, True]
            for other in others
            for upstream in last_poll(cluster, other).upstreams
            if (upstream.stream, upstream.partition) == (stream, slot.partition)
        )

    eventually(all_know)
    cluster.fleet.tasks[slot].frozen = False
    eventually(lambda: cluster.row(slot).get("suspected") is False)


def all_are_routed(cluster: Cluster) -> bool:
    """Whether every task has routes to every replica of its inputs."""
    topology = cluster.fleet.topology
    replicas = Counter((topology.segment(s.segment).stream, s.partition) for s in topology.slots())
    return all(
        len(upstream.endpoints) == replicas[upstream.stream, upstream.partition]
        for slot in cluster.fleet.tasks
        for upstream in last_poll(cluster, slot).upstreams
    )


def routes(poll: PollRequest) -> list[tuple[str, int, list[Endpoint]]]:
    """Without the order of preference, which the lag of the moment decides."""
    return [
        (u.stream, u.partition, sorted(u.endpoints, key=lambda e: e.replica))
        for u in poll.upstreams
    ]


def test_kill_9_of_the_coordinator_does_not_affect_tasks(cluster: Cluster) -> None:
    eventually(lambda: cluster.data_plane().get("checkpoint", {}).get("epoch", -1) >= 14)
    # Simulated tasks advance with the clock, whether or not they have been told their routes.
    eventually(lambda: all_are_routed(cluster))
    cluster.processes[-1].kill()
    cluster.processes[-1].wait()
    tasks = cluster.fleet.tasks
    before = {s: last_poll(cluster, s) for s in tasks}
    started = {s: (t.incarnation, t.boot, t.restored_from) for s, t in tasks.items()}
    polls_before = {s: cluster.fleet.polls(s) for s in tasks}
    epoch = cluster.data_plane()["checkpoint"]["epoch"]
    cluster.start_newer_coordinator()
    eventually(lambda: cluster.data_plane().get("fence") == cluster.incarnation)
    eventually(lambda: cluster.data_plane().get("checkpoint", {}).get("epoch", -1) > epoch)
    assert {s: (t.incarnation, t.boot, t.restored_from) for s, t in tasks.items()} == started
    for slot, task in tasks.items():
        for poll in task.polls[polls_before[slot] :]:
            if not poll.ask_only:
                assert poll.restore is None
                assert poll.sinks == before[slot].sinks
                assert routes(poll) == routes(before[slot])

    def has_floor(slot: Slot, least: int) -> bool:
        return (last_poll(cluster, slot).floor or 0) >= least

    for slot in tasks:  # a floor may be set later, but is never removed
        least = before[slot].floor or 0
        eventually(partial(has_floor, slot, least))
    lease = cluster.get("lease", f"{cluster.name}-coordinator")
    assert lease["spec"]["holderIdentity"] == str(cluster.incarnation)


def test_a_coordinator_that_was_replaced_ends_with_code_3(cluster: Cluster) -> None:
    replaced = cluster.processes[-1]
    newest = cluster.start_newer_coordinator(by=3)
    eventually(lambda: cluster.data_plane().get("fence") == cluster.incarnation)
    assert replaced.wait(10) == 3
    late = cluster.start_coordinator(cluster.incarnation - 1)
    assert late.wait(20) == 3
    cluster.processes.remove(late)
    assert cluster.data_plane()["fence"] == cluster.incarnation
    assert newest.poll() is None


def test_sigterm_ends_the_coordinator_cleanly(cluster: Cluster) -> None:
    cluster.processes[-1].terminate()
    assert cluster.processes[-1].wait(5) == 128 + signal.SIGTERM


def test_a_new_pod_gets_its_restore_point_from_the_newest_manifest(cluster: Cluster) -> None:
    slot = next(s for s in cluster.fleet.tasks if s.replica == 1)
    # The empty state is kept for as long as a partition that lags may need what follows it.
    eventually(lambda: cluster.restore_epoch(slot) >= 0)
    before = cluster.restore_epoch(slot)
    pod = cluster.pod_name(slot)
    cluster.fleet.stop(slot)
    cluster.api.kubectl("delete", "pod", "-n", cluster.namespace, "--force", pod)
    cluster.fleet.start([slot])
    cluster.create_pods([slot])
    eventually(lambda: cluster.fleet.tasks[slot].phase == "Live")
    restored = cluster.fleet.tasks[slot].restored_from
    assert restored is not None
    assert before <= restored <= cluster.restore_epoch(slot)
    assert eventually(lambda: cluster.row(slot).get("incarnation") == 2)


def test_tasks_are_polled_without_the_api_server(cluster: Cluster) -> None:
    slot = next(iter(cluster.fleet.tasks))
    before = cluster.fleet.polls(slot)
    epoch = last_committed(cluster)
    cluster.api.pause_api_server()
    try:
        eventually(lambda: cluster.fleet.polls(slot) - before > 12)
        # Checkpoints need no API server either.
        eventually(lambda: last_committed(cluster) > epoch)
    finally:
        cluster.api.resume_api_server()
    renewed = lease_time(cluster)
    eventually(lambda: lease_time(cluster) > renewed)
    assert cluster.processes[-1].poll() is None


def last_committed(cluster: Cluster) -> int:
    polls = (t.last_poll for t in cluster.fleet.tasks.values())
    return max((p.committed.epoch for p in polls if p and p.committed), default=-1)


def lease_time(cluster: Cluster) -> str:
    return str(cluster.get("lease", f"{cluster.name}-coordinator")["spec"].get("renewTime", ""))
