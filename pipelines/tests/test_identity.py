"""Messages for others are refused: another topology, another token, another protocol version."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from coordinator_world import started
from prometheus_client import CollectorRegistry
from reader_parts import read_once
from task_world import make_handler

from rekindle import identity
from rekindle.identity import Identity, Versions, incompatible
from rekindle.protocol import (
    STREAM_PORT,
    Endpoint,
    EntryRef,
    PollRequest,
    PollResponse,
    TaskRef,
)
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import ReadRequest, StreamRefused, StreamUnavailable
from rekindle.task.control import ControlServer
from rekindle.task.poll_handler import PollHandler
from rekindle.topology.model import Slot

ADDRESS = "127.0.47.1"
REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=3)
OWN = Identity("uid-a", "token-a")
SCHEMA = pa.schema([("n", pa.int64())])


@pytest.fixture
def handler() -> PollHandler:
    return make_handler(REF, identity=OWN)


@pytest.fixture
def control(handler: PollHandler) -> Iterator[ControlServer]:
    server = ControlServer(
        ADDRESS,
        0,
        handler,
        alive=lambda: True,
        ready=lambda: True,
        registry=CollectorRegistry(),
        identity=OWN,
    )
    yield server
    server.stop()


def post(control: ControlServer, body: dict[str, object], token: str | None) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{ADDRESS}:{control.port}/v1/poll", json.dumps(body).encode()
    )
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def poll(topology: str = "uid-a", fence: int = 1, **changes: object) -> dict[str, object]:
    message = PollRequest(topology=topology, fence=fence, generation=1, task=REF)
    return {**message.model_dump(mode="json"), **changes}


def test_a_poll_may_name_eight_thousand_replicas(control: ControlServer) -> None:
    """The largest topology has 8,000 tasks. Here 64 partitions of 8 replicas, with the longest
    addresses."""
    address = f"[{':'.join(['fd00'] * 8)}]:{STREAM_PORT}"
    replicas = [
        Endpoint(address=address, replica=n, incarnation=10**6, lagging=True).model_dump()
        for n in range(8)
    ]
    upstreams = [
        {"stream": f"{stream:016x}", "partition": partition, "endpoints": replicas}
        for stream in range(16)
        for partition in range(64)
    ]
    assert post(control, poll(upstreams=upstreams), "token-a")[0] == 200


@pytest.mark.parametrize("token", [None, "", "token-b", "token-\u00e9"])
def test_a_poll_without_the_token_gets_no_details(
    control: ControlServer, token: str | None
) -> None:
    status, text = post(control, poll(fence=10**12), token)
    assert status == 401
    assert "uid-a" not in text
    assert "seg" not in text
    assert post(control, poll(fence=1), "token-a")[0] == 200  # its fence was not accepted


def test_a_poll_of_another_topology_is_refused(
    control: ControlServer, handler: PollHandler
) -> None:
    status, text = post(control, poll("uid-b", fence=9), "token-a")
    assert status == 421
    assert "for topology uid-b, this is topology uid-a" in text
    assert handler._process.core.polls.desired is None
    assert post(control, poll(fence=1), "token-a")[0] == 200


def test_a_response_names_its_topology(control: ControlServer) -> None:
    status, text = post(control, poll(), "token-a")
    assert status == 200
    response = PollResponse.model_validate_json(text)
    assert response.topology == "uid-a"
    assert response.versions() == Versions()


def test_fields_of_a_newer_poll_are_ignored(control: ControlServer) -> None:
    newer = poll(protocol=identity.PROTOCOL + 1, of_tomorrow={"a": 1})
    assert post(control, newer, "token-a")[0] == 200


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({"protocol": 9, "oldest_protocol": 9}, "protocol 9 (understands 9"),
        ({"protocol": 1, "oldest_protocol": 1}, "protocol 1 (understands 1"),
    ],
)
def test_a_poll_of_an_incompatible_version_is_refused(
    control: ControlServer, changes: dict[str, Any], theirs: str
) -> None:
    status, text = post(control, poll(**changes), "token-a")
    assert status == 426
    assert theirs in text
    assert f"speaks {identity.PROTOCOL}" in text


def test_a_poll_of_another_shape_is_refused_by_its_version(control: ControlServer) -> None:
    shapeless: dict[str, object] = {"protocol": 9, "oldest_protocol": 9, "slots": []}
    status, text = post(control, shapeless, "token-a")
    assert status == 426
    assert "it speaks protocol 9" in text
    assert post(control, {"slots": []}, "token-a")[0] == 400


def test_a_poll_without_a_version_has_protocol_1(control: ControlServer) -> None:
    old = {k: v for k, v in poll().items() if k not in ("protocol", "oldest_protocol")}
    status, text = post(control, old, "token-a")
    assert status == 426
    assert "it speaks protocol 1" in text


def test_compatible_versions_work_both_ways() -> None:
    old, new = Versions(2, 2), Versions(3, 2)
    assert incompatible(new, old) is None
    assert incompatible(old, new) is None


def test_incompatible_versions_are_refused_both_ways() -> None:
    old, new = Versions(2, 2), Versions(4, 3)
    for one, other in ((old, new), (new, old)):
        reason = incompatible(one, other) or ""
        assert f"protocol {one.protocol}" in reason
        assert f"speaks {other.protocol}" in reason


def batch(epoch: int) -> EpochBatch:
    rows = pa.table({"n": [epoch]}, schema=SCHEMA)
    return EpochBatch("s", 0, epoch, epoch, rows, digest_table(rows))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StreamServer]:
    log = OutputLog(tmp_path / "log", "s", 0, SCHEMA)
    for epoch in range(3):
        log.append(batch(epoch))
    server = StreamServer(ADDRESS, 0, OWN, incarnation=3)
    server.serve_log(log)
    yield server
    server.stop()


def read(server: StreamServer, reader: Identity, incarnation: int | None = 3) -> list[int]:
    request = ReadRequest("s", 0, 0, 1 << 20, incarnation=incarnation)
    response = read_once(f"{ADDRESS}:{server.port}", request, 10, reader)
    return [b.epoch for b in response.epochs]


def test_a_reader_of_the_topology_is_served(server: StreamServer) -> None:
    assert read(server, OWN) == [0, 1, 2]
    assert read(server, OWN, incarnation=None) == [0, 1, 2]


@pytest.mark.parametrize("token", [None, "", "token-b", "token-\u00e9"])
def test_a_reader_without_the_token_is_refused(server: StreamServer, token: str | None) -> None:
    with pytest.raises(StreamRefused, match="needs the topology's token") as refused:
        read(server, Identity("uid-a", token))
    assert "uid-a" not in str(refused.value)


def test_a_reader_of_another_topology_is_refused(server: StreamServer) -> None:
    with pytest.raises(StreamRefused, match="for topology uid-b, this is topology uid-a"):
        read(server, Identity("uid-b", "token-a"))


def test_a_request_for_another_incarnation_is_refused(server: StreamServer) -> None:
    with pytest.raises(StreamUnavailable, match="for incarnation 4, this is 3") as refused:
        read(server, OWN, incarnation=4)
    assert not isinstance(refused.value, StreamRefused)  # it was replaced: nothing is wrong


def sends(monkeypatch: pytest.MonkeyPatch, message: dict[str, object]) -> None:
    monkeypatch.setattr(ReadRequest, "message", lambda *_: message)


@pytest.mark.parametrize("version", [1, 2, 9])
def test_a_request_of_an_incompatible_version_is_refused(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    message = ReadRequest("s", 0, 0, 1).message(OWN)
    sends(monkeypatch, message | {"protocol": version, "oldest": version, "of_tomorrow": 1})
    with pytest.raises(StreamRefused, match=f"speaks protocol {version} .*this process speaks 3"):
        read(server, OWN)


def test_a_request_of_another_shape_is_refused_by_its_version(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends(monkeypatch, {"protocol": 9, "oldest": 9, "streams": []})
    with pytest.raises(StreamRefused, match="it speaks protocol 9"):
        read(server, OWN)


def test_fields_of_a_newer_request_are_ignored(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = ReadRequest("s", 0, 0, 1).message(OWN)
    sends(monkeypatch, message | {"protocol": identity.STREAM_PROTOCOL + 1, "of_tomorrow": 1})
    assert read(server, OWN) == [0]


def test_a_response_of_another_topology_is_refused(tmp_path: Path) -> None:
    class Careless(StreamServer):
        def _admit(self, sender: object) -> None:
            """Serves all callers."""

    log = OutputLog(tmp_path / "log", "s", 0, SCHEMA)
    log.append(batch(0))
    server = Careless(ADDRESS, 0, Identity("uid-b"))
    server.serve_log(log)
    try:
        with pytest.raises(StreamRefused, match="response is refused: it is for topology uid-b"):
            read(server, Identity("uid-a"))
    finally:
        server.stop()


def test_a_refusal_is_reported_until_the_task_responds() -> None:
    world = started(epochs=2)
    slot = Slot("both", 0, 0)
    reason = "HTTP 426 from 10.0.0.9: poll refused"
    incarnation = world.tasks[slot].incarnation
    world.feed(lambda core, now: core.poll_failed(slot, incarnation, reason, now, refused=True))
    world.tick()
    assert world.reports[-1]["problems"] == [f"both/0/0: {reason}"]
    world.poll_rounds(9)
    assert world.reports[-1]["problems"] == []


def test_a_pod_with_both_tokens_and_one_with_either_accept_each_other() -> None:
    """While the pods of a topology are replaced one by one, after its token was."""
    old, new, both = Identity("u", "old"), Identity("u", "new"), Identity("u", "new", "old")
    for other in (old, new, both):
        assert both.accepts(other.authorization)
        assert other.accepts(both.authorization)
        assert both.accepts_reader(f"Bearer {other.reader_token}")
    assert not new.accepts(old.authorization)
    assert not both.accepts("Bearer stranger stranger")
    assert not both.accepts(f"Bearer {both.reader_token}")


@pytest.mark.parametrize(("previous", "shown"), [("", "a"), ("a", "a"), ("b", "a b")])
def test_the_token_before_is_shown_only_if_it_is_another(previous: str, shown: str) -> None:
    environment = {"REKINDLE_TOKEN": "a", "REKINDLE_PREVIOUS_TOKEN": previous}
    identity = Identity.from_environment("u", environment)
    assert identity.authorization == f"Bearer {shown}"
    assert "a b" not in repr(identity)


def test_saved_entries_are_reported_as_by_other_releases() -> None:
    entry = {"epoch": 9, "object": "entries/x.json", "digest": "d", "bytes": 7}
    answer = PollResponse(task=REF, boot_id="b", fence=1, phase="Live")
    response = answer.model_dump(mode="json") | {"checkpoints": [{**entry, "newer": 1}]}
    read = PollResponse.model_validate_json(json.dumps(response))
    assert read.checkpoints == (EntryRef(9, "entries/x.json", "d", 7),)
    assert json.loads(read.model_dump_json())["checkpoints"] == [entry]
