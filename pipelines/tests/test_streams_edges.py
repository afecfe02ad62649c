"""Many edges, few threads; and what strangers, slow peers and dead peers cost: their connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from log_parts import MemorySpill
from pyarrow import flight
from reader_parts import endpoints, read_once, started_io

from rekindle.engine.bounds import CallBounds
from rekindle.errors import EpochTooLarge, RekindleError
from rekindle.exchange.routing import Share
from rekindle.identity import Identity
from rekindle.protocol import Endpoint, Upstream
from rekindle.streams import connections, http_server, response_body
from rekindle.streams.client import StreamClient
from rekindle.streams.connections import Connections
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import CallThread, IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.memory_gate import MemoryGate
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import PATH, ReadRequest, StreamRefused, StreamUnavailable
from rekindle.task.inputs import StreamInputs
from rekindle.topology.model import Exchange, Input, Resources, Segment
from rekindle.topology.schema import Schema
from rekindle_testing.waiting import eventually, wait_for

EDGES = 64
ADDRESS = "127.0.42.1"
SCHEMA = pa.schema([("n", pa.int64())])
OWN = Identity("uid-a", "token-a")


def batch(epoch: int, partition: int = 0, rows: int = 3) -> EpochBatch:
    table = pa.table({"n": np.arange(rows) + epoch}, schema=SCHEMA)
    return EpochBatch("s", partition, epoch, epoch, table, digest_table(table))


def make_log(directory: Path, partition: int = 0, **options: object) -> OutputLog:
    return OutputLog(directory / str(partition), "s", partition, SCHEMA, **options)  # type: ignore[arg-type]


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return make_log(tmp_path)


@pytest.fixture
def server(log: OutputLog) -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0, OWN, incarnation=1)
    server.serve_log(log)
    yield server
    server.stop()


def native_threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def open_sockets() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(path.readlink().name)
    return sum(link.startswith("socket:") for link in links)


def read(server: StreamServer, request: ReadRequest, timeout_s: float = 10) -> list[int]:
    address = f"{ADDRESS}:{server.port}"
    return [e.epoch for e in read_once(address, request, timeout_s, OWN).epochs]


class Edges:
    """Readers of all partitions of one server."""

    def __init__(self, server: StreamServer, count: int = EDGES) -> None:
        self.got: list[list[int]] = [[] for _ in range(count)]
        self.io = started_io()
        self.readers = [self._reader(n) for n in range(count)]
        for reader in self.readers:
            reader.route(endpoints(f"{ADDRESS}:{server.port}").endpoints)

    def _reader(self, partition: int) -> PartitionReader:
        got = self.got[partition]
        return PartitionReader(
            self.io, Subscription("s", partition, 0), lambda b: got.append(b.epoch), lambda: True
        )

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.io.stop()


@pytest.fixture
def logs(tmp_path: Path) -> list[OutputLog]:
    return [make_log(tmp_path, n) for n in range(EDGES)]


# -- threads -----------------------------------------------------------------------------------


def test_64_edges_have_two_threads_on_each_side(logs: list[OutputLog]) -> None:
    before, sockets = native_threads(), open_sockets()
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    of_server = native_threads() - before
    edges = Edges(server)
    for epoch in range(5):
        for log in logs:
            log.append(batch(epoch, log.partition, rows=100_000 if epoch == 2 else 3))
    eventually(lambda: all(got == list(range(5)) for got in edges.got), 30)
    added = native_threads() - before
    names = {Path(f"/proc/self/task/{n}/comm").read_text().strip() for n in added}
    assert len(of_server) <= 2, names
    assert len(added) <= 4, names
    edges.close()
    server.stop()
    eventually(lambda: native_threads() <= before)
    eventually(lambda: open_sockets() == sockets)


def test_a_thread_that_computes_leaves_loops_their_turn() -> None:
    before = sys.getswitchinterval()
    io = IoThread("pulls")
    try:
        sys.setswitchinterval(0.005)
        io.start()
        assert sys.getswitchinterval() <= 0.001
    finally:
        io.stop()
        sys.setswitchinterval(before)


def test_a_waiting_reader_is_woken_by_the_log(logs: list[OutputLog]) -> None:
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    edges = Edges(server)
    took: list[float] = []
    for epoch in range(10):
        eventually(lambda e=epoch: all(len(got) == e for got in edges.got))  # type: ignore[misc]
        time.sleep(0.05)
        began = time.monotonic()
        logs[7].append(batch(epoch, 7))
        eventually(lambda e=epoch: len(edges.got[7]) > e)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        for log in logs:
            if log is not logs[7]:
                log.append(batch(epoch, log.partition))
    edges.close()
    server.stop()
    assert sorted(took)[5] < 0.2, took


def test_stopping_is_immediate_whoever_is_connected(logs: list[OutputLog]) -> None:
    before = native_threads()
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    edges = Edges(server)
    strangers = [socket.create_connection((ADDRESS, server.port)) for _ in range(20)]
    eventually(lambda: len(server._http.limits) == EDGES + 20)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 2
    for stranger in strangers:
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        stranger.close()
    began = time.monotonic()
    edges.close()
    assert time.monotonic() - began < 2
    eventually(lambda: native_threads() <= before)


def end_thread(io: IoThread) -> None:
    """As a bug in the event loop itself would."""

    def fail() -> None:
        raise SystemExit("the loop is broken")

    io.call(fail)


def test_a_server_whose_thread_dies_says_so(log: OutputLog) -> None:
    died: list[str] = []
    server = StreamServer(ADDRESS, 0, on_death=died.append)
    server.serve_log(log)
    end_thread(server._io)
    eventually(lambda: died)
    assert died == ["thread stream-server has ended: SystemExit('the loop is broken')"]
    server.stop()
    assert len(died) == 1


def segment_of(partitions: int) -> Segment:
    read = Input("s", "rows", Schema(()), partitions, Exchange.GATHER, ())
    return Segment("seg", "seg", ("seg",), "out", (read,), 1, 1, (), Resources(100, 1 << 30))


def test_inputs_whose_thread_dies_fail_the_task() -> None:
    inputs = StreamInputs(segment_of(2), 0, 0, 0)
    end_thread(inputs._io)
    with pytest.raises(RekindleError, match="thread pulls has ended: SystemExit"):
        eventually(lambda: inputs.take(CallBounds(1), 0.1))
    inputs.close()


def test_a_stopped_thread_is_not_reported() -> None:
    died: list[str] = []
    io = IoThread("io", died.append)
    io.start()
    io.stop()
    assert not io.alive
    assert not died
    io.call(died.append, "nothing happens")
    IoThread("never started").stop()


def test_a_thread_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallThread("calls")

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def play() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                await calls.run(lambda: 1)
        assert await calls.run(lambda: 2) == 2

    asyncio.run(play())
    calls.stop(1)


def test_readers_without_a_call_close_their_connections(log: OutputLog) -> None:
    log.append(batch(0))
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log)
    before, io, got = open_sockets(), started_io(), list[int]()
    sockets = open_sockets()
    readers = [
        PartitionReader(
            io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: len(got) < 5
        )
        for _ in range(5)
    ]
    for reader in readers:
        reader.route(endpoints(f"{ADDRESS}:{server.port}").endpoints)
    eventually(lambda: len(got) >= 5 and all(r._calling is None for r in readers))
    assert any(r._client is not None for r in readers)
    for reader in readers:
        reader.close()
    io.stop()
    assert open_sockets() <= sockets
    eventually(lambda: open_sockets() <= before)  # the server's ends, too
    server.stop()


# -- bounds ------------------------------------------------------------------------------------


def test_all_edges_share_one_budget(tmp_path: Path) -> None:
    count, rows = 16, 32 << 10  # 256 KiB an epoch
    logs = [make_log(tmp_path, n) for n in range(count)]
    made = [batch(epoch, 0, rows) for epoch in range(20)]
    for log in logs:
        for one in made:
            log.append(one)
    budget = 2 << 20
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    before = pa.total_allocated_bytes()
    inputs = StreamInputs(segment_of(count), 0, 0, 0, read_ahead_bytes=budget)
    at = Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=1)
    inputs.route([Upstream(stream="s", partition=n, endpoints=(at,)) for n in range(count)])
    time.sleep(1.5)
    held = pa.total_allocated_bytes() - before
    epoch_bytes = count * rows * 8
    assert epoch_bytes <= held <= 2 * budget + 3 * epoch_bytes
    taken: list[int] = []
    while len(taken) < 20:
        taken += [e.epoch for e in inputs.take(CallBounds(1), 10)]
    assert taken == list(range(20))
    inputs.close()
    server.stop()


def test_an_epoch_too_large_for_the_task_is_refused_before_it_is_there(
    logs: list[OutputLog],
) -> None:
    """Each of its partitions would fit."""
    server = StreamServer(ADDRESS, 0)
    for log in logs[:16]:
        server.serve_log(log)
        log.append(batch(0, log.partition, rows=1 << 17))  # 1 MiB each

    def check(what: str, size: int) -> None:
        if size > 4 << 20:
            raise EpochTooLarge(f"{what} has {size >> 20} MiB")

    before = pa.total_allocated_bytes()
    inputs = StreamInputs(segment_of(16), 0, 0, 0, check_size=check)
    at = Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=1)
    inputs.route([Upstream(stream="s", partition=n, endpoints=(at,)) for n in range(16)])
    with pytest.raises(EpochTooLarge, match="epoch 0 of the upstream partitions together has 4"):
        eventually(lambda: inputs.take(CallBounds(1), 0.1))
    assert pa.total_allocated_bytes() - before <= 6 << 20
    inputs.close()
    server.stop()


def ask(server: StreamServer, request: ReadRequest) -> socket.socket:
    """A connection that has sent a request, and reads nothing."""
    connected = socket.socket()
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connected.connect((ADDRESS, server.port))
    body = json.dumps(request.message(OWN)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-a\r\n"
    connected.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connected


def test_a_reader_that_stops_reading_makes_nothing_wait_in_memory(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_body, "STALL_S", 3.0)
    for epoch in range(8):
        log.append(batch(epoch, rows=1 << 20))  # 8 MiB each
    before = pa.total_allocated_bytes()
    slow = [ask(server, ReadRequest("s", 0, 0, 1 << 30)) for _ in range(10)]
    eventually(lambda: len(server._http._transports) == 10)
    time.sleep(0.5)
    waiting = [t.get_write_buffer_size() for t in server._http._transports.values()]
    assert max(waiting) <= 2 * http_server.SEND_BYTES + 100
    assert pa.total_allocated_bytes() - before < 16 << 20
    assert read(server, ReadRequest("s", 0, 0, 1 << 30)) == list(range(8))
    eventually(lambda: not server._http._transports, 10)  # left, because they took nothing
    for one in slow:
        one.close()


def test_shares_held_for_slow_readers_are_bounded(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_body, "STALL_S", 2.0)
    server._lots._gate = MemoryGate(12 << 20)
    for epoch in range(4):
        log.append(batch(epoch, rows=1 << 20))
    share = Share(("n",), 2, 0)
    slow = [ask(server, ReadRequest("s", 0, epoch, 1, share=share)) for epoch in range(4)]
    most = 0

    def left() -> bool:
        nonlocal most
        most = max(most, server._lots._gate.held_bytes)
        return most > 8 << 20 and not server._lots._gate.held_bytes

    wait_for("readers that are left", left, every_s=0.001)
    assert most <= 13 << 20  # with the headers of what is encoded
    for one in slow:
        one.close()
    assert read(server, ReadRequest("s", 0, 3, 1, share=share)) == [3]


def test_readers_that_are_gone_hold_no_more_than_their_shares(
    log: OutputLog, server: StreamServer
) -> None:
    """Of a large epoch, whose other shares nobody needs."""
    server._lots._gate = MemoryGate(24 << 20)
    for epoch in range(6):
        log.append(batch(epoch, rows=1 << 20))
    share = Share(("n",), 4, 0)
    gone = [ask(server, ReadRequest("s", 0, epoch, 1, share=share)) for epoch in range(6)]
    eventually(lambda: 11 << 20 < server._lots._gate.held_bytes < 13 << 20)
    assert read(server, ReadRequest("s", 0, 5, 1, share=Share(("n",), 3, 0))) == [5]
    for one in gone:
        one.close()
    eventually(lambda: not server._lots._gate.held_bytes)


def test_a_slow_store_holds_up_only_those_who_need_it(tmp_path: Path) -> None:
    class SlowSpill(MemorySpill):
        go = threading.Event()

        def get(self, name: str) -> bytes:  # type: ignore[override]
            self.go.wait(30)
            return super().get(name)

    log = make_log(tmp_path, budget=8000, spill=SlowSpill(), file_bytes=2000)
    for epoch in range(60):
        log.append(batch(epoch))
    server = StreamServer(ADDRESS, 0, OWN)
    server.serve_log(log)
    address, found = f"{ADDRESS}:{server.port}", list[int]()

    def read_spilled() -> None:
        response = read_once(address, ReadRequest("s", 0, 0, 1), 30, OWN)
        found.extend(e.epoch for e in response.epochs)

    thread = threading.Thread(target=read_spilled)
    thread.start()
    for _ in range(3):
        assert read(server, ReadRequest("s", 0, 59, 1), 5) == [59]
    assert not found
    before = [ask(server, ReadRequest("s", 0, 0, 1)) for _ in range(5)]
    eventually(lambda: len(server._lots._store_thread) == 5)
    for gone in before:
        gone.close()
    eventually(
        lambda: len(server._lots._store_thread) == 0
    )  # nothing waits for those who have left
    SlowSpill.go.set()
    thread.join(10)
    assert found == [0]
    server.stop()


# -- strangers ---------------------------------------------------------------------------------


def closed_within(connected: socket.socket, seconds: float) -> bool:
    connected.settimeout(seconds)
    try:
        while connected.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


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


def test_the_words_for_a_stranger_name_nothing(server: StreamServer) -> None:
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
    message = ReadRequest("s", 0, 0, 1, incarnation=1).message(OWN) | change
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
def test_a_wrong_request_is_refused_in_words_without_a_stack(
    log: OutputLog, server: StreamServer, change: dict[str, object], words: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    log.append(batch(0))
    message = ReadRequest("s", 0, 0, 1, incarnation=1).message(OWN) | change
    monkeypatch.setattr(ReadRequest, "message", lambda *_: message)
    with pytest.raises(StreamUnavailable, match=words):
        read(server, ReadRequest("s", 0, 0, 1))
    assert not caplog.records


def test_a_byte_a_second_ends_at_the_deadline(
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


def test_thousands_of_connections_keep_nobody_out(
    log: OutputLog,
    server: StreamServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 120.0)  # on a slow machine, too
    log.append(batch(0))
    reader = socket.create_connection((ADDRESS, server.port), source_address=("127.0.42.9", 0))
    eventually(lambda: len(server._http.limits) == 1)
    strangers = []
    for number in range(2000):
        strangers.append(socket.create_connection((ADDRESS, server.port)))
        if number % 500 == 0:
            assert read(server, ReadRequest("s", 0, 0, 1)) == [0]
    eventually(lambda: len(server._http.limits) <= connections.MAX_UNADMITTED)
    request = ReadRequest("s", 0, 0, 1)
    body = json.dumps(request.message(OWN)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-a\r\n"
    reader.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert reader.recv(100).startswith(b"HTTP/1.1 200")  # the oldest, but of another address
    for stranger in [*strangers, reader]:
        stranger.close()
    (words,) = {r.getMessage() for r in caplog.records if r.name == http_server.__name__}
    assert f"{connections.MAX_UNADMITTED} at once have sent no valid request in time" in words


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
        assert limits.admitted(name) == []
    limits.idle("b", 1.0)
    closed = limits.admitted("d")
    assert closed is not None
    assert [c.connection for c in closed] == ["b"]
    assert limits.admitted("e") is None  # all others are in use
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
    for _ in range(connections.CHECKS):
        assert not limits.make_room()  # they may be about to send a request
    (closed,) = limits.make_room()
    assert (closed.connection, closed.peer) == ("b", "stranger")
    assert not limits.full
    limits.opened("e", "reader", 0.0)
    limits.admitted("a")
    assert [limits.make_room()[0].connection for _ in range(2)] == ["c", "d"]
    assert not limits.make_room()


@pytest.mark.parametrize("paused_s", [0.0, 1.0])
def test_all_readers_of_a_task_may_connect_at_one_moment(
    log: OutputLog, server: StreamServer, paused_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the unadmitted connections that there may be."""
    monkeypatch.setattr(server._http, "limits", Connections(64))
    log.append(batch(0))
    server._io.call(time.sleep, paused_s)
    address = f"{ADDRESS}:{server.port}"

    async def read_one() -> int:
        client = StreamClient(address, OWN)
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

    monkeypatch.setattr(server._http, "limits", Forgetful())
    stranger = socket.create_connection((ADDRESS, server.port))
    assert closed_within(stranger, 5)
    stranger.close()
    eventually(lambda: not server._http._transports)


def test_a_reader_too_many_is_refused_in_words(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._http, "limits", Connections(8, 2))
    busy = [ask(server, ReadRequest("s", 0, 0, 1, wait_s=1.0)) for _ in range(2)]
    eventually(lambda: len(server._http.limits) == 2 and not server._http.limits.unadmitted)
    with pytest.raises(StreamUnavailable, match="2 readers have connections; raise the limit of"):
        read(server, ReadRequest("s", 0, 0, 1))
    for one in busy:
        one.close()


def test_a_process_raises_its_own_limit_of_descriptors() -> None:
    script = """
        import resource
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 5000)))
        from rekindle.streams.sockets import descriptors
        print(descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
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


# -- peers that are gone -----------------------------------------------------------------------


class Peer:
    """A replica that accepts connections, and does with them what a test says."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self.listening = socket.create_server((ADDRESS, 0))
        self.address = f"{ADDRESS}:{self.listening.getsockname()[1]}"
        self.accepted: list[socket.socket] = []
        self._act = act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self.listening.accept()
                self.accepted.append(connected)
                self._act(connected)

    def close(self) -> None:
        self.listening.close()
        for connected in self.accepted:
            connected.close()


def collecting(io: IoThread, got: list[int]) -> PartitionReader:
    subscription = Subscription("s", 0, 0)
    return PartitionReader(io, subscription, lambda b: got.append(b.epoch), lambda: True)


def read_both(first: str, second: str, expected: int) -> PartitionReader:
    """A reader of two replicas, after it has all epochs."""
    io, got = started_io(), list[int]()
    reader = PartitionReader(
        io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: True
    )
    reader.route(endpoints(first, second).endpoints)
    eventually(lambda: len(got) >= expected, 30)
    assert got == list(range(expected))
    reader.close()
    io.stop()
    return reader


@pytest.fixture
def healthy(tmp_path: Path) -> Iterator[str]:
    log = make_log(tmp_path / "healthy")
    for epoch in range(4):
        log.append(batch(epoch, rows=20_000))
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log)
    address = f"{ADDRESS}:{server.port}"
    read_once(address, ReadRequest("s", 0, 0, 1), 30)  # so that all its threads have begun
    yield address
    server.stop()


def test_a_silent_peer_is_left_and_its_connection_closed(healthy: str) -> None:
    before = native_threads()
    peer = Peer(lambda connected: None)
    before |= native_threads()
    read_both(peer.address, healthy, 4)
    request = peer.accepted[0].recv(1 << 16)
    assert request.startswith(b"POST /v3/epochs")
    assert closed_within(peer.accepted[0], 5)
    eventually(lambda: native_threads() <= before)
    peer.close()


def test_an_abandoned_call_is_cancelled_at_once(healthy: str) -> None:
    peer = Peer(lambda connected: None)
    io, got = started_io(), list[int]()
    reader = PartitionReader(
        io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: True
    )
    reader.route(endpoints(peer.address).endpoints)
    eventually(lambda: peer.accepted)
    began = time.monotonic()
    reader.route(endpoints(peer.address, healthy, suspected=peer.address).endpoints)
    eventually(lambda: len(got) == 4)
    assert closed_within(peer.accepted[0], 5)
    assert time.monotonic() - began < 1.4  # its deadline is later
    reader.close()
    io.stop()
    peer.close()


def recorded(address: str) -> bytes:
    """The bytes of a response."""
    host, port = address.split(":")
    request = ReadRequest("s", 0, 0, 1 << 30).message(Identity())
    body = json.dumps(request).encode()
    with socket.create_connection((host, int(port))) as connected:
        head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        connected.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        content = b""
        while chunk := connected.recv(1 << 16):
            content += chunk
    return content


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.4, 0.9, 0.9999])
def test_a_connection_may_end_anywhere(healthy: str, reset: bool, share: float) -> None:
    content = recorded(healthy)

    def act(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        connected.sendall(content[: int(share * len(content))])
        if reset:
            linger = struct.pack("ii", 1, 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connected.close()

    peer = Peer(act)
    read_both(peer.address, healthy, 4)
    peer.close()


def test_a_peer_that_sends_without_end_is_left(healthy: str) -> None:
    sent = 0

    def act(connected: socket.socket) -> None:
        nonlocal sent
        connected.recv(1 << 16)
        connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                sent += connected.send(b"\0" * 65536)

    peer = Peer(act)
    read_both(peer.address, healthy, 4)
    peer.close()
    assert sent < 16 << 20


PROGRAM = """
    import sys
    from pathlib import Path
    from test_streams_edges import ADDRESS, batch, make_log
    from rekindle.streams.server import StreamServer
    log = make_log(Path(sys.argv[1]))
    for epoch in range(2):
        log.append(batch(epoch))
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log)
    print(server.port, flush=True)
    sys.stdin.read()
    server.stop()
"""


@pytest.mark.process
def test_a_frozen_process_is_left(healthy: str, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "frozen")],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    address = f"{ADDRESS}:{program.stdout.readline().strip()}"
    io, got = started_io(), list[int]()
    reader = PartitionReader(
        io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: True
    )
    before = native_threads()
    sockets = open_sockets()
    try:
        reader.route(endpoints(address, healthy).endpoints)
        eventually(lambda: len(got) == 2)
        os.kill(program.pid, signal.SIGSTOP)
        eventually(lambda: len(got) == 4, 20)
        assert native_threads() <= before
        eventually(lambda: open_sockets() <= sockets + 2)  # to the other replica, both ends
        os.kill(program.pid, signal.SIGCONT)
    finally:
        program.kill()
        program.communicate()
        reader.close()
        io.stop()


# -- other releases, other networks ------------------------------------------------------------


def test_a_task_of_an_earlier_release_is_named() -> None:
    server = flight.FlightServerBase(f"grpc://{ADDRESS}:0")
    address = f"{ADDRESS}:{server.port}"
    with pytest.raises(StreamRefused, match=r"Arrow Flight .* use images of one release"):
        read_once(address, ReadRequest("s", 0, 0, 1), 10)
    io = started_io()
    reader = PartitionReader(io, Subscription("s", 0, 0), lambda b: None, lambda: True)
    reader.route(endpoints(address).endpoints)
    eventually(lambda: "use images of one release" in (reader.problem() or ""))
    reader.close()
    io.stop()
    server.shutdown()


def test_a_reader_of_an_earlier_release_is_refused_in_words(server: StreamServer) -> None:
    client = flight.FlightClient(f"grpc://{ADDRESS}:{server.port}")
    with pytest.raises(flight.FlightError, match=r"http1\.x|HTTP"):
        client.do_get(flight.Ticket(b"{}"), flight.FlightCallOptions(timeout=5)).read_all()
    client.close()


def test_refusals_are_reported_until_another_replica_serves(
    log: OutputLog, server: StreamServer
) -> None:
    log.append(batch(0))
    io, got = started_io(), list[int]()
    reader = PartitionReader(
        io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: True
    )
    reader.route(endpoints(f"{ADDRESS}:{server.port}").endpoints)
    eventually(lambda: "needs the topology's token" in (reader.problem() or ""))
    open_server = StreamServer(ADDRESS, 0)
    open_server.serve_log(log)
    reader.route(endpoints(f"{ADDRESS}:{open_server.port}").endpoints)
    eventually(lambda: got == [0] and reader.problem() is None)
    reader.close()
    io.stop()
    open_server.stop()


@pytest.mark.parametrize(
    ("bind", "to"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"])]
)
def test_both_families_are_served(log: OutputLog, bind: str, to: list[str]) -> None:
    log.append(batch(0))
    server = StreamServer(bind, 0)
    server.serve_log(log)
    for host in to:
        assert read_once(f"{host}:{server.port}", ReadRequest("s", 0, 0, 1), 10).epochs
    server.stop()


def test_a_port_that_is_taken_is_an_error(server: StreamServer) -> None:
    with pytest.raises(OSError, match="in use"):
        StreamServer(ADDRESS, server.port)


def test_an_error_of_the_log_in_the_middle_keeps_what_was_sent(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in range(4):
        log.append(batch(epoch, rows=30_000))
    real = log.read_local

    def failing(epoch: int, max_bytes: int, *options: int) -> object:
        if epoch >= 2:
            raise StreamUnavailable("the log is damaged")
        return real(epoch, max_bytes, *options)[:1]

    monkeypatch.setattr(log, "read_local", failing)
    assert read(server, ReadRequest("s", 0, 0, 1 << 30)) == [0, 1]
    with pytest.raises(StreamUnavailable, match="the log is damaged"):
        read(server, ReadRequest("s", 0, 2, 1 << 30))


class Replicas:
    """Two servers of the same partitions; a move of a history happens to one of them."""

    def __init__(self, directory: Path, partitions: int) -> None:
        self.logs = [[make_log(directory / str(r), n) for n in range(partitions)] for r in range(2)]
        self.servers: list[StreamServer | None] = [self._serve(0), self._serve(1)]
        self.epochs = 0

    def _serve(self, replica: int) -> StreamServer:
        server = StreamServer(ADDRESS, 0)
        for log in self.logs[replica]:
            server.serve_log(log)
        return server

    def append(self, rows: int) -> None:
        for replica in self.logs:
            for log in replica:
                log.append(batch(self.epochs, log.partition, rows))
        self.epochs += 1

    def stop_or_start(self, replica: int) -> None:
        server = self.servers[replica]
        if server is None:
            self.servers[replica] = self._serve(replica)
        elif self.servers[1 - replica] is not None:
            server.stop()
            self.servers[replica] = None

    def reset_connections(self, replica: int) -> None:
        server = self.servers[replica]
        if server is not None:
            server._io.call(server._http.abort_all)

    def endpoints(self, suspected: int | None = None) -> tuple[Endpoint, ...]:
        return tuple(
            Endpoint(
                address=f"{ADDRESS}:{server.port}",
                replica=replica,
                incarnation=server.port,
                suspected=replica == suspected,
            )
            for replica, server in enumerate(self.servers)
            if server is not None
        )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_happens_to_connections_epochs_come_once(tmp_path: Path, seed: int) -> None:
    before, draw = native_threads(), random.Random(seed)
    replicas = Replicas(tmp_path, 4)
    got: list[list[int]] = [[] for _ in range(4)]
    io = started_io()

    def reader_of(partition: int) -> PartitionReader:
        mine = got[partition]
        return PartitionReader(
            io,
            Subscription("s", partition, 0),
            lambda b: mine.append(b.epoch),
            lambda: partition < 3 or draw.random() < 0.7,
        )

    readers = [reader_of(partition) for partition in range(4)]

    def go_on() -> None:
        for reader in readers:
            io.call(reader.wake)

    for _ in range(80):
        replicas.append(draw.choice([0, 3, 3, 50_000]))
        move, replica = draw.random(), draw.randrange(2)
        if move < 0.08:
            replicas.stop_or_start(replica)
        elif move < 0.2:
            replicas.reset_connections(replica)
        for reader in readers:
            reader.route(replicas.endpoints(replica if move > 0.8 else None))
        go_on()
        time.sleep(0.02 * draw.random())

    def complete() -> bool:
        go_on()
        return all(len(one) >= replicas.epochs for one in got)

    eventually(complete)
    assert got == [list(range(replicas.epochs))] * 4
    for reader in readers:
        reader.close()
    io.stop()
    for server in replicas.servers:
        if server is not None:
            server.stop()
    eventually(lambda: native_threads() <= before)
