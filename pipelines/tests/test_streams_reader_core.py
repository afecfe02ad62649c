"""Which calls a reader makes, whatever routes, replicas and buffer space do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from random_histories import histories
from reader_parts import A, B, routes_to

from rekindle.protocol import ConsistencyState
from rekindle.streams.reader_core import (
    MAX_TIMEOUT_S,
    AbandonCall,
    ReadEpochs,
    ReaderCore,
    ReaderEffect,
    Subscription,
)
from rekindle.streams.replica_choice import DeliverEpochs, SwitchReplica


@dataclass
class Upstream:
    """Two replicas in memory, and the calls that a reader makes to them."""

    core: ReaderCore = field(
        default_factory=lambda: ReaderCore(Subscription("s", 0, from_epoch=5), stall_s=3)
    )
    now: float = 0.0
    last: int = 6
    call: ReadEpochs | None = None  # in progress
    abandoned: list[ReadEpochs] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    has_buffer_space: bool = True

    def perform(self, effects: Sequence[ReaderEffect]) -> None:
        for effect in effects:
            match effect:
                case ReadEpochs():
                    assert self.call is None, "one call at a time"
                    assert self.has_buffer_space
                    self.call = effect
                    self.timeouts.append(effect.timeout_s)
                case AbandonCall():
                    assert self.call is not None
                    self.abandoned.append(self.call)
                    self.call = None
                case DeliverEpochs(epochs):
                    self.delivered += epochs
                case SwitchReplica():
                    pass

    def route_both(self) -> None:
        self.perform(self.core.routes_changed(routes_to(A, B), self.now))

    def route_one(self) -> None:
        self.perform(self.core.routes_changed(routes_to(B), self.now))

    def suspect(self) -> None:
        self.perform(self.core.routes_changed(routes_to(A, B, suspected=A), self.now))

    def grow(self) -> None:
        self.last += 2

    def fill(self) -> None:
        self.has_buffer_space = False

    def drain(self) -> None:
        self.has_buffer_space = True

    def pass_time(self) -> None:
        self.now += 1.0
        self.wake()

    def wake(self) -> None:
        self.perform(self.core.woken(self.has_buffer_space, self.now))

    def respond(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            self._returned(call)

    def respond_late(self) -> None:
        """The result of a call that was abandoned arrives."""
        if self.abandoned:
            self._returned(self.abandoned.pop())

    def _returned(self, call: ReadEpochs) -> None:
        epochs = range(max(0, call.epoch - 1), min(self.last, call.epoch + 1) + 1)
        stable = ConsistencyState.STABLE
        self.perform(self.core.call_returned(call.call, self.last, epochs, stable, self.now))

    def time_out(self) -> None:
        call, self.call = self.call, None
        if call is not None:
            self.perform(self.core.call_failed(call.call, self.now, timed_out=True))

    def die(self) -> None:
        self.call = None
        self.core.call_lost()


MOVES = histories(
    (
        *("wake", "wake", "wake", "respond", "respond", "respond", "route_both", "grow"),
        *("pass_time", "drain", "drain", "fill", "route_one", "suspect", "respond_late"),
        *("time_out", "die"),
    ),
    60,
)


def play(moves: list[str]) -> Upstream:
    upstream = Upstream()
    for move in moves:
        getattr(upstream, move)()
    return upstream


@given(MOVES)
def test_epochs_are_delivered_once_and_in_order(moves: list[str]) -> None:
    delivered = play(moves).delivered
    assert delivered == list(range(5, 5 + len(delivered)))


@given(MOVES)
def test_all_is_delivered_once_replicas_respond(moves: list[str]) -> None:
    upstream = play(moves)
    upstream.drain()
    upstream.grow()
    upstream.route_both()
    upstream.now += 60
    for _ in range(upstream.last + 5):
        upstream.pass_time()
        upstream.respond()
    assert upstream.delivered == list(range(5, upstream.last + 1))
    assert (upstream.core.head, upstream.core.problem()) == (upstream.last, None)


@given(MOVES)
def test_timeouts_are_bounded(moves: list[str]) -> None:
    assert all(1.5 <= t <= MAX_TIMEOUT_S for t in play(moves).timeouts)


def test_a_suspected_replica_is_left_in_the_middle_of_a_call() -> None:
    upstream = play(["route_both", "wake"])
    first = upstream.call
    assert first is not None
    upstream.suspect()
    assert upstream.abandoned == [first]
    upstream.wake()
    assert upstream.call is not None
    assert (first.address, upstream.call.address) == (A, B)
    upstream.respond_late()
    assert (upstream.delivered, upstream.core.head) == ([], -1)


def test_the_call_of_a_dead_thread_is_made_again() -> None:
    upstream = play(["route_both", "wake", "die", "wake"])
    assert upstream.call is not None
    assert upstream.call.call == 2


def test_a_reported_error_stays_until_a_call_succeeds() -> None:
    upstream = play(["route_both", "wake"])
    assert upstream.call is not None
    upstream.call = None
    problem = f"{A} cannot be read: KeyError('x')"
    upstream.perform(upstream.core.call_failed(1, upstream.now, problem=problem))
    assert upstream.core.problem() == f"epoch 5 of stream s/0: {A} cannot be read: KeyError('x')"
    upstream.wake()
    upstream.respond()
    assert upstream.core.problem() is None


def test_an_error_of_every_replica_is_reported_if_it_stays() -> None:
    upstream = play(["route_both"])
    for number in range(16):
        assert upstream.core.problem() is None
        upstream.now += 10
        upstream.wake()
        assert upstream.call is not None
        call, upstream.call = upstream.call, None
        message = f"{call.address}: the store is away {number}"
        upstream.perform(upstream.core.call_failed(call.call, upstream.now, message=message))
    expected = "epoch 5 of stream s/0 cannot be read from any replica; the latest error: "
    assert (upstream.core.problem() or "").startswith(expected)
    assert "the store is away 15" in (upstream.core.problem() or "")
    upstream.pass_time()
    upstream.pass_time()
    upstream.respond()
    assert upstream.core.problem() is None


@given(MOVES)
def test_a_reader_that_waits_for_time_makes_a_call_then(moves: list[str]) -> None:
    upstream = play(moves)
    wake_at = upstream.core.wake_at()
    if upstream.call is not None:
        assert wake_at is None
    elif wake_at is not None:
        upstream.now = max(upstream.now, wake_at)
        upstream.drain()
        upstream.wake()
        assert upstream.call is not None


@given(MOVES)
def test_without_a_call_or_a_time_a_reader_lacks_space_or_routes(moves: list[str]) -> None:
    """So it needs no timer: who frees space, or brings routes, wakes it."""
    upstream = play([*moves, "wake"])
    if upstream.call is None and upstream.core.wake_at() is None:
        routed = bool(upstream.core.choice.current)
        assert not upstream.has_buffer_space or not routed
