"""The output of a task with tentative epochs: its order, its branches and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import batch, open_log

from rekindle.errors import BelowFloor
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.streams.live_history import MAX_SPANS, LiveHistory, Position
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.wire import LiveReport

CONTROLS = (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE)


@dataclass(frozen=True)
class Record:
    kind: BatchKind
    epoch: int
    attempt: int = 0


def drawn_records(random: Random, failures: int) -> list[Record]:
    """Output of a task: failures, each with an attempt, that end in corrections."""
    records, stable, attempt = list[Record](), -1, 0
    for _ in range(failures):
        for _ in range(random.randint(0, 3)):
            stable += 1
            records.append(Record(BatchKind.STABLE, stable))
        attempt, last = attempt + 1, stable
        for _ in range(random.randint(1, 4)):
            last += 1
            records.append(Record(BatchKind.TENTATIVE, last, attempt))
        records.append(Record(BatchKind.UNDO, stable + 1))
        while stable < last:
            if random.random() < 0.2:
                last += 1
                records.append(Record(BatchKind.TENTATIVE, last, attempt))
            else:
                stable += 1
                records.append(Record(BatchKind.STABLE, stable))
        records.append(Record(BatchKind.RECONCILIATION_DONE, stable))
    return records


class Reader:
    """Reads a history as a live subscription does."""

    def __init__(self, from_epoch: int) -> None:
        self.from_epoch = from_epoch
        self.position: Position | None = None
        self.got: list[Record] = []

    def read(self, history: LiveHistory, stable: int, at_most: int) -> None:
        for _ in range(at_most):
            self.position = self.position or history.begin(self.from_epoch, stable)
            span = history.next(self.position, self.from_epoch, stable)
            if span is None:
                return
            self.got.append(Record(span.kind, span.first, span.attempt))
            if span.is_control:
                self.position = Position(span.number + 1, -1)
            else:
                self.position = Position(span.number, span.first + 1)
                self.from_epoch = span.first + (span.kind is BatchKind.STABLE)


def expected(records: list[Record]) -> list[Record]:
    """What is new to a reader, of all records in their order."""
    found, from_epoch = list[Record](), 0
    for record in records:
        if record.kind in CONTROLS:
            found.append(record)
        elif record.epoch >= from_epoch:
            found.append(record)
            from_epoch = record.epoch + (record.kind is BatchKind.STABLE)
    return found


def add(history: LiveHistory, record: Record, stable: int) -> int:
    """The newest stable epoch after it."""
    if record.kind is BatchKind.STABLE:
        return record.epoch  # the log has it; the history need not be called
    history.append(record.kind, record.epoch, stable, record.attempt)
    return stable


@given(st.integers(0, 2**32))
def test_a_reader_gets_all_output_in_its_order(seed: int) -> None:
    random = Random(seed)
    records = drawn_records(random, random.randint(0, 5))
    history, reader, stable = LiveHistory(), Reader(0), -1
    reader.read(history, stable, 1)
    for record in records:
        stable = add(history, record, stable)
        if random.random() < 0.5:
            reader.read(history, stable, random.randint(1, 5))
    reader.read(history, stable, len(records))
    assert reader.got == expected(records)


@given(st.integers(0, 2**32))
def test_a_late_reader_hears_that_all_is_corrected(seed: int) -> None:
    """Whenever it begins."""
    random = Random(seed)
    records = drawn_records(random, random.randint(1, 4))
    begins = random.randrange(len(records))
    history, stable = LiveHistory(), -1
    for record in records[: begins + 1]:
        stable = add(history, record, stable)
    first = max(stable, 0)
    reader = Reader(first)
    for record in records[begins + 1 :]:
        stable = add(history, record, stable)
        reader.read(history, stable, 10)
    reader.read(history, stable, len(records))
    tentative = set[int]()
    for record in reader.got:
        if record.kind is BatchKind.TENTATIVE:
            tentative.add(record.epoch)
        elif record.kind is BatchKind.UNDO:
            tentative = {e for e in tentative if e < record.epoch}
        elif record.kind is BatchKind.RECONCILIATION_DONE:
            tentative = {e for e in tentative if e > record.epoch}
        else:
            tentative.discard(record.epoch)
    assert not tentative


def test_without_failures_no_spans_are_kept_and_stable_epochs_are_read() -> None:
    history = LiveHistory()
    reader = Reader(7)
    reader.read(history, stable=9, at_most=10)
    assert reader.got == [Record(BatchKind.STABLE, e) for e in (7, 8, 9)]
    assert not history._spans


def test_spans_are_bounded_and_a_reader_goes_on_behind_them() -> None:
    history, reader = LiveHistory(), Reader(0)
    reader.read(history, 0, 1)
    for epoch in range(1, MAX_SPANS):
        history.append(BatchKind.TENTATIVE, epoch, stable=epoch - 1, attempt=epoch)
        history.append(BatchKind.UNDO, epoch, stable=epoch - 1)
    reader.read(history, MAX_SPANS - 1, 10 * MAX_SPANS)
    assert reader.got[-1] == Record(BatchKind.STABLE, MAX_SPANS - 1)
    assert len(reader.got) < MAX_SPANS + 10


def test_a_position_of_another_process_begins_again() -> None:
    history = LiveHistory()
    span = history.next(Position(90, 4), 3, stable=5)
    assert span is not None
    assert (span.kind, span.first, span.last) == (BatchKind.STABLE, 3, 5)


# --- with logs ---


def output(directory: Path, epochs: int = 3, **options: int) -> LiveOutput:
    log = open_log(directory / "log")
    for epoch in range(epochs):
        log.append(batch(epoch))
    return LiveOutput(log, directory / "log" / "tentative", "boot", **options)


def tentative(live: LiveOutput, epoch: int, rows: int = 3, attempt: int = 1) -> bool:
    return live.append(attempt, epoch, epoch * 1000, batch(epoch, rows, salt=7).rows)


def all_of(live: LiveOutput, from_epoch: int = 0) -> list[EpochBatch | tuple[BatchKind, int]]:
    found: list[EpochBatch | tuple[BatchKind, int]] = []
    position: Position | None = None
    while (following := live.next(position, from_epoch)) is not None:
        span, log = following
        if span.is_control:
            found.append((span.kind, span.first))
            position = Position(span.number + 1, -1)
            continue
        (read, *_) = log.read(span.first, 0)
        found.append(read)
        from_epoch = span.first + (span.kind is BatchKind.STABLE)
        position = Position(span.number, span.first + 1)
    return found


def test_tentative_epochs_are_read_after_the_stable_ones(tmp_path: Path) -> None:
    live = output(tmp_path)
    assert tentative(live, 3)
    assert tentative(live, 4, rows=0)
    read = all_of(live, from_epoch=2)
    assert [(b.kind, b.epoch, b.attempt) for b in read if isinstance(b, EpochBatch)] == [
        (BatchKind.STABLE, 2, 0),
        (BatchKind.TENTATIVE, 3, 1),
        (BatchKind.TENTATIVE, 4, 1),
    ]
    assert isinstance(read[1], EpochBatch)
    assert read[1].rows.equals(batch(3, salt=7).rows)
    assert live.report == LiveReport(
        "boot", ConsistencyState.STABLE, newest_tentative=4, corrected_through=-1
    )


def test_the_stable_log_does_not_change_with_tentative_epochs(tmp_path: Path) -> None:
    live = output(tmp_path)
    files = {p: p.read_bytes() for p in (tmp_path / "log").iterdir() if p.is_file()}
    tentative(live, 3)
    live.undo(3)
    live.reconciliation_done(2)
    assert {p: p.read_bytes() for p in (tmp_path / "log").iterdir() if p.is_file()} == files
    reopened = open_log(tmp_path / "log")
    assert (reopened.base, reopened.last) == (0, 2)


def test_a_restart_forgets_tentative_epochs(tmp_path: Path) -> None:
    tentative(output(tmp_path), 3)
    log = open_log(tmp_path / "log")
    live = LiveOutput(log, tmp_path / "log" / "tentative", "boot 2")
    assert live.next(None, 3) is None
    assert live.local_bytes == 0
    assert not (tmp_path / "log" / "tentative").exists()


def test_a_reader_that_begins_after_an_undo_gets_corrected_epochs_without_it(
    tmp_path: Path,
) -> None:
    live = output(tmp_path)
    tentative(live, 3)
    live.undo(3)
    live.log.append(batch(3))
    live.reconciliation_done(3)
    live.log.append(batch(4))
    kinds = [r if isinstance(r, tuple) else (r.kind, r.epoch) for r in all_of(live, 3)]
    assert kinds == [
        (BatchKind.STABLE, 3),
        (BatchKind.RECONCILIATION_DONE, 3),
        (BatchKind.STABLE, 4),
    ]
    assert live.report == LiveReport(
        "boot", ConsistencyState.STABLE, newest_tentative=-1, corrected_through=3
    )


def test_an_epoch_that_is_stable_already_is_not_tentative(tmp_path: Path) -> None:
    live = output(tmp_path)
    assert not tentative(live, 2)
    assert tentative(live, 3)


def test_an_attempt_goes_once_all_readers_have_its_corrections(tmp_path: Path) -> None:
    live = output(tmp_path)
    tentative(live, 3)
    live.undo(3)
    live.log.append(batch(3))
    live.reconciliation_done(3)
    live.truncate(2)
    assert live.local_bytes
    live.truncate(3)
    assert live.local_bytes == 0
    assert list((tmp_path / "log" / "tentative").iterdir()) == []
    assert [r.epoch for r in all_of(live, 4) if isinstance(r, EpochBatch)] == []


def test_branches_are_bounded_in_bytes(tmp_path: Path) -> None:
    live = output(tmp_path, max_bytes=64_000, file_bytes=8_000)
    for epoch in range(3, 300):
        tentative(live, epoch, rows=20)
        assert live.local_bytes <= 64_000 + 8_000
    read = [r.epoch for r in all_of(live, 3) if isinstance(r, EpochBatch)]
    assert read == list(range(read[0], 300))
    assert read[0] > 3


def test_older_attempts_go_first(tmp_path: Path) -> None:
    live = output(tmp_path, max_bytes=64_000, file_bytes=8_000)
    tentative(live, 3, rows=100)
    live.undo(3)
    live.log.append(batch(3))
    live.reconciliation_done(3)
    for epoch in range(4, 300):
        tentative(live, epoch, rows=20, attempt=2)
    assert [p.name for p in (tmp_path / "log" / "tentative").iterdir()] == ["2"]
    read = [r.epoch for r in all_of(live, 290) if isinstance(r, EpochBatch)]
    assert read == list(range(290, 300))


def test_a_tentative_epoch_that_cannot_be_written_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = output(tmp_path)
    tentative(live, 3)

    def full(self: OutputLog, batch: EpochBatch) -> bool:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(OutputLog, "append", full)
        with pytest.raises(OSError, match="No space"):
            tentative(live, 4)
    assert tentative(live, 5)
    assert [r.epoch for r in all_of(live, 3) if isinstance(r, EpochBatch)] == [5]
    assert live.report.newest_tentative == 5


@pytest.mark.parametrize("file", [0, 3, -1])
def test_a_damaged_file_of_a_branch_costs_the_tentative_epochs_through_it(
    tmp_path: Path, file: int
) -> None:
    live = output(tmp_path, file_bytes=8_000)
    for epoch in range(3, 100):
        tentative(live, epoch, rows=20)
    paths = sorted((tmp_path / "log" / "tentative" / "1").glob("*.log"))
    paths[file].write_bytes(b"x" * paths[file].stat().st_size)
    damaged = int(paths[file].stem)
    following = int(paths[file + 1].stem) if file >= 0 else 100
    _, branch = live.next(None, 3) or (None, live.log)
    with pytest.raises(BelowFloor):
        branch.read(damaged, 0)
    assert tentative(live, 100)
    read = [(r.kind, r.epoch) for r in all_of(live, 3) if isinstance(r, EpochBatch)]
    assert read == [(BatchKind.TENTATIVE, epoch) for epoch in range(following, 101)]
    live.log.append(batch(3))
    assert ([b.epoch for b in live.log], live.log.damage) == ([0, 1, 2, 3], None)


def test_listeners_hear_of_all_that_is_not_in_the_log(tmp_path: Path) -> None:
    live, heard = output(tmp_path), list[int]()
    live.listen(lambda: heard.append(1))
    tentative(live, 3)
    live.enter(ConsistencyState.UP_FAILURE)
    live.enter(ConsistencyState.UP_FAILURE)
    live.undo(3)
    live.reconciliation_done(2)
    assert len(heard) == 4
    assert live.report.state is ConsistencyState.UP_FAILURE
