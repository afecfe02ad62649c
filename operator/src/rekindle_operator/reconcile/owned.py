"""Keeps the objects of a topology that are not pods, and finds pods with a replaced token. Pure.

Design: docs/design/kubernetes.md#objects, docs/design/fencing.md#identity.
"""

from __future__ import annotations

from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import EnsureObject
from rekindle_operator.reconcile.context import ReconcileContext, owned_pods
from rekindle_operator.resources.access import token_secret
from rekindle_operator.resources.owned import is_as_wanted, key_of, owned_objects
from rekindle_operator.tokens import TokenDigests


def ensure_objects(context: ReconcileContext) -> list[EnsureObject]:
    """For a topology that runs: those that are missing, or that differ."""
    if context.running is None or not context.needs_pods:
        return []
    view, snapshot = context.running.view, context.pass_inputs.snapshot
    settles = settles_token(context)
    return [
        EnsureObject(view.namespace, manifest, is_secret and settles)
        for manifest in owned_objects(view)
        if ((is_secret := manifest["kind"] == "Secret") and settles)
        or not is_as_wanted(manifest, snapshot)
    ]


def token_of(context: ReconcileContext) -> TokenDigests | None:
    """None if the topology's Secret does not exist."""
    found = context.pass_inputs.snapshot.owned.get(key_of(token_secret(context.view)))
    return found.token if found is not None else None


def has_other_token(context: ReconcileContext, pod: PodView) -> bool:
    """It was made before the token was replaced. False for a pod of a version that does not tell,
    and while the Secret is missing."""
    token = token_of(context)
    if token is None or not token.token or not pod.token_digest:
        return False
    return pod.token_digest != token.token


def settles_token(context: ReconcileContext) -> bool:
    """Whether the token was replaced, and no pod has the one before any more."""
    token = token_of(context)
    if token is None or not token.is_complete or token.token == token.running:
        return False
    return not any(has_other_token(context, pod) for pod in owned_pods(context) if not pod.ended)
