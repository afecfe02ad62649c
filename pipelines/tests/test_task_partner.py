"""Two replicas correct themselves in turn: a task answers what its partner asks, from poll to poll.

The task and its source are real, but for Spark; the rule itself is tested with the cores.
"""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rekindle.checkpoints import Store
from rekindle.engine.model import Chain
from rekindle.engine.passthrough import PassThroughChain
from rekindle.protocol import (
    Endpoint,
    Partner,
    PollRequest,
    PollResponse,
    Postponement,
    PostponementAnswer,
    RestorePoint,
    Upstream,
)
from rekindle.task.config import TaskConfig
from rekindle.task.runtime import TaskRuntime
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle_testing.embedded.process_node.indexes import IndexReservation
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process


def spec(directory: Path) -> dict[str, Any]:
    return {
        "epochInterval": "200ms",
        "maxDelay": "2s",
        "checkpoint": {"store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "numbers",
                "schema": "n BIGINT",
                "generator": {"rowsPerSecond": 10, "columns": {"n": "sequence"}},
            }
        ],
        "operators": [
            {
                "name": "some",
                "inputs": ["numbers"],
                "sql": "SELECT n FROM numbers WHERE n > 0",
                "replicas": 2,
                "keyBy": ["n"],
                "partitions": 2,
            }
        ],
        "queries": [
            {"name": "q", "from": "some", "sink": {"files": {"url": f"file://{directory}/out"}}}
        ],
    }


class Running:
    """A task in a thread, and its polls."""

    def __init__(self, directory: Path, at: int, address: str) -> None:
        topology = compile_topology(load_spec(spec(directory)), "t", skip_cluster_checks=True)
        segment = topology.segments[at]
        config = TaskConfig.from_environment(
            {
                "REKINDLE_TOPOLOGY_FILE": str(directory / "topology.json"),
                "REKINDLE_SEGMENT": segment.id,
                "REKINDLE_PARTITION": "0",
                "REKINDLE_REPLICA": "0",
                "REKINDLE_INCARNATION": "1",
                "REKINDLE_BIND": address,
                "REKINDLE_DATA": str(directory / segment.name),
            }
        )
        self.segment, self.address, self.config = segment, address, config
        self.runtime = TaskRuntime(config)
        self._thread = threading.Thread(target=self.runtime.run, daemon=True)
        self._thread.start()

    def poll(self, **fields: Any) -> PollResponse:
        desired = PollRequest(
            topology="uid-1",
            fence=1,
            generation=1,
            task=self.config.ref,
            restore=RestorePoint(epoch=-1),
            **fields,
        )
        return self.runtime.polls.poll(desired)

    def stop(self) -> None:
        self.runtime.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Running]]:
    def without_spark(engine: Any) -> None:
        chain: Future[Chain] = engine.chain
        chain.set_result(PassThroughChain(pa.schema([("n", pa.int64())])))

    monkeypatch.setattr("rekindle.task.engine.EngineStarter._start", without_spark)
    Store(f"file://{tmp_path}/store")
    origin = dt.datetime.now(dt.UTC).isoformat()
    head = {"name": "t", "uid": "uid-1", "generation": 1, "origin": origin}
    (tmp_path / "topology.json").write_text(json.dumps({**head, "spec": spec(tmp_path)}))
    network = IndexReservation(None)
    made = [Running(tmp_path, at, f"127.{network.index}.0.{at + 1}") for at in (0, 1)]
    yield made[0], made[1]
    for running in reversed(made):
        running.stop()
    network.release()


def test_a_live_task_promises_its_partner_to_serve(tasks: tuple[Running, Running]) -> None:
    source, task = tasks
    stream = task.segment.inputs[0].stream
    endpoint = Endpoint(address=f"{source.address}:8815", replica=0, incarnation=1)
    upstreams = (Upstream(stream=stream, partition=0, endpoints=(endpoint,)),)

    def polled(partner: Partner | None = None) -> PollResponse:
        source.poll()
        return task.poll(upstreams=upstreams, partner=partner)

    eventually(lambda: polled().phase == "Live", 30)
    asking = Partner(replica=1, boot="other", asks=Postponement(number=3, lease_s=10.0))
    promise = PostponementAnswer(boot="other", number=3, promised=True)
    eventually(lambda: polled(asking).answer == promise, 10)
