"""A cluster in memory for the operator's tests: it applies actions as the API server would.

Pods go through the real conversion, gates open by the real JSON patch, and the scheduler here binds
only what fits: it is what checks I6.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from model_objects import rfc3339
from model_state import KUBERNETES_GRACE_S, ModelState, view_of

from rekindle import names
from rekindle_operator import tokens
from rekindle_operator.cluster.amounts import total
from rekindle_operator.cluster.containers import creating_containers_since, failing_since
from rekindle_operator.cluster.convert import generation_record_view, owned_view, secret_view
from rekindle_operator.cluster.first_seen import (
    ending_since,
    pod_times,
    readiness_times,
    seen_at,
    ungated_at,
)
from rekindle_operator.cluster.model import (
    DryRunResult,
    LeaseView,
    OwnedView,
    PodView,
    Snapshot,
    record_digest,
)
from rekindle_operator.cluster.phase_times import phase_times
from rekindle_operator.reconcile.actions import (
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
    WriteStatus,
)
from rekindle_operator.reconcile.core import reconcile
from rekindle_testing.fixtures.crd import too_long_in_status
from rekindle_testing.fixtures.placement import (
    anti_affinity_forbids,
    has_other_replica,
    node_affinity_allows,
)

MAX_PASSES = 60


class ModelCluster(ModelState):
    def kill_node_until_not_ready(self, name: str) -> None:
        """It died with its pods, long enough ago to be NotReady."""
        super().kill_node_until_not_ready(name)
        self._report()
        for topology, view in self.topologies.items():
            lease = self.leases.get(names.coordinator_name(topology))
            if lease is not None and not self.coordinator_runs(lease):
                at = min(lease.seen_at, self.died_at[name])
                self.leases[lease.name] = replace(lease, seen_at=at)
                self.report_times[view.uid] = min(at, self.report_times.get(view.uid, at))

    # --- what the operator sees -------------------------------------------------

    def tasks(self, name: str = "flights") -> dict[str, PodView]:
        return {p.name: p for p in self.pods_of(name, names.ROLE_TASK)}

    def coordinator(self, name: str = "flights") -> PodView:
        """The newest one."""
        return max(self.pods_of(name, names.ROLE_COORDINATOR), key=lambda p: p.incarnation)

    def status(self, name: str = "flights") -> dict[str, Any]:
        return dict(self.topologies[name].status)

    def query_states(self, name: str = "flights") -> dict[str, str]:
        return {q["name"]: q["state"] for q in self.status(name).get("queries") or ()}

    def condition(self, kind: str, name: str = "flights") -> dict[str, Any]:
        found = [c for c in self.status(name).get("conditions") or () if c["type"] == kind]
        return dict(found[0])

    def event_reasons(self) -> list[str]:
        return [e.reason for e in self.events]

    def snapshot(self) -> Snapshot:
        pods = self.pods()
        self.phases = phase_times(self.phases, pods, self.now)
        self.pod_times = pod_times(self.pod_times, pods, self.now)
        self.readiness_times = readiness_times(self.readiness_times, self.nodes.values(), self.now)
        self.failing = failing_since(self.failing, pods, self.now)
        self.creating_containers = creating_containers_since(
            self.creating_containers, pods, self.now
        )
        views: dict[str, Any] = {**self.views(pods), **self.views_of_stalled_watches}
        return Snapshot(
            **views,
            generation_records=tuple(
                generation_record_view(c) for c in self.generation_records.values()
            ),
            owned={view.key: view for view in map(self.owned_view, self.owned.values())},
            suspects_silent_since=dict(self.suspects_silent_since),
            report_times=dict(self.report_times),
            kubelet_probes=self.kubelet_probes(),
            pod_probes=self.pod_probes(pods),
            pods_in_phase_since={uid: phase.since for uid, phase in self.phases.items()},
            pods_seen_at=seen_at(self.pod_times),
            pods_ungated_at=ungated_at(self.pod_times),
            pods_ending_since=ending_since(self.pod_times),
            readiness_seen_at={uid: t.seen_at for uid, t in self.readiness_times.items()},
            quarantined=dict(self.quarantined),
            dry_runs=dict(self.dry_runs),
            uncreated_pods=self.uncreated_pods.by_ref,
            unsuitable=self.unsuitable.by_shape(
                {n.name: n.uid for n in self.nodes.values()}, self.now
            ),
            failing_since=self.failing,
            crd_missing_fields=self.missing_fields,
            creating_containers_since=self.creating_containers,
        )

    # --- time passes -----------------------------------------------------------

    def settle(self) -> int:
        """Reconcile until nothing is left to do; the number of passes that did something."""
        for number in range(MAX_PASSES):
            actions = reconcile(self.snapshot(), self.now, self.settings)
            if not actions and not self.kubelets_and_scheduler():
                return number
            self.apply(actions)
            self.kubelets_and_scheduler()
        rest = [type(a).__name__ for a in reconcile(self.snapshot(), self.now, self.settings)]
        raise AssertionError(f"does not converge; still: {rest}")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name in self.dead & set(self.nodes):
            if self.nodes[name].ready and self.now - self.died_at[name] > KUBERNETES_GRACE_S:
                self.kill_node_until_not_ready(name)
        for name, lease in self.leases.items():  # coordinators on live nodes renew
            if self.coordinator_runs(lease):
                self.leases[name] = replace(lease, seen_at=self.now, version=self.next_version())
        self._report()

    def _is_coordinated(self, topology: str) -> bool:
        lease = self.leases.get(names.coordinator_name(topology))
        return lease is not None and self.coordinator_runs(lease)

    def coordinator_runs(self, lease: LeaseView) -> bool:
        return any(
            p.node is not None and p.node not in self.dead and str(p.incarnation) == lease.holder
            for name in self.topologies
            if names.coordinator_name(name) == lease.name
            for p in self.pods_of(name, names.ROLE_COORDINATOR)
        )

    def kubelets_and_scheduler(self) -> bool:
        changed = False
        for name, raw in list(self.raw_pods.items()):
            if raw["spec"].get("nodeName") and not raw["metadata"].get("deletionTimestamp"):
                continue
            pod = view_of(raw)
            if pod.terminating and pod.node not in self.dead:
                del self.raw_pods[name]
                changed = True
            elif pod.node is None and names.GATE not in pod.gates and self.binding:
                changed |= self._bind(raw, pod)
        return changed | self._report()

    def _bind(self, raw: dict[str, Any], pod: PodView) -> bool:
        if self.now - self.opened.setdefault(pod.name, self.now) < self.binding_delay_s:
            return False
        if pod.segment_name in self.unbound_segments:
            return False
        for name, node in sorted(self.nodes.items()):
            if not node.ready or node.cordoned or not node_affinity_allows(raw, name):
                continue
            here = [p for p in self.pods_on(name) if not p.ended]
            if pod.role == names.ROLE_COORDINATOR:
                here = self._without_placeholders(here)
            if not (node.allocatable - total(p.requests for p in here)).covers(pod.requests):
                # Only a coordinator may have taken the capacity: the plan does not include those.
                assert pod.required_node is None or any(
                    p.role == names.ROLE_COORDINATOR for p in here
                )
                continue
            assert not has_other_replica(pod, here), f"I6: a replica of {pod.name} is on {name}"
            if any(anti_affinity_forbids(raw, self.raw_pods[p.name]) for p in here):
                assert pod.required_node is None, "planned for a node that it has to avoid"
                continue
            if not all(pod.node_selector[k] == node.labels.get(k) for k in pod.node_selector):
                assert pod.required_node is None, "planned for a node that its selector rules out"
                continue
            raw["spec"]["nodeName"] = name
            is_ready = pod.name not in self.stuck and pod.role != names.ROLE_STANDBY
            ready = [{"type": "Ready", "status": "True"}] if is_ready else []
            address = f"127.1.0.{1 + self.next_version() % 250}"
            started = {"name": names.TASK_CONTAINER, "started": pod.name not in self.stuck}
            is_standby = pod.role == names.ROLE_STANDBY
            containers = {"containerStatuses": [started]} if is_standby else {}
            raw["status"] = {
                "phase": "Running",
                "conditions": ready,
                "podIP": address,
                **containers,
            }
            if self.refused_by_kubelets and pod.segment_name == self.refused_by_kubelets:
                raw["status"] = {"phase": "Failed", "reason": "SysctlForbidden", "message": "no"}
            raw["metadata"]["resourceVersion"] = str(self.next_version())
            if pod.role == names.ROLE_COORDINATOR:
                lease = names.coordinator_name(pod.topology or "")
                self.leases[lease] = LeaseView(
                    pod.namespace, lease, self.next_version(), str(pod.incarnation), self.now
                )
            return True
        return False

    def _without_placeholders(self, here: list[PodView]) -> list[PodView]:
        """They have the lowest priority, and are preempted by all but tasks, which never preempt
        anything."""
        for pod in here:
            if pod.role == names.ROLE_PLACEHOLDER:
                del self.raw_pods[pod.name]
        return [pod for pod in here if pod.role != names.ROLE_PLACEHOLDER]

    def _report(self) -> bool:
        """Coordinators report what runs on nodes with a kubelet."""
        changed = False
        for name, view in self.topologies.items():
            age_s = self.now - self.report_times.get(view.uid, -self.report_delay_s)
            if self.reports_lost or age_s < self.report_delay_s or not self._is_coordinated(name):
                continue
            self.report_times[view.uid] = self.now - self.report_delay_s
            tasks = [
                {
                    "slot": p.slot.key,
                    "incarnation": p.incarnation,
                    "phase": "Live",
                    "stableEpoch": 1,
                    "durableEpoch": 1,
                    **self.task_reports.get(p.name, {}),
                }
                for p in self.tasks(name).values()
                if p.slot and p.node and p.node not in self.dead
                if not (p.terminating or p.ended)
                if p.name not in self.stuck
            ]
            fence = int(self.leases[names.coordinator_name(name)].holder)
            report: dict[str, Any] = {
                "fence": fence,
                "generation": max(self.newest_record(name), view.report.generation or 0),
                "tasks": sorted(tasks, key=lambda t: str(t["slot"])),
            }
            if known := dict.fromkeys((*self.lags_s, *self.query_reports)):
                lags = {name: {"lagSeconds": lag_s} for name, lag_s in self.lags_s.items()}
                report["queries"] = [
                    {"name": name, **lags.get(name, {}), **self.query_reports.get(name, {})}
                    for name in known
                ]
            if self.checkpoint_epoch is not None:
                report["checkpoint"] = {"epoch": self.checkpoint_epoch}
            if self.stream_protocol:
                report["streamProtocol"] = self.stream_protocol
            if self.stream_conflict:
                report["streamConflict"] = self.stream_conflict
            if view.data_plane != report:
                status = {**view.status, "dataPlane": report}
                self.topologies[name] = replace(view, status=status, version=self.next_version())
                changed = True
        return changed

    # --- actions ----------------------------------------------------------------

    def apply(self, actions: Iterable[Action]) -> None:
        """What a quota refuses is tried once more after the clean-up."""
        done = list(actions)
        for action in done:
            self._apply(action)
        if any(isinstance(action, DeletePod) for action in done):
            for action in done:
                if isinstance(action, CreatePod) and action.ref in self.uncreated_pods.by_ref:
                    self._admit(action)

    def _apply(self, action: Action) -> None:
        match action:
            case DryRun(uid=uid, generation=generation):
                key = uid, generation
                self.dry_runs[key] = replace(
                    self.refused_dry_runs.get(key, DryRunResult()), at=self.now
                )
            case CreateGenerationRecord(manifest=manifest):
                self.create_record(manifest)
            case DeleteGenerationRecord(name=name):
                self.generation_records.pop(name, None)
            case CreatePod():
                self._admit(action)
            case CreatePlaceholder(manifest=manifest):
                if not self.quota_refusal():
                    self._store_pod(manifest)
            case DeletePod(name=name, uid=uid, grace_s=grace_s):
                spec = self.raw_pods.get(name, {}).get("spec", {})
                at_once = spec.get("terminationGracePeriodSeconds") == 0
                self.delete_pod(name, uid, 0 if at_once else grace_s)
            case OpenGate(name=name, patch=patch):
                self.patch_pod(name, patch)
            case GiveSlot(name=name, uid=uid, ref=ref, patch=patch):
                assert self.raw_pods[name]["metadata"]["uid"] == uid
                status = self.topologies[ref.topology_uid.removeprefix("uid-")].status
                slots = {s["slot"]: s["incarnation"] for s in status["slots"]}
                assert slots[ref.slot] == ref.incarnation, "not reserved before"
                self.patch_pod(name, patch)
                pod = view_of(self.raw_pods[name])
                here = [p for p in self.pods_on(pod.node or "") if p.name != name and not p.ended]
                assert not has_other_replica(pod, here), f"I6: a replica of {ref.slot} is there"
                used = [p.ref for p in self.pods()]
                assert used.count(ref) == 1, f"{ref} has two pods"
            case WriteStatus(name=name, status=status):
                self.write_status(name, dict(status))
            case EnsureObject():
                self.ensure(action)
            case EmitEvent():
                if (action.reason, action.dedup_key) not in {
                    (e.reason, e.dedup_key) for e in self.events
                }:
                    self.events.append(action)
            case QuarantineNode(_, node_uid, at):
                self.quarantined[node_uid] = at
            case AvoidNode(shape, node, node_uid, pod_uid, cause=cause):
                self.unsuitable = self.unsuitable.with_refusal(
                    shape, node, node_uid, pod_uid, self.now, cause
                )

    def quota_refusal(self) -> str:
        """The API server's words, if one more pod is too many; else empty."""
        used, limit = len(self.raw_pods), self.quota
        if limit is None or used < limit:
            return ""
        return f"exceeded quota: few, requested: pods=1, used: pods={used}, limited: pods={limit}"

    def _admit(self, action: CreatePod) -> None:
        full = bool(self.quota_refusal())
        segment = action.manifest["metadata"]["labels"].get(names.LABEL_SEGMENT_NAME)
        if (
            full
            or action.refused
            or action.namespace in self.refused_in
            or segment in self.refused_segments
        ):
            lost_at = action.predecessor_lost_at
            attempted = self.uncreated_pods.with_create_attempt(action.ref, self.now, lost_at)
            self.uncreated_pods = attempted.with_failed_create(
                action.ref, "exceeded quota", self.now, lost_at, over_quota=True
            )
        else:
            self.uncreated_pods = self.uncreated_pods.without_slot(action.ref)
            self.create_pod(self.with_token(action.manifest))

    def ensure(self, action: EnsureObject) -> None:
        """As the executor applies it."""
        kind, name, version = action.kind, action.name, self.next_version()
        if kind == "Lease":
            new = LeaseView(action.namespace, name, version, "", self.now)
            self.leases.setdefault(name, new)
            return
        raw = copy.deepcopy(action.manifest)
        raw["metadata"]["resourceVersion"] = str(version)
        if kind == "Secret":
            found = self.owned.get((kind, name), {}).get("data")
            seen = self.seen_tokens.get(name, tokens.SeenTokens())
            values = tokens.wanted_values(tokens.decoded(found), seen, action.tokens_of_pods)
            raw["data"] = tokens.encoded(values)
        self.put_owned(raw)

    def put_owned(self, raw: dict[str, Any]) -> None:
        """What the operator's watch then shows."""
        name = raw["metadata"]["name"]
        self.owned[raw["kind"], name] = raw
        seen, values = self.seen_tokens.get(name, tokens.SeenTokens()), raw.get("data")
        version = int(raw["metadata"]["resourceVersion"])
        self.seen_tokens[name] = seen.with_values(tokens.decoded(values), version)

    @staticmethod
    def owned_view(raw: dict[str, Any]) -> OwnedView:
        return secret_view(raw) if raw["kind"] == "Secret" else owned_view(raw, raw["kind"])

    def with_token(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """A pod as the executor creates it."""
        pod = copy.deepcopy(manifest)
        (owner,) = pod["metadata"]["ownerReferences"]
        seen = self.seen_tokens[names.token_secret_name(owner["name"], owner["uid"])]
        digest = tokens.token_digest(seen.token)
        pod["metadata"]["annotations"][names.ANNOTATION_TOKEN] = digest
        return pod

    def create_record(self, manifest: dict[str, Any]) -> None:
        owner = self.topologies[manifest["metadata"]["labels"][names.LABEL_TOPOLOGY]]
        digest = record_digest(manifest["data"][names.TOPOLOGY_KEY])
        listed = owner.status["generations"]
        assert digest in {g.get("digest") for g in listed}, "not in the status before"
        self.put_record(manifest)

    def put_record(self, manifest: dict[str, Any]) -> None:
        """As the API server does, with a uid; one that exists stays."""
        meta = manifest["metadata"]
        meta["uid"] = f"uid-{meta['name']}"
        self.generation_records.setdefault(meta["name"], manifest)

    def newest_record(self, topology: str) -> int:
        """The number of its generation; 0 without any."""
        labels = (raw["metadata"]["labels"] for raw in self.generation_records.values())
        of_topology = (x for x in labels if x[names.LABEL_TOPOLOGY] == topology)
        return max((int(x[names.LABEL_GENERATION]) for x in of_topology), default=0)

    def create_pod(self, manifest: dict[str, Any]) -> None:
        meta = manifest["metadata"]
        owner = meta["labels"][names.LABEL_TOPOLOGY]
        assert not self.topologies[owner].deleting, "created for a topology that is being deleted"
        if meta["labels"][names.LABEL_ROLE] == names.ROLE_STANDBY:
            self._store_pod(manifest)
            return
        base, _, incarnation = meta["name"].rpartition("-")
        assert int(incarnation) > self.highest.get(base, 0), f"{meta['name']} existed before"
        slots = self.topologies[owner].status["slots"]
        assert int(incarnation) in {s["incarnation"] for s in slots}, "not reserved before"
        self.highest[base] = int(incarnation)
        self._store_pod(manifest)

    def _store_pod(self, manifest: dict[str, Any]) -> None:
        meta = manifest["metadata"]
        assert meta["name"] not in self.raw_pods
        meta |= {
            "uid": f"uid-{self.next_version()}",
            "resourceVersion": str(self.next_version()),
            "creationTimestamp": rfc3339(self.now + self.api_and_kubelets_ahead_s),
        }
        self.raw_pods[meta["name"]] = manifest

    def delete_pod(self, name: str, uid: str, grace_s: int | None) -> None:
        raw = self.raw_pods.get(name)
        if raw is None or raw["metadata"]["uid"] != uid:
            return
        if grace_s == 0 or not raw["spec"].get("nodeName"):
            del self.raw_pods[name]
        else:
            raw["metadata"]["deletionTimestamp"] = rfc3339(self.now + self.api_and_kubelets_ahead_s)
            raw["metadata"]["resourceVersion"] = str(self.next_version())

    def patch_pod(self, name: str, patch: Iterable[Mapping[str, Any]]) -> None:
        raw = self.raw_pods[name]
        raw["metadata"]["resourceVersion"] = str(self.next_version())
        for operation in patch:
            steps = operation["path"].strip("/").split("/")
            *parents, last = (s.replace("~1", "/").replace("~0", "~") for s in steps)
            place: Any = raw
            for step in parents:
                place = place[int(step)] if isinstance(place, list) else place[step]
            key: Any = int(last) if isinstance(place, list) else last
            match operation["op"]:
                case "test":
                    assert place[key] == operation["value"]
                case "remove":
                    del place[key]
                case "add":
                    place[key] = operation["value"]

    def write_status(self, name: str, status: dict[str, Any]) -> None:
        view = self.topologies[name]
        before = {s["slot"]: s["incarnation"] for s in view.status.get("slots") or ()}
        after = {s["slot"]: s["incarnation"] for s in status.get("slots") or ()}
        assert all(v >= before.get(k, 0) for k, v in after.items()), "an incarnation decreased"
        assert too_long_in_status(status) == [], "the API server would refuse it"
        if view.data_plane:
            status["dataPlane"] = view.data_plane
        self.topologies[name] = replace(view, status=status, version=self.next_version())
