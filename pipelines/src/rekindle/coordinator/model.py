"""Types that the coordinator's packages share: partitions, pods, effects, the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.checkpoints.manifest import Manifest
from rekindle.identity import STREAM_PROTOCOL
from rekindle.protocol import CheckpointProblemKind, RestorePoint
from rekindle.topology.model import Slot, Topology


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One partition of a segment, any replica."""

    segment: str
    index: int

    @property
    def key(self) -> str:
        """Its key in a manifest."""
        return f"{self.segment}/{self.index}"


def partition_of(slot: Slot) -> Partition:
    return Partition(slot.segment, slot.partition)


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


# --- the report: `status.dataPlane`, serialised by `shell.objects` ----------


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Fields are None if they are unknown, or do not apply. `suspected_since`: RFC 3339."""

    slot: str
    incarnation: int
    pod: str
    phase: str
    suspected: bool
    suspected_since: str | None = None
    silent_s: float | None = None
    stable_epoch: int | None = None
    restored_from: int | None = None
    problem: str | None = None
    wrong_definition: str | None = None  # the source or operator whose definition is at fault
    saving_fails: bool | None = None  # True: `problem` says why it saves no checkpoints
    output_state: str | None = None  # None: STABLE
    tentative_epoch: int | None = None  # the newest one that is not corrected
    missing_inputs: tuple[str, ...] = ()  # streams without which its output is tentative
    durable_epoch: int | None = None  # that all its sinks have; None: it has no sinks
    untrusted: bool | None = None  # True: nobody may read it; None: it may be read


@dataclass(frozen=True, slots=True)
class MissingResults:
    """Results of a query that no definition of it has written since a generation. Epochs are
    inclusive. `from_time`, `to_time`: RFC 3339; of windows, the starts of the first one that is
    missing and of the first one that is not; else the event times of rows. None: not known."""

    from_epoch: int
    to_epoch: int
    since_generation: int
    from_time: str | None = None
    to_time: str | None = None


@dataclass(frozen=True, slots=True)
class QueryReport:
    name: str
    durable_epoch: int  # written by every partition's sink
    lag_s: float | None  # None: no source has released an epoch to this coordinator
    finished: bool | None = None  # True: its input has ended, and its sink has all results
    missing: tuple[MissingResults, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """`time`: RFC 3339."""

    epoch: int
    seq: int
    time: str
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    """`message` is in `Report.problems` too."""

    kind: CheckpointProblemKind
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    fence: int
    tasks: tuple[TaskReport, ...]
    queries: tuple[QueryReport, ...]
    diverged: tuple[str, ...]
    inconsistent: tuple[str, ...]
    problems: tuple[str, ...]
    checkpoint_problems: tuple[CheckpointProblem, ...]
    stream_protocol: int = STREAM_PROTOCOL  # of this image
    stream_conflict: tuple[int, ...] = ()  # stream protocols that cannot read from each other
    generation: int | None = None
    head_epoch: int | None = None
    store: str | None = None
    checkpoint: CheckpointReport | None = None


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
