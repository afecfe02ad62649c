"""Many edges, few threads, and memory that is bounded for all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from edge_parts import (
    ADDRESS,
    IDENTITY,
    ask,
    batch,
    make_log,
    open_sockets,
    read,
    threads,
)
from log_parts import MemorySpill
from reader_parts import read_once, routes_to, started_io
from task_world import ReadAhead

from rekindle.consistency.messages import ConsistencySettings
from rekindle.errors import EpochTooLarge, RekindleError
from rekindle.exchange.routing import Share
from rekindle.protocol import Endpoint, Upstream
from rekindle.streams import http_server, response_body, store_calls
from rekindle.streams.io_thread import CallThread, IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.memory_budget import MemoryBudget
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import CallTimedOut, ReadRequest, StreamUnavailable
from rekindle.topology.model import Exchange, Input, Resources, Segment
from rekindle.topology.schema import Schema
from rekindle_testing.waiting import eventually, wait_for

pytestmark = pytest.mark.process

EDGES = 64


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return make_log(tmp_path)


@pytest.fixture
def server(log: OutputLog) -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0, IDENTITY, incarnation=1)
    server.serve_log(log)
    yield server
    server.stop()


class Edges:
    """Readers of all partitions of one server."""

    def __init__(self, server: StreamServer, count: int = EDGES) -> None:
        self.got: list[list[int]] = [[] for _ in range(count)]
        self.io = started_io()
        self.readers = [self._reader(n) for n in range(count)]
        for reader in self.readers:
            reader.route(routes_to(f"{ADDRESS}:{server.port}"))

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


@pytest.mark.parametrize("share", [None, Share(("n",), 2, 1)], ids=["all", "share"])
def test_readers_get_what_is_idle(
    server: StreamServer, log: OutputLog, share: Share | None
) -> None:
    idle = [False, True, True, False, True]
    for epoch, is_idle in enumerate(idle):
        log.append(replace(batch(epoch, rows=3 * (epoch % 2)), idle=is_idle))
    request = ReadRequest("s", 0, 0, 1 << 20, share=share)
    response = read_once(f"{ADDRESS}:{server.port}", request, 10, IDENTITY)
    assert [e.idle for e in response.epochs] == idle


# -- threads -----------------------------------------------------------------------------------


def test_64_edges_have_two_threads_on_each_side(logs: list[OutputLog]) -> None:
    before, sockets = threads(), open_sockets()
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    of_server = threads() - before
    edges = Edges(server)
    for epoch in range(3):
        for log in logs:
            log.append(batch(epoch, log.partition, rows=20_000 if epoch == 1 else 3))
    eventually(lambda: all(got == list(range(3)) for got in edges.got), 30)
    added = threads() - before
    names = {thread.name for thread in added}
    assert len(of_server) <= 2, names
    assert len(added) <= 4, names
    edges.close()
    server.stop()
    eventually(lambda: threads() <= before)
    eventually(lambda: open_sockets() <= sockets)


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
    for log in logs[:16]:
        server.serve_log(log)
    edges = Edges(server, 16)
    took: list[float] = []
    for epoch in range(5):
        eventually(lambda e=epoch: all(len(got) == e for got in edges.got))  # type: ignore[misc]
        time.sleep(0.05)
        began = time.monotonic()
        logs[7].append(batch(epoch, 7))
        eventually(lambda e=epoch: len(edges.got[7]) > e)  # type: ignore[misc]
        took.append(time.monotonic() - began)
        for log in logs[:16]:
            if log is not logs[7]:
                log.append(batch(epoch, log.partition))
    edges.close()
    server.stop()
    assert sorted(took)[2] < 0.2, took


def test_stopping_is_immediate_whoever_is_connected(logs: list[OutputLog]) -> None:
    before = threads()
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    edges = Edges(server)
    strangers = [socket.create_connection((ADDRESS, server.port)) for _ in range(20)]
    eventually(lambda: len(server._http.open_connections) == EDGES + 20)
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
    eventually(lambda: threads() <= before)


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
    return Segment(
        id="seg",
        name="seg",
        nodes=("seg",),
        stream="out",
        inputs=(read,),
        partitions=1,
        replicas=1,
        queries=(),
        resources=Resources(100, 1 << 30),
    )


def inputs_of(count: int, read_ahead_bytes: int = 32 << 20, **options: Any) -> ReadAhead:
    settings = ConsistencySettings([range(count)], read_ahead_bytes=read_ahead_bytes)
    return ReadAhead(segment_of(count), settings, **options)


def test_inputs_whose_thread_dies_fail_the_task() -> None:
    task = inputs_of(2)
    end_thread(task.inputs._io)
    with pytest.raises(RekindleError, match="thread pulls has ended: SystemExit"):
        task.take(1, 10)
    task.inputs.close()


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
    readers = [
        PartitionReader(
            io, Subscription("s", 0, 0), lambda b: got.append(b.epoch), lambda: len(got) < 5
        )
        for _ in range(5)
    ]
    for reader in readers:
        reader.route(routes_to(f"{ADDRESS}:{server.port}"))
    eventually(lambda: len(got) >= 5 and all(r._calling is None for r in readers))
    assert any(r._client is not None for r in readers)
    for reader in readers:
        reader.close()
    gc.disable()  # it would close them, too
    try:
        io.stop()
        eventually(lambda: open_sockets() <= before)  # with the server's ends
    finally:
        gc.enable()
    server.stop()


# -- bounds ------------------------------------------------------------------------------------


def test_all_edges_share_one_budget(tmp_path: Path) -> None:
    count, rows = 16, 8 << 10  # 64 KiB an epoch
    logs = [make_log(tmp_path, n) for n in range(count)]
    made = [batch(epoch, 0, rows) for epoch in range(20)]
    for log in logs:
        for one in made:
            log.append(one)
    budget = 512 << 10
    server = StreamServer(ADDRESS, 0)
    for log in logs:
        server.serve_log(log)
    gc.collect()  # what earlier tests have left must not be freed meanwhile
    before = pa.total_allocated_bytes()

    def held() -> int:
        return int(pa.total_allocated_bytes() - before)

    task = inputs_of(count, budget)
    at = Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=1)
    task.inputs.route([Upstream(stream="s", partition=n, endpoints=(at,)) for n in range(count)])
    epoch_bytes = count * rows * 8
    eventually(lambda: held() >= epoch_bytes)
    time.sleep(0.5)  # for what would come beyond the budget
    assert held() <= 2 * budget + 3 * epoch_bytes
    taken: list[int] = []
    while len(taken) < 20:
        taken += task.take(1, 10)
        task.processed(taken[-1])
    assert taken == list(range(20))
    task.inputs.close()
    server.stop()


def test_an_epoch_too_large_for_the_task_is_refused_in_advance(
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
    task = inputs_of(16, check_size=check)
    at = Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=1)
    task.inputs.route([Upstream(stream="s", partition=n, endpoints=(at,)) for n in range(16)])
    with pytest.raises(EpochTooLarge, match="epoch 0 of the upstream partitions together has 4"):
        task.take(1, 10)
    assert pa.total_allocated_bytes() - before <= 6 << 20
    task.inputs.close()
    server.stop()


def test_a_reader_that_stops_reading_makes_nothing_wait_in_memory(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_body, "STALL_S", 1.0)
    for epoch in range(8):
        log.append(batch(epoch, rows=1 << 19))  # 4 MiB each
    before = pa.total_allocated_bytes()
    slow = [ask(server, ReadRequest("s", 0, 0, 1 << 30)) for _ in range(10)]
    eventually(lambda: len(server._http._transports) == 10)
    time.sleep(0.3)
    waiting = [t.get_write_buffer_size() for t in server._http._transports.values()]
    assert max(waiting) <= 2 * http_server.SEND_BYTES + 100
    assert pa.total_allocated_bytes() - before < 8 << 20
    assert read(server, ReadRequest("s", 0, 0, 1 << 30), 60) == list(range(8))
    eventually(lambda: not server._http._transports, 10)  # dropped, because they took nothing
    for one in slow:
        one.close()


def test_shares_held_for_slow_readers_are_bounded(
    log: OutputLog, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_body, "STALL_S", 0.7)
    server._frames._budget = MemoryBudget(6 << 20)
    for epoch in range(4):
        log.append(batch(epoch, rows=1 << 19))
    share = Share(("n",), 2, 0)
    slow = [ask(server, ReadRequest("s", 0, epoch, 1, share=share)) for epoch in range(4)]
    most = 0

    def dropped() -> bool:
        nonlocal most
        most = max(most, server._frames._budget.reserved_bytes)
        return most > 4 << 20 and not server._frames._budget.reserved_bytes

    wait_for("slow readers that are dropped", dropped, every_s=0.001)
    assert most <= 13 << 19  # with the headers of what is encoded
    for one in slow:
        one.close()
    assert read(server, ReadRequest("s", 0, 3, 1, share=share)) == [3]


def test_readers_that_are_gone_hold_no_more_than_their_shares(
    log: OutputLog, server: StreamServer
) -> None:
    """Of a large epoch, whose other shares nobody needs."""
    server._frames._budget = MemoryBudget(12 << 20)
    for epoch in range(6):
        log.append(batch(epoch, rows=1 << 19))
    share = Share(("n",), 4, 0)
    gone = [ask(server, ReadRequest("s", 0, epoch, 1, share=share)) for epoch in range(6)]
    eventually(lambda: 11 << 19 < server._frames._budget.reserved_bytes < 13 << 19)
    assert read(server, ReadRequest("s", 0, 5, 1, share=Share(("n",), 3, 0))) == [5]
    for one in gone:
        one.close()
    eventually(lambda: not server._frames._budget.reserved_bytes)


@pytest.mark.parametrize("hanging", [1, store_calls.MAX_HANGING])
def test_a_fetch_that_hangs_holds_up_spilled_reads_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: int
) -> None:
    monkeypatch.setattr(store_calls, "TIMEOUT_S", 0.3)
    hung, released = set[str](), threading.Event()

    class HangingSpill(MemorySpill):
        def get(self, name: str) -> bytes:  # type: ignore[override]
            if name in hung:
                released.wait(30)
            return super().get(name)

    log = make_log(tmp_path, budget=8000, spill=HangingSpill(), file_bytes=2000)
    for epoch in range(200):
        log.append(batch(epoch))
    spilled = {found[0]: e for e in range(199, -1, -1) if (found := log.spilled(e)) is not None}
    *first, last = list(spilled)[: hanging + 1]
    hung.update(first)
    server = StreamServer(ADDRESS, 0, IDENTITY)
    server.serve_log(log)
    address = f"{ADDRESS}:{server.port}"
    if hanging == 1:  # its reader gives up, its fetch keeps its deadline
        with pytest.raises(CallTimedOut):
            read_once(address, ReadRequest("s", 0, spilled[first.pop()], 1), 0.1, IDENTITY)
    for name in first:
        with pytest.raises(StreamUnavailable, match="has not responded within"):
            read_once(address, ReadRequest("s", 0, spilled[name], 1), 5, IDENTITY)
    if hanging == store_calls.MAX_HANGING:
        with pytest.raises(StreamUnavailable, match="calls of the store hang"):
            read_once(address, ReadRequest("s", 0, spilled[last], 1), 5, IDENTITY)
        released.set()
        eventually(lambda: not any(t.alive for t in server._frames._store_calls._hanging))
    assert read(server, ReadRequest("s", 0, spilled[last], 1), 5) == [spilled[last]]
    released.set()
    server.stop()


def test_a_slow_store_holds_up_only_those_who_need_it(tmp_path: Path) -> None:
    class SlowSpill(MemorySpill):
        go = threading.Event()

        def get(self, name: str) -> bytes:  # type: ignore[override]
            self.go.wait(30)
            return super().get(name)

    log = make_log(tmp_path, budget=8000, spill=SlowSpill(), file_bytes=2000)
    for epoch in range(60):
        log.append(batch(epoch))
    server = StreamServer(ADDRESS, 0, IDENTITY)
    server.serve_log(log)
    address, found = f"{ADDRESS}:{server.port}", list[int]()

    def read_spilled() -> None:
        response = read_once(address, ReadRequest("s", 0, 0, 1), 30, IDENTITY)
        found.extend(e.epoch for e in response.epochs)

    thread = threading.Thread(target=read_spilled)
    thread.start()
    for _ in range(3):
        assert read(server, ReadRequest("s", 0, 59, 1), 5) == [59]
    assert not found
    before = [ask(server, ReadRequest("s", 0, 0, 1)) for _ in range(5)]
    eventually(lambda: len(server._frames._store_calls) == 5)
    for gone in before:
        gone.close()
    eventually(lambda: not len(server._frames._store_calls))  # nothing waits for those who left
    SlowSpill.go.set()
    thread.join(10)
    assert found == [0]
    server.stop()
