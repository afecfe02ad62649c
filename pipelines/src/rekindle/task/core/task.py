"""All that one task decides, as one state machine: what happened is a method, which returns
effects. Pure.

It combines the cores of the supervisor, loop, saver, sinks, polls and status, and connects them:
when the log grows the sinks write it, when the loop reaches a checkpoint the saver saves it, when
sinks progress the log is truncated. The streams that it reads are inside, in `streams`; a source is
outside: it answers `TakeEpochs`. The process of a task and a simulator run it with ports of their
own, which perform its effects.

Design: docs/decisions/0045-task-core.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from rekindle.engine.call_sizes import CallSizes
from rekindle.errors import NotDeterministic, OperatorRefused, RekindleError
from rekindle.identity import LENDING_PROTOCOL
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
from rekindle.task.core.messages import (
    CallSink,
    EndComparison,
    RefusePoll,
    Respond,
    ServeStreamSinks,
    StopSink,
    TaskEffect,
    TaskSettings,
)
from rekindle.task.core.parts import LogPositions, Parts, Sinks
from rekindle.task.core.phases import TaskEvent
from rekindle.task.core.polls import PollCore, PollRefused
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SaverCore, SaverEffect
from rekindle.task.core.shipping import ShipLog, ShippingCore
from rekindle.task.core.sink import (
    SinkCore,
    SinkEffect,
    StartWriter,
    StopWriter,
    assignment_changes,
)
from rekindle.task.core.start import StartCore, StartEffect
from rekindle.task.core.status import TaskStatus
from rekindle.task.core.streams import InputEffect, InputEvent, StreamsCore
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    ProcessPhase,
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
    """One boot of a task. `now`: seconds of a clock that never goes back."""

    def __init__(
        self, settings: TaskSettings, unix_time: Callable[[], float] | None = None
    ) -> None:
        """`unix_time`: in seconds, for the lag; the time of the newest event if it is not given."""
        self.start = StartCore()
        self.saver = SaverCore()
        self.supervisor = SupervisorCore(settings.boot_id)
        self.polls = PollCore(settings.ref, settings.identity, settings.fence, settings.boot_id)
        self.lending = LendingCore(settings.boot_id, self.saver.snapshots)
        self.shipping = ShippingCore(
            settings.checkpoint_interval_epochs, settings.left_out_intervals
        )
        self.parts: Parts | None = None
        self.streams: StreamsCore | None = None  # once they are read; None if it reads a source
        self._serves_stream_sinks = False
        self._settings = settings
        self._now = 0.0
        self._take_request: TakeEpochs | None = None  # of the loop, which the streams answer
        self.status = TaskStatus(
            settings.ref,
            settings.boot_id,
            settings.origin_us,
            settings.epoch_interval_us,
            unix_time or self._clock,
            self.saver,
            self.lending,
        )
        self.status.held_log = settings.held_log

    def _clock(self) -> float:
        return self._now

    @property
    def ref(self) -> TaskRef:
        return self._settings.ref

    @property
    def wake_at(self) -> float | None:
        times = [self.supervisor.wake_at, self.start.wake_at, self.saver.wake_at]
        times += [self.lending.wake_at, self.shipping.wake_at]
        if (parts := self.parts) is not None:
            times.append(parts.loop.wake_at)
            times += [sink.wake_at for sink in parts.sinks.cores.values()]
            if self.streams is not None:
                times.append(self.streams.wake_at)
        return min([at for at in times if at is not None], default=None)

    def may_write(self, assigned: SinkAssignment, epoch: int) -> bool:
        """Whether a sink may write an epoch; it may none once it is stopped."""
        core = self.parts.sinks.cores.get(assigned.query) if self.parts is not None else None
        return core is not None and core.assigned == assigned and core.may_write(epoch)

    def sinks_have_written(self, through: int) -> bool:
        """Whether all sinks are durable through an epoch, or as far as they may write."""
        return all(core.has_written(through) for core in self._sink_cores())

    def response(self) -> PollResponse:
        self._report_streams()
        return self.status.response(self.polls.fence).model_copy(
            update={
                "topology": self._settings.identity.topology,
                "engine": self._settings.engine,
                "contained": self.polls.contained(),
                "log_shipped": self.shipping.entries(),
            }
        )

    # -- events ----------------------------------------------------------------------------------

    def poll_received(self, poll: PollRequest, now: float) -> list[TaskEffect]:
        self._now = now
        try:
            changed = self.polls.accept(poll)
        except PollRefused as refused:
            return [RefusePoll(refused.status, refused.reason)]
        effects: list[TaskEffect] = [Respond(self.response())]
        if self.status.phase is TaskPhase.FAILED:
            effects += self._apply_supervisor_effects(self.supervisor.failure_reported(now))
        if changed and not self.status.may_be_live and poll.protocol < LENDING_PROTOCOL:
            # The coordinator does not know what a task with a lent state may not do. It gives the
            # next boot a state of the store.
            return [*effects, *self._apply_supervisor_effects(self.supervisor.stop_requested(now))]
        if changed:
            effects += self._apply_supervisor_effects(self.supervisor.poll_accepted(poll, now))
            if self.parts is not None and not self.supervisor.ended:
                self.lending.poll_accepted(poll, self.parts.loop.state, now)
                effects += self.shipping.poll_accepted(poll, now)
            effects += self._truncate()
            effects += self._update_partner(poll)
        return effects

    def start_step_succeeded(self, now: float) -> list[TaskEffect]:
        self._now = now
        if self.supervisor.phase is not ProcessPhase.STARTING:
            return []
        return self._apply_start_effects(self.start.step_succeeded(now))

    def start_step_failed(self, problem: TaskProblem, now: float) -> list[TaskEffect]:
        self._now = now
        if self.supervisor.phase is not ProcessPhase.STARTING:
            return []
        return self._apply_start_effects(self.start.step_failed(problem, now))

    def streams_opened(self, next_epoch: int, watermark: int, now: float) -> list[TaskEffect]:
        """The streams are read from an epoch on, before the task is restored. `watermark`: after
        the epoch before."""
        self._now = now
        assert self._settings.consistency is not None, "it reads streams"
        self.streams = StreamsCore(self._settings.consistency, next_epoch, watermark)
        return []

    def restored(
        self,
        state: TaskState,
        log_base: int,
        log_last: int,
        now: float,
        *,
        compare_files_from: int | None = None,
        complete: bool = True,
        sizes: CallSizes | None = None,
    ) -> list[TaskEffect]:
        """State, inputs, engine and log are ready; the log holds `log_base` to `log_last`.
        `complete`: none of the state has to be fetched; otherwise `state_complete` follows.
        `compare_files_from`: the first epoch of which an earlier boot may have written a wrong
        file; None: it has not. `sizes`: of calls, if not those of the memory alone."""
        self._now, settings = now, self._settings
        if self.supervisor.phase is not ProcessPhase.STARTING:
            return []
        log = LogPositions(log_base, log_last)
        if settings.consistency is not None and self.streams is None:
            self.streams_opened(state.epoch + 1, state.watermark, now)
        loop = LoopCore(
            state,
            settings.checkpoint_interval_epochs,
            sizes or CallSizes.of(settings.memory),
            takes_again=self.streams is not None,
        )
        sinks = Sinks(state.epoch, compare_files_from)
        self.parts = Parts(log, loop, sinks)
        self.status.parts = self.parts
        self.status.step(TaskEvent.STARTED)
        self.shipping.state_known(state.epoch, loop.chained)
        desired = self.polls.desired  # now: the next response tells of the log in the store
        ship = self.shipping.poll_accepted(desired, now) if desired is not None else []
        restored = self.saver.state_complete if complete else self.saver.state_incomplete
        if complete:
            self.status.restoring = None
        return [
            *self._update_phase(),
            *restored(now),
            *self._apply_supervisor_effects(self.supervisor.started(now)),
            *self._truncate(),
            *ship,
        ]

    def state_complete(self, now: float) -> list[TaskEffect]:
        """All of the restored state has been fetched."""
        self._now = now
        self.status.restoring = None
        return [*self._update_phase(), *self.saver.state_complete(now)]

    def head_advanced(self, head: int, now: float) -> list[TaskEffect]:
        """`head`: the newest epoch that time, or the upstreams, have released."""
        self._now = now
        self.status.head = head
        return self._update_phase()

    def heads_checked(self, heads: Sequence[int], now: float) -> list[TaskEffect]:
        """`heads`: the newest epoch that a replica of each channel has released, NO_EPOCH if none
        has responded. Repeated; only for a task that reads streams: they decide, before it is Live,
        whether an input is missing."""
        self._now = now
        return self._step_streams(lambda streams, now: streams.check_heads(heads, now))

    def contradiction_found(self, epoch: int, message: str, now: float) -> list[TaskEffect]:
        """An earlier boot may have served another result for an epoch that is appended now."""
        self._now = now
        self.status.contradicted(epoch, message)
        return []

    def problem_changed(self, problem: SetProblem, now: float) -> list[TaskEffect]:
        """Of a part that has no core."""
        self._now = now
        self.status.set_problem(problem.subject, problem.problem)
        return []

    def log_adopted(self, through: int, now: float) -> list[TaskEffect]:
        """The task begins with the log that is in the store, through its restore point."""
        self._now = now
        self.shipping.adopted(through)
        return []

    def shipping_reported(
        self, happened: Callable[[ShippingCore, float], list[ShipLog]], now: float
    ) -> list[TaskEffect]:
        self._now = now
        effects = happened(self.shipping, now)
        return [] if self.supervisor.ended else [*effects]

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
            effects += self.shipping.woken(self._now)
            effects += self._apply_loop_effects(self.parts.loop.woken(self._now))
            effects += self._step_streams(StreamsCore.woken)
        for core in self._sink_cores():  # until the end, which waits for them
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
                return self._stop_sinks()
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
            effects.append(effect)
        return effects

    def _truncate(self) -> list[TaskEffect]:
        if self.parts is None:
            return []
        ended: list[TaskEffect] = [EndComparison()] if self.parts.sinks.end_comparison() else []
        durable = [core.next_epoch - 1 for core in self._sink_cores()]
        progressed = self.supervisor.sinks_progressed(durable, self._now)
        return [*ended, *self._apply_supervisor_effects(progressed)]

    # -- the loop --------------------------------------------------------------------------------

    def _apply_loop_effects(self, loop_effects: Sequence[LoopEffect]) -> list[TaskEffect]:
        effects: list[TaskEffect] = []
        for effect in loop_effects:
            match effect:
                case TakeEpochs():
                    effects += self._request_epochs(effect)
                case ProcessEpochs():
                    self._take_request = None
                    saves = effect.for_checkpoint and self.supervisor.is_saver
                    effects.append(replace(effect, for_checkpoint=saves))
                case AppendEpochs() | AppendTentative() | RestartEngine():
                    self._take_request = None
                    effects.append(effect)
                case SetProblem(subject, problem):
                    self.status.set_problem(subject, problem)
                    effects.append(effect)
                case EpochComputed(epoch, digest, chained):
                    log = self._started().log
                    log.last = max(log.last, epoch)
                    self.status.computed(epoch, digest, chained)
                    effects += self._log_grew()
                case CallCompleted(epochs, took_s):
                    self.status.processed(len(epochs), took_s)
                    effects += self._update_phase()
                    effects += self._stable_processed(epochs[-1].epoch)
                case TentativeCompleted():
                    effects += self._tentative_completed(effect)
                case CheckpointReached(state):
                    self.shipping.state_known(state.epoch, state.chained_digest)
                    if self.supervisor.is_saver:
                        effects += self.saver.state_reached(state, self._now)
                case GiveUp(error):
                    effects += self._give_up(error)
        return effects

    # -- streams ----------------------------------------------------------------------------------

    def _request_epochs(self, request: TakeEpochs) -> list[TaskEffect]:
        """If the task reads streams, they answer the loop, as soon as they can."""
        if self.streams is None:
            return [request]
        self._take_request = request
        return self._give_epochs()

    def _give_epochs(self) -> list[TaskEffect]:
        """Give the loop the epochs that it has requested, if the streams have them."""
        streams, request = self.streams, self._take_request
        if self.supervisor.phase is not ProcessPhase.RUNNING:
            return []
        if streams is None or request is None or not streams.may_take:
            return []
        if streams.error is not None:
            return self._give_up(streams.error)
        taken = streams.take(request.bounds)
        if taken is None:
            return []
        self._take_request = None
        return self._apply_loop_effects(taken(self._started().loop, self._now))

    def _stable_processed(self, through: int) -> list[TaskEffect]:
        return self._step_streams(lambda streams, now: streams.stable_processed(through, now))

    def _step_streams(self, happened: InputEvent) -> list[TaskEffect]:
        streams = self.streams
        if streams is None:
            return []
        try:
            return self._apply_input_effects(happened(streams, self._now))
        except RekindleError as error:
            return self._give_up(error)

    def _tentative_completed(self, completed: TentativeCompleted) -> list[TaskEffect]:
        attempt, epoch = completed.attempt, completed.epoch
        if completed.failed:
            return self._step_streams(lambda streams, now: streams.leave_out(attempt, epoch, now))
        return self._step_streams(
            lambda streams, now: streams.tentative_processed(attempt, epoch, now)
        )

    def _update_partner(self, poll: PollRequest) -> list[TaskEffect]:
        boot = self._settings.boot_id
        if self.parts is None or self.supervisor.ended:
            return []
        return self._step_streams(
            lambda streams, now: streams.update_partner(poll.partner, boot, now)
        )

    def _update_phase(self) -> list[TaskEffect]:
        """Once the task is Live, its output may be tentative."""
        self.status.update_phase()
        if self.status.phase is not TaskPhase.LIVE:
            return []
        return self._step_streams(StreamsCore.allow_tentative)

    def _apply_input_effects(self, input_effects: Sequence[InputEffect]) -> list[TaskEffect]:
        return [*input_effects, *self._give_epochs()]

    def _report_streams(self) -> None:
        streams, names = self.streams, self._settings.input_names
        if streams is None or self.parts is None:
            return
        missing = sorted({names[channel.input] for channel in streams.missing()})
        self.status.set_consistency(
            streams.state, streams.tentative_epoch, missing, streams.partner
        )

    def _log_grew(self) -> list[TaskEffect]:
        effects, last = list[TaskEffect](), self._started().log.last
        for core in self._sink_cores():
            effects += _sink_calls(core, core.log_grew(last, self._now))
        return effects

    def _give_up(self, error: Exception) -> list[TaskEffect]:
        if self.supervisor.ended:
            return []  # an end may break off a call
        self.status.fail(
            TaskProblem(
                message=str(error) or repr(error),
                where=self._settings.segment_name or self._settings.ref.segment,
                epoch=self.parts.loop.state.epoch + 1 if self.parts is not None else None,
                wrong_definition=error.operator if isinstance(error, OperatorRefused) else None,
            )
        )
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
                    effects.append(StopSink(parts.sinks.cores.pop(query).assigned))
                case StartWriter(assigned):
                    core = parts.sinks.start(assigned, through)
                    effects += _sink_calls(core, core.log_grew(parts.log.last, self._now))
        return [*effects, *self._serve_stream_sinks(through, wanted)]

    def _serve_stream_sinks(
        self, through: int | None, wanted: Sequence[SinkAssignment]
    ) -> list[TaskEffect]:
        served = tuple(sink for sink in wanted if sink.sink.stream is not None)
        if not served and not self._serves_stream_sinks:
            return []
        self._serves_stream_sinks = bool(served)
        return [ServeStreamSinks(through, served)]

    def _stop_sinks(self) -> list[TaskEffect]:
        stopped: list[TaskEffect] = [StopSink(core.assigned) for core in self._sink_cores()]
        if self.parts is not None:
            self.parts.sinks.cores.clear()
        return [*stopped, *self._serve_stream_sinks(None, ())]

    def _started(self) -> Parts:
        assert self.parts is not None, "the task has not been restored"
        return self.parts


def _sink_calls(core: SinkCore, calls: Sequence[SinkEffect]) -> list[TaskEffect]:
    return [CallSink(core.assigned, call) for call in calls]
