"""Messages between coordinator and task: `POST /v1/poll` on the task's control port.

Tasks are passive. One call carries the complete desired state of the task (level-triggered,
idempotent), and the response carries all that the task knows about itself. JSON by pydantic. Each
request and response carries the topology's UID and the sender's protocol version
(`rekindle.identity`); unknown fields are ignored. A task refuses, in this order: a caller without
the topology's token (HTTP 401, without details), a protocol version that it does not understand
(426), another topology's poll (421), a poll for another incarnation of the slot (410), and a fence
(the coordinator's incarnation) that is lower than one it has seen (409; I9).

Design: docs/design/task.md#passive, docs/design/fencing.md#identity.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rekindle.errors import RekindleError
from rekindle.identity import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    UNREPORTED_STREAM_PROTOCOL,
    UNVERSIONED,
    Versions,
    incompatible,
)
from rekindle.topology.model import Slot
from rekindle.topology.spec import SinkSpec

STREAM_PORT = 8815
STREAM_SINK_PORT = 8816
CONTROL_PORT = 8080
MAX_POLL_BYTES = 16 << 20
"""A poll names every upstream replica: 1.2 MB for 8,000 tasks, the maximum of a topology."""


class _Message(BaseModel):
    # Digests never repeat, so a cache of strings (up to 16,384) would be useless.
    model_config = ConfigDict(frozen=True, extra="ignore", cache_strings=False)


class _Versioned(_Message):
    """`topology` is its UID."""

    protocol: int = PROTOCOL
    oldest_protocol: int = OLDEST_PROTOCOL
    topology: str = ""

    def versions(self) -> Versions:
        """The sender's versions. A message without them is from a release before versions."""
        if "protocol" not in self.model_fields_set:
            return Versions(UNVERSIONED, UNVERSIONED)
        return Versions(self.protocol, self.oldest_protocol)


class ConsistencyState(StrEnum):
    """Consistency state of a task's output (DPC, figure 2); the transitions are in
    `rekindle.consistency.states`."""

    STABLE = "STABLE"  # all output is stable, or corrected
    UP_FAILURE = "UP_FAILURE"  # inputs are missing or tentative; output is tentative
    STABILIZATION = "STABILIZATION"  # all inputs are corrected; output is being corrected

    @classmethod
    def _missing_(cls, value: object) -> ConsistencyState | None:
        """A state of a newer release is read as STABLE. Whether an epoch is tentative then follows
        from the numbers of the epochs alone."""
        return cls.STABLE if isinstance(value, str) else None


class TaskRef(_Message):
    """One incarnation of a slot (segment id, partition, replica)."""

    segment: str
    partition: int
    replica: int
    incarnation: int

    @classmethod
    def of(cls, slot: Slot, incarnation: int) -> TaskRef:
        return cls(
            segment=slot.segment,
            partition=slot.partition,
            replica=slot.replica,
            incarnation=incarnation,
        )

    @property
    def slot(self) -> Slot:
        return Slot(self.segment, self.partition, self.replica)


class Endpoint(_Message):
    """A replica that serves a stream partition to readers."""

    address: str  # "ip:port"
    replica: int
    incarnation: int
    suspected: bool = False
    lagging: bool = False  # many epochs behind another replica, which is Live
    state: ConsistencyState = ConsistencyState.STABLE  # of its output


class Upstream(_Message):
    """Replicas of one partition of one input stream."""

    stream: str  # operator id of the stream
    partition: int
    endpoints: tuple[Endpoint, ...]  # the preferred one first


class SinkAssignment(_Message):
    """A query that this task writes. `from_epoch` is the first epoch to write. The assignment
    contains the sink, because queries are added to running tasks. `definition` identifies what the
    query computes; `generation` is the generation it began with: of two definitions, the one with
    the higher generation is newer."""

    query: str
    from_epoch: int
    sink: SinkSpec
    definition: str = ""
    generation: int = 0

    def writes_same_output_as(self, other: SinkAssignment) -> bool:
        """Whether the same is written as with another assignment: only settings of the sink may
        differ that take effect in place."""
        mine = (self.query, self.from_epoch, self.definition, self.generation)
        others = (other.query, other.from_epoch, other.definition, other.generation)
        return mine == others and self.sink.writes_same_output_as(other.sink)


class SinkProgress(_Message):
    """How far a task has written an assigned query."""

    assigned: SinkAssignment
    durable: int  # newest epoch that is durable in the sink
    conflict: str | None = None  # a file that already exists with different rows


class Postponement(_Message):
    """A replica asks its partner to postpone its own stabilization for `lease_s`, and to serve the
    readers, while the replica itself stabilizes; 0: the partner need not any longer. Each boot
    numbers its requests in ascending order."""

    number: int
    lease_s: float


class PostponementAnswer(_Message):
    """The answer to a `Postponement` with this `number`, from this boot of the partner."""

    boot: str
    number: int
    promised: bool


class Partner(_Message):
    """The other one of two replicas that stabilize one after another (docs/design/consistency.md),
    with the contents of its newest poll response."""

    replica: int
    boot: str
    asks: Postponement | None = None
    answer: PostponementAnswer | None = None


class BegunWindow(_Message):
    """An operator that begins with a restore point, later than the topology: it lacks rows
    with event times through `after_us`, and through `added_us` after the newest event time of the
    task's own source through an epoch, for each (epoch, added_us) of `own`."""

    operator: str  # operator id
    after_us: int
    own: tuple[tuple[int, int], ...] = ()


class RestorePoint(_Message):
    """Start after `epoch`, from the entry `object`."""

    epoch: int
    object: str | None = None  # None: empty state
    # Operators whose state is not in the entry, although the topology is older.
    begun: tuple[BegunWindow, ...] = ()
    lender: Endpoint | None = None  # the replica that lends the entry; None: it is in the store
    # The log of an earlier boot has all epochs from here through `epoch`, for readers that are
    # behind (`PollResponse.held_log`); without them the task must not start. None: not needed.
    log_from: int | None = None


class PollRequest(_Versioned):
    fence: int
    generation: int
    task: TaskRef
    restore: RestorePoint | None = None  # ignored once the task has started
    upstreams: tuple[Upstream, ...] = ()
    sinks: tuple[SinkAssignment, ...] = ()
    floor: int | None = None  # the log may drop epochs <= floor; None: it keeps all
    saver: bool = False  # save checkpoints at checkpoint epochs
    lend: bool = False  # lend the newest state, not older than `committed`: see `PollResponse.lent`
    # False: it began with a lent state, and older epochs than those in its log may be needed.
    may_be_live: bool = True
    committed: RestorePoint | None = None  # this partition's entry in the newest manifest
    # Entries of this partition that cannot be restored, among those that the task reports and
    # `committed`. The task stops reporting them, does not reuse their objects, and saves all of its
    # state again.
    refused: tuple[str, ...] = ()
    ask_only: bool = False  # only respond: the desired state of the last poll without it stays
    # When the coordinator's process began, in Unix ms: if its container restarts, the next process
    # has the same fence.
    # Releases before this field do not send it.
    coordinator_boot: str = ""
    # Of the response from which this desired state follows: for another boot the poll is as one
    # with `ask_only`. "" (of the first poll, and of releases before this field): any boot.
    task_boot: str = ""
    # While replicas of this task's inputs, or its own, disagree (rekindle.coordinator.agreement):
    sinks_through: int | None = None  # sinks write no epoch above this; None: all
    digests_of: tuple[int, ...] = ()  # disputed epochs: respond with their digests too
    # To a source: respond with the event times through these epochs.
    event_times_of: tuple[int, ...] = ()
    disputed_digest: str | None = None  # which differ: "chained", "digest" (of an epoch) or "state"
    partner: Partner | None = None  # if it serves; only for tasks whose output may be tentative
    recompute: str | None = (
        None  # id of the boot that has to end; the next one starts without its log
    )
    # Before it starts: its sinks compare the files after its restore point, which may be wrong; and
    # it starts without its log, since an earlier boot that had to compute again may have ended
    # before it knew.
    compare_files: bool = False
    discard_log: bool = False


class Incompatible(RekindleError):
    """The sender's protocol version does not work with ours; names both versions."""


M = TypeVar("M", bound=_Versioned)


def decode(kind: type[M], data: bytes) -> M:
    """Parse a message. Raises Incompatible if the sender's version is incompatible, even if its
    message does not validate; ValidationError if it is not a message."""
    try:
        message = kind.model_validate_json(data)
    except ValidationError:
        _require_compatible(_versions_in(data))
        raise
    _require_compatible(message.versions())
    return message


def _require_compatible(peer: Versions) -> None:
    if (reason := incompatible(peer)) is not None:
        raise Incompatible(reason)


def _versions_in(data: bytes) -> Versions:
    """Versions in JSON that does not validate; our own if there are none, so that the caller
    raises the validation error."""
    try:
        document = json.loads(data)
        return Versions(int(document["protocol"]), int(document["oldest_protocol"]))
    except (ValueError, KeyError, TypeError):
        return Versions()


MAX_INTERVALS = 30
"""With a `replayTarget`, a checkpoint is due after this many intervals, however short a replay is:
logs, and what live sources have recorded, are kept since the last one."""


class TaskPhase(StrEnum):
    """Phase of a task; the transitions are in `rekindle.task.core.phases`."""

    WAITING = "Waiting"  # for a poll that names a restore point
    RESTORING = "Restoring"
    CATCHING_UP = "CatchingUp"
    LIVE = "Live"
    STOPPING = "Stopping"
    FAILED = "Failed"

    @property
    def serves(self) -> bool:
        """Whether readers may read from a task in this phase."""
        return self in (TaskPhase.CATCHING_UP, TaskPhase.LIVE)


@dataclass(frozen=True, slots=True)
class EntryRef:
    """One partition's state after an epoch, saved: in poll responses and in manifests."""

    epoch: int
    object: str | None  # the entry; None: empty state
    digest: str  # of the state, however it is laid out, so that replicas can be compared by it
    bytes: int = 0  # what this save wrote; not runs that older checkpoints had stored already


class TaskProblem(_Message):
    message: str
    where: str | None = None  # the source or operator that fails, or the segment
    epoch: int | None = None
    wrong_definition: str | None = None  # the source or operator whose definition is at fault
    saving: bool = False  # checkpoints cannot be saved, or the call that saves does not end


class Contradiction(_Message):
    """The first epoch for which the log of an earlier boot of this task has another result; readers
    may have used that one."""

    epoch: int
    message: str


class Contained(_Message):
    """Results of this boot that an earlier process of a coordinator held back, and that are still
    held back: all after the epoch `after`, and the epochs on which replicas disagree.
    `disputed_digest`: as in the poll; None: that process, or the task, does not know it."""

    after: int
    disputed: tuple[int, ...] = ()
    disputed_digest: str | None = None


class SourceProgress(_Message):
    """How far a task has read its live source. `behind`: positions (offsets of a topic) that are
    there, and not read; None: its end is not known yet. `bad_records`: those that were no rows
    since the task was restored; `example`: one of them, and why."""

    name: str
    behind: int | None = None
    bad_records: int = 0
    example: str = ""


class PollResponse(_Versioned):
    task: TaskRef
    boot_id: str
    fence: int
    engine: str = ""  # version of the engine: results of different versions are not compared
    phase: TaskPhase
    stable_epoch: int = -1  # newest epoch in the output log
    head_epoch: int = -1  # newest epoch that time or upstreams have released
    last_epoch: int | None = None  # of a bounded source: no later epoch has rows
    lag_s: float = 0.0  # age of the oldest released epoch that is not yet in the log
    restored_from: int | None = None  # epoch of the restore point it started from
    lent_from: int | None = None  # the same epoch, if a partner has lent the state
    lent: RestorePoint | None = None  # the newest state that it lends
    restoring: str | None = None  # entry whose objects it still fetches: do not delete them
    lost: str | None = None  # state object of the entry `restoring` that is damaged or missing
    log_base: int = 0  # lowest epoch still in the log
    # First and last epoch of the log with which the task will begin, while it waits for its restore
    # point: that of an earlier boot, or what is in the store.
    held_log: tuple[int, int] | None = None
    # While a reader is far behind: epochs of entries through which its log is in the store, or will
    # be. Manifests keep them: a successor in a new pod can restore no other.
    log_shipped: tuple[int, ...] = ()
    # Digests of the newest (at most 16) epochs, and of those requested by `digests_of`. `chained`:
    # digest of all output from a base to the epoch.
    digests: dict[int, str] = Field(default_factory=dict)
    chained: dict[int, str] = Field(default_factory=dict)
    checkpoints: tuple[EntryRef, ...] = ()  # saved and not yet committed, oldest first
    sinks: tuple[SinkProgress, ...] = ()
    source: SourceProgress | None = None  # if it is live
    hot_key: str = ""  # which key most of its rows have, and what to do; in words
    unreadable: tuple[str, ...] = ()  # addresses of upstream replicas it cannot read
    problem: TaskProblem | None = None
    contradiction: Contradiction | None = None  # until a checkpoint with the epoch is committed
    # Until the first poll without `ask_only` from the coordinator's newest process.
    contained: Contained | None = None
    # Its stream protocols. The oldest releases do not report them.
    stream_protocol: int = UNREPORTED_STREAM_PROTOCOL
    oldest_stream_protocol: int = UNREPORTED_STREAM_PROTOCOL
    # Of a task whose output may be tentative (docs/design/consistency.md):
    consistency: ConsistencyState = ConsistencyState.STABLE
    tentative_epoch: int = -1  # newest tentative epoch that is not corrected
    missing: tuple[str, ...] = ()  # names of the missing streams that make its output tentative
    asks: Postponement | None = None  # what it asks its partner
    answer: PostponementAnswer | None = None  # its answer to what its partner asked
    # Of a source, for the epochs of `event_times_of` in the poll, once it has opened its input: the
    # newest event time and the watermark. None: its release does not know.
    event_times: dict[int, tuple[int, int]] | None = None
    epoch_p99_s: float = 0.0  # 99th percentile of the processing times of its epochs
    # Mean time to process an epoch, of its newest calls; 0: it has processed none.
    epoch_mean_s: float = 0.0
    state_bytes: int = 0  # size of its state in memory, without compression
    log_bytes: int = 0

    def stream_versions(self) -> Versions:
        return Versions(self.stream_protocol, self.oldest_stream_protocol)
