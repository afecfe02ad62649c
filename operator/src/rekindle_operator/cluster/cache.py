"""The operator's cache of the API, and its memory of earlier passes; a snapshot has both.

Facts whose age matters get the time of this process's clock when it first sees them.

Design: docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from kubernetes import client

from rekindle import names
from rekindle_operator.cluster.addresses import (
    without_reused_ips,
    without_reused_kubelet_addresses,
)
from rekindle_operator.cluster.containers import creating_containers_since, failing_since
from rekindle_operator.cluster.convert import (
    Json,
    generation_record_view,
    lease_view,
    node_view,
    owned_view,
    pod_view,
    secret_view,
    topology_view,
    version_of,
)
from rekindle_operator.cluster.failures import ActionFailures
from rekindle_operator.cluster.first_seen import (
    PodTimes,
    ReadinessTime,
    ending_since,
    pod_times,
    readiness_times,
    seen_at,
    ungated_at,
)
from rekindle_operator.cluster.mirror import Mirror
from rekindle_operator.cluster.model import (
    DryRunResult,
    GenerationRecordView,
    IncarnationRef,
    LeaseView,
    NodeView,
    OwnedView,
    PodView,
    Snapshot,
    TopologyView,
    UncreatedPod,
)
from rekindle_operator.cluster.phase_times import PhaseTime, phase_times
from rekindle_operator.cluster.probes import ProbeState
from rekindle_operator.cluster.reports import ReportAges, coordinators_with_pods
from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.cluster.unsuitable import Cause, UnsuitableNodes
from rekindle_operator.tokens import SeenTokens, decoded, token_digest

_OWNED_KINDS: Sequence[tuple[str, Callable[[client.ApiClient], Any], str]] = (
    ("Secret", client.CoreV1Api, "secret"),
    ("ServiceAccount", client.CoreV1Api, "service_account"),
    ("Role", client.RbacAuthorizationV1Api, "role"),
    ("RoleBinding", client.RbacAuthorizationV1Api, "role_binding"),
    ("PodDisruptionBudget", client.PolicyV1Api, "pod_disruption_budget"),
)
"""Of the objects that a topology needs beside pods, records and Leases: kind, group, and what the
client calls it."""
_SYNC_CHECK_S = 0.5
_STALLED_S = 10.0  # twice the time to end a watch and open it again

logger = logging.getLogger(__name__)


def _relist(mirror: Mirror[Any]) -> bool:
    """False if it failed, for whatever reason: no error may end the control loop."""
    try:
        mirror.relist()
    except Exception as error:
        mirror.log_failed_list(error)
        return False
    return True


class ClusterCache:
    def __init__(
        self,
        api: client.ApiClient,
        namespace: str | None,
        clock: Callable[[], float],
        own_node: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own_node = own_node
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._crd_missing_fields: tuple[str, ...] = ()  # of the CRD in the cluster
        self._silent_since: dict[IncarnationRef, float] = {}
        # `suspected_since` of its report, and when it began; `reset_timers` does not move it.
        self._silence_began: dict[IncarnationRef, tuple[str, float]] = {}
        self._reports = ReportAges()
        self._failures = ActionFailures()
        self.kubelet_probes = ProbeState(detects_own_isolation=True)
        self.pod_probes = ProbeState()
        self.kubelet_probes.reconnected = self.pod_probes.reset_timers
        self._quarantined: dict[str, float] = {}  # by the node's uid
        self._dry_runs: dict[tuple[str, int], DryRunResult] = {}
        self._uncreated_pods = UncreatedPods({})
        self._unsuitable = UnsuitableNodes({})
        self._phases: Mapping[str, PhaseTime] = {}
        self._pod_times: Mapping[str, PodTimes] = {}
        self._readiness_times: Mapping[str, ReadinessTime] = {}
        self._failing_since: dict[str, float] = {}
        self._creating_containers_since: dict[str, float] = {}
        self._timers_reset_at = 0.0
        self._observing_since: float | None = None  # the first snapshot, or the last reset
        core, coordination = client.CoreV1Api(api), client.CoordinationV1Api(api)
        custom = client.CustomObjectsApi(api)
        list_topologies = (
            partial(custom.list_cluster_custom_object, names.GROUP, names.VERSION)
            if namespace is None
            else partial(
                custom.list_namespaced_custom_object, names.GROUP, names.VERSION, namespace
            )
        )
        self.topologies = Mirror[TopologyView](
            names.PLURAL,
            partial(list_topologies, names.PLURAL),
            topology_view,
            self.request_pass,
            monotonic,
            self._topology_changed,
        )
        self.pods = Mirror[PodView](
            "pods", core.list_pod_for_all_namespaces, pod_view, self.request_pass, monotonic
        )
        self.nodes = Mirror[NodeView](
            "nodes", core.list_node, node_view, self.request_pass, monotonic
        )
        self.generation_records = Mirror[GenerationRecordView](
            "configmaps",
            _in_namespace(
                namespace,
                core.list_namespaced_config_map,
                core.list_config_map_for_all_namespaces,
            ),
            self._record_view,
            self.request_pass,
            monotonic,
            label_selector=names.LABEL_TOPOLOGY,
        )
        self.leases = Mirror[LeaseView](
            "leases",
            _in_namespace(
                namespace,
                coordination.list_namespaced_lease,
                coordination.list_lease_for_all_namespaces,
            ),
            lambda raw: lease_view(raw, clock()),
            self.request_pass,
            monotonic,
            label_selector=names.LABEL_TOPOLOGY,
        )
        self._record_data: dict[str, str] = {}  # by digest
        self._seen_tokens: dict[tuple[str, str], SeenTokens] = {}
        self.owned = {
            kind: Mirror[OwnedView](
                f"{kind.lower()}s",
                _in_namespace(
                    namespace,
                    getattr(group(api), f"list_namespaced_{name}"),
                    getattr(group(api), f"list_{name}_for_all_namespaces"),
                ),
                self._secret_view if kind == "Secret" else partial(owned_view, kind=kind),
                self.request_pass,
                monotonic,
                label_selector=names.LABEL_TOPOLOGY,
            )
            for kind, group, name in _OWNED_KINDS
        }
        self._mirrors: tuple[Mirror[Any], ...] = (
            self.topologies,
            self.pods,
            self.nodes,
            self.generation_records,
            self.leases,
            *self.owned.values(),
        )
        self._namespace = namespace

    def start(self) -> None:
        for mirror in self._mirrors:
            mirror.start()

    @property
    def synced(self) -> bool:
        """Whether all kinds were listed once. Nothing is decided before that."""
        return all(m.synced for m in self._mirrors)

    def wait_until_synced(self) -> None:
        while not self.synced:
            self.wait_for_pass_request(_SYNC_CHECK_S)

    def relist_mirrors(self) -> bool:
        """List all kinds again; False if a list failed."""
        with ThreadPoolExecutor(len(self._mirrors)) as pool:
            return all(pool.map(_relist, self._mirrors))

    @property
    def mirror_ages(self) -> Mapping[str, float]:
        """By kind: seconds since the last response or event of the API server."""
        return {mirror.name: mirror.age_s for mirror in self._mirrors}

    @property
    def stalled_watches(self) -> tuple[str, ...]:
        """Kinds without a response or event of the API server for too long."""
        return tuple(m.name for m in self._mirrors if m.synced and m.age_s > _STALLED_S)

    def put_owned(self, kind: str, raw: Json) -> None:
        """An object as the API server sent it."""
        if kind == "Lease":
            self.leases.put(raw)
        else:
            self.owned[kind].put(raw)

    # --- tokens -----------------------------------------------------------------

    def _secret_view(self, raw: Json) -> OwnedView:
        """Also keeps the tokens, with which the Secret is restored if somebody changes it."""
        key = raw["metadata"]["namespace"], raw["metadata"]["name"]
        values = decoded(raw.get("data"))
        with self._lock:
            seen = self._seen_tokens.get(key, SeenTokens())
            self._seen_tokens[key] = seen.with_values(values, version_of(raw))
        return secret_view(raw)

    def seen_tokens(self, namespace: str, name: str) -> SeenTokens:
        """Of a Secret."""
        with self._lock:
            return self._seen_tokens.get((namespace, name), SeenTokens())

    def token_digest(self, namespace: str, name: str) -> str:
        return token_digest(self.seen_tokens(namespace, name).token)

    def _forget_tokens(self, topologies: Iterable[TopologyView], pods: Iterable[PodView]) -> None:
        """Those that no pod has. Anybody may create Secrets with the label of a topology."""
        of_pods: dict[str | None, set[str]] = defaultdict(set)
        for pod in pods:
            of_pods[pod.owner_uid].add(pod.token_digest)
        seen = self._seen_tokens
        self._seen_tokens = {
            key: seen[key].without_unused(of_pods[t.uid])
            for t in topologies
            if (key := (t.namespace, names.token_secret_name(t.name, t.uid))) in seen
        }

    # --- generation records -----------------------------------------------------

    def _record_view(self, raw: Json) -> GenerationRecordView:
        """Also keeps the data, with which an accepted record is restored if somebody deletes it."""
        view = generation_record_view(raw)
        with self._lock:
            self._record_data[view.digest] = view.text
        return view

    def _forget_records_except(self, topologies: Iterable[TopologyView]) -> None:
        """Anybody may create ConfigMaps with the labels of a record."""
        listed = (t.operator_status.generations or {} for t in topologies)
        kept = {digest for digests in listed for digest in digests.values()}
        self._record_data = {d: text for d, text in self._record_data.items() if d in kept}

    # --- waking the loop ------------------------------------------------------

    def request_pass(self) -> None:
        self._wake.set()

    def wait_for_pass_request(self, timeout_s: float) -> bool:
        woken = self._wake.wait(timeout_s)
        self._wake.clear()
        return woken

    # --- topologies -----------------------------------------------------------

    def _topology_changed(self, known: TopologyView | None, view: TopologyView | None) -> None:
        with self._lock:
            if known is not None and (view is None or view.uid != known.uid):
                self._reports.forget(known.uid)
                self._forget_silences(known.uid)
                self._uncreated_pods = self._uncreated_pods.without_topology(known.uid)
            if view is not None:
                self._read_report(view)

    def _read_report(self, view: TopologyView) -> None:
        """Keep the report's age, and since when each suspected task is silent. Times are by this
        process's clock."""
        now = self._clock()
        self._reports.observe(view, now)
        first = {
            IncarnationRef(view.uid, t.slot, t.incarnation): (t.suspected_since, now - t.silent_s)
            for t in view.report.tasks.values()
            if t.suspected
        }
        self._forget_silences(view.uid, kept=first)
        for ref, (silence, at) in first.items():
            known = self._silence_began.get(ref)
            if known is None or known[0] != silence:
                self._silence_began[ref] = silence, at
                self._silent_since[ref] = max(at, self._timers_reset_at)

    def _forget_silences(self, uid: str, kept: Container[IncarnationRef] = ()) -> None:
        """Of a topology's tasks, but for some."""
        for known in (self._silent_since, self._silence_began):
            for ref in [r for r in known if r.topology_uid == uid and r not in kept]:
                del known[ref]

    # --- kept between passes --------------------------------------------------

    def remember_crd_missing_fields(self, paths: tuple[str, ...]) -> None:
        self._crd_missing_fields = paths
        self.request_pass()

    def quarantine(self, node_uid: str, at: float) -> None:
        with self._lock:
            self._quarantined[node_uid] = at

    def action_failed(self, topology_uid: str, key: str, message: str) -> None:
        with self._lock:
            self._failures.failed(topology_uid, key, message, self._clock())

    def action_succeeded(self, key: str) -> None:
        with self._lock:
            self._failures.succeeded(key)

    def remember_dry_run(self, uid: str, generation: int, dry_run: DryRunResult) -> None:
        with self._lock:
            self._dry_runs = {k: v for k, v in self._dry_runs.items() if k[0] != uid}
            self._dry_runs[uid, generation] = dry_run
        self.request_pass()

    def remember_failed_create(
        self,
        ref: IncarnationRef,
        message: str,
        predecessor_lost_at: float | None,
        *,
        may_exist: bool,
        over_quota: bool = False,
    ) -> None:
        """After `remember_create_attempt`. Not if its pod was seen since then."""
        with self._lock:
            if ref in self._uncreated_pods.by_ref:
                self._uncreated_pods = self._uncreated_pods.with_failed_create(
                    ref,
                    message,
                    self._clock(),
                    predecessor_lost_at,
                    may_exist=may_exist,
                    over_quota=over_quota,
                )

    def remember_unsuitable(
        self, shape: str, node: str, node_uid: str, pod_uid: str, cause: Cause
    ) -> None:
        with self._lock:
            self._unsuitable = self._unsuitable.with_refusal(
                shape, node, node_uid, pod_uid, self._clock(), cause
            )

    def remember_create_attempt(
        self, ref: IncarnationRef, predecessor_lost_at: float | None
    ) -> None:
        with self._lock:
            self._uncreated_pods = self._uncreated_pods.with_create_attempt(
                ref, self._clock(), predecessor_lost_at
            )

    def forget_uncreated_pods(self) -> None:
        """At the start of a term: another leader may have created the pods."""
        with self._lock:
            self._uncreated_pods = UncreatedPods({})

    def forget_uncreated_pod(self, ref: IncarnationRef) -> None:
        with self._lock:
            self._uncreated_pods = self._uncreated_pods.without_slot(ref)

    def observe_anew(self) -> None:
        """After a pause this process does not know who responds."""
        with self._lock:
            self._observing_since = self._clock()

    def reset_timers(self) -> None:
        """The API server did not respond, or this process was paused. What was silent until now
        need not be lost, and what looks unchanged may have changed in between."""
        with self._lock:
            self._timers_reset_at = self._observing_since = now = self._clock()
            self._silent_since = dict.fromkeys(self._silent_since, now)
            self._failing_since = dict.fromkeys(self._failing_since, now)
            self._creating_containers_since = dict.fromkeys(self._creating_containers_since, now)
            self._phases, self._pod_times = {}, {}
            self.kubelet_probes.reset_timers(now)
            self.pod_probes.reset_timers(now)

    def _pods_failing_since(self, pods: tuple[PodView, ...]) -> Mapping[str, float]:
        with self._lock:
            self._failing_since = failing_since(self._failing_since, pods, self._clock())
            return self._failing_since

    def _pods_creating_containers_since(self, pods: tuple[PodView, ...]) -> Mapping[str, float]:
        with self._lock:
            self._creating_containers_since = creating_containers_since(
                self._creating_containers_since, pods, self._clock()
            )
            return self._creating_containers_since

    def _pods_in_phase_since(self, pods: tuple[PodView, ...]) -> Mapping[str, float]:
        with self._lock:
            self._phases = phase_times(self._phases, pods, self._clock())
            return {uid: phase.since for uid, phase in self._phases.items()}

    def _pods_seen(self, pods: tuple[PodView, ...]) -> Mapping[str, PodTimes]:
        with self._lock:
            self._pod_times = pod_times(self._pod_times, pods, self._clock())
            return self._pod_times

    def _readiness_seen_at(self, nodes: tuple[NodeView, ...]) -> Mapping[str, float]:
        with self._lock:
            self._readiness_times = readiness_times(self._readiness_times, nodes, self._clock())
            return {uid: time.seen_at for uid, time in self._readiness_times.items()}

    def _uncreated_pods_without(
        self, pods: tuple[PodView, ...]
    ) -> Mapping[IncarnationRef, UncreatedPod]:
        with self._lock:
            if self._uncreated_pods.by_ref:
                self._uncreated_pods = self._uncreated_pods.without_created({p.ref for p in pods})
            return self._uncreated_pods.by_ref

    def snapshot(self) -> Snapshot:
        pods = self.pods.views()
        coordinators = coordinators_with_pods(pods)
        topologies = tuple(sorted(self.topologies.views(), key=lambda t: t.key))
        with self._lock:
            self._forget_tokens(topologies, pods)
            self._forget_records_except(topologies)
            record_data = self._record_data
            silent, quarantined = dict(self._silent_since), dict(self._quarantined)
            silence_began = {ref: at for ref, (_, at) in self._silence_began.items()}
            dry_runs, reset_at = dict(self._dry_runs), self._timers_reset_at
            if self._observing_since is None:
                self._observing_since = self._clock()
            observing_since = self._observing_since
            lease_views = self.leases.views()
            report_times = dict(self._reports.as_of(topologies, lease_views, coordinators))
            failures = self._failures.by_topology(self._clock())
        leases = tuple(
            x if x.seen_at >= reset_at else replace(x, seen_at=reset_at) for x in lease_views
        )
        pods = without_reused_ips(pods)
        nodes = without_reused_kubelet_addresses(self.nodes.views())
        if self._namespace is not None:
            # Tasks of another operator only use capacity, as all other pods do.
            pods = tuple(p if p.namespace == self._namespace else p.as_foreign() for p in pods)
        seen = self._pods_seen(pods)
        return Snapshot(
            topologies=topologies,
            pods=pods,
            nodes=nodes,
            leases=leases,
            generation_records=self.generation_records.views(),
            record_data=record_data,
            owned={view.key: view for mirror in self.owned.values() for view in mirror.views()},
            suspects_silent_since=silent,
            silence_began_at=silence_began,
            report_times=report_times,
            stalled_watches=self.stalled_watches,
            crd_missing_fields=self._crd_missing_fields,
            failures=failures,
            observing_since=observing_since,
            kubelet_probes=self.kubelet_probes.results,
            pod_probes=self.pod_probes.results,
            own_node=self._own_node,
            quarantined=quarantined,
            dry_runs=dry_runs,
            uncreated_pods=self._uncreated_pods_without(pods),
            unsuitable=self._unsuitable.by_shape({n.name: n.uid for n in nodes}, self._clock()),
            pods_in_phase_since=self._pods_in_phase_since(pods),
            pods_seen_at=seen_at(seen),
            pods_ungated_at=ungated_at(seen),
            pods_ending_since=ending_since(seen),
            readiness_seen_at=self._readiness_seen_at(nodes),
            failing_since=self._pods_failing_since(pods),
            creating_containers_since=self._pods_creating_containers_since(pods),
        )


def _in_namespace(
    namespace: str | None, of_one: Callable[..., Any], of_all: Callable[..., Any]
) -> Callable[..., Any]:
    """With `watchNamespace` the operator has no right to list other namespaces."""
    return of_all if namespace is None else partial(of_one, namespace)
