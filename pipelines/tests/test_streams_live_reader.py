"""Readers of live subscriptions (tentative results and their corrections): which replica they read,
and what they deliver."""

from __future__ import annotations

from pathlib import Path

import pytest
from edge_parts import ADDRESS, IDENTITY
from reader_parts import A, B, C, routes_to, started_io
from test_streams_live_edges import LiveServer

from rekindle.protocol import ConsistencyState, Endpoint
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import ReadEpochs, ReaderCore, Subscription
from rekindle.streams.replica_choice import REPORTED_STATE_VALID_S, ReplicaChoice, SwitchReplica
from rekindle.streams.wire import LivePosition, StreamProgress
from rekindle_testing.waiting import eventually

STABLE, UP_FAILURE, STABILIZATION = ConsistencyState


def routes(lagging: str = "", **states: ConsistencyState) -> tuple[Endpoint, ...]:
    """`lagging`: names of replicas."""
    addresses = {"a": A, "b": B, "c": C}
    return tuple(
        Endpoint(
            address=addresses[name],
            replica=at,
            incarnation=1,
            state=state,
            lagging=name in lagging,
        )
        for at, (name, state) in enumerate(states.items())
    )


def choice(live: bool, **states: ConsistencyState) -> ReplicaChoice:
    made = ReplicaChoice(5, stall_s=1000, live=live)
    made.routes_changed(routes_to(A), 0)
    made.routes_changed(routes(**states), 100)
    return made


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("state", [UP_FAILURE, STABILIZATION])
def test_a_stable_replica_is_preferred(live: bool, state: ConsistencyState) -> None:
    assert choice(live, a=state, b=STABLE).current == B
    assert choice(live, b=state, c=STABLE).current == C


def test_tentative_results_are_read_rather_in_a_failure_than_in_a_correction() -> None:
    assert choice(True, a=STABILIZATION, b=UP_FAILURE).current == B
    assert choice(False, a=STABILIZATION, b=UP_FAILURE).current == A


def test_a_live_reader_stays_with_the_replica_that_serves_while_the_other_corrects() -> None:
    """The stable epochs of the one that serves stand still, so it lags; the new input of the other
    one is suspended."""
    made = choice(True, a=STABILIZATION, b=UP_FAILURE)
    assert made.routes_changed(routes("b", a=STABILIZATION, b=UP_FAILURE), 101) == []
    assert made.routes_changed(routes("b", a=STABLE, b=UP_FAILURE), 102) == [SwitchReplica(A, 5)]
    other = choice(True, a=STABLE, b=STABLE)
    assert other.routes_changed(routes("b", a=STABILIZATION, b=UP_FAILURE), 101) == [
        SwitchReplica(B, 5)
    ]
    stable = choice(False, a=UP_FAILURE, b=UP_FAILURE)
    assert stable.routes_changed(routes("a", a=UP_FAILURE, b=STABILIZATION), 101) == [
        SwitchReplica(B, 5)
    ]


@pytest.mark.parametrize(("live", "first"), [(True, A), (False, B)])
def test_a_stable_reader_prefers_a_replica_in_stabilization(live: bool, first: str) -> None:
    made = ReplicaChoice(5, stall_s=1000, live=live)
    assert made.routes_changed(routes(a=UP_FAILURE, b=STABILIZATION), 0) == [
        SwitchReplica(first, 5)
    ]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("state", list(ConsistencyState))
def test_among_equals_a_reader_stays(live: bool, state: ConsistencyState) -> None:
    assert choice(live, a=state, b=state).current == A


def test_a_reported_state_is_newer_than_that_of_the_routes() -> None:
    made = choice(False, a=STABLE, b=STABLE)
    made.record_state(A, UP_FAILURE, 100)
    assert made.epochs_received(A, (), 100) == [SwitchReplica(B, 5)]
    made.record_state(B, UP_FAILURE, 100.1)
    assert made.routes_changed(routes(a=STABLE, b=STABLE), 100.2) == []
    later = 100.2 + REPORTED_STATE_VALID_S
    assert made.routes_changed(routes(a=STABLE, b=STABLE), later) == [SwitchReplica(A, 5)]


def test_a_stable_replica_that_failed_is_not_preferred() -> None:
    made = choice(False, a=STABLE, b=STABLE)
    made.call_failed(A, 100)
    made.record_state(B, UP_FAILURE, 101)
    assert made.routes_changed(routes(a=STABLE, b=UP_FAILURE), 105) == []
    assert made.routes_changed(routes(a=STABLE, b=UP_FAILURE), 131) == [SwitchReplica(A, 5)]


def test_a_live_reader_skips_epochs_older_than_the_newest_received() -> None:
    made = choice(True, a=STABLE)
    assert made.live_received(A, next_epoch=9, new=True, now=101) == []
    assert made.next_epoch == 9


# --- the core ---


def call_of(core: ReaderCore, now: float) -> ReadEpochs:
    (*_, call) = core.woken(has_buffer_space=True, now=now)
    assert isinstance(call, ReadEpochs)
    return call


def test_a_live_reader_goes_on_at_its_position() -> None:
    core = ReaderCore(Subscription("s", 0, 5, live=True), stall_s=3)
    core.routes_changed(routes_to(A), 0)
    call = call_of(core, 0)
    assert (call.epoch, call.position) == (5, LivePosition())
    at = LivePosition(boot="boot", span=4, epoch=8)
    core.live_returned(
        call.call, head=9, state=UP_FAILURE, next_epoch=7, newest=7, position=at, now=0
    )
    call = call_of(core, 0)
    assert (call.address, call.epoch, call.position) == (A, 7, at)


def test_at_another_replica_only_newer_epochs_are_read() -> None:
    """A position in one replica's output means nothing to another replica."""
    core = ReaderCore(Subscription("s", 0, 5, live=True), stall_s=3)
    core.routes_changed(routes_to(A, B), 0)
    call = call_of(core, 0)
    at = LivePosition(boot="boot", span=4, epoch=8)
    core.live_returned(
        call.call, head=9, state=UP_FAILURE, next_epoch=7, newest=7, position=at, now=0
    )
    core.routes_changed(routes(a=UP_FAILURE, b=STABLE), 50)
    call = call_of(core, 50)
    assert (call.address, call.epoch, call.position) == (B, 8, LivePosition())


# --- over HTTP ---


class Collected:
    def __init__(self, *live: LiveServer) -> None:
        self.got: list[tuple[str, int, int]] = []
        self.progress: list[StreamProgress] = []
        self.io = started_io()
        self.reader = PartitionReader(
            self.io,
            Subscription("s", 0, 0, live=True),
            self._delivered,
            lambda: True,
            connect=lambda address: StreamClient(address, IDENTITY),
            on_progress=self.progress.append,
        )
        self.route(*((one, STABLE) for one in live))

    def _delivered(self, batch: EpochBatch) -> None:
        self.got.append((str(batch.kind), batch.epoch, batch.attempt))

    def route(self, *live: tuple[LiveServer, ConsistencyState]) -> None:
        self.reader.route(
            tuple(
                Endpoint(
                    address=f"{ADDRESS}:{one.server.port}", replica=at, incarnation=1, state=state
                )
                for at, (one, state) in enumerate(live)
            )
        )

    def expect(self, count: int) -> None:
        eventually(lambda: len(self.got) >= count, 10)

    def close(self) -> None:
        self.reader.close()
        self.io.stop()


def test_a_correction_is_delivered_from_the_newest_received_epoch_on(tmp_path: Path) -> None:
    live = LiveServer(tmp_path)
    live.stable(0)
    collected = Collected(live)
    collected.expect(1)
    live.tentative(1, 2)
    collected.expect(3)
    live.output.undo(1)
    live.stable(1, 2)
    live.output.reconciliation_done(2)
    live.stable(3)
    collected.expect(7)
    collected.close()
    live.server.stop()
    assert collected.got == [
        ("STABLE", 0, 0),
        ("TENTATIVE", 1, 1),
        ("TENTATIVE", 2, 1),
        ("UNDO", 1, 0),
        ("STABLE", 2, 0),
        ("REC_DONE", 2, 0),
        ("STABLE", 3, 0),
    ]
    reports = [p.live for p in collected.progress if p.live is not None]
    assert max(r.newest_tentative for r in reports) == 2
    assert reports[-1].corrected_through == 2


def test_a_reader_switches_to_a_replica_that_is_stable(tmp_path: Path) -> None:
    failed, stable = LiveServer(tmp_path / "a"), LiveServer(tmp_path / "b")
    failed.stable(0)
    stable.stable(0)
    collected = Collected(failed, stable)
    collected.expect(1)
    failed.output.enter(UP_FAILURE)
    failed.tentative(1)
    collected.expect(2)
    stable.stable(1, 2)
    collected.expect(3)
    collected.close()
    failed.server.stop()
    stable.server.stop()
    assert collected.got == [("STABLE", 0, 0), ("TENTATIVE", 1, 1), ("STABLE", 2, 0)]
