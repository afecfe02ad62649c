"""The messages of a state movement. Pure data.

A session is identified by the newcomer's slot and incarnation, and by a version that is never used
again: the fence of the coordinator that began it, and a number. Messages are idempotent: each names
its session, and may arrive late or several times.

Design: docs/design/state-movement.md#sessions.
Paper: Flux (Shah et al. 2004), section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rekindle.exchange.state_mover.phases import NewcomerPhase
from rekindle.topology.model import Slot


@dataclass(frozen=True, slots=True, order=True)
class SessionVersion:
    """`fence`: of the coordinator that began the session. To abandon all sessions of its
    predecessors, a coordinator sends its own fence, and the last number that it has used."""

    fence: int
    number: int


@dataclass(frozen=True, slots=True)
class Session:
    """One attempt to move state to one incarnation of a slot."""

    slot: Slot
    incarnation: int
    version: SessionVersion

    @property
    def sort_key(self) -> tuple[int, SessionVersion]:
        """Of two sessions of a slot the one with the higher key is newer."""
        return self.incarnation, self.version

    def __str__(self) -> str:
        version = f"{self.version.fence}.{self.version.number}"
        return f"state movement {version} to {self.slot.key}, incarnation {self.incarnation}"


@dataclass(frozen=True, slots=True)
class Replica:
    """One incarnation of a slot."""

    slot: Slot
    incarnation: int


# -- coordinator to newcomer, and back -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """Get the state from `donor`. It is for the boot `boot` of the newcomer only.

    `needed` is None until all upstream replicas have confirmed the hold. Then it is the first epoch
    that every one of them still has: the donor's state must be after `needed - 1` or later.
    """

    session: Session
    boot: str
    donor: Replica
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Directive:
    """The part of a poll that is about state movements.

    For a newcomer: `order`, with the address of the donor; `abandoned`: do not start from any
    session up to this version; `may_restore`: it may restore from a checkpoint instead. For an
    upstream replica, `register`: sessions for which it registers holds. For it or a donor,
    `release`: sessions whose holds or pinned state are no longer needed.
    """

    order: Order | None = None
    donor_address: str = ""
    abandoned: SessionVersion | None = None
    may_restore: bool = False
    register: tuple[Session, ...] = ()
    release: tuple[Session, ...] = ()


class FailureReason(StrEnum):
    REFUSED = "the donor refused"
    DONOR_RESTARTED = "the donor has restarted"
    DAMAGED = "too many chunks in a row arrived damaged"
    DIGEST_MISMATCH = "the installed state differs from the donor's"
    NOT_STORED = "what arrived could not be stored or installed"


@dataclass(frozen=True, slots=True)
class Progress:
    """A newcomer's session, in its poll response. `epoch`: of the state that is moved; None before
    the offer. `stored`: number of chunks that the newcomer has stored, of `chunks`. `prepared`:
    number of runs that the donor has read for its offer."""

    session: Session
    donor: Replica
    needed: int | None
    phase: NewcomerPhase
    epoch: int | None = None
    stored: int = 0
    chunks: int = 0
    reason: FailureReason | None = None
    message: str = ""
    prepared: int = 0


@dataclass(frozen=True, slots=True)
class NewcomerReport:
    """`abandoned`: this boot will not start from any session up to this version."""

    progress: Progress | None = None
    abandoned: SessionVersion | None = None


# -- coordinator to upstream replica, and back ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """An upstream replica truncates no epoch at or above `base` while it has this hold."""

    session: Session
    base: int


@dataclass(frozen=True, slots=True)
class MovementReport:
    """The part of a task's poll response that is about state movements. `newcomer`: of a task that
    has no state yet. `donates`: sessions for which it keeps state. `moved_through`: it has started
    from a partner's state after this epoch, and so has computed no epoch up to it itself."""

    newcomer: NewcomerReport | None = None
    holds: tuple[Hold, ...] = ()
    donates: tuple[Session, ...] = ()
    moved_through: int | None = None


# -- newcomer to donor ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfferRequest:
    """`chunk_bytes`: the largest chunk that the newcomer takes."""

    session: Session
    donor: Replica
    needed: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    session: Session
    donor: Replica
    boot: str  # of the donor, from its offer
    number: int


@dataclass(frozen=True, slots=True)
class Release:
    """The newcomer needs nothing more of the session."""

    session: Session


MessageToDonor = OfferRequest | ChunkRequest | Release


# -- donor to newcomer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preparing:
    """There will be an offer; so far the donor has read `runs` runs of its state for it."""

    session: Session
    runs: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The state after `epoch`, and the output log from `base` to `epoch`, in `chunks` chunks.

    Chunks of one offer never change: they are cut from immutable runs, and records up to
    `epoch`, which later epochs do not change. `boot` is
    the donor's, since another boot may cut other chunks. `digest` is of state and log as a whole.
    """

    session: Session
    boot: str
    epoch: int
    base: int
    chunks: int
    digest: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """`digest`: of `data` (`chunks.chunk_digest`)."""

    session: Session
    boot: str
    number: int
    data: bytes
    digest: str


class RefusalReason(StrEnum):
    BUSY = "it already moves state to other replicas"  # the newcomer asks again later
    ENDED = "the session has ended at the donor"  # or the donor never had it
    SUPERSEDED = "the donor has a newer session of the slot"
    WRONG_RECIPIENT = "the request is for another incarnation or partition"
    UNREADABLE = "its state or log cannot be read"
    STOPPING = "it stops"


@dataclass(frozen=True, slots=True)
class Refusal:
    session: Session
    reason: RefusalReason
    message: str = ""


MessageToNewcomer = Preparing | Offer | Chunk | Refusal
