"""Packing tasks onto nodes: several resources, anti-affinity, taints, selectors. Pure.

The scheduler has the last word, but a gate is opened for one node only, so what is packed here must
be what the scheduler accepts: its rules for taints, selectors, node affinity and requests.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rekindle_operator.cluster.amounts import Amounts, total
from rekindle_operator.cluster.model import NodeView, Toleration
from rekindle_operator.recovery.affinity import Term, matches

_SEARCH_STEPS = 2000  # of the exact search that follows when the simple rule fails
_SEARCH_ITEMS = 16


@dataclass(frozen=True, slots=True)
class Item:
    """A pod to place. `group` is its partition: two replicas of one group never share a node."""

    key: str
    ask: Amounts
    group: str
    replica: int
    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    affinity: tuple[Term, ...] | None = None  # required terms
    avoid: frozenset[str] = frozenset()  # nodes that would not run its like
    namespace: str = ""  # whose share of the cluster it takes


class Rule(Enum):
    """SPREAD when there is room for all; TIGHT when room is what is short."""

    SPREAD = auto()
    TIGHT = auto()


@dataclass(frozen=True, slots=True)
class Bin:
    """A usable node, what it has left and which (group, replica) it holds."""

    node: NodeView
    free: Amounts
    holds: frozenset[tuple[str, int]] = frozenset()

    def admits(self, item: Item) -> bool:
        """Whether the item may be on the node, whatever else is there."""
        if self.node.name in item.avoid:
            return False
        labels = self.node.labels
        tolerated = all(
            any(t.tolerates(taint) for t in item.tolerations)
            for taint in self.node.taints
            if taint.effect in ("NoSchedule", "NoExecute")
        )
        selected = all(labels.get(k) == v for k, v in item.selector)
        return tolerated and selected and matches(item.affinity, self.node.name, labels)

    def takes(self, item: Item) -> bool:
        return (
            self.free.covers(item.ask)
            and not any(g == item.group and r != item.replica for g, r in self.holds)
            and self.admits(item)
        )

    def could_ever_hold(self, item: Item) -> bool:
        """Whether the node would take the item if nothing else were on it."""
        return self.node.allocatable.covers(item.ask) and self.admits(item)

    def with_item(self, item: Item) -> Bin:
        return Bin(self.node, self.free - item.ask, self.holds | {(item.group, item.replica)})


class Room:
    """The usable nodes, by name, and what namespaces with a limited share of them may still take.
    Immutable: packing gives a new one."""

    __slots__ = ("bins", "left", "whole")

    def __init__(
        self, bins: Mapping[str, Bin], whole: Amounts, left: Mapping[str, Amounts] | None = None
    ) -> None:
        self.bins = dict(bins)
        self.whole = whole  # allocatable of all usable nodes: what costs are shares of
        self.left = left or {}

    def place(self, item: Item, node: str) -> Room:
        left = self.left
        if item.namespace in left:
            left = {**left, item.namespace: left[item.namespace] - item.ask}
        return Room(self.bins | {node: self.bins[node].with_item(item)}, self.whole, left)

    def grants(self, items: Iterable[Item]) -> bool:
        """Whether they are within the shares of their namespaces."""
        if not self.left:
            return True
        asked: dict[str, Amounts] = {}
        for item in items:
            if item.namespace in self.left:
                asked[item.namespace] = asked.get(item.namespace, Amounts()) + item.ask
        return all(self.left[namespace].covers(ask) for namespace, ask in asked.items())

    def takes(self, item: Item) -> bool:
        return any(b.takes(item) for b in self.bins.values())

    def could_ever_hold(self, item: Item) -> bool:
        """Whether some usable node would take the item if nothing else were on it."""
        return any(b.could_ever_hold(item) for b in self.bins.values())


@dataclass(frozen=True, slots=True)
class Packed:
    room: Room
    nodes: Mapping[str, str]  # item key -> node


def pack(items: Iterable[Item], room: Room, rule: Rule = Rule.TIGHT) -> Packed | None:
    """All of the items or nothing. Largest first; what the rule misses a bounded search finds."""
    ordered = sorted(items, key=lambda i: (-i.ask.share_of(room.whole), i.key))
    if not room.grants(ordered) or not _conceivable(ordered, room):
        return None
    packed = _by_rule(ordered, room, rule)
    if packed is None and rule is Rule.SPREAD:
        packed = _by_rule(ordered, room, Rule.TIGHT)
    if packed is None and len(ordered) <= _SEARCH_ITEMS:
        packed = _by_search(ordered, room)
    return packed


def _conceivable(items: Sequence[Item], room: Room) -> bool:
    """A cheap no: more than is left in all, or an item that no node takes."""
    free = (b.free.clamped() for b in room.bins.values())
    left = total(f for f in free if f.covers(Amounts(pods=1)))
    return left.covers(total(i.ask for i in items)) and all(room.takes(item) for item in items)


def _by_rule(items: Sequence[Item], room: Room, rule: Rule) -> Packed | None:
    nodes: dict[str, str] = {}
    for item in items:
        fits = [b for b in room.bins.values() if b.takes(item)]
        if not fits:
            return None
        best = min(fits, key=lambda b: _preference(b, item, room, rule))
        nodes[item.key] = best.node.name
        room = room.place(item, best.node.name)
    return Packed(room, nodes)


def _preference(b: Bin, item: Item, room: Room, rule: Rule) -> tuple[int, int, float, str]:
    """Another zone than the partition's other replicas first; then a node without devices that the
    item does not need; then the emptiest or fullest node."""
    zone = b.node.zone
    same_zone = bool(zone) and any(
        other.node.zone == zone
        for other in room.bins.values()
        if any(g == item.group and r != item.replica for g, r in other.holds)
    )
    wasteful = b.free.devices_besides(item.ask)
    left = b.free.basic_share_of(b.node.allocatable)
    return (int(same_zone), int(wasteful), -left if rule is Rule.SPREAD else left, b.node.name)


def _by_search(items: Sequence[Item], room: Room) -> Packed | None:
    """Depth-first over nodes; nodes that look the same are tried once. Bounded in steps."""
    steps = 0
    nodes: dict[str, str] = {}

    def descend(index: int, current: Room) -> Room | None:
        nonlocal steps
        if index == len(items):
            return current
        item, tried = items[index], set[tuple[object, ...]]()
        for name in sorted(current.bins):
            b = current.bins[name]
            likeness = (b.free, b.holds, b.node.taints, tuple(sorted(b.node.labels.items())))
            if likeness in tried or not b.takes(item):
                continue
            tried.add(likeness)
            steps += 1
            if steps > _SEARCH_STEPS:
                return None
            nodes[item.key] = name
            if (found := descend(index + 1, current.place(item, name))) is not None:
                return found
        return None

    found = descend(0, room)
    return Packed(found, nodes) if found is not None else None
