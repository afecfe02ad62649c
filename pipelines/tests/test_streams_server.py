"""Epochs between tasks: bounded calls, shares by key, and errors that say what to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reader_parts import read_once

from rekindle.errors import BelowFloor
from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import Shares, SharesCache, group_by_share
from rekindle.streams import response_body
from rekindle.streams import server as server_module
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import CallThread
from rekindle.streams.log import OutputLog
from rekindle.streams.response_frames import Frames, ResponseFrames
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import (
    CallTimedOut,
    ReadRequest,
    ReadResponse,
    StreamProgress,
    StreamUnavailable,
)
from rekindle.table_memory import object_bytes

pytestmark = pytest.mark.process

ADDRESS = "127.0.41.1"
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


def batch(epoch: int, rows: int = 6) -> EpochBatch:
    table = pa.table(
        {"k": [f"k{i % 5}" for i in range(rows)], "n": list(range(rows))}, schema=SCHEMA
    )
    return EpochBatch("s", 0, epoch, epoch * 10, table, digest_table(table))


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    return OutputLog(tmp_path, "s", 0, SCHEMA, file_bytes=2000)


@pytest.fixture
def server(log: OutputLog) -> Iterator[StreamServer]:
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log, head=lambda: 41)
    yield server
    server.stop()


def read(server: StreamServer, request: ReadRequest, timeout_s: float = 5) -> ReadResponse:
    return read_once(f"{ADDRESS}:{server.port}", request, timeout_s)


def test_epochs_and_their_watermarks_are_transferred(log: OutputLog, server: StreamServer) -> None:
    for epoch in range(3):
        log.append(batch(epoch, rows=0 if epoch == 1 else 6))
    response = read(server, ReadRequest("s", 0, 0, 1 << 20))
    assert (response.progress.base, response.progress.last, response.progress.head) == (
        0,
        2,
        41,
    )
    assert [(b.epoch, b.watermark, b.rows.num_rows) for b in response.epochs] == [
        (0, 0, 6),
        (1, 10, 0),
        (2, 20, 6),
    ]
    assert response.epochs[0].rows.equals(batch(0).rows)
    assert all(digest_table(b.rows) == b.digest for b in response.epochs)


def test_a_call_waits_for_its_epoch_within_a_limit(log: OutputLog, server: StreamServer) -> None:
    started = time.monotonic()
    assert read(server, ReadRequest("s", 0, 0, 1, wait_s=0.1)).epochs == ()
    assert 0.1 <= time.monotonic() - started < 2
    threading.Timer(0.1, lambda: log.append(batch(0))).start()
    assert len(read(server, ReadRequest("s", 0, 0, 1, wait_s=1)).epochs) == 1


def test_shares_are_disjoint_complete_and_in_order(log: OutputLog, server: StreamServer) -> None:
    log.append(batch(0, rows=50))
    shares = [
        read(server, ReadRequest("s", 0, 0, 1 << 20, share=Share(("k",), 3, i))).epochs[0]
        for i in range(3)
    ]
    numbers = [s.rows["n"].to_pylist() for s in shares]
    assert sorted(n for share in numbers for n in share) == list(range(50))
    assert all(ns == sorted(ns) for ns in numbers)
    keys = [set(s.rows["k"].to_pylist()) for s in shares]
    assert not any(keys[i] & keys[j] for i in range(3) for j in range(i))
    assert {s.digest for s in shares} == {batch(0, rows=50).digest}


def test_an_epoch_below_the_floor_is_an_error(log: OutputLog, server: StreamServer) -> None:
    for epoch in range(9):
        log.append(batch(epoch))
    log.truncate(6)
    with pytest.raises(BelowFloor, match=f"begins at {log.base}"):
        read(server, ReadRequest("s", 0, 0, 1))


def test_an_unknown_stream_is_an_error(server: StreamServer) -> None:
    with pytest.raises(StreamUnavailable, match="does not serve stream other/0"):
        read(server, ReadRequest("other", 0, 0, 1))


def test_an_absent_server_is_an_error_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(StreamUnavailable):
        read_once(f"{ADDRESS}:1", ReadRequest("s", 0, 0, 1), 10)
    assert time.monotonic() - started < 5


class SlowFrames(ResponseFrames):
    """The first `quick` epochs of a response at once, the others when released."""

    def __init__(self, quick: int) -> None:
        super().__init__()
        self.quick, self.go, self.waits = quick, threading.Event(), CallThread("waits")

    async def read(self, *args: Any) -> AsyncGenerator[Frames]:
        number = 0
        async for frames in super().read(*args):
            for frame in frames:
                if number >= self.quick:
                    await self.waits.run(lambda: self.go.wait(10))
                yield [frame]
                number += 1


@pytest.mark.parametrize("received", [0, 2])
def test_epochs_received_before_the_deadline_are_kept(
    log: OutputLog, received: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_body, "SEND_BYTES", 1)  # each frame at once
    for epoch in range(3):
        log.append(batch(epoch))
    server = StreamServer(ADDRESS, 0)
    server._frames = slow = SlowFrames(received)
    server.serve_log(log)
    if received:
        response = read(server, ReadRequest("s", 0, 0, 1 << 20), 1.5)
        assert [b.rows for b in response.epochs] == [batch(0).rows, batch(1).rows]
    else:
        with pytest.raises(CallTimedOut, match="no complete epoch within"):
            read(server, ReadRequest("s", 0, 0, 1 << 20), 1.5)
    slow.go.set()
    server.stop()


def test_a_response_has_no_more_than_was_requested(log: OutputLog, server: StreamServer) -> None:
    for epoch in range(9):
        log.append(batch(epoch, rows=50))
    payload = log.read_encoded(0, 0)[0].payload
    assert payload is not None
    cost = payload.size + object_bytes(2)  # of two columns
    shared = {"share": Share(("k",), 2, 0)}
    for max_bytes, epochs in ((0, 1), (1, 1), (2 * cost - 1, 1), (2 * cost, 2), (1 << 20, 9)):
        assert len(read(server, ReadRequest("s", 0, 0, max_bytes)).epochs) == epochs
    assert 1 <= len(read(server, ReadRequest("s", 0, 0, 1, **shared)).epochs) <= 2  # type: ignore[arg-type]


def test_stopping_wakes_waiting_calls(log: OutputLog, monkeypatch: pytest.MonkeyPatch) -> None:
    # So long that no call ends by itself within the test.
    monkeypatch.setattr(server_module, "MAX_WAIT_S", 20.0)
    server = StreamServer(ADDRESS, 0)
    server.serve_log(log)
    done = threading.Event()

    def wait() -> None:
        with contextlib.suppress(StreamUnavailable):
            read(server, ReadRequest("s", 0, 0, 1, wait_s=20), 60)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
    stopped_at = time.monotonic()
    server.stop()
    assert done.wait(10)
    assert time.monotonic() - stopped_at < 10, "stopping waited for the call's own end"


def test_an_epoch_is_divided_once_for_all_consumers() -> None:
    rows, calls = batch(0, rows=50).rows, []
    cache = SharesCache(max_bytes=10 * group_by_share(rows, ["k"], 2).nbytes)

    def compute() -> Shares:
        calls.append(1)
        return group_by_share(rows, ["k"], 2)

    for _ in range(3):
        cache.get("one", compute)
    assert len(calls) == 1
    for other in range(20):
        cache.get(other, compute)
    cache.get("one", compute)
    assert len(calls) == 22


def test_shares_over_the_budget_still_serve_all_consumers() -> None:
    rows, calls = batch(0, rows=50).rows, []
    cache = SharesCache(max_bytes=1)

    def compute() -> Shares:
        calls.append(1)
        return group_by_share(rows, ["k"], 2)

    for _ in range(2):
        cache.get("large", compute)
    assert len(calls) == 1
    cache.get("next", compute)
    assert len(cache) == 1


def test_epochs_without_rows_are_not_divided(log: OutputLog, server: StreamServer) -> None:
    for epoch in range(5):
        log.append(batch(epoch, rows=0))
    response = read(server, ReadRequest("s", 0, 0, 1 << 20, share=Share(("k",), 3, 1)))
    assert [b.rows.num_rows for b in response.epochs] == [0] * 5
    assert response.epochs[0].rows.schema == SCHEMA
    assert not len(server._frames._shares_cache)


def test_progress_keeps_its_names_on_the_wire() -> None:
    header = {"base": 1, "last": 2, "released": 3}
    assert StreamProgress.of(header).header() == header
