"""Pods that cannot start on their node: which of them are replaced on another one. Pure.

A node that refused a shape of pod is avoided by pods of that shape for a while. Once three other
nodes could not start it, the pod itself is the reason (a bad image, too little memory): it stays
where it is, with the kubelet's back-off. While a node prepares a pod (volumes, network, image) no
container status has a reason, and a large image takes long to pull: that has a longer timeout.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

import re

from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.recovery.losses import Loss, LossAssessment, growing_timeout
from rekindle_operator.settings import Timing

_MAX_NODES = 3
_CONFIG = "CreateContainerConfigError"
_MISSING = re.compile(r"(secret|configmap)s? \"[^\"]*\" not found|couldn't find key", re.IGNORECASE)
_SEE_EVENTS = "its volumes, network or image are not ready; the pod's Events say which"


class StartFailures:
    """For one topology in one pass. At most one more node for each shape becomes unsuitable, so
    that not all pods of a bad image are replaced at once."""

    def __init__(self, snapshot: Snapshot, assessment: LossAssessment, now: float, timing: Timing):
        self._snapshot = snapshot
        self._assessment = assessment
        self._now = now
        self._timing = timing
        self._unsuitable: dict[str, str] = {}  # shape -> node

    def loss_of(self, pod: PodView) -> Loss | None:
        """None: it runs, or may still start, or no other node is likely to start it."""
        if pod.node is None or not pod.shape or not self._has_timed_out(pod):
            return None
        if is_same_everywhere(pod.container_error):
            return None
        if not self._may_start_elsewhere(pod, pod.node):
            return None
        return Loss.CRASHING if pod.was_ready else Loss.CANNOT_START

    def problem_of(self, pod: PodView) -> str:
        """Why it does not run: the status of its containers, or that there are none yet."""
        since = self._snapshot.creating_containers_since.get(pod.uid)
        if (
            pod.container_error
            or since is None
            or self._now - since < self._timing.container_error_timeout_s
        ):
            return pod.container_error
        timeout_s = self._timing.container_error_timeout_s
        return f"containers: not created after {timeout_s:.0f} s: {_SEE_EVENTS}"

    def _has_timed_out(self, pod: PodView) -> bool:
        if pod.container_error:
            since, timeout_s = self._snapshot.failing_since, self._timing.container_error_timeout_s
        else:
            since = self._snapshot.creating_containers_since
            timeout_s = self._timing.container_creation_timeout_s
        limit_s = growing_timeout(timeout_s).wait_s(pod.failed_placements + 1)
        return pod.uid in since and self._now - since[pod.uid] >= limit_s

    def _may_start_elsewhere(self, pod: PodView, node: str) -> bool:
        unsuitable = self._snapshot.unsuitable.get(pod.shape, frozenset())
        if node not in unsuitable:
            unsuitable |= {node}
            if self._unsuitable.setdefault(pod.shape, node) != node:
                return False
        return (
            len(unsuitable) <= _MAX_NODES and not self._assessment.usable_nodes.keys() <= unsuitable
        )


def is_same_everywhere(container_error: str) -> bool:
    """A Secret, a ConfigMap or a key does not exist: the kubelet tries again by itself. Any other
    error may be the node's."""
    return f": {_CONFIG}" in container_error and _MISSING.search(container_error) is not None
