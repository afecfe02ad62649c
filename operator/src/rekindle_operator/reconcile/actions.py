"""Actions that reconcile decides on: imperative, complete, safe to execute twice. Pure data.

Their order and dependencies are in `reconcile.schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rekindle import names
from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.cluster.quota import PodExchange
from rekindle_operator.cluster.unsuitable import Cause
from rekindle_operator.resources.common import Manifest


@dataclass(frozen=True, slots=True)
class DryRun:
    """Create with dry run all that a generation needs, in the order of creation, and remember the
    API server's result for this generation. `objects`: those that do not exist, but for pods.
    `pods`: the field path for problems, and the pod. `exchange`: of the generation that runs for
    this one; None if none runs."""

    namespace: str
    uid: str
    generation: int
    objects: tuple[Manifest, ...]
    pods: tuple[tuple[str, Manifest], ...]
    exchange: PodExchange | None = None


@dataclass(frozen=True, slots=True)
class CreateGenerationRecord:
    namespace: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class DeleteGenerationRecord:
    """With its uid as a precondition."""

    namespace: str
    name: str
    uid: str


_ACCESS_KINDS = ("ServiceAccount", "Role", "RoleBinding")


@dataclass(frozen=True, slots=True)
class EnsureObject:
    """Server-side apply an object of a topology that is missing, or differs from its manifest. The
    values of a Secret are those that it had, as far as they are known, or generated
    (`rekindle_operator.tokens`). `tokens_of_pods`: digests, for a Secret.
    `is_usable`: pods can work with the object as it is, so none waits for what is corrected."""

    namespace: str
    manifest: Manifest
    tokens_of_pods: frozenset[str] = frozenset()
    is_usable: bool = False

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    def is_needed_by_pod(self, *, of_coordinator: bool) -> bool:
        """Tasks need nothing but the Secret: what is refused of the rest delays none of them."""
        kinds = ("Secret", *(_ACCESS_KINDS if of_coordinator else ()))
        return self.kind in kinds and not self.is_usable

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class CreatePod:
    """`ref`: slot and incarnation, to remember a refusal. `predecessor_lost_at`: when the pod that
    it replaces was lost; None if it replaces no lost pod. `refused`: not empty: no request is sent,
    and this counts as the message of a full quota."""

    namespace: str
    manifest: Manifest
    ref: IncarnationRef
    predecessor_lost_at: float | None = None
    refused: str = ""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def is_coordinator(self) -> bool:
        return self.ref.slot == names.COORDINATOR_KEY


@dataclass(frozen=True, slots=True)
class CreatePlaceholder:
    """A pod that stands for a gated one in a cluster autoscaler's view."""

    namespace: str
    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class DeletePod:
    """With its uid and resourceVersion as preconditions. `grace_s`: 0 for pods whose node cannot
    respond; None: the pod's own. `plan_needs_its_capacity`: this pass's plan includes what it
    frees. `is_replaced`: it works, and pods of the running generation replace it: it stays until
    what these need exists."""

    namespace: str
    name: str
    uid: str
    version: int
    grace_s: int | None
    why: str
    plan_needs_its_capacity: bool = False
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class OpenGate:
    namespace: str
    name: str
    uid: str
    node: str
    patch: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class GiveSlot:
    """Make a standby the task of a slot. `ref`: slot and incarnation, which no other pod has or
    will have: a request whose result is not known is not repeated under it. `standby`: its own,
    to remember a refusal."""

    namespace: str
    name: str
    uid: str
    ref: IncarnationRef
    standby: IncarnationRef
    patch: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Server-side apply of all that the operator owns of the status. Not urgent: only numbers that
    change with every epoch have changed. `new_incarnations`: those that it reserves, and that no
    status has had before: their pods wait for it. `accepts_generation`: it has the digest of a
    generation record that no status has had before, and the record waits for it.

    `replaces`: the status, at `version`, from which this one was decided. Another status is not
    replaced: it may list a reserved incarnation that this one does not know."""

    namespace: str
    name: str
    uid: str
    version: int
    replaces: Mapping[str, Any]
    status: Mapping[str, Any]
    urgent: bool
    new_incarnations: frozenset[IncarnationRef] = frozenset()
    accepts_generation: bool = False


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """There is one Event for each `reason` and `dedup_key`."""

    namespace: str
    topology: str
    uid: str
    warning: bool
    reason: str
    action: str
    note: str
    dedup_key: str


@dataclass(frozen=True, slots=True)
class QuarantineNode:
    """Remember a node that is lost because it is silent, while its status is still Ready."""

    node: str
    node_uid: str
    at: float


@dataclass(frozen=True, slots=True)
class AvoidNode:
    """Remember that a node did not bind, admit or start a pod of this shape. Such pods
    avoid it for a while (`cluster.unsuitable`); the node itself is not changed."""

    shape: str
    node: str
    node_uid: str
    pod_uid: str
    why: str
    cause: Cause = Cause.REFUSED


Action = (
    DryRun
    | CreateGenerationRecord
    | DeleteGenerationRecord
    | EnsureObject
    | CreatePod
    | CreatePlaceholder
    | DeletePod
    | OpenGate
    | GiveSlot
    | WriteStatus
    | EmitEvent
    | QuarantineNode
    | AvoidNode
)

METRIC_KINDS: Mapping[type, str] = {
    DryRun: "DryRunPods",
    CreateGenerationRecord: "CreateConfig",
    DeleteGenerationRecord: "DeleteConfig",
    EnsureObject: "EnsureObject",
    CreatePod: "CreatePod",
    CreatePlaceholder: "CreatePlaceholder",
    DeletePod: "DeletePod",
    OpenGate: "OpenGate",
    GiveSlot: "GiveSlot",
    WriteStatus: "WriteStatus",
    EmitEvent: "EmitEvent",
    QuarantineNode: "QuarantineNode",
    AvoidNode: "AvoidNode",
}
"""The label `kind` of `rekindle_operator_actions_total`: it does not change with a class's name."""


class PlanRank(NamedTuple):
    """The place of a pod in the order of the plan. The lowest is executed first."""

    replica_order: int  # 0: the partition's first replica; 1: a further one
    plan_position: int  # of the pod's query


FIRST = PlanRank(replica_order=-1, plan_position=0)  # coordinators, and what frees planned capacity
LAST = PlanRank(replica_order=2, plan_position=0)


@dataclass(frozen=True, slots=True)
class TopologyActions:
    """What one topology needs in this pass; `topology_key`: `namespace/name`, or a description of
    what belongs to no topology. `ranks`: by pod name. `error`: the error of the operator that
    stopped the decision; then it only reports. `topology_uid`: what fails is
    remembered by it, since another topology may have had the name."""

    topology_key: str
    actions: tuple[Action, ...]
    error: Exception | None = None
    ranks: Mapping[str, PlanRank] = field(default_factory=dict)
    topology_uid: str = ""
