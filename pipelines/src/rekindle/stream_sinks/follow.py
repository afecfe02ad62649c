"""Follows a query: a thread for each partition, each of which reads one replica at a time.

Design: docs/design/stream-sinks.md#readers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.errors import BelowFloor, RekindleError
from rekindle.stream_sinks.client import Received, ReplicaUnavailable, read_call
from rekindle.stream_sinks.ticket import Ticket

STALL_S = 5.0
"""A replica that has had nothing new for this long may lag: the next one is read."""
PAUSE_S = 0.5
QUEUED = 64

Addresses = Callable[[int], Sequence[str]]
"""The replicas of a partition, as `host:port`; asked again when one fails."""


@dataclass(frozen=True, slots=True)
class Followed:
    """`received` None: `message` says why a replica could not be read."""

    partition: int
    received: Received | None
    message: str = ""


class PartitionReader:
    """Which replica of a partition is read, and from where. `read`: one call, as `read_call`."""

    def __init__(
        self,
        partition: int,
        ticket: Ticket,
        addresses: Addresses,
        read: Callable[[str, str], Iterator[Received]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partition = partition
        self._ticket = ticket.encode()
        self._addresses = addresses
        self._read = read
        self._clock = clock
        self._choice = 0
        self._known: Sequence[str] = ()
        self._below: dict[str, BelowFloor] = {}
        self._progressed_at = clock()

    def step(self) -> Iterator[Followed]:
        """One call. Raises ReadRefused, and BelowFloor if no replica has the next epoch."""
        if not self._known:
            self._known = self._addresses(self.partition)
        if not self._known:
            yield Followed(self.partition, None, "no replica is running")
            return
        address = self._known[self._choice % len(self._known)]
        try:
            for received in self._read(address, self._ticket):
                self._ticket = received.ticket
                if received.kind != "END":
                    self._progressed_at = self._clock()
                    self._below.clear()
                    yield Followed(self.partition, received)
        except ReplicaUnavailable as error:
            self._next_replica()
            yield Followed(self.partition, None, str(error))
        except BelowFloor as error:
            self._below[address] = error
            if set(self._known) <= set(self._below):
                raise
            self._next_replica()
            yield Followed(self.partition, None, str(error))
        else:
            if self._clock() - self._progressed_at > STALL_S:
                self._next_replica()

    def _next_replica(self) -> None:
        self._choice += 1
        self._known = self._addresses(self.partition)
        self._progressed_at = self._clock()


def follow(
    ticket: Ticket, partitions: int, addresses: Addresses, token: str | None
) -> Iterator[Followed]:
    """What all partitions send, as it comes, without end. Raises ReadRefused, BelowFloor."""
    found: queue.Queue[Followed | RekindleError] = queue.Queue(QUEUED)
    for partition in range(partitions):
        reader = PartitionReader(
            partition, ticket, addresses, lambda address, text: read_call(address, text, token)
        )
        work = threading.Thread(target=_run, args=(reader, found), daemon=True)
        work.start()
    while True:
        item = found.get()
        if isinstance(item, RekindleError):
            raise item
        yield item


def _run(reader: PartitionReader, found: queue.Queue[Followed | RekindleError]) -> None:
    while True:
        failed = False
        try:
            for item in reader.step():
                failed = failed or item.received is None
                found.put(item)
        except RekindleError as error:
            found.put(error)
            return
        if failed:
            time.sleep(PAUSE_S)
