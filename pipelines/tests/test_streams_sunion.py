"""SUnion: any interleaving and duplication gives the same epochs in the same order."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import DifferentResults
from rekindle.streams.epochs import (
    END_OF_INPUT,
    BatchKind,
    EpochBatch,
    EpochInput,
    merge_watermarks,
)
from rekindle.streams.sunion import Channel, SUnion, TentativeRefused

LEFT = pa.schema([("a", pa.int64())])
RIGHT = pa.schema([("b", pa.int64())])
INPUTS = [[0, 2], [1]]
CHANNELS = [Channel(0, 0), Channel(0, 2), Channel(1, 1)]


def batch(
    channel: Channel, epoch: int, rows: int = 2, *, watermark: int = 0, digest: str = "d"
) -> EpochBatch:
    schema = LEFT if channel.input == 0 else RIGHT
    first = channel.partition * 1000 + epoch * 10
    table = pa.table([list(range(first, first + rows))], schema=schema)
    return EpochBatch(f"s{channel.input}", channel.partition, epoch, watermark, table, digest)


Arrival = tuple[Channel, EpochBatch]


def feed(union: SUnion, arrivals: list[Arrival]) -> list[EpochInput]:
    return [epoch for arrival in arrivals for epoch in union.add(*arrival)]


@given(
    st.permutations([(c, e) for c in CHANNELS for e in range(4, 8)]),
    st.lists(st.integers(0, 11), max_size=8),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_any_interleaving_and_duplication_gives_the_same_epochs(
    order: list[tuple[Channel, int]], repeats: list[int], sizes: list[int]
) -> None:
    def arrival(channel: Channel, epoch: int) -> Arrival:
        at = CHANNELS.index(channel)
        rows = sizes[at * 4 + epoch - 4]
        return (channel, batch(channel, epoch, rows, watermark=epoch * (at + 1)))

    straight = [arrival(c, e) for c in CHANNELS for e in range(4, 8)]
    shuffled = [arrival(c, e) for c, e in order]
    for at in repeats:
        shuffled.insert((at * 5) % len(shuffled), shuffled[at])
    expected = feed(SUnion(INPUTS, next_epoch=4, watermark=3), straight)
    assert [b.epoch for b in expected] == [4, 5, 6, 7]
    assert feed(SUnion(INPUTS, next_epoch=4, watermark=3), shuffled) == expected


def test_rows_are_merged_by_input_partition_and_row() -> None:
    union = SUnion(INPUTS, next_epoch=0, watermark=-5)
    (epoch,) = feed(union, [(c, batch(c, 0)) for c in reversed(CHANNELS)])
    assert epoch.inputs[0]["a"].to_pylist() == [0, 1, 2000, 2001]
    assert epoch.inputs[1]["b"].to_pylist() == [1000, 1001]


def test_the_watermark_is_the_minimum_and_never_falls() -> None:
    union = SUnion([[0, 1]], next_epoch=0, watermark=7)
    a, b = Channel(0, 0), Channel(0, 1)
    marks = [(10, 9), (3, 20), (30, 20)]
    arrivals = [
        (c, batch(c, e, watermark=w))
        for e, ws in enumerate(marks)
        for c, w in ((a, ws[0]), (b, ws[1]))
    ]
    got = [(x.watermark_before, x.watermark) for x in feed(union, arrivals)]
    assert got == [(7, 9), (9, 9), (9, 20)]


@given(
    st.lists(
        st.tuples(st.integers(0, 9) | st.just(END_OF_INPUT), st.booleans()), min_size=1, max_size=4
    ),
    st.data(),
)
def test_idle_inputs_hold_nothing_back_in_any_order(
    inputs: list[tuple[int, bool]], data: st.DataObject
) -> None:
    watermark, idle = merge_watermarks(inputs)
    assert merge_watermarks(data.draw(st.permutations(inputs))) == (watermark, idle)
    holding = [of for of, is_idle in inputs if not is_idle and of < END_OF_INPUT]
    assert idle == (not holding and any(is_idle for _, is_idle in inputs))
    if holding:
        assert watermark == min(holding)
    elif not idle:
        assert watermark == END_OF_INPUT


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.data())
def test_it_does_not_matter_which_input_is_idle_first(
    watermarks: list[int], data: st.DataObject
) -> None:
    newest = 0
    waking = [False] * len(watermarks)
    for at in data.draw(st.permutations(range(len(watermarks)))):
        waking[at] = True
        merged, _ = merge_watermarks(zip(watermarks, waking, strict=True))
        newest = max(newest, merged)
    assert newest == max(watermarks)


def test_a_busy_input_goes_on_beside_an_idle_one() -> None:
    union = SUnion([[0], [0]], next_epoch=0, watermark=0)
    busy, other = Channel(0, 0), Channel(1, 0)
    marks = [(5, False), (5, True), (5, True), (6, False), (6, True)]
    arrivals = []
    for epoch, (watermark, idle) in enumerate(marks):
        ahead = replace(batch(busy, epoch, watermark=epoch * 10 + 9), idle=epoch == 4)
        arrivals += [(busy, ahead), (other, replace(batch(other, epoch, 0), idle=idle))]
        arrivals[-1] = (other, replace(arrivals[-1][1], watermark=watermark))
    got = [(x.watermark_before, x.watermark, x.idle) for x in feed(union, arrivals)]
    assert got == [
        (0, 5, False),
        (5, 19, False),
        (19, 29, False),
        (29, 29, False),
        (29, 49, True),
    ]


def test_an_input_without_rows_is_an_empty_table() -> None:
    union = SUnion(INPUTS, next_epoch=0, watermark=0)
    (epoch,) = feed(union, [(c, batch(c, 0, 0)) for c in CHANNELS])
    assert [t.schema for t in epoch.inputs] == [LEFT, RIGHT]


def test_sunion_names_the_missing_channels() -> None:
    union = SUnion(INPUTS, next_epoch=0, watermark=0)
    assert union.add(CHANNELS[1], batch(CHANNELS[1], 0)) == []
    assert union.missing() == (CHANNELS[0], CHANNELS[2])


def test_a_full_channel_waits_unless_its_epoch_is_needed() -> None:
    one = batch(CHANNELS[0], 0).rows.nbytes
    union = SUnion(INPUTS, next_epoch=0, watermark=0, max_bytes=one * 2 * 3)
    for epoch in range(1, 5):
        assert union.has_buffer_space(CHANNELS[0])  # epoch 0 is missing, however much is there
        union.add(CHANNELS[0], batch(CHANNELS[0], epoch))
    union.add(CHANNELS[0], batch(CHANNELS[0], 0))
    assert not union.has_buffer_space(CHANNELS[0])
    assert union.has_buffer_space(CHANNELS[2])
    for channel in CHANNELS[1:]:
        for epoch in range(5):
            union.add(channel, batch(channel, epoch))
    assert union.has_buffer_space(CHANNELS[0])


def test_tentative_batches_are_refused_by_name() -> None:
    rows = batch(CHANNELS[0], 0).rows
    tentative = EpochBatch("s0", 0, 0, 0, rows, "d", BatchKind.TENTATIVE)
    with pytest.raises(TentativeRefused, match="epoch 0 of stream s0/0 is TENTATIVE"):
        SUnion(INPUTS, next_epoch=0, watermark=0).add(CHANNELS[0], tentative)


def test_replicas_that_disagree_are_refused() -> None:
    union = SUnion(INPUTS, next_epoch=0, watermark=0)
    union.add(CHANNELS[0], batch(CHANNELS[0], 0))
    with pytest.raises(DifferentResults, match="disagree on epoch 0"):
        union.add(CHANNELS[0], batch(CHANNELS[0], 0, digest="other"))
