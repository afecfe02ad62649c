"""The operator's own replicas on lost nodes (docs/decisions/0030). Pure.

Kubernetes evicts nothing while most nodes of a zone are NotReady, so a Deployment counts the pods
on them as running and creates no new ones. The leader deletes them, as it does with tasks. A
replica that is isolated and still runs holds no Lease, and so changes nothing. That is why less
evidence is enough than for a task: a new leader may never have had a response from a node that is
NotReady together with most others, and then nothing else would ever prove its loss.
"""

from __future__ import annotations

from collections.abc import Set

from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.reconcile.actions import DeletePod
from rekindle_operator.recovery.kubelets import responds_now
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.settings import OperatorSettings

# The scheduler may choose a dead node again for as long as its status is Ready. The only sign
# that such a node is lost, if it never had a task or a replica, is that its kubelet does not accept
# the pod.
_MIN_AGE_S = 5.0
_NOT_ACCEPTED_S = 10.0
_NOT_READY_S = 10.0


def delete_lost_operator_replicas(
    snapshot: Snapshot, losses: LossAssessment, now: float, settings: OperatorSettings
) -> list[DeletePod]:
    """To be deleted, so that the Deployment creates new ones. An age counts from when this process
    saw the pod get its node."""
    peers = [p for p in snapshot.pods if p.node is not None and _is_peer(p, settings)]
    not_ready = _silently_not_ready(snapshot, losses, now, settings)
    since = snapshot.pods_in_phase_since
    return [
        DeletePod(p.namespace, p.name, p.uid, p.version, grace_s=0, why=why)
        for p in peers
        if (why := _why_lost(p, losses, not_ready, now - since.get(p.uid, now)))
    ]


def _silently_not_ready(
    snapshot: Snapshot, losses: LossAssessment, now: float, settings: OperatorSettings
) -> frozenset[str]:
    """Nodes that have been NotReady for a while, and whose kubelets do not respond or are not
    probed. Empty if no other node could take a replica, or while it is not certain that NotReady
    means lost."""
    if losses.why_not_lost or not losses.usable_nodes:
        return frozenset()
    return frozenset(
        n.name
        for n in snapshot.nodes
        if not n.ready
        and snapshot.readiness_age_s(n, now) >= _NOT_READY_S
        and not responds_now(n, snapshot, now, settings.timing)
    )


def _why_lost(pod: PodView, losses: LossAssessment, not_ready: Set[str], age_s: float) -> str:
    if losses.is_on_lost_node(pod) and age_s >= _MIN_AGE_S:
        return "this replica's node is lost"
    if pod.node in not_ready and age_s >= _MIN_AGE_S:
        return "this replica's node is NotReady, and no response of its kubelet is known"
    if (
        not pod.accepted_by_kubelet
        and not pod.ended
        and age_s >= _NOT_ACCEPTED_S
        and not losses.why_not_lost
    ):
        return "its node's kubelet does not accept this replica"
    return ""


def _is_peer(pod: PodView, settings: OperatorSettings) -> bool:
    """Another replica of the same Helm release; never this process, even if its node counts as
    lost."""
    return (
        bool(settings.helm_release)
        and pod.helm_release == settings.helm_release
        and pod.namespace == settings.election.namespace
        and pod.name != settings.election.identity
    )
