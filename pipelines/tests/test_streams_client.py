"""What a reader concludes from a call that fails: the replica, the network, or its own process."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pytest
from reader_parts import read_once, started_io

from rekindle.streams.client import StreamClient
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import CallTimedOut, ReadRequest, ReadResponse, StreamUnavailable
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

ADDRESS = "127.0.46.1"
SCHEMA = pa.schema([("n", pa.int64())])


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return OutputLog(tmp_path, "s", 0, SCHEMA)


@pytest.fixture
def server(log: OutputLog) -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log)
    yield server
    server.stop()


def append(log: OutputLog, *epochs: int, rows: int = 10) -> None:
    table = pa.table({"n": range(rows)}, schema=SCHEMA)
    for epoch in epochs:
        log.append(EpochBatch("s", 0, epoch, epoch, table, digest_table(table)))


def begin(
    io: IoThread, address: str, request: ReadRequest, timeout_s: float
) -> Future[ReadResponse]:
    async def read() -> ReadResponse:
        client = StreamClient(address)
        try:
            return await client.read(request, timeout_s)
        finally:
            await client.close()

    return asyncio.run_coroutine_threadsafe(read(), io.loop)


def test_a_delay_of_the_reader_itself_does_not_count(log: OutputLog, server: StreamServer) -> None:
    """Its process was frozen, or had no CPU: what the replica has sent is there afterwards."""
    io = started_io()
    call = begin(io, f"{ADDRESS}:{server.port}", ReadRequest("s", 0, 0, 1, wait_s=1.0), 1.0)
    eventually(lambda: server._logs[("s", 0)]._waiting_for_epoch)
    io.call(time.sleep, 2.0)
    time.sleep(0.2)
    append(log, 0)
    assert [e.epoch for e in call.result(5).epochs] == [0]
    io.stop()


def test_a_delayed_reader_still_leaves_a_silent_replica() -> None:
    with socket.create_server((ADDRESS, 0)) as silent:
        io = started_io()
        address = f"{ADDRESS}:{silent.getsockname()[1]}"
        call = begin(io, address, ReadRequest("s", 0, 0, 1), 1.0)
        io.call(time.sleep, 1.5)
        with pytest.raises(CallTimedOut):
            call.result(5)
        io.stop()


def test_a_connection_that_is_not_made_is_no_timed_out_call() -> None:
    """A timed-out call gives the next one more time, since its epoch may be large. Here the machine
    or the network is gone, so that each such call would find this later."""
    with socket.socket() as full:
        full.bind((ADDRESS, 0))
        full.listen(0)
        address = full.getsockname()
        others = [socket.socket() for _ in range(4)]
        for other in others:  # they fill the backlog: the kernel accepts no further one
            other.setblocking(False)
            other.connect_ex(address)
        time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(StreamUnavailable, match="no connection in") as caught:
            read_once(f"{ADDRESS}:{address[1]}", ReadRequest("s", 0, 0, 1), 30.0)
        assert not isinstance(caught.value, CallTimedOut)
        assert time.monotonic() - began < 5
        for other in others:
            other.close()


@pytest.mark.parametrize("reset", [True, False])
def test_whole_epochs_count_although_the_connection_ends(
    log: OutputLog, server: StreamServer, reset: bool
) -> None:
    append(log, 0, 1, 2, rows=20_000)
    content = recorded(server, ReadRequest("s", 0, 0, 1 << 20))
    with socket.create_server((ADDRESS, 0)) as peer:
        io = started_io()
        address = f"{ADDRESS}:{peer.getsockname()[1]}"
        call = begin(io, address, ReadRequest("s", 0, 0, 1 << 20), 5.0)
        connected, _ = peer.accept()
        connected.recv(1 << 16)
        connected.sendall(content[: len(content) * 5 // 6])
        time.sleep(0.2)
        if reset:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
        assert [e.epoch for e in call.result(5).epochs] == [0, 1]
        io.stop()


def recorded(server: StreamServer, request: ReadRequest) -> bytes:
    """The bytes of a response."""
    with socket.create_server((ADDRESS, 0)) as proxy:
        io = started_io()
        call = begin(io, f"{ADDRESS}:{proxy.getsockname()[1]}", request, 5.0)
        connected, _ = proxy.accept()
        sent = connected.recv(1 << 16)
        with socket.create_connection((ADDRESS, server.port)) as upstream:
            upstream.settimeout(0.5)
            upstream.sendall(sent)
            content = b""
            while True:
                try:
                    content += upstream.recv(1 << 16)
                except TimeoutError:
                    break
        connected.close()
        with pytest.raises(StreamUnavailable):
            call.result(5)
        io.stop()
    return content
