"""Parts of the consistency manager: deadlines, the union of tentative epochs, leases."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.consistency.deadlines import LEAST_SAMPLES, MAX_SAMPLES, SAMPLED_S, Deadlines
from rekindle.consistency.live_union import LiveUnion
from rekindle.consistency.partners import ANSWER_S, RETRY_S, Partners, Permission
from rekindle.streams.epochs import BatchKind, EpochBatch, EpochInput
from rekindle.streams.sunion import Channel, SUnion
from rekindle.table_memory import memory_bytes

SCHEMA = pa.schema([("n", pa.int64())])
INPUTS = [[0, 2], [1]]
CHANNELS = [Channel(0, 0), Channel(0, 2), Channel(1, 1)]


def batch(
    channel: Channel,
    epoch: int,
    kind: BatchKind = BatchKind.TENTATIVE,
    *,
    attempt: int = 1,
    value: int = 0,
) -> EpochBatch:
    rows = pa.table({"n": [channel.partition * 100 + epoch, value]}, schema=SCHEMA)
    watermark = epoch * 10 + channel.partition
    return EpochBatch(
        f"s{channel.input}", channel.partition, epoch, watermark, rows, "d", kind, attempt
    )


def union() -> LiveUnion:
    return LiveUnion(INPUTS, [SCHEMA, SCHEMA], 0)


# -- deadlines -------------------------------------------------------------------------------------


def test_an_epoch_waits_a_fraction_of_the_delay() -> None:
    deadlines = Deadlines(0.9, max_delay_s=3.0, next_epoch=0)
    deadlines.arrived(0, 5.0)
    deadlines.arrived(0, 6.0)
    assert deadlines.deadline(0) == pytest.approx(7.7)
    assert deadlines.deadline(1) == math.inf


def test_slow_processing_shortens_the_wait() -> None:
    deadlines = Deadlines(0.9, max_delay_s=3.0, next_epoch=0)
    for _ in range(100):
        deadlines.processed(1.0, now=0.0)
    assert deadlines.wait_s == 2.0
    deadlines.processed(5.0, now=0.0)  # the slowest of a hundred does not count
    assert deadlines.wait_s == 2.0
    for _ in range(10):
        deadlines.processed(5.0, now=0.0)
    # A quarter of `max_delay_s` at least, whatever the engine takes.
    assert deadlines.wait_s == 0.75


def test_a_slow_call_counts_for_a_minute() -> None:
    deadlines = Deadlines(0.9, max_delay_s=3.0, next_epoch=0)
    deadlines.processed(2.0, now=0.0)
    for second in range(1, 60):
        deadlines.processed(0.1, float(second))
        assert deadlines.wait_s == 1.0
    deadlines.processed(0.1, 60.0)
    assert deadlines.wait_s == pytest.approx(2.7)


def test_few_calls_count_for_longer() -> None:
    deadlines = Deadlines(0.9, max_delay_s=300.0, next_epoch=0)
    deadlines.processed(200.0, now=0.0)
    for call in range(1, LEAST_SAMPLES):
        deadlines.processed(1.0, call * 100.0)
        assert deadlines.wait_s == 100.0
    deadlines.processed(1.0, LEAST_SAMPLES * 100.0)
    assert deadlines.wait_s == pytest.approx(270.0)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5)), max_size=300),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=LEAST_SAMPLES, max_size=50),
)
def test_only_calls_of_the_last_minute_count(
    earlier: list[tuple[float, float]], later: list[tuple[float, float]]
) -> None:
    all_calls, last_ones = (
        Deadlines(0.9, max_delay_s=3.0, next_epoch=0),
        Deadlines(0.9, max_delay_s=3.0, next_epoch=0),
    )
    now = 0.0
    for after_s, took_s in earlier:
        now += after_s
        all_calls.processed(took_s, now)
        assert len(all_calls._calls) <= MAX_SAMPLES
    now += SAMPLED_S
    for after_s, took_s in later:
        now += after_s
        all_calls.processed(took_s, now)
        last_ones.processed(took_s, now)
    assert all_calls.wait_s == last_ones.wait_s


def test_calls_of_a_task_that_catches_up_do_not_count() -> None:
    deadlines = Deadlines(0.9, max_delay_s=None, next_epoch=0)
    deadlines.processed(9.0, now=0.0)
    deadlines.max_delay_s = 3.0
    assert deadlines.wait_s == pytest.approx(2.7)


def test_an_infinite_delay_has_no_deadline() -> None:
    deadlines = Deadlines(0.9, max_delay_s=None, next_epoch=0)
    deadlines.arrived(0, 5.0)
    assert deadlines.deadline(0) == math.inf


def test_an_epoch_has_begun_when_a_later_one_has() -> None:
    deadlines = Deadlines(0.9, max_delay_s=3.0, next_epoch=0)
    deadlines.arrived(4, 5.0)
    assert deadlines.first_arrival(2) == 5.0


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), max_size=60))
def test_forgotten_epochs_are_overdue(arrivals: list[tuple[int, float]]) -> None:
    kept, pruned = (
        Deadlines(0.5, max_delay_s=2.0, next_epoch=0),
        Deadlines(0.5, max_delay_s=2.0, next_epoch=0),
    )
    now = 0.0
    for epoch, after_s in arrivals:
        now += after_s
        kept.arrived(epoch, now)
        pruned.arrived(epoch, now)
        pruned.forget_before(kept.newest, now)
        for e in range(52):
            assert (kept.deadline(e) <= now) == (pruned.deadline(e) <= now)
    assert now < 4 or len(pruned._epochs) <= len(arrivals)


def test_long_failures_do_not_pile_up_arrivals() -> None:
    deadlines = Deadlines(0.9, max_delay_s=3.0, next_epoch=0)
    for epoch in range(10_000):
        deadlines.arrived(epoch, float(epoch))
        deadlines.forget_before(epoch, float(epoch))
    assert len(deadlines._epochs) < 10


# -- the union -------------------------------------------------------------------------------------


@given(st.permutations(CHANNELS), st.sets(st.sampled_from(CHANNELS)))
def test_any_order_of_arrival_forms_the_same_epoch(
    order: list[Channel], missing: set[Channel]
) -> None:
    def formed(channels: list[Channel]) -> object:
        live = union()
        for channel in channels:
            if channel not in missing:
                live.add(channel, batch(channel, 0))
        epoch, present = live.form(0, watermark=0)
        return epoch.watermark, [t.to_pydict() for t in epoch.inputs], present

    assert formed(order) == formed(CHANNELS)


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_whole_epoch_is_what_sunion_completes(has_tentative: list[bool]) -> None:
    live, stable = union(), SUnion(INPUTS, next_epoch=0, watermark=-5)
    complete: list[EpochInput] = []
    for channel, tentative_too in zip(CHANNELS, has_tentative, strict=True):
        if tentative_too:
            live.add(channel, batch(channel, 0, value=9))
        live.add(channel, batch(channel, 0, BatchKind.STABLE))
        complete += stable.add(channel, batch(channel, 0, BatchKind.STABLE))
    assert live.form(0, watermark=-5) == (complete[0], tuple(CHANNELS))


@given(st.lists(st.sampled_from([None, *BatchKind]), min_size=3, max_size=3))
def test_an_epoch_is_complete_if_nothing_of_it_can_be_corrected(
    kinds: list[BatchKind | None],
) -> None:
    live = union()
    kinds = [kind if kind in (None, BatchKind.STABLE) else BatchKind.TENTATIVE for kind in kinds]
    for channel, kind in zip(CHANNELS, kinds, strict=True):
        if kind is not None:
            live.add(channel, batch(channel, 0, kind))
    epoch, _ = live.form(0, watermark=0)
    assert epoch.complete == (set(kinds) == {BatchKind.STABLE})


def test_an_input_without_channels_is_an_empty_table() -> None:
    live = union()
    live.add(CHANNELS[0], batch(CHANNELS[0], 0))
    epoch, present = live.form(0, watermark=-5)
    assert [t.num_rows for t in epoch.inputs] == [2, 0]
    assert epoch.inputs[1].schema == SCHEMA
    assert present == (CHANNELS[0],)


def test_the_watermark_is_that_of_the_channels_present() -> None:
    live = union()
    live.add(CHANNELS[1], batch(CHANNELS[1], 3))
    assert live.form(3, watermark=7)[0].watermark == 32
    assert live.form(3, watermark=40)[0].watermark == 40  # it never falls
    assert live.form(4, watermark=40)[0].watermark == 40  # nothing is there


def test_undo_drops_tentative_batches_only() -> None:
    live = union()
    live.add(CHANNELS[0], batch(CHANNELS[0], 1))
    live.add(CHANNELS[0], batch(CHANNELS[0], 2, BatchKind.STABLE))
    live.add(CHANNELS[0], batch(CHANNELS[0], 3))
    live.undo(CHANNELS[0], 2)
    assert [live.has(CHANNELS[0], e) for e in (1, 2, 3)] == [True, True, False]


def test_stable_batches_and_later_attempts_are_preferred() -> None:
    live = union()
    for kind, attempt, value in (
        (BatchKind.TENTATIVE, 2, 2),
        (BatchKind.TENTATIVE, 1, 1),
        (BatchKind.STABLE, 0, 3),
        (BatchKind.TENTATIVE, 9, 9),
    ):
        live.add(CHANNELS[0], batch(CHANNELS[0], 0, kind, attempt=attempt, value=value))
    assert live.form(0, watermark=0)[0].inputs[0]["n"].to_pylist()[1] == 3


def test_bytes_are_counted() -> None:
    live = union()
    one = batch(CHANNELS[0], 1)
    live.add(CHANNELS[0], one)
    live.add(CHANNELS[0], batch(CHANNELS[0], 1, BatchKind.STABLE))
    live.add(CHANNELS[0], batch(CHANNELS[0], 2))
    assert live.buffered(CHANNELS[0]) == (2, 2 * memory_bytes(one.rows))
    live.advance(2)
    live.undo(CHANNELS[0], 0)
    assert live.buffered(CHANNELS[0]) == (0, 0)


# -- leases ----------------------------------------------------------------------------------------


def test_a_replica_without_partner_begins() -> None:
    assert Partners(0, present=False, lease_s=10).permission(0.0) is Permission.BEGIN


def test_a_replica_asks_and_begins_when_it_is_promised() -> None:
    partners = Partners(0, present=True, lease_s=10)
    assert partners.permission(0.0) is Permission.ASK
    partners.asked(0.0)
    assert partners.permission(0.5) is Permission.WAIT
    partners.promised(10)
    assert partners.permission(0.5) is Permission.BEGIN
    assert partners.served(9.9)
    assert not partners.served(10.0)


def test_a_partner_that_does_not_answer_is_not_waited_for() -> None:
    partners = Partners(0, present=True, lease_s=10)
    partners.asked(0.0)
    assert partners.permission(ANSWER_S) is Permission.BEGIN


def test_a_refused_replica_asks_again() -> None:
    partners = Partners(1, present=True, lease_s=10)
    partners.asked(0.0)
    partners.refused(0.1)
    assert partners.permission(0.2) is Permission.WAIT
    assert partners.permission(0.1 + RETRY_S) is Permission.ASK


def test_of_two_that_ask_the_lower_index_goes_first() -> None:
    low, high = Partners(0, present=True, lease_s=10), Partners(1, present=True, lease_s=10)
    low.asked(0.0)
    high.asked(0.0)
    assert not low.requested(1, 10, is_stabilizing=False, now=0.1)
    assert high.requested(0, 10, is_stabilizing=False, now=0.1)
    assert high.permission(5.0) is Permission.WAIT
    assert high.permission(10.1) is Permission.ASK


def test_a_replica_that_corrects_promises_nothing() -> None:
    assert not Partners(1, present=True, lease_s=10).requested(0, 10, is_stabilizing=True, now=0.0)


def test_leases_are_void_when_the_partner_is_lost() -> None:
    partners = Partners(1, present=True, lease_s=10)
    partners.requested(0, 10, is_stabilizing=False, now=0.0)
    partners.changed(False)
    assert partners.permission(0.1) is Permission.BEGIN


def test_a_promise_is_kept_at_least_as_long_as_it_is_relied_on() -> None:
    asking, asked = Partners(0, present=True, lease_s=10), Partners(1, present=True, lease_s=10)
    asking.asked(0.0)
    asked.requested(0, 10, is_stabilizing=False, now=0.3)
    asking.promised(10)
    assert asked.permission(10.0) is Permission.WAIT
    assert not asking.served(10.0)


def test_a_lease_is_renewed_at_half_of_it() -> None:
    partners = Partners(0, present=True, lease_s=10)
    partners.asked(0.0)
    partners.promised(10)
    assert not partners.renewal_due(4.9)
    assert partners.renewal_due(5.0)
