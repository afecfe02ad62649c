"""What reconcile asks for: imperative, complete, safe to do twice. Pure data.

Actions of one topology are done in order, and the first that fails ends that topology's turn:
so a status that reserves incarnations comes before the pods that carry them (design §8.5). A pod
that the API server refuses to create is the exception: other slots' gates and deletions go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle_operator.cluster.model import SlotRef
from rekindle_operator.resources.common import Manifest


@dataclass(frozen=True, slots=True)
class TryPods:
    """Create with dry run, and remember the API server's verdict on this generation."""

    namespace: str
    uid: str
    generation: int
    pods: tuple[tuple[str, Manifest], ...]  # field path to blame -> pod


@dataclass(frozen=True, slots=True)
class CreateConfig:
    namespace: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class DeleteConfig:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class EnsureAccess:
    """Server-side apply the coordinator's account, role and binding."""

    namespace: str
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class EnsureLease:
    namespace: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class CreateToken:
    """Create the Secret of the topology's token unless it exists; its value is drawn when it is
    created and is known to nobody here."""

    namespace: str
    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class CreatePod:
    """`ref`: whose pod, for the memory of refusals; `lost_at`: when what it replaces was lost."""

    namespace: str
    manifest: Manifest
    ref: SlotRef
    lost_at: float | None = None

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class DeletePod:
    """With its uid as precondition. Grace 0 is for pods whose node cannot answer; None: its own."""

    namespace: str
    name: str
    uid: str
    grace_s: int | None
    why: str


@dataclass(frozen=True, slots=True)
class OpenGate:
    namespace: str
    name: str
    uid: str
    node: str
    patch: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Server-side apply of all that the operator owns of the status. Not urgent: only figures that
    change all the time have changed."""

    namespace: str
    name: str
    uid: str
    status: Mapping[str, Any]
    urgent: bool


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """`occasion` tells two Events of one reason apart; the same occasion is told once."""

    namespace: str
    topology: str
    uid: str
    warning: bool
    reason: str
    action: str
    note: str
    occasion: str


@dataclass(frozen=True, slots=True)
class ShunNode:
    """Remember that a node was judged lost by silence while Kubernetes still calls it Ready."""

    node: str
    at: float


Action = (
    TryPods
    | CreateConfig
    | DeleteConfig
    | EnsureAccess
    | EnsureLease
    | CreateToken
    | CreatePod
    | DeletePod
    | OpenGate
    | WriteStatus
    | EmitEvent
    | ShunNode
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one topology (`namespace/name`; "" for what belongs to none) needs in this pass.
    `fault`: what deciding it tripped over, which is a fault of ours; then it has no actions."""

    owner: str
    actions: tuple[Action, ...]
    fault: Exception | None = None
