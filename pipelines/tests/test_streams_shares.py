"""Many readers of shares at one server: what is divided once, and what others notice of it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from log_parts import MemorySpill
from reader_parts import read_once, routes_to, started_io

from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import SharesCache, group_by_share
from rekindle.streams import response_body, response_frames
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.memory_budget import MemoryBudget
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import ReadRequest
from rekindle.table_memory import memory_bytes
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

ADDRESS = "127.0.44.1"
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
BEAT_S = 0.005


def filled(directory: Path, epochs: int, rows: int, **options: Any) -> OutputLog:
    log = OutputLog(directory, "s", 0, SCHEMA, **options)
    table = pa.table({"k": np.arange(rows), "v": np.arange(rows)}, schema=SCHEMA)
    digest = digest_table(table)
    for epoch in range(epochs):
        log.append(EpochBatch("s", 0, epoch, epoch, table, digest))
    return log


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An element for each epoch that the server divides."""
    computed: list[int] = []

    def counted(rows: pa.Table, *arguments: Any) -> Any:
        computed.append(rows.num_rows)
        return group_by_share(rows, *arguments)

    monkeypatch.setattr(response_frames, "group_by_share", counted)
    return computed


@pytest.fixture
def server() -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0)
    yield server
    server.stop()


class Heartbeat:
    """The most CPU time of a server's loop in which nobody else had a turn; of the CPU, so that
    other processes of a machine do not count."""

    def __init__(self, server: StreamServer) -> None:
        self.longest_s = 0.0
        self._loop = server._io.loop
        server._io.call(self._beat, math.inf)

    def _beat(self, before: float) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - before)
        self._loop.call_later(BEAT_S, self._beat, now)


class Consumers:
    """Readers of all shares of one partition."""

    def __init__(self, server: StreamServer, count: int) -> None:
        self.got: list[list[int]] = [[] for _ in range(count)]
        self.rows = [0] * count
        self.io = started_io()
        self.readers = [self._reader(index, count) for index in range(count)]
        for reader in self.readers:
            reader.route(routes_to(f"{ADDRESS}:{server.port}"))

    def _reader(self, index: int, count: int) -> PartitionReader:
        def deliver(batch: EpochBatch) -> None:
            self.got[index].append(batch.epoch)
            self.rows[index] += batch.rows.num_rows

        share = Share(("k",), count, index)
        return PartitionReader(self.io, Subscription("s", 0, 0, share), deliver, lambda: True)

    def wait(self, epochs: int, within_s: float) -> None:
        def arrived() -> bool:
            return all(len(got) >= epochs for got in self.got)

        try:
            eventually(arrived, within_s)
        finally:
            for reader in self.readers:
                reader.close()
            self.io.stop()
        assert all(got == list(range(epochs)) for got in self.got)


@pytest.mark.parametrize(
    ("consumers", "epochs", "rows"), [(32, 100, 1), (8, 50, 2000), (8, 4, 100_000)]
)
def test_consumers_that_catch_up_divide_each_epoch_once(
    tmp_path: Path,
    server: StreamServer,
    divisions: list[int],
    consumers: int,
    epochs: int,
    rows: int,
) -> None:
    server.serve_log(filled(tmp_path, epochs, rows))
    heartbeat = Heartbeat(server)
    readers = Consumers(server, consumers)
    readers.wait(epochs, 60)
    assert sum(readers.rows) == rows * epochs
    assert len(divisions) == epochs
    assert heartbeat.longest_s < 0.5


def test_epochs_beyond_the_cache_are_hardly_divided_again(
    tmp_path: Path, server: StreamServer, divisions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equally fast consumers stay near each other, since a call reads a part of the cache."""
    monkeypatch.setattr(server._frames, "_call_shares_bytes", 256 << 10)
    server._frames._shares_cache = SharesCache(1 << 20)
    server.serve_log(filled(tmp_path, 75, 2000))  # 2.7 MB of shares
    Consumers(server, 8).wait(75, 60)
    assert 75 <= len(divisions) <= 113


def test_a_call_for_a_share_divides_no_more_than_the_cache_keeps(
    tmp_path: Path, server: StreamServer, divisions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._frames, "_call_shares_bytes", 64 << 10)
    log = filled(tmp_path, 60, 1000)
    server.serve_log(log)
    request = ReadRequest("s", 0, 0, 8 << 20, share=Share(("k",), 64, 0))
    response = read_once(f"{ADDRESS}:{server.port}", request, 10)
    assert 1 <= len(response.epochs) == len(divisions) <= 4
    assert sum(16 * rows for rows in divisions) <= (64 << 10) + 16_000


def test_an_epoch_of_few_rows_costs_the_same_for_any_number_of_shares() -> None:
    rows = pa.table({"k": [1], "v": [1]}, schema=SCHEMA)
    assert group_by_share(rows, ["k"], 64).nbytes <= group_by_share(rows, ["k"], 2).nbytes + 62 * 8
    cache = SharesCache(1 << 20)
    for epoch in range(1000):
        cache.get(epoch, lambda: group_by_share(rows, ["k"], 64))
    assert 100 <= len(cache) <= (1 << 20) // 4096


def test_whole_epochs_are_sent_before_others_are_ready(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(rows: pa.Table, *arguments: Any) -> Any:
        time.sleep(0.1)
        return group_by_share(rows, *arguments)

    monkeypatch.setattr(response_frames, "group_by_share", slow)
    server.serve_log(filled(tmp_path, 30, 1))
    request = ReadRequest("s", 0, 0, 8 << 20, share=Share(("k",), 2, 0))
    response = read_once(f"{ADDRESS}:{server.port}", request, 0.75)
    assert [e.epoch for e in response.epochs] == list(range(len(response.epochs)))
    assert 2 <= len(response.epochs) < 10


def test_epochs_that_are_ready_do_not_wait_for_one_that_takes_long(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(rows: pa.Table, *arguments: Any) -> Any:
        time.sleep(1.2 if rows.num_rows > 1 else 0)
        return group_by_share(rows, *arguments)

    monkeypatch.setattr(response_frames, "group_by_share", slow)
    log = filled(tmp_path, 3, 1)
    large = pa.table({"k": np.arange(20_000), "v": np.arange(20_000)}, schema=SCHEMA)
    log.append(EpochBatch("s", 0, 3, 3, large, digest_table(large)))
    server.serve_log(log)
    request = ReadRequest("s", 0, 0, 8 << 20, share=Share(("k",), 2, 0))
    response = read_once(f"{ADDRESS}:{server.port}", request, 0.6)
    assert [e.epoch for e in response.epochs] == [0, 1, 2]


def test_small_epochs_are_read_once_however_short_the_turns(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_frames, "ROUND_S", 0)  # each turn divides one epoch
    log = filled(tmp_path, 100, 1)
    server.serve_log(log)
    reads, read_local = [], log.read_local

    def counted(*arguments: Any, **options: Any) -> Any:
        reads.append(arguments)
        return read_local(*arguments, **options)

    monkeypatch.setattr(log, "read_local", counted)
    request = ReadRequest("s", 0, 0, 8 << 20, share=Share(("k",), 2, 0))
    response = read_once(f"{ADDRESS}:{server.port}", request, 5)
    assert [e.epoch for e in response.epochs] == list(range(100))
    assert len(reads) == 1


@pytest.mark.parametrize("share", [None, Share(("k",), 1, 0)])
def test_a_response_takes_no_more_of_its_reader_than_was_requested(
    tmp_path: Path, server: StreamServer, share: Share | None
) -> None:
    """64 readers at once request little each. Epochs of few rows take more memory for their objects
    than for the rows."""
    server.serve_log(filled(tmp_path, 256, 1))
    request = ReadRequest("s", 0, 0, 64 << 10, share=share)
    epochs = read_once(f"{ADDRESS}:{server.port}", request, 5).epochs
    one = memory_bytes(epochs[0].rows)
    assert (32 << 10) <= sum(memory_bytes(e.rows) for e in epochs) <= (64 << 10) + one


def test_a_large_epoch_on_its_way_leaves_the_loop_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To a reader that takes everything at once."""
    monkeypatch.setattr(response_body, "SLICE_S", 0)
    turns, written = [0], list[int]()

    class Response:
        async def write(self, data: memoryview) -> None:
            written.append(len(data))

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def play() -> None:
        body = response_body.ResponseBody(None)  # type: ignore[arg-type]
        body._response = Response()  # type: ignore[assignment]
        task = asyncio.create_task(others())
        await body.add(b"header", pa.py_buffer(bytes(8 << 20)))
        task.cancel()

    asyncio.run(play())
    assert sum(written) == 6 + (8 << 20)
    assert turns[0] >= 60


def test_a_call_that_was_abandoned_divides_no_more(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def slow(rows: pa.Table, *arguments: Any) -> Any:
        computed.append(1)
        time.sleep(0.05)
        return group_by_share(rows, *arguments)

    monkeypatch.setattr(response_frames, "group_by_share", slow)
    server.serve_log(filled(tmp_path, 200, 1))
    request = ReadRequest("s", 0, 0, 8 << 20, share=Share(("k",), 2, 0))
    read_once(f"{ADDRESS}:{server.port}", request, 0.5)
    eventually(lambda: not server._http._transports, 5)
    time.sleep(0.1)
    done = len(computed)
    time.sleep(0.3)
    assert len(computed) == done < 50


def test_another_reader_hardly_notices_those_of_shares(
    tmp_path: Path, server: StreamServer
) -> None:
    server.serve_log(filled(tmp_path, 80, 2000))
    consumers = Consumers(server, 8)
    took = []
    for _ in range(10):
        began = time.monotonic()
        assert read_once(f"{ADDRESS}:{server.port}", ReadRequest("s", 0, 79, 1), 1.5).epochs
        took.append(time.monotonic() - began)
    consumers.wait(80, 60)
    assert sorted(took)[5] < 0.5


# -- spilled files and large epochs ------------------------------------------------------------


class CountedSpill(MemorySpill):
    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def get(self, name: str) -> bytes:  # type: ignore[override]
        self.fetched.append(name)
        return super().get(name)


@pytest.mark.parametrize("share", [None, Share(("k",), 2, 0)])
def test_a_spilled_file_is_fetched_once_for_readers_at_different_places(
    tmp_path: Path, server: StreamServer, share: Share | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_frames, "PORTION_BYTES", 32 << 10)
    spill = CountedSpill()
    log = filled(tmp_path, 120, 1000, budget=1 << 20, spill=spill, file_bytes=256 << 10)
    server.serve_log(log)
    files, first_local = len(spill), next(e for e in range(120) if log.spilled(e) is None)
    assert files >= 5
    places = (0, first_local // 2)
    found: list[list[int]] = [[], []]

    def read_on(number: int) -> None:
        epoch = places[number]
        while len(found[number]) < first_local // 2:
            request = ReadRequest("s", 0, epoch, 64 << 10, share=share)
            got = read_once(f"{ADDRESS}:{server.port}", request, 20).epochs
            found[number] += [e.epoch for e in got]
            epoch = found[number][-1] + 1

    threads = [threading.Thread(target=read_on, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place, epochs in zip(places, found, strict=True):
        assert epochs == list(range(place, place + len(epochs)))
    assert len(spill.fetched) <= files


def test_a_file_that_was_fetched_does_not_wait_for_the_store(
    tmp_path: Path, server: StreamServer
) -> None:
    go, address = threading.Event(), f"{ADDRESS}:{server.port}"
    go.set()

    class SlowSpill(MemorySpill):
        def get(self, name: str) -> bytes:  # type: ignore[override]
            go.wait(20)
            return super().get(name)

    log = filled(tmp_path, 60, 1000, budget=256 << 10, spill=SlowSpill(), file_bytes=64 << 10)
    server.serve_log(log)
    assert read_once(address, ReadRequest("s", 0, 0, 1), 10).epochs
    go.clear()
    other = threading.Thread(
        target=lambda: read_once(address, ReadRequest("s", 0, 20, 1), 30).epochs
    )
    other.start()
    assert read_once(address, ReadRequest("s", 0, 1, 1), 5).epochs
    assert other.is_alive()
    go.set()
    other.join(20)


def test_a_call_from_a_spilled_file_into_a_local_one_holds_memory_once(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a spilled file into a local one, with memory for one of them."""
    monkeypatch.setattr(response_frames, "BATCH_BYTES", 1 << 10)
    log = filled(tmp_path, 60, 2000, budget=1 << 20, spill=MemorySpill(), file_bytes=256 << 10)
    server._frames._budget = MemoryBudget(1)
    server.serve_log(log)
    first_local = next(e for e in range(60) if log.spilled(e) is None)
    found: list[list[int]] = [[], []]

    def read_across(number: int) -> None:
        request = ReadRequest("s", 0, first_local - 2, 8 << 20, share=Share(("k",), 2, number))
        found[number] = [e.epoch for e in read_once(f"{ADDRESS}:{server.port}", request, 10).epochs]

    threads = [threading.Thread(target=read_across, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [list(range(first_local - 2, 60))] * 2
    assert not server._frames._budget.reserved_bytes


def test_an_epoch_that_is_spilled_meanwhile_is_fetched_by_the_thread_of_the_store(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    class NamedSpill(MemorySpill):
        def get(self, name: str) -> bytes:  # type: ignore[override]
            names.append(threading.current_thread().name)
            return super().get(name)

    log = filled(tmp_path, 30, 2000, budget=1 << 18, spill=NamedSpill(), file_bytes=64 << 10)
    server.serve_log(log)
    asked, real = [0], log.spilled

    def late(epoch: int) -> tuple[str, int] | None:
        asked[0] += 1
        return None if asked[0] == 1 else real(epoch)

    monkeypatch.setattr(log, "spilled", late)
    request = ReadRequest("s", 0, 0, 1, share=Share(("k",), 2, 0))
    assert [e.epoch for e in read_once(f"{ADDRESS}:{server.port}", request, 10).epochs] == [0]
    assert set(names) == {"stream-store"}


def test_a_large_epoch_delays_no_others(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_frames, "LARGE_BYTES", 1 << 20)
    go = threading.Event()

    def slow(rows: pa.Table, *arguments: Any) -> Any:
        if rows.num_rows > 60_000:
            go.wait(20)
        return group_by_share(rows, *arguments)

    monkeypatch.setattr(response_frames, "group_by_share", slow)
    log = filled(tmp_path, 2, 100_000)
    table = pa.table({"k": np.arange(20_000), "v": np.arange(20_000)}, schema=SCHEMA)
    log.append(EpochBatch("s", 0, 2, 2, table, digest_table(table)))
    server.serve_log(log)
    address, share = f"{ADDRESS}:{server.port}", Share(("k",), 2, 0)
    found: list[int] = []

    def read_large() -> None:
        request = ReadRequest("s", 0, 0, 1, share=share)
        found.extend(e.epoch for e in read_once(address, request, 30).epochs)

    thread = threading.Thread(target=read_large)
    thread.start()
    assert read_once(address, ReadRequest("s", 0, 2, 1, share=share), 10).epochs
    assert not found
    go.set()
    thread.join(20)
    assert found == [0]


def test_old_epochs_are_not_read_in_the_loop(
    tmp_path: Path, server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages may have to be read from a slow disk."""
    log = filled(tmp_path, 40, 1000, file_bytes=64 << 10)
    server.serve_log(log)
    names: dict[int, str] = {}
    real = log.read_local

    def named(epoch: int, *arguments: Any, **options: Any) -> Any:
        names[epoch] = threading.current_thread().name
        return real(epoch, *arguments, **options)

    monkeypatch.setattr(log, "read_local", named)
    for epoch in (0, 39):
        assert read_once(f"{ADDRESS}:{server.port}", ReadRequest("s", 0, epoch, 1), 10).epochs
    assert names == {0: "stream-rows", 39: "stream-server"}
