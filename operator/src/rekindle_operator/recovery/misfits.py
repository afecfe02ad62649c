"""Why a pod does not fit on a node: several resources, anti-affinity, taints, selectors. Pure.

The scheduler makes the final decision, but a gate is opened for one node only, so packing follows
the scheduler's rules for taints, selectors, node affinity and requests. There is one function for
them, which returns the requirement that the node does not meet; packing, status and Events use it.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any

from rekindle_operator.cluster.amounts import ResourceAmounts, readable_amount
from rekindle_operator.cluster.convert import pod_requests, tolerations_of
from rekindle_operator.cluster.model import NodeView, PodView, Toleration
from rekindle_operator.recovery.affinity import Term, matches, readable_terms, required_terms

_MAX_SHOWN = 3  # requirements in a message
_OWN_PREFIX = "kubernetes.io/"  # of well-known labels, such as `arch`


@dataclass(frozen=True, slots=True)
class PodToPlace:
    """A pod to place. `group` is its partition: two replicas of one group never share a node."""

    key: str
    requests: ResourceAmounts
    group: str
    replica: int
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    affinity: tuple[Term, ...] | None = None  # required terms
    avoid: frozenset[str] = frozenset()  # nodes that did not run pods of its shape
    namespace: str = ""  # whose share of the cluster it takes

    @property
    def shape(self) -> tuple[object, ...]:
        """All that a node may refuse it for, but for other replicas of its partition."""
        return self.requests, self.node_selector, self.tolerations, self.affinity, self.avoid

    @classmethod
    def of_pod(cls, pod: PodView, key: str = "", group: str = "", replica: int = 0) -> PodToPlace:
        selector = tuple(sorted(pod.node_selector.items()))
        affinity = required_terms(pod.affinity)
        return cls(key, pod.requests, group, replica, selector, pod.tolerations, affinity)

    @classmethod
    def of_spec(
        cls, spec: Mapping[str, Any], key: str = "", group: str = "", replica: int = 0
    ) -> PodToPlace:
        """Of a pod that is to be created."""
        selector = tuple(sorted((spec.get("nodeSelector") or {}).items()))
        affinity = required_terms(spec.get("affinity"))
        requests, tolerations = pod_requests(spec), tolerations_of(spec)
        return cls(key, requests, group, replica, selector, tolerations, affinity)


class Unmet(IntEnum):
    """What a node may lack for a pod, in the order of the checks: what lasts comes first."""

    SIZE = auto()
    TAINT = auto()
    SELECTOR = auto()
    AFFINITY = auto()
    AVOIDED = auto()
    REPLICA = auto()  # from here on: because of what else is there
    ROOM = auto()


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first requirement of a pod that a node does not meet. `what`: for users. `has`: of SIZE,
    how much the node has."""

    unmet: Unmet
    what: str = ""
    has: int = 0


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A usable node, its free capacity, and the (group, replica) of the pods on it."""

    node: NodeView
    free: ResourceAmounts
    replicas: frozenset[tuple[str, int]] = frozenset()

    def misfit(self, pod: PodToPlace) -> Misfit | None:
        """Why the pod cannot be there; None: it can."""
        allocatable = self.node.allocatable
        if short := allocatable.lacking(pod.requests):
            return Misfit(Unmet.SIZE, short, allocatable.amount_of(short))
        if (misfit := self._broken_rule(pod)) is not None:
            return misfit
        short = self.free.lacking(pod.requests)
        return Misfit(Unmet.ROOM, short) if short else None

    def _broken_rule(self, pod: PodToPlace) -> Misfit | None:
        """Without resources."""
        node, labels = self.node, self.node.labels
        for taint in node.taints:
            refuses = taint.effect in ("NoSchedule", "NoExecute")
            if refuses and not any(t.tolerates(taint) for t in pod.tolerations):
                return Misfit(Unmet.TAINT, str(taint))
        for key, value in pod.node_selector:
            if labels.get(key) != value:
                return Misfit(Unmet.SELECTOR, f"{key.removeprefix(_OWN_PREFIX)} {value}")
        if not matches(pod.affinity, node.name, labels):
            return Misfit(Unmet.AFFINITY)
        if node.name in pod.avoid:
            return Misfit(Unmet.AVOIDED)
        if any(g == pod.group and r != pod.replica for g, r in self.replicas):
            return Misfit(Unmet.REPLICA)
        return None

    def fits(self, pod: PodToPlace) -> bool:
        """Whether there is no misfit. Asked for each pod and node: first what most nodes lack; more
        than what is allocatable is never free."""
        return not self.free.lacking(pod.requests) and self._broken_rule(pod) is None

    def fits_when_empty(self, pod: PodToPlace) -> bool:
        """Whether the node would take the pod if nothing else were on it."""
        misfit = self.misfit(pod)
        return misfit is None or misfit.unmet >= Unmet.REPLICA

    def with_pod(self, pod: PodToPlace) -> NodeCapacity:
        return NodeCapacity(
            self.node, self.free - pod.requests, self.replicas | {(pod.group, pod.replica)}
        )


class Misfits:
    """Why pods fit on none of the nodes, in words. Pods of one shape are compared with each node
    once."""

    def __init__(self, nodes: Mapping[str, NodeCapacity]) -> None:
        self._nodes = nodes
        self._of_shape: dict[object, tuple[Mapping[str, Misfit | None], str]] = {}
        self._with_replica: dict[str, set[str]] = defaultdict(set)  # by group
        for name, node in nodes.items():
            for group, _ in node.replicas:
                self._with_replica[group].add(name)

    def why(self, pod: PodToPlace) -> str:
        """Each requirement, what there is, and on how many nodes; most nodes first. A text that
        does not change with each pod that comes and goes. Empty: a node would take the pod."""
        if not self._nodes:
            return "usable nodes: none"
        shape = pod.shape
        if shape not in self._of_shape:
            alike = replace(pod, key="", group="", replica=0)
            found = {name: node.misfit(alike) for name, node in self._nodes.items()}
            self._of_shape[shape] = found, self._text(alike, Counter(found.values()))
        misfits, text = self._of_shape[shape]
        if not (others := self._with_replica.get(pod.group)):
            return text
        own = {name: self._nodes[name].misfit(pod) for name in others}
        return self._text(pod, Counter({**misfits, **own}.values()))

    def _text(self, pod: PodToPlace, counts: Mapping[Misfit | None, int]) -> str:
        if None in counts:
            return ""
        nodes: Counter[tuple[Unmet, str]] = Counter()
        most: dict[tuple[Unmet, str], int] = defaultdict(int)
        for misfit, number in counts.items():
            if misfit is not None:
                key = misfit.unmet, misfit.what
                nodes[key] += number
                most[key] = max(most[key], misfit.has)
        texts = [
            _text(pod, unmet, what, most[unmet, what], number, len(self._nodes))
            for (unmet, what), number in sorted(nodes.items(), key=lambda item: (-item[1], item[0]))
        ]
        return "; ".join(texts[:_MAX_SHOWN]) + (" ..." if len(texts) > _MAX_SHOWN else "")


def _text(pod: PodToPlace, unmet: Unmet, what: str, most: int, number: int, of: int) -> str:
    """`number`: of nodes that do not meet the requirement, of so many."""
    on_nodes = f"on {number} node{'s' if number > 1 else ''}"
    none = "no node" if number == of else f"not {on_nodes}"
    match unmet:
        case Unmet.SIZE:
            wanted = readable_amount(what, pod.requests.amount_of(what))
            has = f"{readable_amount(what, most)} at most, {on_nodes}" if most > 0 else none
            return f"{what} {wanted}: {has}"
        case Unmet.TAINT:
            return f"taint {what} is not tolerated: {on_nodes}"
        case Unmet.SELECTOR:
            return f"{what}: {none}"
        case Unmet.AFFINITY:
            return f"node affinity {readable_terms(pod.affinity or ())}: {none}"
        case Unmet.AVOIDED:
            return f"pods like it did not run: {on_nodes}"
        case Unmet.REPLICA:
            return f"another replica of its partition: {on_nodes}"
        case Unmet.ROOM:
            wanted = readable_amount(what, pod.requests.amount_of(what))
            return f"{what} {wanted}: too little is free, {on_nodes}"
