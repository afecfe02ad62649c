"""Keeps one coordinator for each topology, before all other actions and outside the plan. Pure.

Design: docs/design/recovery.md#replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle import names
from rekindle_operator.cluster.model import IncarnationRef, LeaseView, PodView, UncreatedPod
from rekindle_operator.reconcile.actions import (
    Action,
    AvoidNode,
    CreatePod,
    DeletePod,
)
from rekindle_operator.reconcile.capacity import capacity_left_by
from rekindle_operator.reconcile.context import (
    ReconcileContext,
    coordinator_pods,
    draining_nodes,
    reserved_coordinator_incarnation,
)
from rekindle_operator.reconcile.roll import is_replaced_by_roll
from rekindle_operator.recovery.misfits import Misfits, PodToPlace
from rekindle_operator.recovery.start_failures import is_same_everywhere
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.coordinator import (
    coordinator_pod,
    coordinator_shape,
    coordinator_template_digest,
)

_GRACE_S = 1  # it is stateless and fenced
_ROLLED = "it has another image or token"
_DRAINED = "its node is drained"
_NOT_NEEDED = "the one before it works and stays"
_WHILE_IT_WORKS = (_ROLLED, _DRAINED)  # reasons to replace a coordinator that works
_NOT_CREATED = 3  # requests; a pass that deletes pods sends two, which may fail by chance


@dataclass(frozen=True, slots=True)
class CoordinatorReplacement:
    """Empty if the coordinator stays. `incarnation` is to be reserved before `create`. `pod`: what
    needs a node, also while its creation waits after a refusal. `refused`: the message of the API
    server if the newest request has found a quota full."""

    why: str = ""  # for the Event; empty: there is none, or it was already emitted
    incarnation: int | None = None
    prepare: tuple[Action, ...] = ()
    create: tuple[CreatePod, ...] = ()
    remove: tuple[Action, ...] = ()
    pod: Manifest | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class WaitingDrain:
    node: str
    why: str


def waiting_drain_of_coordinator(context: ReconcileContext) -> WaitingDrain | None:
    """If the coordinator stays on a cordoned node, because the next one does not start."""
    pods, lease = coordinator_pods(context), _lease(context)
    newest = max(pods, key=lambda p: p.incarnation, default=None)
    holder = _holder(pods, lease)
    if newest is None or holder is None or holder.node is None:
        return None
    if not _is_drained(context, holder):
        return None
    why = _why_it_stays(context, holder, newest)
    return WaitingDrain(holder.node, f"successor: {why}") if why else None


def why_roll_waits(context: ReconcileContext) -> str:
    """Why the coordinator that a roll replaces stays; empty: it does not, or only for a moment."""
    pods = coordinator_pods(context)
    newest = max(pods, key=lambda p: p.incarnation, default=None)
    replaced = _holder(pods, _lease(context)) or newest
    if newest is None or replaced is None or not is_replaced_by_roll(context, replaced):
        return ""
    return _why_it_stays(context, replaced, newest)


def _why_it_stays(context: ReconcileContext, replaced: PodView, newest: PodView) -> str:
    """What the next one waits for: to be created, a node, or to start."""
    if replaced is newest:
        return why_not_created(context)
    if newest.node is not None:
        return newest.container_error
    if not _is_old(context, newest):
        return ""
    nodes = capacity_left_by(context.pass_inputs, context.pass_inputs.snapshot.pods)
    why = Misfits(nodes).why(PodToPlace.of_pod(newest))
    return why or newest.placement_failure or "no node takes it"


def why_not_created(context: ReconcileContext) -> str:
    """Why requests for the next coordinator's pod fail; empty if only the first ones have."""
    uncreated = _uncreated(context)
    if uncreated is None or uncreated.is_abandoned(context.pass_inputs.now):
        return ""
    return f"API server: {uncreated.message}" if uncreated.failures >= _NOT_CREATED else ""


def with_late_report(context: ReconcileContext) -> ReconcileContext:
    """For what is said, not for what is done: a report counts until its coordinator would be
    replaced for its silence, if nothing that is known speaks against it. On a busy machine renewals
    of its Lease come late, and states would change to Unknown and back. Not if its pod is lost, or
    a renewal since then has not confirmed the report."""
    as_of, snapshot, now = (
        context.report_stale_since,
        context.pass_inputs.snapshot,
        context.pass_inputs.now,
    )
    newest = max(coordinator_pods(context), key=lambda p: p.incarnation, default=None)
    lease = _lease(context)
    if as_of is None or newest is None or lease is None or _pod_lost(context, newest):
        return context
    is_its_own = lease.holder == str(newest.incarnation) == str(context.report.fence)
    # After a pause of this process the Lease counts as seen when that ended.
    is_renewed = lease.seen_at > max(as_of, snapshot.observing_since)
    is_over = now - as_of > context.pass_inputs.timing.coordinator_silent_s
    if is_over or is_renewed or not is_its_own:
        return context
    return replace(context, report_stale_since=None, report_age_s=now - as_of)


def replace_coordinator(context: ReconcileContext) -> CoordinatorReplacement:
    """Keep one coordinator for a topology that runs."""
    if context.running is None or not context.needs_pods:
        return CoordinatorReplacement()
    pods = coordinator_pods(context)
    newest = max(pods, key=lambda p: p.incarnation, default=None)
    lease = _lease(context)
    if (kept := _kept_instead(context, pods, newest, lease)) is not None:
        superfluous = [p for p in pods if p is not kept and not p.terminating]
        remove = tuple(_deletion(context, p, _NOT_NEEDED) for p in superfluous)
        return CoordinatorReplacement(remove=remove)
    why = _why_replaced(context, newest, lease)
    remove = _removals(context, pods, newest, lease, why)
    if not why:
        return CoordinatorReplacement(remove=remove)
    replacement = _next_coordinator(context, newest, why)
    is_retry = _uncreated(context) is not None
    return replace(replacement, why="" if is_retry else why, remove=remove)


def _next_coordinator(
    context: ReconcileContext, newest: PodView | None, why: str
) -> CoordinatorReplacement:
    """The pod of the next incarnation, or again that of one that was certainly not created."""
    assert context.running is not None
    view, pass_inputs = context.running.view, context.pass_inputs
    losses, defaults = pass_inputs.losses, pass_inputs.settings.pods
    reserved, uncreated = reserved_coordinator_incarnation(context), _uncreated(context)
    ref = IncarnationRef(view.uid, names.COORDINATOR_KEY, reserved)
    lost_at = None if why in _WHILE_IT_WORKS else pass_inputs.now
    may_retry = (
        uncreated is None
        or pass_inputs.now >= uncreated.retry_at
        or uncreated.is_before_loss(lost_at)
    )
    if uncreated is None or (uncreated.may_exist and may_retry):
        incarnation = max(reserved, newest.incarnation if newest else 0) + 1
        ref = IncarnationRef(view.uid, names.COORDINATOR_KEY, incarnation)
    prepare: list[Action] = []
    less_preferred = set(pass_inputs.snapshot.unsuitable.get(coordinator_shape(view, defaults), ()))
    if newest is not None and newest.node is not None and not newest.terminating:
        less_preferred.add(newest.node)  # its node may be the reason why it does not work
        rolled = is_replaced_by_roll(context, newest)
        if newest.shape and newest.node in losses.usable_nodes and not rolled:
            node = losses.usable_nodes[newest.node]
            prepare.append(AvoidNode(newest.shape, node.name, node.uid, newest.uid, why))
    pod = coordinator_pod(
        view, ref.incarnation, losses.excluded_nodes, defaults, last_resort=less_preferred
    )
    create: tuple[CreatePod, ...] = ()
    if may_retry:
        create = (CreatePod(view.namespace, pod, ref, lost_at),)
    # No capacity is kept for one that nothing needs yet, and that the API server does not create.
    needs_node = why not in _WHILE_IT_WORKS or not why_not_created(context)
    is_over_quota = uncreated is not None and uncreated.is_over_quota_for(0.0, pass_inputs.now)
    return CoordinatorReplacement(
        why,
        ref.incarnation,
        tuple(prepare),
        create,
        pod=pod if needs_node else None,
        refused=uncreated.message if uncreated is not None and is_over_quota else "",
    )


def _uncreated(context: ReconcileContext) -> UncreatedPod | None:
    """Of the reserved incarnation."""
    incarnation = reserved_coordinator_incarnation(context)
    ref = IncarnationRef(context.view.uid, names.COORDINATOR_KEY, incarnation)
    return context.pass_inputs.snapshot.uncreated_pods.get(ref)


def _removals(
    context: ReconcileContext,
    pods: Sequence[PodView],
    newest: PodView | None,
    lease: LeaseView | None,
    why: str,
) -> tuple[DeletePod, ...]:
    """All of them if the newest is replaced, else those before it. In a roll and in a drain,
    the one that works stays until the next one has taken its Lease: it may take minutes to pull the
    new image, or there may be no such image, or no node."""
    kept = _working_meanwhile(context, pods, newest, lease, why)
    return tuple(
        _deletion(context, pod, why or "a newer incarnation exists")
        for pod in pods
        if not pod.terminating and pod is not kept and (why or pod is not newest)
    )


def _deletion(context: ReconcileContext, pod: PodView, why: str) -> DeletePod:
    grace_s = 0 if context.pass_inputs.losses.is_on_lost_node(pod) else _GRACE_S
    return DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace_s, why)


def _kept_instead(
    context: ReconcileContext,
    pods: Sequence[PodView],
    newest: PodView | None,
    lease: LeaseView | None,
) -> PodView | None:
    """The pod that holds the Lease, if nothing speaks against it any more, as after an uncordon,
    and the newest one was not bound yet."""
    holder = _holder(pods, lease)
    if holder is None or newest is None or holder is newest or newest.node is not None:
        return None
    return None if _why_replaced(context, holder, lease) else holder


def _working_meanwhile(
    context: ReconcileContext,
    pods: Sequence[PodView],
    newest: PodView | None,
    lease: LeaseView | None,
    why: str,
) -> PodView | None:
    """The pod that holds the Lease and is replaced for its image or its node alone. None if its
    successor needs what it uses of a node. What it uses of a quota, any pod could take: so it
    stays until its successor is created."""
    holder = _holder(pods, lease)
    if holder is None or newest is None or lease is None:
        return None
    if _pod_lost(context, holder) or _why_silent(context, holder, lease):
        return None
    if holder is newest:
        return holder if why in _WHILE_IT_WORKS else None
    is_unbound = newest.node is None and _is_old(context, newest)
    return None if is_unbound and _takes_place_of(context, newest, holder) else holder


def _takes_place_of(context: ReconcileContext, newest: PodView, holder: PodView) -> bool:
    """Whether no node has room for the newest one, and that of the holder had without it."""
    pass_inputs, to_place = context.pass_inputs, PodToPlace.of_pod(newest)
    pods = pass_inputs.snapshot.pods
    if any(n.fits(to_place) for n in capacity_left_by(pass_inputs, pods).values()):
        return False
    without = capacity_left_by(pass_inputs, (p for p in pods if p is not holder))
    return holder.node in without and without[holder.node].fits(to_place)


def _holder(pods: Sequence[PodView], lease: LeaseView | None) -> PodView | None:
    """The pod that has the Lease."""
    found = (p for p in pods if lease is not None and lease.holder == str(p.incarnation))
    return next(found, None)


def _is_old(context: ReconcileContext, pod: PodView) -> bool:
    """It should have been scheduled."""
    pass_inputs = context.pass_inputs
    age_s = pass_inputs.snapshot.pod_age_s(pod, pass_inputs.now)
    return age_s >= pass_inputs.timing.scheduling_timeout_s


def _lease(context: ReconcileContext) -> LeaseView | None:
    key = context.view.namespace, names.coordinator_name(context.view.name)
    leases = context.pass_inputs.snapshot.leases
    return next((x for x in leases if (x.namespace, x.name) == key), None)


def _why_replaced(
    context: ReconcileContext, newest: PodView | None, lease: LeaseView | None
) -> str:
    """Empty: it stays."""
    if newest is None:
        return "it has no pod"
    return (
        _pod_lost(context, newest)
        or _why_silent(context, newest, lease)
        or _why_unscheduled(context, newest)
        or (_ROLLED if is_replaced_by_roll(context, newest) else "")
        or (_DRAINED if _is_drained(context, newest) else "")
    )


def _is_drained(context: ReconcileContext, pod: PodView) -> bool:
    return pod.node in draining_nodes(context)


def _pod_lost(context: ReconcileContext, pod: PodView) -> str:
    losses = context.pass_inputs.losses
    if pod.terminating:
        return "its pod is being deleted"
    if pod.ended:
        return "its pod has failed"
    if losses.is_on_lost_node(pod):
        return f"its node {pod.node} {losses.lost_nodes[pod.node or '']}"
    return ""


def _why_silent(context: ReconcileContext, pod: PodView, lease: LeaseView | None) -> str:
    """All ages are by this operator's clock."""
    snapshot, now, timing = (
        context.pass_inputs.snapshot,
        context.pass_inputs.now,
        context.pass_inputs.timing,
    )
    if lease is not None and lease.holder == str(pod.incarnation):
        is_old = now - lease.seen_at > timing.coordinator_silent_s
        return "it does not renew its Lease" if is_old else ""
    since = snapshot.pods_in_phase_since.get(pod.uid)
    if pod.node is None or since is None:
        return ""
    is_unaccepted = context.pass_inputs.losses.awaits_unresponsive_kubelet(pod)
    if is_unaccepted and now - since >= timing.scheduling_timeout_s:
        return f"the kubelet of its node {pod.node} has not accepted its pod"
    if is_same_everywhere(pod.container_error) and _would_be_the_same(context, pod):
        return ""
    failing_since = snapshot.failing_since.get(pod.uid)
    if (
        pod.container_error
        and failing_since is not None
        and now - failing_since > timing.coordinator_start_s
    ):
        return f"its pod does not start: {pod.container_error}"
    if pod.phase == "Running" and now - since > timing.coordinator_start_s:
        return "it runs and did not acquire its Lease"
    if pod.phase != "Running" and now - since > timing.coordinator_pull_s:
        return f"its node {pod.node} did not start its pod"
    return ""


def _would_be_the_same(context: ReconcileContext, pod: PodView) -> bool:
    assert context.running is not None
    defaults = context.pass_inputs.settings.pods
    return pod.shape == coordinator_shape(context.running.view, defaults)


def _why_unscheduled(context: ReconcileContext, pod: PodView) -> str:
    """A pod that would be made the same again waits: the scheduler keeps trying."""
    assert context.running is not None
    pass_inputs = context.pass_inputs
    template_digest = coordinator_template_digest(
        context.running.view, pass_inputs.losses.excluded_nodes, pass_inputs.settings.pods
    )
    if pod.node is None and pod.template_digest != template_digest and _is_old(context, pod):
        return "its pod was not scheduled, and would be made differently now"
    return ""
