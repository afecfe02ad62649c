"""What strangers, which are not tasks of the topology, cost a server of streams: their
connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edge_parts import (
    ADDRESS,
    IDENTITY,
    ask,
    batch,
    closed_within,
    make_log,
    read,
)

from rekindle.errors import RekindleError
from rekindle.streams import connections, http_server
from rekindle.streams.client import StreamClient
from rekindle.streams.connections import Connections
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import PATH, ReadRequest, StreamUnavailable
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return make_log(tmp_path)


@pytest.fixture
def server(log: OutputLog) -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0, IDENTITY, incarnation=1)
    server.serve_log(log)
    yield server
    server.stop()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: os.urandom(5000),
    "a header without an end": lambda: b"POST / HTTP/1.1\r\nA: " + b"x" * 1_000_000,
    "headers without an end": lambda: b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 100_000,
    "a long path": lambda: b"GET /" + b"x" * 1_000_000,
    "a huge body": lambda: (
        b"POST /v3/epochs HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
        + b"x" * 500_000
    ),
    "a wrong token": lambda: (
        b"POST /v3/epochs HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer b\r\n"
        b"Content-Length: 2\r\n\r\n{}"
    ),
    "another method": lambda: b"GET /v3/epochs HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "HTTP/2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_stranger_loses_its_connection(
    what: str, log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(connections, "HANDSHAKE_S", 1.0)
    log.append(batch(0))
    stranger = socket.create_connection((ADDRESS, server.port))
    with contextlib.suppress(ConnectionError):
        stranger.sendall(HOSTILE[what]())
    assert read(server, ReadRequest("s", 0, 0, 1)) == [0]
    assert closed_within(stranger, 5)
    stranger.close()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_refusals_of_strangers_contain_no_details(server: StreamServer) -> None:
    stranger = socket.create_connection((ADDRESS, server.port))
    stranger.sendall(HOSTILE["a wrong token"]())
    answer = b""
    while chunk := stranger.recv(4096):
        answer += chunk
    stranger.close()
    assert b"401" in answer
    assert b"uid-a" not in answer


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"a":' * 9000, b'{"protocol":"x","oldest":3}', b"\xff"]
)
def test_a_body_that_is_no_request_is_refused(server: StreamServer, body: bytes) -> None:
    with socket.create_connection((ADDRESS, server.port)) as connected:
        head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-a\r\n"
        connected.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connected.recv(4096).startswith((b"HTTP/1.1 400", b"HTTP/1.1 426"))


@pytest.mark.parametrize(
    "change",
    [
        {"from_epoch": -5},
        {"from_epoch": 1 << 80},
        {"from_epoch": "x"},
        {"max_bytes": -1},
        {"max_bytes": 1 << 80},
        {"wait_s": float("nan")},
        {"wait_s": -1},
        {"partition": []},
        {"stream": {"a": 1}},
        {"incarnation": "1"},
        {"share": {"key_by": ["n"], "partitions": 1 << 40, "index": 0}},
        {"share": {"key_by": ["n"], "partitions": 2, "index": 2}},
        {"share": {"key_by": ["n"], "partitions": 0, "index": 0}},
        {"share": {"key_by": ["absent"], "partitions": 2, "index": 0}},
        {"share": 7},
    ],
)
def test_an_odd_request_is_answered(
    log: OutputLog, server: StreamServer, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(batch(0))
    message = ReadRequest("s", 0, 0, 1, incarnation=1).message(IDENTITY) | change
    with monkeypatch.context() as patched:
        patched.setattr(ReadRequest, "message", lambda *_: message)
        with contextlib.suppress(RekindleError):
            assert read(server, ReadRequest("s", 0, 0, 1)) in ([0], [])
    assert read(server, ReadRequest("s", 0, 0, 1)) == [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partition": float("inf")}, "not a valid request: OverflowError"),
        (
            {"share": {"key_by": ["absent"], "partitions": 2, "index": 0}},
            "stream s has no columns 'absent' to share by",
        ),
    ],
)
def test_a_wrong_request_is_refused_without_a_stack_trace(
    log: OutputLog, server: StreamServer, change: dict[str, object], words: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    log.append(batch(0))
    message = ReadRequest("s", 0, 0, 1, incarnation=1).message(IDENTITY) | change
    monkeypatch.setattr(ReadRequest, "message", lambda *_: message)
    with pytest.raises(StreamUnavailable, match=words):
        read(server, ReadRequest("s", 0, 0, 1))
    assert not caplog.records


def test_a_request_that_trickles_ends_at_the_deadline(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 1.0)
    stranger = socket.create_connection((ADDRESS, server.port))
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        for byte in b"POST /v3/epochs HTTP/1.1\r\nHost: a\r\n" * 5:
            stranger.sendall(bytes([byte]))
            if closed_within(stranger, 0.1):
                break
    assert time.monotonic() - began < 5
    stranger.close()


def test_many_connections_keep_nobody_out(
    log: OutputLog,
    server: StreamServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 120.0)  # on a slow machine, too
    monkeypatch.setattr(server._http, "open_connections", Connections(max_unadmitted=64))
    log.append(batch(0))
    reader = socket.create_connection((ADDRESS, server.port), source_address=("127.0.42.9", 0))
    eventually(lambda: len(server._http.open_connections) == 1)
    strangers = []
    for number in range(100):
        strangers.append(socket.create_connection((ADDRESS, server.port)))
        if number % 25 == 0:
            assert read(server, ReadRequest("s", 0, 0, 1)) == [0]
    eventually(lambda: len(server._http.open_connections) <= 64)
    request = ReadRequest("s", 0, 0, 1)
    body = json.dumps(request.message(IDENTITY)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-a\r\n"
    reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert reader.recv(100).startswith(b"HTTP/1.1 200")  # the oldest, but of another address
    for stranger in [*strangers, reader]:
        stranger.close()
    (words,) = {r.getMessage() for r in caplog.records if r.name == http_server.__name__}
    assert "64 at once have sent no valid request in time" in words


def test_an_idle_connection_is_closed(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.5)
    log.append(batch(0))
    connected = ask(server, ReadRequest("s", 0, 0, 1))
    assert closed_within(connected, 5)
    connected.close()


def test_connections_are_bounded_and_the_idle_ones_go_first() -> None:
    limits: Connections[str] = Connections(max_unadmitted=3, max_admitted=3)
    for name in "abcde":
        limits.opened(name, "1", 0.0)
    for name in "abc":
        assert limits.admitted(name, 0.0) == []
    limits.idle("b", 1.0)
    closed = limits.admitted("d", 1.0)
    assert closed is not None
    assert [c.connection for c in closed] == ["b"]
    assert limits.admitted("e", 1.0) is None  # all others are in use
    assert [c.connection for c in limits.expired(10.0)] == ["e"]
    limits.idle("a", 10.0)
    assert [c.connection for c in limits.expired(10.0 + connections.IDLE_S)] == ["a"]
    assert len(limits) == 2


def test_strangers_cannot_take_all_descriptors() -> None:
    assert connections.limits(1 << 20) == (connections.MAX_UNADMITTED, connections.MAX_ADMITTED)
    assert connections.limits(-1) == (connections.MAX_UNADMITTED, connections.MAX_ADMITTED)
    assert connections.limits(1024) == (128, 768)
    assert connections.limits(100) == (12, 76)


def test_the_address_with_most_connections_loses_the_oldest() -> None:
    limits: Connections[str] = Connections(max_unadmitted=4)
    for name, peer in (("a", "reader"), ("b", "stranger"), ("c", "stranger"), ("d", "stranger")):
        limits.opened(name, peer, 0.0)
    assert limits.full
    late = connections.GRACE_S
    for _ in range(connections.GRACE_CALLS):
        assert not limits.make_room(late)  # the server may not have read their requests
    (closed,) = limits.make_room(late)
    assert (closed.connection, closed.peer) == ("b", "stranger")
    assert not limits.full
    limits.opened("e", "reader", late)
    limits.admitted("a", late)
    assert not limits.make_room(2 * late - 0.1)
    assert [limits.make_room(2 * late)[0].connection for _ in range(2)] == ["c", "d"]
    assert not limits.make_room(2 * late)


def test_readers_on_a_busy_machine_have_time_for_their_requests() -> None:
    """They connect at one moment, and send one request after another."""
    limits: Connections[int] = Connections(max_unadmitted=8)
    for reader in range(8):
        limits.opened(reader, "1", 0.0)
    for reader in range(8):
        began = 0.5 * reader
        for check in range(2 * connections.GRACE_CALLS):
            assert not limits.make_room(began + check * 0.025)
        assert limits.admitted(reader, began + 0.5) == []


@pytest.mark.parametrize("paused_s", [0.0, 1.0])
def test_all_readers_of_a_task_may_connect_at_one_moment(
    log: OutputLog, server: StreamServer, paused_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the unadmitted connections that there may be."""
    monkeypatch.setattr(server._http, "open_connections", Connections(max_unadmitted=64))
    log.append(batch(0))
    server._io.call(time.sleep, paused_s)
    address = f"{ADDRESS}:{server.port}"

    async def read_one() -> int:
        client = StreamClient(address, IDENTITY)
        try:
            return len((await client.read(ReadRequest("s", 0, 0, 1), 20)).epochs)
        finally:
            await client.close()

    async def read_all() -> list[int]:
        return await asyncio.gather(*(read_one() for _ in range(300)))

    assert asyncio.run(read_all()) == [1] * 300


def test_a_connection_that_is_closed_before_it_is_made_does_not_stay(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Connections[object]):
        def opened(self, connection: object, peer: str, now: float) -> None:
            super().opened(connection, peer, now)
            self.closed(connection)

    monkeypatch.setattr(server._http, "open_connections", Forgetful())
    stranger = socket.create_connection((ADDRESS, server.port))
    assert closed_within(stranger, 5)
    stranger.close()
    eventually(lambda: not server._http._transports)


def test_a_reader_too_many_is_refused_with_a_message(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server._http, "open_connections", Connections(max_unadmitted=8, max_admitted=2)
    )
    busy = [ask(server, ReadRequest("s", 0, 0, 1, wait_s=1.0)) for _ in range(2)]
    open_connections = server._http.open_connections
    eventually(lambda: len(open_connections) == 2 and not open_connections.unadmitted)
    with pytest.raises(StreamUnavailable, match="2 readers have connections; raise the limit of"):
        read(server, ReadRequest("s", 0, 0, 1))
    for one in busy:
        one.close()


def test_a_process_raises_its_own_limit_of_descriptors() -> None:
    script = """
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 5000)))
        from rekindle.streams.sockets import raise_descriptor_limit
        print(raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    got, limit = map(int, done.stdout.split())
    assert got == limit > 256


def test_what_a_stranger_is_sent_is_short(server: StreamServer) -> None:
    with socket.create_connection((ADDRESS, server.port)) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"\x01" * 100_000)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := stranger.recv(1 << 16):
                answer += chunk
    assert len(answer) < 500
