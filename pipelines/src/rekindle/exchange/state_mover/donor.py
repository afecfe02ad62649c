"""The donor's side of state movements: `DonorCore.step(event, now) -> effects`. Pure.

Unlike in the paper nothing is quiesced: state is immutable, so the donor keeps references to the
state after an epoch and to the log up to it, and goes on. It only answers requests, each
independently, so a lost connection costs only the messages in flight. A session has a lease: if the
newcomer sends no request for that time, the donor ends the session and drops what it kept for it.

Design: docs/design/state-movement.md#donor.
Paper: Flux (Shah et al. 2004), sections 3.4, 3.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from rekindle.exchange.state_mover.chunks import ChunkPlan, Slice, chunk_digest
from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    MessageToDonor,
    MessageToNewcomer,
    Offer,
    OfferRequest,
    Preparing,
    Refusal,
    RefusalReason,
    Release,
    Replica,
    Session,
)
from rekindle.exchange.state_mover.phases import DONOR, DonorEvent, DonorPhase
from rekindle.topology.model import Slot
from rekindle.transitions import StateMachine

CHUNK_BYTES = 4 << 20
CHUNKS_AT_ONCE = 4
"""Chunks of a session that are read at a time. CHUNKS_AT_ONCE * CHUNK_BYTES is its memory."""
MAX_SESSIONS = 2
"""Sessions at a time, of different slots."""
LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class DonorLimits:
    chunk_bytes: int = CHUNK_BYTES
    chunks_at_once: int = CHUNKS_AT_ONCE
    sessions: int = MAX_SESSIONS
    lease_s: float = LEASE_S


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MessageReceived:
    message: MessageToDonor


@dataclass(frozen=True, slots=True)
class StateReached:
    """The donor now has the state after `epoch`, and the log up to it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SnapshotPinned:
    """The result of PinSnapshot: the newest state, and the log up to its epoch.

    `base`: first epoch in the log. `sizes`: bytes of each piece, the state first. `digest`: of all.
    """

    session: Session
    epoch: int
    base: int
    sizes: Sequence[int]
    digest: str


@dataclass(frozen=True, slots=True)
class PinProgressed:
    """`runs` runs of the state have been read so far, for its digest."""

    session: Session
    runs: int


@dataclass(frozen=True, slots=True)
class PinFailed:
    session: Session
    message: str


@dataclass(frozen=True, slots=True)
class ChunkRead:
    session: Session
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ChunkUnreadable:
    session: Session
    number: int
    message: str


@dataclass(frozen=True, slots=True)
class SessionsReleased:
    """The coordinator has released these sessions."""

    sessions: Sequence[Session]


@dataclass(frozen=True, slots=True)
class DonorStopping:
    pass


@dataclass(frozen=True, slots=True)
class LeaseChecked:
    """Leases may have expired (`DonorCore.wake_at`)."""


DonorCoreEvent = (
    MessageReceived
    | StateReached
    | SnapshotPinned
    | PinProgressed
    | PinFailed
    | ChunkRead
    | ChunkUnreadable
    | SessionsReleased
    | DonorStopping
    | LeaseChecked
)


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinSnapshot:
    """Keep the newest state, and the log from its base up to it; do not wait for an epoch. The
    result is SnapshotPinned or PinFailed, with PinProgressed meanwhile; stop if the session
    ends."""

    session: Session


@dataclass(frozen=True, slots=True)
class UnpinSnapshot:
    session: Session


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """The result is ChunkRead or ChunkUnreadable."""

    session: Session
    number: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send to the session's newcomer; nothing depends on its arrival."""

    message: MessageToNewcomer


DonorEffect = PinSnapshot | UnpinSnapshot | ReadChunk | Reply


@dataclass(slots=True)
class _DonorSession:
    """One session at the donor. `needed`: the first epoch that all upstream logs still have.
    `prepared`: runs that the shell has read for the offer. `reading`: numbers of the chunks that
    the shell reads."""

    session: Session
    needed: int
    chunk_bytes: int
    last_request_at: float
    machine: StateMachine[DonorPhase, DonorEvent] = field(init=False)
    offer: Offer | None = None
    plan: ChunkPlan | None = None
    prepared: int = 0
    reading: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.machine = StateMachine(f"{self.session} (donor)", DONOR, DonorPhase.BEHIND)


class DonorCore:
    """All sessions for which one boot of a task is the donor."""

    def __init__(
        self, replica: Replica, boot: str, epoch: int, limits: DonorLimits | None = None
    ) -> None:
        """`epoch`: of its newest state."""
        self._replica = replica
        self._boot = boot
        self._epoch = epoch
        self._limits = limits or DonorLimits()
        self._active: dict[Slot, _DonorSession] = {}
        self._newest: dict[Slot, Session] = {}  # of each slot, also ended ones
        self._stopping = False

    @property
    def wake_at(self) -> float | None:
        leases = (s.last_request_at + self._limits.lease_s for s in self._active.values())
        return min(leases, default=None)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """For the poll response: what the coordinator may release."""
        return tuple(s.session for s in self._active.values())

    def step(self, event: DonorCoreEvent, now: float) -> list[DonorEffect]:
        """Raises InvalidTransition."""
        match event:
            case MessageReceived(message):
                return self._received(message, now)
            case StateReached(epoch):
                self._epoch = max(self._epoch, epoch)
                return [e for s in [*self._active.values()] for e in self._pin_if_reached(s)]
            case SnapshotPinned():
                return self._pinned(event)
            case PinProgressed(session, runs):
                if (active := self._find(session)) is not None:
                    active.prepared = runs
                return []
            case PinFailed(session, message):
                return self._failed(session, DonorEvent.PIN_FAILED, message)
            case ChunkRead(session, number, data):
                return self._chunk_read(session, number, data)
            case ChunkUnreadable(session, _, message):
                return self._failed(session, DonorEvent.READ_FAILED, message)
            case SessionsReleased(sessions):
                return [e for one in sessions for e in self._released(one)]
            case DonorStopping():
                return self._stop()
            case LeaseChecked():
                expired = [
                    s
                    for s in self._active.values()
                    if now >= s.last_request_at + self._limits.lease_s
                ]
                return [e for s in expired for e in self._end(s, DonorEvent.EXPIRED)]
        assert_never(event)

    # -- messages --------------------------------------------------------------------------------

    def _received(self, message: MessageToDonor, now: float) -> list[DonorEffect]:
        match message:
            case Release(session):
                return self._released(session)
            case OfferRequest():
                return self._offer_requested(message, now)
            case ChunkRequest():
                return self._chunk_requested(message, now)
        assert_never(message)

    def _offer_requested(self, request: OfferRequest, now: float) -> list[DonorEffect]:
        session = request.session
        if request.donor != self._replica or not self._is_partner(session.slot):
            return [self._refuse(session, RefusalReason.WRONG_RECIPIENT)]
        known = self._newest.get(session.slot)
        if known is not None and session.sort_key < known.sort_key:
            return [self._refuse(session, RefusalReason.SUPERSEDED)]
        if known == session:
            return self._offer_repeated(request, now)
        if self._stopping:
            return [self._refuse(session, RefusalReason.STOPPING)]
        effects: list[DonorEffect] = []
        if (older := self._active.get(session.slot)) is not None:
            effects += self._end(older, DonorEvent.SUPERSEDED)
        if len(self._active) >= self._limits.sessions:
            return [*effects, self._refuse(session, RefusalReason.BUSY)]
        chunk_bytes = min(self._limits.chunk_bytes, request.chunk_bytes)
        active = _DonorSession(session, request.needed, chunk_bytes, now)
        self._active[session.slot] = active
        self._newest[session.slot] = session
        return [*effects, *self._pin_if_reached(active)]

    def _offer_repeated(self, request: OfferRequest, now: float) -> list[DonorEffect]:
        active = self._find(request.session)
        if active is None:
            return [self._refuse(request.session, RefusalReason.ENDED)]
        active.last_request_at = now
        if active.offer is not None:
            return [Reply(active.offer)]
        if active.prepared:
            return [Reply(Preparing(active.session, active.prepared))]
        return self._pin_if_reached(active)

    def _chunk_requested(self, request: ChunkRequest, now: float) -> list[DonorEffect]:
        active = self._find(request.session)
        if active is None or active.plan is None or request.boot != self._boot:
            return [self._refuse(request.session, RefusalReason.ENDED)]
        active.last_request_at = now
        number, plan = request.number, active.plan
        if not 0 <= number < plan.chunks or number in active.reading:
            return []
        if len(active.reading) >= self._limits.chunks_at_once:
            return []  # the newcomer asks again
        active.reading.add(number)
        return [ReadChunk(active.session, number, plan.slices(number))]

    # -- results from the shell ------------------------------------------------------------------

    def _pin_if_reached(self, active: _DonorSession) -> list[DonorEffect]:
        """Take the snapshot once every upstream log still has the epoch after it, which is the
        first one that the newcomer reads."""
        if active.machine.state is not DonorPhase.BEHIND or self._epoch + 1 < active.needed:
            return []
        active.machine.step(DonorEvent.REACHED)
        return [PinSnapshot(active.session)]

    def _pinned(self, event: SnapshotPinned) -> list[DonorEffect]:
        active = self._find(event.session)
        if active is None:  # it ended meanwhile
            return [UnpinSnapshot(event.session)]
        if event.epoch + 1 < active.needed:
            active.machine.step(DonorEvent.PINNED_TOO_OLD)
            active.prepared = 0
            return [UnpinSnapshot(event.session)]
        active.machine.step(DonorEvent.PINNED)
        plan = ChunkPlan(event.sizes, active.chunk_bytes)
        active.plan = plan
        active.offer = Offer(
            event.session, self._boot, event.epoch, event.base, plan.chunks, event.digest
        )
        return [Reply(active.offer)]

    def _chunk_read(self, session: Session, number: int, data: bytes) -> list[DonorEffect]:
        active = self._find(session)
        if active is None:
            return []
        active.reading.discard(number)
        return [Reply(Chunk(session, self._boot, number, data, chunk_digest(data)))]

    # -- endings ---------------------------------------------------------------------------------

    def _failed(self, session: Session, event: DonorEvent, message: str) -> list[DonorEffect]:
        active = self._find(session)
        if active is None:
            return []
        return [
            *self._end(active, event),
            Reply(Refusal(session, RefusalReason.UNREADABLE, message)),
        ]

    def _released(self, session: Session) -> list[DonorEffect]:
        active = self._find(session)
        return self._end(active, DonorEvent.RELEASED) if active is not None else []

    def _stop(self) -> list[DonorEffect]:
        self._stopping = True
        effects: list[DonorEffect] = []
        for active in [*self._active.values()]:
            effects += self._end(active, DonorEvent.STOPPED)
            effects.append(self._refuse(active.session, RefusalReason.STOPPING))
        return effects

    def _end(self, active: _DonorSession, event: DonorEvent) -> list[DonorEffect]:
        pinned = active.machine.state is DonorPhase.SENDING
        active.machine.step(event)
        del self._active[active.session.slot]
        # If the shell is still pinning, its SnapshotPinned finds no session and is unpinned then.
        return [UnpinSnapshot(active.session)] if pinned else []

    def _find(self, session: Session) -> _DonorSession | None:
        """The session, if it is active."""
        active = self._active.get(session.slot)
        return active if active is not None and active.session == session else None

    def _is_partner(self, slot: Slot) -> bool:
        mine = self._replica.slot
        return (slot.segment, slot.partition) == (mine.segment, mine.partition)

    def _refuse(self, session: Session, reason: RefusalReason) -> Reply:
        return Reply(Refusal(session, reason))
