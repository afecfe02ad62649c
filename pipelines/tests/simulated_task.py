"""A real `TaskCore` without rows: its engine, log, sinks and store are in memory, and wrong if they
are told to be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.coordinator.model import partition_of
from rekindle.engine.model import EpochOutput, State
from rekindle.protocol import (
    CheckpointDone,
    Contradiction,
    PollRequest,
    PollResponse,
    SinkAssignment,
    TaskPhase,
    TaskRef,
)
from rekindle.streams.digest import chained_digest_from
from rekindle.streams.epochs import NO_EPOCH, EpochInput
from rekindle.task.core.events import Woken
from rekindle.task.core.loop import (
    AppendEpochs,
    EpochAppended,
    EpochsProcessed,
    EpochsTaken,
    ProcessEpochs,
    TakeEpochs,
)
from rekindle.task.core.messages import (
    CallSink,
    HeadAdvanced,
    LogTruncated,
    OfSink,
    PollReceived,
    RefusePoll,
    Respond,
    TaskCoreEvent,
    TaskEffect,
    TaskRestored,
    TaskSettings,
)
from rekindle.task.core.saver import EntrySaved, SaveFailed, SaveState, SkipState
from rekindle.task.core.sink import EpochWritten, OpenSink, SinkOpened, WriteEnded, WriteEpochs
from rekindle.task.core.supervisor import (
    DiscardLog,
    EndProcess,
    RouteInputs,
    StartTask,
    TruncateLog,
)
from rekindle.task.core.task import TaskCore
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot


@dataclass(frozen=True, slots=True)
class Digest:
    """The rows of an epoch: only their digest."""

    text: str
    num_rows: int = 0
    nbytes: int = 0


class SimulatedTask:
    """One incarnation of a slot, and what is around its core. `entries` is the store: corruption
    and chained digest of each saved state."""

    def __init__(
        self,
        slot: Slot,
        incarnation: int,
        entries: dict[str, tuple[str, str]] | None = None,
        every: int = 4,
        interval_us: int = 1_000_000,
    ) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.boot = 0
        self.frozen = False
        self.store_fails = False
        self.sink_lag = 0
        self.corruption = ""  # of all that it computes from now on
        self.corrupt_from = 0  # earlier epochs are correct
        self.engine = "e1"
        self.contradiction: Contradiction | None = None  # with the log of an earlier boot
        self.ignores_polls = False  # responds, but does not follow its desired state
        self.polls: list[PollRequest] = []
        self.logged: dict[int, str] = {}
        self.log_base, self.log_last = 0, NO_EPOCH  # also of the log of an earlier boot
        self.now = 0.0
        self._entries = entries if entries is not None else {}
        self._every, self._interval_us = every, interval_us
        self._begin()

    def _begin(self) -> None:
        ref = TaskRef(
            segment=self.slot.segment,
            partition=self.slot.partition,
            replica=self.slot.replica,
            incarnation=self.incarnation,
        )
        settings = TaskSettings(
            ref, self.boot_id, self._every, self._interval_us, engine=self.engine, fence=0
        )
        self.core = TaskCore(settings)
        self._take: TakeEpochs | None = None
        self._start: StartTask | None = None
        self._writes: dict[SinkAssignment, int] = {}  # calls in progress, and where they begin
        self._response: PollResponse | None = None
        self._ended: list[TaskEffect] = []

    @property
    def boot_id(self) -> str:
        return f"{self.incarnation}.{self.boot}"

    def reboot(self) -> None:
        """Restart the container: same incarnation, memory is lost, the log is kept."""
        self.boot += 1
        self.frozen = False
        self._begin()

    # --- read by the world ---

    @property
    def fence(self) -> int:
        return self.core.polls.fence

    @fence.setter
    def fence(self, fence: int) -> None:
        self.core.polls.fence = fence

    @property
    def phase(self) -> TaskPhase:
        return self.core.status.phase

    @property
    def last_poll(self) -> PollRequest | None:
        return self.core.polls.desired

    @property
    def restored_from(self) -> int | None:
        return self.core.status.restored_from

    @property
    def position(self) -> int:
        """The newest epoch of the engine."""
        if self.core.parts is not None:
            return self.core.parts.loop.state.epoch
        return self.restored_from if self.restored_from is not None else NO_EPOCH

    @property
    def wrong(self) -> str:
        """Corruption of its state."""
        return wrong_in(self.core.parts.loop.state.operators) if self.core.parts else ""

    # --- polls ---

    def poll(self, poll: PollRequest) -> PollResponse | None:
        """None if it refuses the poll, or ends because of it."""
        self._response, boot = None, self.boot
        followed = poll.model_copy(update={"ask_only": True}) if self.ignores_polls else poll
        self.step(PollReceived(followed))
        if self._response is None:
            return None
        self.polls.append(poll)
        return self.response() if boot == self.boot else None

    def response(self) -> PollResponse:
        changes = {"engine": self.engine, "contradiction": self.contradiction}
        return self.core.response().model_copy(update=changes)

    # --- the data plane ---

    @property
    def takes(self) -> bool:
        """Whether its loop waits for epochs."""
        return self._take is not None

    def start(self) -> None:
        """State, inputs and engine are there now, if the core has asked for them."""
        if self._start is None:
            return
        point, self._start = self._start.restore, None
        start = ("", chained_digest_from(point.epoch))
        wrong, chained = self._entries.get(point.object or "", start)
        state = TaskState(point.epoch, 0, state_with(wrong), chained)
        self.step(TaskRestored(state, self.log_base, self.log_last))

    def head_advanced(self, head: int) -> None:
        self.step(HeadAdvanced(head))

    def take(self, inputs: Sequence[str] = ()) -> None:
        """Take one epoch of inputs with these digests; wrong inputs make the state wrong."""
        epoch = self.position + 1
        tables = tuple(Digest(text) for text in inputs)
        self._take = None
        self.step(EpochsTaken([EpochInput(epoch, 0, 0, tables)]))  # type: ignore[arg-type]

    def wake(self) -> None:
        self.step(Woken())
        self._write_all()

    def step(self, event: TaskCoreEvent) -> None:
        """Perform the core's effects, and those of the events that they lead to."""
        events = deque([event])
        while events:
            for effect in self.core.step(events.popleft(), self.now):
                events.extend(self._perform(effect))
        if self._ended:
            self._end()

    def _perform(self, effect: TaskEffect) -> Iterable[TaskCoreEvent]:
        match effect:
            case Respond(response):
                self._response = response
            case StartTask(restore):
                self._start = effect
                if self.log_last < restore.epoch:
                    self.log_base, self.log_last = restore.epoch + 1, restore.epoch
            case TakeEpochs():
                self._take = effect
            case ProcessEpochs(operators, epochs):
                yield self._process(operators, epochs)
            case AppendEpochs(outputs):
                yield from map(self._append, outputs)
            case SaveState(state):
                yield SaveFailed("no") if self.store_fails else self._save(state)
            case CallSink(assigned, OpenSink(after)):
                yield OfSink(assigned, SinkOpened(after))
            case CallSink(assigned, WriteEpochs(from_epoch)):
                self._writes[assigned] = from_epoch
                yield from self._write(assigned)
            case TruncateLog(floor):
                self.log_base = max(self.log_base, min(floor, self.log_last) + 1)
                yield LogTruncated(self.log_base)
            case DiscardLog() | EndProcess():
                self._ended.append(effect)
            case RefusePoll() | RouteInputs() | SkipState():
                pass
            case _:
                raise AssertionError(f"unexpected: {effect}")

    def _end(self) -> None:
        if DiscardLog() in self._ended:
            self.log_base, self.log_last, self.logged = 0, NO_EPOCH, {}
        self.reboot()

    # --- engine, log, store and sinks ---

    def _process(self, operators: State, epochs: Sequence[EpochInput]) -> EpochsProcessed:
        wrong, outputs = wrong_in(operators), []
        for epoch in epochs:
            corruption = self.corruption if epoch.epoch >= self.corrupt_from else ""
            texts = (*(table.text for table in epoch.inputs), corruption, wrong)
            wrong = "".join(sorted({mark for text in texts for mark in text if mark in "!?"}))
            rows = Digest(f"d{epoch.epoch}{wrong}")
            outputs.append(EpochOutput(epoch.epoch, 0, rows))  # type: ignore[arg-type]
        return EpochsProcessed(outputs, state_with(wrong))

    def _append(self, output: EpochOutput) -> EpochAppended:
        digest = output.rows.text
        self.logged[output.epoch] = digest
        self.log_last = max(self.log_last, output.epoch)
        return EpochAppended(digest)

    def _save(self, state: TaskState) -> EntrySaved:
        wrong = wrong_in(state.operators)
        key = f"{partition_of(self.slot).key}@{state.epoch}{wrong}"
        self._entries[key] = (wrong, state.chained_digest)
        digest = f"s{state.epoch}{wrong}"
        return EntrySaved(CheckpointDone(epoch=state.epoch, object=key, digest=digest, bytes=10))

    def _write_all(self) -> None:
        for assigned in list(self._writes):
            for event in self._write(assigned):
                self.step(event)

    def _write(self, assigned: SinkAssignment) -> Iterable[TaskCoreEvent]:
        """Continue a call of a sink, which is `sink_lag` epochs behind the engine."""
        epoch = self._writes.pop(assigned)
        sink = self.core.parts.sinks.cores.get(assigned.query) if self.core.parts else None
        if sink is None or sink.assigned != assigned:
            return
        while epoch <= self.log_last and sink.may_write(epoch):
            if epoch > self.position - self.sink_lag:
                self._writes[assigned] = epoch
                return
            yield OfSink(assigned, EpochWritten(epoch))
            epoch += 1
        yield OfSink(assigned, WriteEnded())


def state_with(wrong: str) -> State:
    """A state of which only the corruption is known."""
    return State({"wrong": {0: wrong}})  # type: ignore[dict-item]


def wrong_in(state: State) -> str:
    return str(state.buckets["wrong"][0])
