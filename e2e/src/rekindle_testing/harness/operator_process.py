"""The operator as a process on this machine, with the permissions that the chart grants."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import urllib3
import yaml

from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.toolchain import ensure_helm
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

_USER = "rekindle-operator"
_KINDS = ("ClusterRole", "ClusterRoleBinding", "PriorityClass")


def install_crds(control_plane: ControlPlane) -> None:
    """Those of this checkout, whatever was there; returns when kubectl knows them."""
    for crd in sorted((ROOT / "crds").glob("*.yaml")):
        control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
    wait_until_known(control_plane)


def wait_until_known(control_plane: ControlPlane) -> None:
    """Not by `kubectl wait`, which fails as long as the CRD has no condition."""
    wait_for("the CRD in the discovery", lambda: _is_known(control_plane))


def _is_known(control_plane: ControlPlane) -> bool:
    try:
        control_plane.kubectl("get", "topo")
    except KubectlError:
        return False
    return True


def operator_kubeconfig(control_plane: ControlPlane) -> Path:
    """Install the chart's permissions and priority classes. Returns a kubeconfig with these
    permissions."""
    chart = str(ROOT / "charts/rekindle")
    # Without a cluster, helm assumes a version that depends on how helm was built.
    command = [str(ensure_helm()), "template", "rekindle", chart, "--kube-version", "1.30.0"]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wanted = [d for d in yaml.safe_load_all(rendered) if d and d["kind"] in _KINDS]
    for document in wanted:
        if document["kind"] == "ClusterRoleBinding":
            document["subjects"] = [{"kind": "User", "name": _USER}]
    control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(wanted))
    return control_plane.user_kubeconfig(_USER)


class OperatorProcess:
    """`python -m rekindle_operator` as a process. `environment`: more variables, or
    other values for those set here."""

    def __init__(
        self,
        kubeconfig: Path,
        directory: Path,
        identity: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = directory / f"{identity}.log"
        process_environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            # Where the client puts certificates and keys, which stay after SIGKILL.
            "TMPDIR": str(directory),
            "REKINDLE_HTTP_BIND": "127.0.0.1",
            "REKINDLE_HTTP_PORT": str(self.port),
            "REKINDLE_OPERATOR_IDENTITY": identity,
            # As the chart names it for the release `rekindle` in the namespace `default`.
            "REKINDLE_PRIORITY_CLASS": "default.rekindle-task",
            "REKINDLE_PLACEHOLDER_PRIORITY_CLASS": "default.rekindle-placeholder",
            **(environment or {}),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rekindle_operator"],
                env=process_environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        """The body; empty if there is no response, or an error."""
        try:
            response = urllib3.request("GET", f"http://127.0.0.1:{self.port}{path}", retries=False)
        except urllib3.exceptions.HTTPError:
            return ""
        return response.data.decode() if response.status == 200 else ""

    def leads(self) -> bool:
        return "rekindle_operator_leader 1.0" in self.get("/metrics")

    def unexpected_lines(self) -> list[str]:
        """Lines of the log that report exceptions, or that are not of its logging (no JSON)."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if '"exception"' in line or not line.startswith("{")]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
