"""The order of the actions of all topologies, and what each depends on. Pure.

Replacements come first, in the order of the plan whatever their topology; then clean-up; then
status and Events. An action waits for another one only where it would be wrong without it: the pod
of a new incarnation for the status that reserves it and for what it mounts or reads, a generation
record for the status that has its digest, a replaced pod's deletion for what its replacement
needs, an Event for the status that it explains.

Design: docs/design/recovery.md#order-of-actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import assert_never

from rekindle_operator.reconcile.actions import (
    FIRST,
    LAST,
    Action,
    AvoidNode,
    CreateGenerationRecord,
    CreatePlaceholder,
    CreatePod,
    DeleteGenerationRecord,
    DeletePod,
    DryRun,
    EmitEvent,
    EnsureObject,
    GiveSlot,
    OpenGate,
    PlanRank,
    QuarantineNode,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.resources.common import Manifest


class ActionOrder(IntEnum):
    """`PREPARE` and `PLACE_PODS` are interleaved in the order of the plan; the others follow."""

    PREPARE = 0
    PLACE_PODS = 1  # create them, and open their gates
    VALIDATE = 2
    CLEAN_UP = 3
    CREATE_AGAIN = 4  # given by `dispatch`: pods that a quota refused before pods were deleted
    REPORT = 5
    EMIT_EVENTS = 6


@dataclass(frozen=True, slots=True)
class ScheduledAction:
    """`key` is the identity of the action, the same in each pass, with the UID of its object or of
    the topology that it is for; `after`: keys of actions that
    must have been done before, if they are in the same pass; `topology_key`: of `TopologyActions`,
    which limits the number of workers for one topology; `rank`: of the pod in the plan."""

    topology_key: str
    action: Action
    key: str
    order: ActionOrder
    rank: PlanRank
    after: tuple[str, ...] = ()
    topology_uid: str = ""

    @property
    def namespace(self) -> str:
        """Of the API request. A namespace in which requests hang gets no more workers, whatever
        the topology."""
        return getattr(self.action, "namespace", "")

    @property
    def sort_key(self) -> tuple[int, PlanRank, int]:
        return max(self.order, ActionOrder.PLACE_PODS), self.rank, self.order


def schedule(decisions: Iterable[TopologyActions]) -> list[ScheduledAction]:
    """Each action once, although several topologies may need it."""
    chosen: dict[str, ScheduledAction] = {}
    for scheduled in sorted(
        (s for decision in decisions for s in _scheduled(decision)), key=lambda s: s.sort_key
    ):
        chosen.setdefault(scheduled.key, scheduled)
    return list(chosen.values())


def _scheduled(decision: TopologyActions) -> Iterator[ScheduledAction]:
    status = next((a for a in decision.actions if isinstance(a, WriteStatus)), None)
    created = (a for a in decision.actions if isinstance(a, (CreatePod, GiveSlot)))
    most_urgent = min((_rank(decision, a.name) for a in created), default=LAST)
    for action in decision.actions:
        order = _order(action)
        needed = order is ActionOrder.PREPARE and _is_waited_for(action)
        rank = most_urgent if needed else _own_rank(decision, action)
        after = _after(action, decision.actions, status)
        key, uid = decision.topology_key, decision.topology_uid
        yield ScheduledAction(key, action, key_of(action), order, rank, after, uid)


def _is_waited_for(action: Action) -> bool:
    """It gets the rank of the first pod that needs it."""
    return isinstance(action, (WriteStatus, CreateGenerationRecord, EnsureObject))


def _own_rank(decision: TopologyActions, action: Action) -> PlanRank:
    match action:
        case CreatePod() | OpenGate() | GiveSlot():
            return _rank(decision, action.name)
        case QuarantineNode() | AvoidNode() | DeletePod():
            return FIRST
        case _:
            return LAST


def _rank(decision: TopologyActions, name: str) -> PlanRank:
    return decision.ranks.get(name, LAST)


def _order(action: Action) -> ActionOrder:
    match action:
        case QuarantineNode() | AvoidNode():
            return ActionOrder.PREPARE
        case CreateGenerationRecord():
            return ActionOrder.PREPARE
        case EnsureObject():
            is_budget = action.kind == "PodDisruptionBudget"
            return ActionOrder.CLEAN_UP if is_budget else ActionOrder.PREPARE
        case WriteStatus():
            return (
                ActionOrder.PREPARE
                if action.new_incarnations or action.accepts_generation
                else ActionOrder.REPORT
            )
        case DeletePod():
            return ActionOrder.PREPARE if action.plan_needs_its_capacity else ActionOrder.CLEAN_UP
        case CreatePod() | OpenGate() | GiveSlot():
            return ActionOrder.PLACE_PODS
        case DryRun():
            return ActionOrder.VALIDATE
        case DeleteGenerationRecord():
            return ActionOrder.CLEAN_UP
        case CreatePlaceholder():
            return ActionOrder.REPORT
        case EmitEvent():
            return ActionOrder.EMIT_EVENTS
        case _:
            assert_never(action)


def _after(
    action: Action, siblings: Sequence[Action], status: WriteStatus | None
) -> tuple[str, ...]:
    needed: list[Action] = []
    match action:
        case CreatePod():
            needed = _objects_for(siblings, of_coordinator=action.is_coordinator)
            if status is not None and action.ref in status.new_incarnations:
                needed.append(status)
        case GiveSlot():
            reserves = status is not None and action.ref in status.new_incarnations
            needed = [status] if status is not None and reserves else []
        case DeletePod(is_replaced=True):
            needed = _objects_for(siblings, of_coordinator=False)
        case CreateGenerationRecord():
            needed = [status] if status is not None and status.accepts_generation else []
        case EmitEvent():
            needed = [status] if status is not None else []
        case _:
            pass
    return tuple(key_of(a) for a in needed)


def _objects_for(siblings: Sequence[Action], *, of_coordinator: bool) -> list[Action]:
    found = (a for a in siblings if isinstance(a, EnsureObject))
    return [a for a in found if a.is_needed_by_pod(of_coordinator=of_coordinator)]


def key_of(action: Action) -> str:
    kind = type(action).__name__
    match action:
        case DryRun():
            return f"{kind} {action.uid} {action.generation}"
        case CreateGenerationRecord():
            name = action.manifest["metadata"]["name"]
            return f"{kind} {action.namespace}/{name} {_owner_uid(action.manifest)}"
        case EnsureObject():
            uid = _owner_uid(action.manifest)
            return f"{kind} {action.kind} {action.namespace}/{action.name} {uid}"
        case CreatePod():
            return f"{kind} {action.namespace}/{action.name} {action.ref.topology_uid}"
        case CreatePlaceholder():
            return f"{kind} {action.namespace}/{action.name} {_owner_uid(action.manifest)}"
        case DeletePod() | OpenGate() | GiveSlot() | WriteStatus() | DeleteGenerationRecord():
            return f"{kind} {action.namespace}/{action.name} {action.uid}"
        case EmitEvent():
            return f"{kind} {action.uid} {action.reason} {action.dedup_key}"
        case QuarantineNode():
            return f"{kind} {action.node} {action.node_uid}"
        case AvoidNode():
            return f"{kind} {action.node} {action.node_uid} {action.shape}"
        case _:
            assert_never(action)


def _owner_uid(manifest: Manifest) -> str:
    (owner,) = manifest["metadata"]["ownerReferences"]
    return str(owner["uid"])
