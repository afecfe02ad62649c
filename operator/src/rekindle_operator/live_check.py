"""Reading from the API server, before anything is destroyed, what the decision rests on.

What is read goes into the mirrors, so a pass that is decided anew sees it. A read that fails or
hangs concerns the topologies that rest on it and no others. An API server that answers nothing
costs one timeout and not one for each object.

Design: docs/design/kubernetes.md#before-anything-is-destroyed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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

_READERS = 32  # one that hangs is occupied until its timeout
_TIMEOUT_S = (2, 5)
_AWAY_S = 2.0  # without any answer; then no more is asked
_STALL_S = 1.0  # since the last answer; what is still open then is not waited for

logger = logging.getLogger(__name__)


class Unread(Exception):
    """Something could not be read; says what, and why."""


class LiveCheck:
    """`api` should not retry: whoever asks waits."""

    def __init__(
        self,
        api: client.ApiClient,
        cluster: ClusterCache,
        *,
        readers: int = _READERS,
        stall_s: float = _STALL_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._monotonic = monotonic
        self._stall_s = stall_s
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="live")
        self._open: dict[str, Future[str | None]] = {}  # that hung, by what they read

    def unconfirmed(
        self, decisions: Iterable[TopologyActions], snapshot: Snapshot
    ) -> Mapping[str, str]:
        """Owners of decisions whose preconditions do not hold ("") or cannot be read (why)."""
        preconditions = preconditions_of(decisions, snapshot)
        check = _Check(self._api, self._cluster, self._monotonic)
        nodes = {name: node for p in preconditions for name, node in p.nodes.items()}
        said = self._ask(
            {f"node {name}": partial(check.node, name, node) for name, node in nodes.items()}
            | {f"pods of {p.owner}": partial(check.others, p) for p in preconditions}
        )
        found = {}
        for one in preconditions:
            words = [said[f"pods of {one.owner}"], *(said[f"node {name}"] for name in one.nodes)]
            wrong = [w for w in words if w is not None]
            if wrong:
                found[one.owner] = max(wrong)
        for why in sorted({w for w in found.values() if w}):
            logger.warning("nothing is deleted or replaced: %s", why)
        return found

    def _ask(self, questions: Mapping[str, Callable[[], str | None]]) -> dict[str, str | None]:
        """What came of each. One that hangs while others are answered is not waited for, and is
        not put again until it has ended."""
        self._open = {key: asked for key, asked in self._open.items() if not asked.done()}
        asked = {
            key: self._pool.submit(ask) for key, ask in questions.items() if key not in self._open
        }
        self._wait(asked.values())
        self._open |= {key: answer for key, answer in asked.items() if not answer.done()}
        return {
            key: f"{key} cannot be read: the API server does not answer"
            if key in self._open
            else asked[key].result()
            for key in questions
        }

    def _wait(self, asked: Collection[Future[str | None]]) -> None:
        left = set(asked)
        while left:
            timeout_s = self._stall_s if len(left) < len(asked) else None
            done, left = wait(left, timeout_s, return_when=FIRST_COMPLETED)
            if not done:
                return


class _Check:
    """Of one pass. Its questions return None for what is as expected, "" for what is not, else why
    it could not be read. While the API server answers nothing at all, nothing more is asked."""

    def __init__(
        self, api: client.ApiClient, cluster: ClusterCache, monotonic: Callable[[], float]
    ) -> None:
        self._api = api
        self._cluster = cluster
        self._monotonic = monotonic
        self._answered_at = monotonic()  # the last of all reads; at first, when this began

    def node(self, name: str, expected: NodeView | None) -> str | None:
        try:
            raw = self._read(f"/api/v1/nodes/{name}")
        except Unread as error:
            return str(error)
        if raw is None:
            self._cluster.nodes.drop("", name)
            return "" if expected is not None else None
        self._cluster.nodes.put(raw)
        live = node_view(raw)
        if expected is not None and (live.uid, live.ready) == (expected.uid, expected.ready):
            return None
        logger.warning("node %s is not what its mirror says; nothing is done to its pods", name)
        return ""

    def others(self, preconditions: Preconditions) -> str | None:
        try:
            same = self._has_same_lease(preconditions) and self._has_same_pods(preconditions)
        except Unread as error:
            return str(error)
        return None if same else ""

    def _has_same_lease(self, preconditions: Preconditions) -> bool:
        lease = preconditions.lease
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
        if view is None:
            same = [
                self._is_same_pod(a) for a in preconditions.deleted
            ]  # each goes into the mirror
            return all(same)
        selector = [("labelSelector", f"{names.LABEL_TOPOLOGY}={view.name}")]
        listed = self._read(f"/api/v1/namespaces/{view.namespace}/pods", selector) or {}
        items: Sequence[dict[str, Any]] = listed.get("items") or ()
        versions = {raw["metadata"]["uid"]: version_of(raw) for raw in items}
        for raw in items:
            self._cluster.pods.put(raw)
        for uid, name in preconditions.pods.items():
            if uid not in versions:
                self._cluster.pods.drop(view.namespace, name, uid)
        return preconditions.pods.keys() == versions.keys() and all(
            versions[a.uid] == a.version for a in preconditions.deleted if a.uid in versions
        )

    def _is_same_pod(self, action: DeletePod) -> bool:
        raw = self._read(f"/api/v1/namespaces/{action.namespace}/pods/{action.name}")
        if raw is None or raw["metadata"]["uid"] != action.uid:
            self._cluster.pods.drop(action.namespace, action.name, action.uid)
            return False
        self._cluster.pods.put(raw)
        return version_of(raw) == action.version

    def _read(self, path: str, query: Iterable[tuple[str, str]] = ()) -> dict[str, Any] | None:
        if self._monotonic() - self._answered_at >= _AWAY_S:
            raise Unread(f"{path} cannot be read: the API server does not answer")
        try:
            answer = call(self._api, "GET", path, query=query, ok=404, timeout_s=_TIMEOUT_S)
        except ApiException as error:
            self._answered_at = self._monotonic()
            raise Unread(f"{path} cannot be read: {error.status} {error.reason}") from error
        except HTTPError as error:
            raise Unread(f"{path} cannot be read: the API server does not answer") from error
        self._answered_at = self._monotonic()
        return answer
