"""Addresses that a newer machine or pod reuses. Pure.

The object of a lost node can stay while another machine, with another name, gets its address. A
response from there says nothing about the lost node, nor about the pods that it ran.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rekindle_operator.cluster.model import NodeView, PodEndpoint, PodView


def without_reused_kubelet_addresses(nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """Of several nodes with the address of one kubelet, only the newest keeps it."""
    used = [node.kubelet for node in nodes if node.kubelet is not None]
    if len(set(used)) == len(used):
        return tuple(nodes)
    newest: dict[PodEndpoint, NodeView] = {}
    for node in sorted(nodes, key=lambda n: n.created_at):
        if node.kubelet is not None:
            newest[node.kubelet] = node
    return tuple(
        n if n.kubelet is None or newest[n.kubelet] is n else replace(n, kubelet=None)
        for n in nodes
    )


def without_reused_ips(pods: Iterable[PodView]) -> tuple[PodView, ...]:
    """Pods of topologies and of operators (`is_managed`) keep their address unless a newer pod on
    another node has it."""
    pods = tuple(pods)
    used = [pod.ip for pod in pods if pod.ip]
    if len(set(used)) == len(used):
        return pods
    managed_ips = {p.ip for p in pods if p.is_managed and p.ip}
    holders = [p for p in pods if p.ip in managed_ips and not p.ended]
    newest = {p.ip: p.node for p in sorted(holders, key=lambda p: p.created_at)}
    return tuple(
        replace(p, ip="") if p.is_managed and newest.get(p.ip, p.node) != p.node else p
        for p in pods
    )
