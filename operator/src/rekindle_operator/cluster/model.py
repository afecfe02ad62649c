"""What the operator sees of the cluster at one moment: immutable, without the client's classes.

Reconcile is a function of a `Snapshot` and a time. Times are seconds since 1970 by the operator's
clock; ages that need another machine's clock (a Lease's, a suspicion's) are measured from when this
process first saw the fact, so that a skewed clock cannot make a loss.

Design: docs/design/kubernetes.md#time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.errors import Problem
from rekindle.names import COORDINATOR_SLOT, ROLE_COORDINATOR
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import Amounts


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


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
class Endpoint:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    uid: str
    version: int
    ready: bool
    ready_since: float  # last change of the Ready condition
    cordoned: bool
    taints: tuple[Taint, ...]
    labels: Mapping[str, str]
    allocatable: Amounts
    kubelet: Endpoint | None = None  # where it says that it can be asked

    @property
    def zone(self) -> str:
        return self.labels.get("topology.kubernetes.io/zone", "")


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod of any owner. Those that are not Rekindle's matter for the room they take."""

    namespace: str
    name: str
    uid: str
    version: int
    created_at: float
    phase: str  # Pending | Running | Succeeded | Failed | Unknown
    node: str | None
    requests: Amounts
    terminating: bool = False
    accepted: bool = False  # its node's kubelet has taken notice of it
    ready: bool = False
    was_ready: bool = False  # now or at some time
    owner_uid: str | None = None
    topology: str | None = None
    role: str | None = None
    ip: str = ""
    release: str = ""  # of a replica of an operator
    image: str = ""  # of its first container
    slot: Slot | None = None
    segment_name: str = ""
    incarnation: int = 0
    generation: int = 0
    template: str = ""  # digest of what it was made from
    shape: str = ""  # digest of its spec, see `resources.shape`
    trouble: str = ""  # why its containers do not run, and are not ready
    preparing: bool = False  # its node has yet to make a container, and none says why
    gates: tuple[str, ...] = ()
    opened_at: float | None = None
    pinned: str | None = None  # the node that an open gate requires
    attempt: int = 0  # incarnations before it that no node took, or whose kubelet refused them
    refusal: str = ""  # what the scheduler says of it, or its kubelet if it has failed
    lost_at: float | None = None  # when the pod it replaces was lost
    annotations: Mapping[str, str] = field(default_factory=dict)  # of gated pods
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Mapping[str, Any] | None = None  # of pods that are not bound yet

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_watched(self) -> bool:
        """A pod of a topology or a replica of an operator: its node matters."""
        return self.topology is not None or bool(self.release)

    def as_foreign(self) -> PodView:
        """As a pod that is no topology's: what is left is the room that it takes."""
        if self.topology is None and self.owner_uid is None:
            return self
        return replace(self, topology=None, role=None, slot=None, owner_uid=None)

    @property
    def ref(self) -> SlotRef:
        slot = self.slot.key if self.slot is not None else ""
        if self.role == ROLE_COORDINATOR:
            slot = COORDINATOR_SLOT
        return SlotRef(self.owner_uid or "", slot, self.incarnation)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """`seen_at`: when this process saw its last renewal. `report`: the number of the report that
    its holder has written and that is still true; -1: none, None: it does not number them."""

    namespace: str
    name: str
    version: int
    holder: str
    seen_at: float
    report: int | None = None


@dataclass(frozen=True, slots=True)
class ConfigView:
    """The ConfigMap of an accepted generation; `text` is its topology.json."""

    namespace: str
    name: str
    version: int
    owner_uid: str | None
    topology: str
    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class TopologyView:
    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    created: str  # RFC 3339, as the API server wrote it
    deleting: bool
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    roll: bool = False  # running pods that are outdated are to be replaced

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def data_plane(self) -> Mapping[str, Any]:
        return self.status.get("dataPlane") or {}


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One incarnation of one slot of one topology: what silence and refusals are told of."""

    topology_uid: str
    slot: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class KubeletReplies:
    """What came of asking one kubelet, or one pod, one question at a time. Times are those of the
    questions."""

    asked: float
    answered: float | None = None  # the last that was answered
    unanswered: float | None = None  # the first since then; also one that is still open


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The API server's verdict on the pods of a generation (dry run). No problems: accepted.
    `at`: when it was given; a refusal may pass (a quota, a webhook that was away)."""

    problems: tuple[Problem, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server did not create the pod of a reserved incarnation, or did not say that it did
    (`tries` 0: nobody has asked it yet, or it has not answered)."""

    message: str
    tries: int
    again_at: float
    lost_at: float | None  # when the pod that it was to replace was lost


@dataclass(frozen=True, slots=True)
class Snapshot:
    topologies: tuple[TopologyView, ...] = ()
    pods: tuple[PodView, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    leases: tuple[LeaseView, ...] = ()
    configs: tuple[ConfigView, ...] = ()
    silent_since: Mapping[SlotRef, float] = field(default_factory=dict)
    # By the topology's uid: when its coordinator's report was last known to be true.
    reports: Mapping[str, float] = field(default_factory=dict)
    kubelets: Mapping[str, KubeletReplies] = field(default_factory=dict)  # by the node's uid
    pod_replies: Mapping[str, KubeletReplies] = field(default_factory=dict)  # by the pod's uid
    own_node: str = ""  # where this operator runs, if it knows
    quarantined: Mapping[str, float] = field(
        default_factory=dict
    )  # node -> when it was judged silent
    dry_runs: Mapping[tuple[str, int], DryRunResult] = field(
        default_factory=dict
    )  # (uid, generation)
    refusals: Mapping[SlotRef, Refusal] = field(default_factory=dict)
    unsuitable: Mapping[str, frozenset[str]] = field(default_factory=dict)  # shape -> nodes
    phase_since: Mapping[str, float] = field(default_factory=dict)  # by uid, see `cluster.stamps`
    troubled_since: Mapping[str, float] = field(default_factory=dict)  # by the pod's uid
    preparing_since: Mapping[str, float] = field(default_factory=dict)  # by the pod's uid
    stalled: tuple[str, ...] = ()  # kinds whose watch has not been heard for too long
    failures: Mapping[str, str] = field(default_factory=dict)  # `namespace/name` -> what fails


def without_forged(snapshot: Snapshot) -> Snapshot:
    """A pod is a topology's if that controls it, and both have one namespace: an owner reference is
    what whoever may create a pod anywhere writes into it."""
    places = {t.uid: (t.namespace, t.name) for t in snapshot.topologies}
    pods = tuple(
        p
        if places.get(p.owner_uid or "", (p.namespace, p.topology)) == (p.namespace, p.topology)
        else p.as_foreign()
        for p in snapshot.pods
    )
    return replace(snapshot, pods=pods)
