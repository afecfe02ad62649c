"""A coordinator's calls of the API server: its Lease, its report, pods and generations.

As `rekindle.coordinator.shell.reporting` and `watching`, with the same objects.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle import names
from rekindle.coordinator.core.state_machine import Event
from rekindle.coordinator.model import Generation, Pod
from rekindle.coordinator.shell.objects import (
    generations_from,
    holder,
    lease,
    newest_generation,
    pod_from,
    status_patch,
)
from rekindle.report import Report
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology
from rekindle_operator.cluster.convert import rfc3339
from rekindle_testing.simulation.kube.objects import (
    BEGIN_UNIX_S,
    DELETED,
    PODS,
    ApiEvent,
    ApiRequest,
    ApiResponse,
    Json,
)
from rekindle_testing.simulation.kube.server import SimulatedApiServer
from rekindle_testing.simulation.network import API, Network
from rekindle_testing.simulation.scheduler import SimulatedProcess

NAMESPACE, TOPOLOGY = "default", "t"
_CALL_TIMEOUT_S, _RENEWAL_TIMEOUT_S = 5.0, 3.0
# Intervals of renewals, the shorter one while a task is suspected; least pause after a slow one.
_RENEW_S, _RENEW_SUSPECTING_S, _LEAST_PAUSE_S = 1.0, 0.5, 0.2
_LEASE_S = 6
_GENERATION_CHECK_S = 1.0
# The first and the longest pause before a retry of a write; bounds of that of a list of pods.
_RETRY_S = (0.3, 6.0)
_MAYBE_OUTDATED = (409, 422)  # another topology of this name; a fence that is lower
_LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
_TOPOLOGY = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}/{TOPOLOGY}"
_POD_SELECTOR = f"{names.LABEL_TOPOLOGY}={TOPOLOGY},{names.LABEL_ROLE}={names.ROLE_TASK}"
_RECORD_SELECTOR = f"{names.LABEL_TOPOLOGY}={TOPOLOGY},{names.LABEL_GENERATION}"

OnResponse = Callable[[ApiResponse | None], None]
"""Gets the response; None if there is none."""


@dataclass(slots=True)
class ApiAccess:
    process: SimulatedProcess
    network: Network
    server: SimulatedApiServer
    uid: str  # of the topology
    incarnation: int

    def call(
        self,
        verb: str,
        path: str,
        body: Any,
        on_response: OnResponse,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> None:
        def end(result: Any) -> None:
            on_response(result if isinstance(result, ApiResponse) else None)

        self.network.call(self.process, API, ApiRequest(verb, path, body), end, timeout_s)


class SimulatedLeaseKeeper:
    """Renews the Lease. Each renewal names the report that is still valid (`valid_report_number`;
    None: the newest one is not written yet). `suspecting`: whether a task is suspected."""

    def __init__(
        self,
        api: ApiAccess,
        feed: Callable[[Event], None],
        valid_report_number: Callable[[], int | None],
        suspecting: Callable[[], bool],
    ) -> None:
        self._api = api
        self._feed = feed
        self._valid_report_number = valid_report_number
        self._suspecting = suspecting
        self._held: Json | None = None
        self._began = 0.0
        self._path = f"{_LEASES}/{names.coordinator_name(TOPOLOGY)}"

    def start(self) -> None:
        self._began = self._api.process.scheduler.now
        if self._held is None:
            self._call("GET", self._path, None, self._found)
        else:
            self._renew(self._held)

    def _call(self, verb: str, path: str, body: Any, on_response: OnResponse) -> None:
        self._api.call(verb, path, body, on_response, _RENEWAL_TIMEOUT_S)

    def _desired_lease(self) -> Json:
        now = rfc3339(BEGIN_UNIX_S + self._api.process.scheduler.now)
        number = self._valid_report_number()
        api = self._api
        return lease(NAMESPACE, TOPOLOGY, api.uid, api.incarnation, _LEASE_S, now, number)

    def _found(self, response: ApiResponse | None) -> None:
        if response is not None and response.status == 404:
            self._call("POST", _LEASES, self._desired_lease(), self._written)
        elif response is None or response.status >= 400:
            self._written(response)
        else:
            self._renew(response.body)

    def _renew(self, held: Json) -> None:
        if holder(held) > self._api.incarnation:
            by = f"the Lease is held by coordinator {holder(held)}"
            self._feed(lambda core, now: core.fence_raised(by, now))
            return
        desired = self._desired_lease()
        kept = held["metadata"].get("annotations") or {}
        annotations = {**kept, **desired["metadata"]["annotations"]}
        meta = {**held["metadata"], "annotations": annotations}
        body = {**held, "metadata": meta, "spec": desired["spec"]}
        self._call("PUT", self._path, body, self._written)

    def _written(self, response: ApiResponse | None) -> None:
        good = response is not None and response.status < 400
        self._held = response.body if response is not None and good else None
        process = self._api.process
        pace_s = _RENEW_SUSPECTING_S if self._suspecting() else _RENEW_S
        spent_s = process.scheduler.now - self._began
        process.after(max(_LEAST_PAUSE_S, pace_s - spent_s), self.start)


class SimulatedStatusWriter:
    """One write at a time; meanwhile only the latest report is kept."""

    def __init__(self, api: ApiAccess, feed: Callable[[Event], None]) -> None:
        self._api = api
        self._feed = feed
        self._desired: Report | None = None
        self._written: Report | None = None
        self._store_id: str | None = None
        self._writing = False
        self._failures = 0
        self._writes = 0

    @property
    def valid_report_number(self) -> int | None:
        up_to_date = self._written is not None and self._written is self._desired
        return self._writes if up_to_date else None

    def offer(self, report: Report) -> None:
        self._desired = report
        if not self._writing:
            self._writing = True
            self._write()

    def _write(self) -> None:
        desired = self._desired
        assert desired is not None
        self._unless_fenced(lambda: self._apply(desired))

    def _apply(self, desired: Report) -> None:
        report = replace(desired, number=self._writes + 1, store=desired.store or self._store_id)
        patch = status_patch(NAMESPACE, TOPOLOGY, self._api.uid, report)

        def applied(response: ApiResponse | None) -> None:
            if response is None:
                self._retry()
            elif response.status in _MAYBE_OUTDATED:
                self._unless_fenced(lambda: self._refused(response))
            elif response.status >= 400:
                self._refused(response)
            else:
                self._failures = 0
                self._writes += 1
                self._written = desired
                self._feed(lambda core, now: core.problem_changed("status", None, now))
                if self._desired is desired:
                    self._writing = False
                else:
                    self._write()

        self._api.call("PATCH", f"{_TOPOLOGY}/status", patch, applied)

    def _refused(self, response: ApiResponse) -> None:
        message = f"status.dataPlane was refused: {response.reason}"
        self._feed(lambda core, now: core.problem_changed("status", message, now))
        self._retry()

    def _retry(self) -> None:
        self._failures += 1
        first_s, longest_s = _RETRY_S
        wait_s = min(longest_s, first_s * 2.0**self._failures)
        scheduler = self._api.process.scheduler
        self._api.process.after(scheduler.between(wait_s / 2, wait_s), self._write)

    def _unless_fenced(self, action: Callable[[], None]) -> None:
        """Read the status first; if its fence is higher, another coordinator has taken over."""

        def found(response: ApiResponse | None) -> None:
            if response is None or response.status >= 400:
                self._retry()
                return
            data_plane = (response.body.get("status") or {}).get("dataPlane") or {}
            self._store_id = data_plane.get("store") or self._store_id
            fence = data_plane.get("fence") or 0
            if fence > self._api.incarnation:
                by = f"status.dataPlane.fence is {fence}"
                self._feed(lambda core, now: core.fence_raised(by, now))
            else:
                action()

        self._api.call("GET", _TOPOLOGY, None, found)


class SimulatedPodWatcher:
    def __init__(self, api: ApiAccess, pods_listed: Callable[[Sequence[Pod]], None]) -> None:
        self._api = api
        self._pods_listed = pods_listed
        self._pods: dict[str, Pod] = {}

    def start(self) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={_POD_SELECTOR}"
        self._api.call("GET", path, None, self._listed)

    def _listed(self, response: ApiResponse | None) -> None:
        api = self._api
        if response is None or response.status >= 400:
            api.process.after(api.process.scheduler.between(*_RETRY_S), self.start)
            return
        for raw in response.body["items"]:
            self._keep(raw)
        self._pods_listed(tuple(self._pods.values()))
        version = int(response.body["metadata"]["resourceVersion"])
        api.server.watch(api.process, PODS, version, self._changed, selector=_POD_SELECTOR)

    def _changed(self, event: ApiEvent) -> None:
        before = dict(self._pods)
        if event.type == DELETED:
            self._pods.pop(event.raw["metadata"]["name"], None)
        else:
            self._keep(event.raw)
        if self._pods != before:
            self._pods_listed(tuple(self._pods.values()))

    def _keep(self, raw: Json) -> None:
        pod = pod_from(raw, self._api.uid)
        if pod is not None:
            self._pods[pod.name] = pod


class SimulatedGenerationReader:
    """Lists the generation records every second."""

    def __init__(self, api: ApiAccess, feed: Callable[[Event], None]) -> None:
        self._api = api
        self._feed = feed
        self._versions: dict[str, str] = {}

    def start(self) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps?labelSelector={_RECORD_SELECTOR}"
        self._api.call("GET", path, None, self._listed)

    def _listed(self, response: ApiResponse | None) -> None:
        self._api.process.after(_GENERATION_CHECK_S, self.start)
        if response is None or response.status >= 400:
            return
        items = response.body["items"]
        versions = {i["metadata"]["name"]: i["metadata"]["resourceVersion"] for i in items}
        if versions == self._versions:
            return
        self._versions = versions
        found = generations_from(items, self._api.uid)
        if found:
            generation = generation_of(found)
            self._feed(lambda core, now: core.generation_seen(generation, now))


def generation_of(found: dict[int, tuple[str, Json]]) -> Generation:
    return newest_generation({n: compiled(name, spec) for n, (name, spec) in found.items()})


def compiled(name: str, spec: Json) -> Topology:
    return _compiled(name, json.dumps(spec, sort_keys=True))


@functools.cache
def _compiled(name: str, text: str) -> Topology:
    return compile_topology(load_spec(json.loads(text)), name, skip_cluster_checks=True)
