"""The I/O around `SupervisorCore`: builds the components of one task, and ends them.

Threads: this one (supervisor), the engine's loop, the control server, one for all readers, one for
all connections of the stream server and at most three in which it reads the log, one for each sink,
those of Arrow Flight if it has a stream sink, and the saver. Only the supervisor applies polls to
the components.

Design: docs/design/task.md.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.registry import open_sink
from rekindle.connectors.sink import Sink
from rekindle.errors import NotDeterministic, OperatorRefused
from rekindle.protocol import (
    CONTROL_PORT,
    STREAM_PORT,
    PollRequest,
    SinkAssignment,
    TaskPhase,
    TaskProblem,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.control import ControlServer
from rekindle.task.core.phases import TaskEvent
from rekindle.task.core.status import TaskComponents, TaskStatus
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
from rekindle.task.discard import mark_comparison, mark_for_discard
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.engine import EngineStarter
from rekindle.task.fence import FenceFile
from rekindle.task.inputs import SourceInputs
from rekindle.task.lending import StateLender
from rekindle.task.live_inputs import LiveInputs
from rekindle.task.loop import EpochLoop
from rekindle.task.metrics import make_registry
from rekindle.task.poll_handler import PollHandler
from rekindle.task.saver import CheckpointSaver
from rekindle.task.sinks import SinkWriters
from rekindle.task.startup import Prepared, Startup, call_sizes
from rekindle.task.store import TaskStore
from rekindle.task.stream_inputs import StreamInputs
from rekindle.task.stream_sinks import StreamSinks

TICK_S = 0.05
"""Interval in which the supervisor looks for events."""
STOP_S = 5.0
"""How long Spark may take to stop."""

SupervisorEvent = Callable[[float], list[SupervisorEffect]]
"""What happened: a method of the core, but for the time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """The components of a started task."""

    log: OutputLog
    inputs: SourceInputs | LiveInputs | StreamInputs
    earlier: EarlierBoots
    sinks: SinkWriters
    saver: CheckpointSaver
    loop: EpochLoop
    loop_thread: threading.Thread
    lender: StateLender  # also if the task has no partners: it may get some while it runs
    output: LiveOutput | None = None  # if output may be tentative
    stream_sinks: StreamSinks = field(kw_only=True)


class TaskRuntime:
    """`run` returns the process's exit status. `stop` may be called by a signal handler."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._stopping = False  # no Event: a signal handler must not take a lock
        self._halt = threading.Event()  # ends the engine's loop
        self._failed_permanently = False  # a restart would not help
        self._applied: PollRequest | None = None
        self._running: Running | None = None
        self._exit_status = 0
        self._store = TaskStore(config)
        self.status = TaskStatus(
            config.ref,
            uuid.uuid4().hex,
            config.origin_us,
            config.epoch_interval_us,
            time.time,
            threading.Lock(),
        )
        self._core = SupervisorCore(self.status.boot_id)
        fences = FenceFile(config.data, config.uid, config.ref)
        self.polls = PollHandler(
            config.ref,
            self.status.response,
            config.identity,
            fences,
            lambda epochs: self._startup.event_times(epochs),
        )
        self._control = ControlServer(
            config.bind,
            CONTROL_PORT,
            self.polls,
            alive=lambda: not self._failed or self._failed_permanently,
            ready=lambda: self.status.phase.serves,
            registry=make_registry(
                self.status, config.topology.name, config.segment.name, config.ref
            ),
            identity=config.identity,
        )
        self._server_death: str | None = None
        self._server = StreamServer(
            config.bind,
            STREAM_PORT,
            config.identity,
            config.ref.incarnation,
            on_death=self._server_died,
            memory_bytes=config.memory.serve_bytes,
        )
        self._engine = EngineStarter(config)
        self._startup = Startup(config, self._store, self._engine, self.status)

    def stop(self) -> None:
        self._stopping = True

    def _server_died(self, reason: str) -> None:
        """Called by the server's thread; the supervisor's fails the task."""
        self._server_death = reason

    @property
    def _failed(self) -> bool:
        return self.status.phase is TaskPhase.FAILED

    def run(self) -> int:
        while not self._core.ended:
            try:
                for event in self._next_events():
                    for effect in event(time.monotonic()):
                        self._apply(effect)
            except Exception as error:
                if self._core.ended:
                    raise
                self._fail_with(error)
        return self._exit_status

    # -- events ----------------------------------------------------------------------------------

    def _next_events(self) -> Iterator[SupervisorEvent]:
        """The events since the last call, after a short wait."""
        if not self._stopping:
            time.sleep(TICK_S)
        failed_before = self._core.phase in (
            ProcessPhase.FAILED_UNREPORTED,
            ProcessPhase.FAILED_PERMANENTLY,
        )
        if not failed_before and not self._failed:  # only once: it may raise in each tick
            self._find_failure()
        if self._failed and not failed_before:
            yield partial(self._core.task_failed, self._failed_permanently)
        elif self._stopping:
            yield self._core.stop_requested
        elif self._core.phase is ProcessPhase.FAILED_UNREPORTED and self.polls.failure_reported:
            yield self._core.failure_reported
        else:
            if (desired := self._new_poll()) is not None:
                yield partial(self._core.poll_accepted, desired)
                running = self._running
                if running is not None:
                    running.lender.apply_poll(desired)
                    if isinstance(running.inputs, StreamInputs):
                        running.inputs.update_partner(desired.partner, self.status.boot_id)
            yield self._progress()

    def _progress(self) -> SupervisorEvent:
        running = self._running
        if self._core.phase is ProcessPhase.STARTING:
            return self._advance_start()
        if self._core.phase is not ProcessPhase.RUNNING or running is None:
            return self._core.woken
        self._update_fetched(running)
        self.status.update_phase()
        running.lender.tick()
        if isinstance(running.inputs, StreamInputs):
            self._update_streams(running.inputs)
        if running.earlier.compare_files_from is not None and running.sinks.all_compared():
            running.earlier.stop_comparing()
        durable = [sink.durable for sink in running.sinks.progress()]
        return partial(self._core.sinks_progressed, durable)

    def _update_streams(self, streams: StreamInputs) -> None:
        if self.status.phase is TaskPhase.LIVE:
            streams.allow_tentative()
        else:
            streams.check_heads()  # an input that was never heard of may be missing
        streams.report(self.status)

    def _update_fetched(self, running: Running) -> None:
        """Report it once all restored state has been fetched."""
        fetch = self._startup.fetch
        if self.status.restoring is not None and (fetch is None or fetch.complete):
            self.status.restoring = self.status.fetch = None
            running.saver.state_complete()

    def _new_poll(self) -> PollRequest | None:
        before, self._applied = self._applied, self.polls.desired
        return self._applied if self._applied is not before else None

    def _find_failure(self) -> None:
        """Fail if the engine could not start, if the log is damaged or not served any more, or if
        restored state is lost."""
        running, fetch = self._running, self._startup.fetch
        died = self._server_death
        if fetch is not None and (lost := fetch.lost) is not None:
            raise lost
        if died is not None:
            self._fail(f"{died}; nothing is served any more, so the task starts again")
        elif running is not None and running.log.damage is not None:
            self._fail(running.log.damage)
        if died is not None or running is not None:
            return
        chain = self._engine.chain
        if chain.done() and (error := chain.exception()) is not None:
            raise error

    # -- effects ---------------------------------------------------------------------------------

    def _apply(self, effect: SupervisorEffect) -> None:
        running = self._running
        match effect:
            case StartTask(restore):
                self.status.start_from(restore)
                self._startup.begin(restore)
            case RouteInputs(upstreams) if running is None:
                self._startup.route(upstreams)
            case DiscardLog():
                if mark_for_discard(self._config.log_directory):
                    _log.warning(
                        "replicas disagree: the output log is discarded, and its epochs are "
                        "computed again from the committed checkpoint"
                    )
            case CompareSinkFiles():
                mark_comparison(self._config.log_directory)
            case StopSinks():
                if running is not None:
                    running.sinks.stop()
                    running.stream_sinks.assign(None, ())
            case EndProcess():
                self._end(effect)
            case ReportDigests(epochs):
                self.status.request_digests(epochs)
            case _:
                assert running is not None, "the core has started the task"
                self._apply_to(running, effect)

    def _apply_to(
        self,
        running: Running,
        effect: RouteInputs | SetSinks | SetCommittedEntry | TruncateLog | RunLoop,
    ) -> None:
        match effect:
            case RouteInputs(upstreams):
                running.inputs.route(upstreams)
            case SetSinks(through, sinks):
                running.sinks.pause_after(through)
                running.sinks.assign(sinks)
                running.stream_sinks.assign(through, sinks)
                self.status.set_problem("stream sinks", running.stream_sinks.problem)
            case SetCommittedEntry(point, refused, may_be_live):
                running.saver.commit(point)
                running.saver.refuse(refused)
                self.status.committed(point.epoch if point is not None else NO_EPOCH, may_be_live)
            case TruncateLog(floor):
                running.log.truncate(floor)
                if running.output is not None:
                    running.output.truncate(floor)
            case RunLoop():
                running.loop_thread.start()

    def _advance_start(self) -> SupervisorEvent:
        if (prepared := self._startup.advance()) is None:
            return self._core.woken
        self._running = self._with_components(prepared)
        return self._core.started

    def _with_components(self, started: Prepared) -> Running:
        state, log = started.state, started.log
        compare_files_from = started.earlier.compare_files_from
        sinks = SinkWriters(log, state.epoch, self._open_sink, compare_files_from)
        saver = CheckpointSaver(self._store)
        if self.status.restoring is not None:
            saver.state_incomplete()
        call_size_file = CallSizeFile(self._config.data)
        if self._startup.fetch is not None:
            # A kill while a call waits for state says nothing about the call's size.
            self._startup.fetch.during_wait = call_size_file.during_wait
        loop = EpochLoop(
            chain=started.chain,
            state=state,
            inputs=started.inputs,
            log=log,
            checkpoint_interval_epochs=self._config.topology.spec.checkpoint_interval_epochs,
            save=lambda reached: saver.offer(reached) if self._core.is_saver else None,
            status=self.status,
            wait=self._halt.wait,
            sizes=call_sizes(self._config, call_size_file),
            engine=self._engine,
            call_size_file=call_size_file,
            earlier=started.earlier,
        )
        self.status.snapshots = lambda: saver.held(loop.state.operators)
        self.status.engine_epoch = state.epoch
        self.status.dropped = started.chain.dropped
        self.status.components = TaskComponents(log, started.inputs, sinks, saver)
        self._server.serve_log(log, started.inputs.head, started.output)
        self.status.step(TaskEvent.STARTED)
        _log.info("started after epoch %d; the log holds %d to %d", state.epoch, log.base, log.last)
        thread = threading.Thread(target=self._run_loop, args=(loop,), name="engine", daemon=True)
        config = self._config
        boot_id = self.status.boot_id
        lender = StateLender(boot_id, lambda: loop.state, saver, self._store.lent_state)
        self._server.serve_lent(lender.read)
        self.status.lending = lender
        return Running(
            log,
            started.inputs,
            started.earlier,
            sinks,
            saver,
            loop,
            thread,
            lender,
            started.output,
            stream_sinks=StreamSinks(log, started.output, config.bind, config.identity),
        )

    def _open_sink(self, assigned: SinkAssignment, schema: pa.Schema) -> Sink:
        config = self._config
        interval_epochs = config.topology.spec.checkpoint_interval_epochs
        definition = Definition(
            assigned.definition, assigned.generation, assigned.from_epoch, interval_epochs
        )
        return open_sink(
            assigned.query, assigned.sink, config.ref.partition, config.uid, schema, definition
        )

    # -- failing ---------------------------------------------------------------------------------

    def _run_loop(self, loop: EpochLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            if not self._stopping:
                _log.exception("the engine's loop ended")
                self._failed_permanently = isinstance(error, NotDeterministic)
                self._fail(str(error) or repr(error), loop.state.epoch + 1)

    def _fail_with(self, error: Exception) -> None:
        _log.error("the task cannot continue", exc_info=error)
        wrong = error.operator if isinstance(error, OperatorRefused) else None
        self._failed_permanently = isinstance(error, NotDeterministic)
        self._fail(str(error), wrong_definition=wrong)

    def _fail(
        self, message: str, epoch: int | None = None, wrong_definition: str | None = None
    ) -> None:
        _log.error("fatal: %s", message)
        self.status.fail(
            TaskProblem(
                message=message,
                where=self._config.segment.name,
                epoch=epoch,
                wrong_definition=wrong_definition,
            )
        )

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, end: EndProcess) -> None:
        """Stop taking epochs, finish the running call, let the sinks write the log, stop Spark."""
        running = self._running
        self.status.step(TaskEvent.STOP_REQUESTED)
        started = time.monotonic()
        self._halt.set()
        if self._startup.fetch is not None:
            self._startup.fetch.stop()  # the loop may wait for state to be fetched
        if running is not None:
            if running.loop_thread.ident is not None:
                running.loop_thread.join(end.loop_s)
            if end.flush_s and not running.sinks.wait_until_durable(running.log.last, end.flush_s):
                _log.warning(
                    "not all sinks have written the newest epochs; the restarted task writes them"
                )
            running.sinks.stop()
            running.stream_sinks.stop()
            running.lender.stop(STOP_S / 5)
            running.inputs.close()
            running.saver.stop(end.saver_s)
        self._server.stop()
        # A JVM that does not respond must not block the exit of this process, with which it ends.
        engine = threading.Thread(target=self._engine.stop, args=(STOP_S,), daemon=True)
        engine.start()
        engine.join(2 * STOP_S)
        self._control.stop()
        self._exit_status = end.exit_status
        _log.info("stopped in %.1f s", time.monotonic() - started)
