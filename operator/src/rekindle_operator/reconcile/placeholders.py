"""Placeholders (`spec.recovery.autoscale`): pods by which a cluster autoscaler sees what waiting
queries lack, since it does not see gated pods. Pure.

Each gated pod that a waiting query needs, and that has had no node for some seconds, gets one,
which the scheduler tries to bind. What a placeholder uses counts as free in the plan. Those on
nodes that tasks are about to be bound to end in the same pass, and meanwhile none is created, so no
placeholder keeps a task out. Other pods, coordinators too, preempt them. Where a quota has no room
for a pod of a topology there are none.

One that is made again at once may be bound to the same node: one that is lost and still called
Ready, or whose kubelet refuses it. So it stays there until the scheduler binds nothing to the node,
or for a minute.

Design: docs/design/recovery.md#placeholders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle import names
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.reconcile.actions import (
    Action,
    CreatePlaceholder,
    DeletePod,
    OpenGate,
    TopologyActions,
)
from rekindle_operator.reconcile.context import PassInputs
from rekindle_operator.reconcile.planning import PlanInput, missing_of
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.resources.placeholder import placeholder_name, placeholder_pod

_AGAIN_AFTER_S = 60.0  # of one that a kubelet has refused or evicted


@dataclass(frozen=True, slots=True)
class PlaceholderInputs:
    """What all topologies share. `openings`: see `_nodes_with_openings`; `schedulable`: nodes to
    which the scheduler binds pods, whatever the operator knows of them; `full`: namespaces in which
    a quota has no room for a pod that a topology needs."""

    snapshot: Snapshot
    now: float
    placeholders: Mapping[str, Sequence[PodView]]  # by the topology's uid
    openings: frozenset[str]
    schedulable: frozenset[str]
    full: frozenset[str]

    @classmethod
    def of(
        cls,
        pass_inputs: PassInputs,
        placeholders: Iterable[PodView],
        decisions: Iterable[TopologyActions],
    ) -> PlaceholderInputs:
        snapshot, now = pass_inputs.snapshot, pass_inputs.now
        by_owner = defaultdict[str, list[PodView]](list)
        for pod in placeholders:
            by_owner[pod.owner_uid or ""].append(pod)
        namespaces = {t.uid: t.namespace for t in snapshot.topologies}
        over_quota = (
            namespaces.get(ref.topology_uid, "")
            for ref, uncreated in snapshot.uncreated_pods.items()
            if uncreated.over_quota_since is not None and not uncreated.is_abandoned(now)
            if not ref.slot.startswith(names.ROLE_STANDBY)  # which needs no room while others do
        )
        return cls(
            snapshot,
            now,
            by_owner,
            _nodes_with_openings(pass_inputs, decisions),
            frozenset(n.name for n in snapshot.nodes if n.ready and not n.cordoned),
            frozenset(over_quota),
        )


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


def _nodes_with_openings(
    pass_inputs: PassInputs, decisions: Iterable[TopologyActions]
) -> frozenset[str]:
    """Nodes of gates that are opened now, or were a moment ago, of pods that are not bound yet. One
    that waits for longer does so for something else, and may do so nearly always."""
    snapshot, now = pass_inputs.snapshot, pass_inputs.now
    opened = {
        pod.required_node
        for pod in snapshot.pods
        if pod.topology is not None
        and pod.node is None
        and pod.required_node is not None
        and names.GATE not in pod.gates
        and not (pod.terminating or pod.ended)
        and snapshot.ungated_s(pod, now) < pass_inputs.timing.scheduling_timeout_s
    }
    actions = (action for decision in decisions for action in decision.actions)
    opening = (action.node for action in actions if isinstance(action, OpenGate))
    return frozenset({*opening, *opened} - {None})


def placeholder_actions(
    plan_inputs: Mapping[str, PlanInput], plan: Plan, given: PlaceholderInputs
) -> list[TopologyActions]:
    """By themselves, so that nothing else of a topology depends on them. `plan_inputs`: by uid, of
    the topologies that could be decided on; placeholders of the others stay as they are, but for
    those that are in the way."""
    found = []
    for uid in sorted(given.placeholders.keys() | plan_inputs.keys()):
        existing = given.placeholders.get(uid, ())
        plan_input = plan_inputs.get(uid)
        wanted = _wanted(plan_input, plan) if plan_input is not None else None
        present = (p for p in existing if not p.terminating)
        actions: list[Action] = [*_deletions(present, wanted, given)]
        if plan_input is not None and wanted and not given.openings:
            actions += _creations(plan_input, wanted, {p.name for p in existing}, given)
        if actions:
            key = plan_input.context.view.key if plan_input is not None else uid
            found.append(
                TopologyActions(f"placeholders of {key}", tuple(actions), topology_uid=uid)
            )
    return found


def _wanted(plan_input: PlanInput, plan: Plan) -> dict[str, PodView]:
    """Gated pods that need one, by its name, however long they have waited: their ages begin anew
    when the operator has been restarted or paused."""
    context = plan_input.context
    if (
        context.running is None
        or context.view.deleting
        or context.suspended
        or not context.running.topology.spec.recovery.autoscale
    ):
        return {}
    waiting = {ranked.key for ranked in plan.waiting} - plan.over_namespace_limit
    if not waiting:
        return {}
    missing = missing_of([plan_input])
    needs = {need for query in missing.down if query.key in waiting for need in query.needs}
    keys = {missing.pods[need].key for need in needs}
    return {
        placeholder_name(candidate.pod): candidate.pod
        for candidate in plan_input.candidates.values()
        if candidate.pod is not None
        and candidate.to_place.key in keys
        and candidate.to_place.key in plan.unplaced
    }


def _deletions(
    present: Iterable[PodView], wanted: Mapping[str, PodView] | None, given: PlaceholderInputs
) -> list[DeletePod]:
    """`wanted`: None: not known."""
    found = []
    for pod in present:
        in_the_way = pod.node in given.openings and not pod.ended
        if in_the_way:
            why = "a pod needs its room"
        elif pod.namespace in given.full:
            why = "a quota of the namespace has no room for a pod"
        elif wanted is not None and pod.name not in wanted:
            why = "what it stands for waits for no node"
        elif pod.ended and given.snapshot.pod_age_s(pod, given.now) >= _AGAIN_AFTER_S:
            why = "it has ended"
        elif pod.node is not None and pod.node not in given.schedulable:
            why = "its node takes no pods: nothing comes for it"
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
    plan_input: PlanInput,
    wanted: Mapping[str, PodView],
    existing: Collection[str],
    given: PlaceholderInputs,
) -> list[CreatePlaceholder]:
    """Not at once: what pods that are being deleted use is free in a moment."""
    context = plan_input.context
    assert context.running is not None
    view, defaults = context.running.view, context.pass_inputs.settings.pods
    after_s = context.pass_inputs.timing.scheduling_timeout_s
    if view.namespace in given.full:
        return []
    return [
        CreatePlaceholder(view.namespace, placeholder_pod(view, pod, defaults))
        for name, pod in sorted(wanted.items())
        if name not in existing and given.snapshot.pod_age_s(pod, given.now) >= after_s
    ]
