"""The state of the model cluster, and what can happen to it.

Nodes die, freeze, are removed, or are only reported NotReady; watches stall; reports of
coordinators and the scheduler are late. Whether a Node object stays after its machine died is the
test's choice (`kill_node_until_not_ready`, `remove_node`).
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rekindle import names
from rekindle.identity import STREAM_PROTOCOL
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.convert import pod_view, topology_view
from rekindle_operator.cluster.first_seen import PodTimes, ReadinessTime
from rekindle_operator.cluster.model import (
    DryRunResult,
    IncarnationRef,
    LeaseView,
    NodeView,
    PodView,
    ProbeResults,
    TopologyView,
)
from rekindle_operator.cluster.phase_times import PhaseTime
from rekindle_operator.cluster.probes import TICK_S
from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.cluster.unsuitable import UnsuitableNodes
from rekindle_operator.reconcile.actions import EmitEvent
from rekindle_operator.settings import OperatorSettings
from rekindle_operator.tokens import SeenTokens

KUBERNETES_GRACE_S = 50.0  # after which a node without heartbeats is not Ready


class ModelState:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.api_and_kubelets_ahead_s = 0.0  # seconds of their clocks
        self.settings = OperatorSettings()
        self.version = 0
        self.raw_pods: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, NodeView] = {}
        self.topologies: dict[str, TopologyView] = {}
        self.generation_records: dict[str, dict[str, Any]] = {}
        self.leases: dict[str, LeaseView] = {}
        self.owned: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and name
        self.seen_tokens: dict[str, SeenTokens] = {}  # by Secret
        self.dry_runs: dict[tuple[str, int], DryRunResult] = {}
        self.suspects_silent_since: dict[IncarnationRef, float] = {}
        self.quarantined: dict[str, float] = {}  # node's uid -> since when
        self.refused_dry_runs: dict[tuple[str, int], DryRunResult] = {}  # prescribed by tests
        self.quota: int | None = None  # of pods
        self.refused_in: set[str] = set()  # namespaces in which pods are refused
        self.refused_segments: set[str] = set()  # names of segments whose pods are refused
        self.unbound_segments: set[str] = set()  # whose pods the scheduler binds to no node
        self.uncreated_pods = UncreatedPods({})
        self.unsuitable = UnsuitableNodes({})
        self.missing_fields: tuple[str, ...] = ()  # of the CRD
        self.failing: dict[str, float] = {}  # pod uid -> since when
        self.creating_containers: dict[str, float] = {}  # pod uid -> since when
        self.events: list[EmitEvent] = []
        self.binding = True  # the scheduler binds pods
        self.died_at: dict[str, float] = {}  # node -> when
        self.pods_respond = True  # the operator can reach those of running nodes
        self.kubelets_respond = True  # as above
        self.dead: set[str] = set()  # nodes without a kubelet
        self.stuck: set[str] = set()  # pods that have a node and never become Ready
        self.task_reports: dict[
            str, dict[str, Any]
        ] = {}  # pod -> additional fields of its task's report
        self.stream_protocol = STREAM_PROTOCOL  # of the coordinator's report
        self.checkpoint_epoch: int | None = None
        # Stream protocols that cannot read from each other, of the coordinator's report.
        self.stream_conflict: list[int] = []
        self.lags_s: dict[str, float] = {}  # query -> its lag in the coordinator's report
        # Query -> more of that report.
        self.query_reports: dict[str, dict[str, Any]] = {}
        self.refused_by_kubelets = ""  # the segment whose pods kubelets refuse
        self.highest: dict[str, int] = {}  # pod base name -> newest incarnation; none comes back
        self.binding_delay_s = 0.0
        self.opened: dict[str, float] = {}  # pod -> when the scheduler first saw it without gates
        self.report_delay_s = 0.0  # how old what coordinators write is when the operator reads it
        self.reports_lost = False  # coordinators cannot write; their Leases are still renewed
        self.report_times: dict[
            str, float
        ] = {}  # by topology uid: when its coordinator's report was last known true
        self.phases: Mapping[str, PhaseTime] = {}
        self.pod_times: Mapping[str, PodTimes] = {}
        self.readiness_times: Mapping[str, ReadinessTime] = {}
        # kind -> what its watch has delivered so far
        self.views_of_stalled_watches: dict[str, tuple[Any, ...]] = {}

    # --- changes ---------------------------------------------------------------

    def add_node(self, name: str, cpu_m: int = 4000, memory: int = 8 << 30, **more: Any) -> None:
        self.dead.discard(name)
        self.died_at.pop(name, None)
        version = self.next_version()
        self.nodes[name] = NodeView(
            name=name,
            uid=f"uid-{name}-{version}",
            version=version,
            ready=True,
            readiness_changed_at=self.now + self.api_and_kubelets_ahead_s,
            cordoned=False,
            taints=more.get("taints", ()),
            labels={"kubernetes.io/hostname": name, **more.get("labels", {})},
            allocatable=ResourceAmounts(cpu_m, memory, 50, more.get("others", ())),
        )

    def kill_node_until_not_ready(self, name: str) -> None:
        """It died so long ago that it is NotReady."""
        self.dead.add(name)
        long_ago = self.now - KUBERNETES_GRACE_S
        self.died_at[name] = min(long_ago, self.died_at.get(name, long_ago))
        self._turn([name], False)

    def kill_node_still_ready(self, name: str) -> None:
        """It dies now: its tasks become silent, and its status is still Ready."""
        self.dead.add(name)
        self.died_at[name] = self.now
        for pod in self.pods():
            if pod.node == name and pod.slot is not None and pod.owner_uid is not None:
                ref = IncarnationRef(pod.owner_uid, pod.slot.key, pod.incarnation)
                self.suspects_silent_since.setdefault(ref, self.now)

    def turn_not_ready(self, *nodes: str) -> None:
        """Their kubelets do not reach the API server; all pods on them keep running."""
        self._turn(nodes, False)

    def turn_ready(self, *nodes: str) -> None:
        self._turn(nodes, True)

    def _turn(self, nodes: Iterable[str], ready: bool) -> None:
        for name in nodes:
            version = self.next_version()
            self.nodes[name] = replace(
                self.nodes[name],
                ready=ready,
                readiness_changed_at=self.now + self.api_and_kubelets_ahead_s,
                version=version,
            )

    def stall(self, *kinds: str) -> None:
        """From now on the operator sees no change of pods, nodes, leases or topologies."""
        views = self.views(self.pods())
        self.views_of_stalled_watches |= {kind: views[kind] for kind in kinds}

    def resume(self) -> None:
        """The watches are connected again and have caught up."""
        self.views_of_stalled_watches.clear()

    def remove_node(self, name: str) -> None:
        self.dead.add(name)
        self.died_at.setdefault(name, self.now)
        del self.nodes[name]

    def add_topology(self, name: str, spec: dict[str, Any]) -> None:
        raw = {
            "metadata": {
                "namespace": "default",
                "name": name,
                "uid": f"uid-{name}",
                "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "resourceVersion": str(self.next_version()),
            },
            "spec": spec,
        }
        self.topologies[name] = topology_view(raw)

    def edit(self, name: str, **fields: Any) -> None:
        old = self.topologies[name]
        spec = {**old.spec, **fields}
        self.topologies[name] = replace(
            old, spec=spec, generation=old.generation + 1, version=self.next_version()
        )

    def delete(self, name: str) -> None:
        self.topologies[name] = replace(self.topologies[name], deleting=True)

    # --- content ---------------------------------------------------------------

    def pods(self) -> list[PodView]:
        return [view_of(raw) for raw in self.raw_pods.values()]

    def pods_of(self, topology: str, role: str) -> list[PodView]:
        """Not all are converted to views for a few."""
        wanted = (topology, role)
        raws = [(raw, raw["metadata"]["labels"]) for raw in self.raw_pods.values()]
        return [
            view_of(raw)
            for raw, labels in raws
            if (labels.get(names.LABEL_TOPOLOGY), labels.get(names.LABEL_ROLE)) == wanted
        ]

    def pods_on(self, node: str) -> list[PodView]:
        return [
            view_of(raw) for raw in self.raw_pods.values() if raw["spec"].get("nodeName") == node
        ]

    def views(self, pods: Iterable[PodView]) -> dict[str, tuple[Any, ...]]:
        return {
            "topologies": tuple(self.topologies.values()),
            "pods": tuple(pods),
            "nodes": tuple(self.nodes.values()),
            "leases": tuple(self.leases.values()),
        }

    def kubelet_probes(self) -> dict[str, ProbeResults]:
        """By the node's uid: results of probing kubelets all the time."""
        if not self.kubelets_respond:
            return {}
        responding = ProbeResults(self.now, self.now)
        return {
            node.uid: self._unanswered(name) if name in self.dead else responding
            for name, node in self.nodes.items()
        }

    def pod_probes(self, pods: Iterable[PodView]) -> dict[str, ProbeResults]:
        """By the pod's uid, of all that have a node."""
        if not self.pods_respond:
            return {}
        responding = ProbeResults(self.now, self.now)
        return {
            p.uid: self._unanswered(p.node) if p.node in self.dead else responding
            for p in pods
            if p.node is not None
        }

    def _unanswered(self, node: str) -> ProbeResults:
        at = self.died_at[node]
        return ProbeResults(self.now, at - TICK_S, unanswered_since=at)

    def next_version(self) -> int:
        self.version += 1
        return self.version


def view_of(raw: dict[str, Any]) -> PodView:
    """Cached: pods are read far more often than they change."""
    return _view_of(marshal.dumps(raw))


@functools.lru_cache(4096)
def _view_of(raw: bytes) -> PodView:
    return pod_view(marshal.loads(raw))
