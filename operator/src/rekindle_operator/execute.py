"""Executes actions. The only module that writes to Kubernetes. Decides nothing.

Order and retries are in `dispatch`. A pod that is refused (a full quota), or of which it is not
known whether it was created, is remembered with its incarnation (`cluster.uncreated_pods`).

Design: docs/design/recovery.md#order-of-actions.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, assert_never

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from rekindle import names
from rekindle.errors import Problem
from rekindle_operator import tokens
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.calls import call
from rekindle_operator.cluster.convert import pod_requests
from rekindle_operator.cluster.model import DryRunResult
from rekindle_operator.dispatch import WORKERS, Dispatcher, NotLeading, Outcome
from rekindle_operator.metrics import ACTIONS
from rekindle_operator.reconcile.actions import (
    METRIC_KINDS,
    Action,
    AvoidNode,
    CreateGenerationRecord,
    CreatePlaceholder,
    CreatePod,
    DeleteGenerationRecord,
    DeletePod,
    DryRun,
    EmitEvent,
    EnsureObject,
    GiveSlot,
    OpenGate,
    QuarantineNode,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.reconcile.schedule import ScheduledAction, schedule
from rekindle_operator.reconcile.status import only_reservations, operator_fields
from rekindle_operator.resources.common import Manifest
from rekindle_operator.retries import Retries

_STATUS_ATTEMPTS = 8
"""To write a status while only the coordinator's part of it changes. A coordinator pauses for 0.2 s
after each report: if so many reports in a row come between a read and its write, the API server is
slow, or the coordinator does not pause."""
_JSON_PATCH = "application/json-patch+json"
_APPLY = "application/apply-patch+yaml"

logger = logging.getLogger(__name__)


class Executor:
    """`on_refused_status` is called when the API server refuses a status: the CRD may have become
    older. `draw` gives numbers from 0 to 1, for the jitter of retries; actions run in `pool`."""

    def __init__(
        self,
        api: client.ApiClient,
        cluster: ClusterCache,
        identity: str,
        status_interval_s: float,
        clock: Callable[[], float],
        may_act: Callable[[], bool],
        workers: int = WORKERS,
        on_refused_status: Callable[[], None] = lambda: None,
        draw: Callable[[], float] = random.random,
        pool: concurrent.futures.Executor | None = None,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._status_interval_s = status_interval_s
        self._on_refused_status = on_refused_status
        self._clock = clock
        self._may_act = may_act
        self._api = api
        self._status_at: dict[str, float] = {}  # by the topology's uid
        self._dispatcher = Dispatcher(
            self._attempt, self._skipped, clock, may_act, Retries(draw), workers, pool=pool
        )

    def run(self, decisions: Iterable[TopologyActions]) -> None:
        self._dispatcher.run(schedule(decisions))

    def forget_events(self) -> None:
        """Those that were not written in an earlier term."""
        self._dispatcher.forget_events()

    def _attempt(self, scheduled: ScheduledAction) -> Outcome:
        action = scheduled.action
        try:
            if isinstance(action, CreatePod):
                self._cluster.remember_create_attempt(action.ref, action.predecessor_lost_at)
            self._do(action)
        except (ApiException, HTTPError) as error:
            ACTIONS.labels(f"{METRIC_KINDS[type(action)]}Failed").inc()
            self._cluster.request_pass()
            ends = _namespace_terminates(error)  # then the topology goes with it
            logger.log(
                logging.DEBUG if ends else logging.WARNING,
                "%s of %s failed: %s",
                scheduled.key,
                scheduled.topology_key or "no topology",
                _describe(error),
            )
            # A task's pod is reported by the queries that wait for it.
            if isinstance(action, GiveSlot):
                # The slot gets another pod, and the standby no slot for a while.
                self._cluster.remember_create_attempt(action.standby, None)
                self._cluster.remember_failed_create(
                    action.standby, _message(error), None, may_exist=True
                )
                return Outcome.FAILED
            if not ends and (not isinstance(action, CreatePod) or action.is_coordinator):
                self._cluster.action_failed(
                    scheduled.topology_uid, _failure_key(scheduled), _describe(error)
                )
            if not isinstance(action, CreatePod):
                return Outcome.FAILED
            refused = _has_done_nothing(error)
            self._cluster.remember_failed_create(
                action.ref,
                _message(error),
                action.predecessor_lost_at,
                may_exist=not refused,
                over_quota=_is_over_quota(error),
            )
            return Outcome.POD_REFUSED if refused else Outcome.POD_MAY_EXIST
        ACTIONS.labels(METRIC_KINDS[type(action)]).inc()
        self._cluster.action_succeeded(_failure_key(scheduled))
        return Outcome.DONE

    def _skipped(self, scheduled: ScheduledAction) -> None:
        """The status may have been written: then the incarnation is reserved and still unused."""
        if isinstance(scheduled.action, CreatePod):
            self._cluster.remember_create_attempt(
                scheduled.action.ref, scheduled.action.predecessor_lost_at
            )

    def _do(self, action: Action) -> None:
        match action:
            case DryRun():
                self._dry_run(action)
            case CreateGenerationRecord(manifest=manifest):
                self._create(_collection(manifest), manifest)
            case DeleteGenerationRecord(namespace, name, uid):
                path = f"/api/v1/namespaces/{namespace}/configmaps/{name}"
                body: Manifest = {"preconditions": {"uid": uid}}
                self._call("DELETE", path, body, none_for_status=(404, 409))
            case EnsureObject():
                self._ensure(action)
            case CreatePod(refused=refused) if refused:
                raise ApiException(status=403, reason=refused)
            case CreatePod(manifest=manifest, ref=ref):
                self._create(_collection(manifest), self._with_token(manifest))
                self._cluster.forget_uncreated_pod(ref)
            case CreatePlaceholder(manifest=manifest):
                self._create(_collection(manifest), manifest)
            case DeletePod():
                self._delete_pod(action)
            case OpenGate() | GiveSlot():
                self._patch_pod(action)
            case WriteStatus():
                self._write_status(action)
            case EmitEvent():
                self._emit(action)
            case QuarantineNode(node, node_uid, at):
                logger.warning("quarantined node %s: it is silent, its tasks are replaced", node)
                self._cluster.quarantine(node_uid, at)
            case AvoidNode(shape, node, node_uid, pod_uid, why, cause):
                logger.warning("pods of shape %s avoid node %s: %s", shape, node, why)
                self._cluster.remember_unsuitable(shape, node, node_uid, pod_uid, cause)
            case _:
                assert_never(action)

    # --- kinds of actions -----------------------------------------------------

    def _dry_run(self, action: DryRun) -> None:
        """A full quota is no problem of the spec: the generation waits, unless its pods fit into
        it once they have replaced others."""
        problems, waits_for = [], ""
        for path, manifest in (*(("", m) for m in action.objects), *action.pods):
            exchange = action.exchange if manifest["kind"] == "Pod" else None
            try:
                self._dry_run_create(manifest)
            except ApiException as error:
                if not _is_refusal(error):
                    raise
                message = _message(error)
                if not _is_over_quota(error):
                    problems.append(_refused(path, manifest, message))
                elif exchange is None or not exchange.fits(message, pod_requests(manifest["spec"])):
                    waits_for = waits_for or message
        result = DryRunResult(tuple(problems), self._clock(), waits_for)
        self._cluster.remember_dry_run(action.uid, action.generation, result)

    def _dry_run_create(self, manifest: Manifest) -> None:
        """With strict validation: otherwise the API server drops unknown fields. Raises
        ApiException also if an object of another owner has the name. What is not found is another
        object of the topology that does not exist yet, as the Role of a RoleBinding."""
        query = [("dryRun", "All"), ("fieldValidation", "Strict")]
        path = _collection(manifest)
        if self._call("POST", path, manifest, query=query, none_for_status=(404, 409)) is None:
            where = f"{path}/{manifest['metadata']['name']}"
            self._check_owner(where, manifest, may_be_missing=True)

    def _ensure(self, action: EnsureObject) -> None:
        """Raises ApiException if an object of another owner has the name: applying would take it
        over, and give the topology's pods what it grants."""
        manifest, namespace = action.manifest, action.namespace
        path = f"{_collection(manifest)}/{action.name}"
        found = self._check_owner(path, manifest, may_be_missing=True)
        if found is not None and found.get("immutable"):  # as older releases made them
            if not tokens.decoded(found.get("data")).get(names.TOKEN_KEY):
                reason = f"{path} is immutable and has no usable token; delete it"
                raise ApiException(status=422, reason=reason)
            manifest = {**manifest, "data": found["data"], "immutable": True}
        elif action.kind == "Secret":
            values = tokens.wanted_values(
                tokens.decoded((found or {}).get("data")),
                self._cluster.seen_tokens(namespace, action.name),
                action.tokens_of_pods,
            )
            manifest = {**manifest, "data": tokens.encoded(values)}
        response = self._call("PATCH", path, manifest, content_type=_APPLY, query=_APPLY_OPTIONS)
        if response is not None:
            self._cluster.put_owned(action.kind, response)

    def _with_token(self, manifest: Manifest) -> Manifest:
        """A pod with the digest of the token that it is created with."""
        meta = manifest["metadata"]
        (owner,) = meta["ownerReferences"]
        secret = names.token_secret_name(owner["name"], owner["uid"])
        digest = self._cluster.token_digest(meta["namespace"], secret)
        annotations = {**meta["annotations"], names.ANNOTATION_TOKEN: digest}
        return {**manifest, "metadata": {**meta, "annotations": annotations}}

    def _delete_pod(self, action: DeletePod) -> None:
        logger.info("deleting pod %s/%s: %s", action.namespace, action.name, action.why)
        # Only in the state in which this was decided: a later change may be a reason not to.
        body: Manifest = {
            "preconditions": {"uid": action.uid, "resourceVersion": str(action.version)}
        }
        if action.grace_s is not None:
            body["gracePeriodSeconds"] = action.grace_s
        path = f"/api/v1/namespaces/{action.namespace}/pods/{action.name}"
        response = self._call("DELETE", path, body, none_for_status=(404, 409))
        if response is None:
            self._cluster.request_pass()
        if response is not None and response.get("kind") == "Pod":
            if action.grace_s == 0 or not response["metadata"].get("deletionTimestamp"):
                self._cluster.pods.remove_deleted(response)
            else:
                self._cluster.pods.put(response)

    def _patch_pod(self, action: OpenGate | GiveSlot) -> None:
        """Raises ApiException, also for a standby that is gone."""
        path = f"/api/v1/namespaces/{action.namespace}/pods/{action.name}"
        may_be_gone = () if isinstance(action, GiveSlot) else (404,)
        response = self._call(
            "PATCH", path, list(action.patch), content_type=_JSON_PATCH, none_for_status=may_be_gone
        )
        if response is not None:
            self._cluster.pods.put(response)

    def _write_status(self, action: WriteStatus) -> None:
        now = self._clock()
        if (
            not action.urgent
            and now - self._status_at.get(action.uid, 0.0) < self._status_interval_s
        ):
            return
        try:
            response = self._replace_status(action)
        except ApiException as error:
            if error.status == 404:
                self._status_at.pop(action.uid, None)
                self._cluster.topologies.remove_not_found(action.namespace, action.name, action.uid)
            elif error.status != 409:
                self._on_refused_status()
            if error.status != 422 or not (action.new_incarnations or action.accepts_generation):
                raise
            # Lost tasks must come back, even if a field of the status is invalid.
            ACTIONS.labels(f"{METRIC_KINDS[WriteStatus]}Failed").inc()
            logger.error(
                "the API server refuses the status of %s/%s; only its slots and generations are "
                "written: %s",
                *(action.namespace, action.name, _message(error)),
            )
            reserved = only_reservations(action.replaces, action.status)
            response = self._replace_status(replace(action, status=reserved))
        self._status_at[action.uid] = now
        if response is not None:
            self._cluster.topologies.put(response)

    def _replace_status(self, action: WriteStatus) -> dict[str, Any] | None:
        """Replaces no other status than the one from which the new one was decided: a request of
        an earlier leader may arrive late. What the coordinator or a user changes meanwhile does
        not matter. Raises ApiException, 409 for another status."""
        path = (
            f"/apis/{names.API_VERSION}/namespaces/{action.namespace}/{names.PLURAL}/{action.name}"
        )
        # The uid makes the API server refuse to apply to, or create, any other topology.
        metadata = {"name": action.name, "namespace": action.namespace, "uid": action.uid}
        version = str(action.version)
        for _ in range(_STATUS_ATTEMPTS):
            body = {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {**metadata, "resourceVersion": version},
                "status": action.status,
            }
            how = {"content_type": _APPLY, "query": _APPLY_OPTIONS, "none_for_status": 409}
            if (response := self._call("PATCH", f"{path}/status", body, **how)) is not None:
                return response
            live = self._call("GET", path) or {}
            self._cluster.topologies.put(live)
            version = live["metadata"]["resourceVersion"]
            if live["metadata"]["uid"] != action.uid or not _is_status(live, action.replaces):
                reason = "the status was changed meanwhile; it is decided again"
                raise ApiException(status=409, reason=reason)
        reason = f"the topology was changed before each of {_STATUS_ATTEMPTS} attempts"
        raise ApiException(status=409, reason=reason)

    def _emit(self, action: EmitEvent) -> None:
        words = f"{action.uid} {action.reason} {action.dedup_key}"
        name = f"{action.topology}.{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": action.namespace},
            "eventTime": datetime.fromtimestamp(self._clock(), UTC).isoformat(
                timespec="microseconds"
            ),
            "type": "Warning" if action.warning else "Normal",
            "reason": action.reason,
            "action": action.action,
            "note": action.note,
            "reportingController": names.OPERATOR_EVENT_REPORTER,
            "reportingInstance": self._identity,
            "regarding": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": action.namespace,
                "name": action.topology,
                "uid": action.uid,
            },
        }
        logger.info("%s %s: %s", action.topology, action.reason, action.note)
        try:
            path = f"/apis/events.k8s.io/v1/namespaces/{action.namespace}/events"
            self._call("POST", path, body, none_for_status=409)
        except (ApiException, HTTPError) as error:
            level = logging.DEBUG if _namespace_terminates(error) else logging.WARNING
            logger.log(level, "cannot write an Event: %s", error)

    # --- the API --------------------------------------------------------------

    def _create(self, path: str, manifest: Manifest) -> None:
        """Names are deterministic: an object of this topology that already exists is the right one.
        Raises ApiException if it belongs to another, as while an older one is being deleted, if it
        is a generation record with another content, and if it does not exist: quotas that many
        requests change at once are a conflict, too."""
        response = self._call("POST", path, manifest, none_for_status=409)
        if response is None:
            self._check_owner(f"{path}/{manifest['metadata']['name']}", manifest)
            return
        match response["kind"]:
            case "Pod":
                self._cluster.pods.put(response)
            case "ConfigMap":
                self._cluster.generation_records.put(response)

    def _check_owner(
        self, path: str, manifest: Manifest, *, may_be_missing: bool = False
    ) -> dict[str, Any] | None:
        """The object; None if it does not exist. Raises ApiException if it has another owner or, if
        it is a ConfigMap, other data; also if it does not exist, unless `may_be_missing`."""
        found = self._call("GET", path, none_for_status=404)
        if found is None:
            if may_be_missing:
                return None
            reason = f"the API server reports a conflict, and {path} does not exist"
            raise ApiException(status=409, reason=reason)
        owners = found["metadata"].get("ownerReferences") or ()
        wanted = {owner["uid"] for owner in manifest["metadata"]["ownerReferences"]}
        if not wanted & {owner["uid"] for owner in owners}:
            reason = f"{path} exists and belongs to another owner; delete it first"
            raise ApiException(status=409, reason=reason)
        if manifest["kind"] == "ConfigMap" and found.get("data") != manifest.get("data"):
            reason = f"{path} exists with another content; delete it first"
            raise ApiException(status=409, reason=reason)
        return found

    def _call(self, method: str, path: str, body: Any = None, **how: Any) -> dict[str, Any] | None:
        """Raises NotLeading: an action may have several calls, and this process may be paused
        between them until another replica leads."""
        if method != "GET" and not self._may_act():
            raise NotLeading
        return call(self._api, method, path, body, **how)


def _is_status(topology: dict[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether the operator's fields of the topology's status are those of `status`."""
    return operator_fields(topology.get("status") or {}) == operator_fields(status)


_APPLY_OPTIONS = [("fieldManager", names.OPERATOR_FIELD_MANAGER), ("force", "true")]


def _collection(manifest: Manifest) -> str:
    """The path of the objects of a manifest's kind in its namespace."""
    version = manifest["apiVersion"]
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    return f"{root}/namespaces/{manifest['metadata']['namespace']}/{manifest['kind'].lower()}s"


def _refused(path: str, manifest: Manifest, message: str) -> Problem:
    if manifest["kind"] == "Pod":
        hint = (
            "correct spec.podTemplate, spec.resources, spec.coordinator, spec.image or the "
            "cluster's policy"
        )
        return Problem(path, "PodRefused", message, hint)
    what = f"{manifest['kind']} {manifest['metadata']['name']}: {message}"
    return Problem("", "ObjectRefused", what, "correct the cluster's policy or rights")


def _is_refusal(error: Exception) -> bool:
    """The API server has refused the request (409: an object of another owner has the name) and
    created nothing."""
    return isinstance(error, ApiException) and error.status in (400, 403, 409, 422)


def _failure_key(scheduled: ScheduledAction) -> str:
    """Failures of a coordinator's creation count together, although each may be of another
    incarnation."""
    action = scheduled.action
    if isinstance(action, CreatePod) and action.is_coordinator:
        return scheduled.key.replace(action.name, action.name.rpartition("-")[0])
    return scheduled.key


def _has_done_nothing(error: Exception) -> bool:
    """The API server has answered that it does not do what was asked (429: not now). After another
    error (408, 5xx, no response) it may have done it."""
    status = error.status or 0 if isinstance(error, ApiException) else 0
    return 400 <= status < 500 and status != 408


def _is_over_quota(error: Exception) -> bool:
    """A quota is full. The response of the API server has no other sign of it than its message."""
    is_forbidden = isinstance(error, ApiException) and error.status == 403
    return is_forbidden and "exceeded quota" in _message(error)


def _namespace_terminates(error: Exception) -> bool:
    """The namespace is being deleted, so nothing can be created in it."""
    if not isinstance(error, ApiException) or error.status != 403:
        return False
    try:
        causes = json.loads(error.body or "")["details"]["causes"]
        return any(cause["reason"] == "NamespaceTerminating" for cause in causes)
    except (TypeError, ValueError, KeyError):
        return False


def _message(error: Exception) -> str:
    if not isinstance(error, ApiException):
        return str(error)
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _describe(error: Exception) -> str:
    status = f"{error.status} " if isinstance(error, ApiException) else ""
    return f"{status}{_message(error)}"
