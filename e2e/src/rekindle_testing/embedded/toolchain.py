"""The programs of the embedded cluster: found, or built into the cache.

`KUBEBUILDER_ASSETS` comes first, as with envtest, and PATH for kubectl and helm; what
is missing is built from the Go modules.  `python -m rekindle_testing.embedded.toolchain`
builds it and prints the paths, without what kubelet nodes alone need.  Decides which
programs are suitable; `go_modules` builds, and `java` finds Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from rekindle.directories import cache_root
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.go_modules import NODE_MODULE, Binary, build, find_go
from rekindle_testing.embedded.java import ensure_java
from rekindle_testing.progress import OnProgress, no_progress

__all__ = [
    "ControlPlaneBinaries",
    "NodeBinaries",
    "ensure_control_plane_binaries",
    "ensure_helm",
    "ensure_java",
    "ensure_kubelet_binaries",
]

_VERSION_PACKAGE = "k8s.io/component-base/version"
# Variables that the linker sets, and to which part of vMAJOR.MINOR.PATCH; None: all of it.
_VERSION_VARIABLES = (
    (f"{_VERSION_PACKAGE}.gitVersion", None),
    (f"{_VERSION_PACKAGE}.gitMajor", 0),
    (f"{_VERSION_PACKAGE}.gitMinor", 1),
)

KUBERNETES = Binary(
    name="kubernetes",
    package="./kubernetes",
    programs=("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"),
    versioned_by="k8s.io/kubernetes",
    version_variables=_VERSION_VARIABLES,
)
ETCD = Binary(
    name="etcd", package="./etcd", programs=("etcd",), versioned_by="go.etcd.io/etcd/server/v3"
)
HELM = Binary(
    name="helm",
    package="helm.sh/helm/v3/cmd/helm",
    programs=("helm",),
    versioned_by="helm.sh/helm/v3",
    version_variables=(("helm.sh/helm/v3/internal/version.version", None),),
)
NODE = Binary(
    name="node",
    package="./node",
    programs=("kubelet", "kube-proxy"),
    versioned_by="k8s.io/kubernetes",
    version_variables=_VERSION_VARIABLES,
    module=NODE_MODULE,
)
PAUSE = Binary(
    name="pause",
    package="./pause",
    programs=("pause",),
    versioned_by="k8s.io/kubernetes",
    module=NODE_MODULE,
)

_HELM_MINOR = 14  # the first with --reset-then-reuse-values
# Kubernetes supports a difference of one minor version between kubectl and the API
# server; for the commands of the tests two are enough.
_KUBECTL_SKEW = 2
_KUBERNETES_SERVERS = tuple(name for name in KUBERNETES.programs if name != "kubectl")


class ToolchainError(EmbeddedError):
    """A program is missing or does not fit the others."""


@dataclass(frozen=True, slots=True)
class ControlPlaneBinaries:
    etcd: Path
    kube_apiserver: Path
    kube_controller_manager: Path
    kube_scheduler: Path
    kubectl: Path


@dataclass(frozen=True, slots=True)
class NodeBinaries:
    """What a kubelet node needs besides Debian's packages."""

    kubelet: Path
    kube_proxy: Path
    pause: Path


def ensure_control_plane_binaries(
    on_progress: OnProgress = no_progress, environment: Mapping[str, str] | None = None
) -> ControlPlaneBinaries:
    """All programs of a control plane; builds for minutes when none are cached."""
    programs = _ensure(os.environ if environment is None else environment, on_progress)
    names = (field.name for field in fields(ControlPlaneBinaries))
    return ControlPlaneBinaries(*(programs[name.replace("_", "-")] for name in names))


def ensure_helm(
    on_progress: OnProgress = no_progress, environment: Mapping[str, str] | None = None
) -> Path:
    """The helm on PATH if it is a version 3.14 or later, else the pinned one."""
    environment = os.environ if environment is None else environment
    return (_suitable_helm(environment) or _ensure(environment, on_progress))["helm"]


def ensure_kubelet_binaries(
    on_progress: OnProgress = no_progress, environment: Mapping[str, str] | None = None
) -> NodeBinaries:
    """The programs of a kubelet node; builds for minutes when none are cached."""
    environment = os.environ if environment is None else environment
    cache = cache_root(environment)
    directory = build([NODE, PAUSE], find_go(environment, cache, on_progress), cache, on_progress)
    return NodeBinaries(directory / "kubelet", directory / "kube-proxy", directory / "pause")


def _ensure(environment: Mapping[str, str], on_progress: OnProgress) -> dict[str, Path]:
    """All programs; those that are not found are built by one call of `build`."""
    found = _from_assets(environment) | _suitable_helm(environment)
    missing = [name for name in _KUBERNETES_SERVERS if name not in found]
    if missing and "kube-apiserver" in found:
        _check_skew(found["kube-apiserver"], missing)
    if not missing and "kubectl" not in found:
        found |= _suitable_kubectl(environment)
    wanted = [b for b in (KUBERNETES, ETCD, HELM) if any(p not in found for p in b.programs)]
    if not wanted:
        return found
    cache = cache_root(environment)
    directory = build(wanted, find_go(environment, cache, on_progress), cache, on_progress)
    return {name: directory / name for b in wanted for name in b.programs} | found


def _from_assets(environment: Mapping[str, str]) -> dict[str, Path]:
    assets = environment.get("KUBEBUILDER_ASSETS")
    if not assets:
        return {}
    directory = Path(assets).absolute()
    if not directory.is_dir():
        raise ToolchainError(f"KUBEBUILDER_ASSETS is {assets}, which is not a directory")
    wanted = (*ETCD.programs, *KUBERNETES.programs)
    return {name: directory / name for name in wanted if os.access(directory / name, os.X_OK)}


def _check_skew(api_server: Path, missing: list[str]) -> None:
    api_server_minor = parse_minor(_output_of(str(api_server), "--version"))
    pinned = _pinned_minor()
    # Controllers must not be newer than the API server, and at most one older.
    if api_server_minor not in (pinned, pinned + 1):
        raise ToolchainError(
            f"KUBEBUILDER_ASSETS does not contain {', '.join(missing)}, and those built here are "
            f"1.{pinned}, which are not compatible with its kube-apiserver "
            f"(1.{api_server_minor}): use assets of 1.{pinned}, or unset KUBEBUILDER_ASSETS"
        )


def _suitable_helm(environment: Mapping[str, str]) -> dict[str, Path]:
    """The helm on PATH if it is a version 3 that has --reset-then-reuse-values."""
    program = shutil.which("helm", path=environment.get("PATH", ""))
    if program is None:
        return {}
    found = re.match(r"v3\.(\d+)\.", _output_of(program, "version", "--short"))
    return {"helm": Path(program)} if found and int(found[1]) >= _HELM_MINOR else {}


def _suitable_kubectl(environment: Mapping[str, str]) -> dict[str, Path]:
    """The kubectl on PATH, if it is near the pinned version."""
    program = shutil.which("kubectl", path=environment.get("PATH", ""))
    if program is None:
        return {}
    minor = parse_minor(_output_of(program, "version", "--client"))
    if minor is None or abs(minor - _pinned_minor()) > _KUBECTL_SKEW:
        return {}
    return {"kubectl": Path(program)}


def parse_minor(text: str) -> int | None:
    """34 from a text with v1.34.4 in it."""
    found = re.search(r"\bv1\.(\d+)\.", text)
    return int(found[1]) if found else None


def _pinned_minor() -> int:
    minor = parse_minor(KUBERNETES.version())
    assert minor is not None
    return minor


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def main() -> int:
    def on_progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        with ThreadPoolExecutor() as pool:
            java = pool.submit(ensure_java, on_progress)
            binaries = ensure_control_plane_binaries(on_progress)
            for field in fields(binaries):
                print(f"{field.name.replace('_', '-')}: {getattr(binaries, field.name)}")
            print(f"helm: {ensure_helm(on_progress)}")
            print(f"java: {java.result()}")
    except EmbeddedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
