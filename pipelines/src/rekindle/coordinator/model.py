"""Types that the coordinator's packages share: pods, generations, effects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.checkpoints.manifest import Manifest
from rekindle.protocol import RestorePoint
from rekindle.report import Report
from rekindle.topology.model import Partition, Slot, Topology


@dataclass(frozen=True, slots=True)
class Pod:
    """A task's pod as in the API.

    `address` is None until it has an IP. `may_be_running` is False only if no process of the pod
    can be running: it has no address yet, or it has ended. `was_ready`: its task's container
    has started (its startup probe), or it is Ready. `node`: None if it is not known.
    """

    name: str
    slot: Slot
    incarnation: int
    address: str | None
    may_be_running: bool
    was_ready: bool
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted spec. `operator_ids`: segment id -> operator ids, of this and all known older
    generations."""

    number: int
    topology: Topology
    operator_ids: Mapping[str, tuple[str, ...]]

    @property
    def interval_s(self) -> float:
        """The epoch interval; the spec has it in microseconds."""
        return self.topology.spec.epoch_interval / 1e6

    @property
    def checkpoint_interval_epochs(self) -> int:
        return self.topology.spec.checkpoint_interval_epochs

    @property
    def checkpoint_interval_s(self) -> float:
        return self.checkpoint_interval_epochs * self.interval_s


# --- effects --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateMigration:
    """Create the entry of a new segment from entries of old segments with the same operators."""

    partition: Partition
    epoch: int
    operators: tuple[str, ...]
    sources: tuple[str, ...]  # names of the old entry objects, in the chain's order


@dataclass(frozen=True, slots=True)
class ReadNewestManifest:
    """Then `manifest_read`, or `store_failed`."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Put the migrated entries, then the manifest with their names in it, if its number is free.
    `new_entries` are the entry objects that are in no manifest yet: check first that their state
    objects exist. Then `manifest_written`, `manifest_race_lost`, `entries_refused` or
    `store_failed`."""

    manifest: Manifest
    new_entries: tuple[str, ...] = ()
    migrations: tuple[StateMigration, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectGarbage:
    """Delete what is needed neither by the newest `retain` manifests nor by an entry `in_use`,
    which a task still reads. `full_scan`: list the whole store, to find missing objects;
    `reported_lost`: check these state objects, which tasks found damaged or missing. Then
    `garbage_collected`."""

    retain: int
    full_scan: bool = False
    in_use: frozenset[str] = frozenset()
    reported_lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ApplyStatus:
    """Server-side-apply `status.dataPlane`; the last report wins."""

    report: Report


@dataclass(frozen=True, slots=True)
class PollNow:
    """Poll without waiting for the interval: the task's desired state has changed."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class StepDown:
    """Another coordinator has taken over: exit with code 3."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReportRestorePoint:
    """Write to the process's log from where a task is restored."""

    slot: Slot
    incarnation: int
    point: RestorePoint


Effect = (
    ReadNewestManifest
    | WriteManifest
    | CollectGarbage
    | ApplyStatus
    | PollNow
    | ReportRestorePoint
    | StepDown
)
