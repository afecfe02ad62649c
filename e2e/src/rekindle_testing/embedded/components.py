"""The command lines of the control plane's components. Pure: no process, no file.

Everything listens on one address, by default loopback, and every
connection is authenticated on both sides.  That matters on loopback too: a process
that may write to etcd may create a pod, and a process node would run it as its user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from rekindle_testing.embedded.pki import KeyPair

LOOPBACK = "127.0.0.1"
SERVICE_RANGE = "10.96.0.0/16"
# Of the Service `kubernetes`, by which pods call the API server: the first of the range.
API_SERVICE_ADDRESS = "10.96.0.1"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"

# The common name by which a node's API recognises the API server; any node
# holds a certificate of the same CA, so the CA alone is no proof.
APISERVER_CLIENT_NAME = "kube-apiserver-kubelet-client"

# An address of RFC 5737's documentation range, advertised if there is no real one: without an
# address the API server searches the machine's interfaces, and refuses to start if it finds none.
_PLACEHOLDER_ADDRESS = "192.0.2.1"


@dataclass(frozen=True, slots=True)
class ComponentSettings:
    """Settings that differ from Kubernetes' defaults in tests, with the reasons."""

    # Kubernetes waits 50 s for a silent node, too long for tests of node loss.
    node_monitor_grace_period_s: float = 8
    # Must be well below the grace period; Kubernetes' default is 5 s.
    node_monitor_period_s: float = 2
    # How long a pod without tolerations of its own stays on a lost node.
    default_toleration_s: int = 300
    # Finished pods beyond this number are deleted.
    terminated_pod_gc_threshold: int = 12500
    # Anything but loopback is for kubelets in network namespaces of their own.
    api_address: str = LOOPBACK
    # Time for a component to become ready; a cold page cache makes it slow.
    start_timeout_s: float = 90
    # More flags by component name; they come last and take precedence.
    extra_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ports:
    api_server: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files that are created before any component starts."""

    # Issues the certificates of all clients, of the API server and of the nodes' APIs.
    ca: KeyPair
    # etcd has a CA of its own, or every node could write to the store.
    etcd_ca_certificate: Path
    etcd_member: KeyPair
    etcd_client: KeyPair
    api_server: KeyPair
    kubelet_client: KeyPair
    manager_and_scheduler: KeyPair
    service_account_key: Path


def etcd(data: Path, ports: Ports, credentials: Credentials) -> list[str]:
    client, peer = (f"https://{LOOPBACK}:{port}" for port in (ports.etcd, ports.etcd_peer))
    member = credentials.etcd_member
    return [
        "--name=embedded",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=embedded={peer}",
        *_etcd_tls("", member, credentials.etcd_ca_certificate),
        *_etcd_tls("peer-", member, credentials.etcd_ca_certificate),
        # The store does not outlive the test, so nothing is gained by fsync.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(ports: Ports, credentials: Credentials, settings: ComponentSettings) -> list[str]:
    if ip_address(settings.api_address).is_loopback:
        # EndpointSlices refuse loopback addresses: the `kubernetes` Service stays empty.
        endpoints = [
            "--endpoint-reconciler-type=none",
            f"--advertise-address={_PLACEHOLDER_ADDRESS}",
        ]
    else:
        endpoints = [f"--advertise-address={settings.api_address}"]
    ca = credentials.ca.certificate
    toleration_s = settings.default_toleration_s
    return [
        f"--bind-address={settings.api_address}",
        f"--secure-port={ports.api_server}",
        *endpoints,
        f"--etcd-servers=https://{LOOPBACK}:{ports.etcd}",
        f"--etcd-cafile={credentials.etcd_ca_certificate}",
        f"--etcd-certfile={credentials.etcd_client.certificate}",
        f"--etcd-keyfile={credentials.etcd_client.key}",
        *_serving(credentials.api_server),
        f"--client-ca-file={ca}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
        f"--service-account-key-file={credentials.service_account_key}",
        f"--service-account-signing-key-file={credentials.service_account_key}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        # Logs and exec: node names cannot be resolved, so addresses are used.
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={ca}",
        f"--kubelet-client-certificate={credentials.kubelet_client.certificate}",
        f"--kubelet-client-key={credentials.kubelet_client.key}",
        f"--default-not-ready-toleration-seconds={toleration_s}",
        f"--default-unreachable-toleration-seconds={toleration_s}",
        # Real kubelets run the network plugins' pods.
        "--allow-privileged=true",
        "--profiling=false",
        *settings.extra_arguments.get("kube-apiserver", ()),
    ]


def controller_manager(
    ports: Ports, credentials: Credentials, settings: ComponentSettings, kubeconfig: Path
) -> list[str]:
    ca = credentials.ca
    return [
        *_controller(ports.controller_manager, credentials, kubeconfig),
        "--use-service-account-credentials",
        # It creates this directory; the default is below /usr.
        f"--flex-volume-plugin-dir={kubeconfig.parent / 'flex-volume-plugins'}",
        f"--service-account-private-key-file={credentials.service_account_key}",
        f"--root-ca-file={ca.certificate}",
        f"--cluster-signing-cert-file={ca.certificate}",
        f"--cluster-signing-key-file={ca.key}",
        f"--node-monitor-grace-period={settings.node_monitor_grace_period_s}s",
        f"--node-monitor-period={settings.node_monitor_period_s}s",
        f"--terminated-pod-gc-threshold={settings.terminated_pod_gc_threshold}",
        # At the default of 20 a second the controllers take 5 s to make their own
        # service accounts, more than all the rest of the start.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        # A claim whose volume the binder has not seen yet is checked again only after this period.
        "--pvclaimbinder-sync-period=1s",
        *settings.extra_arguments.get("kube-controller-manager", ()),
    ]


def scheduler(
    ports: Ports, credentials: Credentials, settings: ComponentSettings, kubeconfig: Path
) -> list[str]:
    return [
        *_controller(ports.scheduler, credentials, kubeconfig),
        *settings.extra_arguments.get("kube-scheduler", ()),
    ]


def _controller(port: int, credentials: Credentials, kubeconfig: Path) -> list[str]:
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={LOOPBACK}",
        f"--secure-port={port}",
        *_serving(credentials.manager_and_scheduler),
        # There is one of each, so an election only adds its delay to a restart.
        "--leader-elect=false",
        "--profiling=false",
    ]


def _serving(pair: KeyPair) -> list[str]:
    return [f"--tls-cert-file={pair.certificate}", f"--tls-private-key-file={pair.key}"]


def _etcd_tls(prefix: str, member: KeyPair, ca: Path) -> list[str]:
    return [
        f"--{prefix}cert-file={member.certificate}",
        f"--{prefix}key-file={member.key}",
        f"--{prefix}trusted-ca-file={ca}",
        f"--{prefix}client-cert-auth",
    ]
