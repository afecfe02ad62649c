"""All that one task decides, as one state machine: what happened is a method, which returns
effects. Pure.

It combines the cores of the supervisor, loop, saver, sinks, polls and status. The process of a task
drives each of them from its own thread; a simulator drives all of them through this one. It
connects them: when the log grows the sinks write it, when the loop reaches a checkpoint the saver
saves it, when sinks progress the log is truncated. The streams that it reads are
inside, in `streams`; a source is outside: it answers `TakeEpochs`.

Design: docs/decisions/0045-task-core.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from rekindle.engine.call_sizes import CallSizes
from rekindle.errors import NotDeterministic, RekindleError
from rekindle.protocol import (
    PollRequest,
    PollResponse,
    SinkAssignment,
    TaskPhase,
    TaskProblem,
    TaskRef,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.lending import LendingCore
from rekindle.task.core.loop import (
    AppendEpochs,
    AppendTentative,
    CallCompleted,
    CheckpointReached,
    EpochComputed,
    GiveUp,
    LoopCore,
    LoopEffect,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
    TentativeCompleted,
)
from rekindle.task.core.messages import CallSink, RefusePoll, Respond, TaskEffect, TaskSettings
from rekindle.task.core.parts import InputPositions, LogPositions, Parts, SaverAdapter, Sinks
from rekindle.task.core.phases import TaskEvent
from rekindle.task.core.polls import PollCore, PollRefused
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SaverCore, SaverEffect
from rekindle.task.core.sink import (
    SinkCore,
    SinkEffect,
    StartWriter,
    StopWriter,
    assignment_changes,
)
from rekindle.task.core.start import StartCore, StartEffect
from rekindle.task.core.status import TaskComponents, TaskStatus
from rekindle.task.core.streams import InputEffect, InputEvent, StreamsCore
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    ReportDigests,
    RouteInputs,
    RunLoop,
    SetCommittedEntry,
    SetSinks,
    StartTask,
    StopSinks,
    SupervisorCore,
    SupervisorEffect,
    TruncateLog,
)
from rekindle.task.state import TaskState


class TaskCore:
    """One boot of a task. `now` is Unix time in seconds."""

    def __init__(self, settings: TaskSettings) -> None:
        self.inputs = InputPositions()
        self.start = StartCore()
        self.saver = SaverCore()
        self.supervisor = SupervisorCore(settings.boot_id)
        self.polls = PollCore(settings.ref, settings.identity, settings.fence)
        self.lending = LendingCore(settings.boot_id, self.saver.snapshots)
        self.parts: Parts | None = None
        self._settings = settings
        self._now = 0.0
        self._take_request: TakeEpochs | None = None  # of the loop, which the streams answer
        self.status = TaskStatus(
            settings.ref,
            settings.boot_id,
            settings.origin_us,
            settings.epoch_interval_us,
            self._clock,
        )
        self.status.lending = self.lending

    def _clock(self) -> float:
        return self._now

    @property
    def ref(self) -> TaskRef:
        return self._settings.ref

    @property
    def wake_at(self) -> float | None:
        times = [self.supervisor.wake_at, self.start.wake_at, self.saver.wake_at]
        times.append(self.lending.wake_at)
        if (parts := self.parts) is not None:
            times.append(parts.loop.wake_at)
            times += [sink.wake_at for sink in parts.sinks.cores.values()]
            if parts.streams is not None:
                times.append(parts.streams.wake_at)
        return min([at for at in times if at is not None], default=None)

    def response(self) -> PollResponse:
        return self.status.response(self.polls.fence).model_copy(
            update={
                "topology": self._settings.identity.topology,
                "engine": self._settings.engine,
                "contained": self.polls.contained(),
            }
        )

    # -- events ----------------------------------------------------------------------------------

    def poll_received(self, poll: PollRequest, now: float) -> list[TaskEffect]:
        self._now = now
        try:
            changed = self.polls.accept(poll)
        except PollRefused as refused:
            return [RefusePoll(refused.status, str(refused))]
        effects: list[TaskEffect] = [Respond(self.response())]
        if self.status.phase is TaskPhase.FAILED:
            effects += self._apply_supervisor_effects(self.supervisor.failure_reported(now))
        if changed:
            effects += self._apply_supervisor_effects(self.supervisor.poll_accepted(poll, now))
            if self.parts is not None and not self.supervisor.ended:
                self.lending.poll_accepted(poll, self.parts.loop.state, now)
            effects += self._truncate()
            effects += self._update_partner(poll)
        return effects

    def start_step_succeeded(self, now: float) -> list[TaskEffect]:
        self._now = now
        return self._apply_start_effects(self.start.step_succeeded(now))

    def start_step_failed(self, problem: TaskProblem, now: float) -> list[TaskEffect]:
        self._now = now
        return self._apply_start_effects(self.start.step_failed(problem, now))

    def restored(
        self,
        state: TaskState,
        log_base: int,
        log_last: int,
        now: float,
        *,
        compare_files_from: int | None = None,
        complete: bool = True,
    ) -> list[TaskEffect]:
        """State, inputs, engine and log are ready; the log holds `log_base` to `log_last`.
        `complete`: none of the state has to be fetched; otherwise `state_complete` follows.
        `compare_files_from`: the first epoch of which an earlier boot may have written a wrong
        file; None: it has not."""
        self._now, settings = now, self._settings
        if self.supervisor.ended:
            return []
        log = LogPositions(log_base, log_last)
        streams = None
        if settings.consistency is not None:
            streams = StreamsCore(settings.consistency, state.epoch + 1, state.watermark)
        loop = LoopCore(
            state,
            settings.checkpoint_interval_epochs,
            CallSizes.of(settings.memory),
            takes_again=streams is not None,
        )
        sinks = Sinks(state.epoch, compare_files_from)
        self.parts = Parts(log, loop, sinks, streams)
        self.status.engine_epoch = state.epoch
        self.status.components = TaskComponents(log, self.inputs, sinks, SaverAdapter(self.saver))
        self.status.step(TaskEvent.STARTED)
        restored = self.saver.state_complete if complete else self.saver.state_incomplete
        if complete:
            self.status.restoring = None
        return [
            *self._update_phase(),
            *restored(now),
            *self._apply_supervisor_effects(self.supervisor.started(now)),
            *self._truncate(),
        ]

    def state_complete(self, now: float) -> list[TaskEffect]:
        """All of the restored state has been fetched."""
        self._now = now
        self.status.restoring = None
        return [*self._update_phase(), *self.saver.state_complete(now)]

    def head_advanced(self, head: int, now: float) -> list[TaskEffect]:
        """`head`: the newest epoch that time, or the upstreams, have released."""
        self._now = now
        self.inputs.newest = head
        return self._update_phase()

    def heads_checked(self, heads: Sequence[int], now: float) -> list[TaskEffect]:
        """`heads`: the newest epoch that a replica of each channel has released, NO_EPOCH if none
        has responded. Repeated; only for a task that reads streams: they decide, before it is Live,
        whether an input is missing."""
        self._now, streams = now, self._streams()
        if streams is None:
            return []
        return self._apply_input_effects(streams.check_heads(heads, now))

    def log_truncated(self, base: int, now: float) -> list[TaskEffect]:
        self._now = now
        self._started().log.base = base
        return []

    def call_failed(self, error: Exception, now: float) -> list[TaskEffect]:
        """A retry would not help: the task cannot continue."""
        self._now = now
        return self._give_up(error)

    def loop_reported(
        self, happened: Callable[[LoopCore, float], list[LoopEffect]], now: float
    ) -> list[TaskEffect]:
        """`happened`: a call of a method of the loop's core, at a time; as with the next ones."""
        self._now = now
        return self._apply_loop_effects(happened(self._started().loop, now))

    def saver_reported(
        self, happened: Callable[[SaverCore, float], list[SaverEffect]], now: float
    ) -> list[TaskEffect]:
        self._now = now
        return [*happened(self.saver, now)]

    def sink_reported(
        self,
        assigned: SinkAssignment,
        happened: Callable[[SinkCore, float], list[SinkEffect]],
        now: float,
    ) -> list[TaskEffect]:
        self._now = now
        core = self._started().sinks.cores.get(assigned.query)
        if core is None or core.assigned != assigned:
            return []  # of a writer that was stopped
        return [*_sink_calls(core, happened(core, now)), *self._truncate()]

    def input_reported(self, happened: InputEvent, now: float) -> list[TaskEffect]:
        """Of a task that reads streams; a source answers `TakeEpochs`."""
        self._now = now
        return self._step_streams(happened)

    def stop_requested(self, now: float) -> list[TaskEffect]:
        self._now = now
        return self._apply_supervisor_effects(self.supervisor.stop_requested(now))

    def woken(self, now: float) -> list[TaskEffect]:
        """Time has passed."""
        self._now = now
        effects = [
            *self._apply_supervisor_effects(self.supervisor.woken(now)),
            *self._apply_start_effects(self.start.woken(now)),
        ]
        self.lending.woken(now)
        effects += self.saver.woken(self._now)
        if self.parts is not None and not self.supervisor.ended:
            effects += self._apply_loop_effects(self.parts.loop.woken(self._now))
            effects += self._step_streams(StreamsCore.woken)
            for core in self._sink_cores():
                effects += _sink_calls(core, core.woken(self._now))
        return effects

    # -- the supervisor --------------------------------------------------------------------------

    def _apply_supervisor_effects(
        self, supervisor_effects: Sequence[SupervisorEffect]
    ) -> list[TaskEffect]:
        effects: list[TaskEffect] = []
        for effect in supervisor_effects:
            effects += self._apply_supervisor_effect(effect)
        return effects

    def _apply_supervisor_effect(self, effect: SupervisorEffect) -> list[TaskEffect]:
        match effect:
            case StartTask(restore):
                self.status.start_from(restore)
                return self._apply_start_effects(self.start.start_requested(restore, self._now))
            case RunLoop():
                return self._apply_loop_effects(self._started().loop.woken(self._now))
            case SetSinks(through, sinks):
                return self._set_sinks(through, sinks)
            case ReportDigests(epochs):
                self.status.request_digests(epochs)
                return []
            case SetCommittedEntry():
                return self._record_committed(effect)
            case StopSinks():
                if self.parts is not None:
                    self.parts.sinks.cores.clear()
                return []
            case EndProcess():
                self.status.step(TaskEvent.STOP_REQUESTED)
                return [effect]
            case TruncateLog(floor):
                log = self._started().log
                return [TruncateLog(floor)] if log.base <= min(floor, log.last) else []
            case RouteInputs() | DiscardLog() | CompareSinkFiles():
                return [effect]
        assert_never(effect)

    def _record_committed(self, entry: SetCommittedEntry) -> list[TaskEffect]:
        epoch = entry.point.epoch if entry.point is not None else NO_EPOCH
        self.status.committed(epoch, entry.may_be_live)
        effects: list[TaskEffect] = []
        if entry.point is not None:
            effects += self.saver.entry_committed(entry.point, self._now)
        if entry.refused:
            effects += self.saver.entries_refused(entry.refused, self._now)
        return effects

    def _apply_start_effects(self, start_effects: Sequence[StartEffect]) -> list[TaskEffect]:
        effects: list[TaskEffect] = []
        for effect in start_effects:
            if isinstance(effect, SetProblem):
                self.status.set_problem(effect.subject, effect.problem)
            else:
                effects.append(effect)
        return effects

    def _truncate(self) -> list[TaskEffect]:
        if self.parts is None:
            return []
        durable = [core.next_epoch - 1 for core in self._sink_cores()]
        return self._apply_supervisor_effects(self.supervisor.sinks_progressed(durable, self._now))

    # -- the loop --------------------------------------------------------------------------------

    def _apply_loop_effects(self, loop_effects: Sequence[LoopEffect]) -> list[TaskEffect]:
        effects: list[TaskEffect] = []
        for effect in loop_effects:
            match effect:
                case TakeEpochs():
                    effects += self._request_epochs(effect)
                case ProcessEpochs() | AppendEpochs() | AppendTentative() | RestartEngine():
                    self._take_request = None
                    effects.append(effect)
                case SetProblem(subject, problem):
                    self.status.set_problem(subject, problem)
                case EpochComputed(epoch, digest, chained):
                    log = self._started().log
                    log.last = max(log.last, epoch)
                    self.status.computed(epoch, digest, chained)
                case CallCompleted(epochs, took_s):
                    self.status.processed(epochs[-1].epoch, took_s)
                    effects += self._update_phase()
                    effects += self._log_grew()
                    effects += self._stable_processed(epochs[-1].epoch)
                case TentativeCompleted():
                    effects += self._tentative_completed(effect)
                case CheckpointReached(state):
                    if self.supervisor.is_saver:
                        effects += self.saver.state_reached(state, self._now)
                case GiveUp(error):
                    effects += self._give_up(error)
        return effects

    # -- streams ----------------------------------------------------------------------------------

    def _request_epochs(self, request: TakeEpochs) -> list[TaskEffect]:
        """If the task reads streams, they answer the loop, as soon as they can."""
        if self._started().streams is None:
            return [request]
        self._take_request = request
        return self._give_epochs()

    def _give_epochs(self) -> list[TaskEffect]:
        """Give the loop the epochs that it has requested, if the streams have them."""
        parts, request = self._started(), self._take_request
        if parts.streams is None or request is None or not parts.streams.may_take:
            return []
        taken = parts.streams.take(request.bounds)
        if taken is None:
            return []
        self._take_request = None
        return self._apply_loop_effects(taken(parts.loop, self._now))

    def _stable_processed(self, through: int) -> list[TaskEffect]:
        return self._step_streams(lambda streams, now: streams.stable_processed(through, now))

    def _step_streams(self, happened: InputEvent) -> list[TaskEffect]:
        streams = self._started().streams
        if streams is None:
            return []
        try:
            return self._apply_input_effects(happened(streams, self._now))
        except RekindleError as error:
            return self._give_up(error)

    def _tentative_completed(self, completed: TentativeCompleted) -> list[TaskEffect]:
        streams = self._streams()
        assert streams is not None, "only streams give tentative epochs"
        attempt, epoch = completed.attempt, completed.epoch
        if completed.failed:
            return self._apply_input_effects(streams.leave_out(attempt, epoch, self._now))
        return self._apply_input_effects(streams.tentative_processed(attempt, epoch, self._now))

    def _update_partner(self, poll: PollRequest) -> list[TaskEffect]:
        streams, boot = self._streams(), self._settings.boot_id
        if streams is None:
            return []
        return self._apply_input_effects(streams.update_partner(poll.partner, boot, self._now))

    def _update_phase(self) -> list[TaskEffect]:
        """Once the task is Live, its output may be tentative."""
        self.status.update_phase()
        streams = self._streams()
        if streams is None or self.status.phase is not TaskPhase.LIVE:
            return []
        return self._apply_input_effects(streams.allow_tentative(self._now))

    def _apply_input_effects(self, input_effects: Sequence[InputEffect]) -> list[TaskEffect]:
        streams = self._streams()
        assert streams is not None, "these are effects of streams"
        names = self._settings.input_names
        missing = sorted({names[channel.input] for channel in streams.missing()})
        self.status.set_consistency(
            streams.state, streams.tentative_epoch, missing, streams.partner
        )
        return [*input_effects, *self._give_epochs()]

    def _streams(self) -> StreamsCore | None:
        return self.parts.streams if self.parts is not None else None

    def _log_grew(self) -> list[TaskEffect]:
        effects, last = list[TaskEffect](), self._started().log.last
        for core in self._sink_cores():
            effects += _sink_calls(core, core.log_grew(last, self._now))
        return effects

    def _give_up(self, error: Exception) -> list[TaskEffect]:
        epoch = self.parts.loop.state.epoch + 1 if self.parts is not None else None
        segment = self._settings.ref.segment
        self.status.fail(TaskProblem(message=str(error), where=segment, epoch=epoch))
        permanent = isinstance(error, NotDeterministic)
        return self._apply_supervisor_effects(self.supervisor.task_failed(permanent, self._now))

    # -- sinks -----------------------------------------------------------------------------------

    def _sink_cores(self) -> list[SinkCore]:
        return list(self.parts.sinks.cores.values()) if self.parts is not None else []

    def _set_sinks(self, through: int | None, wanted: Sequence[SinkAssignment]) -> list[TaskEffect]:
        parts, effects = self._started(), list[TaskEffect]()
        for core in self._sink_cores():
            effects += _sink_calls(core, core.write_limit_changed(through, self._now))
        for change in assignment_changes(
            {c.assigned.query: c.assigned for c in self._sink_cores()}, wanted
        ):
            match change:
                case StopWriter(query):
                    del parts.sinks.cores[query]
                case StartWriter(assigned):
                    core = parts.sinks.start(assigned, through)
                    effects += _sink_calls(core, core.log_grew(parts.log.last, self._now))
        return effects

    def _started(self) -> Parts:
        assert self.parts is not None, "the task has not been restored"
        return self.parts


def _sink_calls(core: SinkCore, calls: Sequence[SinkEffect]) -> list[TaskEffect]:
    return [CallSink(core.assigned, call) for call in calls]
