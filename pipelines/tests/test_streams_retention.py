"""What a log keeps for readers outside of its topology."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import MemorySpill, batch, filled, open_log
from test_streams_damage import flip, value_of

from rekindle.errors import BelowFloor, LogCorrupt
from rekindle.streams.log import OutputLog
from rekindle.streams.log_files import FLOOR_FILE
from rekindle.streams.retention import MIN_FILE_BYTES, file_bytes, retained_floor


@dataclass(frozen=True)
class File:
    first: int
    last: int
    size: int
    spilled: str | None = None


@st.composite
def files(draw: st.DrawFn) -> list[File]:
    made, first, spilled = list[File](), draw(st.integers(0, 5)), draw(st.integers(0, 4))
    for at in range(draw(st.integers(0, 8))):
        last = first + draw(st.integers(0, 4))
        made.append(File(first, last, draw(st.integers(1, 100)), "x" if at < spilled else None))
        first = last + 1
    return made


@given(files(), st.integers(-1, 50), st.integers(0, 400))
def test_the_newest_files_below_the_floor_stay(made: list[File], floor: int, retain: int) -> None:
    through = retained_floor(made, floor, retain)
    assert through <= floor
    gone = [f for f in made if f.last <= through]
    kept = [f for f in made if through < f.last <= floor]
    assert sum(f.size for f in kept) <= retain
    assert all(f.spilled is None for f in kept)
    if gone:
        next_size = gone[-1].size
        assert gone[-1].spilled is not None or sum(f.size for f in kept) + next_size > retain


@given(files(), st.integers(-1, 50))
def test_without_retention_all_through_the_floor_goes(made: list[File], floor: int) -> None:
    through = retained_floor(made, floor, 0)
    assert [f for f in made if f.last <= through] == [f for f in made if f.last <= floor]


@given(st.integers(1, 1 << 30), st.integers(0, 1 << 30))
def test_files_are_a_part_of_what_is_kept(limit: int, retain: int) -> None:
    size = file_bytes(limit, retain)
    assert size <= limit
    assert not retain or size <= max(MIN_FILE_BYTES, retain / 8)


def test_a_log_keeps_what_was_truncated_up_to_its_bytes(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.retain(1 << 20)
    for epoch in range(100):
        log.append(batch(epoch, rows=2000))
    log.truncate(98)
    kept = log.local_bytes
    assert (1 << 20) * 3 // 4 <= kept <= (1 << 20) + 2 * (128 << 10)
    assert 0 < log.base < 98
    assert log.read(log.base, 0)[0].rows.equals(batch(log.base, rows=2000).rows)
    log.retain(0)
    log.truncate(98)
    assert log.base > 90


def test_what_is_retained_goes_before_anything_is_spilled(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = open_log(tmp_path, budget=1 << 20, spill=spill)
    log.retain(1 << 30)  # at most half of the budget
    for epoch in range(60):
        log.append(batch(epoch, rows=2000))
        log.truncate(epoch - 1)
    assert log.local_bytes <= 1 << 20
    assert log.base > 0
    assert not spill


def test_what_consumers_need_is_spilled_not_dropped(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = open_log(tmp_path, budget=1 << 20, spill=spill)
    log.retain(1 << 18)
    log.truncate(3)
    for epoch in range(60):
        log.append(batch(epoch, rows=2000))
    assert spill
    assert log.base <= 4
    assert [b.epoch for b in log.read(4, 0)] == [4]


def test_a_reopened_log_still_has_what_it_retained(tmp_path: Path) -> None:
    log = filled(tmp_path, 50, rows=2000)
    log.retain(1 << 20)
    log.truncate(40)
    base = log.base
    log.close()
    again = open_log(tmp_path)
    again.retain(1 << 20)
    again.truncate(40)
    assert again.base == base


def retaining(directory: Path, floor: int, **options: object) -> OutputLog:
    """100 epochs in several files, of which consumers need those above `floor`."""
    log = filled(directory, 100, rows=50, **options)
    log.retain(1 << 30)
    log.truncate(floor)
    assert log.base == 0
    return log


def damage(directory: Path, epoch: int) -> Path:
    """Flip a byte in the rows of an epoch of `retaining`; its file."""
    path = max(p for p in directory.glob("*.log") if int(p.stem) <= epoch)
    flip(path, value_of(path, epoch * 100 + 25))
    return path


def test_damage_to_what_is_only_retained_drops_that(tmp_path: Path) -> None:
    log = retaining(tmp_path, 60, file_bytes=1 << 14)
    path = damage(tmp_path, 20)
    following = min(int(p.stem) for p in tmp_path.glob("*.log") if p > path)
    with pytest.raises(BelowFloor, match=f"the log begins with epoch {following} now"):
        log.read(20, 0)
    assert log.damage is None
    assert log.base == following
    assert not path.exists()
    assert [b.epoch for b in log] == list(range(following, 100))
    assert log.append(batch(100, 50))
    assert open_log(tmp_path).base == following


def test_damage_below_the_floor_spares_the_rest_of_its_file(tmp_path: Path) -> None:
    log = retaining(tmp_path, 60)
    damage(tmp_path, 20)
    assert len(list(tmp_path.glob("*.log"))) == 1
    with pytest.raises(BelowFloor, match="the log begins with epoch 61 now"):
        log.read(20, 0)
    assert log.damage is None
    assert [b.epoch for b in log] == list(range(61, 100))
    assert log.append(batch(100, 50))
    log.truncate(99)
    assert log.base == 61


def test_damage_to_what_consumers_need_is_damage_of_the_log(tmp_path: Path) -> None:
    log = retaining(tmp_path, 60)
    damage(tmp_path, 61)
    with pytest.raises(LogCorrupt, match="epoch 61 of stream stream/0 is damaged"):
        log.read(61, 0)
    assert log.damage is not None


@pytest.mark.parametrize("file_bytes", [1 << 14, 1 << 20])
def test_damage_to_what_is_retained_that_is_found_at_reopening_drops_that(
    tmp_path: Path, file_bytes: int
) -> None:
    retaining(tmp_path, 60, file_bytes=file_bytes).close()
    damage(tmp_path, 20)
    log = open_log(tmp_path)
    assert (log.base, log.last, log.damage) == (21, 99, None)
    assert list(log) == [batch(e, 50) for e in range(21, 100)]
    assert log.append(batch(100, 50))
    again = open_log(tmp_path)
    assert (again.base, again.last) == (21, 100)


def test_what_was_spared_of_a_damaged_file_survives_a_reopening(tmp_path: Path) -> None:
    log = retaining(tmp_path, 60)
    damage(tmp_path, 20)
    with pytest.raises(BelowFloor):
        log.read(20, 0)
    log.append(batch(100, 50))
    log.close()
    assert [b.epoch for b in open_log(tmp_path)] == list(range(21, 101))


def test_a_lost_file_of_what_is_retained_costs_what_is_before_it(tmp_path: Path) -> None:
    retaining(tmp_path, 60, file_bytes=1 << 14).close()
    lost = damage(tmp_path, 20)
    following = min(int(p.stem) for p in tmp_path.glob("*.log") if p > lost)
    lost.unlink()
    log = open_log(tmp_path)
    assert [b.epoch for b in log] == list(range(following, 100))


def test_damage_above_the_floor_cuts_a_reopened_log(tmp_path: Path) -> None:
    retaining(tmp_path, 60).close()
    damage(tmp_path, 20)
    damage(tmp_path, 61)
    assert list(open_log(tmp_path)) == [batch(e, 50) for e in range(20)]


def test_a_floor_holds_for_one_reopening(tmp_path: Path) -> None:
    """The next process ignores it: consumers that start again may need epochs at or below it."""
    retaining(tmp_path, 60).close()
    open_log(tmp_path).close()
    damage(tmp_path, 20)
    assert open_log(tmp_path).last == 19


@pytest.mark.parametrize("torn", [0, 10, 20])
def test_a_floor_that_was_not_written_completely_is_ignored(tmp_path: Path, torn: int) -> None:
    retaining(tmp_path, 60).close()
    file = tmp_path / FLOOR_FILE
    file.write_bytes(file.read_bytes()[:torn])
    damage(tmp_path, 20)
    assert open_log(tmp_path).last == 19


def test_all_that_is_retained_may_be_damaged(tmp_path: Path) -> None:
    log = retaining(tmp_path, 99)
    damage(tmp_path, 99)
    with pytest.raises(BelowFloor, match="begins with epoch 100"):
        log.read(99, 0)
    assert (log.base, log.last, log.damage) == (100, 99, None)
    assert log.append(batch(100, 50))
    assert not log.append(batch(50, 50))
    assert [b.epoch for b in log] == [100]


class FullDisk:
    """A disk with room for so many bytes in a directory."""

    def __init__(self, directory: Path, room: int, error: int = errno.ENOSPC) -> None:
        self._directory, self._room, self._error = directory, room, error
        self._pwrite = os.pwrite

    def pwrite(self, file: int, data: memoryview, offset: int) -> int:
        used = sum(path.stat().st_size for path in self._directory.iterdir())
        if used + len(data) > self._room:
            raise OSError(self._error, os.strerror(self._error))
        return self._pwrite(file, data, offset)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_what_is_retained_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    log = open_log(tmp_path, file_bytes=1 << 14)
    log.retain(1 << 30)
    monkeypatch.setattr(os, "pwrite", FullDisk(tmp_path, 100_000, error).pwrite)
    for epoch in range(200):
        assert log.append(batch(epoch, 50))
        log.truncate(epoch - 10)
    assert 0 < log.base < 180
    assert [b.epoch for b in log] == list(range(log.base, 200))


def test_on_a_full_disk_nothing_goes_that_consumers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path, file_bytes=1 << 14)
    log.retain(1 << 30)
    log.truncate(3)
    monkeypatch.setattr(os, "pwrite", FullDisk(tmp_path, 100_000).pwrite)
    with pytest.raises(OSError, match="No space"):
        any(not log.append(batch(epoch, 50)) for epoch in range(200))
    assert log.base <= 4 < log.last
    assert [b.epoch for b in log] == list(range(log.base, log.last + 1))


def test_another_error_of_the_disk_costs_nothing_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = retaining(tmp_path, 60, file_bytes=1 << 14)
    monkeypatch.setattr(os, "pwrite", FullDisk(tmp_path, 0, errno.EIO).pwrite)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        log.append(batch(100, 50))
    assert log.base == 0


def test_the_newest_file_goes_too_if_nobody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 3)
    log.retain(1 << 30)
    log.truncate(2)
    monkeypatch.setattr(os, "pwrite", FullDisk(tmp_path, log.local_bytes).pwrite)
    assert log.append(batch(3))
    assert (log.base, log.last) == (3, 3)
