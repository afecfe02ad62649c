"""What a run creates in somebody's cluster, how it is found, and how it is removed.

Everything that is not inside one of the run's namespaces has the label of the run, or helm's
annotation with the namespace of the release. So the next run can remove what a killed one has left.
A Lease shows that a run is alive: what belongs to a run that is alive is not removed by others.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from rekindle import names
from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.harness.any_cluster import RELEASE
from rekindle_testing.harness.cluster_programs import ClusterNotUsable
from rekindle_testing.progress import OnProgress

LABEL_RUN = "harness.rekindle.dev/run"
CRD = f"{names.PLURAL}.{names.GROUP}"
LEASE = "rekindle-harness"
_RENEW_S = 10.0
_ALIVE_S = 60.0  # a run whose Lease was renewed within this time is alive
_CLUSTER_SCOPED_KINDS = "clusterroles,clusterrolebindings,priorityclasses"
_RELEASE_NAMESPACE_ANNOTATION = "meta.helm.sh/release-namespace"

Clock = Callable[[], datetime]


class Kubectl(Protocol):
    def __call__(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str: ...


class Helm(Protocol):
    def __call__(self, *arguments: str, timeout_s: float = 60) -> str: ...


@dataclass(frozen=True, slots=True)
class RunNames:
    """`id`: letters and digits; it is in the names of the run's namespaces."""

    id: str

    @property
    def namespace(self) -> str:
        return f"rekindle-e2e-{self.id}"

    @property
    def operator_namespace(self) -> str:
        return f"{self.namespace}-system"

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL_RUN: self.id}


class Heartbeat:
    """Renews the run's Lease until `stop`."""

    def __init__(self, kubectl: Kubectl, run: RunNames, holder: str, now: Clock) -> None:
        self._kubectl = kubectl
        self._run = run
        self._holder = holder
        self._now = now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._renew()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._stop.wait(_RENEW_S):
            # The next try follows.
            with contextlib.suppress(KubectlError, OSError, subprocess.TimeoutExpired):
                self._renew()

    def _renew(self) -> None:
        time = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": LEASE, "namespace": self._run.namespace},
            "spec": {"holderIdentity": self._holder, "renewTime": time},
        }
        self._kubectl("apply", "-f", "-", stdin=json.dumps(lease))


def items(kubectl: Kubectl, kinds: str, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kubectl("get", kinds, *arguments, "-o", "json"))[
        "items"
    ]
    return found


def earlier_runs(kubectl: Kubectl) -> list[RunNames]:
    """Runs of which anything is left."""
    kinds = f"namespaces,nodes,customresourcedefinitions,{_CLUSTER_SCOPED_KINDS}"
    found = set()
    for item in items(kubectl, kinds, "-l", LABEL_RUN):
        found.add(item["metadata"]["labels"][LABEL_RUN])
    for item in items(kubectl, _CLUSTER_SCOPED_KINDS, "-l", "app.kubernetes.io/managed-by=Helm"):
        namespace = item["metadata"].get("annotations", {}).get(_RELEASE_NAMESPACE_ANNOTATION, "")
        if namespace.startswith("rekindle-e2e-"):
            found.add(namespace.removeprefix("rekindle-e2e-").removesuffix("-system"))
    return [RunNames(run) for run in sorted(found)]


def refuse_if_alive(kubectl: Kubectl, run: RunNames, now: Clock) -> None:
    """Raises ClusterNotUsable while the process that started the run renews its Lease."""
    found = kubectl("get", "lease", LEASE, "-n", run.namespace, "--ignore-not-found", "-o", "json")
    if not found:
        return
    spec = json.loads(found)["spec"]
    age_s = (now() - datetime.fromisoformat(spec["renewTime"])).total_seconds()
    if age_s < _ALIVE_S:
        raise ClusterNotUsable(
            f"{spec['holderIdentity']} runs these tests in namespace {run.namespace}; its Lease "
            f"was renewed {age_s:.0f} s ago: wait for its end, or {_ALIVE_S:.0f} s if it was killed"
        )


def remove(kubectl: Kubectl, helm: Helm, run: RunNames, on_progress: OnProgress) -> None:
    """Can be repeated and interrupted. Topologies and the release are removed before their
    namespaces, since the name of the release's namespace is how its other objects are found."""
    for node in items(kubectl, "nodes", "-l", f"{LABEL_RUN}={run.id}"):
        on_progress(f"uncordoning {node['metadata']['name']}")
        kubectl("uncordon", node["metadata"]["name"])
        kubectl("label", "node", node["metadata"]["name"], f"{LABEL_RUN}-")
    if kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "name"):
        kubectl("delete", CRD, "--all", "-n", run.namespace, timeout_s=120)
    if RELEASE in helm("list", "--all", "--short", "--namespace", run.operator_namespace).split():
        on_progress(f"uninstalling the release in {run.operator_namespace}")
        options = ("--namespace", run.operator_namespace, "--wait", "--timeout", "90s")
        helm("uninstall", RELEASE, *options, timeout_s=120)
    for item in items(kubectl, _CLUSTER_SCOPED_KINDS):
        if (
            item["metadata"].get("annotations", {}).get(_RELEASE_NAMESPACE_ANNOTATION)
            == run.operator_namespace
        ):
            kubectl("delete", item["kind"], item["metadata"]["name"], "--ignore-not-found")
    on_progress(f"deleting the namespaces {run.namespace} and {run.operator_namespace}")
    namespaces = (run.namespace, run.operator_namespace)
    kubectl("delete", "namespace", *namespaces, "--ignore-not-found", timeout_s=300)
    _remove_crd(kubectl, run, on_progress)


def _remove_crd(kubectl: Kubectl, run: RunNames, on_progress: OnProgress) -> None:
    """Only if the run installed it; deleting it would delete all topologies."""
    if not kubectl("get", "crd", "-l", f"{LABEL_RUN}={run.id}", "-o", "name"):
        return
    others = {i["metadata"]["namespace"] for i in items(kubectl, CRD, "--all-namespaces")}
    if others:
        kubectl("label", "crd", CRD, f"{LABEL_RUN}-")
        on_progress(f"the CRD stays: there are topologies in {', '.join(sorted(others))}")
    else:
        kubectl("delete", "crd", CRD, "--ignore-not-found", timeout_s=120)
