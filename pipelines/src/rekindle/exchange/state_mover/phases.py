"""The phases of a session at the donor and at the newcomer, as tables. Pure.

The tables are complete: any other event is a bug, and raises with the transitions before it.

Design: docs/design/state-movement.md#phases.
Paper: Flux (Shah et al. 2004), section 3.4 (figure 5), section 3.5.
"""

from __future__ import annotations

from enum import StrEnum

from rekindle.transitions import Table


class DonorPhase(StrEnum):
    BEHIND = "behind"  # upstream logs do not have the epoch after its state any more
    PINNING = "pinning"  # the shell takes references to state and log
    SENDING = "sending"  # answers requests for chunks
    ENDED = "ended"


class DonorEvent(StrEnum):
    REACHED = "state reached the needed epoch"
    PINNED = "state and log pinned"
    PINNED_TOO_OLD = "pinned state is too old"
    PIN_FAILED = "state or log could not be pinned"
    READ_FAILED = "a chunk could not be read"
    RELEASED = "the newcomer or the coordinator released it"
    SUPERSEDED = "a newer session of the slot was requested"
    EXPIRED = "no request came for the time of the lease"  # of the session: `donor.LEASE_S`
    STOPPED = "the donor stops"


_DONOR_ENDINGS = {
    DonorEvent.RELEASED: DonorPhase.ENDED,
    DonorEvent.SUPERSEDED: DonorPhase.ENDED,
    DonorEvent.EXPIRED: DonorPhase.ENDED,
    DonorEvent.STOPPED: DonorPhase.ENDED,
}

DONOR: Table[DonorPhase, DonorEvent] = {
    DonorPhase.BEHIND: {
        DonorEvent.REACHED: DonorPhase.PINNING,
        **_DONOR_ENDINGS,
    },
    DonorPhase.PINNING: {
        DonorEvent.PINNED: DonorPhase.SENDING,
        DonorEvent.PINNED_TOO_OLD: DonorPhase.BEHIND,
        DonorEvent.PIN_FAILED: DonorPhase.ENDED,
        **_DONOR_ENDINGS,
    },
    DonorPhase.SENDING: {
        DonorEvent.READ_FAILED: DonorPhase.ENDED,
        **_DONOR_ENDINGS,
    },
    DonorPhase.ENDED: {},
}


class NewcomerPhase(StrEnum):
    HOLDING = "holding"  # waits until all upstream replicas have confirmed its hold
    ASKING = "asking"  # waits for the donor's offer
    RECEIVING = "receiving"  # chunks arrive and are stored
    INSTALLING = "installing"  # all is stored; the shell installs it and computes the digest
    STARTED = "started"  # it reads from the epoch after the moved state
    FAILED = "failed"  # this session; the coordinator orders what is next
    ABANDONED = "abandoned"  # by the coordinator

    @property
    def over(self) -> bool:
        """Whether nothing more happens in this session: the newcomer has started from its state, or
        never will."""
        return self in (self.STARTED, self.FAILED, self.ABANDONED)


class NewcomerEvent(StrEnum):
    HOLDS_CONFIRMED = "all upstream replicas confirmed the hold"
    OFFERED = "the donor made an offer"
    STORED = "all chunks are stored"
    VERIFIED = "the digest of what was installed is the donor's"
    FAILED = "it cannot go on"
    ABANDONED = "the coordinator abandoned it, or ordered a newer session"


_NEWCOMER_ENDINGS = {
    NewcomerEvent.FAILED: NewcomerPhase.FAILED,
    NewcomerEvent.ABANDONED: NewcomerPhase.ABANDONED,
}

NEWCOMER: Table[NewcomerPhase, NewcomerEvent] = {
    NewcomerPhase.HOLDING: {
        NewcomerEvent.HOLDS_CONFIRMED: NewcomerPhase.ASKING,
        NewcomerEvent.ABANDONED: NewcomerPhase.ABANDONED,
    },
    NewcomerPhase.ASKING: {
        NewcomerEvent.OFFERED: NewcomerPhase.RECEIVING,
        **_NEWCOMER_ENDINGS,
    },
    NewcomerPhase.RECEIVING: {
        NewcomerEvent.STORED: NewcomerPhase.INSTALLING,
        **_NEWCOMER_ENDINGS,
    },
    NewcomerPhase.INSTALLING: {
        NewcomerEvent.VERIFIED: NewcomerPhase.STARTED,
        **_NEWCOMER_ENDINGS,
    },
    NewcomerPhase.STARTED: {},
    NewcomerPhase.FAILED: {
        NewcomerEvent.ABANDONED: NewcomerPhase.ABANDONED,
    },
    NewcomerPhase.ABANDONED: {},
}
