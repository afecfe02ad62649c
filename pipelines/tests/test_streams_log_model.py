"""Random histories of an output log equal a model in memory, or damage is found."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import SCHEMA, MemorySpill, batch, filled, open_log

from rekindle.errors import BelowFloor, LogCorrupt
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK, EpochBatch, Result
from rekindle.streams.log import OutputLog
from rekindle.streams.log_files import held_epochs
from rekindle.streams.log_reading import MAX_READ_EPOCHS
from rekindle.streams.records import WATERMARK_CHANGE, Record, RecordKind, encode_header
from rekindle.streams.tail import MAX_WATERMARK_CHANGES_BYTES

PLACES = st.floats(0, 1, exclude_max=True)
SIZES = st.sampled_from((1, 700, 1 << 20))
OPERATIONS = st.one_of(
    st.tuples(st.just("rows"), st.integers(1, 20)),
    st.tuples(st.just("rows"), st.integers(1, 3)),
    st.tuples(st.just("empty"), st.integers(1, 12)),
    st.tuples(st.just("moving"), st.integers(1, 12)),  # the watermark; no rows
    st.tuples(st.just("idle"), st.integers(1, 12)),  # no rows, and the watermark stays
    st.tuples(st.just("read"), SIZES),
    st.tuples(st.just("truncate"), PLACES),
    st.tuples(st.just("reopen"), PLACES),
    st.tuples(st.just("cut"), st.tuples(PLACES, PLACES)),
    st.tuples(st.just("flip"), st.tuples(PLACES, PLACES)),
    st.tuples(st.just("flip spilled"), st.tuples(PLACES, PLACES)),
    st.tuples(st.just("lose spilled"), PLACES),
)


class History:
    """A log with a small budget, an eighth of it for each file, beside what it has to hold."""

    def __init__(self, directory: Path, budget: int) -> None:
        self.directory = directory
        self.budget = budget
        self.spill = MemorySpill()
        self.epochs: dict[int, EpochBatch] = {}
        self.next = self.followed = 0
        self.floor = -1
        self.watermark = NO_WATERMARK
        self.log = self._open()

    def _open(self) -> OutputLog:
        """What a later process reports of its files is what this one has found sound: a task that
        is refused a log is not refused it again."""
        log = open_log(self.directory, budget=self.budget, spill=self.spill)
        has_any = log.last >= log.base
        assert held_epochs(self.directory) == ((log.base, log.last) if has_any else None)
        return log

    def append(self, rows: int, count: int, watermarks_step: int, *, idle: bool = False) -> None:
        for _ in range(count):
            if watermarks_step:
                self.watermark = max(0, self.watermark) + watermarks_step
            made = replace(batch(self.next, rows, watermark=self.watermark), idle=idle)
            assert self.log.append(made)
            self.epochs[self.next] = made
            self.next += 1

    def truncate(self, place: float) -> None:
        base = self.log.base
        floor = base + int(place * (self.next - base + 1)) - 1
        self.log.truncate(floor)
        self.floor = max(self.floor, floor)
        assert base <= self.log.base <= max(base, floor + 1)
        self.epochs = {e: b for e, b in self.epochs.items() if e >= self.log.base}

    def damage(self, suffixes: str, places: tuple[float, float], *, cut: bool) -> None:
        paths = sorted(p for p in self.directory.iterdir() if p.suffix in suffixes.split())
        if not paths:
            return
        path = paths[int(places[0] * len(paths))]
        data = bytearray(path.read_bytes())
        at = int(places[1] * len(data))
        if cut:
            self.log.close()
            del data[at:]
        else:
            data[at] ^= 1 << at % 8
        path.write_bytes(data)
        self._after_damage()

    def damage_spilled(self, places: tuple[float, float]) -> None:
        if not self.spill:
            return
        name = sorted(self.spill)[int(places[0] * len(self.spill))]
        data = bytearray(self.spill[name])
        data[int(places[1] * len(data))] ^= 4
        self.spill[name] = bytes(data)
        self.log._fetched.clear()
        self.read_what_is_sound()
        self._after_damage()

    def lose_spilled(self, place: float) -> None:
        if not self.spill:
            return
        del self.spill[sorted(self.spill)[int(place * len(self.spill))]]
        self.log._fetched.clear()
        self.read_what_is_sound()
        self._after_damage()

    def read_all(self, size: int) -> None:
        found: list[EpochBatch] = []
        while part := self.log.read(self.log.base + len(found), size):
            found += part
        assert found == list(self.epochs.values())

    def follow(self) -> None:
        """What a consumer does that reads each epoch as it comes."""
        self.followed = min(max(self.followed, self.log.base), self.next)
        while part := self.log.read(self.followed, 700):
            assert part == [self.epochs[b.epoch] for b in part]
            assert part[0].epoch == self.followed
            self.followed += len(part)

    def read_what_is_sound(self) -> None:
        for epoch in range(self.log.base, self.next):
            try:
                (found,) = self.log.read(epoch, 0)
            except LogCorrupt:
                return
            except BelowFloor:  # damaged, and no consumer needs it
                assert epoch <= self.floor
                assert epoch < self.log.base <= self.floor + 1
                return
            assert found == self.epochs[epoch]

    def _after_damage(self) -> None:
        """What is left is a part of the model from its beginning, or from what consumers need on,
        or nothing."""
        self.read_what_is_sound()
        dropped = self.log.base - 1
        self.log.close()
        self.log = self._open()
        dropped, self.floor = max(dropped, self.floor), -1
        if self.log.last >= self.log.base:
            assert min(self.epochs) <= self.log.base <= max(min(self.epochs), dropped + 1)
        kept = range(self.log.base, self.log.last + 1)
        self.epochs = {e: b for e, b in self.epochs.items() if e in kept}
        if self.log.last >= 0:
            self.next = self.log.last + 1
        else:
            self.log.start_at(self.next)

    def apply(self, operation: str, detail: object) -> None:
        match operation, detail:
            case "rows", int(rows):
                self.append(rows, 1, 7)
            case "empty", int(count):
                self.append(0, count, 0)
            case "moving", int(count):
                self.append(0, count, 3)
            case "read", int(size):
                self.read_all(size)
            case "truncate", float(place):
                self.truncate(place)
            case "reopen", _:
                self.log.close()
                self.log = self._open()
                if not self.epochs:
                    self.log.start_at(self.next)
            case "cut", (float(first), float(second)):
                self.damage(".log", (first, second), cut=True)
            case "flip", (float(first), float(second)):
                self.damage(".log .spilled", (first, second), cut=False)
            case "flip spilled", (float(first), float(second)):
                self.damage_spilled((first, second))
            case "lose spilled", float(place):
                self.lose_spilled(place)

    def check(self, size: int) -> None:
        assert (self.log.last, self.log.base) == (
            self.next - 1,
            min(self.epochs, default=self.next),
        )
        assert list(self.log) == list(self.epochs.values())
        self.read_all(size)
        results = {e: Result.of(b) for e, b in self.epochs.items()}
        assert self.log.results(self.log.base) == results
        for epoch in list(self.epochs.values())[::3]:
            assert not self.log.append(epoch)


@given(st.lists(OPERATIONS, max_size=25), SIZES, st.sampled_from((6_000, 20_000)))
def test_any_history_equals_a_model_or_is_found_damaged(
    operations: list[tuple[str, object]], size: int, budget: int
) -> None:
    with TemporaryDirectory() as directory:
        history = History(Path(directory), budget)
        for operation, detail in operations:
            history.apply(operation, detail)
            history.follow()
        history.check(size)
        history.log.close()


def write_idle_query_log(directory: Path, epochs: int) -> None:
    """The file of a log of epochs without rows whose watermark moves in each, as appends would
    leave it: the case that takes most bytes."""
    digest = digest_table(SCHEMA.empty_table())
    in_record = MAX_WATERMARK_CHANGES_BYTES // WATERMARK_CHANGE.size + 1
    content = bytearray()
    before = 0
    for first in range(0, epochs, in_record):
        count = min(in_record, epochs - first)
        payload = b"".join(WATERMARK_CHANGE.pack(first + i, i + 1) for i in range(count - 1))
        record = Record(
            kind=RecordKind.STABLE,
            branch=0,
            epoch=first,
            epochs=count,
            watermark=first + count - 1,
            digest=digest,
            start=len(content),
            length=len(payload),
            previous=before,
        )
        content += encode_header(record, zlib.crc32(payload)) + payload
        content += bytes(-len(content) % 64)
        before = record.size
    (directory / f"{0:012d}.log").write_bytes(content)


def test_the_log_of_an_idle_query_takes_little_memory(tmp_path: Path) -> None:
    write_idle_query_log(tmp_path, 200_000)
    gc.collect()
    tracemalloc.start()
    log = open_log(tmp_path)
    try:
        assert (log.base, log.last) == (0, 199_999)
        for epoch in (0, 123_456, 199_999):
            assert log.read(epoch, 0)[0].watermark == epoch
        assert len(log.read(1000, 1 << 20)) == MAX_READ_EPOCHS
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()
        log.close()


def test_empty_epochs_with_one_watermark_take_64_bytes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for epoch in range(600):
        assert log.append(batch(epoch, 0, watermark=END_OF_INPUT))
    assert log.local_bytes == 64
    again = open_log(tmp_path)
    assert [b.epoch for b in again] == list(range(600))
    assert again.append(batch(600, 0, watermark=END_OF_INPUT))
    assert open_log(tmp_path).last == 600


def test_the_index_of_a_full_log_is_sparse(tmp_path: Path) -> None:
    log = filled(tmp_path, 500, rows=20)
    entries = sum(len(file._index) for file in log._branch.extents)
    assert entries <= len(log._branch.extents) + log.local_bytes / (16 << 10)


def test_a_log_of_the_previous_format_is_refused_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = b'{"epoch":0,"watermark":0,"digest":"00","rows":0}'.ljust(108)
    (tmp_path / "000000000000.log").write_bytes(b"RKL1" + bytes(16) + header)
    log = open_log(tmp_path)
    assert (log.base, log.last) == (0, -1)
    assert "log format 1; this release reads 2" in caplog.text
    assert log.append(batch(0))


def test_an_outline_of_the_previous_format_is_refused_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "000000000000.spilled").write_text('{"name": "a", "index": []}')
    log = open_log(tmp_path, spill=MemorySpill())
    assert log.last == -1
    assert "an outline of format 1; this release reads 2" in caplog.text


def test_a_spilled_file_is_compared_without_the_store(tmp_path: Path) -> None:
    class Away(MemorySpill):
        def get(self, name: str) -> bytes:  # type: ignore[override]
            raise OSError("the store is away")

    spill = Away()
    log = filled(tmp_path, 60, budget=8000, spill=spill)
    assert spill
    assert log.results(0) == {e: Result(batch(e).digest, e * 1000) for e in range(60)}
    assert not log.append(batch(0))


def test_an_empty_record_is_read_while_it_grows(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for epoch in range(600):
        assert log.append(batch(epoch, 0))
        (newest,) = log.read(epoch, 0)
        assert (newest.epoch, newest.watermark) == (epoch, epoch * 1000)
    assert newest.rows.equals(pa.table({"n": [], "s": []}, schema=SCHEMA))


def test_readers_of_a_log_that_grows_see_each_epoch_once(tmp_path: Path) -> None:
    epochs = [batch(e, e % 7 // 5, watermark=e // 3) for e in range(600)]
    log = open_log(tmp_path, file_bytes=20_000)
    wrong: list[object] = []

    def read() -> None:
        position = 0
        try:
            while position < len(epochs):
                found = log.read(position, 3000) if log.wait_for(position, 5) else []
                assert found == epochs[position : position + len(found)]
                position += len(found)
        except BaseException as error:
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for made in epochs:
        log.append(made)
    for reader in readers:
        reader.join(30)
    assert not wrong
