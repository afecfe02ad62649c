"""A cluster in memory for the operator's tests: it applies actions as the API server would.

Pods go through the real conversion, gates open by the real JSON patch, and the scheduler here binds
only what fits: it is what checks I6.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rekindle_operator import names
from rekindle_operator.cluster.amounts import Amounts, total
from rekindle_operator.cluster.convert import config_view, pod_view, topology_view
from rekindle_operator.cluster.model import (
    LeaseView,
    NodeView,
    PodView,
    SlotRef,
    Snapshot,
    TopologyView,
    Trial,
)
from rekindle_operator.cluster.refusals import Refusals
from rekindle_operator.reconcile.actions import (
    Action,
    CreateConfig,
    CreatePod,
    DeleteConfig,
    DeletePod,
    EmitEvent,
    EnsureAccess,
    EnsureLease,
    OpenGate,
    ShunNode,
    TryPods,
    WriteStatus,
)
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.settings import Settings

MOST_PASSES = 12
KUBERNETES_GRACE_S = 50.0  # after which a node without heartbeats is not Ready


class ModelCluster:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.settings = Settings()
        self.version = 0
        self.raw_pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, NodeView] = {}
        self.topologies: dict[str, TopologyView] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, LeaseView] = {}
        self.trials: dict[tuple[str, int], Trial] = {}
        self.silent: dict[SlotRef, float] = {}
        self.shunned: dict[str, float] = {}
        self.refusals: dict[tuple[str, int], Trial] = {}
        self.quota: int | None = None  # of pods
        self.refused = Refusals({})
        self.events: list[EmitEvent] = []
        self.binding = True
        self.frozen_at: dict[str, float] = {}
        self.dead: set[str] = set()  # nodes without a kubelet
        self.stuck: set[str] = set()  # pods that have a node and never say a word
        self.said: dict[str, dict[str, Any]] = {}  # pod -> what its task says besides
        self.refusing = ""  # the segment whose pods kubelets refuse
        self.highest: dict[str, int] = {}  # pod base name -> incarnation, to see none come back

    # --- what happens to it -----------------------------------------------------

    def add_node(self, name: str, cpu_m: int = 4000, memory: int = 8 << 30, **more: Any) -> None:
        self.dead.discard(name)
        self.nodes[name] = NodeView(
            name=name,
            uid=f"uid-{name}",
            version=self._next(),
            ready=True,
            ready_since=self.now,
            cordoned=False,
            taints=more.get("taints", ()),
            labels={"kubernetes.io/hostname": name, **more.get("labels", {})},
            allocatable=Amounts(cpu_m, memory, 50, more.get("others", ())),
        )

    def lose_node(self, name: str) -> None:
        self.dead.add(name)
        self.nodes[name] = replace(self.nodes[name], ready=False, ready_since=self.now)

    def freeze_node(self, name: str) -> None:
        """Its tasks fall silent; Kubernetes does not know yet."""
        self.dead.add(name)
        self.frozen_at[name] = self.now
        for pod in self.pods():
            if pod.node == name and pod.slot is not None and pod.owner_uid is not None:
                ref = SlotRef(pod.owner_uid, pod.slot.key, pod.incarnation)
                self.silent.setdefault(ref, self.now)

    def remove_node(self, name: str) -> None:
        self.dead.add(name)
        del self.nodes[name]

    def add_topology(self, name: str, spec: dict[str, Any]) -> None:
        raw = {
            "metadata": {
                "namespace": "default",
                "name": name,
                "uid": f"uid-{name}",
                "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "resourceVersion": str(self._next()),
            },
            "spec": spec,
        }
        self.topologies[name] = topology_view(raw)

    def edit(self, name: str, **fields: Any) -> None:
        old = self.topologies[name]
        spec = {**old.spec, **fields}
        self.topologies[name] = replace(
            old, spec=spec, generation=old.generation + 1, version=self._next()
        )

    def delete(self, name: str) -> None:
        self.topologies[name] = replace(self.topologies[name], deleting=True)

    # --- what the operator sees -------------------------------------------------

    def pods(self) -> list[PodView]:
        return [pod_view(raw) for raw in self.raw_pods.values()]

    def tasks(self, name: str = "flights") -> dict[str, PodView]:
        return {p.name: p for p in self.pods() if p.topology == name and p.role == names.ROLE_TASK}

    def coordinator(self, name: str = "flights") -> PodView:
        """The newest one."""
        ours = [p for p in self.pods() if (p.topology, p.role) == (name, names.ROLE_COORDINATOR)]
        return max(ours, key=lambda p: p.incarnation)

    def status(self, name: str = "flights") -> dict[str, Any]:
        return dict(self.topologies[name].status)

    def query_states(self, name: str = "flights") -> dict[str, str]:
        return {q["name"]: q["state"] for q in self.status(name).get("queries") or ()}

    def condition(self, kind: str, name: str = "flights") -> dict[str, Any]:
        found = [c for c in self.status(name).get("conditions") or () if c["type"] == kind]
        return dict(found[0])

    def reasons(self) -> list[str]:
        return [e.reason for e in self.events]

    def snapshot(self) -> Snapshot:
        return Snapshot(
            topologies=tuple(self.topologies.values()),
            pods=tuple(self.pods()),
            nodes=tuple(self.nodes.values()),
            leases=tuple(self.leases.values()),
            configs=tuple(config_view(c) for c in self.configs.values()),
            silent_since=dict(self.silent),
            shunned=dict(self.shunned),
            trials=dict(self.trials),
            refusals=self.refused.by_ref,
        )

    # --- time goes on -----------------------------------------------------------

    def settle(self) -> int:
        """Reconcile until nothing is left to do; the number of passes that did something."""
        for number in range(MOST_PASSES):
            actions = reconcile(self.snapshot(), self.now, self.settings)
            if not actions and not self._kubelets_and_scheduler():
                return number
            self.apply(actions)
            self._kubelets_and_scheduler()
        rest = [type(a).__name__ for a in reconcile(self.snapshot(), self.now, self.settings)]
        raise AssertionError(f"does not converge; still: {rest}")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name in self.dead & set(self.nodes):
            if self.nodes[name].ready and self.now - self.frozen_at[name] > KUBERNETES_GRACE_S:
                self.lose_node(name)
        for name, lease in self.leases.items():  # coordinators on live nodes renew
            if self._coordinator_runs(lease):
                self.leases[name] = replace(lease, seen_at=self.now, version=self._next())

    def _coordinator_runs(self, lease: LeaseView) -> bool:
        return any(
            p.role == names.ROLE_COORDINATOR
            and names.coordinator_name(p.topology or "") == lease.name
            and p.node is not None
            and p.node not in self.dead
            and str(p.incarnation) == lease.holder
            for p in self.pods()
        )

    def _kubelets_and_scheduler(self) -> bool:
        changed = False
        for name, raw in list(self.raw_pods.items()):
            pod = pod_view(raw)
            if pod.terminating and pod.node not in self.dead:
                del self.raw_pods[name]
                changed = True
            elif pod.node is None and names.GATE not in pod.gates and self.binding:
                changed |= self._bind(raw, pod)
        return changed | self._report()

    def _bind(self, raw: dict[str, Any], pod: PodView) -> bool:
        for name, node in sorted(self.nodes.items()):
            if not node.ready or node.cordoned or not _allows(raw, name):
                continue
            here = [p for p in self.pods() if p.node == name and not p.ended]
            if not (node.allocatable - total(p.requests for p in here)).covers(pod.requests):
                # A coordinator came first: its pods are not part of the plan.
                assert pod.pinned is None or any(p.role == names.ROLE_COORDINATOR for p in here)
                continue
            assert not _shares(pod, here), f"I6: a replica of {pod.name} is on {name}"
            assert all(pod.selector[k] == node.labels.get(k) for k in pod.selector)
            raw["spec"]["nodeName"] = name
            raw["status"] = {"phase": "Running"}
            if self.refusing and pod.segment_name == self.refusing:
                raw["status"] = {"phase": "Failed", "reason": "SysctlForbidden", "message": "no"}
            raw["metadata"]["resourceVersion"] = str(self._next())
            if pod.role == names.ROLE_COORDINATOR:
                lease = names.coordinator_name(pod.topology or "")
                self.leases[lease] = LeaseView(
                    "default", lease, self._next(), str(pod.incarnation), self.now
                )
            return True
        return False

    def _report(self) -> bool:
        """Coordinators say what runs on nodes that have a kubelet."""
        changed = False
        for name, view in self.topologies.items():
            tasks = [
                {
                    "slot": p.slot.key,
                    "incarnation": p.incarnation,
                    "phase": "Live",
                    "stableEpoch": 1,
                    **self.said.get(p.name, {}),
                }
                for p in self.tasks(name).values()
                if p.slot and p.node and p.node not in self.dead
                if not (p.terminating or p.ended)
                if p.name not in self.stuck
            ]
            report = {"fence": 1, "tasks": sorted(tasks, key=lambda t: str(t["slot"]))}
            if view.data_plane != report and not view.deleting:
                status = {**view.status, "dataPlane": report}
                self.topologies[name] = replace(view, status=status, version=self._next())
                changed = True
        return changed

    # --- actions ----------------------------------------------------------------

    def apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._apply(action)

    def _apply(self, action: Action) -> None:
        match action:
            case TryPods(uid=uid, generation=generation):
                key = uid, generation
                self.trials[key] = replace(self.refusals.get(key, Trial()), at=self.now)
            case CreateConfig(manifest=manifest):
                self.configs[manifest["metadata"]["name"]] = manifest
            case DeleteConfig(name=name):
                self.configs.pop(name, None)
            case CreatePod():
                self._admit(action)
            case DeletePod():
                self._delete(action)
            case OpenGate():
                self._open(action)
            case WriteStatus(name=name, status=status):
                self._write(name, dict(status))
            case EnsureLease(manifest=manifest):
                name = manifest["metadata"]["name"]
                self.leases.setdefault(name, LeaseView("default", name, self._next(), "", self.now))
            case EmitEvent():
                if (action.reason, action.occasion) not in {
                    (e.reason, e.occasion) for e in self.events
                }:
                    self.events.append(action)
            case ShunNode(node, at):
                self.shunned[node] = at
            case EnsureAccess():
                pass

    def _admit(self, action: CreatePod) -> None:
        if self.quota is not None and len(self.raw_pods) >= self.quota:
            self.refused = self.refused.with_one(
                action.ref, "exceeded quota", self.now, action.lost_at
            )
        else:
            self.refused = self.refused.without(action.ref)
            self._create(copy.deepcopy(action.manifest))

    def _create(self, manifest: dict[str, Any]) -> None:
        meta = manifest["metadata"]
        owner = meta["labels"][names.LABEL_TOPOLOGY]
        assert not self.topologies[owner].deleting, "created for a topology that is going"
        base, _, incarnation = meta["name"].rpartition("-")
        assert int(incarnation) > self.highest.get(base, 0), f"{meta['name']} was there before"
        slots = self.topologies[owner].status["slots"]
        assert int(incarnation) in {s["incarnation"] for s in slots}, "not reserved before"
        self.highest[base] = int(incarnation)
        assert meta["name"] not in self.raw_pods
        meta |= {
            "uid": f"uid-{self._next()}",
            "resourceVersion": str(self._next()),
            "creationTimestamp": _rfc3339(self.now),
        }
        self.raw_pods[meta["name"]] = manifest

    def _delete(self, action: DeletePod) -> None:
        raw = self.raw_pods.get(action.name)
        if raw is None or raw["metadata"]["uid"] != action.uid:
            return
        if action.grace_s == 0 or not raw["spec"].get("nodeName"):
            del self.raw_pods[action.name]
        else:
            raw["metadata"]["deletionTimestamp"] = _rfc3339(self.now)

    def _open(self, action: OpenGate) -> None:
        raw = self.raw_pods[action.name]
        for operation in action.patch:
            *parents, last = operation["path"].strip("/").split("/")
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

    def _write(self, name: str, status: dict[str, Any]) -> None:
        view = self.topologies[name]
        before = {s["slot"]: s["incarnation"] for s in view.status.get("slots") or ()}
        after = {s["slot"]: s["incarnation"] for s in status.get("slots") or ()}
        assert all(v >= before.get(k, 0) for k, v in after.items()), "an incarnation fell"
        if view.data_plane:
            status["dataPlane"] = view.data_plane
        self.topologies[name] = replace(view, status=status, version=self._next())

    def _next(self) -> int:
        self.version += 1
        return self.version


def _allows(raw: dict[str, Any], node: str) -> bool:
    affinity = (raw["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms")
    return terms is None or any(
        all((node in f["values"]) == (f["operator"] == "In") for f in term["matchFields"])
        for term in terms
    )


def _shares(pod: PodView, others: Iterable[PodView]) -> bool:
    if pod.slot is None:
        return False
    return any(
        o.slot is not None
        and o.topology == pod.topology
        and (o.slot.segment, o.slot.partition) == (pod.slot.segment, pod.slot.partition)
        and o.slot.replica != pod.slot.replica
        for o in others
    )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
