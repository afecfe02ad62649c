"""`rekindle tail`: a process that follows two real servers, and its lines."""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pyarrow as pa
import pytest
from test_stream_sinks_server import IDENTITY, Task
from topology_specs import query, source, topology_spec, window

from rekindle import names
from rekindle.cli.kubernetes_api import ApiError, ApiUnavailable, ClusterReader
from rekindle.cli.tail import TOKEN_VARIABLE, QueryPods
from rekindle.cli.tail_lines import LineWriter
from rekindle.errors import BelowFloor, RekindleError
from rekindle.stream_sinks.client import Received, ReplicaUnavailable
from rekindle.stream_sinks.follow import STALL_S, PartitionReader
from rekindle.stream_sinks.ticket import Ticket


def received(kind: str, epoch: int, rows: int = 0) -> Received:
    return Received(kind, epoch, pa.table({"n": list(range(rows))}), f"after {epoch}")


def test_corrections_are_marked() -> None:
    writer = LineWriter(1, as_json=False)
    story = [("STABLE", 1), ("TENTATIVE", 2), ("UNDO", 2), ("STABLE", 2), ("REC_DONE", 2)]
    lines = [line for kind, at in story for line in writer.lines(0, received(kind, at, 1))]
    assert lines == [
        '       1             {"n": 0}',
        '       2  tentative  {"n": 0}',
        "       2  -- undo: drop from epoch 2 on",
        '       2  corrected  {"n": 0}',
        "       2  -- corrected through epoch 2",
    ]


def test_each_line_can_be_json() -> None:
    writer = LineWriter(2, as_json=True)
    (line,) = writer.lines(1, received("STABLE", 4, 1))
    assert json.loads(line) == {"partition": 1, "epoch": 4, "kind": "STABLE", "row": {"n": 0}}


class Replicas:
    """What calls of replicas return, by address."""

    def __init__(self, **answers: list[Received] | Exception) -> None:
        self.answers = answers
        self.calls: list[tuple[str, str]] = []
        self.now = 0.0

    def read(self, address: str, ticket: str) -> Iterator[Received]:
        self.calls.append((address, ticket))
        answer = self.answers[address]
        if isinstance(answer, Exception):
            raise answer
        yield from answer

    def reader(self) -> PartitionReader:
        addresses = list(self.answers)
        return PartitionReader(0, Ticket("q"), lambda _: addresses, self.read, lambda: self.now)


def test_a_reader_goes_on_at_the_next_replica() -> None:
    replicas = Replicas(a=[received("STABLE", 1)], b=[received("STABLE", 2)])
    reader = replicas.reader()
    list(reader.step())
    replicas.answers["a"] = ReplicaUnavailable("gone")
    assert [f.message for f in reader.step()] == ["gone"]
    list(reader.step())
    assert [address for address, _ in replicas.calls] == ["a", "a", "b"]
    assert [ticket for _, ticket in replicas.calls[1:]] == ["after 1"] * 2


def test_a_replica_that_stalls_is_left() -> None:
    replicas = Replicas(a=[received("END", 1)], b=[])
    reader = replicas.reader()
    list(reader.step())
    replicas.now = STALL_S + 1
    list(reader.step())
    list(reader.step())
    assert [address for address, _ in replicas.calls] == ["a", "a", "b"]


def test_only_if_no_replica_has_the_epoch_the_reader_ends() -> None:
    replicas = Replicas(a=BelowFloor("floor 7"), b=BelowFloor("floor 9"))
    reader = replicas.reader()
    assert [f.message for f in reader.step()] == ["floor 7"]
    with pytest.raises(BelowFloor, match="floor 9"):
        list(reader.step())


class FakeCluster:
    """A topology whose query `delays` has a stream sink, and its pods."""

    def __init__(self) -> None:
        stream = query("delays", "hourly", sink={"stream": {}})
        spec = topology_spec(
            [source()], [window("hourly", "s", partitions=2, keyBy=["origin"])], [stream]
        )
        spec["queries"].append(query("files", "hourly"))
        self.document = {"metadata": {"name": "t", "uid": "u"}, "spec": spec}
        self.pods: list[dict[str, Any]] = []
        self.unavailable = False

    def topology(self, name: str) -> dict[str, Any]:
        return self.document

    def task_pods(self, topology: dict[str, Any]) -> list[dict[str, Any]]:
        if self.unavailable:
            raise ApiUnavailable("no response")
        return self.pods

    def add(self, segment: str, partition: int, replica: int, ip: str, **metadata: Any) -> None:
        labels = {
            names.LABEL_SEGMENT: segment,
            names.LABEL_PARTITION: str(partition),
            names.LABEL_REPLICA: str(replica),
        }
        status = {"podIP": ip, "phase": "Running"}
        self.pods.append({"metadata": {"labels": labels, **metadata}, "status": status})


def test_the_pods_of_a_partition_are_found_by_replica() -> None:
    cluster = FakeCluster()
    pods = QueryPods(cast(ClusterReader, cluster), "t", "delays")
    segment = pods.segment.id
    assert pods.segment.partitions == 2
    cluster.add(segment, 1, 1, "10.0.0.3")
    cluster.add(segment, 1, 0, "fd00::1")
    cluster.add(segment, 1, 2, "10.0.0.4", deletionTimestamp="now")
    cluster.add(segment, 0, 0, "10.0.0.1")
    cluster.add("another", 1, 0, "10.0.0.2")
    found = ["[fd00::1]:8816", "10.0.0.3:8816"]
    assert pods.addresses(1) == found
    cluster.unavailable = True
    assert pods.addresses(1) == found
    assert pods.addresses(0) == []


class SecretReader(ClusterReader):
    """A cluster whose API server returns one Secret."""

    secret: ClassVar[dict[str, str]] = {}

    def _get(self, path: str, query: object = ()) -> dict[str, Any]:
        assert "/secrets/" in path
        return {"data": {k: base64.b64encode(v.encode()).decode() for k, v in self.secret.items()}}


@pytest.mark.parametrize("keys", [("token", "reader"), ("token",)])
def test_a_secret_of_before_stream_sinks_is_enough(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    content = {"token": str(IDENTITY.token), "reader": str(IDENTITY.reader_token)}
    monkeypatch.setattr(SecretReader, "secret", {key: content[key] for key in keys})
    cluster = SecretReader(cast(Any, None), "default")
    found = cluster.reader_token({"metadata": {"name": "t", "uid": "u"}})
    assert found == IDENTITY.reader_token


def test_a_secret_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SecretReader, "secret", {"other": "x"})
    cluster = SecretReader(cast(Any, None), "default")
    with pytest.raises(ApiError, match="has no key reader"):
        cluster.reader_token({"metadata": {"name": "t", "uid": "u"}})


@pytest.mark.parametrize(
    ("name", "message"),
    [("files", "has a files sink; only a stream"), ("delay", "no query delay; it has delays")],
)
def test_a_query_that_cannot_be_followed_is_refused(name: str, message: str) -> None:
    with pytest.raises(RekindleError, match=message):
        QueryPods(cast(ClusterReader, FakeCluster()), "t", name)


class Process:
    def __init__(self, *arguments: str) -> None:
        environment = os.environ | {TOKEN_VARIABLE: str(IDENTITY.reader_token)}
        command = [sys.executable, "-m", "rekindle.cli", "tail", "t", "delays", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def take(self, count: int) -> list[str]:
        return [self.lines.get(timeout=60) for _ in range(count)]

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.mark.process
@pytest.mark.timeout(180)
def test_rows_come_once_while_replicas_change(tmp_path: Path) -> None:
    first, second = Task(tmp_path / "a", tentative=True), Task(tmp_path / "b", tentative=True)
    first.append(0)
    second.append(0, 1)
    addresses = [f"127.0.0.1:{task.server.port}" for task in (first, second)]
    flags = [part for address in addresses for part in ("--address", address)]
    tail = Process("--tentative", *flags)
    try:
        assert [line.split()[0] for line in tail.take(3)] == ["0"] * 3
        first.answer(1)
        assert [line.split()[:2] for line in tail.take(2)] == [["1", "tentative"]] * 2
        first.server.stop()
        assert tail.take(1) == ["1  -- undo: drop from epoch 1 on"]
        assert [line.split()[:2] for line in tail.take(3)] == [["1", "corrected"]] * 3
        assert tail.take(1) == ["1  -- corrected through epoch 1"]
        second.append(2)
        assert [line.split()[0] for line in tail.take(3)] == ["2"] * 3
    finally:
        code, errors = tail.stop()
        second.server.stop()
    assert code == 0, errors
    assert f"{addresses[0]} cannot be read" in errors or f"{addresses[0]}: " in errors
