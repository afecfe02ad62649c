"""Which epochs of a live source are defined, and by which records, as one reader sees it. Pure.

The reader first finds its place in the chain of records, then takes each record that is there, and
at the end of the chain proposes the next one: it asks the source how far it can be read, reads, and
creates the record if it is absent. If it was there, the proposal is dropped. Only a record that is
in the store is adopted, and only what is adopted may be released.

One request is made at a time. `next_request` says which; its result is told by the method of the
same row, or `failed` is called, after which a request is due again.

| request | result |
|---|---|
| `ListRecords` | `listed` |
| `ReadRecord` | `record_read` |
| `FindEnds` | `ends_found` |
| `ReadRows` | `rows_read` |
| `CreateRecord` | `created` |

Design: docs/decisions/0058-planned-cuts.md. Paper: FlameStream (Trofimov et al. 2019), section V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rekindle.connectors.cut_records import CutRecord, Position
from rekindle.connectors.live_source import Reach
from rekindle.errors import RekindleError
from rekindle.streams.epochs import END_OF_INPUT, NO_EPOCH

RECHECK_S = 60.0
"""A reader that for so long has not known which record is the newest lists them before it adopts
another one, which may be in the place of one that was deleted. Records are not deleted before they
are `checkpoints.garbage.CUT_AGE_S` old, a multiple of it."""


class CutsOvertaken(RekindleError):
    """The records that this reader needs are gone: it has to begin at a newer checkpoint."""


@dataclass(frozen=True, slots=True)
class ListRecords:
    """The first epochs of all records."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    first: int


@dataclass(frozen=True, slots=True)
class FindEnds:
    """How far the epoch after this position may read (`LiveSource.ends`)."""

    after: Position | None


@dataclass(frozen=True, slots=True)
class ReadRows:
    """`LiveSource.read_some`."""

    start: Position
    end: Position


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """If it is absent. After `failed` it may be there nevertheless."""

    record: CutRecord


Request = ListRecords | ReadRecord | FindEnds | ReadRows | CreateRecord


@dataclass(frozen=True, slots=True)
class WatermarkRule:
    """`idle_epochs`: after so many epochs without rows a split is idle; None: never."""

    lateness_us: int = 0
    idle_epochs: int | None = None


class PlannedCuts:
    """See the module. `next_epoch`: the first one that the reader needs. `sent_at` and `now`: when
    a request was made, and when its result arrived; monotonic, in seconds."""

    def __init__(self, next_epoch: int, rule: WatermarkRule) -> None:
        self._rule = rule
        self._needed = next_epoch
        self._newest: CutRecord | None = None  # adopted last
        self._adopted: deque[CutRecord] = deque()
        self._request: Request = ListRecords()
        # When all records that existed were known, through which one. Later ones are younger.
        self._knew_all_at = 0.0
        self._known_through = NO_EPOCH
        self._to_check: CutRecord | None = None  # perhaps in the place of one that was deleted
        self._reach: Reach | None = None  # of the proposal, and how far time had passed
        self._released_through = NO_EPOCH
        self._head = NO_EPOCH  # the newest epoch whose time has passed
        self._outage_since: int | None = None  # the head when the source failed; None: it responds
        self._outage_through = NO_EPOCH  # the head when it responded again

    @property
    def next_epoch(self) -> int:
        """The first epoch that no adopted record defines."""
        return self._needed if self._newest is None else self._newest.last + 1

    def take(self) -> CutRecord | None:
        """The next adopted record, once: it is durable, and its epochs may be released."""
        return self._adopted.popleft() if self._adopted else None

    def next_request(self, released_through: int) -> Request | None:
        """`released_through`: the newest epoch whose time has passed. None: nothing is to be done
        before the next one has."""
        self._head = released_through
        is_for_next_epoch = isinstance(self._request, FindEnds | ReadRecord)
        if is_for_next_epoch and self.next_epoch > released_through:
            return None
        return self._request

    def listed(self, firsts: Collection[int], sent_at: float) -> None:
        """Raises CutsOvertaken."""
        self._knew_all_at, self._known_through = sent_at, max(firsts, default=NO_EPOCH)
        if self._to_check is not None:
            record, self._to_check = self._to_check, None
            self._check(record, firsts)
            self._adopt(record)
            return
        before = [first for first in firsts if first <= self._needed]
        if firsts and not before:
            raise self._overtaken(self._needed)
        self._request = ReadRecord(max(before)) if before else FindEnds(None)

    def record_read(self, record: CutRecord | None, now: float) -> None:
        """None: it does not exist. Raises CutsOvertaken."""
        assert isinstance(self._request, ReadRecord)
        first = self._request.first
        if record is None and self._newest is not None and first > self._known_through:
            self._request = FindEnds(self._newest.end)
        elif record is None:
            raise self._overtaken(first)
        elif self._newest is None and now - self._knew_all_at > RECHECK_S:
            self._request = ListRecords()
        else:
            self._found(record, now)

    def ends_found(self, reach: Reach, released_through: int) -> None:
        self._reach, self._released_through = reach, released_through
        if self._outage_since is not None:
            self._outage_since, self._outage_through = None, released_through
        self._request = ReadRows(reach.start, reach.end)

    def rows_read(self, end: Position, newest_us: Mapping[str, int]) -> None:
        """`end`, `newest_us`: as of `SourceRows`."""
        assert self._reach is not None, "a proposal begins with the ends"
        before_end = {split for split, at in end.items() if at < self._reach.end[split]}
        reach = replace(self._reach, end=end, caught_up=self._reach.caught_up - before_end)
        self._request = CreateRecord(self._proposed(reach, newest_us))

    def created(self, was_absent: bool, sent_at: float, now: float) -> None:
        assert isinstance(self._request, CreateRecord)
        record = self._request.record
        if not was_absent:
            self._request = ReadRecord(record.first)
            return
        self._found(record, now)
        if self._to_check is None:
            self._knew_all_at, self._known_through = sent_at, record.first
            self._request = FindEnds(record.end)

    def failed(self, *, of_source: bool = False) -> None:
        """The request, or the reading of an adopted record's rows, has no result. `of_source`: it
        does not respond; another reader's record may be there meanwhile."""
        if of_source:
            self._outage_since = self._head
        if isinstance(self._request, FindEnds | ReadRows):
            self._request = ReadRecord(self.next_epoch) if self._newest else ListRecords()

    def _found(self, record: CutRecord, now: float) -> None:
        """The record is in the store; it may be in a deleted one's place, if for long this reader
        has not known which is the newest."""
        if now - self._knew_all_at > RECHECK_S:
            self._to_check, self._request = record, ListRecords()
        else:
            self._adopt(record)

    def _check(self, record: CutRecord, firsts: Collection[int]) -> None:
        """Records are deleted in ascending order: while the one before it is there, none was
        deleted in its place. Raises CutsOvertaken."""
        if self._newest is None:
            overtaken = any(first > record.first for first in firsts)
        else:
            overtaken = self._newest.first not in firsts
        if overtaken:
            raise self._overtaken(record.first)

    def _adopt(self, record: CutRecord) -> None:
        self._newest = record
        if self._outage_since is not None and record.last >= self._outage_since:
            self._outage_since = None  # its reader has reached the source
        if self.next_epoch < self._needed:
            raise self._overtaken(self.next_epoch)
        if record.last >= self._needed:
            self._adopted.append(record)
        self._request = ReadRecord(self.next_epoch)

    def _overtaken(self, epoch: int) -> CutsOvertaken:
        return CutsOvertaken(
            f"epoch {epoch} of the source was planned before, and the record of it is gone"
        )

    def _proposed(self, reach: Reach, newest_us: Mapping[str, int]) -> CutRecord:
        """Defines one epoch, or, if it reads all there is, all whose time has passed."""
        first = self.next_epoch
        reads_all = reach.caught_up >= reach.end.keys()
        last = max(first, self._released_through) if reads_all else first
        before = self._newest or CutRecord(first, first - 1, {}, {})
        newest = dict(before.newest_us)
        for split, time_us in newest_us.items():
            newest[split] = max(time_us, newest.get(split, time_us))
        quiet_before, epochs = before.quiet, last - first + 1
        if first <= self._outage_through:
            # While the source did not respond, nobody could write either: they are not quiet.
            quiet_before = {s: n for s, n in quiet_before.items() if s in before.idle}
            epochs = max(1, last - self._outage_through)
        quiet = {
            split: quiet_before.get(split, 0) + epochs
            for split in reach.caught_up - reach.pending
            if reach.start[split] == reach.end[split]
        }
        limit = self._rule.idle_epochs
        idle = {split for split, epochs in quiet.items() if limit is not None and epochs >= limit}
        holding = reach.end.keys() - idle
        watermark = before.watermark
        if newest and holding <= newest.keys():
            # If all are idle: the newest counts, so it does not matter which became idle first.
            held = [newest[split] for split in holding]
            held_us = min(held) if held else max(newest.values())
            watermark = max(watermark, held_us - self._rule.lateness_us)
            watermark = min(watermark, END_OF_INPUT - 1)  # an event time is no end of the source
        return CutRecord(
            first,
            last,
            reach.start,
            reach.end,
            newest,
            quiet,
            tuple(sorted(idle)),
            watermark,
            reach.identity,
        )
