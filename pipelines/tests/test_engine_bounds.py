"""What bounds a call: epochs, rows and bytes; and how a pod's memory is divided."""

from __future__ import annotations

from collections import deque

import pyarrow as pa
import pytest
from engine_fixtures import topology
from task_world import ReadAhead

from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.source import EventTimes, SourceCut, SourceSummary
from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.bounds import CallBounds, take_ready
from rekindle.engine.memory import (
    DEFAULT_LIMIT_BYTES,
    JVM_BASE_BYTES,
    MIB,
    PYTHON_BYTES,
    needed_bytes,
    plan_memory,
)
from rekindle.streams.epochs import EpochInput
from rekindle.streams.log import fetched_bytes
from rekindle.streams.response_frames import ResponseFrames
from rekindle.task.inputs import SourceInputs
from rekindle.workers import CallTimer
from rekindle_testing.waiting import eventually

SCHEMA = pa.schema([("s", pa.string())])


def wide(epoch: int, size: int) -> EpochInput:
    rows = pa.table({"s": ["x" * (size - 4)]}, schema=SCHEMA)  # 4: the offset
    return EpochInput(epoch, watermark_before=0, watermark=0, inputs=(rows,))


def numbers(epochs: list[EpochInput]) -> list[int]:
    return [e.epoch for e in epochs]


def test_a_call_is_bounded_in_bytes() -> None:
    ready = deque(wide(n, 1000) for n in range(10))
    size = ready[0].nbytes
    bounds = CallBounds(max_bytes=3 * size)
    assert numbers(take_ready(ready, bounds)) == [0, 1, 2]
    assert numbers(take_ready(ready, bounds)) == [3, 4, 5]


def test_an_epoch_larger_than_a_call_is_taken_alone() -> None:
    ready = deque([wide(0, 5000), wide(1, 10), wide(2, 10)])
    bounds = CallBounds(max_bytes=1000)
    assert numbers(take_ready(ready, bounds)) == [0]
    assert numbers(take_ready(ready, bounds)) == [1, 2]


class WideSource:
    schema = SCHEMA
    last_epoch = None
    input_files: tuple[InputFile, ...] = ()
    summary = SourceSummary(None, None, None)

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.next_epoch_to_cut = lambda epoch: epoch

    def cut(self, epoch: int) -> SourceCut:
        self.cuts.append(epoch)
        return SourceCut(wide(epoch, 1000).inputs[0], 0)

    def event_times(self, epoch: int) -> EventTimes:
        return EventTimes(epoch * 10, epoch * 10)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("days", "message"), [(300, None), (None, None), (400, "400 days from now")]
)
def test_a_gap_of_years_is_a_problem(days: int | None, message: str | None) -> None:
    source = WideSource()
    source.next_epoch_to_cut = lambda epoch: None if days is None else epoch + days * 86_400
    inputs = SourceInputs(
        source,
        next_epoch=7,
        watermark=0,
        origin_us=0,
        epoch_interval_us=1_000_000,
        clock=lambda: 60.0,
    )
    problem = inputs.problem()
    assert problem is None if message is None else message in str(problem)


def test_a_source_that_does_not_respond_is_a_problem() -> None:
    """Files on a network may never return, and the loop waits for them."""
    found: list[str | None] = []

    class Hanging(WideSource):
        def cut(self, epoch: int) -> SourceCut:
            eventually(lambda: inputs.problem() is not None)
            found.append(inputs.problem())
            return super().cut(epoch)

    inputs = SourceInputs(
        Hanging(),
        next_epoch=0,
        watermark=0,
        origin_us=0,
        epoch_interval_us=1_000_000,
        clock=lambda: 1.0,
    )
    inputs._calls = CallTimer(slow_s=0.01)
    assert numbers(inputs.take(CallBounds(), 0)) == [0]
    assert "reading epoch 0 of the source has not ended" in str(found)
    assert inputs.problem() is None


def test_a_source_stops_when_a_call_is_full() -> None:
    source = WideSource()
    inputs = SourceInputs(
        source,
        next_epoch=0,
        watermark=0,
        origin_us=0,
        epoch_interval_us=1_000_000,
        clock=lambda: 60.0,
    )
    taken = inputs.take(CallBounds(max_bytes=4 * wide(0, 1000).nbytes), 0)
    assert numbers(taken) == [0, 1, 2, 3]
    assert source.cuts == [0, 1, 2, 3, 4]


def test_bytes_of_a_slice_are_its_own() -> None:
    table = pa.table({"s": ["x" * 100] * 1000}, schema=SCHEMA)
    part = EpochInput(0, watermark_before=0, watermark=0, inputs=(table.slice(10, 10),))
    assert 1000 <= part.nbytes < 2000


@pytest.mark.parametrize("limit", [DEFAULT_LIMIT_BYTES, 2048 * MIB, 4096 * MIB, 65536 * MIB])
@pytest.mark.parametrize("with_jvm", [True, False])
@pytest.mark.parametrize("branches", [True, False])
def test_the_parts_of_a_plan_fit_into_the_limit(limit: int, with_jvm: bool, branches: bool) -> None:
    plan = plan_memory(limit, with_jvm=with_jvm, branches=branches)
    jvm = plan.heap_bytes + plan.direct_bytes + JVM_BASE_BYTES if with_jvm else 0
    rows = 3 * plan.epoch_bytes + 2 * plan.read_ahead_bytes
    states = (2 if branches else 1) * plan.state_bytes
    assert jvm + PYTHON_BYTES + rows + states + _served_bytes(plan.serve_bytes) <= limit
    assert plan.spark_job_input_bytes <= plan.direct_bytes
    assert plan.call_bytes <= plan.epoch_bytes


def _served_bytes(memory_bytes: int) -> int:
    """The bounds of what is held for readers."""
    frames = ResponseFrames(memory_bytes)
    return frames._budget._max_bytes + frames._shares_cache._max_bytes + fetched_bytes(memory_bytes)


def test_the_heap_grows_with_the_pods_memory() -> None:
    heaps = [plan_memory(n * 1024 * MIB).heap_bytes // MIB for n in (1, 2, 4)]
    assert heaps == [512, 921, 1740]


def test_needed_bytes_are_the_least_that_allow_the_epoch() -> None:
    limit = needed_bytes(300 * MIB)
    assert plan_memory(limit).epoch_bytes >= 300 * MIB
    assert plan_memory(limit - 64 * MIB).epoch_bytes < 300 * MIB


def test_many_readers_share_the_buffer_of_a_task() -> None:
    windows = "{size: 1m, groupBy: [k], aggregate: 'count(*) AS n'}"
    operators = f"""
- {{name: many, inputs: [rows], keyBy: [k], partitions: 16, window: {windows}}}
- {{name: one, inputs: [many], window: {windows}}}
"""
    segment = topology(operators, "one").segments[-1]
    request_bytes = {
        ahead: {
            reader._request_bytes
            for reader in ReadAhead(
                segment, ConsistencySettings([range(16)], read_ahead_bytes=ahead)
            ).inputs._readers.values()
        }
        for ahead in (16 * MIB, 1 << 16)
    }
    assert request_bytes == {16 * MIB: {MIB}, 1 << 16: {64 << 10}}
