"""Checking preconditions in the API server before anything is deleted or replaced.

Objects that are read go into the cache, so a decision that is made again uses them. A read that
fails or hangs only affects the topologies that need it. While the API server does not respond at
all, a pass costs one timeout, not one for each object.

Design: docs/design/kubernetes.md#before-anything-is-destroyed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.calls import call
from rekindle_operator.cluster.convert import node_view, version_of
from rekindle_operator.cluster.model import NodeView, Snapshot
from rekindle_operator.reconcile.actions import DeletePod, TopologyActions
from rekindle_operator.reconcile.confirm import Preconditions, preconditions_of

_MAX_READS = 32  # at a time; a read that hangs occupies one until its timeout
_TIMEOUT_S = (2, 5)
_UNREACHABLE_S = 2.0  # without any response; then no further reads are sent
_STALL_S = 1.0  # since the last response; then reads that hang are not waited for

logger = logging.getLogger(__name__)


class ReadFailed(Exception):
    """The message has the path and the reason."""


class UncachedCheck:
    """Reads from the API server, not from the cache. `api` must not retry, since the
    control loop waits."""

    def __init__(
        self,
        api: client.ApiClient,
        cluster: ClusterCache,
        *,
        max_reads: int = _MAX_READS,
        stall_s: float = _STALL_S,
        monotonic: Callable[[], float] = time.monotonic,
        pool: Executor | None = None,
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._monotonic = monotonic
        self._stall_s = stall_s
        self._pool = pool or ThreadPoolExecutor(max_reads, thread_name_prefix="uncached")
        self._hanging_reads: dict[str, Future[str | None]] = {}  # by object

    def unconfirmed(
        self, decisions: Iterable[TopologyActions], snapshot: Snapshot
    ) -> Mapping[str, str]:
        """Topology keys of decisions whose preconditions do not hold (""), or cannot be read (the
        reason)."""
        preconditions = preconditions_of(decisions, snapshot)
        check = _Check(self._api, self._cluster, self._monotonic)
        nodes = {name: node for p in preconditions for name, node in p.nodes.items()}
        results = self._read_all(
            {f"node {name}": partial(check.node, name, node) for name, node in nodes.items()}
            | {f"pods of {p.topology_key}": partial(check.lease_and_pods, p) for p in preconditions}
        )
        found = {}
        for one in preconditions:
            keys = [f"pods of {one.topology_key}", *(f"node {name}" for name in one.nodes)]
            failures = [why for key in keys if (why := results[key]) is not None]
            if failures:
                found[one.topology_key] = max(failures)  # a reason rather than ""
        for why in sorted({w for w in found.values() if w}):
            logger.warning("deletions and replacements are postponed: %s", why)
        return found

    def _read_all(self, reads: Mapping[str, Callable[[], str | None]]) -> dict[str, str | None]:
        """Results by key. A read that hangs while others succeed is not waited for, and is not
        repeated until it has ended."""
        hanging = {key: read for key, read in self._hanging_reads.items() if not read.done()}
        started = {
            key: self._pool.submit(read) for key, read in reads.items() if key not in hanging
        }
        self._wait(started.values())
        hanging |= {key: read for key, read in started.items() if not read.done()}
        self._hanging_reads = hanging
        return {
            key: f"{key} cannot be read: the API server does not respond"
            if key in hanging
            else started[key].result()
            for key in reads
        }

    def _wait(self, reads: Collection[Future[str | None]]) -> None:
        left = set(reads)
        while left:
            timeout_s = self._stall_s if len(left) < len(reads) else None
            done, left = wait(left, timeout_s, return_when=FIRST_COMPLETED)
            if not done:
                return


class _Check:
    """The reads of one pass. Each check returns None if the objects are as expected, "" if not, and
    the reason if a read failed. While the API server does not respond, nothing more is read."""

    def __init__(
        self, api: client.ApiClient, cluster: ClusterCache, monotonic: Callable[[], float]
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._monotonic = monotonic
        self._responded_at = monotonic()  # last response to any read; at first, the start

    def node(self, name: str, expected: NodeView | None) -> str | None:
        """`expected`: None for a node that the snapshot does not have."""
        try:
            raw = self._read(f"/api/v1/nodes/{name}")
        except ReadFailed as error:
            return str(error)
        if raw is None:
            self._cluster.nodes.remove_not_found("", name)
            return "" if expected is not None else None
        self._cluster.nodes.put(raw)
        uncached = node_view(raw)
        if expected is not None and _state(uncached) == _state(expected):
            return None
        logger.warning("node %s differs from the cache; its pods are not deleted", name)
        return ""

    def lease_and_pods(self, preconditions: Preconditions) -> str | None:
        try:
            same = self._has_same_lease(preconditions) and self._has_same_pods(preconditions)
        except ReadFailed as error:
            return str(error)
        return None if same else ""

    def _has_same_lease(self, preconditions: Preconditions) -> bool:
        """Whether the coordinator that is to be replaced has not renewed its Lease. One that is
        deleted is not renewed."""
        lease = preconditions.coordinator_lease
        if lease is None:
            return True
        path = f"/apis/coordination.k8s.io/v1/namespaces/{lease.namespace}/leases/{lease.name}"
        raw = self._read(path)
        if raw is None or version_of(raw) == lease.version:
            return True
        self._cluster.leases.put(raw)
        return False

    def _has_same_pods(self, preconditions: Preconditions) -> bool:
        view = preconditions.topology
        if view is None:  # pods of the operator, or of a topology that is gone
            # All are read, since each goes into the cache.
            same = [self._is_same_pod(a) for a in preconditions.deletions]
            return all(same)
        selector = [("labelSelector", f"{names.LABEL_TOPOLOGY}={view.name}")]
        listed = self._read(f"/api/v1/namespaces/{view.namespace}/pods", selector) or {}
        items: Sequence[dict[str, Any]] = listed.get("items") or ()
        versions = {raw["metadata"]["uid"]: version_of(raw) for raw in items}
        for raw in items:
            self._cluster.pods.put(raw)
        for uid, name in preconditions.pods.items():
            if uid not in versions:
                self._cluster.pods.remove_not_found(view.namespace, name, uid)
        return preconditions.pods.keys() == versions.keys() and all(
            versions[a.uid] == a.version for a in preconditions.deletions if a.uid in versions
        )

    def _is_same_pod(self, action: DeletePod) -> bool:
        raw = self._read(f"/api/v1/namespaces/{action.namespace}/pods/{action.name}")
        if raw is None or raw["metadata"]["uid"] != action.uid:
            self._cluster.pods.remove_not_found(action.namespace, action.name, action.uid)
            return False
        self._cluster.pods.put(raw)
        return version_of(raw) == action.version

    def _read(self, path: str, query: Iterable[tuple[str, str]] = ()) -> dict[str, Any] | None:
        if self._monotonic() - self._responded_at >= _UNREACHABLE_S:
            raise ReadFailed(f"{path} cannot be read: the API server does not respond")
        try:
            response = call(
                self._api, "GET", path, query=query, none_for_status=404, timeout_s=_TIMEOUT_S
            )
        except ApiException as error:
            self._responded_at = self._monotonic()
            raise ReadFailed(f"{path} cannot be read: {error.status} {error.reason}") from error
        except HTTPError as error:
            raise ReadFailed(f"{path} cannot be read: the API server does not respond") from error
        self._responded_at = self._monotonic()
        return response


def _state(node: NodeView) -> tuple[str, bool, bool]:
    """What the loss of a node, and planned moves, rest on."""
    return node.uid, node.ready, node.cordoned
