"""The objects of a simulated API server, and what it answers to requests. No network, no time.

Objects are JSON and are never changed in place: each version is an object of its own, so that
watches can deliver old ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rekindle import names
from rekindle_operator.cluster.convert import rfc3339

Json = dict[str, Any]
Key = tuple[str, str]

BEGIN_UNIX_S = 1_800_000_000.0
"""Unix time at which a simulation begins, in seconds."""
PODS, NODES, LEASES, RECORDS, TOPOLOGIES = (
    "pods",
    "nodes",
    "leases",
    "configmaps",
    names.PLURAL,
)
OWNED = {
    "secrets": "Secret",
    "serviceaccounts": "ServiceAccount",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "poddisruptionbudgets": "PodDisruptionBudget",
}
"""Kinds of which the operator keeps an object for each topology."""
ADDED, MODIFIED, DELETED = "ADDED", "MODIFIED", "DELETED"


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """`path` may have a query."""

    verb: str
    path: str
    body: Any = None


@dataclass(frozen=True, slots=True)
class ApiResponse:
    status: int
    body: Json
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApiEvent:
    version: int
    type: str
    raw: Json


@dataclass(frozen=True, slots=True)
class _Target:
    plural: str
    namespace: str
    name: str
    subresource: str


class ApiObjects:
    """`on_change(plural, event)` is called after each change."""

    def __init__(
        self, now: Callable[[], float], on_change: Callable[[str, ApiEvent], None]
    ) -> None:
        self.version = 1
        self.events: defaultdict[str, list[ApiEvent]] = defaultdict(list)
        self._kinds: defaultdict[str, dict[Key, Json]] = defaultdict(dict)
        self._now = now
        self._on_change = on_change

    # --- for the control plane and kubelets -----------------------------------

    def all(self, plural: str) -> list[Json]:
        return list(self._kinds[plural].values())

    def find(self, plural: str, name: str, namespace: str = "default") -> Json | None:
        return self._kinds[plural].get((namespace, name))

    def add(self, plural: str, raw: Json) -> Json:
        meta = raw["metadata"]
        version = self.version + 1
        created = {
            "uid": f"uid-{version}",
            "creationTimestamp": rfc3339(BEGIN_UNIX_S + self._now()),
            **meta,
        }
        return self._store(plural, ADDED, {**raw, "metadata": created})

    def change(self, plural: str, raw: Json, **fields: Any) -> Json:
        """Replace fields of an object; `metadata` is merged."""
        meta = {**raw["metadata"], **fields.pop("metadata", {})}
        changed = {**raw, **fields, "metadata": meta}
        return raw if changed == raw else self._store(plural, MODIFIED, changed)

    def remove(self, plural: str, raw: Json) -> None:
        self._store(plural, DELETED, raw)

    def mark_deleted(self, plural: str, raw: Json) -> Json:
        """A kubelet ends the pod, and removes the object then."""
        marked = {"deletionTimestamp": rfc3339(BEGIN_UNIX_S + self._now())}
        return self.change(plural, raw, metadata=marked)

    def _store(self, plural: str, kind: str, raw: Json) -> Json:
        self.version += 1
        stored = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        key = _key(stored)
        if kind == DELETED:
            del self._kinds[plural][key]
        else:
            self._kinds[plural][key] = stored
        event = ApiEvent(self.version, kind, stored)
        self.events[plural].append(event)
        self._on_change(plural, event)
        return stored

    # --- for clients ----------------------------------------------------------

    def respond(self, request: ApiRequest) -> ApiResponse:
        url = urlsplit(request.path)
        target, query = _parse(url.path), parse_qs(url.query)
        found = self._kinds[target.plural].get((target.namespace, target.name))
        match request.verb:
            case "GET" if not target.name:
                return self._list(target, query.get("labelSelector", [""])[0])
            case "POST" if "dryRun" in query:
                return self._dry_run(target, request.body)
            case "POST":
                return self._create(target, request.body)
            case "PATCH" if isinstance(request.body, dict):
                return self._apply(target, found, request.body)
        if found is None:
            return _refused(404, "not found")
        match request.verb:
            case "GET":
                return ApiResponse(200, found)
            case "PUT":
                return self._replace(target, found, request.body)
            case "DELETE":
                return self._delete(target, found, request.body or {})
            case "PATCH":
                return self._patch(target, found, request.body)
        return _refused(405, f"{request.verb} is not simulated")

    def _list(self, target: _Target, selector: str) -> ApiResponse:
        items = [
            raw
            for (namespace, _), raw in self._kinds[target.plural].items()
            if target.namespace in ("", namespace) and matches(raw, selector)
        ]
        meta = {"resourceVersion": str(self.version)}
        return ApiResponse(200, {"kind": "List", "metadata": meta, "items": items})

    def _create(self, target: _Target, body: Json) -> ApiResponse:
        name = body["metadata"]["name"]
        if (target.namespace, name) in self._kinds[target.plural]:
            return _refused(409, f"{name} already exists")
        raw = copied(body)
        raw["metadata"]["namespace"] = target.namespace
        return ApiResponse(201, self.add(target.plural, raw))

    def _dry_run(self, target: _Target, body: Json) -> ApiResponse:
        """A RoleBinding needs its Role."""
        if (role := body.get("roleRef")) and (
            (target.namespace, role["name"]) not in self._kinds["roles"]
        ):
            return _refused(404, f"role {role['name']} not found")
        return ApiResponse(201, {**body})

    def _replace(self, target: _Target, found: Json, body: Json) -> ApiResponse:
        version = body["metadata"].get("resourceVersion")
        if version and version != found["metadata"]["resourceVersion"]:
            return _refused(409, "the object has been modified")
        fixed = {key: found["metadata"][key] for key in ("uid", "creationTimestamp")}
        raw = copied(body)
        raw["metadata"] = {**raw["metadata"], **fixed}
        return ApiResponse(200, self._store(target.plural, MODIFIED, raw))

    def _delete(self, target: _Target, found: Json, options: Json) -> ApiResponse:
        meta = found["metadata"]
        for key, expected in (options.get("preconditions") or {}).items():
            if meta[key] != expected:
                return _refused(409, f"the precondition {key} does not hold")
        grace_s = options.get("gracePeriodSeconds")
        waits = target.plural == PODS and grace_s != 0 and found["spec"].get("nodeName")
        if not waits:
            self.remove(target.plural, found)
            return ApiResponse(200, found)
        if meta.get("deletionTimestamp"):
            return ApiResponse(200, found)
        return ApiResponse(200, self.mark_deleted(target.plural, found))

    def _patch(self, target: _Target, found: Json, operations: list[Json]) -> ApiResponse:
        patched = apply_json_patch(found, operations)
        if patched is None:
            return _refused(422, "a test operation failed")
        return ApiResponse(200, self._store(target.plural, MODIFIED, patched))

    def _apply(self, target: _Target, found: Json | None, body: Json) -> ApiResponse:
        if target.plural != TOPOLOGIES:
            if found is None:
                raw = copied(body)
                raw["metadata"]["namespace"] = target.namespace
                return ApiResponse(201, self.add(target.plural, raw))
            return ApiResponse(200, self.change(target.plural, found, **_applied(found, body)))
        if found is None:
            return _refused(404, "not found")
        if body["metadata"].get("uid") != found["metadata"]["uid"]:
            return _refused(409, "another uid")
        version = body["metadata"].get("resourceVersion")
        if version and version != found["metadata"]["resourceVersion"]:
            return _refused(409, "the object has been modified")
        before = found.get("status") or {}
        status = applied_status(before, copied(body["status"]))
        if (reason := refused_by_rules(before, status)) is not None:
            return _refused(422, reason)
        return ApiResponse(200, self.change(TOPOLOGIES, found, status=status))


def _applied(found: Mapping[str, Any], body: Json) -> Json:
    """The fields of an object to which a client applies its own; one level deep."""
    return {
        key: {**found[key], **value} if isinstance(found.get(key), dict) else value
        for key, value in copied(body).items()
    }


def applied_status(before: Mapping[str, Any], applied: Json) -> Json:
    """Server-side apply: `dataPlane` is the coordinator's, all else the operator's."""
    if "dataPlane" in applied:
        return {**before, **applied}
    kept = {"dataPlane": before["dataPlane"]} if "dataPlane" in before else {}
    return {**applied, **kept}


def refused_by_rules(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The CEL rules of the CRD: neither fences nor incarnations decrease."""
    fences = [int((s.get("dataPlane") or {}).get("fence") or 0) for s in (before, after)]
    if fences[1] < fences[0]:
        return f"the fence decreases from {fences[0]} to {fences[1]}"
    earlier, later = (
        {s["slot"]: int(s["incarnation"]) for s in status.get("slots") or ()}
        for status in (before, after)
    )
    lower = [slot for slot, number in later.items() if number < earlier.get(slot, 0)]
    return f"the incarnation of {lower[0]} decreases" if lower else None


def apply_json_patch(raw: Json, operations: Iterable[Json]) -> Json | None:
    """A new object; None if a test of the patch fails."""
    changed: Json = copied(raw)
    for operation in operations:
        *parents, last = operation["path"].strip("/").split("/")
        place: Any = changed
        try:
            for step in parents:
                place = place[int(step)] if isinstance(place, list) else place[step]
            key: Any = int(last) if isinstance(place, list) else last
            match operation["op"]:
                case "test" if place[key] != operation["value"]:
                    return None
                case "remove":
                    del place[key]
                case "add":
                    place[key] = copied(operation["value"])
        except (KeyError, IndexError):
            return None
    return changed


def matches(raw: Mapping[str, Any], selector: str) -> bool:
    """A label selector: `key=value` and `key`, separated by commas."""
    labels = raw["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, has_value, value = term.partition("=")
        if key not in labels or (has_value and labels[key] != value):
            return False
    return True


def copied(value: Any) -> Any:
    """As `copy.deepcopy`, for JSON."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def decoded(body: Any) -> Any:
    """The body of a request of the official client, which may be JSON as text."""
    return json.loads(body) if isinstance(body, bytes | str) else body


def _parse(path: str) -> _Target:
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    plural, name, subresource = (*parts, "", "")[:3]
    return _Target(plural, namespace, name, subresource)


def _key(raw: Mapping[str, Any]) -> Key:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


def _refused(status: int, message: str) -> ApiResponse:
    return ApiResponse(status, {"kind": "Status", "message": message}, message)
