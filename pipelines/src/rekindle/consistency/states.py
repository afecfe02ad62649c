"""The states of the consistency manager, and every event that may happen in each of them. Pure.

The table is complete: an event that a state does not list is a bug, and raises an error with the
transitions before it. Does not know channels, epochs or time.

Design: docs/design/consistency.md#states.
Paper: DPC (Balazinska et al. 2005), figure 2 and sections 3.2 to 3.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.protocol import ConsistencyState as ConsistencyState
from rekindle.transitions import StateMachine, Table


@dataclass(frozen=True, slots=True)
class Row:
    """`section`: of the paper; `then`: what the manager does."""

    after: ConsistencyState
    section: str
    then: str


_STABLE, _FAILURE, _STABILIZATION = ConsistencyState


def _stays(state: ConsistencyState) -> dict[str, Row]:
    """What is the same in all states."""
    return {
        "batch_received": Row(state, "3.2, 3.3, 3.4", "buffer it, or correct what it names"),
        "upstream_reported": Row(state, "3.3", "record what the upstream has"),
        "promise_ended": Row(state, "3.4", "do not postpone any longer"),
        "partner_changed": Row(state, "3.4", "leases are void if it is lost"),
        "max_delay_changed": Row(state, "2", "new deadlines"),
    }


ROWS: Mapping[ConsistencyState, Mapping[str, Row]] = {
    _STABLE: _stays(_STABLE)
    | {
        "stable_processed": Row(_STABLE, "3.2", "drop its input"),
        "process_tentative": Row(_FAILURE, "3.3, 3.5", "fork the state, process what has arrived"),
        "postponement_requested": Row(_STABLE, "3.4", "promise"),
        "partner_promised": Row(_STABLE, "3.4", "too late: ignore it"),
        "partner_refused": Row(_STABLE, "3.4", "too late: ignore it"),
    },
    _FAILURE: _stays(_FAILURE)
    | {
        "process_tentative": Row(_FAILURE, "3.3", "process what has arrived, on the fork"),
        "tentative_processed": Row(_FAILURE, "3.3", "its output is in the branch"),
        "stabilize": Row(_STABILIZATION, "3.4, 3.5", "UNDO; read again what was dropped"),
        "postponement_requested": Row(_FAILURE, "3.4", "promise, unless this replica goes first"),
        "partner_promised": Row(_FAILURE, "3.4", "the partner serves: stabilize"),
        "partner_refused": Row(_FAILURE, "3.4", "the partner goes first: ask again later"),
    },
    _STABILIZATION: _stays(_STABILIZATION)
    | {
        "stable_processed": Row(_STABILIZATION, "3.4", "a corrected epoch is in the log"),
        "process_tentative": Row(_STABILIZATION, "3.4", "process new input, on the fork"),
        "tentative_processed": Row(_STABILIZATION, "3.4", "its output is in the branch"),
        "fail_again": Row(_FAILURE, "3.4, 3.5", "REC_DONE before new tentative epochs"),
        "reconcile": Row(_STABLE, "3.4", "REC_DONE; the fork was dropped"),
        "postponement_requested": Row(_STABILIZATION, "3.4", "refuse, unless all is corrected"),
        "partner_promised": Row(_STABILIZATION, "3.4", "its lease is renewed"),
        "partner_refused": Row(_STABILIZATION, "3.4", "its lease runs out"),
    },
}
"""By state, and by the method of the manager: what happened, or what it decides."""

TRANSITIONS: Table[ConsistencyState, str] = {
    state: {event: row.after for event, row in rows.items()} for state, rows in ROWS.items()
}


def consistency_machine() -> StateMachine[ConsistencyState, str]:
    return StateMachine("consistency", TRANSITIONS, ConsistencyState.STABLE)
