"""What a coordinator may do: its identity, its rights, its Lease; the topology's token. Pure.

The rights cannot follow labels, so they are those of the namespace; nothing but the Lease and the
status of topologies may be written. The Lease is made here, owned and labelled, so that deleting
the topology takes it along and the operator can watch it.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

from rekindle import names
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.resources.common import Manifest, metadata

_READ = ["get", "list", "watch"]


def coordinator_access(topology: TopologyView) -> list[Manifest]:
    """ServiceAccount, Role and RoleBinding, in the order in which they are to be applied."""
    name = names.coordinator_name(topology.name)
    rbac = "rbac.authorization.k8s.io"
    role: Manifest = {
        "apiVersion": f"{rbac}/v1",
        "kind": "Role",
        "metadata": metadata(topology, name),
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": _READ},
            {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": _READ},
            {
                "apiGroups": [names.GROUP],
                "resources": [f"{names.PLURAL}/status"],
                "resourceNames": [topology.name],
                "verbs": ["get", "patch", "update"],
            },
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": [name],
                "verbs": ["get", "list", "watch", "update", "patch"],
            },
        ],
    }
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(topology, name),
        "automountServiceAccountToken": False,
    }
    binding = {
        "apiVersion": f"{rbac}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(topology, name),
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": topology.namespace}],
    }
    return [account, role, binding]


def token_secret(topology: TopologyView) -> Manifest:
    """The Secret of the token that polls and Flight calls need, without its value. Pods get it by
    reference; no role reads Secrets."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(topology, names.token_name(topology.name, topology.uid)),
        "type": "Opaque",
        "immutable": True,
    }


def coordinator_lease(topology: TopologyView) -> Manifest:
    """Without a holder: the coordinator takes it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata(topology, names.coordinator_name(topology.name)),
        "spec": {},
    }
