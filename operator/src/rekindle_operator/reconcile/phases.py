"""Which phase follows which: of a slot, of a query, of a topology. Pure.

The tables are complete. A transition that they do not have is a bug of the operator: it raises an
error with details, and the pass takes no action for that topology and reports `ReconcileFailed`.

A pass samples the cluster, so it may find a slot or a query several steps further. The table of
slots therefore has what the operator itself decides: losing a slot, creating a pod, opening a gate.
The table of queries has the Events of each change.

Design: docs/design/recovery.md#phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rekindle.transitions import InvalidTransition
from rekindle_operator.topology_status import (
    QueryEntry,
    QueryState,
    TopologyPhase,
    TopologyStatus,
)


class SlotPhase(StrEnum):
    """What a slot has."""

    NO_POD = "no pod"
    GATED = "gated"  # its pod waits for capacity, behind the scheduling gate
    OPEN = "open"  # the gate is open, the scheduler has not bound the pod
    BOUND = "bound"  # its pod has a node
    LOST = "lost"  # its pod is to be replaced


class SlotEvent(StrEnum):
    """What the operator decides about a slot."""

    LOSS_FOUND = "loss found"
    POD_CREATED = "pod created"  # gated, under the next incarnation
    GATE_OPENED = "gate opened"
    STANDBY_TAKEN = "standby taken"  # a pod that runs becomes its task, under the next incarnation


SLOT_TRANSITIONS: Mapping[SlotPhase, Mapping[SlotEvent, SlotPhase]] = {
    SlotPhase.NO_POD: {
        SlotEvent.LOSS_FOUND: SlotPhase.LOST,  # its pod was deleted
        SlotEvent.POD_CREATED: SlotPhase.GATED,
    },
    SlotPhase.GATED: {
        SlotEvent.LOSS_FOUND: SlotPhase.LOST,
        SlotEvent.GATE_OPENED: SlotPhase.OPEN,
        SlotEvent.STANDBY_TAKEN: SlotPhase.BOUND,
    },
    SlotPhase.OPEN: {
        SlotEvent.LOSS_FOUND: SlotPhase.LOST,
    },
    SlotPhase.BOUND: {
        SlotEvent.LOSS_FOUND: SlotPhase.LOST,
    },
    SlotPhase.LOST: {
        SlotEvent.POD_CREATED: SlotPhase.GATED,
        SlotEvent.STANDBY_TAKEN: SlotPhase.BOUND,
    },
}


def next_slot_phase(phase: SlotPhase, event: SlotEvent, details: str) -> SlotPhase:
    """`details`: of the slot, which explain its phase; for the error."""
    after = SLOT_TRANSITIONS[phase].get(event)
    if after is None:
        raise InvalidTransition(f"{event}, but the slot is {phase}: {details}")
    return after


class QueryChange(StrEnum):
    """The reason of an Event about a query."""

    LOST = "QueryLost"
    RESTORING = "QueryRestoring"
    TENTATIVE = "QueryTentative"
    LIVE = "QueryLive"


Changes = tuple[QueryChange, ...]

_FROM_NOT_RUNNING: Mapping[QueryState, Changes] = {
    QueryState.WAITING: (),
    QueryState.FAILED: (),
    QueryState.UNKNOWN: (),
    QueryState.RESTORING: (QueryChange.RESTORING,),
    QueryState.CATCHING_UP: (QueryChange.RESTORING,),
    QueryState.TENTATIVE: (QueryChange.TENTATIVE,),
    QueryState.LIVE: (QueryChange.LIVE,),
}
_FROM_RESTORING: Mapping[QueryState, Changes] = {
    QueryState.WAITING: (),
    QueryState.FAILED: (),
    QueryState.UNKNOWN: (),
    QueryState.RESTORING: (),
    QueryState.CATCHING_UP: (),
    QueryState.TENTATIVE: (QueryChange.TENTATIVE,),
    QueryState.LIVE: (QueryChange.LIVE,),
}
_FROM_TENTATIVE: Mapping[QueryState, Changes] = {
    QueryState.WAITING: (QueryChange.LOST,),
    QueryState.FAILED: (QueryChange.LOST,),
    QueryState.UNKNOWN: (),
    QueryState.RESTORING: (QueryChange.LOST, QueryChange.RESTORING),
    QueryState.CATCHING_UP: (),  # corrected, and its sink is behind
    QueryState.TENTATIVE: (),
    QueryState.LIVE: (QueryChange.LIVE,),
}
_FROM_LIVE: Mapping[QueryState, Changes] = {
    QueryState.WAITING: (QueryChange.LOST,),
    QueryState.FAILED: (QueryChange.LOST,),
    QueryState.UNKNOWN: (),
    QueryState.RESTORING: (QueryChange.LOST, QueryChange.RESTORING),
    QueryState.CATCHING_UP: (QueryChange.RESTORING,),
    QueryState.TENTATIVE: (QueryChange.TENTATIVE,),
    QueryState.LIVE: (),  # after its state was unknown
}

QUERY_TRANSITIONS: Mapping[QueryState | None, Mapping[QueryState, Changes]] = {
    None: _FROM_NOT_RUNNING,  # it has no state yet
    QueryState.WAITING: _FROM_NOT_RUNNING,
    QueryState.FAILED: _FROM_NOT_RUNNING,
    QueryState.RESTORING: _FROM_RESTORING,
    QueryState.CATCHING_UP: _FROM_RESTORING,
    QueryState.TENTATIVE: _FROM_TENTATIVE,
    QueryState.LIVE: _FROM_LIVE,
    QueryState.UNKNOWN: _FROM_NOT_RUNNING,  # was not live; else: `query_changes`
}


def query_changes(
    before: QueryState | None, after: QueryState, is_known_live: bool, details: str
) -> Changes:
    """`is_known_live`: whether an `Unknown` query was live when it was last known."""
    if before is after:
        return ()
    row = (
        _FROM_LIVE
        if before is QueryState.UNKNOWN and is_known_live
        else QUERY_TRANSITIONS.get(before)
    )
    if row is None or after not in row:
        raise InvalidTransition(f"a query that was {before} cannot become {after}: {details}")
    return row[after]


BEFORE_RUNNING: frozenset[TopologyPhase | None] = frozenset(
    {
        None,
        TopologyPhase.PENDING,
        TopologyPhase.INVALID,
        TopologyPhase.SUSPENDED,
        TopologyPhase.STARTING,
    }
)
"""Phases of a topology with queries that were not live yet since it was created or resumed."""


def was_live(status: TopologyStatus, query: QueryEntry) -> bool:
    """Whether a query of this status is live, or was when it was last known."""
    if query.state is not QueryState.UNKNOWN:
        return query.state is QueryState.LIVE
    return not query.since and status.phase not in BEFORE_RUNNING


def phase_when_unknown(before: TopologyPhase | None) -> TopologyPhase:
    """The phase of a topology whose queries cannot be assessed. If it has not run, it keeps its
    phase, since nothing else shows that: after `Unknown` it would count as one that has run."""
    if before in BEFORE_RUNNING:
        return before or TopologyPhase.PENDING
    return TopologyPhase.UNKNOWN


_ANY = frozenset(TopologyPhase)
_STARTED = _ANY - {TopologyPhase.STARTING}

TOPOLOGY_TRANSITIONS: Mapping[TopologyPhase | None, frozenset[TopologyPhase]] = {
    None: _ANY,
    TopologyPhase.PENDING: _ANY,
    TopologyPhase.INVALID: _ANY,
    TopologyPhase.SUSPENDED: _ANY,
    TopologyPhase.STARTING: _ANY,
    # Once all queries were live, a topology recovers or is degraded. It starts again only after it
    # was suspended.
    TopologyPhase.RUNNING: _STARTED,
    TopologyPhase.RECOVERING: _STARTED,
    TopologyPhase.DEGRADED: _STARTED,
    TopologyPhase.UNKNOWN: _STARTED,
    TopologyPhase.DELETING: frozenset({TopologyPhase.DELETING}),
}


def next_topology_phase(
    before: TopologyPhase | None, after: TopologyPhase, details: str
) -> TopologyPhase:
    if after not in TOPOLOGY_TRANSITIONS[before]:
        raise InvalidTransition(f"a topology that is {before} cannot become {after}: {details}")
    return after
