"""One task from its start to its end: supervises its components.

Threads: this one (supervisor), the engine's loop, the control server, Flight's, one for each
reader, each sink and the saver. The supervisor alone applies polls to the components. A task that
fails waits for a coordinator's poll before it exits, so that the failure is reported.

Design: docs/design/task.md.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from rekindle.checkpoints.store import ObjectMissing
from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.kinds import open_sink, open_source
from rekindle.connectors.sink import Sink
from rekindle.engine.model import Chain
from rekindle.engine.retry import CallSizes, check_size
from rekindle.errors import (
    NotDeterministic,
    OperatorRefused,
    RekindleError,
    SchemaMismatch,
    SourceFailed,
    StoreError,
)
from rekindle.protocol import (
    CONTROL_PORT,
    FLIGHT_PORT,
    PollRequest,
    RestorePoint,
    SinkAssignment,
    TaskPhase,
    TaskProblem,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.flight import StreamClient, StreamServer
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.control import ControlServer
from rekindle.task.discard import discard_marked, mark
from rekindle.task.earlier import take_over_log
from rekindle.task.engine import EngineStarter
from rekindle.task.fence import FenceFile
from rekindle.task.inputs import Inputs, SourceInputs, StreamInputs
from rekindle.task.loop import EpochLoop
from rekindle.task.metrics import make_registry
from rekindle.task.phases import TaskEvent
from rekindle.task.poll_handler import PollHandler
from rekindle.task.saver import CheckpointSaver
from rekindle.task.sinks import SinkWriters
from rekindle.task.state import TaskState
from rekindle.task.status import TaskComponents, TaskStatus
from rekindle.task.store import TaskStore
from rekindle.topology.spec import SourceSpec

TICK_S = 0.05
SAY_FAILURE_S = 5.0
TURN_S = 20.0
FLUSH_S = 15.0
STOP_S = 5.0
MAX_BACK_OFF_S = 5.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The task was told to stop while it waited for something."""


class TaskRuntime:
    """`run` returns the process's exit status. `stop` may be called by a signal handler."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._halt = threading.Event()  # for the engine's loop
        self._stays = False  # failed, and to start again would change nothing
        self._discards = False
        self._applied: PollRequest | None = None
        self._store = TaskStore(config)
        self.status = TaskStatus(config.ref, uuid.uuid4().hex, config.origin_us, config.interval_us)
        fences = FenceFile(config.data, config.uid, config.ref)
        self.polls = PollHandler(config.ref, self.status.response, config.identity, fences)
        self._control = ControlServer(
            config.bind,
            CONTROL_PORT,
            self.polls,
            alive=lambda: not self._failed or self._stays,
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
        self._loop_thread: threading.Thread | None = None

    def stop(self) -> None:
        self._stopping.set()

    @property
    def _failed(self) -> bool:
        return self.status.phase is TaskPhase.FAILED

    def run(self) -> int:
        try:
            start = self._wait(lambda: self.polls.wait_for_start(TICK_S), "the first poll", TICK_S)
            self._start(start)
            while not self._stopping.wait(TICK_S):
                self._tick()
                if self._failed or self._recomputes():
                    break
        except _Stopped:
            pass
        except Exception as error:
            _log.exception("the task cannot start")
            refused = error.operator if isinstance(error, OperatorRefused) else None
            self._stays = isinstance(error, NotDeterministic)
            self._fail(str(error), refused=refused)
        if self._failed and not self._stopping.is_set():
            self._stay_failed()
        self._shut_down()
        return 1 if self._failed else 0

    # -- starting --------------------------------------------------------------------------------

    def _start(self, poll: PollRequest) -> None:
        assert poll.restore is not None
        self.status.restored_from = poll.restore.epoch
        self.status.phases.step(TaskEvent.RESTORE_POINT_RECEIVED)
        restored = self._restore(poll.restore)
        inputs = self._open_inputs(restored)
        inputs.route((self.polls.desired or poll).upstreams)
        chain = self._wait_for_chain(inputs)
        state = replace(restored, operators=chain.adopt(restored.operators))
        log = self._open_log(chain)
        alone = self._config.segment.replicas == 1
        earlier = take_over_log(log, self._log_directory, state.epoch, alone)
        components = TaskComponents(
            log,
            inputs,
            SinkWriters(log, state.epoch, self._open_sink, earlier.disputed),
            CheckpointSaver(self._store),
        )
        self.status.engine_epoch = state.epoch
        self.status.dropped = chain.dropped
        self.status.components = components
        self._flight.serve_log(log, inputs.head)
        self.status.phases.step(TaskEvent.STARTED)
        self._tick()
        call_size_file = CallSizeFile(self._config.data)
        loop = EpochLoop(
            chain=chain,
            state=state,
            inputs=inputs,
            log=log,
            checkpoint_every=self._config.topology.spec.checkpoint_every,
            save=self._save,
            status=self.status,
            wait=self._halt.wait,
            sizes=self._call_sizes(call_size_file),
            engine=self._engine,
            call_size_file=call_size_file,
            earlier=earlier,
        )
        self._loop_thread = threading.Thread(
            target=self._run_loop, args=(loop,), name="engine", daemon=True
        )
        self._loop_thread.start()
        _log.info("started after epoch %d; the log holds %d to %d", state.epoch, log.base, log.last)

    def _call_sizes(self, call_size_file: CallSizeFile) -> CallSizes:
        sizes = CallSizes.of(self._config.memory)
        if (interrupted := call_size_file.interrupted()) is not None:
            sizes.killed_in(interrupted.epochs, interrupted.bytes)
            _log.warning(
                "the task was killed in a call of %d epochs, %d bytes; calls are smaller now",
                interrupted.epochs,
                interrupted.bytes,
            )
        return sizes

    def _restore(self, point: RestorePoint) -> TaskState:
        def load() -> TaskState | None:
            try:
                return self._store.restore(point)
            except ObjectMissing:
                raise  # it was cleaned away: start again and be given a newer one
            except StoreError as error:
                self.status.problem("restore", TaskProblem(message=str(error)))
                return None

        state = self._wait(load, "the restore point")
        self.status.problem("restore", None)
        return state

    def _open_inputs(self, state: TaskState) -> Inputs:
        config, after = self._config, state.epoch + 1
        node = config.topology.nodes[config.segment.nodes[0]]
        spec = node.spec
        if not isinstance(spec, SourceSpec):
            interval_s = config.interval_us / 1e6
            return StreamInputs(
                config.segment,
                config.ref.partition,
                after,
                state.watermark,
                stall_s=2 * interval_s + 2.0,
                connect=partial(
                    StreamClient,
                    identity=config.identity,
                    check_size=partial(check_size, memory=config.memory),
                ),
                ahead_bytes=config.memory.ahead_bytes,
            )

        def open_it() -> SourceInputs | None:
            try:
                source = open_source(
                    spec, node, config.interval_us, config.data / "source", config.memory
                )
                self._store.require_same_input(node, source.input)
            except (SourceFailed, StoreError) as error:
                misfit = node.name if isinstance(error, SchemaMismatch) else None
                said = TaskProblem(message=str(error), operator=node.name, refused=misfit)
                self.status.problem("source", said)
                return None
            return SourceInputs(
                source,
                after,
                state.watermark,
                origin_us=config.origin_us,
                interval_us=config.interval_us,
            )

        inputs = self._wait(open_it, "the source")
        self.status.problem("source", None)
        return inputs

    def _wait_for_chain(self, inputs: Inputs) -> Chain:
        def started() -> Chain | None:
            self._route(inputs)
            return self._engine.chain.result() if self._engine.chain.done() else None

        return self._wait(started, "the engine", TICK_S)

    def _open_log(self, chain: Chain) -> OutputLog:
        config = self._config
        if discard_marked(self._log_directory):
            _log.warning("the output log was discarded: its epochs are computed again")
        return OutputLog(
            self._log_directory,
            config.segment.stream,
            config.ref.partition,
            chain.output_schema,
            budget=config.topology.spec.log_budget,
            spill=self._store,
            spill_prefix=self._store.spill_prefix,
        )

    @property
    def _log_directory(self) -> Path:
        config = self._config
        return config.data / "log" / config.uid / config.segment.stream / str(config.ref.partition)

    def _wait(
        self, attempt: Callable[[], T | None], what: str, max_back_off_s: float = MAX_BACK_OFF_S
    ) -> T:
        """Try until there is a result. Raises _Stopped, or what keeps the engine from starting."""
        back_off = TICK_S
        while (result := attempt()) is None:
            chain = self._engine.chain
            if chain.done() and (error := chain.exception()) is not None:
                raise error
            if self._failed:
                raise RekindleError(f"the engine died while the task waited for {what}")
            if self._recomputes() or self._stopping.wait(back_off):
                raise _Stopped(what)
            back_off = min(2 * back_off, max_back_off_s)
        return result

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
            components.sinks.hold(desired.sinks_through)  # before a sink that is new writes
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

    def _recomputes(self) -> bool:
        """Whether this life has to end, because what it computed may be wrong."""
        desired = self.polls.desired
        if desired is None or desired.recompute != self.status.boot_id:
            return False
        _log.warning("told to compute again from the committed checkpoint: replicas disagree")
        mark(self._log_directory)
        self._discards = True
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
                self._stays = isinstance(error, NotDeterministic)
                self._fail(str(error) or repr(error), loop.state.epoch + 1)

    def _fail(self, message: str, epoch: int | None = None, refused: str | None = None) -> None:
        _log.error("fatal: %s", message)
        segment = self._config.segment.name
        said = TaskProblem(message=message, operator=segment, epoch=epoch, refused=refused)
        self.status.fail(said)

    def _stay_failed(self) -> None:
        """Write nothing more, and say why to whoever asks: for a while, or until it is ended."""
        if self.status.components is not None:
            self.status.components.sinks.stop()
        if not self._stays:
            self.polls.wait_until_failure_is_reported(SAY_FAILURE_S)
            return
        while not self._recomputes() and not self._stopping.wait(TICK_S):
            continue

    # -- ending ----------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Stop accepting, finish what is in hand, give the sinks what is out, stop Spark."""
        failed, components = self._failed, self.status.components
        self.status.phases.step(TaskEvent.STOP_REQUESTED)
        started = time.monotonic()
        self._halt.set()
        if self._loop_thread is not None:
            self._loop_thread.join(0.5 if failed else TURN_S)
        if components is not None:
            whole = not failed and not self._discards
            if whole and not components.sinks.flush(components.log.last, FLUSH_S):
                _log.warning("not all sinks have taken the newest epochs; the next life goes on")
            components.sinks.stop()
            components.inputs.close()
            components.saver.stop(0.5 if failed else STOP_S)
        stopper = threading.Thread(target=self._flight.stop, name="flight-stop", daemon=True)
        stopper.start()
        self._engine.stop(STOP_S)
        stopper.join(STOP_S)
        self._control.stop()
        _log.info("stopped in %.1f s", time.monotonic() - started)
