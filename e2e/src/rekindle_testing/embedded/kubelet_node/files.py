"""The configuration files of containerd, CNI, the kubelet and kube-proxy. Pure.

JSON where YAML is read, since JSON is YAML and needs no library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

CNI_PLUGINS = Path("/usr/lib/cni")
# In the node's own /run.
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "docker.io/rekindle/pause:dev"
# Where a node sees the template of its image store (`image_store.ImageStoreTemplate`).
IMAGE_TEMPLATE_DIRECTORY = "/run/rekindle/images"

_CTR = ("ctr", "--namespace", "k8s.io")
# The label is set by containerd's CRI plugin, which serves the kubelet.
IMAGES_UNKNOWN_TO_CRI = (
    *(*_CTR, "images", "list", "--quiet"),
    'labels."io.cri-containerd.image"!=managed',
)

_DISABLED_PLUGINS = (
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")),
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)

Json = dict[str, Any]

# What the kubelet would write into the machine's kernel; a node sees them as set already.
KUBELET_SYSCTLS: Mapping[str, int] = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    """What differs between kubelets."""

    data: Path
    cgroup: str
    certificate: Path
    key: Path
    client_ca_file: Path
    max_pods: int
    lease_duration_s: int
    # What is kept from pods, so that a node looks smaller than the machine.
    reserved: Mapping[str, str]


def snapshotter(file_systems: Iterable[str]) -> str:
    """How containerd keeps the files of images and containers on these file systems. An overlay
    cannot be the upper layer of another one: there everything is copied."""
    return "native" if "overlay" in file_systems else "overlayfs"


def import_command(snapshotter: str) -> list[str]:
    """Takes the path of an archive, or - for its standard input, as one argument more."""
    return [*_CTR, "images", "import", "--snapshotter", snapshotter]


def containerd_config_without_cri(root: Path, snapshotter: str) -> str:
    """For a containerd that unpacks images and runs no containers."""
    disabled = {*_DISABLED_PLUGINS, "io.containerd.grpc.v1.cri"}
    others = {"native", "overlayfs"} - {snapshotter}
    disabled |= {f"io.containerd.snapshotter.v1.{other}" for other in others}
    return _containerd(root, sorted(disabled))


def containerd_config(data: Path, snapshotter: str) -> str:
    return f"""\
{_containerd(data / "containerd", _DISABLED_PLUGINS)}
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
# Without CAP_SYS_RESOURCE nobody may lower an oom_score_adj, and every sandbox would fail.
restrict_oom_score_adj = true
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{data}/cni"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def _containerd(root: Path, disabled: Sequence[str]) -> str:
    return f"""\
version = 2
root = "{root}"
state = "/run/containerd"
oom_score = 0
disabled_plugins = {json.dumps(disabled)}

[grpc]
address = "{CONTAINERD_SOCKET}"
"""


def cni_config(data: Path, pod_subnet: IPv4Network) -> str:
    """A bridge in the node; nothing is masqueraded, as other nodes have routes to it."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": str(pod_subnet)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": f"{data}/cni-addresses",
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        # A pod that calls a Service may be sent to itself.
        "hairpinMode": True,
        "ipam": ipam,
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return _json_text({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, portmap]})


def kubelet_config(settings: KubeletSettings) -> str:
    return _json_text(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(settings.client_ca_file)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(settings.certificate),
            "tlsPrivateKeyFile": str(settings.key),
            "podLogsDir": f"{settings.data}/pod-logs",
            "volumePluginDir": f"{settings.data}/volume-plugins",
            # There is no DNS in the cluster.
            "resolvConf": f"{settings.data}/resolv.conf",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": settings.cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "systemReserved": dict(settings.reserved),
            "maxPods": settings.max_pods,
            # A quarter of it is how often the lease is renewed.
            "nodeLeaseDurationSeconds": settings.lease_duration_s,
            # The machine's disk and memory are not the node's alone: it evicts nothing for them.
            "evictionHard": {
                "memory.available": "0%",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "imagefs.available": "0%",
            },
            # Each minute by default: a test of an eviction would wait for it.
            "volumeStatsAggPeriod": "10s",
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
        }
    )


def kube_proxy_config(name: str, kubeconfig: Path, cluster_cidr: IPv4Network) -> str:
    return _json_text(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "hostnameOverride": name,
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "mode": "iptables",
            "clusterCIDR": str(cluster_cidr),
            # The size of the connection table is the machine's, and read-only in a namespace.
            "conntrack": {"maxPerCore": 0},
            "oomScoreAdj": 0,
        }
    )


def kubelet_command(
    program: Path, name: str, address: IPv4Address, data: Path, labels: Mapping[str, str]
) -> list[str]:
    return [
        str(program),
        f"--config={data}/kubelet.json",
        f"--kubeconfig={data}/kubelet.kubeconfig",
        f"--root-dir={data}/kubelet",
        f"--cert-dir={data}/pki",
        f"--hostname-override={name}",
        f"--node-ip={address}",
        "--v=2",
        "--node-labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
    ]


def reserved(
    machine_cpu_m: int, machine_memory_bytes: int, cpu_m: int | None, memory_bytes: int | None
) -> dict[str, str]:
    """What to keep from pods so that this much is allocatable; None is all of the machine.
    `cpu_m`: milli-CPU."""
    kept = {}
    if cpu_m is not None and cpu_m < machine_cpu_m:
        kept["cpu"] = f"{machine_cpu_m - cpu_m}m"
    if memory_bytes is not None and memory_bytes < machine_memory_bytes:
        kept["memory"] = str(machine_memory_bytes - memory_bytes)
    return kept


def _json_text(document: Json) -> str:
    return json.dumps(document, indent=1) + "\n"
