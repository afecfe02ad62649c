"""What connects the nodes of one cluster with each other and with the machine.

A bridge in a network namespace of its own, the switch, with a port for each node and one for the
machine. So the machine only gets one more link and its routes, and its firewall sees no packet
between nodes. Knows nothing about Kubernetes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rekindle_testing.embedded.kubelet_node import cgroups, commands, removal
from rekindle_testing.embedded.kubelet_node.addresses import (
    MAX_NODES,
    PREFIX_LENGTH,
    ClusterAddresses,
    NodeAddresses,
    free_indexes,
    mac_of,
    neighbour_commands,
)
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError
from rekindle_testing.embedded.kubelet_node.state_file import (
    STATE_DIRECTORY,
    Cgroup,
    Link,
    StateFile,
)
from rekindle_testing.embedded.processes import ChildProcess, ChildProcesses
from rekindle_testing.progress import OnProgress, no_progress

_POLL_S = 0.02
_TIMEOUT_S = 10.0
_BRIDGE = "nodes"
# States of a port as the kernel numbers them. A disabled one drops packets in silence, while a
# link that is down would be noticed by the node's kernel.
_DISABLED, _FORWARDING = "0", "3"
# Joins the control groups whose lists of processes are the files "$@".
_JOIN_AND_SLEEP = 'for file in "$@"; do echo 0 > "$file" || exit; done; exec sleep infinity'


class NodeNetwork:
    """From `start` (or `with`) to `stop`. `start` also removes what earlier processes have left.

    All processes of the nodes are started by `children`: they end with this process.
    """

    def __init__(
        self,
        directory: Path,
        *,
        state_directory: Path = STATE_DIRECTORY,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self._state_directory = state_directory
        self.on_progress = on_progress
        self._directory = directory.absolute()
        self.children = ChildProcesses(self._directory / "logs")
        self._state: StateFile | None = None
        self._cluster: ClusterAddresses | None = None
        self._switch: ChildProcess | None = None
        self._numbers: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> NodeNetwork:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        return self._state is not None

    @property
    def addresses(self) -> ClusterAddresses:
        if self._cluster is None:
            raise KubeletNodeError("the network of the nodes is not running")
        return self._cluster

    @property
    def host_address(self) -> str:
        """The address of this machine for the nodes; the API server has to listen on it."""
        return str(self.addresses.host)

    @property
    def state(self) -> StateFile:
        if self._state is None:
            raise KubeletNodeError("the network of the nodes is not running")
        return self._state

    @property
    def cgroup(self) -> str:
        return f"rekindle-kubelet-{self.addresses.index}"

    def start(self) -> None:
        removal.remove_leftovers(self._state_directory, self.on_progress)
        self._state, self._cluster = self._claim()
        try:
            self._make()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End and remove all that the state file names, nodes included."""
        if self._state is None:
            return
        try:
            removal.remove_all(self._state)
        finally:
            self.children.close(grace_s=0)
            # Released: what could not be removed is tried again by the next `start`.
            self._state.close()
            self._state = self._cluster = self._switch = None
            self._numbers.clear()

    # --- nodes ------------------------------------------------------------

    def reserve(self) -> NodeAddresses:
        """Addresses that no node has, until they are released."""
        with self._lock:
            free = set(range(1, MAX_NODES + 1)) - self._numbers
            if not free:
                raise KubeletNodeError(f"a cluster has at most {MAX_NODES} kubelet nodes")
            self._numbers.add(min(free))
            return self.addresses.node(min(free))

    def release(self, node: NodeAddresses) -> None:
        with self._lock:
            self._numbers.discard(node.number)

    def attach(self, node: NodeAddresses, pid: int) -> None:
        """Give the network namespace of this process the node's addresses, and a port."""
        port, device = _port(node), "eth0"
        peer = f"peer name {device} address {node.mac} netns {pid}"
        commands.ip(
            [
                f"link add name {port} type veth {peer}",
                f"link set {port} master {_BRIDGE} up",
            ],
            in_network_of=self._switch_pid,
        )
        cluster = self.addresses
        commands.ip(
            [
                "link set lo up",
                f"address add {node.address}/{PREFIX_LENGTH} dev {device}",
                f"link set {device} up",
                *neighbour_commands(cluster, node.address, device, cluster.host),
            ],
            in_network_of=pid,
        )

    def disconnect(self, node: NodeAddresses) -> None:
        """Drop all packets between the node and everything else."""
        self._set_port(node, _DISABLED)

    def reconnect(self, node: NodeAddresses) -> None:
        self._set_port(node, _FORWARDING)

    def detach(self, node: NodeAddresses) -> None:
        """Remove the port, unless it has gone with the node's namespace."""
        try:
            commands.ip([f"link delete {_port(node)}"], in_network_of=self._switch_pid)
        except KubeletNodeError as error:
            if "Cannot find device" not in str(error):
                raise

    # --- the switch -------------------------------------------------------

    def _claim(self) -> tuple[StateFile, ClusterAddresses]:
        routes = json.loads(commands.run(["ip", "-json", "-4", "route", "show", "table", "all"]))
        for index in free_indexes(route["dst"] for route in routes):
            state = StateFile.claim(self._state_directory / f"{index}.jsonl")
            if state is not None:
                return state, ClusterAddresses(index)
        raise KubeletNodeError(
            "no addresses are left for another cluster of kubelet nodes: each has a /19 of "
            f"198.18.0.0/15, to which this machine has other routes; see {self._state_directory}"
        )

    def _make(self) -> None:
        cluster = self.addresses
        link = f"rk{cluster.index}"
        self.state.record(Cgroup(self.cgroup), Link(link))
        cgroup = f"{self.cgroup}/switch"
        cgroups.make(cgroup)
        files = [str(file) for file in cgroups.process_files(cgroup)]
        # The process `unshare` itself stays outside the control group, as for a node.
        command = ["unshare", "--net", "--fork", "--kill-child=KILL", "--"]
        switch = self.children.start(
            "switch",
            [*command, "sh", "-c", _JOIN_AND_SLEEP, str(self._directory), *files],
            commands.environment(),
        )
        self._switch = switch
        wait_until(switch, "has its namespace", lambda: _sleeps(child_of(switch)))
        commands.ip(
            [
                "link set lo up",
                f"link add name {_BRIDGE} type bridge forward_delay 0 mcast_snooping 0",
                f"link set {_BRIDGE} up",
            ],
            in_network_of=self._switch_pid,
        )
        peer = f"peer name host netns {self._switch_pid}"
        commands.ip([f"link add name {link} address {mac_of(cluster.host)} type veth {peer}"])
        commands.ip([f"link set host master {_BRIDGE} up"], in_network_of=self._switch_pid)
        commands.ip(
            [
                f"address add {cluster.host}/{PREFIX_LENGTH} dev {link}",
                f"link set {link} up",
                *neighbour_commands(cluster, cluster.host, link, None),
            ]
        )

    @property
    def _switch_pid(self) -> int:
        pid = child_of(self._switch) if self._switch is not None else None
        if pid is None:
            raise KubeletNodeError("the network of the nodes is not running")
        return pid

    def _set_port(self, node: NodeAddresses, state: str) -> None:
        commands.bridge(
            ["link", "set", "dev", _port(node), "state", state], in_network_of=self._switch_pid
        )


def child_of(wrapper: ChildProcess) -> int | None:
    """The only child of `unshare`, which is in the namespaces that it has made."""
    try:
        children = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def wait_until(wrapper: ChildProcess, what: str, condition: Callable[[], bool]) -> None:
    """Wait for a condition on a process; raises KubeletNodeError if the process ends first, or at
    the timeout."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if wrapper.exit_code is not None:
            raise KubeletNodeError(
                f"{wrapper.name} exited with code {wrapper.exit_code}; {wrapper.log} ends with:\n"
                f"{wrapper.log_tail()}"
            )
        if time.monotonic() > deadline:
            raise KubeletNodeError(
                f"waited {_TIMEOUT_S:g} s until {wrapper.name} {what}:\n{wrapper.log_tail()}"
            )
        time.sleep(_POLL_S)


def _sleeps(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


def _port(node: NodeAddresses) -> str:
    return f"node-{node.number}"
