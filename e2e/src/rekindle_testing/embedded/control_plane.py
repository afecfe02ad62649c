"""A real Kubernetes control plane as child processes on loopback.

etcd, kube-apiserver, kube-controller-manager and kube-scheduler, all data under
one directory, no nodes: those join through `node_kubeconfig`.  Knows when the
components are ready and how to pause and stop the API server; it must not know what
runs on the cluster.  The command lines are in `components`.
"""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rekindle_testing.embedded import components
from rekindle_testing.embedded.components import ComponentSettings, Credentials, Ports
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.kubeconfig import write_kubeconfig
from rekindle_testing.embedded.pki import CertificateAuthority, create_signing_key
from rekindle_testing.embedded.processes import ChildProcess, ChildProcesses, choose_ports
from rekindle_testing.embedded.toolchain import ControlPlaneBinaries, ensure_control_plane_binaries
from rekindle_testing.progress import OnProgress, no_progress

_POLL_S = 0.1
_STOP_GRACE_S = 5.0


class ControlPlaneError(EmbeddedError):
    """A component ended or did not become ready; carries the end of its log."""


class KubectlError(EmbeddedError):
    """kubectl failed, with its `stderr`."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)} failed: {stderr.strip()}")
        self.stderr = stderr


@dataclass(frozen=True, slots=True)
class _Installation:
    """What is created once, before the first component starts."""

    binaries: ControlPlaneBinaries
    ports: Ports
    ca: CertificateAuthority
    credentials: Credentials
    # For health checks of the components by this process, as admin.
    admin_tls: ssl.SSLContext


class ControlPlane:
    """One control plane, from `start` (or `with`) to `stop`.

    `directory` must not hold an earlier control plane; it stays after `stop`,
    for its logs.  Without `binaries` they are found or built first, which
    takes minutes the first time.
    """

    def __init__(
        self,
        directory: Path,
        settings: ComponentSettings | None = None,
        *,
        binaries: ControlPlaneBinaries | None = None,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self.directory = directory.absolute()
        self.settings = settings or ComponentSettings()
        self.log_directory = self.directory / "logs"
        self.kubeconfig = self.directory / "kubeconfig" / "admin.kubeconfig"
        self._binaries = binaries
        self._on_progress = on_progress
        self._children = ChildProcesses(self.log_directory)
        self._running: dict[str, ChildProcess] = {}
        self._installed: _Installation | None = None

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def api_url(self) -> str:
        return self._url(self._installation.ports)

    @property
    def ca_file(self) -> Path:
        """The CA of the API server, of all clients and of the nodes."""
        return self._installation.ca.pair.certificate

    @property
    def pids(self) -> dict[str, int]:
        """Of the components that were started and not stopped."""
        return {name: process.pid for name, process in self._running.items()}

    def start(self) -> None:
        """Return when pods can be created in the default namespace and are scheduled."""
        self._installed = self._install(
            self._binaries or ensure_control_plane_binaries(self._on_progress)
        )
        try:
            self._start_components()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every component; does nothing to one that has ended."""
        self._children.close(_STOP_GRACE_S)
        self._running.clear()

    # --- identities -------------------------------------------------------

    def node_kubeconfig(self, name: str) -> Path:
        """A kubeconfig by which the node authorizer knows its holder as this node."""
        return self.user_kubeconfig(f"system:node:{name}", group="system:nodes")

    def user_kubeconfig(self, user: str, group: str = "") -> Path:
        """A kubeconfig of any user; what it may do is up to RBAC."""
        path = self.kubeconfig.with_name(user.replace(":", "_") + ".kubeconfig")
        if not path.exists():
            pair = self._installation.ca.issue_client(f"client-{path.stem}", user, group)
            write_kubeconfig(path, self.api_url, self.ca_file, pair)
        return path

    def issue_server_certificate(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]:
        """Certificate and key for the API of a node's kubelet; the API server trusts them.

        The node requires client certificates of `ca_file` and checks that
        the name is `components.APISERVER_CLIENT_NAME`.
        """
        pair = self._installation.ca.issue_server(f"server-{name}", f"system:node:{name}", hosts)
        return pair.certificate, pair.key

    # --- use --------------------------------------------------------------

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        kubeconfig: Path | None = None,
        timeout_s: float = 60,
    ) -> str:
        """Run kubectl, by default as admin, and return its output."""
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.directory),
            "KUBECONFIG": str(kubeconfig or self.kubeconfig),
        }
        done = subprocess.run(
            [str(self._installation.binaries.kubectl), *arguments],
            input=stdin if stdin is not None else "",
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode != 0:
            raise KubectlError(arguments, done.stderr)
        return done.stdout

    # --- outages of the API -----------------------------------------------

    def pause_api_server(self) -> None:
        """Freeze the API server: connections stay open and there are no responses."""
        self._running["kube-apiserver"].pause()

    def resume_api_server(self) -> None:
        self._running["kube-apiserver"].resume()
        self._await_api_server()

    def stop_api_server(self) -> None:
        """Kill the API server, like a crash: connections break, then are refused."""
        self._children.stop(self._running.pop("kube-apiserver"), grace_s=0)

    def start_api_server(self) -> None:
        """Start it again on the same port."""
        self._launch_api_server()
        self._await_api_server()

    # --- the components ---------------------------------------------------

    @property
    def _installation(self) -> _Installation:
        if self._installed is None:
            raise ControlPlaneError(f"the control plane in {self.directory} was not started")
        return self._installed

    def _install(self, binaries: ControlPlaneBinaries) -> _Installation:
        etcd_data = self.directory / "etcd"
        if etcd_data.exists():
            raise ControlPlaneError(
                f"{self.directory} holds an earlier control plane: delete it or name another"
            )
        etcd_data.mkdir(parents=True, mode=0o700)
        ports = Ports(*choose_ports(5))
        ca = CertificateAuthority.create(self.directory / "pki", "rekindle-embedded")
        credentials = self._issue_credentials(ca)
        admin = ca.issue_client("admin", "kubernetes-admin", "system:masters")
        ca_file = ca.pair.certificate
        write_kubeconfig(self.kubeconfig, self._url(ports), ca_file, admin)
        admin_tls = ssl.create_default_context(cafile=str(ca_file))
        admin_tls.load_cert_chain(admin.certificate, admin.key)
        return _Installation(binaries, ports, ca, credentials, admin_tls)

    def _url(self, ports: Ports) -> str:
        return f"https://{self.settings.api_address}:{ports.api_server}"

    def _issue_credentials(self, ca: CertificateAuthority) -> Credentials:
        etcd_ca = CertificateAuthority.create(ca.directory / "etcd", "rekindle-etcd")
        local = [components.LOOPBACK, "localhost"]
        # The names by which pods of any cluster call their API server.
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names += ["kubernetes.default.svc.cluster.local"]
        names += [components.API_SERVICE_ADDRESS]
        addresses = list(dict.fromkeys([*local, self.settings.api_address]))
        return Credentials(
            ca=ca.pair,
            etcd_ca_certificate=etcd_ca.pair.certificate,
            etcd_member=etcd_ca.issue_server("member", "etcd", local, also_client=True),
            etcd_client=etcd_ca.issue_client("client", "kube-apiserver"),
            api_server=ca.issue_server("kube-apiserver", "kube-apiserver", [*addresses, *names]),
            kubelet_client=ca.issue_client(
                "kubelet-client", components.APISERVER_CLIENT_NAME, "system:masters"
            ),
            manager_and_scheduler=ca.issue_server(
                "manager-and-scheduler", "manager-and-scheduler", local
            ),
            service_account_key=create_signing_key(ca.directory / "tokens.key"),
        )

    def _start_components(self) -> None:
        installed = self._installation
        ports, credentials = installed.ports, installed.credentials
        etcd = components.etcd(self.directory / "etcd", ports, credentials)
        self._launch("etcd", installed.binaries.etcd, etcd)
        # It retries until etcd responds.
        self._launch_api_server()
        self._await_api_server()
        for name, program, command in (
            (
                "kube-controller-manager",
                installed.binaries.kube_controller_manager,
                components.controller_manager,
            ),
            ("kube-scheduler", installed.binaries.kube_scheduler, components.scheduler),
        ):
            kubeconfig = self.user_kubeconfig(f"system:{name}")
            self._launch(name, program, command(ports, credentials, self.settings, kubeconfig))
        self._await_healthy("kube-scheduler", ports.scheduler)
        self._await_healthy("kube-controller-manager", ports.controller_manager)
        # Both are mounted into every pod.
        for path in ("serviceaccounts/default", "configmaps/kube-root-ca.crt"):
            path = f"/api/v1/namespaces/default/{path}"
            created = partial(self._api_responds, path)
            self._await("kube-controller-manager", f"create {path}", created)

    def _launch_api_server(self) -> None:
        installed = self._installation
        arguments = components.api_server(installed.ports, installed.credentials, self.settings)
        self._launch("kube-apiserver", installed.binaries.kube_apiserver, arguments)

    def _launch(self, name: str, program: Path, arguments: Sequence[str]) -> None:
        # Without variables of this process: proxies and KUBE* variables change components.
        environment = {"PATH": os.defpath, "HOME": str(self.directory)}
        argv = [str(program), *arguments]
        self._running[name] = self._children.start(name, argv, environment)

    # --- readiness --------------------------------------------------------

    def _await_api_server(self) -> None:
        self._await("kube-apiserver", "respond to /readyz", partial(self._api_responds, "/readyz"))

    def _await_healthy(self, name: str, port: int) -> None:
        healthy = partial(self._responds, components.LOOPBACK, port, "/healthz")
        self._await(name, "respond to /healthz", healthy)

    def _await(self, name: str, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not condition():
            for process in self._running.values():
                if process.exit_code is not None:
                    raise _failure(process, f"exited with code {process.exit_code}")
            if time.monotonic() > deadline:
                raise _failure(
                    self._running[name],
                    f"did not {what} within {self.settings.start_timeout_s:g} s",
                )
            time.sleep(_POLL_S)

    def _api_responds(self, path: str) -> bool:
        return self._responds(self.settings.api_address, self._installation.ports.api_server, path)

    def _responds(self, host: str, port: int, path: str) -> bool:
        connection = http.client.HTTPSConnection(
            host, port, timeout=5, context=self._installation.admin_tls
        )
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _failure(process: ChildProcess, what: str) -> ControlPlaneError:
    return ControlPlaneError(
        f"{process.name} {what}; {process.log} ends with:\n{process.log_tail()}"
    )
