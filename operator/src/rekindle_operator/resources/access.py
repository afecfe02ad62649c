"""Access objects of a coordinator: its ServiceAccount, Role and Lease; the topology's token. Pure.

RBAC cannot select by labels, so a coordinator may read pods and ConfigMaps of the whole namespace.
It may change only its Lease and its topology's status; it may also create Leases, since RBAC cannot
limit that by name, and it makes its own if it finds none. The operator creates the Lease, with
owner and labels: it is deleted with the topology, and the operator watches it.

Design: docs/design/kubernetes.md#objects.
"""

from __future__ import annotations

from rekindle import names
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.resources.common import Manifest, metadata

_READ = ["get", "list", "watch"]


def coordinator_access(topology: TopologyView) -> list[Manifest]:
    """ServiceAccount, Role and RoleBinding, in the order to apply them."""
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
    """The Secret of the token for polls and reads of streams, without its values. Pods get it by
    reference; no coordinator may read Secrets."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(topology, names.token_secret_name(topology.name, topology.uid)),
        "type": "Opaque",
    }


def coordinator_lease(topology: TopologyView) -> Manifest:
    """A Lease without a holder: the coordinator takes it."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata(topology, names.coordinator_name(topology.name)),
        "spec": {},
    }
