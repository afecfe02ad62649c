"""Which queries come back, in which order, on which nodes. Pure.

The set of failed partitions that maximises the sum of the priorities of the recovered queries is a
set-union knapsack (NP-hard). The greedy solution ranks queries by profit density, priority ÷ Σ(cost
of a missing partition ÷ number of failed queries that use it), takes the densest that fits, and
ranks the rest again; it is never worth less than the best single query that fits. Here costs are
shares of several resources, and "fits" means packed onto nodes. One plan covers all topologies;
what runs is never moved.

Design: docs/design/recovery.md#plan.
Paper: Progressive recovery (Su and Zhou 2017), section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from rekindle_operator.cluster.amounts import Amounts, total
from rekindle_operator.recovery.pack import Item, Packed, Room, Rule, pack


@dataclass(frozen=True, slots=True)
class Demand:
    """A query that is down. `needs` are the keys of what it misses, shared between queries: one
    replica of a partition each (or, for a topology that recovers in one block, all its slots)."""

    key: tuple[str, str]  # topology "namespace/name", query
    priority: int
    needs: frozenset[str]
    patient: bool = False  # has waited so long that redundancy may go first


@dataclass(frozen=True, slots=True)
class Spare:
    """A missing replica of a partition that has one (or that the plan gives one)."""

    item: Item
    priority: int  # the highest of the queries that use the partition
    needs: str  # key of the partition's need, if it is missing altogether


@dataclass(frozen=True, slots=True)
class Ranked:
    """A query in the plan and why it stands there."""

    key: tuple[str, str]
    density: float


@dataclass(frozen=True, slots=True)
class Plan:
    order: tuple[Ranked, ...]  # that start now
    waiting: tuple[Ranked, ...]  # that do not fit
    nodes: Mapping[str, str]  # item key -> node, the spares' too
    over_share: frozenset[tuple[str, str]] = frozenset()  # that wait for their namespace's share

    def over_share_of(self, topology: str) -> frozenset[str]:
        """Its queries that wait for that; "" for all of them, if it recovers in one block."""
        return frozenset(query for key, query in self.over_share if key == topology)


def density(demand: Demand, cost: Mapping[str, float], users: Mapping[str, int]) -> float:
    """PD_i of the paper."""
    total = sum(cost[need] / max(users[need], 1) for need in demand.needs)
    return demand.priority / total if total > 0 else inf


def make_plan(
    demands: Sequence[Demand], items: Mapping[str, Item], spares: Sequence[Spare], room: Room
) -> Plan:
    """`items`: what would meet each need. Placements never exceed the room (I6); no query that is
    left waiting fits into what remains (I8). Spares never change where the items go, nor does a
    spare that finds no node change where the others go."""
    possible = [d for d in demands if all(room.takes(items[need]) for need in d.needs)]
    needed = {need: items[need] for d in possible for need in sorted(d.needs)}
    if (packed := pack(needed.values(), room, Rule.SPREAD)) is not None:
        order = _rank_all(possible, needed, room)
        starts = {d.key for d in possible}
        waiting = [d for d in demands if d.key not in starts]
    else:
        order, waiting, packed = _best_greedy(demands, items, room)
    nodes = dict(packed.nodes)
    over = frozenset(d.key for d in waiting if not _is_granted(d, items, packed))
    saving = [d for d in waiting if d.key not in over and not d.patient]
    missing = {n for d in saving if _only_lacks_room(d, items, room) for n in d.needs}
    saved = [items[n] for n in sorted(missing) if items[n].key not in nodes]
    met = {need for d in demands if d not in waiting for need in d.needs}
    nodes = _with_spares(packed, spares, met, saved)
    tight = pack(needed.values(), room) if len(met) == len(needed) else None
    if tight is not None and len(nodes) < len(met) + len(spares):
        closer = _with_spares(tight, spares, met, saved)
        nodes = closer if len(closer) > len(nodes) else nodes
    short = {n for d in waiting for n in d.needs if items[n].key not in nodes}
    return Plan(tuple(order), tuple(_ranked(waiting, short, items, room)), nodes, over)


def _rank_all(demands: Sequence[Demand], items: Mapping[str, Item], room: Room) -> list[Ranked]:
    """The order that the greedy would take if each query fitted."""
    missing, remaining, order = set(items), list(demands), list[Ranked]()
    while remaining:
        best = _ranked(remaining, missing, items, room)[0]
        demand = next(d for d in remaining if d.key == best.key)
        remaining.remove(demand)
        missing -= demand.needs
        order.append(best)
    return order


def _best_greedy(
    demands: Sequence[Demand], items: Mapping[str, Item], room: Room
) -> tuple[list[Ranked], list[Demand], Packed]:
    """The greedy result, or what begins with the best single query where that alone is worth more:
    density by itself can end arbitrarily far below the optimum of a knapsack."""
    greedy = _greedy(demands, items, room, [])
    waiting = greedy[1]
    profit = sum(d.priority for d in demands) - sum(d.priority for d in waiting)
    for demand in sorted(waiting, key=lambda d: (-d.priority, d.key)):
        if demand.priority <= profit:
            break
        if pack([items[n] for n in sorted(demand.needs)], room) is not None:
            return _greedy(demands, items, room, [demand])
    return greedy


def _greedy(
    demands: Sequence[Demand], items: Mapping[str, Item], room: Room, first: Sequence[Demand]
) -> tuple[list[Ranked], list[Demand], Packed]:
    """`first`: what is taken before the densest."""
    missing, remaining, order = set(items), list(demands), list[Ranked]()
    nodes: dict[str, str] = {}
    while remaining:
        by_key = {d.key: d for d in remaining}
        ahead = [d.key for d in first if d.key in by_key]
        ranking = _ranked(remaining, missing, items, room)
        for ranked in sorted(ranking, key=lambda r: r.key not in ahead):
            demand = by_key[ranked.key]
            packed = pack([items[n] for n in sorted(demand.needs & missing)], room)
            if packed is not None:
                break
        else:
            break
        room, nodes = packed.room, nodes | dict(packed.nodes)
        missing -= demand.needs
        remaining.remove(demand)
        order.append(ranked)
    return order, remaining, Packed(room, nodes)


def _ranked(
    demands: Sequence[Demand], missing: set[str], items: Mapping[str, Item], room: Room
) -> list[Ranked]:
    """Densest first; equal ones by priority, then by name, so that every replica agrees."""
    cost = {
        need: items[need].ask.share_of(room.whole) if need in missing else 0.0 for need in items
    }
    users = Counter(need for d in demands for need in d.needs)
    scored = [(density(d, cost, users), d) for d in demands]
    scored.sort(key=lambda pair: (-pair[0], -pair[1].priority, pair[1].key))
    return [Ranked(d.key, value) for value, d in scored]


def _is_granted(demand: Demand, items: Mapping[str, Item], packed: Packed) -> bool:
    missing = (items[need] for need in demand.needs)
    return packed.room.grants(item for item in missing if item.key not in packed.nodes)


def _only_lacks_room(demand: Demand, items: Mapping[str, Item], room: Room) -> bool:
    """Capacity that trickles in must add up for such a query: spares would eat it forever."""
    return all(room.could_ever_hold(items[need]) for need in demand.needs)


def _with_spares(
    packed: Packed, spares: Sequence[Spare], met: set[str], saved: Sequence[Item]
) -> dict[str, str]:
    """`saved`: what waiting queries miss; no spare takes what one of them may need."""
    room, nodes = packed.room, dict(packed.nodes)
    kept = _Kept.of(saved, room)
    for spare in sorted(spares, key=lambda s: (-s.priority, s.item.replica, s.item.key)):
        if spare.needs and spare.needs not in met:
            continue  # a second replica of what has no first
        if (barred := kept.bars(spare.item, room)) is None:
            continue
        item = replace(spare.item, avoid=spare.item.avoid | barred) if barred else spare.item
        placed = pack([item], room, Rule.SPREAD)
        if placed is not None:
            room, nodes = placed.room, nodes | dict(placed.nodes)
    return nodes


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept for queries that wait: by node all of it that the node could ever hold, and by
    namespace all of it that counts to the share of one. Where a spare leaves so much of each
    resource that it takes, it is never the reason that such a query has no room."""

    by_node: Mapping[str, Amounts]
    by_namespace: Mapping[str, Amounts]

    @classmethod
    def of(cls, saved: Sequence[Item], room: Room) -> _Kept:
        alike = Counter(replace(item, key="", group="", replica=0) for item in saved)
        by_node = {
            name: total(
                item.ask.scaled(number) for item, number in alike.items() if b.could_ever_hold(item)
            )
            for name, b in room.bins.items()
        }
        by_namespace = {
            name: total(item.ask for item in saved if item.namespace == name) for name in room.left
        }
        return cls(
            {name: ask for name, ask in by_node.items() if ask != Amounts()},
            {name: ask for name, ask in by_namespace.items() if ask != Amounts()},
        )

    def bars(self, spare: Item, room: Room) -> frozenset[str] | None:
        """Nodes on which it would take something of that; None: wherever it goes."""
        share = self.by_namespace.get(spare.namespace)
        if share is not None and not room.left[spare.namespace].covers(_with(spare.ask, share)):
            return None
        return frozenset(
            name
            for name, ask in self.by_node.items()
            if not room.bins[name].free.covers(_with(spare.ask, ask))
        )


def _with(ask: Amounts, kept: Amounts) -> Amounts:
    """Both, of the resources that `ask` takes."""
    return ask + kept.restricted_to(ask)
