"""The process of one task: its core, the ports that perform the core's effects, and its end.

Threads: this one, which passes the time on to the core; one that truncates the log and serves
stream sinks; the engine's, the control server's, one for all readers, one for all connections of
the stream server and at most three in which it reads the log, one for each sink, those of Arrow
Flight if it has a stream sink, the saver's, and the log shipper's if a reader is far behind.

Design: docs/design/task.md.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import assert_never

import pyarrow as pa

from rekindle.checkpoints.shipped import Piece, held_epochs_of
from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.registry import open_sink
from rekindle.connectors.sink import Sink
from rekindle.consistency.messages import (
    ConsistencySettings,
    EmitReconciliationDone,
    EmitUndo,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.engine.version import engine_version
from rekindle.errors import RekindleError
from rekindle.protocol import (
    CONTROL_PORT,
    STREAM_PORT,
    SinkAssignment,
    TaskPhase,
    TaskProblem,
)
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.task.attempts import AttemptFile
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig, left_out_intervals
from rekindle.task.control import ControlServer
from rekindle.task.core.hot_keys import HotKeys
from rekindle.task.core.loop import (
    AppendEpochs,
    AppendTentative,
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
from rekindle.task.core.saver import SaveState, SkipCheckpoint
from rekindle.task.core.shipping import ShipLog
from rekindle.task.core.start import AwaitEngine, CompleteStart, OpenInputs, RestoreState
from rekindle.task.core.supervisor import (
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    ProcessPhase,
    RouteInputs,
    TruncateLog,
)
from rekindle.task.core.task import TaskCore
from rekindle.task.discard import mark_comparison, mark_for_discard
from rekindle.task.earlier_boots import EarlierBoots, held_log, is_doubted
from rekindle.task.engine import EngineStarter
from rekindle.task.engine_calls import EngineCalls, EngineParts
from rekindle.task.fence import FenceFile
from rekindle.task.lending import StateLender
from rekindle.task.log_shipper import LogShipper, find_shipped
from rekindle.task.metrics import make_registry
from rekindle.task.poll_handler import PollHandler
from rekindle.task.process import TaskProcess
from rekindle.task.saver import CheckpointSaver
from rekindle.task.sinks import SinkWriters
from rekindle.task.startup import Prepared, Startup, call_sizes
from rekindle.task.store import TaskStore
from rekindle.task.stream_inputs import StreamInputs
from rekindle.task.stream_sinks import StreamSinks

TICK_S = 0.05
"""Longest interval in which the time is passed on, and failures are looked for."""
_SHORTEST_WAIT_S = 0.001
STOP_S = 5.0
"""How long Spark may take to stop."""

_log = logging.getLogger(__name__)


class TaskRuntime:
    """`run` returns the process's exit status. `stop` may be called by a signal handler."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._stopping = False  # no Event: a signal handler must not take a lock
        self._store = TaskStore(config)
        fences = FenceFile(config.data, config.uid, config.ref)
        self._attempts = AttemptFile(config.attempts_file) if _may_be_tentative(config) else None
        self._consistency = _consistency(config, self._attempts)
        self._call_size_file = CallSizeFile(config.data)
        self.engine = EngineStarter(config)  # first: it starts beside the look at the store
        held = held_log(config.log_directory, config.segment.replicas == 1)
        shipped = list[Piece]()
        if held is None and not is_doubted(config.log_directory):
            shipped = find_shipped(self._store)
            held = held_epochs_of(shipped)
        self.core = TaskCore(
            TaskSettings(
                config.ref,
                uuid.uuid4().hex,
                config.topology.spec.checkpoint_interval_epochs,
                config.epoch_interval_us,
                config.origin_us,
                engine=engine_version(),
                fence=fences.read(),
                identity=config.identity,
                memory=config.memory,
                consistency=self._consistency,
                input_names=[entry.name for entry in config.segment.inputs],
                segment_name=config.segment.name,
                held_log=held,
                left_out_intervals=left_out_intervals(config.topology),
            ),
            time.time,
        )
        self.status = self.core.status
        self.process = TaskProcess(self.core, self._perform, self._stepped)
        self._end: EndProcess | None = None
        self._mark_failed = False
        # What effects leave for the thread of files, which is told by `_left`:
        self._left = threading.Event()
        self._truncation: TruncateLog | None = None
        self._served: ServeStreamSinks | None = None
        self._comparison_ended = False
        # Of a task that has started:
        self._log: OutputLog | None = None
        self._output: LiveOutput | None = None  # if output may be tentative
        self._earlier: EarlierBoots | None = None
        self._sinks: SinkWriters | None = None
        self._stream_sinks: StreamSinks | None = None
        self._lender: StateLender | None = None
        self.startup = Startup(
            config, self._store, self.engine, self.process, self._consistency, self._begin, shipped
        )
        self._engine_calls = EngineCalls(self.process, self.startup.perform)
        self._engine_thread = threading.Thread(
            target=self._engine_calls.run, name="engine", daemon=True
        )
        self._files_thread = threading.Thread(target=self._run_files, name="files", daemon=True)
        self._files_stopping = False
        self._saver = CheckpointSaver(self.process, self._store)
        self._shipper = LogShipper(self.process, self._store)
        self.status.ports = self
        self.polls = PollHandler(self.process, fences, self.startup.event_times)
        self._control = ControlServer(
            config.bind,
            CONTROL_PORT,
            self.polls,
            alive=self._is_alive,
            ready=lambda: self.status.phase.serves,
            registry=make_registry(
                self.core, config.topology.name, config.segment.name, self.process.lock
            ),
            identity=config.identity,
        )
        self._server_death: str | None = None
        self.server = StreamServer(
            config.bind,
            STREAM_PORT,
            config.identity,
            config.ref.incarnation,
            on_death=self._server_died,
            memory_bytes=config.memory.serve_bytes,
        )

    def stop(self) -> None:
        self._stopping = True

    def _server_died(self, reason: str) -> None:
        """Called by the server's thread; this one fails the task."""
        self._server_death = reason

    def _is_alive(self) -> bool:
        failed = self.status.phase is TaskPhase.FAILED
        return not failed or self.core.supervisor.phase is ProcessPhase.FAILED_PERMANENTLY

    def run(self) -> int:
        self._engine_thread.start()
        self._files_thread.start()
        has_failed = False
        while (end := self._end) is None:
            try:
                self._wait()
                self._tick()
            except Exception as error:
                if self.core.supervisor.ended:
                    raise
                _log.error("the task cannot continue", exc_info=error)
                self.process.tell(partial(self.core.call_failed, error))
            if self.status.phase is TaskPhase.FAILED and not has_failed:
                has_failed = True
                with self.process.lock:
                    problem = self.core.response().problem
                _log.error("fatal: %s", problem.message if problem is not None else "unknown")
        self._stop_all(end)
        return 1 if self._mark_failed else end.exit_status

    # -- time ------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until the core wants to be woken, or for a tick."""
        if self._stopping:
            return
        with self.process.lock:
            wake_at = self.core.wake_at
        left_s = TICK_S if wake_at is None else wake_at - time.monotonic()
        time.sleep(min(TICK_S, max(_SHORTEST_WAIT_S, left_s)))

    def _tick(self) -> None:
        for event in self._found():
            self.process.tell(event)
        if self._lender is not None:
            self._lender.tick()

    def _found(self) -> Iterator[TaskCoreEvent]:
        """What has happened since the last tick that no port has told."""
        core, inputs, fetch = self.core, self.startup.inputs, self.startup.fetch
        if self._stopping:
            yield core.stop_requested
        if (error := self._failure()) is not None and self.status.phase is not TaskPhase.FAILED:
            yield partial(core.call_failed, error)
        yield core.woken
        if inputs is None or core.parts is None:
            return
        if self.status.restoring is not None and (fetch is None or fetch.complete):
            self.status.fetch = None
            yield core.state_complete
        if isinstance(inputs, StreamInputs) and self.status.phase is not TaskPhase.LIVE:
            yield partial(core.heads_checked, inputs.heads())  # one may never have been heard of
        yield partial(core.head_advanced, inputs.head())

    def _failure(self) -> Exception | None:
        """Why the task cannot continue: restored state is lost, the log is damaged or not served
        any more, or the engine has not started."""
        fetch, chain = self.startup.fetch, self.engine.chain
        if fetch is not None and (lost := fetch.lost) is not None:
            return lost
        if (died := self._server_death) is not None:
            why = "nothing is served any more, so the task starts again"
            return RekindleError(f"{died}; {why}")
        if self._log is not None:
            return RekindleError(damage) if (damage := self._log.damage) is not None else None
        error = chain.exception() if chain.done() else None
        return (
            error if error is None or isinstance(error, Exception) else RekindleError(repr(error))
        )

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: TaskEffect) -> None:
        """Under the lock of the process. What has to wait is left to a thread."""
        match effect:
            case Respond() | RefusePoll():
                self.polls.answered(effect)
            case RestoreState() | OpenInputs() | AwaitEngine() | CompleteStart():
                self._engine_calls.request(effect)
            case TakeEpochs() | AppendEpochs() | AppendTentative() | RestartEngine():
                self._engine_calls.request(effect)
            case ProcessEpochs():
                self._engine_calls.request(effect)
                if isinstance(inputs := self.startup.inputs, StreamInputs):
                    inputs.offer_space()
            case RouteInputs(upstreams):
                self.startup.route(upstreams)
            case ReadLive() | StopLive() | ResumeStable():
                assert isinstance(self.startup.inputs, StreamInputs)
                self.startup.inputs.perform(effect)
            case EmitUndo() | EmitReconciliationDone():
                self._mark_output(effect)
            case SaveState():
                self._saver.save(effect)
            case ShipLog():
                assert self._log is not None, "the task has started"
                self._shipper.request(effect, self._log)
            case SkipCheckpoint(epoch):
                _log.warning("the checkpoint of epoch %d is skipped: the store is slow", epoch)
            case CallSink():
                assert self._sinks is not None, "the task has started"
                self._sinks.call(effect)
            case StopSink():
                assert self._sinks is not None, "the task has started"
                self._sinks.stop_writer(effect)
            case SetProblem(subject, problem):
                if problem is not None:
                    _log.warning("%s: %s", subject, problem.message)
            case DiscardLog() | CompareSinkFiles():
                self._mark_log(effect)
            case TruncateLog():
                self._truncation = effect
                self._left.set()
            case ServeStreamSinks():
                self._served = effect
                self._left.set()
            case EndComparison():
                self._comparison_ended = True
                self._left.set()
            case EndProcess():
                self._end = effect
            case _:
                assert_never(effect)

    def _mark_output(self, effect: EmitUndo | EmitReconciliationDone) -> None:
        """Here, so that it is in order with the tentative epochs of the engine's thread."""
        assert self._output is not None, "output may be tentative"
        match effect:
            case EmitUndo(from_epoch):
                self._output.undo(from_epoch)
            case EmitReconciliationDone(through):
                self._output.reconciliation_done(through)

    def _mark_log(self, effect: DiscardLog | CompareSinkFiles) -> None:
        """Here, so that the mark is on the disk before the effects that follow."""
        try:
            if isinstance(effect, CompareSinkFiles):
                mark_comparison(self._config.log_directory)
            elif mark_for_discard(self._config.log_directory):
                _log.warning(
                    "replicas disagree: the output log is discarded, and its epochs are "
                    "computed again from the committed checkpoint"
                )
        except OSError as error:
            _log.error("the output log cannot be marked: %s", error)
            self._mark_failed = True  # the end may be an effect of the same event
            self.process.tell(partial(self.core.call_failed, error))

    def _stepped(self) -> None:
        if self._output is not None and self.core.streams is not None:
            self._output.enter(self.core.streams.state)

    def _run_files(self) -> None:
        """The thread of files. Only the newest truncation and assignment are performed."""
        while self._left.wait() and not self._files_stopping:
            self._left.clear()
            log, streams = self._log, self._stream_sinks
            assert log is not None, "the task has started"
            assert streams is not None, "the task has started"
            try:
                self._perform_later(log, streams)
            except Exception as error:
                _log.exception("the task cannot continue")
                self.process.tell(partial(self.core.call_failed, error))

    def _perform_later(self, log: OutputLog, streams: StreamSinks) -> None:
        """What waits for files or for sockets."""
        with self.process.lock:
            served, self._served = self._served, None
            truncation, self._truncation = self._truncation, None
            comparison_ended, self._comparison_ended = self._comparison_ended, False
        if served is not None:  # first: the log keeps what stream sinks retain
            streams.assign(served.through, served.sinks)
            problem = SetProblem("stream sinks", streams.problem)
            self.process.tell(partial(self.core.problem_changed, problem))
        if truncation is not None:
            log.truncate(truncation.floor)
            if self._output is not None:
                self._output.truncate(truncation.floor)
            self.process.tell(partial(self.core.log_truncated, log.base))
        if comparison_ended and self._earlier is not None:
            self._earlier.stop_comparing()

    # -- start -----------------------------------------------------------------------------------

    def _begin(self, started: Prepared) -> None:
        """In the engine's thread, once all is prepared."""
        config, state, log = self._config, started.state, started.log
        if self.startup.fetch is not None:
            # A kill while a call waits for state says nothing about the call's size.
            self.startup.fetch.during_wait = self._call_size_file.during_wait
        inputs, earlier = started.inputs, started.earlier
        self._engine_calls.begin(
            EngineParts(
                started.chain,
                log,
                source=None if isinstance(inputs, StreamInputs) else inputs,
                engine=self.engine,
                call_size_file=self._call_size_file,
                earlier=earlier,
                output=started.output,
                attempts=self._attempts,
                hot_keys=HotKeys(config.topology, config.segment, config.ref.partition),
            )
        )
        self._output, self._earlier = started.output, earlier
        self._sinks = SinkWriters(self.process, log, self._open_sink)
        self._stream_sinks = StreamSinks(log, started.output, config.bind, config.identity)
        self._lender = StateLender(self.process, self._store.lent_state)
        self._log = log
        self.server.serve_log(log, inputs.head, started.output)
        self.server.serve_lent(self._lender.read)
        _log.info("started after epoch %d; the log holds %d to %d", state.epoch, log.base, log.last)
        restored = partial(
            self.core.restored,
            state,
            log.base,
            log.last,
            compare_files_from=earlier.compare_files_from,
            complete=self.status.restoring is None,
            sizes=call_sizes(config, self._call_size_file),
        )
        with self.process.lock:
            desired = self.core.polls.desired
            self._stream_sinks.retain(desired.sinks if desired is not None else ())
            self.process.tell(restored)

    def _open_sink(self, assigned: SinkAssignment, schema: pa.Schema) -> Sink:
        config = self._config
        interval_epochs = config.topology.spec.checkpoint_interval_epochs
        definition = Definition(
            assigned.definition, assigned.generation, assigned.from_epoch, interval_epochs
        )
        return open_sink(
            assigned.query,
            assigned.sink,
            config.ref.partition,
            config.uid,
            schema,
            definition,
            event_time=config.topology.nodes[config.segment.nodes[-1]].event_time,
            epoch_interval_us=config.epoch_interval_us,
            store=config.topology.spec.checkpoint.store,
        )

    # -- status ----------------------------------------------------------------------------------

    def log_bytes(self) -> int:
        return self._log.local_bytes if self._log is not None else 0

    def unreadable(self) -> tuple[str, ...]:
        return self.startup.inputs.unreadable() if self.startup.inputs is not None else ()

    def problem(self) -> TaskProblem | None:
        inputs, sinks = self.startup.inputs, self._sinks
        for message in (
            self.startup.problem,
            inputs.problem() if inputs is not None and self._log is not None else None,
            sinks.problem() if sinks is not None else None,
            self.core.shipping.problem or self._shipper.problem,
        ):
            if message is not None:
                return TaskProblem(message=message)
        message = self._saver.problem
        return TaskProblem(message=message, saving=True) if message is not None else None

    # -- ending ----------------------------------------------------------------------------------

    def _stop_all(self, end: EndProcess) -> None:
        """Stop taking epochs, finish the running call, let the sinks write the log, stop Spark."""
        started, log, inputs = time.monotonic(), self._log, self.startup.inputs
        self._engine_calls.stop()
        if self._stream_sinks is not None and not end.flush_s:
            self._stream_sinks.stop()  # what is in the log may be wrong
        if self.startup.fetch is not None:
            self.startup.fetch.stop()  # the loop may wait for state to be fetched
        if self.core.parts is not None:  # a step of the start may wait for the engine or the store
            self._engine_thread.join(end.loop_s)
        if log is not None and end.flush_s and not self._flush(log.last, end.flush_s):
            _log.warning(
                "not all sinks have written the newest epochs; the restarted task writes them"
            )
        if self._sinks is not None:
            self._sinks.stop()
        self._files_stopping = True
        self._left.set()
        self._files_thread.join(STOP_S / 5)  # a store may not respond
        if self._stream_sinks is not None:
            self._stream_sinks.stop()
        if self._lender is not None:
            self._lender.stop(STOP_S / 5)
        if inputs is not None:
            inputs.close()
        self._shipper.stop(0)
        self._saver.stop(end.saver_s)
        self.server.stop()
        # A JVM that does not respond must not block the exit of this process, with which it ends.
        engine = threading.Thread(target=self.engine.stop, args=(STOP_S,), daemon=True)
        engine.start()
        engine.join(2 * STOP_S)
        self._control.stop()
        _log.info("stopped in %.1f s", time.monotonic() - started)

    def _flush(self, through: int, timeout_s: float) -> bool:
        """Wait until all sinks are durable through an epoch, or as far as they may write; False at
        the timeout."""
        until = time.monotonic() + timeout_s
        while True:
            with self.process.lock:
                if self.core.sinks_have_written(through):
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
            self.process.tell(self.core.woken)


def _may_be_tentative(config: TaskConfig) -> bool:
    return bool(config.segment.inputs) and config.topology.spec.max_delay is not None


def _consistency(config: TaskConfig, attempts: AttemptFile | None) -> ConsistencySettings | None:
    """Of a task that reads streams."""
    if not config.segment.inputs:
        return None
    return config.consistency(attempts.first if attempts is not None else 1)
