"""The PodDisruptionBudget of a topology's pods. Pure.

It refuses every eviction of a pod that is Ready: whether a pod may be deleted depends on which
replicas are live, and the operator first moves its task to another node. Pods that are not Ready
may be evicted: they serve nobody.

Design: docs/design/planned-moves.md.
"""

from __future__ import annotations

from rekindle import names
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.resources.common import Manifest, metadata

_ALL = 2**31 - 1
"""More pods than there are. `maxUnavailable: 0` would need a scale subresource of topologies."""


def disruption_budget(topology: TopologyView) -> Manifest:
    """Of its tasks and its coordinator."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(topology, names.disruption_budget_name(topology.name)),
        "spec": {
            "minAvailable": _ALL,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {names.LABEL_TOPOLOGY: topology.name}},
        },
    }
