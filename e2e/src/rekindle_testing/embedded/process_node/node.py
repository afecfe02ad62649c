"""A process node for the process that creates the node: start it, wait for it, kill it.

Runs in the process of the test or the demo.  The node ends with that process, also if
it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.embedded.process_node.indexes import IndexReservation
from rekindle_testing.embedded.process_node.memory import ProcessTree
from rekindle_testing.embedded.process_node.network_partition import (
    NetworkPartition,
    NetworkPartitionUnsupported,
    cgroup2_mount,
)
from rekindle_testing.embedded.process_node.node_admin import NodeAdmin
from rekindle_testing.embedded.process_node.settings import (
    QUICK,
    ImageReplacement,
    NodeSettings,
    NodeTiming,
)

_IMPORT_ROOT = Path(__file__).parents[3]
_POLL_S = 0.05
_BOOTSTRAP = (
    "import sys; sys.path[:0] = sys.argv[2].split(':'); from importlib import import_module; "
    "import_module('rekindle_testing.embedded.process_node.' + sys.argv[1]).main(sys.argv[3])"
)


class ProcessNodeError(EmbeddedError):
    """An operation on a node failed; the message has the end of its log."""


class ProcessNodeCluster(Protocol):
    """The part of a control plane that a node needs."""

    @property
    def kubeconfig(self) -> Path: ...
    @property
    def ca_file(self) -> Path: ...
    def node_kubeconfig(self, name: str) -> Path: ...
    def issue_server_certificate(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]: ...


class ProcessNode:
    """One node.  Its addresses are 127.INDEX.0.0/16, with `index` from 1 to 254; the
    default is the first index that no node on this machine has.

    `directory` must not exist; in it are `data`, which is deleted with the node, and
    `agent.log`, which is kept.
    """

    def __init__(
        self,
        name: str,
        cluster: ProcessNodeCluster,
        directory: Path,
        *,
        index: int | None = None,
        zone: str = "zone-a",
        cpu: str = "2",
        memory: str = "4Gi",
        pods: int = 110,
        images: Mapping[str, ImageReplacement] | None = None,
        labels: Mapping[str, str] | None = None,
        timing: NodeTiming | None = None,
        kubelet_port: int = 10250,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ProcessNodeError("process nodes need Linux, for its namespaces")
        self.name = name
        self.zone = zone
        self._reservation = IndexReservation(index)
        self._index = self._reservation.index
        self.address = f"127.{self._index}.0.1"
        self.directory = directory.absolute()
        self.log = self.directory / "agent.log"
        self.api = NodeAdmin(name, cluster.kubeconfig)
        self._cluster = cluster
        self._capacity = {
            "cpu": cpu,
            "memory": memory,
            "pods": str(pods),
            "ephemeral-storage": "100Gi",
        }
        self._images = dict(images or {})
        self._labels = dict(labels or {})
        self._timing = timing or NodeTiming()
        self._kubelet_port = kubelet_port
        self._launcher: subprocess.Popen[bytes] | None = None
        self._cgroup: Path | None = None
        self._is_partitioned = False

    # --- lifecycle --------------------------------------------------------

    def start(self) -> None:
        """Return at once; `wait_ready` waits."""
        self.directory.mkdir(parents=True)
        self._cgroup = self._make_cgroup()
        data = self.directory / "data"
        data.mkdir(mode=0o711)
        settings_file = self.directory / "settings.json"
        self._settings(data).write(settings_file)
        config_file = self.directory / "launcher.json"
        python = [sys.executable, "-S", "-E", "-c", _BOOTSTRAP]
        packages = ":".join([str(_IMPORT_ROOT), *_site_packages()])
        init_file = self.directory / "init.json"
        init = [*python, "init", str(_IMPORT_ROOT), str(init_file)]
        agent = [*python, "agent", packages, str(settings_file)]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        # An arena for each thread would need more memory.
        environment["MALLOC_ARENA_MAX"] = "1"
        syscalls.write_json(init_file, {"agent": agent, "agent_log": str(self.log)})
        config = {
            "creator_pid": os.getpid(),
            "init": init,
            "init_pid_file": str(self.directory / "init.pid"),
            "environment": environment,
            "data_directory": str(data),
            "cgroup": str(self._cgroup or ""),
            "nft_table": self._network_partition().table if self._cgroup else "",
        }
        syscalls.write_json(config_file, config)
        with self.log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [*python, "launcher", str(_IMPORT_ROOT), str(config_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        self._await("is Ready", self.api.is_ready, timeout_s)

    def stop(self) -> None:
        """Kill the node and delete its Node: only its log is kept."""
        self.kill()
        self.api.delete(best_effort=True)

    @property
    def init_pid(self) -> int:
        """Pid 1 of the node, leader of its process group: the node ends with it."""
        file = self.directory / "init.pid"
        self._await("has started", lambda: file.exists() and file.read_text() != "", 10.0)
        return int(file.read_text())

    @property
    def pids(self) -> list[int]:
        """Every process of the node, the init first; empty once it is lost."""
        if self._launcher is None or self._launcher.poll() is not None:
            return []
        return ProcessTree().descendants(self._launcher.pid)

    @property
    def volumes(self) -> Path:
        """Directory with all volumes of all its pods."""
        return self.directory / "data" / "pods"

    def volume(self, pod_uid: str, name: str) -> Path:
        """Directory of a pod's emptyDir."""
        return self.volumes / pod_uid / "volumes" / name

    # --- failures ---------------------------------------------------------

    def kill(self, *, never_reuse_address: bool = False) -> None:
        """Like a power failure: SIGKILL to all at once, and the disk is lost. Another node may get
        the address, unless it is reserved for this one until `stop`."""
        if self._launcher is not None:
            if self._launcher.poll() is None:
                os.killpg(self.init_pid, signal.SIGKILL)
            self._launcher.wait(30)
            self._is_partitioned = False
        if not never_reuse_address:
            self._reservation.release()

    def freeze(self) -> None:
        """SIGSTOP to all: connections stay open and there are no responses."""
        self._signal_all(signal.SIGSTOP, stopped=True)

    def thaw(self) -> None:
        """SIGCONT to all: the node resumes, as a zombie if it was declared dead."""
        self._signal_all(signal.SIGCONT, stopped=False)

    def partition_network(self) -> None:
        """Drop all packets between the node and everything else."""
        if self._cgroup is None:
            raise NetworkPartitionUnsupported(
                "a network partition needs root and a mounted cgroup v2, by which sockets are "
                "matched"
            )
        self._network_partition().begin()
        self._is_partitioned = True

    def heal_network(self) -> None:
        if self._is_partitioned:
            self._network_partition().end()
            self._is_partitioned = False

    def delete_node_object(self) -> None:
        """Delete the Node from the API; the machine keeps running and does not register again."""
        self.api.delete()

    def drain(self, timeout_s: float = 60.0) -> None:
        """Cordon, evict within the limits of disruption budgets, wait until the pods have ended."""
        self.api.drain(timeout_s)

    def restart_agent(self) -> None:
        """Kill only the agent: containers keep running and the next agent adopts them."""
        self.stop_agent()
        self.start_agent()

    def stop_agent(self) -> None:
        os.kill(self.init_pid, signal.SIGUSR1)
        self._await("has no agent", lambda: self.agent_pid is None, 10.0)

    def start_agent(self) -> None:
        os.kill(self.init_pid, signal.SIGUSR2)
        self._await("has an agent", lambda: self.agent_pid is not None, 10.0)

    @property
    def agent_pid(self) -> int | None:
        for pid in self.pids:
            try:
                argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argv[4:6] == [_BOOTSTRAP.encode(), b"agent"]:
                return pid
        return None

    # --- helpers ----------------------------------------------------------

    def _signal_all(self, number: signal.Signals, *, stopped: bool) -> None:
        """Send the signal until all processes of the node are stopped, or none is."""
        if not self.pids:
            raise ProcessNodeError(f"node {self.name} does not run")
        deadline = time.monotonic() + 10.0
        while others := [pid for pid in self.pids if _is_stopped(pid) not in (stopped, None)]:
            if time.monotonic() > deadline:
                raise ProcessNodeError(f"processes {others} of {self.name} ignore {number.name}")
            for pid in others:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    def _settings(self, data: Path) -> NodeSettings:
        certificate, key = self._cluster.issue_server_certificate(self.name, [self.address])
        # A copy, since the agent puts files beside it.
        kubeconfig = data / "kubeconfig"
        kubeconfig.write_bytes(self._cluster.node_kubeconfig(self.name).read_bytes())
        kubeconfig.chmod(0o600)
        return NodeSettings(
            name=self.name,
            zone=self.zone,
            address=self.address,
            address_prefix=f"127.{self._index}",
            kubelet_port=self._kubelet_port,
            capacity=self._capacity,
            labels=self._labels,
            images=self._images,
            timing=self._timing,
            directory=str(data),
            kubeconfig=str(kubeconfig),
            ca_file=str(self._cluster.ca_file),
            serving_certificate=str(certificate),
            serving_key=str(key),
            apiserver_client_name=_apiserver_client_name(),
            cgroup=str(self._cgroup or ""),
        )

    def _make_cgroup(self) -> Path | None:
        root = cgroup2_mount()
        if root is None or os.geteuid() != 0:
            return None
        path = root / f"rekindle-{os.getpid()}-{self.name}"
        try:
            path.mkdir()
        except OSError:
            return None
        return path

    def _network_partition(self) -> NetworkPartition:
        assert self._cgroup is not None
        table = f"rekindle_{os.getpid()}_{self._index}"
        return NetworkPartition(table, f"127.{self._index}.0.0/16", self._cgroup)

    def _await(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._launcher is not None and (code := self._launcher.poll()) is not None:
                raise ProcessNodeError(
                    f"node {self.name} exited with code {code}\n{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ProcessNodeError(
                    f"timed out after {timeout_s:g} s: waiting until node {self.name} {what}\n"
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def _is_stopped(pid: int) -> bool | None:
    """None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state = stat.rpartition(")")[2].split()[0]
    return None if state in "ZX" else state in "Tt"


def _site_packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def _apiserver_client_name() -> str:
    from rekindle_testing.embedded.components import APISERVER_CLIENT_NAME

    return APISERVER_CLIENT_NAME


__all__ = ["QUICK", "ImageReplacement", "NodeTiming", "ProcessNode", "ProcessNodeError"]
