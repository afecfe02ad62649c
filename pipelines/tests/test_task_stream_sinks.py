"""Which stream sinks a task serves, as polls assign them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.flight as flight
import pytest
from log_parts import batch, open_log
from test_stream_sinks_server import IDENTITY, call, summary

from rekindle.protocol import STREAM_SINK_PORT, SinkAssignment
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.task.stream_sinks import StreamSinks
from rekindle.topology.spec import SinkSpec


@dataclass(frozen=True)
class Task:
    log: OutputLog
    sinks: StreamSinks
    address: str

    def assign(self, **options: object) -> None:
        sink = SinkSpec.model_validate({"stream": options})
        self.sinks.assign(
            through=None, sinks=[SinkAssignment(query="delays", from_epoch=0, sink=sink)]
        )
        assert self.sinks.problem is None

    def connect(self) -> Any:
        return flight.connect(f"grpc://{self.address}:{STREAM_SINK_PORT}")


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Task]:
    random = Random(str(tmp_path))
    address = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])
    log = open_log(tmp_path / "log")
    output = LiveOutput(log, tmp_path / "tentative", "boot")
    made = Task(log, StreamSinks(log, output, address, IDENTITY), address)
    yield made
    made.sinks.stop()


def test_what_is_offered_changes_while_readers_go_on(task: Task) -> None:
    task.assign()
    task.log.append(batch(0))
    client = task.connect()
    found = call(client, {"query": "delays"})
    task.assign(tentative=True, retain="1Mi")
    task.log.append(batch(1))
    assert summary(call(client, found[-1][0]["next"]))[0] == ("STABLE", 1, 3)
    assert summary(call(client, {"query": "delays", "tentative": True}))[0] == ("STABLE", 0, 3)
    task.assign()
    with pytest.raises(flight.FlightServerError, match="tentative: true"):
        call(client, {"query": "delays", "tentative": True})


def test_a_reader_that_waits_goes_on_after_an_edit(task: Task) -> None:
    task.assign()
    task.log.append(batch(0))
    client = task.connect()
    ticket = call(client, {"query": "delays"})[-1][0]["next"]

    def edit_and_append() -> None:
        task.assign(retain="1Mi")
        task.log.append(batch(1))

    timer = threading.Timer(0.3, edit_and_append)
    timer.start()
    assert summary(call(client, ticket))[-1][0] == "END"
    timer.join()


def test_an_edit_changes_how_much_is_kept(task: Task) -> None:
    task.assign(retain="8Mi")
    for epoch in range(60):
        task.log.append(batch(epoch, 2000))
    task.log.truncate(58)
    assert task.log.base == 0
    task.assign(retain="1Mi")
    task.log.truncate(58)
    assert task.log.base > 0
