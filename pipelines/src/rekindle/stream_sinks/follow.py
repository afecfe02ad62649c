"""Follows a query: a thread for each partition, each of which reads one replica at a time.

A reader goes to a replica whose output is stable, if there is one; else, for
tentative results, it stays with one that still serves while another corrects its output.

Design: docs/design/stream-sinks.md#readers.
Paper: DPC (Balazinska et al. 2005), section 3.3.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from rekindle.errors import RekindleError
from rekindle.protocol import ConsistencyState
from rekindle.stream_sinks.client import (
    CALL_S,
    PROBE_S,
    NoLongerKept,
    ReadRefused,
    Received,
    ReplicaUnavailable,
)
from rekindle.stream_sinks.cursor import Cursor
from rekindle.stream_sinks.ticket import Ticket, parse_ticket
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.replica_choice import FAILURE_MEMORY_S, preferred_states

STALL_S = 5.0
"""A replica that has had nothing new for this long may lag: the next one is read."""
REFUSED_S = 60.0
"""A reader that was served before goes on for this long although all replicas refuse it: another
topology may have got the address of a replica that is lost, until that is replaced."""
STATE_VALID_S = 1.0
"""While the output of a replica is not stable, the others are asked for theirs at this interval."""
FAILED_S = 10.0
"""A replica that could not be read, or refused, is not asked again for this long."""
PROBE_BYTES = 1 << 20
"""Limit of a call that asks for what a replica has, besides its first epoch."""
PAUSE_S = 0.5
"""Pause after a replica could not be read."""
QUEUED = 64
"""Maximum of received items that wait for the caller."""


@dataclass(frozen=True, slots=True)
class FoundReplicas:
    """Where a partition is read: `addresses`, as `host:port`. `segment`: id of the segment that
    computes the query, in `partitions` partitions; an edit of the query may change both."""

    segment: str
    partitions: int
    addresses: Sequence[str]


Find = Callable[[int], FoundReplicas]
"""The replicas of a partition; called again when one fails. Raises ReplicaUnavailable while they
cannot be found, RekindleError if there will be none."""
Read = Callable[[str, str, float], Iterator[Received]]
"""One call of an address with a ticket and a deadline in seconds, as `client.read_call`."""


@dataclass(frozen=True, slots=True)
class Followed:
    """`received` None: `message` says why a replica could not be read."""

    partition: int
    received: Received | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a replica has said at a time: the state of its output, None if it could not be read, or
    refused. `behind`: it had nothing, although the reader has seen later epochs elsewhere."""

    at: float
    state: ConsistencyState | None
    behind: bool


class ReplicaStates:
    """What the replicas have said of their output, and which of them to read next."""

    def __init__(self, *, live: bool, clock: Callable[[], float]) -> None:
        self._preferred = preferred_states(live=live)
        self._clock = clock
        self._reports: dict[str, _Report] = {}

    def note(self, address: str, state: ConsistencyState | None, *, behind: bool = False) -> None:
        self._reports[address] = _Report(self._clock(), state, behind)

    def is_known(self, address: str) -> bool:
        report = self._reports.get(address)
        valid_s = FAILED_S if report is not None and report.state is None else STATE_VALID_S
        return report is not None and self._clock() - report.at < valid_s

    def serves(self, address: str) -> bool:
        """Whether it could be read when it was last called, not long ago."""
        report = self._reports.get(address)
        return (
            report is not None
            and report.state is not None
            and self._clock() - report.at < FAILURE_MEMORY_S
        )

    def next_of(self, addresses: Sequence[str], current: str, home: str) -> tuple[str, bool]:
        """The one to call after `current` has answered, and whether only to ask what it has.
        `home`: the one that is read."""
        if self._rank(current) == 0:
            return current, False
        unknown = (a for a in addresses if a != home and not self.is_known(a))
        if (asked := next(unknown, None)) is not None:
            return asked, True
        return min(addresses, key=lambda a: (self._rank(a), a != home)), False

    def after_failure(self, addresses: Sequence[str], failed: str) -> tuple[str, bool]:
        """The same after `failed` could not be read, or has stalled: one that serves, else one that
        has not been tried, else the one that failed first."""
        first = addresses.index(failed) + 1 if failed in addresses else 0
        others = [*addresses[first:], *addresses[: max(0, first - 1)]]
        if not others:
            return failed, False
        chosen = min(others, key=self._distance)
        return chosen, not self.serves(chosen) and self.serves(failed)

    def _distance(self, address: str) -> tuple[int, float]:
        if self.serves(address):
            return 0, self._rank(address)
        report = self._reports.get(address)
        failed_lately = report is not None and report.state is None and self.is_known(address)
        return (2, report.at) if failed_lately and report is not None else (1, 0.0)

    def _rank(self, address: str) -> int:
        report = self._reports.get(address)
        if report is None or report.state is None:
            return len(self._preferred) + 1
        return len(self._preferred) if report.behind else self._preferred.index(report.state)


class PartitionFollower:
    """Which replica of a partition is read, and from where."""

    def __init__(
        self,
        partition: int,
        ticket: Ticket,
        find: Find,
        read: Read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.partition = partition
        self._ticket = ticket.encode()
        self._asked = ticket
        self._states = ReplicaStates(live=ticket.tentative, clock=clock)
        self._find = find
        self._read = read
        self._clock = clock
        self._next = ""  # the address to call
        self._home = ""  # the one that is read; others are asked what they have
        self._probes = False  # the next call only asks
        cursor = ticket.cursor
        # The newest stable epoch that the reader has, and the newest of any kind.
        self._through = self._newest = NO_EPOCH if cursor is None else cursor.next_stable - 1
        self._found: FoundReplicas | None = None
        self._read_segment: str | None = None  # the one of which the reader has read so far
        self._refusals: dict[str, RekindleError] = {}  # since the last progress, by address
        self._progressed_at = self._served_at = clock()

    @property
    def ended(self) -> bool:
        """Whether the query has no such partition any more."""
        return self._found is not None and self.partition >= self._found.partitions

    def step(self) -> Iterator[Followed]:
        """One call. Raises NoLongerKept if no replica has the next epoch, ReadRefused if none
        serves this reader, RekindleError if there is nothing to read any more."""
        if self._found is None or not self._found.addresses:
            yield from self._look()
        if self.ended or self._found is None:
            return
        if not self._found.addresses:
            yield self._failed("no replica is running")
            return
        addresses = self._found.addresses
        address = self._next if self._next in addresses else addresses[0]
        probes, self._probes = self._probes, False
        if not probes:
            self._home = address
        asked = _probe(self._ticket) if probes else self._ticket
        before = self._through
        try:
            for received in self._read(address, asked, PROBE_S if probes else CALL_S):
                following = received.ticket
                self._ticket = _as_first(following, self._asked) if probes else following
                self._read_segment, self._served_at = self._found.segment, self._clock()
                self._note(address, received, before)
                if received.kind != "END":
                    yield Followed(self.partition, received)
        except ReplicaUnavailable as error:
            self._states.note(address, None)
            self._refusals.pop(address, None)
            yield self._failed(str(error))
            yield from self._next_replica(address)
        except (NoLongerKept, ReadRefused) as error:
            self._states.note(address, None)
            self._refusals[address] = error
            yield from self._refused(error, address)
        else:
            if self._clock() - self._progressed_at > STALL_S:
                yield from self._next_replica(address)
            else:
                self._next, self._probes = self._states.next_of(addresses, address, self._home)

    def _note(self, address: str, received: Received, before: int) -> None:
        """`before`: the newest stable epoch before this call."""
        if received.kind in ("STABLE", "END"):
            self._through = max(self._through, received.epoch)
        if received.kind != "END":
            self._newest = max(self._newest, received.epoch)
        has_new = received.kind != "END" or received.epoch > before
        if has_new:
            self._progressed_at = self._clock()
            self._refusals.clear()
        behind = not has_new and self._newest > before
        self._states.note(address, received.state, behind=behind)

    def _failed(self, message: str) -> Followed:
        return Followed(self.partition, None, message)

    def _next_replica(self, failed: str) -> Iterator[Followed]:
        self._progressed_at = self._clock()
        yield from self._look()
        if self._found is not None and self._found.addresses:
            addresses = self._found.addresses
            self._next, self._probes = self._states.after_failure(addresses, failed)

    def _look(self) -> Iterator[Followed]:
        """Find the replicas again; if that is not possible now, those found before stay."""
        try:
            self._found = self._find(self.partition)
        except ReplicaUnavailable as error:
            yield self._failed(str(error))

    def _refused(self, error: RekindleError, address: str) -> Iterator[Followed]:
        """Ends the reader only if all replicas that run now have refused it: the one that refused
        it may be another topology's, at the address of a replica that is lost."""
        looked = list(self._next_replica(address))
        addresses = self._found.addresses if self._found is not None else ()
        if not looked and addresses and set(addresses) <= set(self._refusals):
            if self._is_final(addresses):
                raise self._reason(addresses)
            if (restart := self._restart(addresses)) is not None:
                yield from restart
                return
        yield self._failed(str(error))
        yield from looked

    def _is_final(self, addresses: Sequence[str]) -> bool:
        if all(isinstance(self._refusals[a], NoLongerKept) for a in addresses):
            return not self._is_edited
        was_served = self._read_segment is not None
        return not was_served or self._clock() - self._served_at > REFUSED_S

    def _reason(self, addresses: Sequence[str]) -> RekindleError:
        """The refusal that tells the user most: the one with the lowest kept epoch, if any has
        one."""
        errors = [self._refusals[address] for address in addresses]
        below = [error for error in errors if isinstance(error, NoLongerKept)]
        return min(below, key=lambda error: error.oldest, default=errors[0])

    @property
    def _is_edited(self) -> bool:
        """Whether the replicas have another definition of the query than what has been read."""
        found, read = self._found, self._read_segment
        return found is not None and read is not None and found.segment != read

    def _restart(self, addresses: Sequence[str]) -> Iterator[Followed] | None:
        """Where the edited query begins; None if that is unknown."""
        errors = [self._refusals[address] for address in addresses]
        oldest = [error.oldest for error in errors if isinstance(error, NoLongerKept)]
        return self._begin_again(min(oldest)) if self._is_edited and oldest else None

    def _begin_again(self, oldest: int) -> Iterator[Followed]:
        assert self._found is not None
        ticket = parse_ticket(self._ticket.encode())
        cursor = ticket.cursor or Cursor(oldest)
        undone = None
        if cursor.held is not None:
            undone = cursor.held[0]
            _, cursor = cursor.undo(undone)
        ticket = replace(ticket, cursor=replace(cursor, next_stable=oldest), at=None)
        self._ticket, self._read_segment = ticket.encode(), self._found.segment
        self._refusals.clear()
        yield self._failed(f"the query was edited, and begins with epoch {oldest} now")
        if undone is not None:
            yield Followed(self.partition, Received("UNDO", undone, pa.table({}), self._ticket))


def _probe(ticket: str) -> str:
    """Asks for a little of what is there, at once."""
    asked = replace(parse_ticket(ticket.encode()), wait_s=0.0, max_bytes=PROBE_BYTES)
    return asked.encode()


def _as_first(ticket: str, first: Ticket) -> str:
    """What follows, asked for as in the first ticket."""
    found = parse_ticket(ticket.encode())
    return replace(found, wait_s=first.wait_s, max_bytes=first.max_bytes).encode()


def follow(ticket: Ticket, find: Find, read: Read) -> Iterator[Followed]:
    """What all partitions send, as it comes, without end. Raises ReadRefused, NoLongerKept, and
    what else a partition's thread has met."""
    readers = _Readers(ticket, find, read)
    try:
        yield from readers.follow()
    finally:
        readers.stopping.set()


class _Readers:
    """One thread for each partition that a query has."""

    def __init__(self, ticket: Ticket, find: Find, read: Read) -> None:
        self.stopping = threading.Event()
        self._ticket = ticket
        self._find = find
        self._read = read
        self._found: queue.Queue[Followed | Exception] = queue.Queue(QUEUED)
        self._lock = threading.Lock()
        self._partitions: set[int] = set()
        self._segment: str | None = None  # that of the first replicas found

    def follow(self) -> Iterator[Followed]:
        self._start_first(1, self._ticket)
        while True:
            try:
                # Not for ever: a signal that a thread of gRPC takes, or that comes just before the
                # wait, is handled after it.
                item = self._found.get(timeout=PAUSE_S)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                raise item
            yield item

    def _start_first(self, partitions: int, ticket: Ticket) -> None:
        with self._lock:
            missing = set(range(partitions)) - self._partitions
            self._partitions |= missing
        for partition in sorted(missing):
            reader = PartitionFollower(partition, ticket, self._find_all, self._read)
            threading.Thread(target=self._run, args=(reader,), daemon=True).start()

    def _find_all(self, partition: int) -> FoundReplicas:
        """As `find`; starts the threads of partitions that have none."""
        found = self._find(partition)
        with self._lock:
            self._segment = self._segment or found.segment
            is_first = found.segment == self._segment
        # Partitions that an edit has added begin with what they keep.
        self._start_first(
            found.partitions, self._ticket if is_first else replace(self._ticket, cursor=None)
        )
        return found

    def _run(self, reader: PartitionFollower) -> None:
        try:
            while not reader.ended and not self.stopping.is_set():
                failed = False
                for item in reader.step():
                    failed = failed or item.received is None
                    self._put(item)
                if failed:
                    self.stopping.wait(PAUSE_S)
        except Exception as error:
            self._put(error)
        finally:
            with self._lock:
                self._partitions.discard(reader.partition)

    def _put(self, item: Followed | Exception) -> None:
        while not self.stopping.is_set():
            try:
                self._found.put(item, timeout=PAUSE_S)
                return
            except queue.Full:
                continue
