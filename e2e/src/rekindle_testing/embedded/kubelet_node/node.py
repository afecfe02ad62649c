"""A kubelet node for the process that creates the node: start it, wait for it, kill it.

Has the methods of `process_node.node.ProcessNode`, with the same meaning. Runs in the process of
the test; the node ends with that process, also if it is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rekindle_testing.embedded.kubelet_node import cgroups, commands, files, image_store, removal
from rekindle_testing.embedded.kubelet_node.addresses import NodeAddresses
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError
from rekindle_testing.embedded.kubelet_node.image_store import ImageStoreTemplate
from rekindle_testing.embedded.kubelet_node.network import NodeNetwork, child_of, wait_until
from rekindle_testing.embedded.kubelet_node.state_file import DATA_DIRECTORY_NAME, Cgroup, Directory
from rekindle_testing.embedded.process_node.memory import ProcessTree
from rekindle_testing.embedded.process_node.node_admin import NodeAdmin
from rekindle_testing.embedded.process_node.quantities import parse_millis, parse_rounded_up
from rekindle_testing.embedded.processes import ChildProcess
from rekindle_testing.embedded.toolchain import NodeBinaries, ensure_kubelet_binaries

_IMPORT_ROOT = Path(__file__).parents[3]
_POLL_S = 0.05
_TIMEOUT_S = 30.0
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rekindle_testing.embedded.kubelet_node.init import main; main(sys.argv[2])"
)
_UNSHARE_COMMAND = (
    *("unshare", "--pid", "--net", "--mount", "--uts", "--ipc"),
    *("--propagation", "private", "--mount-proc", "--fork", "--kill-child=KILL", "--"),
)
_KUBE_PROXY_USER = "system:kube-proxy"


class KubeletNodeCluster(Protocol):
    """The part of a control plane that a node needs; it must listen on the network's
    `host_address`."""

    @property
    def kubeconfig(self) -> Path: ...
    @property
    def ca_file(self) -> Path: ...
    def node_kubeconfig(self, name: str) -> Path: ...
    def user_kubeconfig(self, user: str, group: str = "") -> Path: ...
    def issue_server_certificate(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]: ...


class KubeletNode:
    """One node. `cpu` and `memory` are what pods may request, by default all of the machine;
    `pods`: how many it may run.

    `directory` must not exist; in it are `data`, which is deleted with the node, and `logs`,
    which are kept. `archives` are images in files, as `docker save` writes them; they are unpacked
    once on this machine, by the first node that has them.
    """

    def __init__(
        self,
        name: str,
        cluster: KubeletNodeCluster,
        directory: Path,
        *,
        network: NodeNetwork,
        zone: str = "zone-a",
        cpu: str | None = None,
        memory: str | None = None,
        pods: int = 110,
        archives: Sequence[Path] = (),
        labels: Mapping[str, str] | None = None,
        lease_duration_s: int = 8,
        binaries: NodeBinaries | None = None,
    ) -> None:
        self.name = name
        self.zone = zone
        self.directory = directory.absolute()
        self.data = self.directory / DATA_DIRECTORY_NAME
        self.logs = self.directory / "logs"
        self.log = self.logs / "kubelet.log"
        self.api = NodeAdmin(name, cluster.kubeconfig)
        self._cluster = cluster
        self._network = network
        self._cpu, self._memory, self._pods = cpu, memory, pods
        self._archives = list(archives)
        self._labels = {"topology.kubernetes.io/zone": zone, **(labels or {})}
        self._lease_duration_s = lease_duration_s
        self._binaries = binaries
        self._addresses = network.reserve()
        self._cgroup = f"{network.cgroup}/{name}"
        self._wrapper: ChildProcess | None = None  # `unshare`, which waits for the init
        self._template: ImageStoreTemplate | None = None
        self._is_disconnected = False
        self._address_released = False

    @property
    def address(self) -> str:
        return str(self._addresses.address)

    # --- lifecycle --------------------------------------------------------

    def start(self) -> None:
        """Return at once, unless images are to be unpacked; `wait_ready` waits."""
        on_progress = self._network.on_progress
        binaries = self._binaries or ensure_kubelet_binaries(on_progress)
        self._template = template = image_store.acquire_template(
            self._archives, binaries.pause, self.data, on_progress
        )
        self._network.state.record(Cgroup(self._cgroup), Directory(str(self.data)))
        self.logs.mkdir(parents=True)
        self.data.mkdir(mode=0o711)
        cgroups.make(f"{self._cgroup}/system")
        self._write_files(binaries, template)
        config = self.data / "init.json"
        config.write_text(json.dumps(self._init_config(binaries, template)))
        python = [sys.executable, "-S", "-E", "-c", _BOOTSTRAP, str(_IMPORT_ROOT), str(config)]
        self._wrapper = wrapper = self._network.children.start(
            self.name, [*_UNSHARE_COMMAND, *python], commands.environment()
        )
        wait_until(wrapper, "has its namespaces", lambda: child_of(wrapper) is not None)
        self._network.attach(self._addresses, self.init_pid)
        self._network_ready.touch()

    def wait_ready(self, timeout_s: float = 90.0) -> None:
        self._await("is Ready", self.api.is_ready, timeout_s)

    def import_archive(self, archive: Path) -> None:
        """Add the images of one archive more to the running node, and to it alone."""
        pid = self.init_pid
        assert self._template is not None
        try:
            image_store.import_archive(archive, self._template.snapshotter, pid)
        except KubeletNodeError as error:
            raise KubeletNodeError(
                f"node {self.name} cannot import image archive {archive}: {error}"
            ) from error
        # A kubelet that starts a pod before that fails, and tries again only after ten seconds.
        self._await(
            "has its new images", lambda: not image_store.images_unknown_to_cri(pid), _TIMEOUT_S
        )

    def stop(self) -> None:
        """Kill the node and delete its Node: only its logs are kept."""
        self.kill()
        self.api.delete(best_effort=True)

    @property
    def init_pid(self) -> int:
        """Pid 1 of the node: the node ends with it."""
        pid = child_of(self._wrapper) if self._wrapper is not None else None
        if pid is None:
            raise KubeletNodeError(f"node {self.name} does not run")
        return pid

    @property
    def pids(self) -> list[int]:
        """Every process of the node, the init first; empty once it is lost."""
        if self._wrapper is None or self._wrapper.exit_code is not None:
            return []
        return ProcessTree().descendants(self._wrapper.pid)

    @property
    def volumes(self) -> Path:
        """Directory with all volumes of all its pods."""
        return self.data / "kubelet" / "pods"

    def volume(self, pod_uid: str, name: str) -> Path:
        """Directory of a pod's emptyDir, as this machine sees it; one in memory is mounted in the
        node alone."""
        return self.volumes / pod_uid / "volumes" / "kubernetes.io~empty-dir" / name

    def tag_image(self, image: str, tag: str) -> None:
        """Give an image of this node a second name; short names as in pods."""
        names = [name if name.count("/") > 1 else f"docker.io/{name}" for name in (image, tag)]
        inside = ["nsenter", f"--target={self.init_pid}", "--mount", "--"]
        commands.run([*inside, *("ctr", "--namespace", "k8s.io", "images", "tag"), *names])

    # --- failures ---------------------------------------------------------

    def kill(self, *, never_reuse_address: bool = False) -> None:
        """Like a power failure: SIGKILL to all at once, and the disk is lost. Another node may get
        the address, unless it is reserved for this one until `stop`."""
        if self._wrapper is not None and self._network.is_running:
            # Disconnect first: a machine without power does not close its connections.
            self._network.disconnect(self._addresses)
            # The init alone: the kernel kills the rest, and the wrapper waits for the end of all.
            if (init := child_of(self._wrapper)) is not None:
                os.kill(init, signal.SIGKILL)
            self._wrapper.wait(_TIMEOUT_S)
            self._network.children.stop(self._wrapper, grace_s=0)
            self._wrapper = None
            removal.remove([Cgroup(self._cgroup), Directory(str(self.data))])
            self._network.detach(self._addresses)
            self._is_disconnected = False
        if self._template is not None:
            self._template.release()
            self._template = None
        if not never_reuse_address and not self._address_released:
            self._network.release(self._addresses)
            self._address_released = True  # from now on it may be another node's

    def freeze(self) -> None:
        """SIGSTOP to all: connections stay open and there are no responses."""
        self._signal_all(signal.SIGSTOP, stopped=True)

    def thaw(self) -> None:
        """SIGCONT to all: the node resumes, as a zombie if it was declared dead."""
        self._signal_all(signal.SIGCONT, stopped=False)

    def partition_network(self) -> None:
        """Drop all packets between the node and everything else; within it, pods go on."""
        self._network.disconnect(self._addresses)
        self._is_disconnected = True

    def heal_network(self) -> None:
        if self._is_disconnected:
            self._network.reconnect(self._addresses)
            self._is_disconnected = False

    def delete_node_object(self) -> None:
        """Delete the Node from the API; the machine keeps running and does not register again."""
        self.api.delete()

    def drain(self, timeout_s: float = 60.0) -> None:
        """Cordon, evict within the limits of disruption budgets, wait until the pods have ended."""
        self.api.drain(timeout_s)

    def restart_agent(self) -> None:
        """Kill only the kubelet: containers keep running and the next kubelet finds them."""
        self.stop_agent()
        self.start_agent()

    def stop_agent(self) -> None:
        os.kill(self.init_pid, signal.SIGUSR1)
        self._await("has no kubelet", lambda: self.agent_pid is None, 10.0)

    def start_agent(self) -> None:
        os.kill(self.init_pid, signal.SIGUSR2)
        self._await("has a kubelet", lambda: self.agent_pid is not None, 10.0)

    @property
    def agent_pid(self) -> int | None:
        """Of the kubelet."""
        for pid in self.pids:
            try:
                if Path(f"/proc/{pid}/comm").read_text() == "kubelet\n":
                    return pid
            except OSError:
                continue
        return None

    # --- helpers ----------------------------------------------------------

    @property
    def _network_ready(self) -> Path:
        return self.data / "network-ready"

    def _write_files(self, binaries: NodeBinaries, template: ImageStoreTemplate) -> None:
        addresses, data = self._addresses, self.data
        for name in ("cni", "pod-logs", "volume-plugins", "kubelet"):
            (data / name).mkdir()
        certificate, key = self._cluster.issue_server_certificate(self.name, [self.address])
        settings = files.KubeletSettings(
            data=data,
            cgroup=f"/{self._cgroup}",
            certificate=certificate,
            key=key,
            client_ca_file=self._cluster.ca_file,
            max_pods=self._pods,
            lease_duration_s=self._lease_duration_s,
            reserved=files.reserved(
                (os.cpu_count() or 1) * 1000,
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                None if self._cpu is None else parse_millis(self._cpu),
                None if self._memory is None else parse_rounded_up(self._memory),
            ),
        )
        proxy = data / "kube-proxy.kubeconfig"
        contents = {
            "containerd.toml": files.containerd_config(data, template.snapshotter),
            "cni/10-pods.conflist": files.cni_config(data, addresses.pod_cidr),
            "kubelet.json": files.kubelet_config(settings),
            "kube-proxy.json": files.kube_proxy_config(
                self.name, proxy, self._network.addresses.range
            ),
            "resolv.conf": "",
        }
        for name, text in contents.items():
            (data / name).write_text(text)
        image_store.link_images(template, data / "containerd")
        shutil.copy(self._cluster.node_kubeconfig(self.name), data / "kubelet.kubeconfig")
        shutil.copy(self._cluster.user_kubeconfig(_KUBE_PROXY_USER), proxy)

    def _init_config(
        self, binaries: NodeBinaries, template: ImageStoreTemplate
    ) -> dict[str, object]:
        data = self.data
        kubelet = files.kubelet_command(
            binaries.kubelet, self.name, self._addresses.address, data, self._labels
        )
        return {
            "name": self.name,
            "directory": str(self.directory),
            "logs": str(self.logs),
            "cgroup_files": [str(f) for f in cgroups.process_files(f"{self._cgroup}/system")],
            "sysctls": dict(files.KUBELET_SYSCTLS),
            "network_ready": str(self._network_ready),
            "containerd_socket": files.CONTAINERD_SOCKET,
            "images": {"source": str(template.root), "target": files.IMAGE_TEMPLATE_DIRECTORY},
            "programs": {
                "containerd": ["containerd", "--config", f"{data}/containerd.toml"],
                "kubelet": kubelet,
                "kube-proxy": [str(binaries.kube_proxy), f"--config={data}/kube-proxy.json"],
            },
        }

    def _signal_all(self, number: signal.Signals, *, stopped: bool) -> None:
        """Send the signal until all processes of the node are stopped, or none is."""
        if not self.pids:
            raise KubeletNodeError(f"node {self.name} does not run")
        deadline = time.monotonic() + 10.0
        while others := [pid for pid in self.pids if _is_stopped(pid) not in (stopped, None)]:
            if time.monotonic() > deadline:
                raise KubeletNodeError(f"processes {others} of {self.name} ignore {number.name}")
            for pid in others:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    def _await(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            wrapper = self._wrapper
            if wrapper is None or wrapper.exit_code is not None:
                output = wrapper.log_tail() if wrapper is not None else ""
                raise KubeletNodeError(f"node {self.name} has ended\n{output}")
            if time.monotonic() > deadline:
                raise KubeletNodeError(
                    f"timed out after {timeout_s:g} s: waiting until node {self.name} {what}\n"
                    f"{wrapper.log_tail()}\n{self._log_tail()}"
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


__all__ = ["KubeletNode", "KubeletNodeError", "NodeAddresses", "NodeNetwork"]
