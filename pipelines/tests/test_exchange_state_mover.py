"""The cores of donor, newcomer and upstream holds, event by event.

Design: docs/design/state-movement.md.
Paper: Flux (Shah et al. 2004), sections 3.4 and 3.5.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.exchange.state_mover import donor as d
from rekindle.exchange.state_mover import newcomer as n
from rekindle.exchange.state_mover.chunks import ChunkPlan, chunk_digest
from rekindle.exchange.state_mover.donor import DonorCore, DonorLimits
from rekindle.exchange.state_mover.holds import Holds
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    FailureReason,
    Offer,
    OfferRequest,
    Order,
    Preparing,
    Refusal,
    RefusalReason,
    Release,
    Replica,
    Session,
    SessionVersion,
)
from rekindle.exchange.state_mover.newcomer import NewcomerCore, NewcomerLimits
from rekindle.exchange.state_mover.phases import (
    DONOR,
    NEWCOMER,
    DonorEvent,
    DonorPhase,
    NewcomerEvent,
    NewcomerPhase,
)
from rekindle.topology.model import Slot
from rekindle.transitions import InvalidTransition, StateMachine

SLOT = Slot("mid", 0, 1)
DONOR_REPLICA = Replica(Slot("mid", 0, 0), 3)
SESSION = Session(SLOT, 2, SessionVersion(1, 1))
NEWER = replace(SESSION, version=SessionVersion(1, 2))
OFFER = Offer(SESSION, "boot-d", epoch=9, base=5, chunks=4, digest="whole")


# -- chunks ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 30))
def test_chunks_cover_all_bytes_once_in_order(sizes: list[int], chunk_bytes: int) -> None:
    pieces = [bytes([at % 251]) * size for at, size in enumerate(sizes)]
    plan = ChunkPlan(sizes, chunk_bytes)
    chunks = [
        b"".join(pieces[s.piece][s.offset : s.offset + s.nbytes] for s in plan.slices(number))
        for number in range(plan.chunks)
    ]
    assert b"".join(chunks) == b"".join(pieces)
    assert all(len(chunk) == chunk_bytes for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= chunk_bytes for chunk in chunks)


def test_a_chunk_outside_the_plan_is_an_error() -> None:
    with pytest.raises(IndexError, match="chunk 2 of 2"):
        ChunkPlan([5, 5], 5).slices(2)


# -- holds of an upstream replica ------------------------------------------------------------------


def test_a_hold_outlasts_a_floor_of_an_older_poll() -> None:
    holds = Holds()
    holds.update([SESSION], [], log_base=7)
    assert holds.floor(30) == 6


def test_a_hold_keeps_the_base_that_it_was_registered_at() -> None:
    holds = Holds()
    holds.update([SESSION], [], log_base=7)
    holds.update([SESSION], [], log_base=20)
    assert [hold.base for hold in holds.confirmed()] == [7]


def test_a_released_hold_keeps_nothing() -> None:
    holds = Holds()
    holds.update([SESSION, NEWER], [], log_base=7)
    holds.update([], [SESSION], log_base=7)
    holds.update([], [SESSION, NEWER], log_base=7)
    assert holds.floor(30) == 30


# -- the donor -------------------------------------------------------------------------------------


def a_donor(epoch: int = 9) -> DonorCore:
    return DonorCore(
        DONOR_REPLICA,
        "boot-d",
        epoch,
        DonorLimits(chunk_bytes=10, chunks_at_once=2, sessions=2, lease_s=8),
    )


def offer_request(session: Session = SESSION, needed: int = 5) -> d.MessageReceived:
    return d.MessageReceived(OfferRequest(session, DONOR_REPLICA, needed, chunk_bytes=10))


def chunk_request(number: int, boot: str = "boot-d") -> d.MessageReceived:
    return d.MessageReceived(ChunkRequest(SESSION, DONOR_REPLICA, boot, number))


def pinned(epoch: int = 9, session: Session = SESSION) -> d.SnapshotPinned:
    return d.SnapshotPinned(session, epoch, base=5, sizes=[15, 20], digest="whole")


def sending_donor() -> DonorCore:
    core = a_donor()
    assert core.step(offer_request(), 0.0) == [d.PinSnapshot(SESSION)]
    assert core.step(pinned(), 0.0) == [d.Reply(OFFER)]
    return core


def test_a_donor_waits_until_its_state_reaches_the_upstream_logs() -> None:
    core = a_donor(epoch=6)
    assert core.step(offer_request(needed=9), 0.0) == []
    assert core.step(d.StateReached(7), 0.0) == []
    assert core.step(d.StateReached(8), 0.0) == [d.PinSnapshot(SESSION)]


def test_a_donor_that_reads_its_state_says_how_far_it_is() -> None:
    core = a_donor()
    core.step(offer_request(), 0.0)
    assert core.step(offer_request(), 1.0) == [], "nothing has been read"
    core.step(d.PinProgressed(SESSION, runs=3), 2.0)
    assert core.step(offer_request(), 2.0) == [d.Reply(Preparing(SESSION, runs=3))]
    assert core.step(pinned(), 3.0) == [d.Reply(OFFER)]
    assert core.step(offer_request(), 3.0) == [d.Reply(OFFER)]


def test_a_snapshot_before_the_needed_epoch_is_not_offered() -> None:
    core = a_donor(epoch=8)
    core.step(offer_request(needed=9), 0.0)
    assert core.step(pinned(epoch=7), 0.0) == [d.UnpinSnapshot(SESSION)]
    assert core.step(d.StateReached(10), 0.0) == [d.PinSnapshot(SESSION)]


def test_a_repeated_request_gets_the_same_offer() -> None:
    core = sending_donor()
    core.step(d.StateReached(40), 1.0)
    assert core.step(offer_request(), 1.0) == [d.Reply(OFFER)]


def test_chunks_are_answered_in_any_order_and_again() -> None:
    core = sending_donor()
    (read,) = core.step(chunk_request(3), 0.0)
    assert isinstance(read, d.ReadChunk)
    (reply,) = core.step(d.ChunkRead(SESSION, 3, b"abcde"), 0.0)
    assert reply == d.Reply(Chunk(SESSION, "boot-d", 3, b"abcde", chunk_digest(b"abcde")))
    assert len(core.step(chunk_request(3), 0.0)) == 1


def test_a_donor_reads_no_more_than_its_window() -> None:
    core = sending_donor()
    assert [len(core.step(chunk_request(at), 0.0)) for at in (0, 1, 1, 2)] == [1, 1, 0, 0]


def test_a_chunk_of_an_earlier_boot_is_refused() -> None:
    core = sending_donor()
    assert core.step(chunk_request(0, boot="before"), 0.0) == [
        d.Reply(Refusal(SESSION, RefusalReason.ENDED))
    ]


def test_a_newer_session_of_the_slot_ends_the_older_one() -> None:
    core = sending_donor()
    assert core.step(offer_request(NEWER), 1.0) == [
        d.UnpinSnapshot(SESSION),
        d.PinSnapshot(NEWER),
    ]
    assert core.step(offer_request(SESSION), 1.0) == [
        d.Reply(Refusal(SESSION, RefusalReason.SUPERSEDED))
    ]


def test_an_older_incarnation_is_refused() -> None:
    core = sending_donor()
    of_older_incarnation = Session(SLOT, 1, SessionVersion(9, 9))
    assert core.step(offer_request(of_older_incarnation), 0.0) == [
        d.Reply(Refusal(of_older_incarnation, RefusalReason.SUPERSEDED))
    ]


def test_a_request_for_another_incarnation_or_partition_is_refused() -> None:
    core = a_donor()
    other = Session(Slot("mid", 1, 0), 2, SessionVersion(1, 1))
    meant_for_another = OfferRequest(SESSION, replace(DONOR_REPLICA, incarnation=2), 5, 10)
    refused = [
        core.step(offer_request(other), 0.0),
        core.step(d.MessageReceived(meant_for_another), 0.0),
    ]
    assert refused == [
        [d.Reply(Refusal(s, RefusalReason.WRONG_RECIPIENT))] for s in (other, SESSION)
    ]


def test_a_session_without_requests_expires_and_does_not_come_back() -> None:
    core = sending_donor()
    assert core.wake_at == 8.0
    assert core.step(d.LeaseChecked(), 7.9) == []
    assert core.step(d.LeaseChecked(), 8.0) == [d.UnpinSnapshot(SESSION)]
    assert core.step(offer_request(), 9.0) == [d.Reply(Refusal(SESSION, RefusalReason.ENDED))]


def test_a_pin_after_the_end_of_its_session_is_unpinned() -> None:
    core = a_donor()
    core.step(offer_request(), 0.0)
    assert core.step(d.MessageReceived(Release(SESSION)), 0.0) == []
    assert core.step(pinned(), 0.0) == [d.UnpinSnapshot(SESSION)]


def test_a_donor_has_a_limit_of_sessions() -> None:
    core = a_donor()
    sessions = [Session(Slot("mid", 0, at), 1, SessionVersion(1, at)) for at in (1, 2, 4)]
    answers = [core.step(offer_request(s), 0.0) for s in sessions]
    assert answers[2] == [d.Reply(Refusal(sessions[2], RefusalReason.BUSY))]
    core.step(d.SessionsReleased([sessions[0]]), 0.0)
    assert core.step(offer_request(sessions[2]), 0.0) == [d.PinSnapshot(sessions[2])]


def test_a_donor_that_stops_refuses() -> None:
    core = sending_donor()
    stopping = d.Reply(Refusal(SESSION, RefusalReason.STOPPING))
    assert core.step(d.DonorStopping(), 0.0) == [d.UnpinSnapshot(SESSION), stopping]
    assert core.step(offer_request(NEWER), 0.0) == [d.Reply(Refusal(NEWER, RefusalReason.STOPPING))]


@pytest.mark.parametrize("phase", ["behind", "pinning", "sending"])
def test_epochs_go_on_in_every_phase_of_a_session(phase: str) -> None:
    core = a_donor(epoch=2 if phase == "behind" else 9)
    core.step(offer_request(needed=9 if phase == "behind" else 5), 0.0)
    if phase == "sending":
        core.step(pinned(), 0.0)
        core.step(chunk_request(0), 0.0)
    before = core.sessions
    effects = [e for epoch in range(10, 200) for e in core.step(d.StateReached(epoch), 0.0)]
    assert effects == ([d.PinSnapshot(SESSION)] if phase == "behind" else [])
    assert core.sessions == before


# -- the newcomer ----------------------------------------------------------------------------------


def a_newcomer() -> NewcomerCore:
    limits = NewcomerLimits(chunk_bytes=10, chunks_at_once=2, max_damaged=3)
    return NewcomerCore(Replica(SLOT, 2), "boot-n", limits)


def order(
    needed: int | None = 5, session: Session = SESSION, boot: str = "boot-n"
) -> n.OrderReceived:
    return n.OrderReceived(Order(session, boot, DONOR_REPLICA, needed))


def chunk(number: int, data: bytes = b"x" * 10, boot: str = "boot-d") -> n.MessageReceived:
    return n.MessageReceived(Chunk(SESSION, boot, number, data, chunk_digest(data)))


def asked(effects: list[n.NewcomerEffect]) -> list[int]:
    messages = [e.message for e in effects if isinstance(e, n.SendToDonor)]
    return [m.number for m in messages if isinstance(m, ChunkRequest)]


def stored(effects: list[n.NewcomerEffect]) -> list[int]:
    return [e.number for e in effects if isinstance(e, n.StoreChunk)]


def phase_of(core: NewcomerCore) -> NewcomerPhase | None:
    progress = core.report().progress
    return progress.phase if progress is not None else None


def receiving_newcomer() -> NewcomerCore:
    core = a_newcomer()
    core.step(order(), 0.0)
    assert asked(core.step(n.MessageReceived(OFFER), 0.0)) == [0, 1]
    return core


def installing_newcomer() -> NewcomerCore:
    core = receiving_newcomer()
    for number in range(4):
        core.step(chunk(number), 0.0)
        effects = core.step(n.ChunkStored(SESSION, number), 0.0)
    assert effects == [n.InstallState(SESSION, OFFER)]
    return core


def test_no_request_is_sent_before_all_holds_are_confirmed() -> None:
    core = a_newcomer()
    assert core.step(order(needed=None), 0.0) == []
    assert core.step(order(needed=5), 0.0) == [
        n.SendToDonor(DONOR_REPLICA, OfferRequest(SESSION, DONOR_REPLICA, 5, 10))
    ]
    assert core.step(order(needed=None), 0.0) == [], "an older poll"


def test_an_order_for_another_boot_or_incarnation_is_ignored() -> None:
    core = a_newcomer()
    assert core.step(order(boot="before"), 0.0) == []
    assert core.step(order(session=replace(SESSION, incarnation=1)), 0.0) == []
    assert core.report().progress is None


def test_an_offer_before_the_needed_epoch_is_refused() -> None:
    core = a_newcomer()
    core.step(order(needed=11), 0.0)
    core.step(n.MessageReceived(OFFER), 0.0)
    assert phase_of(core) is NewcomerPhase.FAILED


def test_a_donor_that_prepares_its_offer_is_asked_again_soon() -> None:
    core = a_newcomer()
    core.step(order(), 0.0)
    for now in (2.0, 6.0):
        core.step(n.TimePassed(), now)
    assert core.wake_at == 14.0
    core.step(n.MessageReceived(Preparing(SESSION, runs=3)), 10.0)
    assert core.wake_at == 12.0
    progress = core.report().progress
    assert progress is not None
    assert (progress.phase, progress.prepared) == (NewcomerPhase.ASKING, 3)
    core.step(n.MessageReceived(OFFER), 11.0)
    assert core.step(n.MessageReceived(Preparing(SESSION, runs=4)), 11.0) == [], "it was late"


def test_chunks_are_stored_in_order_within_the_window() -> None:
    core = receiving_newcomer()
    assert stored(core.step(chunk(1), 0.0)) == []
    effects = core.step(chunk(0), 0.0)
    assert stored(effects) == [0]
    assert asked(effects) == [], "two chunks are in memory until they are stored"
    effects = core.step(n.ChunkStored(SESSION, 0), 0.0)
    assert (stored(effects), asked(effects)) == ([1], [2])


def test_a_repeated_or_foreign_chunk_changes_nothing() -> None:
    core = receiving_newcomer()
    core.step(chunk(0), 0.0)
    before = core.report()
    assert core.step(chunk(0), 0.0) == []
    assert core.step(chunk(1, boot="another"), 0.0) == []
    assert core.step(chunk(3), 0.0) == [], "it was not asked for"
    assert core.report() == before


def test_lost_requests_are_repeated_with_back_off() -> None:
    core = receiving_newcomer()
    core.step(chunk(0), 0.0)
    assert asked(core.step(n.TimePassed(), 1.9)) == []
    assert asked(core.step(n.TimePassed(), 2.0)) == [1]
    assert core.wake_at == 6.0, "twice as late as before"


def test_a_damaged_chunk_is_requested_again_up_to_a_limit() -> None:
    core = receiving_newcomer()
    damaged = n.MessageReceived(Chunk(SESSION, "boot-d", 0, b"x" * 10, "other"))
    assert asked(core.step(damaged, 0.0)) == [0]
    assert asked(core.step(damaged, 0.0)) == [0]
    core.step(damaged, 0.0)
    progress = core.report().progress
    assert progress is not None
    assert (progress.phase, progress.reason) == (NewcomerPhase.FAILED, FailureReason.DAMAGED)


def test_it_starts_only_with_the_donors_digest() -> None:
    core = installing_newcomer()
    assert core.step(n.StateInstalled(SESSION, "whole"), 0.0) == [
        n.StartFrom(SESSION, 9, 5),
        n.SendToDonor(DONOR_REPLICA, Release(SESSION)),
    ]
    other = installing_newcomer()
    assert n.DiscardState(SESSION) in other.step(n.StateInstalled(SESSION, "other"), 0.0)
    assert phase_of(other) is NewcomerPhase.FAILED


def test_a_donor_that_restarted_ends_the_session() -> None:
    core = receiving_newcomer()
    core.step(n.MessageReceived(replace(OFFER, boot="next")), 0.0)
    assert phase_of(core) is NewcomerPhase.FAILED


def test_a_refusal_counts_only_while_the_donor_is_needed() -> None:
    refusal = n.MessageReceived(Refusal(SESSION, RefusalReason.ENDED))
    busy = n.MessageReceived(Refusal(SESSION, RefusalReason.BUSY))
    core, late = receiving_newcomer(), installing_newcomer()
    core.step(busy, 0.0)
    assert phase_of(core) is NewcomerPhase.RECEIVING
    core.step(refusal, 0.0)
    late.step(refusal, 0.0)
    assert (phase_of(core), phase_of(late)) == (NewcomerPhase.FAILED, NewcomerPhase.INSTALLING)


def test_an_abandoned_session_is_never_started() -> None:
    core = installing_newcomer()
    core.step(n.AbandonReceived(SESSION.version), 0.0)
    assert core.step(n.StateInstalled(SESSION, "whole"), 0.0) == []
    assert core.step(order(), 0.0) == [], "an older poll"
    assert core.report().abandoned == SESSION.version
    assert core.may_restore(abandoned=None)


def test_a_restore_point_of_an_older_poll_is_not_followed() -> None:
    core = receiving_newcomer()
    assert not core.may_restore(abandoned=None)
    assert not core.may_restore(abandoned=SessionVersion(0, 9))
    assert core.may_restore(abandoned=SESSION.version)


def test_a_newer_order_replaces_the_session() -> None:
    core = receiving_newcomer()
    effects = core.step(order(session=NEWER), 0.0)
    assert effects[:2] == [n.DiscardState(SESSION), n.SendToDonor(DONOR_REPLICA, Release(SESSION))]
    assert core.step(order(), 0.0) == [], "an older poll"
    assert core.step(chunk(0), 0.0) == []
    progress = core.report().progress
    assert progress is not None
    assert progress.session == NEWER


def test_no_order_is_followed_once_it_restores_from_a_checkpoint() -> None:
    core = a_newcomer()
    core.step(n.RestoreBegun(), 0.0)
    assert core.step(order(), 0.0) == []


def test_an_empty_state_is_moved_without_chunks() -> None:
    core = a_newcomer()
    core.step(order(), 0.0)
    empty = replace(OFFER, chunks=0)
    assert core.step(n.MessageReceived(empty), 0.0) == [n.InstallState(SESSION, empty)]


# -- tables ----------------------------------------------------------------------------------------


def test_each_cell_of_the_tables_is_a_transition_or_raises() -> None:
    for state, event in product(DonorPhase, DonorEvent):
        donor = StateMachine("donor", DONOR, state)
        if event in DONOR[state]:
            donor.step(event)
        else:
            with pytest.raises(InvalidTransition):
                donor.step(event)
    for at, happened in product(NewcomerPhase, NewcomerEvent):
        newcomer = StateMachine("newcomer", NEWCOMER, at)
        if happened in NEWCOMER[at]:
            newcomer.step(happened)
        else:
            with pytest.raises(InvalidTransition):
                newcomer.step(happened)
