"""The task processes of one topology on this machine, and the coordinator's real core: without a
cluster, for tests and benchmarks of what tasks do with each other.

It stands in for the operator, which starts pods, and for the coordinator's shell, which polls them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rekindle.checkpoints.store import Store
from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import (
    Effect,
    Generation,
    Pod,
    ReadNewestManifest,
    ReportRestorePoint,
    WriteManifest,
)
from rekindle.coordinator.shell.store import CheckpointStore
from rekindle.protocol import PollResponse, TaskPhase
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Slot, Topology
from rekindle_testing.embedded.process_node.indexes import IndexReservation

UID = "uid-1"
_START_S = 2.0


class ReplicaProcess:
    """One pod: its process, its directory, its newest response. `advanced_at`: when a response
    first had each epoch, by this machine's monotonic clock."""

    def __init__(
        self,
        directory: Path,
        slot: Slot,
        incarnation: int,
        address: str,
        environment: Mapping[str, str],
    ) -> None:
        self.slot, self.incarnation, self.address = slot, incarnation, address
        self.home = directory / f"{slot.segment}-{slot.partition}-{slot.replica}-{incarnation}"
        self.home.mkdir()
        self.response: PollResponse | None = None
        self.advanced_at: list[tuple[float, int]] = []
        self.ready = False
        self._environment = {
            **os.environ,
            **environment,
            "REKINDLE_TOPOLOGY_FILE": str(directory / "topology.json"),
            "REKINDLE_SEGMENT": slot.segment,
            "REKINDLE_PARTITION": str(slot.partition),
            "REKINDLE_REPLICA": str(slot.replica),
            "REKINDLE_INCARNATION": str(incarnation),
            "REKINDLE_BIND": address,
            "REKINDLE_DATA": str(self.home / "data"),
        }
        self.output = self.home / "stdout"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as out:
            command = [sys.executable, "-m", "rekindle.task"]
            return subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)

    def crash(self, meanwhile: Callable[[Path], None] = lambda data: None) -> None:
        """Kill the process, and start it again on its disk, as a kubelet does. `meanwhile` is
        called between them with the directory of its data."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        meanwhile(self.home / "data")
        self.process = self._start()

    def start_again_if_ended(self) -> None:
        """As a kubelet does with a container that has ended."""
        if self.process.poll() is not None:
            self.process = self._start()

    def kill(self) -> None:
        """Kill the process, and delete its disk."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        shutil.rmtree(self.home / "data", ignore_errors=True)

    def add_response(self, response: PollResponse) -> None:
        before = self.response.stable_epoch if self.response is not None else -1
        self.response = response
        self.ready |= response.phase.serves
        if response.stable_epoch > before:
            self.advanced_at.append((time.monotonic(), response.stable_epoch))

    @property
    def phase(self) -> TaskPhase | None:
        return self.response.phase if self.response is not None else None

    def longest_pause_s(self, since: float) -> float:
        times = [at for at, _ in self.advanced_at if at >= since]
        gaps = [b - a for a, b in pairwise(times)]
        return max(gaps, default=float("inf"))


class TaskProcesses:
    """All replicas of a topology, and the shell of a coordinator. A `Store` has to be at the
    topology's checkpoint URL, and `directory` has `topology.json`. `origin_s`: when epoch 0
    begins, by this machine's monotonic clock."""

    def __init__(
        self,
        directory: Path,
        topology: Topology,
        network: IndexReservation,
        origin_s: float,
        environment: Mapping[str, str],
        waiting: Collection[str],
    ) -> None:
        """`waiting`: names of segments without pods."""
        self.directory, self.network = directory, network
        self.origin_s = origin_s
        self._environment = environment
        self.replicas: dict[Slot, ReplicaProcess] = {}
        self.restore_points: list[ReportRestorePoint] = []
        self.pods = 0
        self.store = CheckpointStore(UID, 30.0)
        self.store.use(topology.spec.checkpoint.store)
        self.generation = Generation(1, topology, {s.id: s.nodes for s in topology.segments})
        self.fence = 0
        self.start_coordinator()
        for slot in topology.slots():
            if topology.segment(slot.segment).name not in waiting:
                self.start(slot)

    def start_coordinator(self) -> None:
        self.fence += 1
        self.core = Coordinator(self.fence, time.time() - time.monotonic(), UID)
        self.perform(self.core.generation_seen(self.generation, time.monotonic()))
        self.list_pods()

    def edit(self, spec: dict[str, Any]) -> None:
        """A new generation with the same segments, whose pods stay."""
        topology = compile_topology(load_spec(spec), "test", skip_cluster_checks=True)
        before = self.generation
        assert [s.id for s in topology.segments] == [s.id for s in before.topology.segments]
        self.generation = Generation(before.number + 1, topology, before.operator_ids)
        self.perform(self.core.generation_seen(self.generation, time.monotonic()))

    def start(self, slot: Slot) -> ReplicaProcess:
        self.pods += 1
        before = self.replicas.get(slot)
        incarnation = before.incarnation + 1 if before is not None else 1
        address = f"127.{self.network.index}.7.{self.pods}"
        replica = ReplicaProcess(self.directory, slot, incarnation, address, self._environment)
        self.replicas[slot] = replica
        self.list_pods()
        return replica

    def list_pods(self) -> None:
        pods = [
            Pod(f"{s.key}", s, r.incarnation, r.address, may_be_running=True, was_ready=r.ready)
            for s, r in self.replicas.items()
        ]
        self.perform(self.core.pods_listed(pods, time.monotonic()))

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            now = time.monotonic()
            match effect:
                case ReadNewestManifest():
                    newest = asyncio.run(self.store.newest())
                    self.perform(self.core.manifest_read(newest, now, self.store.id))
                case WriteManifest():
                    written = asyncio.run(self.store.write(effect))
                    self.perform(
                        self.core.manifest_race_lost(now)
                        if written is None
                        else self.core.manifest_written(written, now)
                    )
                case ReportRestorePoint():
                    self.restore_points.append(effect)

    def poll_all(self) -> None:
        for slot, replica in self.replicas.items():
            poll = self.core.poll_for(slot)
            if poll is None:
                continue
            url, body = f"http://{replica.address}:8080/v1/poll", poll.model_dump_json().encode()
            try:
                with urllib.request.urlopen(url, body, timeout=2) as stream:
                    response = PollResponse.model_validate_json(stream.read())
            except OSError as error:
                now, incarnation = time.monotonic(), replica.incarnation
                self.perform(self.core.poll_failed(slot, incarnation, str(error), now))
                continue
            replica.add_response(response)
            now = time.monotonic()
            self.perform(self.core.poll_answered(slot, replica.incarnation, response, now))
        self.list_pods()
        self.perform(self.core.woken(time.monotonic()))

    def poll_until(self, condition: Callable[[], bool], within_s: float) -> None:
        """Poll all tasks repeatedly until the condition holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            responses = {r.slot.key: r.response for r in self.replicas.values()}
            logs = [r.output.read_text()[-1500:] for r in self.replicas.values()]
            assert time.monotonic() < deadline, f"{responses} {self.restore_points} {logs}"
            self.poll_all()
            time.sleep(0.05)

    def all_live(self) -> bool:
        return all(r.phase is TaskPhase.LIVE for r in self.replicas.values())

    def committed_epoch(self) -> int:
        """Of the newest manifest that this coordinator has committed; -1: none yet."""
        manifest = self.core.committer.own_manifest
        return manifest.epoch if manifest is not None else -1


@contextmanager
def task_processes(
    directory: Path,
    spec: dict[str, Any],
    environment: Mapping[str, str] | None = None,
    waiting: Collection[str] = (),
) -> Iterator[TaskProcesses]:
    """All replicas of the topology, started; they end with the block. `environment`: of the
    tasks, beside this process's. `waiting`: names of segments that wait for capacity."""
    Store(spec["checkpoint"]["store"])
    topology = compile_topology(load_spec(spec), "test", skip_cluster_checks=True)
    origin = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_START_S)
    origin_s = time.monotonic() + _START_S
    document = {"name": "test", "uid": UID, "generation": 1, "origin": origin.isoformat()}
    (directory / "topology.json").write_text(json.dumps({**document, "spec": spec}))
    network = IndexReservation(None)
    made = TaskProcesses(directory, topology, network, origin_s, environment or {}, waiting)
    try:
        yield made
    finally:
        for replica in made.replicas.values():
            if replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait(10)
        made.store.close()
        network.release()
