"""Which epochs of streams a task may take, and how far it reads ahead."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.consistency.messages import ConsistencySettings, InvalidInput
from rekindle.engine.bounds import CallBounds
from rekindle.errors import DifferentResults
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.streams.sunion import Channel, TentativeRefused
from rekindle.table_memory import memory_bytes
from rekindle.task.core.streams import StreamsCore
from rekindle_testing.fixtures.simulated_task import RowsByDigest

LEFT, RIGHT = Channel(0, 0), Channel(1, 0)


def streams(read_ahead_bytes: int = 1 << 40) -> StreamsCore:
    """Of two streams, with an infinite `maxDelay`."""
    settings = ConsistencySettings([[0], [0]], read_ahead_bytes=read_ahead_bytes)
    return StreamsCore(settings, next_epoch=0, watermark=0)


def batch(
    channel: Channel,
    epoch: int,
    size: int = 10,
    digest: str = "d",
    kind: BatchKind = BatchKind.STABLE,
) -> EpochBatch:
    rows = RowsByDigest(digest, nbytes=size)
    return EpochBatch(f"s{channel.input}", channel.partition, epoch, epoch, rows, digest, kind)


def taken_from(core: StreamsCore, max_epochs: int) -> list[int]:
    """The epochs that a loop takes."""
    loop = Mock()
    taken = core.take(CallBounds(max_epochs))
    assert taken is not None
    taken(loop, 0.0)
    return [epoch.epoch for epoch in loop.epochs_taken.call_args.args[0]]


@example([LEFT] * 6 + [RIGHT] * 6, 3, 3, 1)
@given(st.permutations([LEFT] * 6 + [RIGHT] * 6), *[st.integers(1, 3)] * 3)
def test_epochs_are_taken_in_order_until_processed(
    arrivals: list[Channel], every: int, most: int, processed: int
) -> None:
    """Those that were taken and not processed are taken again."""
    core, done = streams(), list[int]()

    def call() -> None:
        taken = taken_from(core, most)[:processed]
        done.extend(taken)
        core.stable_processed(taken[-1], 0.0)

    for at, channel in enumerate(arrivals):
        core.batch_received(channel, batch(channel, arrivals[:at].count(channel)), 0.0)
        if core.may_take and at % every == 0:
            call()
    while core.may_take:
        call()
    assert done == list(range(6))
    assert core.buffered() == (0, 0)


def test_complete_epochs_that_wait_stop_readers() -> None:
    one = memory_bytes(batch(LEFT, 0).rows)
    core = streams(6 * one)
    for epoch in range(3):
        for channel in (LEFT, RIGHT):
            assert core.may_read(channel)
            core.batch_received(channel, batch(channel, epoch), 0.0)
    assert not core.may_read(LEFT)
    taken_from(core, 1)
    assert core.may_read(LEFT)  # while the call is in progress


@pytest.mark.parametrize("rows", [0, 1])
def test_epochs_of_few_rows_are_bounded_too(rows: int) -> None:
    core = streams(1 << 20)
    table = pa.table({f"column_{n}": [1.0] * rows for n in range(50)})
    epoch = 0
    while core.may_read(LEFT):
        core.batch_received(LEFT, EpochBatch("s0", 0, epoch, 0, table, "d"), 0.0)
        epoch += 1
        assert epoch <= 128
    assert epoch >= 5


def test_expected_bytes_are_forgotten_when_an_epoch_is_taken() -> None:
    core = streams()
    for epoch in range(100):
        assert core.announce(LEFT, epoch, 5) == 5
        assert core.announce(RIGHT, epoch, 7) == 12
    for epoch in range(50):
        for channel in (LEFT, RIGHT):
            core.batch_received(channel, batch(channel, epoch), 0.0)
    taken_from(core, 50)
    assert core.announce(LEFT, 3, 5) == 5  # again: it is complete, and not recorded
    assert sorted(core._expected_bytes) == list(range(50, 100))


def test_an_announcement_costs_the_same_however_far_ahead() -> None:
    core = streams()
    for epoch in range(20_000):
        core.announce(LEFT, epoch, 5)
    began = time.process_time()
    for epoch in range(20_000, 22_000):
        core.announce(LEFT, epoch, 5)
    assert time.process_time() - began < 0.1


def test_an_error_is_raised_by_each_call_from_then_on() -> None:
    core = streams()
    core.batch_received(LEFT, batch(LEFT, 0), 0.0)
    with pytest.raises(DifferentResults):
        core.batch_received(LEFT, batch(LEFT, 0, digest="other"), 0.0)
    core.failed(ValueError("a later one"))
    for _ in range(2):
        assert core.may_take
        with pytest.raises(DifferentResults):
            core.take(CallBounds())


def test_an_epoch_that_was_left_out_is_an_error() -> None:
    core = streams()
    with pytest.raises(InvalidInput, match="stable epoch 1 of stream s0/0 follows -1"):
        core.batch_received(LEFT, batch(LEFT, 1), 0.0)


# -- an infinite maxDelay --------------------------------------------------------------------------


def test_with_an_infinite_delay_nothing_is_tentative() -> None:
    core = streams()
    core.allow_tentative(0.0)
    core.batch_received(LEFT, batch(LEFT, 0), 1.0)
    assert core.woken(1e9) == []
    assert core.wake_at is None
    assert not core.may_take
    assert core.state is ConsistencyState.STABLE


@pytest.mark.parametrize("kind", [kind for kind in BatchKind if kind is not BatchKind.STABLE])
def test_with_an_infinite_delay_what_is_tentative_is_refused(kind: BatchKind) -> None:
    with pytest.raises(TentativeRefused):
        streams().batch_received(LEFT, batch(LEFT, 0, kind=kind), 0.0)


def test_with_an_infinite_delay_each_batch_is_kept_once() -> None:
    core = streams()
    for epoch in range(3):
        core.batch_received(LEFT, batch(LEFT, epoch), 0.0)
    assert core.buffered() == (3, 3 * memory_bytes(batch(LEFT, 0).rows))
