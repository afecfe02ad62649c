"""A simulated task: a real `TaskCore` in a real `TaskProcess`, with ports of its own.

An effect of the core is a call that takes a random time; a process that dies in between has done a
part of it, or all of it without knowing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rekindle.consistency.messages import (
    ConsistencySettings,
    EmitReconciliationDone,
    EmitUndo,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import EpochOutput
from rekindle.errors import DifferentResults, LogCorrupt, ObjectMissing
from rekindle.protocol import (
    PollRequest,
    RestorePoint,
    TaskProblem,
    TaskRef,
    Upstream,
)
from rekindle.streams.digest import chained_digest_from
from rekindle.streams.epochs import EpochInput
from rekindle.task.attempts import BLOCK
from rekindle.task.config import consistency_settings, left_out_intervals
from rekindle.task.core.loop import (
    AppendEpochs,
    AppendTentative,
    LoopCore,
    LoopEffect,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
)
from rekindle.task.core.messages import (
    CallSink,
    EndComparison,
    RefusePoll,
    Respond,
    ServeStreamSinks,
    StopSink,
    TaskCoreEvent,
    TaskEffect,
    TaskSettings,
)
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState, SkipCheckpoint
from rekindle.task.core.shipping import ShipLog
from rekindle.task.core.start import (
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
)
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    RouteInputs,
    TruncateLog,
)
from rekindle.task.core.task import TaskCore
from rekindle.task.process import TaskProcess
from rekindle.task.state import TaskState
from rekindle.topology.model import Partition, partition_of
from rekindle_testing.simulation.chains import ChainOutput
from rekindle_testing.simulation.lending import LentRequest, SimulatedLentState
from rekindle_testing.simulation.network import STORE, Refused, Reply, TimedOut
from rekindle_testing.simulation.reading import SimulatedRead
from rekindle_testing.simulation.scheduler import SimulatedProcess
from rekindle_testing.simulation.serving import LogServer
from rekindle_testing.simulation.shipping import FAR_BEHIND, SimulatedShipping
from rekindle_testing.simulation.sink_calls import SinkCalls
from rekindle_testing.simulation.source import SimulatedSource
from rekindle_testing.simulation.store_and_sinks import Down
from rekindle_testing.simulation.streams import READ_AHEAD_BYTES, SimulatedStreams
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.tentative import TentativeResults
from rekindle_testing.simulation.values import FoldedState, rows_of, values_in

if TYPE_CHECKING:
    from rekindle_testing.simulation.pod import TaskPod

_TICK_S = 0.1
_ENGINE_START_S = (0.5, 3.0)
_ENGINE_RESTART_S = (0.5, 2.0)
_CALL_S = (0.005, 0.15)
_FAILED_CALL_S = (0.005, 2.0)
_SLOWNESS = 30.0  # a slow engine takes so many times as long
_APPEND_S = (0.0005, 0.004)
_TAKE_TIMEOUT_S = 0.25
_STORE_TIMEOUT_S = 5.0


TaskRequest = PollRequest | SimulatedRead | LentRequest


class TaskBoot:
    """One boot of a task."""

    def __init__(self, pod: TaskPod, surroundings: Surroundings) -> None:
        scheduler = surroundings.scheduler
        self.pod = pod
        self.partition: Partition = partition_of(pod.slot)
        self.process = SimulatedProcess(scheduler, pod.address)
        self._around = surroundings
        self._scheduler = scheduler
        self._disk = pod.disk
        self._inputs: SimulatedSource | SimulatedStreams | None = None
        self._known_head: int | None = None  # the last head that the core was given
        self._upstreams: Sequence[Upstream] = ()
        self._restored: TaskState | None = None
        self._point: RestorePoint | None = None
        self.is_failing = False  # a call is in progress that will not be tried again
        self._engine_ready_at = scheduler.now + scheduler.between(*_ENGINE_START_S)
        self._engine_crashes = False
        self._reply: Reply | None = None
        self._shipping = SimulatedShipping(self, surroundings)
        self._log_server = LogServer(
            self.process, self._disk, self._head, self._shipping.is_fetched
        )
        self._sinks = SinkCalls(self, surroundings)
        slot = pod.slot
        ref = TaskRef.of(slot, pod.incarnation)
        consistency = self._consistency(ref)
        self.core = TaskCore(
            TaskSettings(
                ref,
                f"{slot.key}-{pod.incarnation}.{pod.boots}",
                surroundings.checkpoint_interval_epochs,
                surroundings.epoch_us,
                engine="e1",
                fence=self._disk.fence,
                consistency=consistency,
                input_names=[entry.name for entry in pod.segment.inputs],
                held_log=self._shipping.held_log(self._disk.held_log(self._is_alone)),
                left_out_intervals=left_out_intervals(surroundings.topology) + FAR_BEHIND,
            )
        )
        self.tentative = TentativeResults(self, surroundings, consistency)
        self._running = TaskProcess(
            self.core, self._perform, self.tentative.stepped, lambda: scheduler.now
        )
        self._lent = SimulatedLentState(
            self.process, scheduler, surroundings.network, self.core, self.step, self._disk
        )
        self.process.every(_TICK_S, self._tick)

    def _consistency(self, ref: TaskRef) -> ConsistencySettings | None:
        """Of a task that reads streams."""
        around, disk = self._around, self._disk
        if not self.pod.segment.inputs:
            return None
        first, disk.next_attempt = disk.next_attempt, disk.next_attempt + BLOCK
        return replace(
            consistency_settings(around.topology, self.pod.segment, ref),
            first_attempt=first,
            read_ahead_bytes=READ_AHEAD_BYTES,
            max_buffered_epochs=around.buffered_epochs,
        )

    @property
    def epoch(self) -> int | None:
        """The newest epoch that it certainly needs no input of; None before it has a restore
        point."""
        if self.core.parts is not None:
            return self.core.parts.loop.state.epoch
        return self.core.status.restored_from

    @property
    def is_ready(self) -> bool:
        """Readers may connect."""
        return self.core.parts is not None

    def crash_engine(self) -> None:
        """The next call of the engine fails."""
        self._engine_crashes = True

    def stop(self) -> None:
        """SIGTERM."""
        self.process.do(partial(self.step, self.core.stop_requested))

    # -- serving ---------------------------------------------------------------------------------

    def serve(self, request: TaskRequest, reply: Reply) -> None:
        match request:
            case PollRequest():
                self._serve_poll(request, reply)
            case _ if self.core.parts is None:
                reply(Refused())
            case SimulatedRead(incarnation=incarnation):
                if incarnation not in (None, self.pod.incarnation):
                    reply(Refused())
                else:
                    self._log_server.serve(request, reply)
            case LentRequest():
                self._lent.serve(request, reply)

    def _serve_poll(self, poll: PollRequest, reply: Reply) -> None:
        self._reply = reply
        self.step(partial(self.core.poll_received, poll))
        self._reply = None

    def _head(self) -> int:
        return self._inputs.head() if self._inputs is not None else 0

    # -- the core --------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._inputs is not None and self._head() != self._known_head:
            self._known_head = self._head()
            self.step(partial(self.core.head_advanced, self._known_head))
        self.tentative.tick()
        wake_at = self.core.wake_at
        if wake_at is not None and wake_at <= self._scheduler.now:
            self.step(self.core.woken)

    def step(self, event: TaskCoreEvent) -> None:
        """Tell the core what has happened, if the process has not ended."""
        self._running.tell(lambda now: [] if self.process.dead else event(now))

    def _of_loop(self, happened: Callable[[LoopCore, float], list[LoopEffect]]) -> TaskCoreEvent:
        return partial(self.core.loop_reported, happened)

    def _later(self, delay: tuple[float, float], event: TaskCoreEvent) -> None:
        self.process.after(self._scheduler.between(*delay), lambda: self.step(event))

    def _perform(self, effect: TaskEffect) -> None:
        match effect:
            case Respond(response):
                self._disk.fence = max(self._disk.fence, self.core.polls.fence)
                assert self._reply is not None
                self._reply(response)
            case RefusePoll(status, _):
                assert self._reply is not None
                self._reply(status)
            case RestoreState(point):
                self._restore(point)
            case OpenInputs():
                self._open_inputs()
            case AwaitEngine():
                left_s = max(0.0, self._engine_ready_at - self._scheduler.now)
                self.process.after(left_s, partial(self.step, self.core.start_step_succeeded))
            case CompleteStart():
                self._complete_start()
            case TakeEpochs():
                self._take(effect)
            case ProcessEpochs():
                self._process(effect)
            case AppendTentative(attempt, output):
                append = partial(self.tentative.append, attempt, output)
                self.process.after(self._scheduler.between(*_APPEND_S), append)
            case AppendEpochs(outputs):
                self._append(deque(outputs))
            case RestartEngine():
                self._later(_ENGINE_RESTART_S, self._of_loop(LoopCore.engine_restarted))
            case ShipLog():
                self._shipping.ship(effect)
            case SaveState(state):
                self._save(state)
            case CallSink():
                self._sinks.call(effect)
            case TruncateLog(floor):
                self._disk.truncate(floor)
                self.tentative.truncate(floor)
                self._around.checks.check_retention()
                self.step(partial(self.core.log_truncated, self._disk.base))
            case RouteInputs(upstreams):
                self._upstreams = upstreams
                if isinstance(self._inputs, SimulatedStreams):
                    self._inputs.route(upstreams)
            case DiscardLog():
                self._disk.discard = True
            case CompareSinkFiles():
                self._disk.compare = True
            case EndProcess(loop_s=loop_s):  # the running call may take so long
                self.process.after(self._scheduler.between(0, min(1.0, loop_s)), self._end)
            case EndComparison():
                self._disk.compare = False
            case SkipCheckpoint() | StopSink() | ServeStreamSinks() | SetProblem():
                pass
            case EmitUndo() | EmitReconciliationDone() | ReadLive() | StopLive() | ResumeStable():
                self.tentative.perform(effect)
            case _:
                raise TypeError(f"simulated tasks do not know {effect}")

    def _end(self) -> None:
        self.pod.restart()

    # -- start -----------------------------------------------------------------------------------

    def _restore(self, point: RestorePoint) -> None:
        disk, self._point = self._disk, point
        if point.object is None:
            self._restored = TaskState(point.epoch, 0, FoldedState())
            self.step(self.core.start_step_succeeded)
            return
        name = point.object
        first = None if self._shipping.adopts(point) else point.log_from
        if first is not None and not (disk.base <= first and disk.last >= point.epoch):
            self._around.checks.failed(
                f"I5: {self.pod.slot.key} starts after epoch {point.epoch}, and its log has "
                f"{disk.base} to {disk.last}, not all from {first} on"
            )
        if self._fails_for_good():
            return

        def failed() -> None:
            problem = TaskProblem(message="the store does not respond")
            self.step(partial(self.core.start_step_failed, problem))

        def borrowed(state: TaskState | None) -> None:
            if state is None:
                failed()
                return
            self._around.checks.borrowed(self.pod, state)
            self._restored = self._decoded(state)
            self.step(self.core.start_step_succeeded)

        if point.lender is not None:
            self._lent.fetch_entry(point, borrowed)
            return

        def ended(result: TaskState | Exception | None) -> None:
            if isinstance(result, Exception):
                failed()
            elif result is None:
                error = ObjectMissing(f"{name} does not exist")
                self.step(partial(self.core.call_failed, error))
            else:
                self._restored = self._decoded(result)
                self.step(self.core.start_step_succeeded)

        self._outside(STORE, partial(self._around.store.load, name), ended, _STORE_TIMEOUT_S)

    def _decoded(self, state: TaskState) -> TaskState:
        operators = state.operators
        assert isinstance(operators, FoldedState)
        decoded = self._around.computation.restored(operators, state.epoch)
        return replace(state, operators=decoded)

    def _open_inputs(self) -> None:
        assert self._restored is not None
        next_epoch = self._restored.epoch + 1
        pod, around = self.pod, self._around
        if pod.segment.inputs:
            self._inputs = self.tentative.open_inputs(next_epoch, around.epoch_us / 1e6)
            self._inputs.route(self._upstreams)
        else:
            self._inputs = SimulatedSource(
                self.process,
                self.partition,
                next_epoch,
                lambda: self._scheduler.now + pod.skew_s,
                around.epoch_us,
                around.computation,
            )
        self.step(self.core.start_step_succeeded)

    def _complete_start(self) -> None:
        restored, point = self._restored, self._point
        assert restored is not None
        assert point is not None
        disk = self._disk
        try:
            compare_files_from = disk.start_at(restored.epoch + 1, self._is_alone)
            if self._shipping.adopts(point):
                chained = restored.chained_digest or chained_digest_from(restored.epoch)
                self._shipping.adopt(point, chained)
        except (DifferentResults, LogCorrupt) as error:
            self.step(partial(self.core.call_failed, error))
            return
        self._log_server.output = self.tentative.begin_output(self._log_server.changed)
        began = partial(
            self.core.restored,
            restored,
            disk.base,
            disk.last,
            compare_files_from=compare_files_from,
            complete=not self._lent.unfetched,
        )
        self.step(began)
        self._log_server.changed()

    # -- the loop --------------------------------------------------------------------------------

    def _take(self, effect: TakeEpochs) -> None:
        inputs, waits = self._inputs, [True]
        assert isinstance(inputs, SimulatedSource), "streams are in the core"

        def take() -> None:
            if waits:
                waits.clear()
                epochs = inputs.take(effect.bounds)
                self.step(self._of_loop(lambda loop, now: loop.epochs_taken(epochs, now)))

        inputs.when_ready(take)
        self.process.after(_TAKE_TIMEOUT_S, take)

    def _process(self, call: ProcessEpochs) -> None:
        operators, epochs = call.operators, call.epochs
        assert isinstance(operators, FoldedState)
        self.tentative.processing(call)
        if not call.attempt and self._fails_for_good():
            return
        if self._engine_crashes:
            self._engine_crashes = False
            error = EngineUnavailable("the engine died", -9)
            self._later(_CALL_S, self._of_loop(lambda loop, now: loop.engine_failed(error, now)))
            return
        least_s, most_s = _CALL_S
        slowness = _SLOWNESS if self.pod.slow else 1.0
        if self._around.replays_take_time:
            slowness += len(epochs) - 1
        slow_s = least_s * slowness, most_s * slowness
        fold, outputs = operators.fold, []
        computed, tables = self._around.computation.process(self.partition, operators, epochs)
        if call.attempt:
            self.tentative.computed(epochs[0].epoch, computed[0].rows)
        for epoch, output in zip(epochs, computed, strict=True):
            fold = self._result(fold, epoch, output, is_stable=not call.attempt)
            outputs.append(EpochOutput(epoch.epoch, output.watermark, rows_of(fold), epoch.idle))
        if call.attempt and self.pod.tentative_fails:
            self.pod.tentative_fails = False
            failed = self._of_loop(lambda loop, now: loop.tentative_failed("it failed", now))
            self._later(slow_s, failed)
        else:
            state = FoldedState(tables.operators, fold)
            ended = self._of_loop(lambda loop, now: loop.epochs_processed(outputs, state, now))
            self._later(slow_s, ended)

    def _result(self, before: str, epoch: EpochInput, output: ChainOutput, is_stable: bool) -> str:
        """The state after an epoch, which may be wrong."""
        around, pod = self._around, self.pod
        value = around.computation.value(self.partition, before, epoch, output)
        wrong = around.wrong_results
        wrong.computed(value, before, [values_in(rows) for rows in epoch.inputs])
        planned = pod.wrong_result
        if planned is None or not (is_stable and planned.concerns(epoch.epoch)):
            return value
        if not around.checks.begin_wrong_result(pod, has_begun=planned.has_begun):
            return value
        wrong_value = wrong.instead_of(value, epoch.epoch, planned)
        around.computation.stands_for_the_same(value, wrong_value)
        return wrong_value

    @property
    def _is_alone(self) -> bool:
        return self.pod.segment.replicas == 1

    def _fails_for_good(self) -> bool:
        """Whether the call that begins now fails in a way that is not tried again."""
        fails, self.pod.call_fails = self.pod.call_fails, False
        if fails:
            self.is_failing = True
            error = RuntimeError("an operator failed")
            self._later(_FAILED_CALL_S, partial(self.core.call_failed, error))
        return fails

    def _append(self, outputs: deque[EpochOutput]) -> None:
        def append_next() -> None:
            output = outputs.popleft()
            (value,) = values_in(output.rows)
            try:
                message = self._disk.check(output.epoch, value, self._is_alone)
            except DifferentResults as error:
                self.step(partial(self.core.call_failed, error))
                return
            if message is not None:
                self.step(partial(self.core.contradiction_found, output.epoch, message))
            before = self._disk.append(output.epoch, value)
            self._around.checks.appended(self.pod, output.epoch, value, before)
            self.tentative.stable_appended(output.epoch)
            self.step(self._of_loop(lambda loop, now: loop.epochs_appended([value], now)))
            self._log_server.changed()
            if outputs:
                self.process.after(self._scheduler.between(*_APPEND_S), append_next)

        self.process.after(self._scheduler.between(*_APPEND_S), append_next)

    # -- outside ---------------------------------------------------------------------------------

    def _outside(
        self,
        host: str,
        request: Callable[[], Any],
        ended: Callable[[Any], None],
        timeout_s: float,
    ) -> None:
        self._around.network.call(self.process, host, request, ended, timeout_s)

    def _save(self, state: TaskState) -> None:
        self._around.checks.takes_over(self.pod, "saves a checkpoint")

        def ended(result: Any) -> None:
            def happened(saver: SaverCore, now: float) -> list[SaverEffect]:
                if isinstance(result, (Down, Refused, TimedOut)):
                    return saver.save_failed("no answer", now)
                return saver.entry_saved(result, now)

            self.step(partial(self.core.saver_reported, happened))

        request = partial(self._around.store.save, self.partition, state)
        self._outside(STORE, request, ended, _STORE_TIMEOUT_S)
