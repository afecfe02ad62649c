"""Which addresses a cluster of kubelet nodes uses. Pure.

All are of 198.18.0.0/15, which RFC 2544 reserves for benchmarks: no network of a machine has them,
and EndpointSlices accept them, unlike loopback addresses. A cluster has a /19 of it: first the
network of the nodes, a /24, then a /24 of pods for each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

ALL_CLUSTERS = IPv4Network("198.18.0.0/15")
MAX_CLUSTERS = 16
"""On one machine."""
MAX_NODES = 31
"""In one cluster."""
PREFIX_LENGTH = 24
"""Of the network of the nodes, and of those of pods."""


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """One node: its number in the cluster (from 1), and what is derived from it."""

    number: int
    address: IPv4Address
    pod_cidr: IPv4Network

    @property
    def mac(self) -> str:
        return mac_of(self.address)


@dataclass(frozen=True, slots=True)
class ClusterAddresses:
    """The addresses of the cluster with this index on the machine."""

    index: int

    @property
    def range(self) -> IPv4Network:
        """Of all nodes and pods."""
        first = int(ALL_CLUSTERS.network_address) + self.index * 2**13
        return IPv4Network((first, 19))

    @property
    def host(self) -> IPv4Address:
        """Of the machine itself, in the network of the nodes; the API server listens on it."""
        return self.range.network_address + 1

    def node(self, number: int) -> NodeAddresses:
        first = self.range.network_address
        return NodeAddresses(
            number, first + 1 + number, IPv4Network((int(first) + number * 256, PREFIX_LENGTH))
        )

    def nodes(self) -> Iterator[NodeAddresses]:
        return map(self.node, range(1, MAX_NODES + 1))


def mac_of(address: IPv4Address) -> str:
    """A locally administered hardware address. As it follows from the IP address, neighbours can
    be entered as permanent: a node in a network partition is silent, and not
    "unreachable" after 3 s."""
    return ":".join(f"{byte:02x}" for byte in (2, 0, *address.packed))


def free_indexes(routes: Iterable[str]) -> list[int]:
    """Indexes of clusters whose range no route of the machine overlaps; routes are destinations
    as `ip route` prints them."""
    taken = [IPv4Network(route, strict=False) for route in routes if route != "default"]
    return [
        index
        for index in range(MAX_CLUSTERS)
        if not any(ClusterAddresses(index).range.overlaps(network) for network in taken)
    ]


def neighbour_commands(
    cluster: ClusterAddresses, own: IPv4Address, device: str, gateway: IPv4Address | None
) -> list[str]:
    """Lines for `ip -batch`, executed on the member with address `own` (a node, or the machine):
    every other member of the network, and the routes to its pods.

    All possible members are entered at once, so that nothing changes when a node joins.
    """
    host = [] if own == cluster.host else [cluster.host]
    others = [node for node in cluster.nodes() if node.address != own]
    lines = [
        f"neigh replace {address} lladdr {mac_of(address)} nud permanent dev {device}"
        for address in (*host, *(node.address for node in others))
    ]
    lines += [f"route replace {node.pod_cidr} via {node.address} dev {device}" for node in others]
    if gateway is not None:
        lines.append(f"route replace default via {gateway} dev {device}")
    return lines
