"""Which queries come back, in which order, on which nodes. Pure.

To maximise the sum of the priorities of the recovered queries is a set-union knapsack (NP-hard).
The greedy solution ranks queries by profit density, priority ÷ Σ(cost of a missing partition ÷
number of failed queries that use it), takes the densest that fits, and ranks the rest again. Sets
that are worth more are searched for (`rekindle.knapsack`) under sums that any packing obeys
(`sums`), and taken if they can be packed. Costs are shares of the resources that are scarce, and
"fits" means packed onto nodes. One plan covers all topologies; what runs is never moved.

Design: docs/design/recovery.md#plan.
Paper: Progressive recovery (Su and Zhou 2017), section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf

from rekindle.knapsack.greedy import UNIT, Greedy
from rekindle.knapsack.problem import KnapsackProblem
from rekindle.knapsack.solve import solve
from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.misfits import Misfits, PodToPlace
from rekindle_operator.recovery.pack import Capacity, Packer, PackingRule, Placement, pack
from rekindle_operator.recovery.sums import knapsack_of, scarce_resources
from rekindle_operator.recovery.tentative_start import place_paths

_EFFORT = 100_000  # of the search for a better set, in units of about a microsecond
_SEARCHED = 3_000  # pods and nodes of a set, up to which better sets are searched for
_PACKED = 20_000  # pods and nodes of all sets that the search tries to pack
OVER_NAMESPACE_LIMIT = (
    "the namespace has used its share of the cluster, which the administrator limits"
)


@dataclass(frozen=True, slots=True)
class DownQuery:
    """A query that is down. `needs`: keys of what it misses, shared between queries: one replica of
    each partition (all slots of a topology whose queries recover together, mode Blocking).
    `paths`: the part of it on the path from each source, if one of these paths is enough for
    tentative results."""

    key: tuple[str, str]  # topology "namespace/name", query ("" for all of them together)
    priority: int
    needs: frozenset[str]
    capacity_reservation_is_over: bool = False  # it has waited so long; nothing is reserved for it
    paths: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True, slots=True)
class SpareReplica:
    """A missing replica of a partition that has one (or that the plan gives one)."""

    pod: PodToPlace
    priority: int  # the highest of the queries that use the partition
    missing_first_replica: str = ""  # key of the need for the first one, if that is missing too


@dataclass(frozen=True, slots=True)
class RankedQuery:
    """A query and its profit density, which decides its position in the plan."""

    key: tuple[str, str]
    density: float


@dataclass(frozen=True, slots=True)
class Plan:
    starting_now: tuple[RankedQuery, ...]
    waiting: tuple[RankedQuery, ...]  # that do not fit
    nodes: Mapping[str, str]  # pod key -> node, also of spares and of parts of a waiting query
    # that wait until their namespace uses less
    over_namespace_limit: frozenset[tuple[str, str]] = frozenset()
    # Why the pods without a node have none, by key; empty: a node would take that pod alone.
    unplaced: Mapping[str, str] = field(default_factory=dict)

    def queries_over_namespace_limit(self, topology: str) -> frozenset[str]:
        """Its queries that wait for that; "" for all of them together (mode Blocking)."""
        return frozenset(query for key, query in self.over_namespace_limit if key == topology)


def density(query: DownQuery, cost: Mapping[str, float], users: Mapping[str, int]) -> float:
    """PD_i of the paper."""
    total = fsum(cost[need] / max(users[need], 1) for need in query.needs)  # in whatever order
    return query.priority / total if total > 0 else inf


def make_plan(
    queries: Sequence[DownQuery],
    pods: Mapping[str, PodToPlace],
    spares: Sequence[SpareReplica],
    capacity: Capacity,
    held: Container[tuple[str, str]] = (),
) -> Plan:
    """`pods`: what would meet each need. `held`: queries that get nothing for now. Placements never
    exceed the capacity (I6). No other query that stays waiting fits into what remains (I8). Pods
    are spread over nodes, unless more spares find a node if pods are packed tightly. A spare that
    finds no node does not change where the other spares go."""
    fits = capacity.fitting(pods)
    possible = [q for q in queries if q.key not in held and all(fits[n] for n in q.needs)]
    needed = {need: pods[need] for q in possible for need in sorted(q.needs)}
    costs = _Costs(pods, capacity)
    if (placement := pack(needed.values(), capacity, PackingRule.SPREAD)) is not None:
        order = _rank_all(possible, {q.key for q in possible}, costs)
        starts = {q.key for q in possible}
    else:
        starts, placement = _choose(possible, needed, capacity, costs)
        order = _rank_all(possible, starts, costs)
    waiting = [q for q in queries if q.key not in starts]
    over = frozenset(q.key for q in waiting if not _is_within_shares(q, pods, placement))
    reserving = [q for q in waiting if q.key not in over and not q.capacity_reservation_is_over]
    # For a query of which each pod would fit on an empty node, capacity that returns in small parts
    # is reserved: spares would use it.
    lacks_only_capacity = capacity.fitting_when_empty(pods)
    only_capacity = {q.key for q in waiting if all(lacks_only_capacity[n] for n in q.needs)}
    missing = {need for q in reserving if q.key in only_capacity for need in q.needs}
    met = {need for q in queries if q.key in starts for need in q.needs}
    may_be_next = [q for q in waiting if q.key not in over and q.key not in held]
    possible_later = [q for q in may_be_next if q.key in only_capacity]
    paths = _paths_of_next(possible_later or may_be_next, set(pods) - met, costs)

    def filled(placement: Placement) -> Placement:
        """With the pods that get capacity which it has left."""
        if possible_later:
            placement = place_paths(paths, pods, placement)
        reserved = [pods[n] for n in sorted(missing) if pods[n].key not in placement.nodes]
        placement = _with_spares(placement, spares, met, reserved)
        if not possible_later:  # no capacity makes the query whole: others go first
            placement = place_paths(paths, pods, placement)
        return placement

    final = filled(placement)
    # By the default rule, TIGHT: it may leave a node for more spares.
    tight_placement = pack(needed.values(), capacity) if len(met) == len(needed) else None
    if tight_placement is not None and len(final.nodes) < len(met) + len(spares):
        with_tight = filled(tight_placement)
        final = with_tight if len(with_tight.nodes) > len(final.nodes) else final
    nodes = dict(final.nodes)
    still_missing = {n for q in waiting for n in q.needs if pods[n].key not in nodes}
    ranked = tuple(_ranked(waiting, still_missing, costs))
    misfits = Misfits(final.capacity.nodes)
    wanted = (*pods.values(), *(spare.pod for spare in spares))
    unplaced = {
        pod.key: misfits.why(pod)
        or ("" if final.capacity.is_within_shares([pod]) else OVER_NAMESPACE_LIMIT)
        for pod in wanted
        if pod.key not in nodes
    }
    return Plan(tuple(order), ranked, nodes, over, unplaced)


class _Costs:
    """Of the missing pods: shares of the resources that are scarce for them all; of all resources
    if none is. What is not scarce costs nothing."""

    def __init__(self, pods: Mapping[str, PodToPlace], capacity: Capacity) -> None:
        scarce = scarce_resources(pods.values(), capacity)
        others = tuple((name, 1) for name in sorted(scarce - {"cpu", "memory", "pods"}))
        cpu, memory, number = (int(name in scarce) for name in ("cpu", "memory", "pods"))
        kept = ResourceAmounts(cpu, memory, number, others)
        of_requests = {
            requests: (requests.restricted_to(kept) if scarce else requests).fraction_of(
                capacity.allocatable
            )
            for requests in {pod.requests for pod in pods.values()}
        }
        self.of = {need: of_requests[pod.requests] for need, pod in pods.items()}


def _paths_of_next(
    waiting: Sequence[DownQuery], missing: set[str], costs: _Costs
) -> Sequence[frozenset[str]]:
    """Of the waiting query whose turn is next."""
    by_key = {q.key: q for q in waiting}
    ranking = _ranked(waiting, missing, costs)
    return by_key[ranking[0].key].paths if ranking else ()


def _rank_all(
    queries: Sequence[DownQuery], starts: Container[tuple[str, str]], costs: _Costs
) -> list[RankedQuery]:
    """Those that start, in the order in which the greedy takes them."""
    ordered = sorted(queries, key=lambda q: q.key)
    needed = {
        need: number for number, need in enumerate(sorted({n for q in ordered for n in q.needs}))
    }
    problem = KnapsackProblem(
        [q.priority for q in ordered],
        [sorted(needed[need] for need in q.needs) for q in ordered],
        [],
        [],
    )
    steps = Greedy(problem).steps(
        [int(costs.of[need] * UNIT) for need in needed],
        place=lambda query, _: ordered[query].key in starts,
    )
    return [RankedQuery(ordered[query].key, value) for query, value in steps]


def _choose(
    queries: Sequence[DownQuery],
    pods: Mapping[str, PodToPlace],
    capacity: Capacity,
    costs: _Costs,
) -> tuple[set[tuple[str, str]], Placement]:
    """Which queries start, and their pods' nodes. The greedy result, with what is worth more: one
    that begins with the best single query, and sets that the search finds and that can be packed.
    Of equal sums, the one with more queries."""
    ordered = sorted(queries, key=lambda q: q.key)
    listed = list(pods.values())
    problem = knapsack_of([q.priority for q in ordered], [q.needs for q in ordered], pods, capacity)
    prices = [int(costs.of[need] * UNIT) for need in pods]
    greedy = Greedy(problem)

    def packed(first: Sequence[int], packer: Packer) -> tuple[list[int], Packer]:
        def place(query: int, missing: Sequence[int]) -> bool:
            return packer.place_all(p for i in missing if (p := listed[i]).key not in packer.placed)

        return greedy.run(prices, first, place), packer

    best, packer = packed([], Packer(capacity))
    waiting = [q for q in range(len(ordered)) if q not in set(best)]
    waiting.sort(key=lambda q: -problem.priorities[q])
    for query in waiting:
        if problem.priorities[query] < problem.worth(best)[0]:
            break
        if pack((listed[i] for i in problem.needs[query]), capacity) is not None:
            with_single = packed([query], Packer(capacity))
            best, packer = max((best, packer), with_single, key=lambda of: problem.worth(of[0]))
            break

    left = _PACKED

    def accept(chosen: Sequence[int]) -> bool:
        """Of a set that cannot be packed as a whole, what can be is a plan too."""
        nonlocal left, best, packer
        wanted = [listed[i] for i in sorted(problem.union(chosen))]
        left -= len(wanted) + len(capacity.nodes)
        if left < 0:
            return False
        trial = Packer(capacity)
        is_packed = trial.place_all(wanted)
        best, packer = max(
            (best, packer), packed(chosen, trial), key=lambda of: problem.worth(of[0])
        )
        return is_packed

    # Where packing one set takes longer than a plan may take, the greedy result stays.
    if len(problem.union(best)) + len(capacity.nodes) <= _SEARCHED:
        solve(problem, _EFFORT, accept, best)
    return {ordered[q].key for q in best}, packer.placement()


def _ranked(queries: Sequence[DownQuery], missing: set[str], costs: _Costs) -> list[RankedQuery]:
    """Densest first; equal ones by priority, then by cost, so that more of them run, then by name,
    so that every replica agrees."""
    cost = {need: value if need in missing else 0.0 for need, value in costs.of.items()}
    users = Counter(need for q in queries for need in q.needs)
    scored = [(density(q, cost, users), fsum(cost[n] for n in q.needs), q) for q in queries]
    scored.sort(key=lambda entry: (-entry[0], -entry[2].priority, entry[1], entry[2].key))
    return [RankedQuery(q.key, value) for value, _, q in scored]


def _is_within_shares(
    query: DownQuery, pods: Mapping[str, PodToPlace], placement: Placement
) -> bool:
    missing = (pods[need] for need in query.needs)
    return placement.capacity.is_within_shares(
        pod for pod in missing if pod.key not in placement.nodes
    )


def _with_spares(
    placement: Placement,
    spares: Sequence[SpareReplica],
    met: set[str],
    reserved_pods: Sequence[PodToPlace],
) -> Placement:
    """`reserved_pods`: what waiting queries miss; no spare takes what one of them may need."""
    if not spares:
        return placement
    packer = Packer(placement.capacity)
    reserved = _Reserved.of(reserved_pods, placement.capacity)
    for spare in sorted(spares, key=lambda s: (-s.priority, s.pod.replica, s.pod.key)):
        if spare.missing_first_replica and spare.missing_first_replica not in met:
            continue  # a second replica of what has no first
        excluded = reserved.excluded_nodes(spare.pod, packer)
        if excluded is not None:
            packer.place_all([spare.pod], PackingRule.SPREAD, excluded)
    placed = packer.placement()
    return Placement(placed.capacity, {**placement.nodes, **placed.nodes})


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Requests that are reserved for waiting queries: by node, of all missing pods that would fit
    on it if it were empty; by namespace that has a share, of all its missing pods. A spare that
    leaves these free, of each resource that it requests itself, keeps no such query waiting."""

    by_node: Mapping[str, ResourceAmounts]
    by_namespace: Mapping[str, ResourceAmounts]

    @classmethod
    def of(cls, reserved_pods: Sequence[PodToPlace], capacity: Capacity) -> _Reserved:
        # Pods that differ only in their identity are counted together.
        alike = Counter(replace(pod, key="", group="", replica=0) for pod in reserved_pods)
        by_node = {
            name: total(
                pod.requests.scaled(number)
                for pod, number in alike.items()
                if node.fits_when_empty(pod)
            )
            for name, node in capacity.nodes.items()
        }
        by_namespace = {
            name: total(pod.requests for pod in reserved_pods if pod.namespace == name)
            for name in capacity.share_left
        }
        nothing = ResourceAmounts()
        return cls(
            {name: requests for name, requests in by_node.items() if requests != nothing},
            {name: requests for name, requests in by_namespace.items() if requests != nothing},
        )

    def excluded_nodes(self, spare: PodToPlace, packer: Packer) -> frozenset[str] | None:
        """Nodes on which it would use reserved capacity; None: it would on every node."""
        share = self.by_namespace.get(spare.namespace)
        if share is not None and not packer.share_left[spare.namespace].covers(
            _plus_reserved(spare.requests, share)
        ):
            return None
        return frozenset(
            name
            for name, requests in self.by_node.items()
            if not packer.nodes[name].free.covers(_plus_reserved(spare.requests, requests))
        )


def _plus_reserved(requests: ResourceAmounts, reserved: ResourceAmounts) -> ResourceAmounts:
    """The sum, of only the resources that are requested."""
    return requests + reserved.restricted_to(requests)
