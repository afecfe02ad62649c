"""Whether this machine can have kubelet nodes, and Debian's packages that they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rekindle_testing.embedded.kubelet_node import cgroups, commands
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError, KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.files import CNI_PLUGINS
from rekindle_testing.progress import OnProgress, no_progress

# Program -> the package that has it.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    "ip": "iproute2",
    "bridge": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_APT_GET = ("apt-get", "-qq", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=300")


def ensure_host_prerequisites(on_progress: OnProgress = no_progress) -> None:
    """Raises KubeletNodesUnsupported, with the reason, where there can be no kubelet nodes; as
    root on Debian it installs what is missing."""
    if not sys.platform.startswith("linux"):
        raise KubeletNodesUnsupported("kubelet nodes need Linux, for its namespaces")
    if os.geteuid() != 0:
        raise KubeletNodesUnsupported("kubelet nodes need root: they make namespaces and cgroups")
    if packages := missing(_is_installed):
        _install(packages, on_progress)
    try:
        commands.run(["unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "true"])
    except KubeletNodeError as error:
        raise KubeletNodesUnsupported(
            f"kubelet nodes need CAP_SYS_ADMIN, for namespaces: {error}"
        ) from error
    hierarchies = cgroups.mounted()
    if not hierarchies or not all(os.access(each.root, os.W_OK) for each in hierarchies):
        raise KubeletNodesUnsupported("kubelet nodes need cgroups, mounted and writable")


def missing(is_installed: Callable[[str], bool]) -> list[str]:
    """The packages of programs that are not installed."""
    return sorted({package for program, package in PACKAGES.items() if not is_installed(program)})


def download(package: str, directory: Path) -> None:
    """The files of a package below the directory, without installing it."""
    if shutil.which("apt-get") is None:
        raise KubeletNodesUnsupported(f"{package} is taken from Debian, and there is no apt-get")
    if _apt(["download", package], directory).returncode != 0:
        _apt(["update"], directory)
        done = _apt(["download", package], directory)
        if done.returncode != 0:
            raise KubeletNodesUnsupported(f"cannot download {package}: {_last_lines(done)}")
    (archive,) = directory.glob("*.deb")
    commands.run(["dpkg-deb", "--extract", str(archive), str(directory)])
    archive.unlink()


def _install(packages: Sequence[str], on_progress: OnProgress) -> None:
    names = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise KubeletNodesUnsupported(
            f"kubelet nodes need what Debian has in the packages {names}, and there is no apt-get "
            "to install them: install your system's"
        )
    on_progress(f"installing {names}")
    here = Path("/")
    _apt(["update"], here)
    done = _apt(["install", "-y", "--no-install-recommends", *packages], here)
    if done.returncode != 0:
        raise KubeletNodesUnsupported(f"`apt-get install {names}` failed: {_last_lines(done)}")
    if still := missing(_is_installed):
        raise KubeletNodesUnsupported(f"installed, and yet not found: {' '.join(still)}")


def _apt(arguments: Sequence[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **commands.environment(), "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        [*_APT_GET, *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )


def _is_installed(program: str) -> bool:
    return shutil.which(program, path=commands.environment()["PATH"]) is not None


def _last_lines(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join(done.stdout.splitlines()[-5:])
