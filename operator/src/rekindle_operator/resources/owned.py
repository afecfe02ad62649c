"""The objects of a topology that are not pods: made once, and whenever one is missing. Pure.

An object belongs to the topology by its owner's UID, and is as wanted if it has all that its
manifest has. Records of generations are not among them: there is one for each generation.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle import names
from rekindle_operator.cluster.model import Snapshot, TopologyView
from rekindle_operator.resources.access import coordinator_access, coordinator_lease, token_secret
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.disruption import disruption_budget
from rekindle_operator.tokens import TokenDigests


def owned_objects(view: TopologyView) -> tuple[Manifest, ...]:
    """In the order of creation."""
    access = coordinator_access(view)
    return (token_secret(view), *access, coordinator_lease(view), disruption_budget(view))


def is_as_wanted(manifest: Manifest, snapshot: Snapshot) -> bool:
    """A Lease only has to exist: coordinators write it."""
    kind, namespace, name = key_of(manifest)
    if kind == "Lease":
        return any((x.namespace, x.name) == (namespace, name) for x in snapshot.leases)
    found = snapshot.owned.get((kind, namespace, name))
    if found is None or (found.token is not None and not found.token.is_complete):
        return False
    (owner,) = manifest["metadata"]["ownerReferences"]
    return found.owner_uid == owner["uid"] and _contains(found.content, _content(manifest))


def token_of(view: TopologyView, snapshot: Snapshot) -> TokenDigests | None:
    """None if the topology has no Secret."""
    name = names.token_secret_name(view.name, view.uid)
    found = snapshot.owned.get(("Secret", view.namespace, name))
    return found.token if found is not None and found.owner_uid == view.uid else None


def key_of(manifest: Mapping[str, Any]) -> tuple[str, str, str]:
    meta = manifest["metadata"]
    return str(manifest["kind"]), str(meta["namespace"]), str(meta["name"])


def _content(manifest: Manifest) -> Manifest:
    """Without `kind` and `apiVersion`, which items of a list do not have."""
    fields = {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind", "metadata")}
    return {**fields, "metadata": {"labels": manifest["metadata"]["labels"]}}


def _contains(found: Any, wanted: Any) -> bool:
    """Whether `found` has all of `wanted`; lists are of equal length, item by item."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            _contains(found.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(map(_contains, found, wanted))
    return bool(found == wanted)
