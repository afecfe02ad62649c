"""The pods of tasks that a topology needs, and those that it no longer needs. Pure.

A lost pod is replaced under a new incarnation and a new name at once; nothing waits for the end of
the old one (I7). The new pod is created behind the scheduling gate.

Design: docs/design/recovery.md#replacement, docs/design/fencing.md#incarnations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle import names
from rekindle.topology.model import partition_of
from rekindle_operator.cluster.model import IncarnationRef, PodView, Snapshot
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.phases import SlotEvent, SlotPhase
from rekindle_operator.reconcile.slots import SlotState, has_diverged, mislabelled_pods, task_pods
from rekindle_operator.recovery.losses import Loss, LossAssessment, loss_of_pod
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.task import task_pod

_SHORT_GRACE_S = 5  # for a task that is replaced: it is fenced, and its capacity is needed

_PLACEMENT_FAILURES = (Loss.UNBOUND, Loss.REFUSED, Loss.CANNOT_START, Loss.CRASHING)


@dataclass(frozen=True, slots=True)
class TaskReplacement:
    """Not `due`: its creation was refused and waits for its back-off. The plan includes it
    anyway."""

    state: SlotState
    incarnation: int
    create: CreatePod
    delete: DeletePod | None
    due: bool = True


def replacements(
    context: ReconcileContext, states: Iterable[SlotState], coordinator_refused: str = ""
) -> tuple[TaskReplacement, ...]:
    """For every slot that has no pod or is lost. `coordinator_refused`: the message of the full
    quota for which the coordinator's pod waits; empty: it does not."""
    if context.running is None or not context.needs_pods:
        return ()
    replaced = (SlotPhase.NO_POD, SlotPhase.LOST)
    return tuple(
        _replacement(context, s, coordinator_refused) for s in states if s.phase in replaced
    )


def _replacement(
    context: ReconcileContext, state: SlotState, coordinator_refused: str
) -> TaskReplacement:
    assert context.running is not None
    state.check_event(SlotEvent.POD_CREATED)
    now, incarnation = context.pass_inputs.now, state.next_incarnation
    predecessor_lost_at = _predecessor_lost_at(state, now)
    manifest = manifest_of(context, state, incarnation)
    ref = IncarnationRef(context.view.uid, state.slot.key, incarnation)
    uncreated = state.uncreated_pod
    # Room in a quota, such as a deleted task makes, is for the coordinator first: a pod that would
    # take it, and replaces no lost one, might never give it back.
    may_wait = (
        predecessor_lost_at is None
        and uncreated is not None
        and uncreated.over_quota_since is not None
    )
    refused = coordinator_refused if may_wait else ""
    create = CreatePod(context.view.namespace, manifest, ref, predecessor_lost_at, refused)
    due = uncreated is None or now >= uncreated.retry_at
    return TaskReplacement(state, incarnation, create, _removal(context, state), due)


def manifest_of(context: ReconcileContext, state: SlotState, incarnation: int) -> Manifest:
    """Of the pod that a slot needs."""
    assert context.running is not None
    return task_pod(
        context.running.view,
        context.running.topology,
        context.running.generation,
        state.slot,
        incarnation,
        context.pass_inputs.settings.pods,
        predecessor_lost_at=_predecessor_lost_at(state, context.pass_inputs.now),
        failed_placements=_failed_placements(state),
        replaces=state.rebalancing.pod if state.rebalancing is not None else "",
        on_node=state.rebalancing.target if state.rebalancing is not None else "",
    )


def _predecessor_lost_at(state: SlotState, now: float) -> float | None:
    """When the partition's replica was lost. A replacement without a node passes it on to the next
    one."""
    if state.uncreated_pod is not None:
        return state.uncreated_pod.predecessor_lost_at
    if state.phase is SlotPhase.GATED and state.pod is not None:
        return state.pod.predecessor_lost_at
    if state.loss in (None, Loss.ROLLED, Loss.DRAINED):
        return None
    if not state.loss.counts_as_failure and state.pod is not None:
        return state.pod.predecessor_lost_at
    return now


def _failed_placements(state: SlotState) -> int:
    if state.loss in _PLACEMENT_FAILURES and state.pod is not None:
        return state.pod.failed_placements + 1
    return 0


def _removal(context: ReconcileContext, state: SlotState) -> DeletePod | None:
    pod, loss, losses = state.pod, state.loss, context.pass_inputs.losses
    if pod is None or loss is None or pod.terminating:
        return None  # Terminating on a lost node: see `terminating_on_lost_nodes`
    grace_s = 0 if losses.is_on_lost_node(pod) else _SHORT_GRACE_S
    plan_needs_its_capacity = loss is Loss.UNBOUND and pod.required_node in losses.usable_nodes
    return DeletePod(
        pod.namespace, pod.name, pod.uid, pod.version, grace_s, loss.value, plan_needs_its_capacity
    )


def incarnations_to_reserve(replaced: Iterable[TaskReplacement]) -> Mapping[str, int]:
    """Slot key -> incarnation."""
    return {r.state.slot.key: r.incarnation for r in replaced}


def surplus_replicas(context: ReconcileContext, states: Iterable[SlotState]) -> tuple[PodView, ...]:
    """Replicas that have moved, or that an edit removes from partitions that it keeps, and that are
    not lost. They serve until a replica that stays is live, since only they may have the state."""
    pass_inputs = context.pass_inputs
    current = {s.slot for s in states}
    partitions = {partition_of(slot) for slot in current}
    return tuple(
        p
        for p in task_pods(context)
        if p.slot is not None
        and p.slot not in current
        and partition_of(p.slot) in partitions
        and (p.node is not None and not p.ended)
        and loss_of_pod(
            p, pass_inputs.losses, pass_inputs.snapshot, pass_inputs.now, pass_inputs.timing
        )
        is None
        and not has_diverged(context, p.slot, p)
    )


def unneeded_pods(
    context: ReconcileContext, states: Iterable[SlotState], serving: Collection[PodView]
) -> list[Action]:
    """Deletes fenced incarnations, and pods of slots that are no longer in the topology, except
    those that are still `serving`."""
    losses = context.pass_inputs.losses
    current = {s.slot: s.pod for s in states}
    found: list[Action] = []
    for pod in task_pods(context):
        if pod.terminating or pod.slot is None or context.running is None or pod in serving:
            continue
        if pod.slot not in current:
            moved = pod.slot.alternate in current
            why = "it has moved" if moved else "its slot is no longer in the topology"
            delete = _delete(pod, losses, grace_s=None, why=why)
            found.append(replace(delete, is_replaced=not moved))
        elif (newest := current[pod.slot]) is not None and pod.name != newest.name:
            found.append(_delete(pod, losses, _SHORT_GRACE_S, "a newer incarnation exists"))
    return found


def end_mislabelled_pods(context: ReconcileContext) -> list[Action]:
    losses, why = context.pass_inputs.losses, "its labels do not say what it is in its topology"
    return [
        replace(_delete(p, losses, _SHORT_GRACE_S, why), is_replaced=True)
        for p in mislabelled_pods(context)
        if not p.terminating
    ]


def suspend_pods(context: ReconcileContext) -> list[Action]:
    """Tasks first, then the coordinator, which commits the checkpoints that they saved."""
    pods = [p for p in context.pass_inputs.snapshot.pods if p.owner_uid == context.view.uid]
    tasks = [p for p in pods if p.role in (names.ROLE_TASK, names.ROLE_STANDBY)]
    chosen = tasks or [p for p in pods if p.role == names.ROLE_COORDINATOR]
    losses = context.pass_inputs.losses
    return [_delete(p, losses, grace_s=None, why="suspended") for p in chosen if not p.terminating]


def terminating_on_lost_nodes(snapshot: Snapshot, losses: LossAssessment) -> Sequence[DeletePod]:
    """Pods whose end no kubelet confirms: Terminating ones on a lost node, and pods there of a
    topology that is being deleted."""
    deleting = {t.uid for t in snapshot.topologies if t.deleting}
    return [
        DeletePod(p.namespace, p.name, p.uid, p.version, grace_s=0, why="its node is lost")
        for p in snapshot.pods
        if p.topology is not None
        and losses.is_on_lost_node(p)
        and (p.terminating or p.owner_uid in deleting)
    ]


def _delete(pod: PodView, losses: LossAssessment, grace_s: int | None, why: str) -> DeletePod:
    """`grace_s`: None: the pod's own."""
    grace_s = 0 if losses.is_on_lost_node(pod) else grace_s
    return DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace_s, why)
