"""Executes commands on an embedded cluster. Thread-safe: one command changes it at a time."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, assert_never

from rekindle_testing.console.commands import (
    AddNodes,
    Command,
    FreezeCommand,
    HealNetworkCommand,
    Help,
    Kill,
    NodeStates,
    PartitionNetworkCommand,
    Quit,
    Status,
    ThawCommand,
    parse_command,
    usage,
)
from rekindle_testing.console.table import table
from rekindle_testing.harness.cluster import EmbeddedCluster

_READY_TIMEOUT_S = 60.0
_API_TIMEOUT_S = 5.0


class ConsoleSession:
    """`execute` returns a description of the result. `ended` is true after `quit`."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._killed: set[str] = set()
        self._frozen: set[str] = set()
        self._partitioned: set[str] = set()
        self.ended = False

    def execute(self, line: str) -> str:
        """Raises `CommandError`, and errors of the cluster."""
        with self._lock:
            command = parse_command(line, self._node_states())
            text, joining = self._do(command)
        # Without the lock: a slow start must not delay the next command.
        for name in joining:
            node = self._cluster.nodes.get(name)
            if node is not None:
                node.wait_ready(_READY_TIMEOUT_S)
        return text if not isinstance(command, Status) else self._status()

    def _node_states(self) -> NodeStates:
        return NodeStates(
            tuple(self._cluster.nodes),
            frozenset(self._killed),
            frozenset(self._frozen),
            frozenset(self._partitioned),
        )

    def _do(self, command: Command) -> tuple[str, list[str]]:
        """Description of the result, and the nodes that join."""
        nodes = self._cluster.nodes
        match command:
            case AddNodes(count):
                joining = [self._cluster.launch_node().name for _ in range(count)]
                return f"{', '.join(joining)}: Ready", joining
            case Kill(names):
                self._cluster.kill_nodes(list(names))
                self._killed.update(names)
                self._frozen.difference_update(names)
                self._partitioned.difference_update(names)
                return f"{', '.join(names)}: killed", []
            case FreezeCommand(names):
                for name in names:
                    nodes[name].freeze()
                    self._frozen.add(name)
                return f"{', '.join(names)}: frozen", []
            case ThawCommand(names):
                for name in names:
                    nodes[name].thaw()
                    self._frozen.discard(name)
                return f"{', '.join(names)}: running again", []
            case PartitionNetworkCommand(names):
                for name in names:
                    nodes[name].partition_network()
                    self._partitioned.add(name)
                return f"{', '.join(names)}: partitioned", []
            case HealNetworkCommand(names):
                for name in names:
                    nodes[name].heal_network()
                    self._partitioned.discard(name)
                return f"{', '.join(names)}: connected again", []
            case Status():
                return "", []
            case Help():
                return usage(), []
            case Quit():
                self.ended = True
                return "stopping the cluster", []
            case _:
                assert_never(command)

    def _status(self) -> str:
        core = self._cluster.core_api
        nodes: list[Any] = core.list_node(_request_timeout=_API_TIMEOUT_S).items
        pods: list[Any] = core.list_pod_for_all_namespaces(_request_timeout=_API_TIMEOUT_S).items
        ready = {node.metadata.name: _is_ready(node) for node in nodes}
        count = Counter(pod.spec.node_name for pod in pods)
        rows = [("NODE", "MACHINE", "KUBERNETES", "PODS")]
        rows += [
            (
                name,
                self._machine_state(name),
                "Ready" if ready.get(name) else "NotReady",
                str(count[name]),
            )
            for name in (*self._cluster.nodes, *sorted(self._killed & ready.keys()))
        ]
        topologies = self._cluster.control_plane.kubectl("get", "topo", "-A").strip()
        return f"{table(rows)}\n\n{topologies or 'no topologies'}"

    def _machine_state(self, name: str) -> str:
        if name in self._killed:
            return "killed"
        states = [
            text
            for text, names in (("frozen", self._frozen), ("partitioned", self._partitioned))
            if name in names
        ]
        return ", ".join(states) or "running"


def _is_ready(node: Any) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in node.status.conditions or [])
