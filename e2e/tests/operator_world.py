"""Fixtures of the operator's API tests: nodes and a data plane that only exist in the API.

Everything else is real: API server, scheduler, controllers, and the operator as a process.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from rekindle import names
from rekindle_testing.embedded.pki import CertificateAuthority
from rekindle_testing.fixtures.api_fields import name_of, required
from rekindle_testing.waiting import wait_for

START_S = 60.0  # start of the process on a busy machine
_UPDATE_INTERVAL_S = 0.25
_HEARTBEAT_S = 1.0


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Kubelet:
    """A port that completes TLS handshakes, until it `hangs`."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.hangs = False
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            if self.hangs:
                self._held.append(connection)
                continue
            connection.settimeout(2)
            try:
                self._tls.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()
        for connection in self._held:
            connection.close()


class World:
    """A control plane with fake nodes, and fake coordinators and tasks on them.

    One thread plays kubelets (pods run at once, terminating ones end), and the data plane (the
    newest coordinator renews its Lease and reports every running task as Live).
    """

    def __init__(self, kubeconfig: Path, directory: Path, namespace: str) -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        own = CertificateAuthority.create(directory / "kubelets", "kubelets").pair
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(own.certificate, own.key)
        self.kubelets: dict[str, Kubelet] = {}
        self._claims: list[str] = []
        api: Any = config.new_client_from_config(str(kubeconfig))  # type: ignore[no-untyped-call]  # the client has no types for it
        self.core = client.CoreV1Api(api)
        self.custom = client.CustomObjectsApi(api)
        self.coordination = client.CoordinationV1Api(api)
        body: Any = {"metadata": {"name": namespace}}
        self.core.create_namespace(body)
        self._alive: set[str] = set()  # names of nodes that send heartbeats and run pods
        self.silent: set[str] = set()  # pods that do not respond to the coordinator
        self.coordinator_isolated = False  # no pod responds to its polls
        self.coordinators_run = True
        self._lease_renewed_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._update_until_closed, daemon=True)
        self._thread.start()

    def close(self) -> None:
        for name in list(self.kubelets):
            self.remove_node(name)
        self._stop.set()
        self._thread.join(10)
        self.core.delete_namespace(self.namespace)
        for claim in self._claims:
            self.core.delete_persistent_volume(claim)

    # --- nodes ----------------------------------------------------------------

    def add_node(self, name: str, cpu: str = "4", memory: str = "8Gi") -> None:
        labels = {"kubernetes.io/hostname": name}
        node: Any = {"metadata": {"name": name, "labels": labels}}
        self.core.create_node(node)
        lease: Any = {
            "metadata": {"name": name},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 4, "renewTime": now_text()},
        }
        try:
            self.coordination.create_namespaced_lease("kube-node-lease", lease)
        except ApiException as error:
            if error.status != 409:
                raise
        amounts = {"cpu": cpu, "memory": memory, "pods": "50"}
        self.kubelets[name] = Kubelet(self._tls)
        facts = {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.kubelets[name].port}},
        }
        self._set_ready(name, "True", facts)
        self._alive.add(name)
        wait_for(f"{name} is free of taints", lambda: self._is_untainted(name))

    def kill_node_until_not_ready(self, name: str) -> None:
        """Let a node be without heartbeats, and NotReady."""
        self.kill_node_still_ready(name)
        self._set_ready(name, "Unknown")

    def set_not_ready(self, *names: str) -> None:
        """NotReady, while all pods on them keep running."""
        for name in names:
            self._set_ready(name, "Unknown")

    def set_ready(self, *names: str) -> None:
        for name in names:
            self._set_ready(name, "True")
        for name in names:
            wait_for(f"{name} is free of taints", partial(self._is_untainted, name))

    def _is_untainted(self, name: str) -> bool:
        return not required(self.core.read_node(name).spec).taints

    def kill_node_still_ready(self, name: str) -> None:
        """Let a node be without heartbeats, and still Ready; its pods and kubelet are silent."""
        self._alive.discard(name)
        self.kubelets[name].hangs = True

    def remove_node(self, name: str) -> None:
        self._alive.discard(name)
        self.core.delete_node(name)
        self.kubelets.pop(name).close()

    def _set_ready(self, name: str, status: str, more: dict[str, Any] | None = None) -> None:
        stamp = now_text()
        ready = {
            "type": "Ready",
            "status": status,
            "reason": "Test",
            "lastHeartbeatTime": stamp,
            "lastTransitionTime": stamp,
        }
        body = {"status": {"conditions": [ready], **(more or {})}}
        self.core.patch_node_status(name, body)

    def add_volume(self, claim: str, path: Path) -> None:
        """A hostPath volume bound to a claim: what `checkpoint.volume` names."""
        volume: Any = {
            "metadata": {"name": claim},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "hostPath": {"path": str(path)},
                "claimRef": {"namespace": self.namespace, "name": claim},
            },
        }
        wanted: Any = {
            "metadata": {"name": claim},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": claim,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        self.core.create_persistent_volume(volume)
        self._claims.append(claim)
        self.core.create_namespaced_persistent_volume_claim(self.namespace, wanted)
        claims = self.core.read_namespaced_persistent_volume_claim
        wait_for(
            "the claim is bound",
            lambda: required(claims(claim, self.namespace).status).phase == "Bound",
        )

    # --- topologies -----------------------------------------------------------

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        created: Any = self.custom.create_namespaced_custom_object(
            names.GROUP, names.VERSION, self.namespace, names.PLURAL, manifest
        )
        return dict(created)

    def edit(self, name: str, change: Callable[[dict[str, Any]], None]) -> int:
        """Returns the new generation. The operator writes too: conflicts are retried."""

        def attempt() -> Any:
            manifest = self.topology(name)
            change(manifest["spec"])
            try:
                return self.custom.replace_namespaced_custom_object(
                    names.GROUP, names.VERSION, self.namespace, names.PLURAL, name, manifest
                )
            except ApiException as error:
                if error.status != 409:
                    raise
                return None

        return int(wait_for(f"{name} to be edited", attempt)["metadata"]["generation"])

    def topology(self, name: str) -> dict[str, Any]:
        found: Any = self.custom.get_namespaced_custom_object(
            names.GROUP, names.VERSION, self.namespace, names.PLURAL, name
        )
        return dict(found)

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.topology(name).get("status") or {})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.status(name).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def delete(self, name: str, policy: str) -> None:
        options: Any = {"propagationPolicy": policy}
        self.custom.delete_namespaced_custom_object(
            names.GROUP,
            names.VERSION,
            self.namespace,
            names.PLURAL,
            name,
            body=options,
        )

    def pods(self, name: str, role: str = "task") -> dict[str, Any]:
        selector = f"{names.LABEL_TOPOLOGY}={name},{names.LABEL_ROLE}={role}"
        listed = self.core.list_namespaced_pod(self.namespace, label_selector=selector)
        return {name_of(pod): pod for pod in listed.items}

    def uids(self, name: str) -> set[str]:
        return {pod.metadata.uid for pod in self.pods(name).values()}

    def event_reasons(self, name: str) -> list[str]:
        return [event["reason"] for event in self.events(name)]

    def events(self, name: str) -> list[dict[str, Any]]:
        # As JSON: the client's class refuses the Events of others, whose eventTime is null.
        listed: Any = self.core.list_namespaced_event(self.namespace, _preload_content=False)
        events = json.loads(listed.data)["items"]
        return [e for e in events if e["involvedObject"].get("name") == name]

    def remaining_objects(self, name: str) -> list[str]:
        selector = f"{names.LABEL_TOPOLOGY}={name}"
        rbac = client.RbacAuthorizationV1Api(self.core.api_client)
        lists: list[Callable[..., Any]] = [
            self.core.list_namespaced_pod,
            self.core.list_namespaced_config_map,
            self.core.list_namespaced_service_account,
            self.coordination.list_namespaced_lease,
            rbac.list_namespaced_role,
            rbac.list_namespaced_role_binding,
        ]
        return [
            f"{item.kind or type(item).__name__} {item.metadata.name}"
            for call in lists
            for item in call(self.namespace, label_selector=selector).items
        ]

    # --- kubelets and the data plane ------------------------------------------

    def _update_until_closed(self) -> None:
        while not self._stop.wait(_UPDATE_INTERVAL_S):
            try:
                self._update()
            except (ApiException, urllib3.exceptions.HTTPError) as error:
                print("the fake data plane is refused:", error, file=sys.stderr)

    def _update(self) -> None:
        if time.monotonic() - self._lease_renewed_at >= _HEARTBEAT_S:
            self._lease_renewed_at = time.monotonic()
            for node in list(self._alive):
                body = {"spec": {"renewTime": now_text()}}
                self.coordination.patch_namespaced_lease(node, "kube-node-lease", body)
        pods: list[Any] = self.core.list_namespaced_pod(self.namespace).items
        for pod in pods:
            if pod.spec.node_name in self._alive:
                self._run(pod)
        if self.coordinators_run:
            for name in {p.metadata.labels.get(names.LABEL_TOPOLOGY) for p in pods} - {None}:
                self._coordinate(name, pods)

    def _run(self, pod: Any) -> None:
        name = pod.metadata.name
        if pod.metadata.deletion_timestamp:
            _unless_gone(
                lambda: self.core.delete_namespaced_pod(
                    name, self.namespace, grace_period_seconds=0
                )
            )
        elif pod.status.phase != "Running":
            conditions = [{"type": "Ready", "status": "True"}]
            body = {"status": {"phase": "Running", "podIP": "127.1.1.1", "conditions": conditions}}
            _unless_gone(lambda: self.core.patch_namespaced_pod_status(name, self.namespace, body))

    def _coordinate(self, topology: str, pods: list[Any]) -> None:
        own = [p for p in pods if p.metadata.labels.get(names.LABEL_TOPOLOGY) == topology]
        by_role: dict[str, list[Any]] = {"task": [], "coordinator": []}
        for pod in own:
            if pod.status.phase == "Running":
                by_role[pod.metadata.labels[names.LABEL_ROLE]].append(pod)
        coordinators = [p for p in by_role["coordinator"] if p.spec.node_name in self._alive]
        if not coordinators:
            return
        fence = max(int(p.metadata.labels[names.LABEL_INCARNATION]) for p in coordinators)
        lease = {"spec": {"holderIdentity": str(fence), "renewTime": now_text()}}
        _unless_gone(
            lambda: self.coordination.patch_namespaced_lease(
                f"{topology}-coordinator", self.namespace, lease
            )
        )
        self._report(topology, fence, by_role["task"])

    def _report(self, topology: str, fence: int, pods: list[Any]) -> None:
        tasks: dict[str, dict[str, Any]] = {}
        for pod in pods:
            label = {k.split("/")[-1]: v for k, v in pod.metadata.labels.items()}
            slot = f"{label['segment']}/{label['partition']}/{label['replica']}"
            incarnation = int(label["incarnation"])
            if incarnation > tasks.get(slot, {}).get("incarnation", 0):
                frozen = pod.spec.node_name not in self._alive
                silent = self.coordinator_isolated or frozen or pod.metadata.name in self.silent
                tasks[slot] = {
                    "slot": slot,
                    "incarnation": incarnation,
                    "phase": "Live",
                    "suspected": silent,
                    "stableEpoch": 7,
                }
        data_plane = {"fence": fence, "generation": 1, "tasks": list(tasks.values())}
        view = self.custom_or_none(topology)
        if view is None:
            return
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": topology, "uid": view["metadata"]["uid"]},
            "status": {"dataPlane": data_plane},
        }
        if view.get("status", {}).get("dataPlane") != data_plane:
            namespace = f"/apis/{names.API_VERSION}/namespaces/{self.namespace}"
            self._apply(f"{namespace}/{names.PLURAL}/{topology}/status", body)

    def _apply(self, path: str, body: dict[str, Any]) -> None:
        request = self.core.api_client.param_serialize(
            "PATCH",
            path,
            query_params=[("fieldManager", "rekindle-coordinator"), ("force", "true")],
            header_params={"Content-Type": "application/apply-patch+yaml"},
            body=body,
        )
        response = self.core.api_client.call_api(*request)
        text = response.read()
        if response.status not in (200, 201, 404, 409):
            raise ApiException(status=response.status, reason=str(text))

    def custom_or_none(self, name: str) -> dict[str, Any] | None:
        """The topology; None if it does not exist."""
        try:
            return self.topology(name)
        except ApiException as error:
            if error.status != 404:
                raise
            return None


def _unless_gone(call: Callable[[], object]) -> None:
    try:
        call()
    except ApiException as error:
        if error.status not in (404, 409):
            raise
