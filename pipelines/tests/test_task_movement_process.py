"""Real task processes, and the coordinator's real core: a lost replica gets its state from its
partner, which goes on.

Two replicas of a segment; one is killed, with its disk, under load. Its successor must start from
the partner's state, not from a checkpoint, and agree with the partner, which must never pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rekindle.checkpoints.store import Store
from rekindle.connectors.compare import read_sink
from rekindle.coordinator.core.state_machine import Coordinator
from rekindle.coordinator.model import (
    Effect,
    Event,
    Generation,
    GenerationSeen,
    ManifestRaceLost,
    ManifestRead,
    ManifestWritten,
    NoteMovement,
    Pod,
    PodsListed,
    PollAnswered,
    PollFailed,
    ReadNewestManifest,
    Ticked,
    WriteManifest,
)
from rekindle.coordinator.shell.store import CheckpointStore
from rekindle.protocol import PollResponse, TaskPhase
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Slot, Topology
from rekindle_testing.embedded.process_node.indexes import Reservation

UID = "uid-1"
PAUSE_S = 4.0
"""More than this between two epochs of the partner is a pause: 8 epochs, on a slow machine."""
WINDOW = {
    "name": "sums",
    "inputs": ["rows"],
    "window": {"size": "8s", "slide": "2s", "groupBy": ["k"], "aggregate": "sum(v) AS total"},
}


def make_spec(directory: Path, with_window: bool) -> dict[str, Any]:
    return {
        "epochInterval": "500ms",
        "replicas": 2,
        "checkpoint": {"interval": "5s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "rows",
                "schema": "k BIGINT, v BIGINT, t TIMESTAMP",
                "eventTime": {"column": "t"},
                "generator": {
                    "rowsPerSecond": 2000,
                    "columns": {"k": "integer(1, 500)", "v": "sequence", "t": "timestamp"},
                },
            }
        ],
        "operators": [WINDOW] if with_window else [],
        "queries": [
            {
                "name": "totals",
                "from": "sums" if with_window else "rows",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            }
        ],
    }


class Replica:
    """One pod: its process, its directory, its newest response."""

    def __init__(self, directory: Path, slot: Slot, incarnation: int, address: str) -> None:
        self.slot, self.incarnation, self.address = slot, incarnation, address
        self.home = directory / f"{slot.segment}-{slot.partition}-{slot.replica}-{incarnation}"
        self.home.mkdir()
        self.answer: PollResponse | None = None
        self.advanced_at: list[tuple[float, int]] = []
        self.ready = False
        env = {
            **os.environ,
            "REKINDLE_TOPOLOGY_FILE": str(directory / "topology.json"),
            "REKINDLE_SEGMENT": slot.segment,
            "REKINDLE_PARTITION": str(slot.partition),
            "REKINDLE_REPLICA": str(slot.replica),
            "REKINDLE_INCARNATION": str(incarnation),
            "REKINDLE_BIND": address,
            "REKINDLE_DATA": str(self.home / "data"),
        }
        self.output = self.home / "stdout"
        with self.output.open("ab") as out:
            command = [sys.executable, "-m", "rekindle.task"]
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def kill(self) -> None:
        """With its disk."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        shutil.rmtree(self.home / "data", ignore_errors=True)

    def answered(self, answer: PollResponse) -> None:
        before = self.answer.stable_epoch if self.answer is not None else -1
        self.answer = answer
        self.ready |= answer.phase.serves
        if answer.stable_epoch > before:
            self.advanced_at.append((time.monotonic(), answer.stable_epoch))

    @property
    def phase(self) -> TaskPhase | None:
        return self.answer.phase if self.answer is not None else None

    def longest_pause_s(self, since: float) -> float:
        times = [at for at, _ in self.advanced_at if at >= since]
        gaps = [b - a for a, b in pairwise(times)]
        return max(gaps, default=float("inf"))


class Cluster:
    """Replicas, and the shell of a coordinator."""

    def __init__(self, directory: Path, topology: Topology, network: Reservation) -> None:
        self.directory, self.network = directory, network
        self.replicas: dict[Slot, Replica] = {}
        self.notes: list[NoteMovement] = []
        self.pods = 0
        self.store = CheckpointStore(UID, 30.0)
        self.store.use(topology.spec.checkpoint.store)
        self.generation = Generation(1, topology, {s.id: s.nodes for s in topology.segments})
        self.fence = 0
        self.start_coordinator()
        for slot in topology.slots():
            self.start(slot)

    def start_coordinator(self) -> None:
        self.fence += 1
        self.core = Coordinator(self.fence, time.time() - time.monotonic(), UID)
        self.feed(GenerationSeen(self.generation))
        self.list_pods()

    def start(self, slot: Slot) -> Replica:
        self.pods += 1
        before = self.replicas.get(slot)
        incarnation = before.incarnation + 1 if before is not None else 1
        address = f"127.{self.network.index}.7.{self.pods}"
        self.replicas[slot] = Replica(self.directory, slot, incarnation, address)
        self.list_pods()
        return self.replicas[slot]

    def list_pods(self) -> None:
        pods = (
            Pod(f"{s.key}", s, r.incarnation, r.address, may_be_running=True, was_ready=r.ready)
            for s, r in self.replicas.items()
        )
        self.feed(PodsListed(tuple(pods)))

    def feed(self, event: Event) -> None:
        for effect in self.core.step(event, time.monotonic()):
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case ReadNewestManifest():
                self.feed(ManifestRead(asyncio.run(self.store.newest()), self.store.id))
            case WriteManifest(manifest):
                written = asyncio.run(self.store.write(effect))
                lost = ManifestRaceLost(manifest.seq)
                self.feed(lost if written is None else ManifestWritten(written))
            case NoteMovement():
                self.notes.append(effect)

    def round(self) -> None:
        for slot, replica in self.replicas.items():
            poll = self.core.poll_for(slot)
            if poll is None:
                continue
            url, body = f"http://{replica.address}:8080/v1/poll", poll.model_dump_json().encode()
            try:
                with urllib.request.urlopen(url, body, timeout=2) as response:
                    answer = PollResponse.model_validate_json(response.read())
            except OSError as error:
                self.feed(PollFailed(slot, replica.incarnation, str(error)))
                continue
            replica.answered(answer)
            self.feed(PollAnswered(slot, replica.incarnation, answer))
        self.list_pods()
        self.feed(Ticked())

    def until(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            answers = {r.slot.key: r.answer for r in self.replicas.values()}
            logs = [r.output.read_text()[-1500:] for r in self.replicas.values()]
            assert time.monotonic() < deadline, f"{answers} {self.notes} {logs}"
            self.round()
            time.sleep(0.05)

    def all_live(self) -> bool:
        return all(r.phase is TaskPhase.LIVE for r in self.replicas.values())

    def committed(self) -> int:
        manifest = self.core.committer.own_manifest
        return manifest.epoch if manifest is not None else -1


@contextlib.contextmanager
def running_cluster(tmp_path: Path, spec: dict[str, Any]) -> Iterator[Cluster]:
    """The tasks of a topology, and their coordinator."""
    Store(spec["checkpoint"]["store"])
    topology = compile_topology(load_spec(spec), "test", skip_cluster_checks=True)
    origin = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2)
    document = {"name": "test", "uid": UID, "generation": 1, "origin": origin.isoformat()}
    (tmp_path / "topology.json").write_text(json.dumps({**document, "spec": spec}))
    network = Reservation(None)
    made = Cluster(tmp_path, topology, network)
    yield made
    for replica in made.replicas.values():
        if replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait(10)
    made.store.close()
    network.release()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running_cluster(tmp_path, make_spec(tmp_path, request.param)) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(False, id="source", marks=pytest.mark.process),
        pytest.param(True, id="window", marks=pytest.mark.spark),
    ],
    indirect=True,
)
def test_a_lost_replica_gets_its_state_from_a_partner_that_goes_on(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.all_live() and cluster.committed() > 0, 300)
    lost, partner = cluster.replicas.values()
    lost.kill()
    lost_at = time.monotonic()
    successor = cluster.start(lost.slot)
    cluster.until(cluster.all_live, 300)
    assert successor.answer is not None
    report = successor.answer.movement
    assert report is not None
    assert report.moved_through is not None, (cluster.notes, successor.answer)
    assert successor.answer.restored_from == report.moved_through
    assert "moving" in [note.phase for note in cluster.notes]
    assert "restoring" not in [n.phase for n in cluster.notes if n.incarnation == 2]

    # Both compute the same from now on, and checkpoints are committed again.
    committed = cluster.committed()
    cluster.until(lambda: cluster.committed() > committed + 20, 120)
    assert not cluster.core.containment.comparison.disputes
    assert not cluster.core.containment.comparison.diverged
    pause_s = partner.longest_pause_s(lost_at)
    print(f"longest time between two epochs of the partner: {pause_s:.2f} s")
    assert pause_s < PAUSE_S
    cluster.until(lambda: not holds(cluster), 60)

    # What the sink has is what one replica would have written: each row once.
    assert all(s.conflict is None for r in cluster.replicas.values() for s in sinks_of(r))
    rows = read_sink(f"file://{cluster.directory}/out", "parquet")
    assert rows.num_rows > 0
    if "v" in rows.schema.names:
        assert sorted(rows["v"].to_pylist()) == list(range(rows.num_rows))
    else:
        windows = zip(rows["k"].to_pylist(), rows["window_end"].to_pylist(), strict=True)
        assert len(set(windows)) == rows.num_rows


def holds(cluster: Cluster) -> bool:
    reports = [r.answer.movement for r in cluster.replicas.values() if r.answer is not None]
    return any(report.holds or report.donates for report in reports if report is not None)


def sinks_of(replica: Replica) -> Any:
    assert replica.answer is not None
    return replica.answer.sinks
