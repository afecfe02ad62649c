"""What the coordinator's cores say to each other: partitions, pods, events and effects.

Pure data. Events are what happened (past tense), effects what the shell shall do (imperative).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.checkpoints.manifest import Manifest
from rekindle.protocol import PollResponse
from rekindle.topology.model import Slot, Topology


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One partition of a segment, without saying which replica."""

    segment: str
    index: int

    @property
    def key(self) -> str:
        """Its name in a manifest."""
        return f"{self.segment}/{self.index}"


def partition_of(slot: Slot) -> Partition:
    return Partition(slot.segment, slot.partition)


@dataclass(frozen=True, slots=True)
class Pod:
    """A task's pod as the API server shows it.

    `address` is None until it has an IP. `runs` is False only where the pod proves that no process
    of it does anything: it has no address yet, or it has ended. `started` says that it has once
    been ready to answer.
    """

    name: str
    slot: Slot
    incarnation: int
    address: str | None
    runs: bool
    started: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted spec. `lineage`: segment id -> operator ids, of this and of all older
    generations that are known."""

    number: int
    topology: Topology
    lineage: Mapping[str, tuple[str, ...]]

    @property
    def interval_s(self) -> float:
        return self.topology.spec.epoch_interval / 1e6

    @property
    def checkpoint_every(self) -> int:
        return self.topology.spec.checkpoint_every

    @property
    def checkpoint_interval_s(self) -> float:
        return self.checkpoint_every * self.interval_s


# --- events ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GenerationSeen:
    """The newest generation's ConfigMap was read."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class PodsListed:
    """All pods of the topology's tasks, after every change."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class PollAnswered:
    slot: Slot
    incarnation: int
    response: PollResponse


@dataclass(frozen=True, slots=True)
class PollFailed:
    """No answer: timed out, or another incarnation is at that address (HTTP 410). `refused`: the
    token, the topology or the protocol version does not match, which no later poll cures."""

    slot: Slot
    incarnation: int
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class FenceRaised:
    """A task, the store or the API server knows a newer coordinator (I9)."""

    by: str


@dataclass(frozen=True, slots=True)
class ManifestRead:
    """The store's newest manifest; None where there is none. `store`: the store's id."""

    manifest: Manifest | None
    store: str | None = None


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ManifestRaceLost:
    """Another manifest has this number already."""

    seq: int


@dataclass(frozen=True, slots=True)
class EntriesRefused:
    """Nothing was written: these entries name states that the store does not hold."""

    objects: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Reading, writing or cleaning up did not work; whether something was written is not known."""

    message: str


@dataclass(frozen=True, slots=True)
class GarbageCollected:
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ProblemChanged:
    """The shell's own trouble, by subject; None when it is over."""

    subject: str
    message: str | None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = (
    GenerationSeen
    | PodsListed
    | PollAnswered
    | PollFailed
    | FenceRaised
    | ManifestRead
    | ManifestWritten
    | ManifestRaceLost
    | EntriesRefused
    | StoreFailed
    | GarbageCollected
    | ProblemChanged
    | Ticked
)


# --- effects --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateMigration:
    """Make the entry of a new segmentation out of entries of an old one."""

    partition: Partition
    epoch: int
    operators: tuple[str, ...]
    sources: tuple[str, ...]  # names of the old entry objects, in the chain's order


@dataclass(frozen=True, slots=True)
class ReadNewestManifest:
    """Answer with ManifestRead or StoreFailed."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Put the assembled entries, then the manifest with their names in it, if its number is free.
    `fresh` are the entry objects that no manifest has named before: their states are looked for
    first. Answer with ManifestWritten, ManifestRaceLost, EntriesRefused or StoreFailed."""

    manifest: Manifest
    fresh: tuple[str, ...] = ()
    migrations: tuple[StateMigration, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectGarbage:
    """Delete what the newest `retain` manifests do not need. Answer with GarbageCollected."""

    retain: int


@dataclass(frozen=True, slots=True)
class ApplyStatus:
    """Server-side-apply `status.dataPlane`; the last one wins."""

    data_plane: Mapping[str, object] = field(hash=False)


@dataclass(frozen=True, slots=True)
class PollNow:
    """Do not wait for the interval: this task's wish changed in a way that matters."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Another coordinator is in charge: end with exit code 3."""

    reason: str


Effect = ReadNewestManifest | WriteManifest | CollectGarbage | ApplyStatus | PollNow | GiveUp
