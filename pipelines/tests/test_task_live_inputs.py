"""The inputs of a task with a live source: planned by a thread, the same for all replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rekindle.connectors.cut_records import CutRecord, Position, encode_cut_record
from rekindle.connectors.dead_letters import DeadLetter, DeadLetterFiles
from rekindle.connectors.live_source import Reach, SourceRows
from rekindle.connectors.planned_cuts import CutsOvertaken, PlannedCuts, WatermarkRule
from rekindle.engine.bounds import CallBounds
from rekindle.errors import SourceFailed, StoreError
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.task.live_inputs import LiveInputs
from rekindle_testing.waiting import eventually

EPOCH_US = 20_000
WITHIN_S = 20.0


class Records:
    """Implements `CutStore`."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.away = False
        self.request_s = 0.0  # how long a request takes
        self.reading = self.most_reading = 0  # requests at the same time
        self._lock = threading.Lock()

    def list(self) -> set[int]:
        self._require()
        return set(self.records)

    def read(self, first: int) -> bytes | None:
        with self._lock:
            self.reading += 1
            self.most_reading = max(self.reading, self.most_reading)
        self._require()
        with self._lock:
            self.reading -= 1
        return self.records.get(first)

    def create(self, first: int, data: bytes) -> bool:
        self._require()
        with self._lock:
            return self.records.setdefault(first, data) is data

    def add(self, record: CutRecord) -> None:
        self.records[record.first] = encode_cut_record(record)

    def _require(self) -> None:
        time.sleep(self.request_s)
        if self.away:
            raise StoreError("the store is away")


class Source:
    """A split "0" whose rows are their own positions and times. Implements `LiveSource`."""

    schema = pa.schema([("n", pa.int64())])

    def __init__(self, lag: int = 0) -> None:
        self.end = 0
        self.lag = lag  # how much later than another replica it sees rows
        self.away = False
        self.most = 10**9  # rows of an epoch
        self.dropped = 0  # records of each range
        self.letters: list[DeadLetter] = []  # of each range with rows
        self.identity = "topic"
        self.closed = False

    def ends(self, after: Position | None) -> Reach:
        self._require()
        start = (after or {"0": 0})["0"]
        return Reach({"0": start}, {"0": max(start, self.end - self.lag)}, frozenset("0"), "topic")

    def read(self, start: Position, end: Position) -> SourceRows:
        self._require()
        numbers = pa.array(range(start["0"], end["0"]), pa.int64())
        newest = {"0": end["0"] - 1} if len(numbers) else {}
        letters = self.letters if newest else []
        table = pa.table([numbers], schema=self.schema)
        return SourceRows(end, table, newest, self.dropped, "", letters)

    def read_some(self, start: Position, end: Position) -> SourceRows:
        return self.read(start, {"0": min(end["0"], start["0"] + self.most)})

    def _require(self) -> None:
        if self.away:
            raise SourceFailed("topic t at b:9092: no response")

    def waiting_for(self) -> str:
        return "topic t at b:9092"

    def close(self) -> None:
        self.closed = True


OpenInputs = Callable[..., LiveInputs]


@pytest.fixture
def open_inputs() -> Iterator[OpenInputs]:
    opened: list[LiveInputs] = []
    origin_us = int(time.time() * 1e6)

    def make(
        source: Source,
        records: Records,
        next_epoch: int = 0,
        others: Sequence[Records] = (),
        idle_epochs: int | None = None,
        **more: Any,
    ) -> LiveInputs:
        cuts = PlannedCuts(next_epoch, WatermarkRule(2, idle_epochs))
        inputs = LiveInputs(
            source,
            [records, *others],
            cuts,
            next_epoch,
            NO_WATERMARK,
            name="clicks",
            origin_us=origin_us,
            epoch_interval_us=EPOCH_US,
            **more,
        )
        opened.append(inputs)
        return inputs

    yield make
    for inputs in opened:
        inputs.close()


def take(inputs: LiveInputs, through: int) -> list[EpochInput]:
    taken: list[EpochInput] = []
    deadline = time.monotonic() + WITHIN_S
    while not taken or taken[-1].epoch < through:
        assert time.monotonic() < deadline, inputs.problem()
        taken += inputs.take(CallBounds(max_epochs=3), 0.1)
    return taken


def numbers(epochs: list[EpochInput]) -> list[int]:
    return [n for epoch in epochs for n in epoch.inputs[0].column("n").to_pylist()]


def contents(epochs: list[EpochInput]) -> list[tuple[int, int, list[int]]]:
    return [(e.epoch, e.watermark, e.inputs[0].column("n").to_pylist()) for e in epochs]


def test_epochs_come_one_after_another_with_all_rows(open_inputs: OpenInputs) -> None:
    source = Source()
    inputs, taken = open_inputs(source, Records()), list[EpochInput]()
    for _ in range(10):
        source.end += 3
        taken += take(inputs, (taken[-1].epoch if taken else -1) + 2)
    source.end += 1
    taken += take(inputs, inputs.head() + 3)
    assert [e.epoch for e in taken] == list(range(len(taken)))
    assert numbers(taken) == list(range(31))
    assert taken[-1].watermark == 28
    assert all(a.watermark == b.watermark_before for a, b in pairwise(taken))


def test_replicas_and_replays_take_the_same_epochs(open_inputs: OpenInputs) -> None:
    records, sources = Records(), [Source(), Source(lag=2)]
    replicas = [open_inputs(source, records) for source in sources]
    for _ in range(40):
        for source in sources:
            source.end += 1
        time.sleep(EPOCH_US / 1e6 / 3)
    through = replicas[0].head()
    taken = [take(replica, through) for replica in replicas]
    replay = open_inputs(sources[0], records, next_epoch=5)
    last = min(t[-1].epoch for t in taken)
    assert contents(taken[0])[: last + 1] == contents(taken[1])[: last + 1]
    replayed = [c for c in contents(take(replay, last)) if c[0] <= last]
    assert [(e, rows) for e, _, rows in replayed] == [
        (e, rows) for e, _, rows in contents(taken[0])[5 : last + 1]
    ]


def test_rows_before_the_first_epoch_are_not_read(open_inputs: OpenInputs) -> None:
    source, records = Source(), Records()
    records.add(CutRecord(0, 10, {"0": 0}, {"0": 9}, {"0": 8}, watermark=6, identity="topic"))
    source.away = True
    taken = take(open_inputs(source, records, next_epoch=5), 10)
    assert [epoch.epoch for epoch in taken] == list(range(5, 11))
    assert (numbers(taken), taken[-1].watermark) == ([], 6)


def test_without_the_source_another_replicas_records_are_followed(
    open_inputs: OpenInputs,
) -> None:
    records, present, away = Records(), Source(), Source()
    away.away = True
    follower, other = open_inputs(away, records), open_inputs(present, records)
    present.end = away.end = 5
    taken = take(other, 10)
    assert numbers(taken) == [0, 1, 2, 3, 4]
    assert "topic t at b:9092" in (follower.problem() or "")
    away.away = False
    assert contents(take(follower, taken[-1].epoch))[: len(taken)] == contents(taken)


def test_while_the_store_is_away_nothing_is_released(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    inputs = open_inputs(source, records)
    take(inputs, 2)
    records.away, source.end = True, 4
    deadline = time.monotonic() + WITHIN_S
    while inputs.problem() != "the store is away":
        inputs.take(CallBounds(), 0.01)
        assert time.monotonic() < deadline
    while inputs.take(CallBounds(), 0.05):
        pass  # what was recorded before
    known = set(records.records)
    records.away = False
    taken = take(inputs, inputs.head())
    assert numbers(taken) == [0, 1, 2, 3]
    assert min(set(records.records) - known) == taken[0].epoch
    assert inputs.problem() is None


def test_a_task_that_was_away_records_all_epochs_at_once(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    source.end = 7
    time.sleep(30 * EPOCH_US / 1e6)
    taken = take(open_inputs(source, records), 25)
    assert numbers(taken) == list(range(7))
    assert len(records.records) < 20


def test_what_is_too_large_for_one_epoch_is_in_the_next(open_inputs: OpenInputs) -> None:
    source = Source()
    source.end, source.most = 25, 10
    taken = take(open_inputs(source, Records()), 5)
    rows = [e.inputs[0].num_rows for e in taken]
    assert rows[:3] == [10, 10, 5]


def test_a_slow_store_costs_latency_and_no_throughput(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    records.request_s = 5 * EPOCH_US / 1e6  # of a request; each record has several epochs
    inputs = open_inputs(source, records)
    taken = list[EpochInput]()
    for _ in range(40):
        source.end += 1
        taken += inputs.take(CallBounds(), EPOCH_US / 1e6)
    taken += take(inputs, inputs.head())
    assert numbers(taken) == list(range(40))
    assert len(records.records) < len(taken) / 3


def test_a_replay_reads_many_records_at_once(open_inputs: OpenInputs) -> None:
    records = Records()
    for n in range(60):
        records.add(CutRecord(n, n, {"0": n}, {"0": n + 1}, identity="topic"))
    records.request_s = 0.02
    source = Source()
    source.end = 60
    time.sleep(60 * EPOCH_US / 1e6)
    assert numbers(take(open_inputs(source, records), 59)) == list(range(60))
    assert records.most_reading > 4


def test_a_reader_that_is_overtaken_fails(open_inputs: OpenInputs) -> None:
    records = Records()
    records.add(CutRecord(40, 40, {"0": 0}, {"0": 0}, identity="topic"))
    inputs = open_inputs(Source(), records, next_epoch=3)
    with pytest.raises(CutsOvertaken, match="epoch 3"):
        take(inputs, 3)


def test_another_topic_of_the_same_name_is_not_read(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    records.add(CutRecord(0, 0, {"0": 0}, {"0": 1}, identity="the former topic"))
    source.end = 1
    inputs = open_inputs(source, records)
    deadline = time.monotonic() + WITHIN_S
    while "deleted and created again" not in (inputs.problem() or ""):
        assert inputs.take(CallBounds(), 0.02) == []
        assert time.monotonic() < deadline


def test_planning_waits_for_the_engine(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    inputs = open_inputs(source, records, read_ahead_bytes=1)
    for _ in range(30):
        source.end += 5
        time.sleep(EPOCH_US / 1e6)
    assert len(records.records) < 15
    assert numbers(take(inputs, inputs.head())) == list(range(150))


def test_a_source_without_rows_is_idle_in_replicas_and_replays(open_inputs: OpenInputs) -> None:
    records, source = Records(), Source()
    source.end = 9
    replicas = [open_inputs(source, records, idle_epochs=3) for _ in range(2)]
    taken = take(replicas[0], replicas[0].head() + 8)
    assert [e.idle for e in taken if e.epoch < 3] == [False] * 3
    assert taken[-1].idle
    source.end = 12
    taken += take(replicas[0], replicas[0].head() + 2)
    woken = next(e for e in taken if e.num_rows and e.epoch > 2)
    assert not woken.idle
    again = open_inputs(source, records, idle_epochs=50)  # records count, not what is set
    for other in (take(replicas[1], taken[-1].epoch), take(again, taken[-1].epoch)):
        assert [e.idle for e in other[: len(taken)]] == [e.idle for e in taken]


def test_event_times_are_those_of_all_partitions(open_inputs: OpenInputs) -> None:
    sources, records = [Source(), Source()], [Records(), Records()]
    sources[0].end, sources[1].end = 9, 4
    second = open_inputs(sources[1], records[1])
    take(second, 3)
    inputs = open_inputs(sources[0], records[0], others=records[1:])
    assert inputs.event_times(2) is None  # it is read first
    deadline = time.monotonic() + WITHIN_S
    while (found := inputs.event_times(2)) is None:
        inputs.take(CallBounds(), 0.02)
        assert time.monotonic() < deadline
    assert (found.newest_us, found.watermark) == (8, 1)
    assert inputs.read_event_times(2) == found
    assert inputs.read_event_times(10**6) is None


def test_dropped_records_are_counted_once(open_inputs: OpenInputs) -> None:
    source = Source()
    source.dropped = 2
    inputs = open_inputs(source, records := Records())
    take(inputs, 3)
    assert inputs.status.bad_records >= 2
    assert inputs.status.bad_records <= 2 * len(records.records)


def test_bad_records_are_kept_before_the_rows_are_released(
    open_inputs: OpenInputs, tmp_path: Path
) -> None:
    """Also where the directory is away at first, and once although two replicas find them."""
    letters = tmp_path / "letters"
    letters.write_text("a file in its place")
    records, source = Records(), Source()
    letter = DeadLetter("t", 0, 1, None, None, b"v", "bad")
    source.letters, source.end = [letter], 3
    kept = [DeadLetterFiles(f"file://{letters}", "clicks", "op", 0, "uid") for _ in range(2)]
    inputs = open_inputs(source, records, dead_letters=kept[0])
    eventually(lambda: "deadLetters" in (inputs.problem() or ""), WITHIN_S)
    assert inputs.take(CallBounds(), 0.05) == []
    letters.unlink()
    taken = take(inputs, 5)
    take(open_inputs(source, records, dead_letters=kept[1]), 5)
    with_rows = {epoch.epoch for epoch in taken if epoch.num_rows}
    files = sorted(letters.glob("*.jsonl"))
    assert with_rows <= {int(path.stem[-12:]) for path in files} <= set(records.records)
    assert {path.read_bytes() for path in files} == {letter.line()}


def test_how_far_a_source_is_behind(open_inputs: OpenInputs) -> None:
    source = Source()
    source.end, source.most = 100, 1
    inputs = open_inputs(source, Records())
    take(inputs, 2)
    first = inputs.status.behind["0"]
    assert 0 < first < 100
    take(inputs, 8)
    assert inputs.status.behind["0"] < first


def test_a_closed_reader_closes_its_source(open_inputs: OpenInputs) -> None:
    source = Source()
    inputs = open_inputs(source, Records())
    take(inputs, 1)
    inputs.close()
    assert source.closed
