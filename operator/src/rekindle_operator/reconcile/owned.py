"""Keeps the objects of a topology that are not pods, and finds pods with a replaced token. Pure.

Design: docs/design/kubernetes.md#objects, docs/design/fencing.md#identity.
"""

from __future__ import annotations

from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import EnsureObject
from rekindle_operator.reconcile.context import ReconcileContext, owned_pods
from rekindle_operator.resources.owned import is_as_wanted, owned_objects


def ensure_objects(context: ReconcileContext) -> list[EnsureObject]:
    """For a topology that runs: those that are missing, or that differ."""
    if context.running is None or not context.needs_pods:
        return []
    view, snapshot = context.running.view, context.pass_inputs.snapshot
    settles, has_token = settles_token(context), bool(context.token and context.token.token)
    return [
        EnsureObject(view.namespace, manifest, is_secret and settles, is_secret and has_token)
        for manifest in owned_objects(view)
        if ((is_secret := manifest["kind"] == "Secret") and settles)
        or not is_as_wanted(manifest, snapshot)
    ]


def has_other_token(context: ReconcileContext, pod: PodView) -> bool:
    """It was made before the token was replaced. False while the Secret is missing."""
    return context.token is not None and context.token.differs_from(pod.token_digest)


def settles_token(context: ReconcileContext) -> bool:
    """Whether the token was replaced, and no pod has the one before any more."""
    if context.token is None or not context.token.is_replaced:
        return False
    return not any(has_other_token(context, pod) for pod in owned_pods(context) if not pod.ended)
