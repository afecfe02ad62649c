"""What slow peers, dead peers and peers of other releases cost: one call."""

from __future__ import annotations

import contextlib
import json
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

import pytest
from edge_parts import (
    ADDRESS,
    IDENTITY,
    batch,
    closed_within,
    make_log,
    open_sockets,
    read,
    threads,
)
from pyarrow import flight
from reader_parts import read_once, routes_to, started_io

from rekindle.identity import Identity
from rekindle.protocol import Endpoint
from rekindle.streams.io_thread import IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import PATH, ReadRequest, StreamRefused, StreamUnavailable
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
    """A reader that appends the epochs that it gets to `got`."""
    subscription = Subscription("s", 0, 0)
    return PartitionReader(
        io, subscription, lambda b: got.append(b.epoch), has_buffer_space=lambda: True
    )


def read_both(first: str, second: str, expected: int) -> PartitionReader:
    """A reader of two replicas, after it has all epochs."""
    io, got = started_io(), list[int]()
    reader = collecting(io, got)
    reader.route(routes_to(first, second))
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


def test_a_silent_peer_is_abandoned_and_its_connection_closed(healthy: str) -> None:
    peer = Peer(lambda connected: None)
    before = threads()
    read_both(peer.address, healthy, 4)
    request = peer.accepted[0].recv(1 << 16)
    assert request.startswith(b"POST /v3/epochs")
    assert closed_within(peer.accepted[0], 5)
    eventually(lambda: threads() <= before)
    peer.close()


def test_an_abandoned_call_is_cancelled_at_once(healthy: str) -> None:
    peer = Peer(lambda connected: None)
    io, got = started_io(), list[int]()
    reader = collecting(io, got)
    reader.route(routes_to(peer.address))
    eventually(lambda: peer.accepted)
    began = time.monotonic()
    reader.route(routes_to(peer.address, healthy, suspected=peer.address))
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
@pytest.mark.parametrize("fraction", [0.02, 0.4, 0.9, 0.9999])
def test_a_connection_may_end_anywhere(healthy: str, reset: bool, fraction: float) -> None:
    content = recorded(healthy)

    def act(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        connected.sendall(content[: int(fraction * len(content))])
        if reset:
            linger = struct.pack("ii", 1, 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connected.close()

    peer = Peer(act)
    read_both(peer.address, healthy, 4)
    peer.close()


def test_a_peer_that_sends_without_end_is_abandoned(healthy: str) -> None:
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
    from edge_parts import ADDRESS, batch, make_log
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


def test_a_frozen_process_is_abandoned(healthy: str, tmp_path: Path) -> None:
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
    reader = collecting(io, got)
    before = threads()
    sockets = open_sockets()
    try:
        reader.route(routes_to(address, healthy))
        eventually(lambda: len(got) == 2)
        os.kill(program.pid, signal.SIGSTOP)
        eventually(lambda: len(got) == 4, 20)
        assert threads() <= before
        eventually(lambda: len(open_sockets() - sockets) <= 2)  # to the other replica, both ends
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
    reader = PartitionReader(
        io, Subscription("s", 0, 0), lambda b: None, has_buffer_space=lambda: True
    )
    reader.route(routes_to(address))
    eventually(lambda: "use images of one release" in (reader.problem() or ""))
    reader.close()
    io.stop()
    server.shutdown()


def test_a_reader_of_an_earlier_release_gets_a_message(server: StreamServer) -> None:
    client = flight.FlightClient(f"grpc://{ADDRESS}:{server.port}")
    with pytest.raises(flight.FlightError, match=r"http1\.x|HTTP"):
        client.do_get(flight.Ticket(b"{}"), flight.FlightCallOptions(timeout=5)).read_all()
    client.close()


def test_refusals_are_reported_until_another_replica_serves(
    log: OutputLog, server: StreamServer
) -> None:
    log.append(batch(0))
    io, got = started_io(), list[int]()
    reader = collecting(io, got)
    reader.route(routes_to(f"{ADDRESS}:{server.port}"))
    eventually(lambda: "needs the topology's token" in (reader.problem() or ""))
    open_server = StreamServer(ADDRESS, 0)
    open_server.serve_log(log)
    reader.route(routes_to(f"{ADDRESS}:{open_server.port}"))
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
    """Two servers of the same partitions, each of which may be stopped, or lose its connections."""

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


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_to_connections_epochs_come_once(tmp_path: Path, seed: int) -> None:
    before, draw = threads(), random.Random(seed)
    replicas = Replicas(tmp_path, 4)
    got: list[list[int]] = [[] for _ in range(4)]
    io = started_io()

    def reader_of(partition: int) -> PartitionReader:
        mine = got[partition]
        return PartitionReader(
            io,
            Subscription("s", partition, 0),
            lambda b: mine.append(b.epoch),
            has_buffer_space=lambda: partition < 3 or draw.random() < 0.7,
        )

    readers = [reader_of(partition) for partition in range(4)]

    def go_on() -> None:
        for reader in readers:
            io.call(reader.wake)

    for _ in range(40):
        replicas.append(draw.choice([0, 3, 3, 20_000]))
        action, replica = draw.random(), draw.randrange(2)
        if action < 0.08:
            replicas.stop_or_start(replica)
        elif action < 0.2:
            replicas.reset_connections(replica)
        for reader in readers:
            reader.route(replicas.endpoints(replica if action > 0.8 else None))
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
    eventually(lambda: threads() <= before)
