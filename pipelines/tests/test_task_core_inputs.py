"""Which epochs a task may take, and how far it reads ahead."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.bounds import CallBounds
from rekindle.errors import DifferentResults
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.sunion import Channel
from rekindle.table_memory import memory_bytes
from rekindle.task.core.inputs import StreamsCore, long_pause_problem, released_epoch, released_in_s
from rekindle_testing.fixtures.simulated_task import RowsByDigest

LEFT, RIGHT = Channel(0, 0), Channel(1, 0)
DAY_US = 86_400_000_000


def batch(channel: Channel, epoch: int, size: int = 10, digest: str = "d") -> EpochBatch:
    rows = RowsByDigest(digest, nbytes=size)
    return EpochBatch(f"s{channel.input}", channel.partition, epoch, epoch, rows, digest)


@given(st.integers(0, 10_000), st.integers(1, 5_000_000), st.floats(0, 1e5))
def test_an_epoch_is_released_when_its_time_is_over(
    origin_s: int, epoch_interval_us: int, now_s: float
) -> None:
    newest = released_epoch(now_s, origin_s * 1_000_000, epoch_interval_us)
    assert released_in_s(newest, now_s, origin_s * 1_000_000, epoch_interval_us) <= 1e-6
    assert released_in_s(newest + 1, now_s, origin_s * 1_000_000, epoch_interval_us) > 0


def test_gaps_of_years_are_reported() -> None:
    assert long_pause_problem(5, None, DAY_US) is None
    assert long_pause_problem(5, 5 + 364, DAY_US) is None
    assert "no rows until epoch 370, 365 days from now" in (
        long_pause_problem(5, 370, DAY_US) or ""
    )


@given(st.permutations([(c, e) for c in (LEFT, RIGHT) for e in range(6)]))
def test_complete_epochs_are_taken_in_order(arrivals: list[tuple[Channel, int]]) -> None:
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=1000)
    taken: list[int] = []
    for channel, epoch in arrivals:
        core.arrived(channel, batch(channel, epoch))
        if core.may_take:
            taken += [e.epoch for e in core.take(CallBounds(max_epochs=2))]
    while core.may_take:
        taken += [e.epoch for e in core.take(CallBounds(max_epochs=2))]
    assert taken == list(range(6))


def test_complete_epochs_that_wait_stop_readers() -> None:
    one = memory_bytes(batch(LEFT, 0).rows)
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=6 * one)
    for epoch in range(3):
        for channel in (LEFT, RIGHT):
            assert core.has_buffer_space(channel)
            core.arrived(channel, batch(channel, epoch))
    assert not core.has_buffer_space(LEFT)
    core.take(CallBounds(max_epochs=1))
    assert core.has_buffer_space(LEFT)


@pytest.mark.parametrize("rows", [0, 1])
def test_epochs_of_few_rows_are_bounded_too(rows: int) -> None:
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=1 << 20)
    table = pa.table({f"column_{n}": [1.0] * rows for n in range(50)})
    epoch = 0
    while core.has_buffer_space(LEFT):
        core.arrived(LEFT, EpochBatch("s0", 0, epoch, 0, table, "d"))
        epoch += 1
        assert epoch <= 128
    assert epoch >= 5


def test_expected_bytes_are_forgotten_when_its_epoch_is_complete() -> None:
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=1 << 40)
    for epoch in range(100):
        assert core.announce(LEFT, epoch, 5) == 5
        assert core.announce(RIGHT, epoch, 7) == 12
    for epoch in range(50):
        for channel in (LEFT, RIGHT):
            core.arrived(channel, batch(channel, epoch))
    assert core.announce(LEFT, 3, 5) == 5  # again: it is complete, and not recorded
    assert sorted(core._expected_bytes) == list(range(50, 100))


def test_an_announcement_costs_the_same_however_far_ahead() -> None:
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=1 << 40)
    for epoch in range(20_000):
        core.announce(LEFT, epoch, 5)
    began = time.process_time()
    for epoch in range(20_000, 22_000):
        core.announce(LEFT, epoch, 5)
    assert time.process_time() - began < 0.1


def test_an_error_is_raised_by_each_call_from_then_on() -> None:
    core = StreamsCore([[0], [0]], next_epoch=0, watermark=0, read_ahead_bytes=1000)
    core.arrived(LEFT, batch(LEFT, 0))
    with pytest.raises(DifferentResults):
        core.arrived(LEFT, batch(LEFT, 0, digest="other"))
    core.failed(ValueError("a later one"))
    for _ in range(2):
        assert core.may_take
        with pytest.raises(DifferentResults):
            core.take(CallBounds())
