"""Runs one task from start to end: supervises its components.

Threads: this one (supervisor), the engine's loop, the control server, Flight's, one for each
reader, each sink and the saver. Only the supervisor applies polls to the components. A task that
fails waits for a coordinator's poll before it exits, so that the failure is reported.

Design: docs/design/task.md.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid

import pyarrow as pa

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.registry import open_sink
from rekindle.connectors.sink import Sink
from rekindle.errors import NotDeterministic, OperatorRefused
from rekindle.protocol import (
    CONTROL_PORT,
    FLIGHT_PORT,
    PollRequest,
    SinkAssignment,
    TaskPhase,
    TaskProblem,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.flight import StreamServer
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.control import ControlServer
from rekindle.task.core.phases import TaskEvent
from rekindle.task.discard import mark
from rekindle.task.engine import EngineStarter
from rekindle.task.fence import FenceFile
from rekindle.task.inputs import Inputs
from rekindle.task.loop import EpochLoop
from rekindle.task.metrics import make_registry
from rekindle.task.poll_handler import PollHandler
from rekindle.task.saver import CheckpointSaver
from rekindle.task.sinks import SinkWriters
from rekindle.task.startup import STEADY, StartInterrupted, Startup, call_sizes
from rekindle.task.state import TaskState
from rekindle.task.status import TaskComponents, TaskStatus
from rekindle.task.store import TaskStore

TICK_S = 0.05
REPORT_FAILURE_S = 5.0
CALL_S = 20.0
FLUSH_S = 15.0
STOP_S = 5.0

_log = logging.getLogger(__name__)


class TaskRuntime:
    """`run` returns the process's exit status. `stop` may be called by a signal handler."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._halt = threading.Event()  # for the engine's loop
        self._failed_for_good = False  # a restart would not help
        self._recomputes = False
        self._applied: PollRequest | None = None
        self._store = TaskStore(config)
        self.status = TaskStatus(config.ref, uuid.uuid4().hex, config.origin_us, config.interval_us)
        fences = FenceFile(config.data, config.uid, config.ref)
        self.polls = PollHandler(config.ref, self.status.response, config.identity, fences)
        self._control = ControlServer(
            config.bind,
            CONTROL_PORT,
            self.polls,
            alive=lambda: not self._failed or self._failed_for_good,
            ready=lambda: self.status.phase.serves,
            registry=make_registry(
                self.status, config.topology.name, config.segment.name, config.ref
            ),
            identity=config.identity,
        )
        self._flight = StreamServer(
            config.bind, FLIGHT_PORT, config.identity, config.ref.incarnation
        )
        self._engine = EngineStarter(config)
        self._startup = Startup(
            config,
            self._store,
            self._engine,
            self.status,
            lambda wait_s: self._must_recompute() or self._stopping.wait(wait_s),
        )
        self._loop_thread: threading.Thread | None = None

    def stop(self) -> None:
        self._stopping.set()

    @property
    def _failed(self) -> bool:
        return self.status.phase is TaskPhase.FAILED

    def run(self) -> int:
        try:
            poll = self._startup.wait(lambda: self.polls.wait_for_start(TICK_S), STEADY)
            self._start(poll)
            while not self._stopping.wait(TICK_S):
                self._tick()
                if self._failed or self._must_recompute():
                    break
        except StartInterrupted:
            pass
        except Exception as error:
            _log.exception("the task cannot start")
            refused = error.operator if isinstance(error, OperatorRefused) else None
            self._failed_for_good = isinstance(error, NotDeterministic)
            self._fail(str(error), refused=refused)
        if self._failed and not self._stopping.is_set():
            self._stay_failed()
        self._shut_down()
        return 1 if self._failed else 0

    # -- starting --------------------------------------------------------------------------------

    def _start(self, poll: PollRequest) -> None:
        assert poll.restore is not None
        self.status.restored_from = poll.restore.epoch
        self.status.step(TaskEvent.RESTORE_POINT_RECEIVED)
        started = self._startup.start(poll.restore, self._route)
        state, log = started.state, started.log
        components = TaskComponents(
            log,
            started.inputs,
            SinkWriters(log, state.epoch, self._open_sink, started.earlier.compare_from),
            CheckpointSaver(self._store),
        )
        self.status.engine_epoch = state.epoch
        self.status.dropped = started.chain.dropped
        self.status.components = components
        self._flight.serve_log(log, started.inputs.head)
        self.status.step(TaskEvent.STARTED)
        self._tick()
        call_size_file = CallSizeFile(self._config.data)
        loop = EpochLoop(
            chain=started.chain,
            state=state,
            inputs=started.inputs,
            log=log,
            checkpoint_every=self._config.topology.spec.checkpoint_every,
            save=self._save,
            status=self.status,
            wait=self._halt.wait,
            sizes=call_sizes(self._config, call_size_file),
            engine=self._engine,
            call_size_file=call_size_file,
            earlier=started.earlier,
        )
        self._loop_thread = threading.Thread(
            target=self._run_loop, args=(loop,), name="engine", daemon=True
        )
        self._loop_thread.start()
        _log.info("started after epoch %d; the log holds %d to %d", state.epoch, log.base, log.last)

    # -- running ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Apply the newest poll to the components: routes, sinks, floor, commits."""
        components, desired = self.status.components, self.polls.desired
        if components is None or desired is None:
            return
        if components.log.damage is not None:
            self._fail(components.log.damage)
            return
        if desired is not self._applied:
            self._route(components.inputs)
            components.sinks.pause_after(desired.sinks_through)  # before a new sink writes
            components.sinks.assign(desired.sinks)
            self.status.request_digests(desired.digests_of)
            components.saver.commit(desired.committed)
            self.status.committed(desired.committed.epoch if desired.committed else NO_EPOCH)
            self._applied = desired
        if desired.floor is not None:
            components.log.truncate(
                min([desired.floor, *(s.durable for s in components.sinks.progress())])
            )
        self.status.update_phase()

    def _must_recompute(self) -> bool:
        """Whether the process has to end, because what it computed may be wrong."""
        desired = self.polls.desired
        if desired is None or desired.recompute != self.status.boot_id:
            return False
        _log.warning(
            "replicas disagree: the task restarts and computes again from the committed checkpoint"
        )
        mark(self._config.log_directory)
        self._recomputes = True
        return True

    def _route(self, inputs: Inputs) -> None:
        desired = self.polls.desired
        if desired is not None and desired is not self._applied:
            inputs.route(desired.upstreams)

    def _save(self, state: TaskState) -> None:
        desired, components = self.polls.desired, self.status.components
        if desired is not None and desired.saver and components is not None:
            components.saver.offer(state)

    def _open_sink(self, assigned: SinkAssignment, schema: pa.Schema) -> Sink:
        config = self._config
        every = config.topology.spec.checkpoint_every
        definition = Definition(
            assigned.definition, assigned.generation, assigned.from_epoch, every
        )
        return open_sink(
            assigned.query, assigned.sink, config.ref.partition, config.uid, schema, definition
        )

    def _run_loop(self, loop: EpochLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            if not self._stopping.is_set():
                _log.exception("the engine's loop ended")
                self._failed_for_good = isinstance(error, NotDeterministic)
                self._fail(str(error) or repr(error), loop.state.epoch + 1)

    def _fail(self, message: str, epoch: int | None = None, refused: str | None = None) -> None:
        _log.error("fatal: %s", message)
        segment = self._config.segment.name
        problem = TaskProblem(message=message, operator=segment, epoch=epoch, refused=refused)
        self.status.fail(problem)

    def _stay_failed(self) -> None:
        """Stop the sinks and report the failure: until it was reported, or until the task is
        stopped."""
        if self.status.components is not None:
            self.status.components.sinks.stop()
        if not self._failed_for_good:
            self.polls.wait_until_failure_is_reported(REPORT_FAILURE_S)
            return
        while not self._must_recompute() and not self._stopping.wait(TICK_S):
            continue

    # -- ending ----------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Stop taking epochs, finish the running call, let the sinks write the log, stop Spark."""
        failed, components = self._failed, self.status.components
        self.status.step(TaskEvent.STOP_REQUESTED)
        started = time.monotonic()
        self._halt.set()
        if self._loop_thread is not None:
            self._loop_thread.join(0.5 if failed else CALL_S)
        if components is not None:
            may_flush = not failed and not self._recomputes
            if may_flush and not components.sinks.flush(components.log.last, FLUSH_S):
                _log.warning(
                    "not all sinks have written the newest epochs; the restarted task writes them"
                )
            components.sinks.stop()
            components.inputs.close()
            components.saver.stop(0.5 if failed else STOP_S)
        stopper = threading.Thread(target=self._flight.stop, name="flight-stop", daemon=True)
        stopper.start()
        self._engine.stop(STOP_S)
        stopper.join(STOP_S)
        self._control.stop()
        _log.info("stopped in %.1f s", time.monotonic() - started)
