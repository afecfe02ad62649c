"""Placeholders (`spec.recovery.autoscale`): pods by which a cluster autoscaler sees what waiting
queries lack, since it does not see gated pods. Pure.

Each gated pod that a waiting query needs, and that has had no node for some seconds, gets one,
which the scheduler tries to bind. What a placeholder uses counts as free in the plan. Those on
nodes that tasks are about to be bound to end in the same pass, and meanwhile none is created, so no
placeholder keeps a task out. Other pods, coordinators too, preempt them.

Design: docs/design/recovery.md#placeholders.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from rekindle import names
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.reconcile.actions import (
    Action,
    CreatePlaceholder,
    DeletePod,
    TopologyActions,
)
from rekindle_operator.reconcile.planning import PlanInput, missing_of
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.resources.placeholder import placeholder_name, placeholder_pod


def without_placeholders(snapshot: Snapshot) -> tuple[Snapshot, tuple[PodView, ...]]:
    """The snapshot without placeholders, which nothing else of a pass knows, and these. One with a
    forged owner stays a pod like any other, and uses capacity."""
    namespaces = {t.uid: t.namespace for t in snapshot.topologies}
    found = {
        pod.uid: pod
        for pod in snapshot.pods
        if pod.role == names.ROLE_PLACEHOLDER
        and pod.topology is None
        and namespaces.get(pod.owner_uid or "") == pod.namespace
    }
    if not found:
        return snapshot, ()
    others = tuple(pod for pod in snapshot.pods if pod.uid not in found)
    return replace(snapshot, pods=others), tuple(found.values())


def nodes_with_openings(snapshot: Snapshot, plan: Plan) -> frozenset[str]:
    """Nodes of gates that are opened now, or were, of pods that are not bound yet."""
    opened = {
        pod.required_node
        for pod in snapshot.pods
        if pod.topology is not None
        and pod.node is None
        and pod.required_node is not None
        and names.GATE not in pod.gates
        and not (pod.terminating or pod.ended)
    }
    return frozenset({*plan.nodes.values(), *opened} - {None})


def placeholder_actions(
    plan_inputs: Mapping[str, PlanInput],
    plan: Plan,
    placeholders: Sequence[PodView],
    openings: frozenset[str],
    usable: Container[str],
) -> list[TopologyActions]:
    """By themselves, so that nothing else of a topology depends on them. `plan_inputs`: by uid, of
    the topologies that could be decided on; placeholders of the others stay as they are, but for
    those that are in the way. `openings`: see `nodes_with_openings`; `usable`: nodes."""
    found = []
    owners = {p.owner_uid for p in placeholders} | plan_inputs.keys()
    for uid in sorted(owner for owner in owners if owner is not None):
        present = [p for p in placeholders if p.owner_uid == uid and not p.terminating]
        plan_input = plan_inputs.get(uid)
        wanted = _wanted(plan_input, plan) if plan_input is not None else None
        actions: list[Action] = [*_deletions(present, wanted, openings, usable)]
        if plan_input is not None and wanted and not openings:
            existing = {p.name for p in placeholders if p.owner_uid == uid}
            actions += _creations(plan_input, wanted, existing)
        if actions:
            key = plan_input.context.view.key if plan_input is not None else uid
            found.append(
                TopologyActions(f"placeholders of {key}", tuple(actions), topology_uid=uid)
            )
    return found


def _wanted(plan_input: PlanInput, plan: Plan) -> dict[str, PodView]:
    """Gated pods that need one, by its name."""
    context = plan_input.context
    if (
        context.running is None
        or context.view.deleting
        or context.suspended
        or not context.running.topology.spec.recovery.autoscale
    ):
        return {}
    waiting = {ranked.key for ranked in plan.waiting} - plan.over_namespace_limit
    missing = missing_of([plan_input])
    needs = {need for query in missing.down if query.key in waiting for need in query.needs}
    keys = {missing.pods[need].key for need in needs}
    snapshot, now = context.pass_inputs.snapshot, context.pass_inputs.now
    after_s = context.pass_inputs.timing.scheduling_timeout_s
    return {
        placeholder_name(candidate.pod): candidate.pod
        for candidate in plan_input.candidates.values()
        if candidate.pod is not None
        and candidate.to_place.key in keys
        and candidate.to_place.key in plan.unplaced
        and snapshot.pod_age_s(candidate.pod, now) >= after_s
    }


def _deletions(
    present: Iterable[PodView],
    wanted: Mapping[str, PodView] | None,
    openings: frozenset[str],
    usable: Container[str],
) -> list[DeletePod]:
    """`wanted`: None: not known."""
    found = []
    for pod in present:
        in_the_way = pod.node in openings
        if in_the_way:
            why = "a pod needs its room"
        elif pod.ended:
            why = "it has ended"
        elif pod.node is not None and pod.node not in usable:
            why = "its node takes no pods: nothing comes for it"
        elif wanted is not None and pod.name not in wanted:
            why = "what it stands for waits for no node"
        else:
            continue
        found.append(
            DeletePod(
                pod.namespace,
                pod.name,
                pod.uid,
                pod.version,
                grace_s=None,  # its own is 0
                why=why,
                plan_needs_its_capacity=in_the_way,
            )
        )
    return found


def _creations(
    plan_input: PlanInput, wanted: Mapping[str, PodView], existing: Collection[str]
) -> list[CreatePlaceholder]:
    context = plan_input.context
    assert context.running is not None
    view, defaults = context.running.view, context.pass_inputs.settings.pods
    return [
        CreatePlaceholder(view.namespace, placeholder_pod(view, pod, defaults))
        for name, pod in sorted(wanted.items())
        if name not in existing
    ]
