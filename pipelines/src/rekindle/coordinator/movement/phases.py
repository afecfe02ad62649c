"""The phases of a newcomer, as the coordinator sees it, as a table. Pure.

The table is complete: any other event is a bug, and raises with the transitions before it.

Design: docs/design/state-movement.md#phases.
Paper: Flux (Shah et al. 2004), sections 3.5, 5.3.
"""

from __future__ import annotations

from enum import StrEnum

from rekindle.transitions import Table


class MovementPhase(StrEnum):
    QUEUED = "queued"  # waits for newcomers of its inputs, or for a donor without other sessions
    HOLDING = "holding"  # a session has begun: upstream replicas register its hold
    MOVING = "moving"  # all have confirmed: the newcomer may send requests to the donor
    ABANDONING = "abandoning"  # until the newcomer reports that it will not start from the session
    RESTORING = "restoring"  # from a checkpoint: no donor, or all attempts failed
    STARTED = "started"  # it has state; its own position is its hold
    REDUNDANT = "redundant"  # it is Live: a replica that can take over
    GONE = "gone"  # replaced, ended, or restarted

    @property
    def holds(self) -> bool:
        """Whether its session's holds are needed."""
        return self in (self.HOLDING, self.MOVING, self.ABANDONING)


class MovementEvent(StrEnum):
    BEGUN = "a donor was chosen"
    ADOPTED = "the newcomer has a session of an earlier coordinator"
    CONFIRMED = "all upstream replicas confirmed the hold"
    GIVEN_UP = "the session was given up"
    LEFT = "the newcomer will not start from the session"
    EXHAUSTED = "no donor, or no attempt is left"
    STARTED = "the newcomer has state"
    CAUGHT_UP = "the newcomer is Live"
    FELL_BEHIND = "the newcomer is no longer Live"
    ENDED = "the newcomer's boot has ended"


_ALWAYS = {
    MovementEvent.STARTED: MovementPhase.STARTED,
    MovementEvent.ENDED: MovementPhase.GONE,
}

TRANSITIONS: Table[MovementPhase, MovementEvent] = {
    MovementPhase.QUEUED: {
        MovementEvent.BEGUN: MovementPhase.HOLDING,
        MovementEvent.ADOPTED: MovementPhase.HOLDING,
        MovementEvent.EXHAUSTED: MovementPhase.RESTORING,
        **_ALWAYS,
    },
    MovementPhase.HOLDING: {
        MovementEvent.CONFIRMED: MovementPhase.MOVING,
        MovementEvent.GIVEN_UP: MovementPhase.ABANDONING,
        **_ALWAYS,
    },
    MovementPhase.MOVING: {
        MovementEvent.GIVEN_UP: MovementPhase.ABANDONING,
        **_ALWAYS,
    },
    MovementPhase.ABANDONING: {
        MovementEvent.LEFT: MovementPhase.QUEUED,
        **_ALWAYS,
    },
    MovementPhase.RESTORING: _ALWAYS,
    MovementPhase.STARTED: {
        MovementEvent.CAUGHT_UP: MovementPhase.REDUNDANT,
        MovementEvent.ENDED: MovementPhase.GONE,
    },
    MovementPhase.REDUNDANT: {
        MovementEvent.FELL_BEHIND: MovementPhase.STARTED,
        MovementEvent.ENDED: MovementPhase.GONE,
    },
    MovementPhase.GONE: {},
}
