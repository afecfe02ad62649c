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
    of_pods, has_token = _tokens_of_pods(context), bool(context.token and context.token.token)
    return [
        EnsureObject(view.namespace, manifest, of_pods, has_token)
        if manifest["kind"] == "Secret"
        else EnsureObject(view.namespace, manifest)
        for manifest in owned_objects(view)
        if not is_as_wanted(manifest, snapshot)
        or (manifest["kind"] == "Secret" and _has_wrong_running_token(context))
    ]


def has_other_token(context: ReconcileContext, pod: PodView) -> bool:
    """It was made before the token was replaced. False while the Secret is missing."""
    return context.token is not None and context.token.differs_from(pod.token_digest)


def _has_wrong_running_token(context: ReconcileContext) -> bool:
    """The Secret has a token before this one, and no pod has it any more; or pods have one that
    the Secret does not have."""
    token = context.token
    if token is None or not token.is_complete:
        return False
    others = _tokens_of_pods(context) - {token.token}
    if not others:
        return token.is_replaced
    return "" not in others and token.running not in others


def _tokens_of_pods(context: ReconcileContext) -> frozenset[str]:
    """Digests."""
    return frozenset(p.token_digest for p in owned_pods(context) if not p.ended)
