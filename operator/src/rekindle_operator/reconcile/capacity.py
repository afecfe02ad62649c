"""Capacity of the usable nodes that pods have not taken. Pure.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from rekindle.names import GATE, ROLE_COORDINATOR, ROLE_TASK
from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.limits import NamespaceLimits
from rekindle_operator.reconcile.context import PassInputs
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity, pack
from rekindle_operator.resources.common import Manifest


def measure_capacity(
    pass_inputs: PassInputs,
    deleted: Collection[str],
    coordinators: Iterable[Manifest],
) -> Capacity:
    """The capacity that is left. It is reduced by bound pods of any owner until they are gone, by
    pods whose gate is open but that are not bound yet, and by coordinators that the scheduler has
    yet to place.

    `deleted`: uids of pods that this pass deletes, and whose loss is no failure
    (`Loss.counts_as_failure`); those that are not bound take no capacity any more. `coordinators`:
    those that this pass creates.
    """
    used: dict[str, list[PodView]] = defaultdict(list)
    snapshot, losses, limits = pass_inputs.snapshot, pass_inputs.losses, pass_inputs.settings.limits
    unplaced = [PodToPlace.of_spec(m["spec"]) for m in coordinators]
    for pod in snapshot.pods:
        node = _node_used_by(pod)
        if pod.ended or (pod.node is None and pod.uid in deleted):
            continue
        if node is not None:
            used[node].append(pod)
        elif pod.role == ROLE_COORDINATOR and not pod.terminating:
            unplaced.append(PodToPlace.of_pod(pod))
    nodes = _less_used(pass_inputs, used)
    allocatable = total(n.allocatable for n in losses.usable_nodes.values())
    capacity = Capacity(nodes, allocatable, _remaining_shares(snapshot, used, allocatable, limits))
    for number, to_place in enumerate(unplaced):
        key = f"coordinator {number}"
        placement = pack([replace(to_place, key=key, group=key)], capacity)
        capacity = placement.capacity if placement is not None else capacity
    return capacity


def capacity_left_by(pass_inputs: PassInputs, pods: Iterable[PodView]) -> dict[str, NodeCapacity]:
    """The usable nodes, less what these pods use of them."""
    used: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        node = _node_used_by(pod)
        if node is not None and not pod.ended:
            used[node].append(pod)
    return _less_used(pass_inputs, used)


def _less_used(
    pass_inputs: PassInputs, used: Mapping[str, Sequence[PodView]]
) -> dict[str, NodeCapacity]:
    nodes = {}
    for name, view in pass_inputs.losses.usable_nodes.items():
        here = used.get(name, ())
        replicas = frozenset(
            (f"{p.owner_uid}/{p.slot.segment}/{p.slot.partition}", p.slot.replica_index)
            for p in here
            if p.role == ROLE_TASK and p.slot is not None
        )
        free = view.allocatable - total(p.requests for p in here)
        nodes[name] = NodeCapacity(view, free, replicas)
    return nodes


def _node_used_by(pod: PodView) -> str | None:
    """The node whose capacity it uses. A required node alone reserves nothing: any user may write
    one into a pod that is gated, or that the scheduler has refused."""
    if pod.node is not None or pod.required_node is None:
        return pod.node
    if pod.topology is not None:
        waits = GATE in pod.gates
    else:
        waits = bool(pod.gates or pod.placement_failure)
    return None if waits else pod.required_node


def _remaining_shares(
    snapshot: Snapshot,
    used: Mapping[str, Iterable[PodView]],
    allocatable: ResourceAmounts,
    limits: NamespaceLimits,
) -> dict[str, ResourceAmounts]:
    """By namespace with topologies and a limited share."""
    shares = {t.namespace: limits.max_share(t.namespace) for t in snapshot.topologies}
    left = {name: allocatable.scaled(share) for name, share in shares.items() if share < 1.0}
    if left:
        for pod in (pod for pods in used.values() for pod in pods):
            if pod.topology is not None and pod.namespace in left:
                left[pod.namespace] = left[pod.namespace] - pod.requests
    return left
