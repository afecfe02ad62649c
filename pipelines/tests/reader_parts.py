"""Fake replicas, a client for them, and a reader that collects its epochs."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pyarrow as pa

from rekindle.identity import Identity
from rekindle.protocol import Endpoint
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.wire import ReadRequest, ReadResponse, StreamProgress, StreamUnavailable
from rekindle_testing.waiting import eventually

A, B, C = "10.0.0.1:8815", "10.0.0.2:8815", "10.0.0.3:8815"


def routes_to(
    *addresses: str, suspected: str = "", lagging: tuple[str, ...] = (), incarnation: int = 1
) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(
            address=a,
            replica=i,
            incarnation=incarnation,
            suspected=a == suspected,
            lagging=a in lagging,
        )
        for i, a in enumerate(addresses)
    )


class FakeReplicas:
    """Logs by address; an address may be silent (until released) or dead."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {A: -1, B: -1}
        self.silent: dict[str, threading.Event] = {}
        self.dead: set[str] = set()

    def connect(self, address: str) -> FakeClient:
        return FakeClient(self, address)


class FakeClient:
    def __init__(self, replicas: FakeReplicas, address: str) -> None:
        self.replicas, self.address = replicas, address

    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        if self.address in self.replicas.silent:
            silent, until = self.replicas.silent[self.address], time.monotonic() + timeout_s
            while not silent.is_set() and time.monotonic() < until:
                await asyncio.sleep(0.01)
            raise StreamUnavailable("deadline")
        if self.address in self.replicas.dead:
            raise StreamUnavailable("refused")
        last = self.replicas.last[self.address]
        if last < request.from_epoch:
            await asyncio.sleep(0.005)
        rows = pa.table({"n": [1]})
        batches = (EpochBatch("s", 0, e, 0, rows, "d") for e in range(request.from_epoch, last + 1))
        return ReadResponse(StreamProgress(base=0, last=last, head=last), tuple(batches))

    async def close(self) -> None:
        pass


class Harness:
    def __init__(self, buffered_epochs: int = 1000) -> None:
        self.replicas, self.got, self.buffered_epochs = FakeReplicas(), list[int](), buffered_epochs
        self.io = started_io()
        self.reader = PartitionReader(
            self.io,
            Subscription("s", 0, 0),
            lambda b: self.got.append(b.epoch),
            lambda: len(self.got) < self.buffered_epochs,
            connect=self.replicas.connect,
        )

    def expect(self, count: int, within_s: float) -> None:
        eventually(lambda: len(self.got) >= count, within_s)
        assert self.got == list(range(count))

    def close(self) -> None:
        self.reader.close()
        self.io.stop()


def started_io() -> IoThread:
    io = IoThread("pulls")
    io.start()
    return io


def read_once(
    address: str,
    request: ReadRequest,
    timeout_s: float,
    identity: Identity | None = None,
    **options: Any,
) -> ReadResponse:
    """One call, on a connection of its own."""

    async def read() -> ReadResponse:
        client = StreamClient(address, identity, **options)
        try:
            return await client.read(request, timeout_s)
        finally:
            await client.close()

    return asyncio.run(read())
