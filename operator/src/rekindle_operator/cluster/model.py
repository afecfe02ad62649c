"""The state of the cluster at one moment, as the operator knows it: immutable, plain dataclasses.

Reconcile is a function of a `Snapshot` and a time. Times are seconds since 1970 by the operator's
clock. Ages of facts from other machines (a Lease, a suspicion) are measured from when this process
first saw them, so that a skewed clock cannot cause a loss. The `version` of a view is the object's
resourceVersion as a number.

Design: docs/design/kubernetes.md#time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from rekindle.errors import Problem
from rekindle.names import COORDINATOR_KEY, ROLE_COORDINATOR, ROLE_STANDBY, ROLE_TASK
from rekindle.report import Report, read_report
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.tokens import TokenDigests
from rekindle_operator.topology_status import TopologyStatus, read_topology_status

_ABANDONED_AFTER_S = 30.0  # longer than a pass and a request that hangs


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    key: str  # "": every key
    operator: str  # Exists | Equal
    value: str
    effect: str  # "": every effect

    def tolerates(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


@dataclass(frozen=True, slots=True)
class PodEndpoint:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    uid: str
    version: int
    ready: bool
    readiness_changed_at: float  # last change of the Ready condition, by its kubelet's clock
    cordoned: bool
    taints: tuple[Taint, ...]
    labels: Mapping[str, str]
    allocatable: ResourceAmounts
    kubelet: PodEndpoint | None = None  # as its status reports it
    created_at: float = 0.0  # by an API server's clock

    @property
    def zone(self) -> str:
        return self.labels.get("topology.kubernetes.io/zone", "")


@dataclass(frozen=True, slots=True)
class PodView:
    """Any pod of the cluster. Pods that are not Rekindle's count for the capacity they use."""

    namespace: str
    name: str
    uid: str
    version: int
    created_at: float  # by an API server's clock
    phase: str  # Pending | Running | Succeeded | Failed | Unknown
    node: str | None
    requests: ResourceAmounts
    terminating: bool = False
    accepted_by_kubelet: bool = False  # the kubelet of its node has started to handle it
    ready: bool = False  # its own container: of the task, or of the coordinator
    was_ready: bool = False  # now, or earlier
    started: bool = False  # its own container has passed its startup probe; of a standby: warm
    restarted_at: float | None = None  # when its own container last ended, by its kubelet's clock
    owner_uid: str | None = None
    topology: str | None = None
    role: str | None = None
    ip: str = ""
    helm_release: str = ""  # Helm release of the operator that it is a replica of; else empty
    image: str = ""  # that it was created with; admission may have changed it since
    slot: Slot | None = None
    segment_name: str = ""
    incarnation: int = 0
    generation: int = 0
    template_digest: str = ""  # of what it was made from; outdated if it would differ now
    token_digest: str = ""  # of the topology's token when it was made
    shape: str = ""  # digest of its spec, see `resources.shape`
    container_error: str = ""  # why its own container does not run
    sidecar_error: str = ""  # how another container fails, or failed last
    sidecar_failed_at: float = inf  # when it ended, by its kubelet's clock; infinite: it cannot run
    creating_containers: bool = False  # its node has created none yet, and no error is known
    gates: tuple[str, ...] = ()
    required_node: str | None = None  # the node that an open gate requires
    failed_placements: int = 0
    """Earlier incarnations that were not bound, or that a kubelet refused."""
    placement_failure: str = ""  # message of the scheduler; of its kubelet if it has failed
    predecessor_lost_at: float | None = None  # when the pod it replaces was lost, if it was
    replaces: str = ""  # name of the pod that it is to replace, in a move to an emptier node
    given_slot: str = ""  # of one that was a standby, as JSON
    annotations: Mapping[str, str] = field(default_factory=dict)  # of gated pods
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Mapping[str, Any] | None = None  # of pods that are not bound yet

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_managed(self) -> bool:
        """A pod of a topology, or of an operator: the operator watches its node."""
        return self.topology is not None or bool(self.helm_release)

    def as_foreign(self) -> PodView:
        """As a pod of no topology, which only uses capacity."""
        if self.topology is None and self.owner_uid is None:
            return self
        return replace(self, topology=None, role=None, slot=None, owner_uid=None)

    def as_owned_by(self, topology: str) -> PodView:
        """Without role and slot, if its labels do not say what it is in the topology."""
        is_task = self.role == ROLE_TASK and self.slot is not None
        others = (ROLE_COORDINATOR, ROLE_STANDBY)
        if self.topology == topology and (is_task or self.role in others):
            return self
        return replace(self, topology=topology, role=None, slot=None)

    @property
    def ref(self) -> IncarnationRef:
        slot = self.slot.key if self.slot is not None else ""
        if self.role == ROLE_COORDINATOR:
            slot = COORDINATOR_KEY
        return IncarnationRef(self.owner_uid or "", slot, self.incarnation)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """`seen_at`: when this process saw its last renewal. `report_number`: of the report that its
    holder wrote last and that is still valid; -1 if there is none, None if the holder's version
    does not number reports."""

    namespace: str
    name: str
    version: int
    holder: str
    seen_at: float
    report_number: int | None = None
    owner_uids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerationRecordView:
    """A ConfigMap with the labels of a generation record; `text` is its topology.json."""

    namespace: str
    name: str
    uid: str
    version: int
    owner_uid: str | None
    topology: str
    generation: int
    text: str
    digest: str = field(init=False, compare=False)  # of the text

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", record_digest(self.text))


@dataclass(frozen=True, slots=True)
class OwnedView:
    """An object of a topology of which only its content matters: its Secret, its coordinator's
    access, its disruption budget. `content`: without its values, if it is a Secret; `token`: of
    these."""

    kind: str
    namespace: str
    name: str
    version: int
    owner_uid: str | None
    content: Mapping[str, Any]
    token: TokenDigests | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.namespace, self.name


@dataclass(frozen=True, slots=True)
class TopologyView:
    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    creation_timestamp: str  # RFC 3339, as the API server wrote it
    deleting: bool
    spec: Mapping[str, Any]
    status: Mapping[str, Any]  # as the API server has it; `operator_status` and `report` are parsed
    roll: bool = False  # outdated running pods are to be replaced
    finalizers: tuple[str, ...] = ()  # what its deletion waits for
    operator_status: TopologyStatus = field(init=False, compare=False, repr=False)
    report: Report = field(init=False, compare=False, repr=False)  # of the coordinator

    def __post_init__(self) -> None:
        object.__setattr__(self, "operator_status", read_topology_status(self.status))
        object.__setattr__(self, "report", read_report(self.data_plane))

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def with_spec(self, generation: int, spec: Mapping[str, Any]) -> TopologyView:
        """The same object with the spec of another generation; its status is not parsed again."""
        other = copy(self)
        object.__setattr__(other, "generation", generation)
        object.__setattr__(other, "spec", spec)
        return other

    @property
    def data_plane(self) -> Mapping[str, Any]:
        return self.status.get("dataPlane") or {}


@dataclass(frozen=True, slots=True)
class IncarnationRef:
    """One incarnation of one slot of one topology."""

    topology_uid: str
    slot: str
    incarnation: int

    def is_same_slot(self, other: IncarnationRef) -> bool:
        return (self.topology_uid, self.slot) == (other.topology_uid, other.slot)


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Results of probing one kubelet or one pod. Times are when a probe was sent."""

    sent_at: float  # the last probe
    answered_probe_at: float | None = None  # when the newest probe with a response was sent
    # The first probe since then; it may still be in flight. After all timers were reset, because
    # this process was paused or isolated: when that was, until the next probe is sent.
    unanswered_since: float | None = None

    @property
    def unanswered_probe_since(self) -> float | None:
        """As `unanswered_since`; None if no probe was sent since the timers were reset."""
        first = self.unanswered_since
        return first if first is not None and first <= self.sent_at else None


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The API server's response to creating what a generation needs as a dry run. Accepted if there
    are no problems, and it does not wait. `at`: when; a refusal may be temporary (a webhook).
    `waits_for`: the API server's words about a full quota; empty if there is room."""

    problems: tuple[Problem, ...] = ()
    at: float = 0.0
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class UncreatedPod:
    """The API server has not created the pod of a reserved incarnation, as far as is known.
    `failures`: how many requests have failed in a row, of a coordinator's pod also those of earlier
    incarnations. `failed_at`: when the newest one did; `over_quota_since`: when the first one did
    since which all have found a quota full. `may_exist`: the newest request timed out or failed in
    the API server (5xx), so the pod may have been created, and have ended since then."""

    message: str
    failures: int
    retry_at: float
    predecessor_lost_at: float | None  # when the pod that it was to replace was lost
    failed_at: float = -inf
    over_quota_since: float | None = None
    may_exist: bool = False

    def is_abandoned(self, now: float) -> bool:
        """Whether the next request was not sent when it was due: the pod is not wanted any more, or
        again after a while. What failed before proves nothing then."""
        return now - self.retry_at > _ABANDONED_AFTER_S

    def is_before_loss(self, predecessor_lost_at: float | None) -> bool:
        """Whether all requests were sent while the predecessor worked, and it is lost now."""
        return predecessor_lost_at is not None and self.predecessor_lost_at is None

    def is_over_quota_for(self, seconds: float, now: float) -> bool:
        """Whether all requests over so long a time have found a quota full."""
        since = self.over_quota_since
        return (
            since is not None and self.failed_at - since >= seconds and not self.is_abandoned(now)
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    topologies: tuple[TopologyView, ...] = ()
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    leases: tuple[LeaseView, ...] = ()
    generation_records: tuple[GenerationRecordView, ...] = ()
    # By digest: of accepted records that this process has seen, also of deleted ones.
    record_data: Mapping[str, str] = field(default_factory=dict)
    # By kind, namespace and name.
    owned: Mapping[tuple[str, str, str], OwnedView] = field(default_factory=dict)
    # Of tasks that the report of their coordinator suspects: since when they have been silent.
    suspects_silent_since: Mapping[IncarnationRef, float] = field(default_factory=dict)
    # The same; a pause of this process does not move it.
    silence_began_at: Mapping[IncarnationRef, float] = field(default_factory=dict)
    # By the topology's uid: when its coordinator's report was last known to be true.
    report_times: Mapping[str, float] = field(default_factory=dict)
    # Since when this process can know who is silent: its start, or its last pause.
    observing_since: float = -inf
    kubelet_probes: Mapping[str, ProbeResults] = field(default_factory=dict)  # by the node's uid
    pod_probes: Mapping[str, ProbeResults] = field(default_factory=dict)  # by the pod's uid
    own_node: str = ""  # where this operator runs; empty if unknown
    quarantined: Mapping[str, float] = field(default_factory=dict)  # node's uid -> since when
    dry_runs: Mapping[tuple[str, int], DryRunResult] = field(
        default_factory=dict
    )  # (uid, generation)
    uncreated_pods: Mapping[IncarnationRef, UncreatedPod] = field(default_factory=dict)
    unsuitable: Mapping[str, frozenset[str]] = field(default_factory=dict)  # shape -> nodes
    # By uid, of pods of coordinators and of the operator that have a node: `cluster.phase_times`.
    pods_in_phase_since: Mapping[str, float] = field(default_factory=dict)
    # By uid: `cluster.first_seen`.
    pods_seen_at: Mapping[str, float] = field(default_factory=dict)
    pods_ungated_at: Mapping[str, float] = field(default_factory=dict)
    pods_ending_since: Mapping[str, float] = field(default_factory=dict)
    readiness_seen_at: Mapping[str, float] = field(default_factory=dict)  # of nodes
    # By the pod's uid; `failing`: its containers have errors, see `cluster.containers`.
    failing_since: Mapping[str, float] = field(default_factory=dict)
    creating_containers_since: Mapping[str, float] = field(default_factory=dict)  # by the pod's uid
    stalled_watches: tuple[str, ...] = ()  # kinds whose watch has been silent for too long
    failures: Mapping[str, str] = field(default_factory=dict)  # topology's uid -> failing action
    crd_missing_fields: tuple[str, ...] = ()  # of the CRD in the cluster: paths (`crd_fields`)

    def pod_age_s(self, pod: PodView, now: float) -> float:
        """Since it was first seen."""
        return now - self.pods_seen_at.get(pod.uid, now)

    def ungated_s(self, pod: PodView, now: float) -> float:
        """Since it was first seen without scheduling gates; 0 while it has some."""
        return now - self.pods_ungated_at.get(pod.uid, now)

    def ending_s(self, pod: PodView, now: float) -> float:
        """Since it was first seen with a deletion timestamp; infinite if that is not recorded."""
        return now - self.pods_ending_since.get(pod.uid, -inf)

    def readiness_age_s(self, node: NodeView, now: float) -> float:
        """Since the last change of its Ready condition was seen."""
        return now - self.readiness_seen_at.get(node.uid, now)


def record_digest(text: str) -> str:
    """Of the data of a generation record."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def without_forged(snapshot: Snapshot) -> Snapshot:
    """Pods with a forged owner count as foreign, and generation records with one are left out, as
    are Leases of a topology that had the name of another one before. Anyone who may create an
    object can write an owner reference into it, so it belongs to a topology only if its namespace
    agrees, and a record only if its label does too."""
    owners = {t.uid: (t.namespace, t.name) for t in snapshot.topologies}

    def owned_pod(pod: PodView) -> PodView:
        if (owner := owners.get(pod.owner_uid or "")) is None:
            return pod
        namespace, name = owner
        return pod.as_owned_by(name) if pod.namespace == namespace else pod.as_foreign()

    def is_forged(record: GenerationRecordView) -> bool:
        claimed = record.namespace, record.topology
        return owners.get(record.owner_uid or "", claimed) != claimed

    pods = tuple(owned_pod(p) for p in snapshot.pods)
    generation_records = tuple(c for c in snapshot.generation_records if not is_forged(c))
    leases = tuple(x for x in snapshot.leases if not x.owner_uids or x.owner_uids & owners.keys())
    return replace(snapshot, pods=pods, leases=leases, generation_records=generation_records)
