"""The states of the consistency manager, and every event that may happen in each of them. Pure.

The table is complete: an event that a state does not list is a bug, and raises an error with the
transitions before it. Does not know channels, epochs or time.

Design: docs/design/consistency.md#states.
Paper: DPC (Balazinska et al. 2005), figure 2 and sections 3.2 to 3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rekindle.protocol import ConsistencyState as ConsistencyState
from rekindle.transitions import StateMachine, Table


class ConsistencyEvent(StrEnum):
    STABLE_ARRIVED = "stable epoch arrived"
    TENTATIVE_ARRIVED = "tentative epoch arrived"
    UNDO_ARRIVED = "undo arrived"
    RECONCILIATION_DONE_ARRIVED = "reconciliation done arrived"
    UPSTREAM_REPORTED = "upstream reported"
    STABLE_PROCESSED = "stable epochs processed"
    TENTATIVE_PROCESSED = "tentative epoch processed"
    TENTATIVE_DUE = "tentative epoch due"  # it may not be delayed any longer, or has no reason to
    # All inputs are corrected, or those epochs that are have waited too long for the others.
    STABILIZATION_BEGUN = "stabilization begun"
    INPUT_FAILED_AGAIN = "input failed again"  # before all output was corrected
    RECONCILED = "reconciled"  # all output is corrected, and no input is overdue
    POSTPONEMENT_REQUESTED = "postponement requested"
    PROMISE_ENDED = "promise ended"  # the partner needs it no longer
    PARTNER_PROMISED = "partner promised"
    PARTNER_REFUSED = "partner refused"
    PARTNER_CHANGED = "partner changed"  # lost, or present again
    MAX_DELAY_CHANGED = "max delay changed"


@dataclass(frozen=True, slots=True)
class Row:
    """`section`: of the paper; `then`: what the manager does."""

    after: ConsistencyState
    section: str
    then: str


_STABLE, _FAILURE, _STABILIZATION = ConsistencyState
_E = ConsistencyEvent


def _stays(state: ConsistencyState) -> dict[ConsistencyEvent, Row]:
    """What is the same in all states."""
    return {
        _E.STABLE_ARRIVED: Row(state, "3.2", "buffer it"),
        _E.TENTATIVE_ARRIVED: Row(state, "3.3", "buffer it beside the stable ones"),
        _E.UNDO_ARRIVED: Row(state, "3.4", "drop tentative epochs that are not processed yet"),
        _E.RECONCILIATION_DONE_ARRIVED: Row(state, "3.4", "the input is corrected through it"),
        _E.UPSTREAM_REPORTED: Row(state, "3.3", "record what the upstream has"),
        _E.PROMISE_ENDED: Row(state, "3.4", "do not postpone any longer"),
        _E.PARTNER_CHANGED: Row(state, "3.4", "leases are void if it is lost"),
        _E.MAX_DELAY_CHANGED: Row(state, "2", "new deadlines"),
    }


ROWS: Mapping[ConsistencyState, Mapping[ConsistencyEvent, Row]] = {
    _STABLE: _stays(_STABLE)
    | {
        _E.STABLE_PROCESSED: Row(_STABLE, "3.2", "drop its input"),
        _E.TENTATIVE_DUE: Row(_FAILURE, "3.3, 3.5", "fork the state, process what has arrived"),
        _E.POSTPONEMENT_REQUESTED: Row(_STABLE, "3.4", "promise"),
        _E.PARTNER_PROMISED: Row(_STABLE, "3.4", "too late: ignore it"),
        _E.PARTNER_REFUSED: Row(_STABLE, "3.4", "too late: ignore it"),
    },
    _FAILURE: _stays(_FAILURE)
    | {
        _E.TENTATIVE_DUE: Row(_FAILURE, "3.3", "process what has arrived, on the fork"),
        _E.TENTATIVE_PROCESSED: Row(_FAILURE, "3.3", "its output is in the branch"),
        _E.STABILIZATION_BEGUN: Row(
            _STABILIZATION, "3.4, 3.5", "UNDO; read again what was dropped"
        ),
        _E.POSTPONEMENT_REQUESTED: Row(_FAILURE, "3.4", "promise, unless this replica goes first"),
        _E.PARTNER_PROMISED: Row(_FAILURE, "3.4", "the partner serves: stabilize"),
        _E.PARTNER_REFUSED: Row(_FAILURE, "3.4", "the partner goes first: ask again later"),
    },
    _STABILIZATION: _stays(_STABILIZATION)
    | {
        _E.STABLE_PROCESSED: Row(_STABILIZATION, "3.4", "a corrected epoch is in the log"),
        _E.TENTATIVE_DUE: Row(_STABILIZATION, "3.4", "process new input, on the fork"),
        _E.TENTATIVE_PROCESSED: Row(_STABILIZATION, "3.4", "its output is in the branch"),
        _E.INPUT_FAILED_AGAIN: Row(_FAILURE, "3.4, 3.5", "REC_DONE before new tentative epochs"),
        _E.RECONCILED: Row(_STABLE, "3.4", "REC_DONE; the fork was dropped"),
        _E.POSTPONEMENT_REQUESTED: Row(_STABILIZATION, "3.4", "refuse, unless all is corrected"),
        _E.PARTNER_PROMISED: Row(_STABILIZATION, "3.4", "its lease is renewed"),
        _E.PARTNER_REFUSED: Row(_STABILIZATION, "3.4", "its lease runs out"),
    },
}

TRANSITIONS: Table[ConsistencyState, ConsistencyEvent] = {
    state: {event: row.after for event, row in rows.items()} for state, rows in ROWS.items()
}


def consistency_machine() -> StateMachine[ConsistencyState, ConsistencyEvent]:
    return StateMachine("consistency", TRANSITIONS, ConsistencyState.STABLE)
