"""The model cluster behind the Kubernetes API: the real executor acts on it, also with errors.

`ModelApi` responds to the calls that the executor makes; `ModelOperator` is snapshot, reconcile and
executor as the control loop joins them, on the model's clock.
"""

from __future__ import annotations

import copy
import json
import marshal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client
from model_cluster import ModelCluster
from model_objects import lease_json, node_json, topology_json

from rekindle import names
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.model import LeaseView, Snapshot
from rekindle_operator.execute import Executor
from rekindle_operator.loop import decide
from rekindle_operator.uncached_check import UncachedCheck

_OWNED = {
    "secrets": "Secret",
    "serviceaccounts": "ServiceAccount",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "poddisruptionbudgets": "PodDisruptionBudget",
    "leases": "Lease",
}


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: dict[str, Any]
    reason: str = ""

    def read(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class ApiError:
    """Calls with this verb (GET, POST, PATCH, DELETE) whose path contains `path` fail."""

    verb: str
    path: str
    status: int
    message: str = "refused by the test"


@dataclass
class ModelApi(client.ApiClient):
    """Serves pods, nodes, Leases and the status of topologies from `model`; accepts the rest."""

    model: ModelCluster
    errors: list[ApiError] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # "VERB path"
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def calls_of(self, verb: str, path: str = "") -> list[str]:
        return [c for c in self.calls if c.startswith(f"{verb} ") and path in c]

    def call_api(self, method: str, url: str, *args: Any, **_: Any) -> Any:
        path, query = urlsplit(url).path, urlsplit(url).query
        if "dryRun" in query:
            if path.endswith("/pods") and (full := self._over_quota(args[1])):
                return full
            return Response(200, {"kind": "Pod", "metadata": {}})
        self.calls.append(f"{method} {path}")
        for error in self.errors:
            if error.verb == method and error.path in path:
                return _refused(error.status, error.message)
        body: Any = args[1] if len(args) > 1 else None
        if isinstance(body, bytes):  # of server-side apply
            body = json.loads(body)
        collection, last = path.split("/")[-2:]
        named = collection in ("pods", "nodes", "leases")
        owned = _OWNED.get(collection)
        if method == "GET" and last == "pods":
            return self._list_pods(path.split("/")[-2], query)
        if owned is not None:
            return self._owned(method, owned, last, body)
        match method, collection if named else last:
            case "GET", "pods":
                return self._found(self.model.raw_pods.get(last), "Pod")
            case "GET", "nodes":
                node = self.model.nodes.get(last)
                return self._found(node_json(node) if node is not None else None, "Node")
            case "GET", _ if collection == names.PLURAL:
                view = self.model.topologies.get(last)
                return self._found(topology_json(view) if view is not None else None, names.KIND)
            case "POST", "pods":
                return self._create_pod(body)
            case "DELETE", "pods":
                return self._delete_pod(last, body or {})
            case "PATCH", "pods":
                return self._patch_pod(last, body)
            case "PATCH", "status":
                version = topology_json(self.model.topologies[collection])["metadata"]
                if body["metadata"]["resourceVersion"] != version["resourceVersion"]:
                    return _refused(409, "the object has been modified")
                self.model.write_status(collection, dict(body["status"]))
                return Response(200, topology_json(self.model.topologies[collection]))
            case "POST", "events":
                self.events.append(body)
            case "POST", "configmaps":
                self.model.put_record(copy.deepcopy(body))
            case "GET", _:
                return _refused(404, "not found")
        return Response(200, {"kind": "Status", "metadata": {}})

    def _found(self, raw: dict[str, Any] | None, kind: str) -> Response:
        if raw is None:
            return _refused(404, "not found")
        return Response(200, {**copy.deepcopy(raw), "kind": kind})

    def _list_pods(self, namespace: str, query: str) -> Response:
        name = query.rpartition("%3D")[2]
        items = [
            raw
            for raw in self.model.raw_pods.values()
            if raw["metadata"]["namespace"] == namespace
            and raw["metadata"]["labels"].get(names.LABEL_TOPOLOGY) == name
        ]
        return Response(200, copy.deepcopy({"kind": "PodList", "metadata": {}, "items": items}))

    def _create_pod(self, manifest: dict[str, Any]) -> Response:
        name = manifest["metadata"]["name"]
        if full := self._over_quota(manifest):
            return full
        if name in self.model.raw_pods:
            return _refused(409, "already exists")
        self.model.create_pod(copy.deepcopy(manifest))
        return self._found(self.model.raw_pods[name], "Pod")

    def _over_quota(self, manifest: dict[str, Any]) -> Response | None:
        message = self.model.quota_refusal()
        name = manifest["metadata"]["name"]
        return _refused(403, f'pods "{name}" is forbidden: {message}') if message else None

    def _delete_pod(self, name: str, options: dict[str, Any]) -> Response:
        raw = self.model.raw_pods.get(name)
        if raw is None:
            return _refused(404, "not found")
        for key, expected in (options.get("preconditions") or {}).items():
            if raw["metadata"][key] != expected:
                return _refused(409, f"precondition {key}")
        before = copy.deepcopy(raw)
        self.model.delete_pod(name, raw["metadata"]["uid"], options.get("gracePeriodSeconds"))
        return self._found(self.model.raw_pods.get(name, before), "Pod")

    def _patch_pod(self, name: str, patch: list[dict[str, Any]]) -> Response:
        raw = self.model.raw_pods.get(name)
        if raw is None:
            return _refused(404, "not found")
        if not raw["spec"].get("schedulingGates"):
            return _refused(422, "the test operation failed")
        self.model.patch_pod(name, patch)
        return self._found(raw, "Pod")

    def _owned(self, method: str, kind: str, name: str, body: Any) -> Response:
        """GET, and server-side apply, which keeps the version of an object that it leaves as it
        is."""
        if kind == "Lease":
            if method == "PATCH":
                version = self.model.next_version()
                fresh = LeaseView("default", name, version, "", self.model.now)
                self.model.leases.setdefault(name, fresh)
            lease = self.model.leases.get(name)
            return self._found(lease_json(lease) if lease is not None else None, kind)
        found = self.model.owned.get((kind, name))
        if method == "PATCH":
            old = found or {"metadata": {}}
            raw = {**old, **copy.deepcopy(body)}
            raw["metadata"] = {**old["metadata"], **raw["metadata"]}
            if old.get("immutable") and (raw["data"] != old["data"] or not raw["immutable"]):
                return _refused(422, "data: Forbidden: field is immutable when `immutable` is set")
            if raw != old:
                raw["metadata"]["resourceVersion"] = str(self.model.next_version())
                self.model.put_owned(raw)
            found = raw
        return self._found(found, kind)


class ModelOperator:
    def __init__(self, model: ModelCluster) -> None:
        self.model = model
        self._delivered: dict[str, Any] = {}  # kind -> the newest content that the cache has got
        self.api = ModelApi(model)
        # Without a clock for watches: they are not silent, however long a test runs.
        self.cache = ClusterCache(self.api, None, lambda: model.now, monotonic=lambda: 0.0)
        self.uncached = UncachedCheck(self.api, self.cache, stall_s=2.0)
        self.executor = Executor(
            self.api,
            self.cache,
            identity="me",
            status_interval_s=2.0,
            clock=lambda: model.now,
            may_act=lambda: True,
        )

    def snapshot(self) -> Snapshot:
        """The cache's objects, with silence and probes of the model."""
        known, model = self.cache.snapshot(), self.model
        return replace(
            known,
            suspects_silent_since=dict(model.suspects_silent_since),
            kubelet_probes=model.kubelet_probes(),
            pod_probes=model.pod_probes(model.pods()),
        )

    def deliver(self) -> None:
        """Send all changes to the cache, except for kinds with a stalled watch."""
        model, version = self.model, self.model.version
        raw_pods = list(model.raw_pods.values())
        nodes, leases = tuple(model.nodes.values()), tuple(model.leases.values())
        topologies, records = tuple(model.topologies.values()), [*model.generation_records.values()]
        owned = [*model.owned.values()]
        deliveries: dict[str, tuple[Any, Callable[[], None]]] = {
            kind: (
                (of_kind := [_list_item(raw) for raw in owned if raw["kind"] == kind]),
                partial(mirror.replace, of_kind, version),
            )
            for kind, mirror in self.cache.owned.items()
        }
        deliveries |= {
            "pods": (
                marshal.dumps(raw_pods),  # they are changed in place
                lambda: self.cache.pods.replace(raw_pods, version),
            ),
            "nodes": (
                nodes,
                lambda: self.cache.nodes.replace([node_json(n) for n in nodes], version),
            ),
            "leases": (
                leases,
                lambda: self.cache.leases.replace([lease_json(x) for x in leases], version),
            ),
            "topologies": (
                topologies,
                lambda: self.cache.topologies.replace(
                    [topology_json(t) for t in topologies], version
                ),
            ),
            "generation records": (
                records,
                lambda: self.cache.generation_records.replace(records, version),
            ),
        }
        for kind, (content, deliver) in deliveries.items():
            if kind in model.views_of_stalled_watches or self._delivered.get(kind) == content:
                continue
            deliver()
            self._delivered[kind] = content

    def run_pass(self) -> None:
        self.deliver()
        model = self.model
        _, decisions = decide(self.snapshot, self.uncached, lambda: model.now, model.settings)
        self.executor.run(decisions)
        model.kubelets_and_scheduler()

    def run(self, seconds: float, step_s: float = 0.5) -> None:
        """Run passes for so many seconds of model time."""
        for _ in range(max(1, round(seconds / step_s))):
            self.run_pass()
            self.model.pass_time(step_s)


def _list_item(raw: dict[str, Any]) -> dict[str, Any]:
    """As in a list of one kind: the list has its kind and version."""
    return {k: v for k, v in raw.items() if k not in ("apiVersion", "kind")}


def _refused(status: int, message: str) -> Response:
    return Response(status, {"kind": "Status", "message": message}, message)
