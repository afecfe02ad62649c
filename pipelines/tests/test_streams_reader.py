"""A reader stays with a replica that serves it, leaves one that does not, and delivers epochs
once."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_parts import A, B, C, FakeClient, Harness, routes_to, started_io

from rekindle.protocol import Endpoint
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.replica_choice import (
    FAILURE_MEMORY_S,
    DeliverEpochs,
    Effect,
    ReplicaChoice,
    SwitchReplica,
)
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import CallTimedOut, ReadRequest, ReadResponse
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process


def choice(*addresses: str) -> ReplicaChoice:
    """For a reader that has received the epochs up to 4."""
    made = ReplicaChoice(next_epoch=5, stall_s=3)
    made.routes_changed(routes_to(*addresses), 0)
    return made


def test_the_preferred_replica_is_read_first() -> None:
    assert ReplicaChoice(5, stall_s=3).routes_changed(routes_to(A, B), 0) == [SwitchReplica(A, 5)]


def test_a_reader_keeps_its_replica_when_the_preference_changes() -> None:
    assert choice(A, B).routes_changed(routes_to(B, A), 1) == []


def test_epochs_are_delivered_once() -> None:
    made = choice(A, B)
    assert made.epochs_received(A, (5, 6), 1) == [DeliverEpochs((5, 6))]
    assert made.epochs_received(B, (5, 6, 7), 1) == [DeliverEpochs((7,))]
    assert made.epochs_received(B, (6, 7), 1) == []


def test_a_failed_replica_is_called_again_after_its_back_off() -> None:
    made = choice(A, B)
    assert made.call_failed(A, 1) == [SwitchReplica(B, 5)]
    assert made.unreadable() == (A,)
    assert made.call_failed(B, 1.01) == [SwitchReplica(None, 5)]
    assert made.woken(1.05) == []
    assert made.woken(1.1) == [SwitchReplica(A, 5)]
    made.epochs_received(A, (5,), 1.2)
    assert made.unreadable() == (B,)


def test_a_suspected_replica_is_left_while_another_is_not() -> None:
    made = choice(A, B)
    assert made.routes_changed(routes_to(A, B, suspected=A), 1) == [SwitchReplica(B, 5)]
    assert made.routes_changed(routes_to(A, B), 2) == []


def test_the_only_replica_is_read_although_suspected() -> None:
    assert ReplicaChoice(5, stall_s=3).routes_changed(routes_to(A, suspected=A), 0) == [
        SwitchReplica(A, 5)
    ]


def test_a_stalled_replica_is_abandoned() -> None:
    made = choice(A, B)
    assert made.epochs_received(A, (), 2.9) == []
    assert made.epochs_received(A, (), 3) == [SwitchReplica(B, 5)]
    assert choice(A).epochs_received(A, (), 10) == []


def test_a_lagging_replica_is_left_only_for_a_better_one() -> None:
    made = choice(A, B, C)
    assert made.routes_changed(routes_to(A, B, C, lagging=(A, B), suspected=C), 1) == []
    assert made.routes_changed(routes_to(A, B, C, lagging=(A, B)), 2) == [SwitchReplica(C, 5)]
    assert made.routes_changed(routes_to(A, B, C), 3) == []
    assert made.routes_changed(routes_to(A, B, lagging=(B,), suspected=A), 4) == [
        SwitchReplica(B, 5)
    ]


def test_a_lagging_replica_is_kept_after_recent_failures() -> None:
    made = choice(A, B)
    made.routes_changed(routes_to(A, B, lagging=(B,)), 0)
    assert made.call_failed(A, 1) == [SwitchReplica(B, 5)]
    assert made.epochs_received(B, (5,), 1 + FAILURE_MEMORY_S / 2) == [DeliverEpochs((5,))]
    assert made.epochs_received(B, (6,), 1 + FAILURE_MEMORY_S) == [
        DeliverEpochs((6,)),
        SwitchReplica(A, 7),
    ]
    stalled = 1 + FAILURE_MEMORY_S + 3
    assert made.epochs_received(A, (), stalled) == [SwitchReplica(B, 7)]
    assert made.epochs_received(B, (7,), stalled + 1) == [DeliverEpochs((7,))]


def test_a_removed_replica_is_abandoned() -> None:
    assert choice(A, B).routes_changed(routes_to(B), 1) == [SwitchReplica(B, 5)]
    assert choice(A).routes_changed(routes_to(), 1) == [SwitchReplica(None, 5)]


def test_a_new_incarnation_has_no_failures() -> None:
    made = choice(A)
    made.call_failed(A, 1)
    assert made.routes_changed(routes_to(A, incarnation=2), 1.01) == [SwitchReplica(A, 5)]


def test_a_gap_is_a_failure() -> None:
    assert choice(A, B).epochs_received(A, (6, 7), 1) == [SwitchReplica(B, 5)]


def test_an_epoch_that_every_log_has_truncated_is_reported() -> None:
    made = choice(A, B)
    made.call_failed(A, 1, truncated=True)
    assert not made.all_truncated()
    made.call_failed(B, 1, truncated=True)
    assert made.all_truncated()


_addresses = st.sampled_from([A, B, C])
_epochs = st.tuples(st.integers(0, 30), st.integers(0, 4)).map(lambda t: range(t[0], sum(t)))
_routes = st.tuples(st.sets(_addresses), st.sampled_from([A, B, C, ""]), st.sets(_addresses)).map(
    lambda t: routes_to(*sorted(t[0]), suspected=t[1], lagging=tuple(t[2]))
)
_happened = st.one_of(
    st.builds(
        partial, st.just(ReplicaChoice.call_failed), address=_addresses, truncated=st.booleans()
    ),
    st.builds(partial, st.just(ReplicaChoice.epochs_received), address=_addresses, epochs=_epochs),
    st.builds(partial, st.just(ReplicaChoice.routes_changed), endpoints=_routes),
)


@given(st.lists(st.tuples(_happened, st.floats(0, 5)), max_size=40))
def test_whatever_happens_epochs_come_in_order_without_gaps_or_repeats(
    steps: list[tuple[partial[list[Effect]], float]],
) -> None:
    made, now = ReplicaChoice(5, stall_s=3), 0.0
    taken: list[int] = []
    known: tuple[Endpoint, ...] = ()
    for happened, passed in steps:
        now += passed
        for effect in happened(made, now=now):
            if isinstance(effect, DeliverEpochs):
                taken += effect.epochs
        known = happened.keywords.get("endpoints", known)
        assert made.current is None or made.current in {e.address for e in known}
    assert taken == list(range(5, 5 + len(taken)))
    made.woken(now + 10)
    assert (made.current is None) == (not known)


def test_the_reader_continues_after_a_replica_dies() -> None:
    harness = Harness()
    harness.replicas.last = {A: 3, B: 3}
    harness.reader.route(routes_to(A, B))
    harness.expect(4, within_s=10)
    harness.replicas.dead.add(A)
    harness.replicas.last[B] = 6
    harness.expect(7, within_s=10)
    assert harness.reader.unreadable() == (A,)
    assert harness.reader.head == 6
    harness.close()


def test_suspicion_abandons_a_call_of_a_silent_replica() -> None:
    harness = Harness()
    harness.replicas.silent[A] = threading.Event()
    harness.replicas.last[B] = 2
    harness.reader.route(routes_to(A, B))
    time.sleep(0.05)
    harness.reader.route(routes_to(A, B, suspected=A))
    harness.expect(3, within_s=1.2)
    harness.replicas.silent[A].set()
    harness.close()


def test_a_silent_replica_is_left_at_the_deadline() -> None:
    harness = Harness()
    harness.replicas.silent[A] = threading.Event()
    harness.replicas.last[B] = 2
    harness.reader.route(routes_to(A, B))
    harness.expect(3, within_s=2.5)
    harness.close()


class LargeEpoch(FakeClient):
    """A call delivers the first epoch only if its timeout is `needs_s` or more."""

    needs_s = 7.0
    timeouts: ClassVar[list[float]] = []

    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        self.timeouts.append(timeout_s)
        if request.from_epoch == 0 and timeout_s < self.needs_s:
            raise CallTimedOut("no whole epoch")
        return await super().read(request, timeout_s)


def test_timeouts_grow_for_an_epoch_that_does_not_arrive() -> None:
    harness = Harness()
    harness.replicas.last[A] = 1
    harness.reader._connect = lambda a: LargeEpoch(harness.replicas, a)
    harness.reader.route(routes_to(A))
    harness.expect(2, within_s=5)
    eventually(lambda: len(LargeEpoch.timeouts) >= 5)
    harness.close()
    assert LargeEpoch.timeouts[:5] == [1.5, 3, 6, 12, 1.5]


def test_timeouts_of_replicas_that_are_not_suspected_are_reported() -> None:
    made = choice(A, B)
    made.call_failed(A, 1, timed_out=True)
    made.call_failed(B, 2)
    assert made.timeouts == 1
    made.routes_changed(routes_to(A, B, suspected=B), 3)
    made.call_failed(B, 4, timed_out=True)
    assert made.timeouts == 1
    made.epochs_received(A, (5,), 5)
    assert made.timeouts == 0

    reader = Harness().reader
    reader._core.choice.routes_changed(routes_to(A), 0)
    for now in (1, 2):
        assert reader.problem() is None
        reader._core.choice.call_failed(A, now, timed_out=True)
    assert "epoch 0 of stream s/0 did not arrive in 2 calls" in (reader.problem() or "")


def test_a_replica_that_responds_in_time_keeps_the_short_timeout() -> None:
    made = choice(A, B)
    for now in range(1, 5):
        made.call_failed(A, now, timed_out=True)
        made.call_failed(B, now, timed_out=True)
    made.epochs_received(A, (), 6)  # it lags, and B has a large epoch
    assert (made.timeouts_extending_call_at(A), made.timeouts_extending_call_at(B)) == (0, 8)
    made.call_failed(B, 7, timed_out=True)
    assert (
        made.timeouts_extending_call_at(A),
        made.timeouts_extending_call_at(B),
        made.timeouts,
    ) == (0, 9, 9)
    made.epochs_received(B, (), 8)
    assert made.timeouts == made.timeouts_extending_call_at(B) == 0
    made.call_failed(A, 9, timed_out=True)
    assert (made.timeouts_extending_call_at(A), made.timeouts_extending_call_at(B)) == (1, 0)


def test_without_buffer_space_no_call_is_made() -> None:
    harness = Harness(buffered_epochs=1)
    harness.replicas.last[A] = 0
    harness.reader.route(routes_to(A))
    harness.expect(1, within_s=2)
    harness.replicas.last[A] = 5
    time.sleep(0.1)
    assert harness.got == [0]
    harness.buffered_epochs = 100
    harness.io.call(harness.reader.wake)
    harness.expect(6, within_s=2)
    harness.close()


def test_a_reader_goes_on_if_closing_its_client_fails() -> None:
    harness, closed = Harness(), list[int]()

    class NotClosed(FakeClient):
        async def close(self) -> None:
            closed.append(1)
            raise OSError("not closed")

    harness.replicas.last[A] = 4
    harness.replicas.dead.add(A)
    harness.reader._connect = lambda a: NotClosed(harness.replicas, a)
    harness.reader.route(routes_to(A))
    eventually(lambda: closed)
    harness.replicas.dead.clear()
    harness.expect(5, within_s=10)
    harness.close()


def test_a_reader_goes_on_if_its_coroutine_raises() -> None:
    harness = Harness()
    harness.replicas.last[A] = 4
    failures = [ValueError("once")]

    async def unknown(call: object) -> None:
        raise failures.pop()

    make = harness.reader._make_call
    harness.reader._make_call = lambda call: unknown(call) if failures else make(call)  # type: ignore[method-assign]
    harness.reader.route(routes_to(A))
    harness.expect(5, within_s=10)
    harness.close()


def test_a_reader_goes_on_if_its_call_is_cancelled_by_somebody_else() -> None:
    """As by a library that cancels too much: nobody would hear of the call again."""
    harness, cancelled = Harness(), list[int]()

    class Cancelled(FakeClient):
        async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
            if not cancelled:
                cancelled.append(1)
                raise asyncio.CancelledError
            return await super().read(request, timeout_s)

    harness.replicas.last[A] = 4
    harness.reader._connect = lambda a: Cancelled(harness.replicas, a)
    harness.reader.route(routes_to(A))
    harness.expect(5, within_s=10)
    harness.close()


@pytest.mark.parametrize("closing", [False, True])
def test_a_call_that_is_abandoned_before_it_begins_leaves_no_connection(closing: bool) -> None:
    harness, opened = Harness(), list[str]()

    class Counted(FakeClient):
        async def close(self) -> None:
            opened.remove(self.address)

    def connect(address: str) -> Counted:
        opened.append(address)
        return Counted(harness.replicas, address)

    harness.buffered_epochs = 1
    harness.replicas.last[A] = harness.replicas.last[B] = 0
    harness.reader._connect = connect
    harness.reader.route(routes_to(A))
    harness.expect(1, within_s=5)
    eventually(lambda: harness.reader._calling is None)
    assert opened == [A]
    harness.buffered_epochs = 100
    harness.io.call(time.sleep, 0.2)  # so that what follows comes together
    harness.io.call(harness.reader.wake)
    if closing:
        harness.reader.close()
    else:
        harness.reader.route(routes_to(B))
    eventually(lambda: opened == ([] if closing else [B]))
    harness.close()


def test_a_reader_that_has_failed_is_woken_by_space() -> None:
    """It has none when its back-off ends."""
    harness = Harness()
    harness.replicas.last[A] = 4
    space: list[bool | Exception] = [True]

    def has_space() -> bool:
        if isinstance(space[0], Exception):
            error, space[0] = space[0], False
            raise error
        return space[0]

    harness.reader._has_buffer_space = has_space
    harness.reader.route(routes_to(A))
    harness.expect(5, within_s=10)
    space[0] = RuntimeError("once")
    eventually(lambda: harness.reader.problem())
    eventually(lambda: not harness.reader._backing_off, 20)
    harness.replicas.last[A], space[0] = 9, True
    harness.io.call(harness.reader.wake)
    harness.expect(10, within_s=5)
    assert harness.reader.problem() is None
    harness.close()


def test_an_epoch_that_a_real_server_has_truncated_is_reported(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    log = OutputLog(tmp_path, "s", 0, schema)
    log.start_at(10)
    rows = schema.empty_table()
    log.append(EpochBatch("s", 0, 10, 0, rows, digest_table(rows)))
    server = StreamServer("127.0.41.2", 0)
    server.serve_log(log)
    io = started_io()
    reader = PartitionReader(io, Subscription("s", 0, 3), lambda _: None, lambda: True)
    reader.route(routes_to(f"127.0.41.2:{server.port}"))
    eventually(reader.problem)
    assert "epoch 3 of stream s/0 is no longer in the log of any replica" in (
        reader.problem() or ""
    )
    reader.close()
    io.stop()
    server.stop()
