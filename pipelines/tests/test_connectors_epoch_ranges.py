"""No epoch of a sink is written by two definitions, whatever fails, pauses or continues."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_world import World

from rekindle.connectors.epoch_ranges import EPOCH_RANGES_FOLDER, KEPT, Definition, EpochRanges
from rekindle.connectors.files_sink import FilesSink, parse_name
from rekindle.engine.model import State
from rekindle.errors import SinkRefused
from rekindle.objects import LocalObjects, ObjectInfo, Retry, to_json
from rekindle.protocol import SinkAssignment
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.task.state import TaskState
from rekindle.topology.kinds.files import FilesSinkSpec
from rekindle.topology.spec import SinkSpec

SCHEMA = pa.schema([("by", pa.string())])
CHECKPOINT_INTERVAL_EPOCHS = 4


def make_definition(id: str, *, generation: int, from_epoch: int) -> Definition:
    return Definition(id, generation, from_epoch, CHECKPOINT_INTERVAL_EPOCHS)


OLD = make_definition("old", generation=1, from_epoch=0)
NEW = make_definition("new", generation=2, from_epoch=12)


def batch(epoch: int, by: str = "x", rows: int = 1) -> EpochBatch:
    table = pa.table({"by": [by] * rows}, schema=SCHEMA)
    return EpochBatch("s", 0, epoch, 0, table, digest_table(table))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of a sink."""
    return tmp_path / "out"


def sink(place: Path, definition: Definition, partition: int = 0) -> FilesSink:
    spec = FilesSinkSpec(url=f"file://{place}")
    return FilesSink("q", spec, partition, "uid", SCHEMA, definition=definition)


def write(place: Path, definition: Definition, partition: int, epochs: range) -> FilesSink:
    opened = sink(place, definition, partition)
    for epoch in epochs:
        opened.write(batch(epoch, definition.id))
    return opened


def epochs_in(place: Path, partition: int) -> list[int]:
    parsed = [parse_name(path.name) for path in place.iterdir()]
    return sorted(p.epoch for p in parsed if p and p.partition == partition)


def ranges_in(place: Path) -> list[str]:
    return sorted(path.name for path in (place / EPOCH_RANGES_FOLDER / "q").iterdir())


def test_a_new_definition_begins_after_the_old_one(place: Path) -> None:
    write(place, OLD, 0, range(40))
    write(place, OLD, 1, range(31))
    write(place, OLD, 2, range(0))
    assert [sink(place, NEW, partition).last_epoch() for partition in range(4)] == [39] * 4


def test_where_a_definition_begins_never_changes(place: Path) -> None:
    write(place, OLD, 0, range(40))
    first = sink(place, NEW)
    assert first.last_epoch() == 39
    for epoch in range(40, 90):
        first.write(batch(epoch))
    assert sink(place, NEW, partition=1).last_epoch() == 39


def test_an_old_task_writes_nothing_after_its_range(place: Path) -> None:
    late = write(place, OLD, 1, range(31))
    write(place, OLD, 0, range(38))
    sink(place, NEW).last_epoch()
    late.write(batch(31))  # of a range that it holds
    for epoch in (32, 40):
        with pytest.raises(SinkRefused, match="epochs from 40 on belong to its definition"):
            late.write(batch(epoch))
    assert epochs_in(place, 1) == list(range(32))


def test_an_old_task_that_restarts_is_refused(place: Path) -> None:
    write(place, OLD, 0, range(10))
    write(place, NEW, 0, range(12, 14))
    with pytest.raises(SinkRefused, match="this task runs generation 1"):
        sink(place, OLD).last_epoch()


def test_a_definition_that_returns_is_a_newer_one(place: Path) -> None:
    zombie = write(place, OLD, 0, range(10))
    write(place, NEW, 0, range(12, 18))
    again = sink(place, make_definition("old", generation=3, from_epoch=14))
    assert again.last_epoch() == 19
    again.write(batch(20))
    with pytest.raises(SinkRefused, match="generation 3"):
        zombie.write(batch(12))


def test_an_old_sink_is_opened_without_a_listing_of_its_files(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, OLD, 0, range(0, 400, 3))
    listed: list[str] = []
    list_all = LocalObjects.list

    def listing(self: LocalObjects, prefix: str = "") -> list[ObjectInfo]:
        listed.append(prefix)
        return list_all(self, prefix)

    monkeypatch.setattr(LocalObjects, "list", listing)
    assert sink(place, OLD).last_epoch(after=300) == 399
    assert sink(place, OLD).last_epoch() == 399
    assert sink(place, OLD, partition=1).last_epoch(after=7) == 7
    assert (
        sink(place, make_definition("new", generation=2, from_epoch=900)).last_epoch(after=300)
        == 899
    )
    assert set(listed) == {f"{EPOCH_RANGES_FOLDER}/q/"}


def test_files_of_a_release_without_ranges_are_found(place: Path) -> None:
    for epoch in range(20):
        sink_without_ranges = FilesSink("q", FilesSinkSpec(url=f"file://{place}"), 0, "uid", SCHEMA)
        sink_without_ranges.write(batch(epoch))
    assert sink(place, OLD).last_epoch() == 19


def test_a_definition_begins_with_its_first_epoch(place: Path) -> None:
    write(place, OLD, 0, range(10))
    assert sink(place, make_definition("new", generation=2, from_epoch=40)).last_epoch() == 39


def test_replicas_and_restarts_share_their_ranges(place: Path) -> None:
    one, other = sink(place, OLD), sink(place, OLD)
    assert one.last_epoch() == other.last_epoch() == NO_EPOCH
    assert one.write(batch(0))
    assert not other.write(batch(0))
    assert other.write(batch(9))
    assert one.write(batch(8))
    assert sink(place, OLD).last_epoch() == 9


def test_files_of_a_release_without_ranges_are_the_definitions_own(place: Path) -> None:
    spec = FilesSinkSpec(url=f"file://{place}")
    FilesSink("q", spec, 0, "uid", SCHEMA).write(batch(25))
    assert sink(place, OLD).last_epoch() == 25


def test_a_pause_without_rows_costs_one_range(place: Path) -> None:
    opened = sink(place, OLD)
    opened.write(batch(0))
    for epoch in range(1, 1_000):
        opened.write(batch(epoch, rows=0))
    opened.write(batch(100_000))
    assert ranges_in(place) == ["000000000000.json", "000000000004.json"]
    assert sink(place, NEW).last_epoch() == 100_003


def test_old_ranges_are_deleted(place: Path) -> None:
    write(place, OLD, 0, range(100))
    assert len(ranges_in(place)) == KEPT


def test_sinks_without_the_right_to_delete_still_write() -> None:
    class Forbidden(InterleavedObjects):
        def delete(self, name: str) -> None:
            raise PermissionError(name)

    held: dict[str, bytes] = {}
    mine = ranges(Forbidden(held, lambda: None), OLD)
    for epoch in range(40):
        mine.acquire(epoch)
    assert ranges(Forbidden(held, lambda: None), NEW).first_epoch() == 40


def test_a_range_of_a_newer_format_is_refused(place: Path) -> None:
    opened = sink(place, OLD)
    path = place / EPOCH_RANGES_FOLDER / "q" / "000000000000.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(to_json({"format": 9}))
    with pytest.raises(SinkRefused, match="format 9, this release reads 1"):
        opened.last_epoch()


def test_the_sinks_of_a_task_begin_where_their_definition_does(tmp_path: Path, place: Path) -> None:
    write(place, OLD, 1, range(40))
    log = OutputLog(tmp_path / "log", "s", 0, SCHEMA)
    log.start_at(12)
    for epoch in range(12, 50):
        log.append(batch(epoch, "new"))
    start = TaskState(11, 0, State())
    sinks = World(tmp_path / "log", start, open_sink=lambda *_: sink(place, NEW), log=log).sinks
    sinks.assign(
        [SinkAssignment(query="q", from_epoch=12, sink=SinkSpec(), definition="new", generation=2)]
    )
    try:
        assert sinks.wait_until_durable(49, 10)
    finally:
        sinks.stop()
    assert epochs_in(place, 0) == list(range(40, 50))


class InterleavedObjects:
    """Objects in memory; other writers may run before each operation."""

    url = "memory://root"

    def __init__(self, held: dict[str, bytes], meanwhile: Callable[[], None]) -> None:
        self._held = held
        self._meanwhile = meanwhile

    def open_root(self, marker: str, data: bytes | None) -> bytes:
        raise AssertionError("the root is open already")

    def put(self, name: str, data: bytes) -> bool:
        self._meanwhile()
        return self._held.setdefault(name, data) is data

    def get(self, name: str) -> bytes:
        self._meanwhile()
        if name not in self._held:
            raise FileNotFoundError(name)
        return self._held[name]

    def exists(self, name: str) -> bool:
        return name in self._held

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._meanwhile()
        return [ObjectInfo(name, 0, 0.0) for name in sorted(self._held) if name.startswith(prefix)]

    def newest_number(self, stem: str, suffix: str, after: int, through: int) -> int | None:
        raise AssertionError("ranges are listed")

    def delete(self, name: str) -> None:
        self._meanwhile()
        self._held.pop(name, None)


def ranges(objects: InterleavedObjects, definition: Definition) -> EpochRanges:
    return EpochRanges(objects, Retry(attempts=1), "q", definition)


def test_a_range_before_the_newest_one_is_not_acquired() -> None:
    """Its writer has listed ranges, sleeps while others acquire and delete some, and then creates
    one that nobody has."""
    held: dict[str, bytes] = {}
    new = ranges(InterleavedObjects(held, lambda: None), NEW)

    def others_go_on() -> None:
        for epoch in range(12, 60, CHECKPOINT_INTERVAL_EPOCHS):
            new.acquire(epoch)

    class Sleeping(InterleavedObjects):
        def put(self, name: str, data: bytes) -> bool:
            if name.endswith("000000000004.json"):
                others_go_on()
            return super().put(name, data)

    old = ranges(Sleeping(held, lambda: None), OLD)
    old.acquire(0)
    with pytest.raises(SinkRefused, match="stops writing"):
        old.acquire(4)
    new.acquire(60)


class Race:
    """Writers of three definitions in two partitions, interleaved by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.written: dict[int, set[int]] = {}  # epoch -> generations
        self.depth = 0
        self.next: dict[tuple[int, int], int] = {}
        self.ranges: dict[tuple[int, int], EpochRanges] = {}
        held: dict[str, bytes] = {}
        for generation in (1, 2, 3):
            definition = make_definition(
                f"d{generation}", generation=generation, from_epoch=3 * generation
            )
            for partition in (0, 1):
                objects = InterleavedObjects(held, self.meanwhile)
                key = generation, partition
                self.ranges[key] = ranges(objects, definition)
                self.next[key] = definition.from_epoch

    def meanwhile(self) -> None:
        if self.depth < 4 and self.random.random() < 0.25:
            self.depth += 1
            self.turn()
            self.depth -= 1

    def turn(self) -> None:
        key = self.random.choice(list(self.next))
        epoch = self.next[key]
        try:
            epoch = max(epoch, self.ranges[key].first_epoch())
            self.ranges[key].acquire(epoch)
        except SinkRefused:
            return
        self.written.setdefault(epoch, set()).add(key[0])
        self.next[key] = max(self.next[key], epoch + self.random.choice((1, 1, 1, 9)))


@given(seed=st.integers(0, 2**32))
def test_no_epoch_is_acquired_by_two_definitions(seed: int) -> None:
    race = Race(seed)
    for _ in range(100):
        race.turn()
    assert {e: g for e, g in race.written.items() if len(g) > 1} == {}
    generations = [max(race.written[epoch]) for epoch in sorted(race.written)]
    assert generations == sorted(generations)
