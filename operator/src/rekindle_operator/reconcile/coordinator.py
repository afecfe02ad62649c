"""Keeping one coordinator a topology, before anything else and outside any plan. Pure.

Design: docs/design/recovery.md#replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle import names
from rekindle_operator.cluster.model import LeaseView, PodView, SlotRef, Snapshot
from rekindle_operator.reconcile.actions import (
    Action,
    AvoidNode,
    CreatePod,
    DeletePod,
    EnsureAccess,
    EnsureLease,
)
from rekindle_operator.reconcile.context import ReconcileContext, coordinator_incarnation
from rekindle_operator.reconcile.roll import coordinator_rolls
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.resources.access import coordinator_access, coordinator_lease
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.coordinator import (
    coordinator_pod,
    coordinator_shape,
    coordinator_template,
)
from rekindle_operator.settings import Settings, Timing

_GRACE_S = 1  # it is stateless and fenced


@dataclass(frozen=True, slots=True)
class CoordinatorReplacement:
    """`incarnation` is to be reserved before `create`; None: the coordinator stays. `pod`: what
    needs a place, also while its creation waits."""

    why: str
    incarnation: int | None
    prepare: tuple[Action, ...] = ()
    create: tuple[CreatePod, ...] = ()
    remove: tuple[Action, ...] = ()
    pod: Manifest | None = None


def keep_coordinator(
    context: ReconcileContext,
    snapshot: Snapshot,
    assessment: LossAssessment,
    now: float,
    settings: Settings,
) -> CoordinatorReplacement:
    if context.running is None or not context.wants_pods:
        return CoordinatorReplacement("", None)
    pods = coordinator_pods(context, snapshot)
    newest = max(pods, key=lambda p: p.incarnation, default=None)
    lease = _lease(context, snapshot)
    view, incarnation = context.running.view, None
    template = coordinator_template(view, assessment.avoided, settings.pods)
    why = (
        "there is none"
        if newest is None
        else _loss(newest, assessment)
        or _never_accepted(newest, assessment, now, settings.timing)
        or _silence(newest, lease, snapshot, now, settings.timing)
        or _stranded(newest, template, now, settings.timing)
        or ("it runs another image" if coordinator_rolls(context, newest) else "")
    )
    prepare: list[Action] = []
    create: list[CreatePod] = []
    remove: list[Action] = []
    manifest: Manifest | None = None
    if lease is None:
        prepare.append(EnsureLease(view.namespace, coordinator_lease(view)))
    if why:
        reserved = coordinator_incarnation(context)
        refused = snapshot.refusals.get(SlotRef(view.uid, names.COORDINATOR_SLOT, reserved))
        highest = max(reserved, newest.incarnation if newest else 0)
        incarnation = highest + 1 if refused is None else reserved
        avoided = set(snapshot.unsuitable.get(coordinator_shape(view, settings.pods), ()))
        if newest is not None and newest.node is not None and not newest.terminating:
            avoided.add(newest.node)  # whatever is wrong with it may be its node's fault
            rolled = coordinator_rolls(context, newest)
            if newest.shape and newest.node in assessment.usable and not rolled:
                prepare.append(AvoidNode(newest.shape, newest.node, newest.uid, why))
        manifest = coordinator_pod(
            view, incarnation, assessment.avoided, settings.pods, avoid=avoided
        )
        if refused is None or now >= refused.again_at:
            prepare.insert(0, EnsureAccess(view.namespace, tuple(coordinator_access(view))))
            ref = SlotRef(view.uid, names.COORDINATOR_SLOT, incarnation)
            create.append(CreatePod(view.namespace, manifest, ref))
    for pod in pods:
        if not pod.terminating and (why or pod is not newest):
            grace = 0 if assessment.loss_of_node(pod) else _GRACE_S
            reason = why or "a newer incarnation stands"
            remove.append(DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace, reason))
    told = (
        "" if incarnation == coordinator_incarnation(context) else why
    )  # of a refusal: told already
    return CoordinatorReplacement(
        told, incarnation, tuple(prepare), tuple(create), tuple(remove), manifest
    )


def coordinator_pods(context: ReconcileContext, snapshot: Snapshot) -> list[PodView]:
    return [
        p
        for p in snapshot.pods
        if p.owner_uid == context.view.uid and p.role == names.ROLE_COORDINATOR
    ]


def _lease(context: ReconcileContext, snapshot: Snapshot) -> LeaseView | None:
    name = names.coordinator_name(context.view.name)
    return next(
        (x for x in snapshot.leases if (x.namespace, x.name) == (context.view.namespace, name)),
        None,
    )


def _loss(pod: PodView, assessment: LossAssessment) -> str:
    """Why the coordinator is to be replaced; empty: it stays."""
    if pod.terminating:
        return "its pod is being deleted"
    if pod.ended:
        return "its pod has failed"
    if assessment.loss_of_node(pod):
        return f"its node {pod.node} {assessment.lost_nodes[pod.node or '']}"
    return ""


def _never_accepted(pod: PodView, assessment: LossAssessment, now: float, timing: Timing) -> str:
    if assessment.is_out_of_reach(pod) and now - pod.created_at >= timing.unbound_s:
        return f"the kubelet of {pod.node} neither takes it nor answers"
    return ""


def _silence(
    pod: PodView, lease: LeaseView | None, snapshot: Snapshot, now: float, timing: Timing
) -> str:
    """The same, of one that says nothing. All ages are by this operator's clock."""
    if lease is not None and lease.holder == str(pod.incarnation):
        is_old = now - lease.seen_at > timing.coordinator_silent_s
        return "its Lease is not renewed" if is_old else ""
    since = snapshot.phase_since.get(pod.uid)
    if pod.node is None or since is None:
        return ""
    troubled = snapshot.troubled_since.get(pod.uid)
    if pod.trouble and troubled is not None and now - troubled > timing.coordinator_start_s:
        return f"it does not start: {pod.trouble}"
    if pod.phase == "Running" and now - since > timing.coordinator_start_s:
        return "it never took its Lease"
    if pod.phase != "Running" and now - since > timing.coordinator_pull_s:
        return f"its node {pod.node} did not start it"
    return ""


def _stranded(pod: PodView, template: str, now: float, timing: Timing) -> str:
    """No node took it, and one that is made now may fare better. One that would be the same waits:
    the scheduler goes on trying."""
    if pod.node is None and pod.template != template and now - pod.created_at >= timing.unbound_s:
        return "no node took it, and it would be made differently now"
    return ""
