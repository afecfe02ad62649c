"""The newcomer's side of a state movement: `NewcomerCore.step(event, now) -> effects`. Pure.

It requests chunks from the donor, several at a time (`chunks_at_once`), and stores them in order.
Chunks that are requested, have arrived or are being stored are never more, so a slow disk slows the
transfer, and a lost connection costs these chunks. The state is used only as a whole, once its
digest equals the donor's.

Requests are repeated until they are answered, with back-off. How long that may go on is decided by
the coordinator, which sees the progress.

Design: docs/design/state-movement.md#newcomer.
Paper: Flux (Shah et al. 2004), sections 3.4, 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from rekindle.backoff import BackoffPolicy
from rekindle.exchange.state_mover.chunks import chunk_digest
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    FailureReason,
    MessageToDonor,
    MessageToNewcomer,
    NewcomerReport,
    Offer,
    OfferRequest,
    Order,
    Preparing,
    Progress,
    Refusal,
    RefusalReason,
    Release,
    Replica,
    Session,
    SessionVersion,
)
from rekindle.exchange.state_mover.phases import NEWCOMER, NewcomerEvent, NewcomerPhase
from rekindle.transitions import StateMachine

CHUNK_BYTES = 4 << 20
CHUNKS_AT_ONCE = 4
"""Chunks that are requested or in memory. Times CHUNK_BYTES, they are the memory of a movement."""
MAX_DAMAGED = 8
"""A session fails when so many chunks in a row arrive damaged."""
RETRY = BackoffPolicy(first_s=2.0, longest_s=16.0)


@dataclass(frozen=True, slots=True)
class NewcomerLimits:
    chunk_bytes: int = CHUNK_BYTES
    chunks_at_once: int = CHUNKS_AT_ONCE
    max_damaged: int = MAX_DAMAGED
    retry: BackoffPolicy = RETRY


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderReceived:
    order: Order


@dataclass(frozen=True, slots=True)
class AbandonReceived:
    """Give up all sessions with this version or an older one: start from none of them."""

    version: SessionVersion


@dataclass(frozen=True, slots=True)
class RestoreBegun:
    """The task restores from a checkpoint (only if `may_restore`)."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    message: MessageToNewcomer


@dataclass(frozen=True, slots=True)
class ChunkStored:
    session: Session
    number: int


@dataclass(frozen=True, slots=True)
class StateInstalled:
    """The result of InstallState. `digest`: of state and log as they were installed."""

    session: Session
    digest: str


@dataclass(frozen=True, slots=True)
class StoringFailed:
    """A chunk could not be stored, or the state not be installed."""

    session: Session
    message: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Requests may be due for repetition (`NewcomerCore.wake_at`)."""


NewcomerCoreEvent = (
    OrderReceived
    | AbandonReceived
    | RestoreBegun
    | MessageReceived
    | ChunkStored
    | StateInstalled
    | StoringFailed
    | TimePassed
)


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToDonor:
    """The message may be lost; requests are then repeated."""

    donor: Replica
    message: MessageToDonor


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Append the chunk to those before; one at a time. The result is ChunkStored or
    StoringFailed."""

    session: Session
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class InstallState:
    """Create state and log from the stored chunks. The result is StateInstalled or
    StoringFailed."""

    session: Session
    offer: Offer


@dataclass(frozen=True, slots=True)
class DiscardState:
    """Delete what is stored of this session."""

    session: Session


@dataclass(frozen=True, slots=True)
class StartFrom:
    """Run with the installed state: read inputs from `epoch + 1`, serve the log from `base`."""

    session: Session
    epoch: int
    base: int


NewcomerEffect = SendToDonor | StoreChunk | InstallState | DiscardState | StartFrom


@dataclass(slots=True)
class _Request:
    """`at`: when it was last sent. `repeated`: how often it was sent again."""

    at: float
    repeated: int = 0


@dataclass(slots=True)
class _NewcomerSession:
    """One session at the newcomer. `needed`: the first epoch that all upstream logs still
    have; None until they have confirmed the hold (HOLDING). `prepared`: runs that the donor has
    read for its offer. `stored`: how many chunks the shell has stored. `storing`: whether it stores
    the next one. `requested`, `arrived`: chunks by number. `damaged`: chunks in a row that arrived
    damaged."""

    order: Order
    needed: int | None
    machine: StateMachine[NewcomerPhase, NewcomerEvent] = field(init=False)
    offer: Offer | None = None
    prepared: int = 0
    stored: int = 0
    storing: bool = False
    requested: dict[int, _Request] = field(default_factory=dict)
    arrived: dict[int, bytes] = field(default_factory=dict)
    offer_request: _Request | None = None
    damaged: int = 0
    reason: FailureReason | None = None
    message: str = ""

    def __post_init__(self) -> None:
        subject = f"{self.order.session} (newcomer)"
        self.machine = StateMachine(subject, NEWCOMER, NewcomerPhase.HOLDING)

    @property
    def session(self) -> Session:
        return self.order.session

    @property
    def phase(self) -> NewcomerPhase:
        return self.machine.state

    @property
    def in_memory(self) -> int:
        """Chunks that are requested, have arrived, or are being stored."""
        return len(self.requested) + len(self.arrived) + self.storing


class NewcomerCore:
    """One boot of a task that has no state yet."""

    def __init__(self, replica: Replica, boot: str, limits: NewcomerLimits | None = None) -> None:
        self._replica = replica
        self._boot = boot
        self._limits = limits or NewcomerLimits()
        self._abandoned: SessionVersion | None = None
        self._current: _NewcomerSession | None = None
        self._restores = False

    @property
    def started(self) -> bool:
        return self._current is not None and self._current.phase is NewcomerPhase.STARTED

    @property
    def bytes_in_memory(self) -> int:
        """At most; of chunks that are requested, have arrived, or are being stored."""
        return self._current.in_memory * self._limits.chunk_bytes if self._current else 0

    @property
    def wake_at(self) -> float | None:
        current = self._current
        if current is None or current.phase.over:
            return None
        made = [*current.requested.values()]
        if current.offer_request is not None:
            made.append(current.offer_request)
        return min((self._due(request) for request in made), default=None)

    def may_restore(self, abandoned: SessionVersion | None) -> bool:
        """Whether to restore from the checkpoint that a poll names, which abandons all sessions up
        to a version. Not for an older poll, from before the session."""
        current = self._current
        if current is None or current.phase in (NewcomerPhase.FAILED, NewcomerPhase.ABANDONED):
            return True
        return abandoned is not None and abandoned >= current.session.version and not self.started

    def report(self) -> NewcomerReport:
        current = self._current
        if current is None:
            return NewcomerReport(None, self._abandoned)
        offer = current.offer
        progress = Progress(
            current.session,
            current.order.donor,
            current.needed,
            current.phase,
            offer.epoch if offer is not None else None,
            current.stored,
            offer.chunks if offer is not None else 0,
            current.reason,
            current.message,
            current.prepared,
        )
        return NewcomerReport(progress, self._abandoned)

    def step(self, event: NewcomerCoreEvent, now: float) -> list[NewcomerEffect]:
        """Raises InvalidTransition."""
        match event:
            case OrderReceived(order):
                return self._order_received(order, now)
            case AbandonReceived(version):
                return self._abandon(version)
            case RestoreBegun():
                self._restores = True
                return self._abandon_session(self._current)
            case MessageReceived(message):
                return self._received(message, now)
            case ChunkStored(session, number):
                return self._chunk_stored(session, number, now)
            case StateInstalled(session, digest):
                return self._installed(session, digest)
            case StoringFailed(session, message):
                current = self._find(session)
                if current is None:
                    return []
                return self._fail(current, FailureReason.NOT_STORED, message)
            case TimePassed():
                return self._repeat_requests(now)
        assert_never(event)

    # -- the coordinator -------------------------------------------------------------------------

    def _order_received(self, order: Order, now: float) -> list[NewcomerEffect]:
        session, current = order.session, self._current
        if (session.slot, session.incarnation) != (self._replica.slot, self._replica.incarnation):
            return []
        if order.boot != self._boot or self.started or self._restores:
            return []
        if self._abandoned is not None and session.version <= self._abandoned:
            return []
        effects: list[NewcomerEffect] = []
        if current is None or session.version > current.session.version:
            effects += self._abandon_session(current)
            self._current = current = _NewcomerSession(order, None)
        elif session != current.session:
            return []  # an older poll
        if current.phase is NewcomerPhase.HOLDING and order.needed is not None:
            current.needed = order.needed
            current.machine.step(NewcomerEvent.HOLDS_CONFIRMED)
            effects += self._request_offer(current, now)
        return effects

    def _abandon(self, version: SessionVersion) -> list[NewcomerEffect]:
        if self.started:
            return []
        self._abandoned = max(version, self._abandoned or version)
        if self._current is None or self._current.session.version > version:
            return []
        return self._abandon_session(self._current)

    def _abandon_session(self, current: _NewcomerSession | None) -> list[NewcomerEffect]:
        if current is None or current.phase is NewcomerPhase.ABANDONED:
            return []
        was_failed = current.phase is NewcomerPhase.FAILED
        current.machine.step(NewcomerEvent.ABANDONED)
        return [] if was_failed else self._clean_up(current)

    # -- the donor -------------------------------------------------------------------------------

    def _received(self, message: MessageToNewcomer, now: float) -> list[NewcomerEffect]:
        current = self._find(message.session)
        if current is None:
            return []
        match message:
            case Preparing(_, runs):
                if current.phase is NewcomerPhase.ASKING:  # the offer is requested again soon
                    current.prepared, current.offer_request = runs, _Request(now)
                return []
            case Offer():
                return self._offer_received(current, message, now)
            case Chunk():
                return self._chunk_arrived(current, message, now)
            case Refusal(_, reason, text):
                if reason is RefusalReason.BUSY:
                    return []  # requested again with back-off
                if current.phase not in (NewcomerPhase.ASKING, NewcomerPhase.RECEIVING):
                    return []  # nothing more is needed from the donor
                return self._fail(current, FailureReason.REFUSED, text or f"refused: {reason}")
        assert_never(message)

    def _offer_received(
        self, current: _NewcomerSession, offer: Offer, now: float
    ) -> list[NewcomerEffect]:
        if current.phase is not NewcomerPhase.ASKING:
            if current.phase is NewcomerPhase.RECEIVING and not self._is_of_offer(current, offer):
                return self._fail(current, FailureReason.DONOR_RESTARTED)
            return []
        if current.needed is None or offer.epoch + 1 < current.needed:
            # For the report it is as if the donor had refused: another one may do better.
            message = f"it offers epoch {offer.epoch}, but inputs begin at {current.needed}"
            return self._fail(current, FailureReason.REFUSED, message)
        current.offer, current.offer_request = offer, None
        current.machine.step(NewcomerEvent.OFFERED)
        return self._continue_transfer(current, now)

    def _chunk_arrived(
        self, current: _NewcomerSession, chunk: Chunk, now: float
    ) -> list[NewcomerEffect]:
        if not self._is_of_offer(current, chunk) or chunk.number not in current.requested:
            return []  # of an earlier boot of the donor, or it has arrived before
        if len(chunk.data) > self._limits.chunk_bytes or chunk_digest(chunk.data) != chunk.digest:
            current.damaged += 1
            if current.damaged >= self._limits.max_damaged:
                return self._fail(current, FailureReason.DAMAGED)
            current.requested[chunk.number] = _Request(now)
            return [self._request_chunk(current, chunk.number)]
        current.damaged = 0
        del current.requested[chunk.number]
        current.arrived[chunk.number] = chunk.data
        return self._continue_transfer(current, now)

    # -- results from the shell ------------------------------------------------------------------

    def _chunk_stored(self, session: Session, number: int, now: float) -> list[NewcomerEffect]:
        current = self._find(session)
        if current is None or not current.storing or number != current.stored:
            return []
        current.storing = False
        current.stored += 1
        return self._continue_transfer(current, now)

    def _installed(self, session: Session, digest: str) -> list[NewcomerEffect]:
        current = self._find(session)
        if current is None or current.offer is None:
            return []
        offer = current.offer
        if digest != offer.digest:
            message = f"the donor's digest is {offer.digest}, the digest of what arrived {digest}"
            return self._fail(current, FailureReason.DIGEST_MISMATCH, message)
        current.machine.step(NewcomerEvent.VERIFIED)
        return [
            StartFrom(session, offer.epoch, offer.base),
            SendToDonor(current.order.donor, Release(session)),
        ]

    # -- requests --------------------------------------------------------------------------------

    def _continue_transfer(self, current: _NewcomerSession, now: float) -> list[NewcomerEffect]:
        """Store the next chunk, one at a time; request up to `chunks_at_once`; install when all
        is stored."""
        offer = current.offer
        assert offer is not None
        effects: list[NewcomerEffect] = []
        if not current.storing:
            data = current.arrived.pop(current.stored, None)
            if data is not None:
                current.storing = True
                effects.append(StoreChunk(current.session, current.stored, data))
        upto = min(offer.chunks, current.stored + self._limits.chunks_at_once)
        for number in range(current.stored + current.storing, upto):
            if number not in current.requested and number not in current.arrived:
                current.requested[number] = _Request(now)
                effects.append(self._request_chunk(current, number))
        if current.stored == offer.chunks:
            current.machine.step(NewcomerEvent.STORED)
            effects.append(InstallState(current.session, offer))
        return effects

    def _repeat_requests(self, now: float) -> list[NewcomerEffect]:
        current = self._current
        if current is None or current.phase.over:
            return []
        effects: list[NewcomerEffect] = []
        request = current.offer_request
        if request is not None and now >= self._due(request):
            effects += self._request_offer(current, now)
        for number, requested in current.requested.items():
            if now >= self._due(requested):
                current.requested[number] = _Request(now, requested.repeated + 1)
                effects.append(self._request_chunk(current, number))
        return effects

    def _due(self, request: _Request) -> float:
        return request.at + self._limits.retry.wait_s(request.repeated + 1)

    def _request_offer(self, current: _NewcomerSession, now: float) -> list[NewcomerEffect]:
        made = current.offer_request
        current.offer_request = _Request(now, made.repeated + 1 if made is not None else 0)
        assert current.needed is not None
        donor = current.order.donor
        request = OfferRequest(current.session, donor, current.needed, self._limits.chunk_bytes)
        return [SendToDonor(donor, request)]

    def _request_chunk(self, current: _NewcomerSession, number: int) -> SendToDonor:
        assert current.offer is not None
        donor = current.order.donor
        return SendToDonor(donor, ChunkRequest(current.session, donor, current.offer.boot, number))

    # -- endings ---------------------------------------------------------------------------------

    def _fail(
        self, current: _NewcomerSession, reason: FailureReason, message: str = ""
    ) -> list[NewcomerEffect]:
        current.machine.step(NewcomerEvent.FAILED)
        current.reason, current.message = reason, message or str(reason)
        return self._clean_up(current)

    def _clean_up(self, current: _NewcomerSession) -> list[NewcomerEffect]:
        """Drop what is in memory, and release the session at the donor."""
        asked_donor = current.needed is not None
        current.requested.clear()
        current.arrived.clear()
        current.offer_request = None
        current.storing = False
        effects: list[NewcomerEffect] = [DiscardState(current.session)]
        if asked_donor:
            effects.append(SendToDonor(current.order.donor, Release(current.session)))
        return effects

    def _find(self, session: Session) -> _NewcomerSession | None:
        """The session, if it is the newest and not over."""
        current = self._current
        if current is None or current.session != session or current.phase.over:
            return None
        return current

    def _is_of_offer(self, current: _NewcomerSession, message: Offer | Chunk) -> bool:
        return current.offer is not None and message.boot == current.offer.boot
