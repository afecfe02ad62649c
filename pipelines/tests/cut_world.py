"""A world of readers of one partition of a live source, in simulated time: a store that fails,
loses responses and is cleaned, a source whose splits have gaps, readers that crash, freeze and are
cut off.

Checks what must always hold: an epoch that any reader releases has one content, in every reader and
in every replay (I1), is recorded before it is released, and begins where the one before it ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.checkpoints.garbage import CUT_AGE_S
from rekindle.connectors.cut_records import (
    CutRecord,
    Position,
    decode_cut_record,
    encode_cut_record,
)
from rekindle.connectors.live_source import Reach
from rekindle.connectors.planned_cuts import (
    CreateRecord,
    CutsOvertaken,
    FindEnds,
    ListRecords,
    PlannedCuts,
    ReadRecord,
    ReadRows,
    Request,
    WatermarkRule,
)

MAX_ROWS = 6
RULE = WatermarkRule(lateness_us=5, idle_epochs=4)


@dataclass(frozen=True)
class Content:
    """What a reader releases as an epoch."""

    rows: tuple[tuple[str, int], ...]
    watermark: int


class Log:
    """The splits of a source; some positions have no row."""

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self.ends: dict[str, int] = {"0": 0, "1": 0}
        self.rows: dict[str, list[int]] = {"0": [], "1": []}

    def append(self) -> None:
        split = self._random.choice(list(self.ends))
        for _ in range(self._random.randint(1, 4)):
            if self._random.random() < 0.7:
                self.rows[split].append(self.ends[split])
            self.ends[split] += 1

    def add_split(self) -> None:
        name = str(len(self.ends))
        self.ends[name], self.rows[name] = 0, []

    def reach(self, after: Position | None) -> Reach:
        start = {split: (after or {}).get(split, 0) for split in self.ends}
        end, left = {}, MAX_ROWS
        for split in start:
            end[split] = min(self.ends[split], start[split] + left)
            left -= end[split] - start[split]
        caught_up = frozenset(split for split in start if end[split] == self.ends[split])
        return Reach(start, end, caught_up)

    def read(self, start: Position, end: Position) -> tuple[tuple[str, int], ...]:
        return tuple((s, at) for s in end for at in self.rows[s] if start[s] <= at < end[s])

    def read_by_counting(self, start: Position, end: Position) -> tuple[tuple[str, int], ...]:
        """Wrong: as if each position had a row."""
        found = ((s, [at for at in self.rows[s] if at >= start[s]]) for s in end)
        return tuple((s, at) for s, rows in found for at in rows[: end[s] - start[s]])


def event_time(split: str, position: int) -> int:
    return position * 10 - (position % 3) * 7


@dataclass
class Reader:
    """A process; `cuts` is lost when it crashes."""

    cuts: PlannedCuts
    first: int
    next: int
    released_behind: int  # how far its clock is behind
    watermark: int | None = None
    in_flight: tuple[Request, float, object] | None = None
    frozen_until: float = 0.0
    no_store_until: float = 0.0
    no_source_until: float = 0.0


@dataclass
class World:
    seed: int
    make: Callable[[int, WatermarkRule], PlannedCuts] = PlannedCuts
    content: Callable[[World, Reader, CutRecord, int], Content] | None = None
    by_counting: bool = False
    now: float = 0.0
    committed: int = -1
    objects: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    epochs: dict[int, Content] = field(default_factory=dict)
    spans: dict[int, tuple[Position, Position]] = field(default_factory=dict)
    overtaken: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.log = Log(self.random)
        self.readers = [self._boot(-1, n) for n in range(2)]

    def _boot(self, restored: int, behind: int) -> Reader:
        return Reader(self.make(restored + 1, RULE), restored + 1, restored + 1, behind)

    # --- what happens -----------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(faults=True)
        for reader in self.readers:
            reader.frozen_until = reader.no_store_until = reader.no_source_until = 0.0
        for _ in range(1_200):
            self.step(faults=False)
        for reader in self.readers:
            assert reader.next >= int(self.now) - 30, "a reader does not get on"

    def step(self, faults: bool) -> None:
        self.now += self.random.choice((0.02, 0.1, 0.3))
        if self.random.random() < 0.2:
            self.log.append()
        if faults and self.random.random() < 0.05:
            self._fault()
        for at, reader in enumerate(self.readers):
            if reader.frozen_until <= self.now and self.random.random() < 0.8:
                try:
                    self._act(reader)
                except CutsOvertaken:
                    self.overtaken += 1
                    self.readers[at] = self._boot(self.committed, reader.released_behind)

    def _fault(self) -> None:
        reader = self.random.choice(self.readers)
        match self.random.choice(
            ("crash", "freeze", "store", "source", "commit", "clean", "split")
        ):
            case "crash":
                at = self.readers.index(reader)
                restored = self.random.randint(self.committed, max(reader.next - 1, self.committed))
                self.readers[at] = self._boot(min(restored, self._replicas_epoch()), at)
            case "freeze":
                for_s = self.random.choice((1.0, 10.0, 3 * CUT_AGE_S))
                reader.frozen_until = self.now + for_s
                if for_s > 100.0 and self.random.random() < 0.5:
                    self._pass_long(reader)
            case "store":
                reader.no_store_until = self.now + self.random.uniform(0.5, 8.0)
            case "source":
                reader.no_source_until = self.now + self.random.uniform(0.5, 8.0)
            case "commit":
                self.committed = max(self.committed, self._replicas_epoch())
            case "clean":
                self._collect_garbage()
            case "split":
                if len(self.log.ends) < 4:
                    self.log.add_split()

    def _pass_long(self, frozen: Reader) -> None:
        """One reader is frozen while the other goes on, commits, and its records become garbage."""
        others = [reader for reader in self.readers if reader is not frozen]
        for other in others:
            other.frozen_until = other.no_store_until = other.no_source_until = 0.0
        for _ in range(60):
            self.now += 0.3
            self.log.append()
            for other in others:
                try:
                    self._act(other)
                except CutsOvertaken:
                    return
        self.now += 2 * CUT_AGE_S
        for _ in range(60):
            self.now += 0.3
            for other in others:
                try:
                    self._act(other)
                except CutsOvertaken:
                    return
        self.committed = max(self.committed, max(other.next for other in others) - 1)
        self._collect_garbage()
        frozen.frozen_until = 0.0

    def _replicas_epoch(self) -> int:
        """An epoch that can be committed: some replica has released it."""
        return max(reader.next for reader in self.readers) - 1

    def _collect_garbage(self) -> None:
        before = [first for first in sorted(self.objects) if first <= self.committed]
        for first in before[:-1]:
            if self.objects[first][1] >= self.now - CUT_AGE_S:
                return
            del self.objects[first]
            if self.random.random() < 0.02:
                return

    # --- a reader ---------------------------------------------------------------------------------

    def _act(self, reader: Reader) -> None:
        if reader.in_flight is not None:
            self._respond(reader)
            return
        request = reader.cuts.next_request(int(self.now) - reader.released_behind)
        if request is None:
            return
        outcome = self._perform(reader, request)
        reader.in_flight = (request, self.now, outcome)
        if self.random.random() < 0.5:
            self._respond(reader)

    def _perform(self, reader: Reader, request: Request) -> object:
        """What the store or the source does; an error may come after the effect."""
        of_source = isinstance(request, FindEnds | ReadRows)
        failed_until = reader.no_source_until if of_source else reader.no_store_until
        fails = self.now < failed_until
        effect_lost = fails or self.random.random() < 0.05
        outcome: object = None
        if not (fails and self.random.random() < 0.8):
            match request:
                case ListRecords():
                    outcome = sorted(self.objects)
                case ReadRecord(first):
                    found = self.objects.get(first)
                    outcome = (decode_cut_record(found[0]) if found else None,)
                case FindEnds(after):
                    outcome = self.log.reach(after)
                case ReadRows(start, end):
                    if self.random.random() < 0.2:  # one epoch may not have so many bytes
                        end = {s: self.random.randint(start[s], end[s]) for s in end}
                    newest: dict[str, int] = {}
                    for split, at in self.log.read(start, end):
                        newest[split] = max(event_time(split, at), newest.get(split, -(2**60)))
                    outcome = (end, newest)
                case CreateRecord(record):
                    outcome = (self._put(record),)
        return TimeoutError() if effect_lost else outcome

    def _put(self, record: CutRecord) -> bool:
        if record.first in self.objects:
            return False
        data = encode_cut_record(record)
        self.objects[record.first] = (data, self.now)
        self.stored.add(data)
        return True

    def _respond(self, reader: Reader) -> None:
        assert reader.in_flight is not None
        (request, sent_at, outcome), reader.in_flight = reader.in_flight, None
        cuts = reader.cuts
        match request, outcome:
            case _, None | TimeoutError():
                cuts.failed(of_source=isinstance(request, FindEnds | ReadRows))
            case ListRecords(), list(firsts):
                cuts.listed(firsts, sent_at)
            case ReadRecord(), (CutRecord() | None as record,):
                cuts.record_read(record, self.now)
            case FindEnds(), Reach() as reach:
                cuts.ends_found(reach, int(self.now) - reader.released_behind)
            case ReadRows(), (dict(end), dict(newest)):
                cuts.rows_read(end, newest)
            case CreateRecord(), (bool(was_absent),):
                cuts.created(was_absent, sent_at, self.now)
        while (record := cuts.take()) is not None:
            self._release(reader, record)

    def _release(self, reader: Reader, record: CutRecord) -> None:
        assert encode_cut_record(record) in self.stored, f"{record} is released before it is stored"
        assert record.first <= reader.next <= record.last + 1, "epochs are left out"
        for epoch in range(reader.next, record.last + 1):
            content = (self.content or World.content_of)(self, reader, record, epoch)
            known = self.epochs.setdefault(epoch, content)
            assert known == content, f"epoch {epoch} is {content}, and was {known}"
        reader.next = record.last + 1
        before = self.spans.get(record.first - 1)
        if before is not None:
            same = {split: before[1].get(split, 0) for split in record.start} == record.start
            assert same, f"{record} does not begin where the record before it ended"
        self.spans[record.last] = (record.start, record.end)

    def content_of(self, reader: Reader, record: CutRecord, epoch: int) -> Content:
        read = self.log.read_by_counting if self.by_counting else self.log.read
        rows = read(record.start, record.end) if epoch == record.first else ()
        return Content(rows, record.watermark)
