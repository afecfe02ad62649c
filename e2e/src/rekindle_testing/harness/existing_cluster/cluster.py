"""Rekindle on a cluster that a KUBECONFIG names, in namespaces of its own.

It uses the API alone: kubectl, helm, pods. It refuses a cluster that it would disturb, and removes
all that it has made. If a run is killed, the next run removes what it has left.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.harness.any_cluster import CHART, Cluster, UnsupportedByCluster
from rekindle_testing.harness.cluster_programs import (
    ClusterNotUsable,
    ClusterPrograms,
    find_kubectl,
    run,
)
from rekindle_testing.harness.existing_cluster import leftovers
from rekindle_testing.harness.existing_cluster.leftovers import CRD, Heartbeat, RunNames, items
from rekindle_testing.harness.existing_cluster.nodes import NO_MACHINES, ExistingNode
from rekindle_testing.harness.existing_cluster.settings import ExistingClusterSettings
from rekindle_testing.harness.existing_cluster.transfer import Volume
from rekindle_testing.progress import OnProgress, no_progress
from rekindle_testing.waiting import wait_for

_OPERATOR = "app.kubernetes.io/name=rekindle-operator"
_MIN_NODES = 2
_VOLUME_TIMEOUT_S = 300  # provisioning, and the first pull of an image


class ExistingCluster(Cluster):
    """From `start` (or `with`) to `stop`."""

    nodes: dict[str, ExistingNode]

    def __init__(
        self,
        directory: Path,
        settings: ExistingClusterSettings,
        on_progress: OnProgress = no_progress,
    ) -> None:
        self.directory = directory
        self.shared = directory / "copy-of-volume"
        self.nodes = {}
        self._settings = settings
        self._on_progress = on_progress
        self._run = RunNames(secrets.token_hex(3))
        self.namespace, self.operator_namespace = self._run.namespace, self._run.operator_namespace
        self._volume: Volume | None = None
        self._cleanup = contextlib.ExitStack()
        self._programs = ClusterPrograms(self.kubeconfig)

    # -- lifecycle ----------------------------------------------------------------------------

    def start(self) -> None:
        self.shared.mkdir(parents=True, exist_ok=True)
        # A file of our own with one context: a later change of KUBECONFIG or of the current context
        # must not redirect this run to another cluster.
        self._cleanup.callback(self.kubeconfig.unlink, missing_ok=True)
        try:
            self._write_kubeconfig()
            self._connect()
            self._remove_earlier()
            self._refuse_if_unsuitable()
            self._cleanup.callback(self._remove)
            for namespace in (self.namespace, self.operator_namespace):
                self.create_restricted_namespace(namespace, self._run.labels)
            holder = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
            heartbeat = Heartbeat(self.kubectl, self._run, holder, _now)
            heartbeat.start()
            self._cleanup.callback(heartbeat.stop)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove all that was made; after an error the rest is still removed."""
        self._cleanup.close()

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def _write_kubeconfig(self) -> None:
        given = {**os.environ, "KUBECONFIG": self._settings.kubeconfig}
        view = ("config", "view", "--raw", "--minify", "--flatten")
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(run((find_kubectl(), *view), given))
        self.kubectl("config", "set-context", "--current", f"--namespace={self.namespace}")
        context = self.kubectl("config", "current-context").strip()
        server = self.kubectl("config", "view", "-o", "jsonpath={.clusters[0].cluster.server}")
        self._on_progress(f"existing cluster {context} at {server}, namespace {self.namespace}")

    def _remove_earlier(self) -> None:
        for earlier in leftovers.earlier_runs(self.kubectl):
            leftovers.refuse_if_alive(self.kubectl, earlier, _now)
            self._on_progress(f"removing what an earlier run left: {earlier.id}")
            leftovers.remove(self.kubectl, self._programs.helm, earlier, self._on_progress)

    def _remove(self) -> None:
        if self._volume is not None:
            # A volume that was not provisioned for the claim is not deleted with it.
            try:
                self._delete_topologies()
                self._volume.clear()
            except Exception as error:  # all else is still removed
                self._on_progress(f"files may be left on the volume: {error}")
        leftovers.remove(self.kubectl, self._programs.helm, self._run, self._on_progress)

    def _delete_topologies(self) -> None:
        self.kubectl("delete", CRD, "--all", "-n", self.namespace, timeout_s=120)
        wait_for("the pods of topologies to be deleted", lambda: not self.pods(), 120, every_s=0.5)

    # -- whether it may be used ---------------------------------------------------------------

    def _refuse_if_unsuitable(self) -> None:
        for role in items(self.kubectl, "clusterroles", "-l", _OPERATOR):
            if any("rekindle.dev" in rule.get("apiGroups", ()) for rule in role.get("rules") or ()):
                owner = (
                    role["metadata"].get("annotations", {}).get("meta.helm.sh/release-namespace")
                )
                raise ClusterNotUsable(
                    f"the Rekindle in namespace {owner} watches all namespaces, and a second "
                    "operator for a topology is not allowed: use another cluster"
                )
        self._refuse_other_crd()
        for node in items(self.kubectl, "nodes"):
            if _takes_pods(node):
                name = node["metadata"]["name"]
                self.nodes[name] = ExistingNode(name, self._run, self.kubectl, self.core_api)
        if len(self.nodes) < _MIN_NODES:
            raise ClusterNotUsable(
                f"{len(self.nodes)} nodes take pods, and replicas need {_MIN_NODES}: uncordon or "
                "add nodes"
            )
        if not self.kubectl(
            *("get", "storageclass", self._settings.storage_class),
            *("--ignore-not-found", "-o", "name"),
        ):
            raise ClusterNotUsable(
                f"there is no StorageClass {self._settings.storage_class}: set STORAGE_CLASS to "
                "one of `kubectl get storageclass`"
            )

    def _refuse_other_crd(self) -> None:
        found = self.kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "json")
        if not found:
            return
        applied = self.kubectl(
            *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "json"),
            *("-f", str(CHART / "crds")),
        )
        if json.loads(applied)["spec"]["versions"] != json.loads(found)["spec"]["versions"]:
            raise ClusterNotUsable(
                f"the cluster has a {CRD} of another release of Rekindle: use another cluster, or "
                "tests of that release"
            )

    # -- Rekindle -----------------------------------------------------------------------------

    @property
    def images(self) -> tuple[str, str]:
        return self._settings.operator_image, self._settings.pipelines_image

    def install(self, timeout_s: float = 300) -> None:
        """With time to pull images. The CRD, if there is none, gets the label of the run."""
        if not self.kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "name"):
            (file,) = (CHART / "crds").glob("*.yaml")
            crd = yaml.safe_load(file.read_text())
            crd["metadata"].setdefault("labels", {}).update(self._run.labels)
            self.kubectl("create", "-f", "-", stdin=json.dumps(crd))
            wait_for("the CRD to be served", self._is_crd_served, 60, every_s=0.25)
        super().install(timeout_s)

    def _is_crd_served(self) -> bool:
        """`kubectl wait` fails while a new CRD has no conditions."""
        try:
            self.kubectl("get", CRD)
        except KubectlError:
            return False
        return True

    def _install_options(self) -> list[str]:
        return ["--skip-crds", "--set", f"watchNamespace={self.namespace}"]

    def apply(self, *manifests: dict[str, Any]) -> None:
        super().apply(*(with_fs_group(m, self._settings.fs_group) for m in manifests))

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        return self._programs.kubectl(*arguments, stdin=stdin, timeout_s=timeout_s)

    # -- the volume ---------------------------------------------------------------------------

    def create_claim(self, name: str) -> None:
        """Create a claim of the StorageClass. Refuses a volume that has files already."""
        claim: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": self._settings.storage_class,
                "resources": {"requests": {"storage": "10Gi"}},
            },
        }
        self.apply(claim)
        volume = Volume(
            self.core_api,
            self.namespace,
            name,
            self._settings.pipelines_image,
            lambda pod: self.kubectl("logs", pod, timeout_s=120),
            fs_group=self._settings.fs_group,
            timeout_s=_VOLUME_TIMEOUT_S,
        )
        # The pod that lists the files also binds the claim, if its class waits for a consumer.
        if entries := volume.entries():
            raise ClusterNotUsable(
                f"the volume of claim {name} is not empty ({', '.join(entries[:5])}): delete its "
                "files, or set STORAGE_CLASS to a class that provisions new volumes"
            )
        self._volume = volume

    def upload(self, path: str) -> None:
        self._made_volume.write(self.shared, path)

    def download(self, path: str) -> None:
        self._made_volume.read(path, self.shared)

    def move(self, path: str, to: str) -> None:
        self._made_volume.move(path, to)

    @property
    def _made_volume(self) -> Volume:
        assert self._volume is not None, "create_claim was called"
        return self._volume

    # -- nodes --------------------------------------------------------------------------------

    def uncordon(self, node: str) -> None:
        self.nodes[node].uncordon()

    def add_node(self) -> str:
        raise UnsupportedByCluster(f"no node can be added: {NO_MACHINES}")

    def kill_nodes(self, names: list[str]) -> None:
        raise UnsupportedByCluster(f"nodes cannot be killed: {NO_MACHINES}")

    def kill_processes(self, pod: Any) -> None:
        raise UnsupportedByCluster(f"processes of a pod cannot be killed: {NO_MACHINES}")


def with_fs_group(manifest: dict[str, Any], group: int | None) -> dict[str, Any]:
    """If the manifest is a topology, a copy whose pods have this group, unless it names one."""
    if group is None or manifest["kind"] != "StreamTopology":
        return manifest
    copy: dict[str, Any] = json.loads(json.dumps(manifest))
    pod = copy["spec"].setdefault("podTemplate", {}).setdefault("spec", {})
    pod.setdefault("securityContext", {}).setdefault("fsGroup", group)
    return copy


def _takes_pods(node: dict[str, Any]) -> bool:
    spec, conditions = node["spec"], node["status"].get("conditions", ())
    taints = [t for t in spec.get("taints", ()) if t["effect"] in ("NoSchedule", "NoExecute")]
    ready = any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)
    return ready and not taints and not spec.get("unschedulable", False)


def _now() -> datetime:
    return datetime.now(UTC)
