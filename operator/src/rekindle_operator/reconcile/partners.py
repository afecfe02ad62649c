"""Replicas of a partition are not given up together. Pure.

A pod that its node cannot run, or that a roll replaces, is deleted by choice, and the partition's
state may be in it alone. So it goes only while another replica is live; if all fail, the first one
goes alone. One that waits for a node, or that the API server refuses, has no state, and may wait
for ever: it keeps no other one. Every such decision passes here, whatever its reason.

Design: docs/design/recovery.md#replacement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rekindle.topology.model import Partition, partition_of
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.slots import MAX_FAILED_CREATES, SlotState
from rekindle_operator.recovery.losses import Loss

_BY_CHOICE = (Loss.CANNOT_START, Loss.CRASHING, Loss.ROLLED)


def keep_partners(context: ReconcileContext, states: Sequence[SlotState]) -> tuple[SlotState, ...]:
    """The states, without the losses by choice of replicas that have to stay for now."""
    partitions: dict[Partition, list[SlotState]] = defaultdict(list)
    for state in states:
        partitions[partition_of(state.slot)].append(state)
    return tuple(
        replace(s, loss=None) if _must_stay(context, s, partitions[partition_of(s.slot)]) else s
        for s in states
    )


def _must_stay(context: ReconcileContext, state: SlotState, partition: Sequence[SlotState]) -> bool:
    if state.loss not in _BY_CHOICE or state.is_successor:
        return False
    if any(replica_state(context, s) is ReplicaState.LIVE for s in partition if s is not state):
        return False
    first, *others = (s for s in partition if not s.is_successor and not waits(context, s))
    return state is not first or not all(_fails(s) for s in others)


def _fails(state: SlotState) -> bool:
    """One that was replaced and starts does not: its partner waits until it is live."""
    return state.loss in _BY_CHOICE or bool(state.start_problem)


def waits(context: ReconcileContext, state: SlotState) -> bool:
    """For a node or for its creation, and for longer than these take."""
    pod, pass_inputs = state.pod, context.pass_inputs
    if pod is None:
        uncreated = state.uncreated_pod
        return uncreated is not None and uncreated.failures >= MAX_FAILED_CREATES
    if state.loss is not None or (pod.node is not None and not pod.ended):
        return False
    age_s = pass_inputs.snapshot.pod_age_s(pod, pass_inputs.now)
    return age_s >= pass_inputs.timing.scheduling_timeout_s
