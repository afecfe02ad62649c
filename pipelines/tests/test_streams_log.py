"""The output log: epochs occur once, survive a crash, and are dropped only up to the floor."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from log_parts import SCHEMA, MemorySpill, batch, filled, open_log

from rekindle.errors import BelowFloor, DifferentResults, LogFull
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, Result
from rekindle.streams.log_reading import MAX_READ_EPOCHS


def test_epochs_come_back_as_they_were(tmp_path: Path) -> None:
    log = filled(tmp_path, 5)
    assert (log.base, log.last) == (0, 4)
    got = log.read(1, 1 << 20)
    assert [b.epoch for b in got] == [1, 2, 3, 4]
    assert got[0].rows.equals(batch(1).rows)
    assert (got[0].watermark, got[0].digest) == (1000, batch(1).digest)
    assert log.results(4) == {4: Result(batch(4).digest, 4000)}


def test_an_epoch_without_rows_is_kept_and_has_its_schema(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(batch(0, 0))
    assert log.read(0, 0)[0].rows.schema == SCHEMA
    assert [b.rows.num_rows for b in open_log(tmp_path).read(0, 1 << 20)] == [0]


def test_reading_is_bounded_but_never_stuck(tmp_path: Path) -> None:
    log = filled(tmp_path, 5)
    assert [b.epoch for b in log.read(2, 1)] == [2]
    assert log.read(5, 1) == []


def test_empty_epochs_are_bounded_too(tmp_path: Path) -> None:
    log = filled(tmp_path, 300, rows=0)
    assert len(log.read(0, 1 << 30)) == MAX_READ_EPOCHS
    assert len(log.read(0, 1)) == 1


def test_the_same_epoch_again_changes_nothing(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    assert log.append(batch(1)) is False
    assert log.last == 2


@pytest.mark.parametrize("other", [batch(1, salt=7), batch(1, watermark=5)])
def test_another_result_for_an_epoch_is_refused(tmp_path: Path, other: EpochBatch) -> None:
    with pytest.raises(DifferentResults, match="epoch 1 of stream stream/0"):
        filled(tmp_path, 3).append(other)


def test_gaps_and_tentative_epochs_are_refused(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    with pytest.raises(ValueError, match="cannot follow"):
        log.append(batch(2))
    rows = batch(1).rows
    with pytest.raises(ValueError, match="stable"):
        log.append(EpochBatch("stream", 0, 1, 0, rows, "", BatchKind.TENTATIVE))


def test_a_reopened_log_continues(tmp_path: Path) -> None:
    filled(tmp_path, 4, file_bytes=1000).close()
    log = open_log(tmp_path)
    assert (log.base, log.last) == (0, 3)
    log.append(batch(4))
    assert [b.epoch for b in open_log(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lost", [1, 64, 100, 500])
def test_a_torn_tail_is_truncated(tmp_path: Path, lost: int) -> None:
    filled(tmp_path, 4).close()
    (path,) = tmp_path.glob("*.log")
    data = path.read_bytes()
    path.write_bytes(data[:-lost])
    log = open_log(tmp_path)
    assert log.last == 2
    log.append(batch(3))
    assert path.read_bytes() == data


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    (path,) = tmp_path.glob("*.log")
    data = path.read_bytes()
    record = len(data) // 3
    for position in range(record, 2 * record, 37):
        broken = bytearray(data)
        broken[position] ^= 0x10
        path.write_bytes(broken)
        log = open_log(tmp_path)
        unchanged = log.last == 2  # the flipped byte is padding, which nobody reads
        assert unchanged or log.last == 0
        if unchanged:
            assert [b.rows for b in log] == [batch(e).rows for e in range(3)]


def test_what_follows_damage_in_the_middle_is_dropped(tmp_path: Path) -> None:
    filled(tmp_path, 9, file_bytes=1000).close()
    paths = sorted(tmp_path.glob("*.log"))
    assert len(paths) > 2
    paths[1].write_bytes(b"garbage" * 100)
    first_lost = int(paths[1].stem)
    assert open_log(tmp_path).last == first_lost - 1
    paths[0].unlink()
    assert open_log(tmp_path).last == NO_EPOCH


def test_a_log_starts_after_the_restore_point(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.start_at(10)
    assert (log.base, log.last) == (10, 9)
    log.append(batch(10))
    log.start_at(8)  # restored from an earlier epoch: the log is kept and compared
    assert log.append(batch(9)) is False
    log.start_at(20)  # a gap: the log cannot be used
    assert (log.base, log.last) == (20, 19)
    assert not list(tmp_path.glob("*.log"))


def test_whole_files_below_the_floor_are_removed(tmp_path: Path) -> None:
    log = filled(tmp_path, 9, file_bytes=1000)
    kept = log.read(4, 1 << 20)
    log.truncate(4)
    assert 0 < log.base <= 5
    assert [b.epoch for b in log.read(5, 1 << 20)] == [5, 6, 7, 8]
    with pytest.raises(BelowFloor, match=f"begins at {log.base}"):
        log.read(0, 1)
    log.truncate(8)
    assert (log.base, log.last, log.local_bytes) == (9, 8, 0)
    assert kept[0].rows.equals(batch(4).rows)  # a reader's rows outlive their file
    log.append(batch(9))
    assert open_log(tmp_path).base == 9


def test_a_log_over_budget_spills_and_reads_back(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 60, budget=8000, spill=spill, spill_prefix="a/")
    assert spill
    assert log.local_bytes <= 9000
    assert [b.rows for b in log] == [batch(e).rows for e in range(60)]
    log.close()
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert (again.base, again.last) == (0, 59)
    assert again.read(0, 1)[0].rows.equals(batch(0).rows)
    again.truncate(59)
    assert not spill


class SlowSpill(MemorySpill):
    """Its puts or deletes hang until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = {"put": threading.Event(), "delete": threading.Event()}
        self.called = {"put": threading.Event(), "delete": threading.Event()}

    def put(self, name: str, data: bytes) -> None:
        self._pass("put")
        super().put(name, data)

    def delete(self, name: str) -> None:
        self._pass("delete")
        super().delete(name)

    def _pass(self, what: str) -> None:
        self.called[what].set()
        assert self.go[what].wait(10)


def test_a_spilled_file_is_fetched_once_for_reads_in_order(tmp_path: Path) -> None:
    fetched: list[str] = []

    class Counting(MemorySpill):
        def get(self, name: str) -> bytes:  # type: ignore[override]
            fetched.append(name)
            return super().get(name)

    spill = Counting()
    log = filled(tmp_path, 60, budget=8000, spill=spill)
    assert [b.epoch for b in log] == list(range(60))
    assert len(fetched) == len(spill)


def in_background(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def test_a_slow_store_delays_neither_readers_nor_appends(tmp_path: Path) -> None:
    spill = SlowSpill()
    spill.go["put"].set()
    log = filled(tmp_path, 60, budget=8000, spill=spill)
    truncating = in_background(lambda: log.truncate(log.last))
    assert spill.called["delete"].wait(5)
    working = in_background(lambda: (log.base, log.results(57), log.append(batch(60))))
    working.join(5)
    assert not working.is_alive()
    assert (log.base, log.last) == (60, 60)
    spill.go["delete"].set()
    truncating.join(5)
    assert not spill


def test_a_file_truncated_while_spilling_is_deleted_everywhere(tmp_path: Path) -> None:
    spill = SlowSpill()
    spill.go["delete"].set()
    log = open_log(tmp_path, budget=8000, spill=spill)
    appending = in_background(lambda: [log.append(batch(epoch)) for epoch in range(20)])
    assert spill.called["put"].wait(5)
    truncating = in_background(lambda: log.truncate(log.last))
    truncating.join(5)
    assert not truncating.is_alive()
    spill.go["put"].set()
    appending.join(5)
    assert not spill
    assert log.last == 19
    log.close()
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert [b.rows for b in again] == [batch(e).rows for e in range(log.base, 20)]


def test_nothing_is_spilled_to_the_store_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt would upload the file again, for as long as its outline cannot be written."""
    uploads: list[str] = []

    class Counting(MemorySpill):
        def put(self, name: str, data: bytes) -> None:
            uploads.append(name)
            super().put(name, data)

    def disk_full(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    spill = Counting()
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", disk_full)
        with pytest.raises(OSError, match="no space"):
            filled(tmp_path, 60, budget=8000, spill=spill)
    assert not uploads
    assert {p.suffix for p in tmp_path.iterdir()} == {".log"}
    log = open_log(tmp_path, budget=8000, spill=spill)
    assert log.append(batch(log.last + 1))
    assert [b.epoch for b in log] == list(range(log.last + 1))


@pytest.mark.parametrize("killed", ["unlink", "replace"])
def test_a_kill_while_a_file_is_spilled_costs_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    class Killed(BaseException):
        pass

    def kill(path: Path, *args: object, **options: object) -> None:
        if killed == "replace" or (path.suffix == ".log" and path.exists()):
            raise Killed

    def fill() -> None:
        for epoch in range(60):
            log.append(batch(epoch))

    spill = MemorySpill()
    log = open_log(tmp_path, budget=8000, spill=spill)
    with monkeypatch.context() as patch:
        patch.setattr(Path, killed, kill)
        with pytest.raises(Killed):
            fill()
    last = log.last
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert (again.base, again.last) == (0, last)
    assert [b.rows for b in again] == [batch(e).rows for e in range(last + 1)]
    assert {p.suffix for p in tmp_path.iterdir()} == {".log"}


def test_a_log_over_budget_without_a_spill_refuses_appends(tmp_path: Path) -> None:
    log = open_log(tmp_path, budget=8000)
    with pytest.raises(LogFull, match="raise logBudget"):
        any(not log.append(batch(epoch)) for epoch in range(100))
    stopped = log.last
    log.truncate(stopped - 1)
    assert log.append(batch(stopped + 1))


def test_a_failed_write_does_not_change_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(tmp_path, 2)
    written = os.pwrite
    room = iter([10])  # bytes of the first write; the next one has none

    def on_a_full_disk(file: int, data: memoryview, offset: int) -> int:
        for part in room:
            return written(file, data[:part], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", on_a_full_disk)
    with pytest.raises(OSError, match="No space"):
        log.append(batch(2))
    monkeypatch.undo()
    assert log.append(batch(2))
    assert open_log(tmp_path).last == 2


def test_a_waiter_wakes_when_its_epoch_comes(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    assert log.wait_for(0, 0)
    assert not log.wait_for(1, 0.01)
    threading.Timer(0.05, lambda: log.append(batch(1))).start()
    assert log.wait_for(1, 5)
    threading.Timer(0.05, log.close).start()
    assert not log.wait_for(2, 5)
