"""Reading from the API server, before anything is destroyed, what the decision rests on.

What is read goes into the mirrors, so a pass that is decided anew sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle_operator import names
from rekindle_operator.cluster.calls import call
from rekindle_operator.cluster.convert import node_view, version_of
from rekindle_operator.cluster.model import NodeView, Snapshot
from rekindle_operator.cluster.store import Cluster
from rekindle_operator.reconcile.actions import DeletePod, Turn
from rekindle_operator.reconcile.confirm import Premises, premises_of

_READERS = 8

logger = logging.getLogger(__name__)


class LiveCheck:
    def __init__(self, api: client.ApiClient, cluster: Cluster) -> None:
        self._api = api
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="live")

    def unconfirmed(self, turns: Iterable[Turn], snapshot: Snapshot) -> frozenset[str]:
        """Owners of the turns that rest on something that is not, or cannot be read."""
        premises = premises_of(turns, snapshot)
        if not premises:
            return frozenset()
        nodes = {name: node for p in premises for name, node in p.nodes.items()}
        others = self._pool.map(self._is_other_node, nodes, nodes.values())
        wrong = dict(zip(nodes, others, strict=True))
        checked = self._pool.map(self._is_confirmed, premises)
        return frozenset(
            p.owner
            for p, confirmed in zip(premises, checked, strict=True)
            if not confirmed or any(wrong[name] for name in p.nodes)
        )

    def _is_other_node(self, name: str, expected: NodeView | None) -> bool:
        try:
            raw = call(self._api, "GET", f"/api/v1/nodes/{name}", ok=404)
        except (ApiException, HTTPError) as error:
            return _unread(f"node {name}", error)
        if raw is None:
            self._cluster.nodes.drop("", name)
            return expected is not None
        self._cluster.nodes.put(raw)
        live = node_view(raw)
        same = expected is not None and (live.uid, live.ready) == (expected.uid, expected.ready)
        if not same:
            logger.warning("node %s is not what its mirror says; nothing is done to its pods", name)
        return not same

    def _is_confirmed(self, premises: Premises) -> bool:
        try:
            return self._has_same_lease(premises) and self._has_same_pods(premises)
        except (ApiException, HTTPError) as error:
            return not _unread(premises.owner or "pods on lost nodes", error)

    def _has_same_lease(self, premises: Premises) -> bool:
        lease = premises.lease
        if lease is None:
            return True
        path = f"/apis/coordination.k8s.io/v1/namespaces/{lease.namespace}/leases/{lease.name}"
        raw = call(self._api, "GET", path, ok=404)
        if raw is None or version_of(raw) == lease.version:
            return True
        self._cluster.leases.put(raw)
        return False

    def _has_same_pods(self, premises: Premises) -> bool:
        view = premises.topology
        if view is None:
            return all(self._is_same_pod(a) for a in premises.deleted)
        path = f"/api/v1/namespaces/{view.namespace}/pods"
        selector = [("labelSelector", f"{names.LABEL_TOPOLOGY}={view.name}")]
        listed = call(self._api, "GET", path, query=selector) or {}
        items: Sequence[dict[str, Any]] = listed.get("items") or ()
        versions = {raw["metadata"]["uid"]: version_of(raw) for raw in items}
        for raw in items:
            self._cluster.pods.put(raw)
        for pod in self._cluster.pods.views():
            if pod.uid in premises.pods and pod.uid not in versions:
                self._cluster.pods.drop(pod.namespace, pod.name, pod.uid)
        return premises.pods == versions.keys() and all(
            versions[a.uid] == a.version for a in premises.deleted if a.uid in versions
        )

    def _is_same_pod(self, action: DeletePod) -> bool:
        path = f"/api/v1/namespaces/{action.namespace}/pods/{action.name}"
        raw = call(self._api, "GET", path, ok=404)
        if raw is None or raw["metadata"]["uid"] != action.uid:
            self._cluster.pods.drop(action.namespace, action.name, action.uid)
            return False
        self._cluster.pods.put(raw)
        return version_of(raw) == action.version


def _unread(what: str, error: Exception) -> bool:
    """True: what cannot be read is not confirmed."""
    reason = f"{error.status} {error.reason}" if isinstance(error, ApiException) else error
    logger.warning("%s cannot be read, so nothing is deleted or replaced: %s", what, reason)
    return True
