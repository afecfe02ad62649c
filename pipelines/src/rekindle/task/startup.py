"""Prepares what a task needs before its first epoch: state, inputs, engine and log.

`core.start` decides the order and the retries; the engine's thread performs the steps.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rekindle.checkpoints.fetching import Fetch
from rekindle.checkpoints.shipped import Piece, path_to
from rekindle.connectors.planned_cuts import CutsOvertaken, PlannedCuts, WatermarkRule
from rekindle.connectors.registry import open_dead_letters, open_live_source, open_source
from rekindle.connectors.source import EventTimes, ReplayableSource
from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.call_sizes import CallSizes, check_size
from rekindle.engine.failure import DiskFull
from rekindle.engine.model import Chain
from rekindle.errors import (
    LogCorrupt,
    ObjectMissing,
    SchemaMismatch,
    SourceFailed,
    SourceRefused,
    StoreError,
)
from rekindle.protocol import BegunWindow, RestorePoint, TaskProblem, Upstream
from rekindle.streams.client import StreamClient
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog, fetched_bytes
from rekindle.streams.log_files import ShippedFile, refuse_shipped
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.core.start import (
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
    StartCall,
)
from rekindle.task.discard import discard_log_if_marked
from rekindle.task.earlier_boots import EarlierBoots, continue_log, require_held
from rekindle.task.engine import EngineStarter
from rekindle.task.inputs import SourceInputs
from rekindle.task.live_inputs import LiveInputs
from rekindle.task.process import TaskProcess
from rekindle.task.state import TaskState
from rekindle.task.store import TaskStore
from rekindle.task.stream_inputs import StreamInputs
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec
from rekindle.workers import CallTimer

SLOW_START_S = 30.0
"""A call of the start that takes longer is reported. Preparing a large input takes longer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Arguments of the epoch loop after the start."""

    state: TaskState
    inputs: SourceInputs | LiveInputs | StreamInputs
    chain: Chain
    log: OutputLog
    earlier: EarlierBoots
    output: LiveOutput | None = None  # if output may be tentative


class Startup:
    """`perform` is called by the engine's thread, `route` under the lock of the process."""

    def __init__(
        self,
        config: TaskConfig,
        store: TaskStore,
        engine: EngineStarter,
        process: TaskProcess,
        consistency: ConsistencySettings | None,
        begin: Callable[[Prepared], None],
        shipped: Sequence[Piece] = (),
    ) -> None:
        """`consistency`: of a task that reads streams. `begin` is called once all is prepared.
        `shipped`: of the log in the store, if the task has reported that as its own."""
        self._config = config
        self._store = store
        self._engine = engine
        self._process = process
        self._consistency = consistency
        self._begin = begin
        self._shipped = shipped
        self._upstreams: Sequence[Upstream] = ()
        self._state: TaskState | None = None
        self.inputs: SourceInputs | LiveInputs | StreamInputs | None = None
        """Once they are open."""
        why = "the storage does not respond, or there is much to read"
        self._calls = CallTimer(SLOW_START_S, why=why)
        self._point: RestorePoint | None = None
        self._source: ReplayableSource | LiveInputs | None = None
        self.fetch: Fetch | None = None
        """Of the restored state; None if nothing has to be fetched."""

    @property
    def problem(self) -> str | None:
        """Of a call that takes long."""
        return self._calls.problem

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """The newest routes, with which inputs are read ahead while the engine starts."""
        self._upstreams = upstreams
        if self.inputs is not None:
            self.inputs.route(upstreams)

    def event_times(self, epochs: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Newest event time and watermark of the source, if the task has opened one; called by any
        thread."""
        source = self._source
        if source is None:
            return {}
        times = ((epoch, source.event_times(epoch)) for epoch in epochs)
        return {epoch: (found.newest_us, found.watermark) for epoch, found in times if found}

    def perform(self, step: StartCall | CompleteStart) -> None:
        """Raises the error that prevents the start."""
        match step:
            case RestoreState(point):
                self._ended(self._restore(point))
            case OpenInputs():
                self._ended(self._open_inputs())
            case AwaitEngine():
                self._engine.chain.result()
                self._ended(None)
            case CompleteStart():
                self._begin(self._complete())

    def _ended(self, problem: TaskProblem | None) -> None:
        core = self._process.core
        if problem is None:
            self._process.tell(core.start_step_succeeded)
        else:
            self._process.tell(partial(core.start_step_failed, problem))

    def _restore(self, point: RestorePoint) -> TaskProblem | None:
        """Returns what is missing."""
        try:
            where = "checkpoint" if point.lender is None else "partner's state"
            with self._calls.during(f"reading the {where} of epoch {point.epoch}"):
                self._state, self.fetch = self._store.restore(point)
            self._point = point
            self._process.core.status.fetch = self.fetch
        except ObjectMissing:
            raise  # it was deleted, or is lent no longer: a restarted task gets a newer one
        except (StoreError, DiskFull) as error:
            return TaskProblem(message=str(error))
        return None

    def _restored(self) -> TaskState:
        assert self._state is not None, "the state is restored first"
        return self._state

    def _open_inputs(self) -> TaskProblem | None:
        """Returns what is missing."""
        node = self._config.topology.nodes[self._config.segment.nodes[0]]
        if not isinstance(node.spec, SourceSpec):
            with self._process.lock:
                self.inputs = self._subscribe(self._restored())
                self.inputs.route(self._upstreams)
            return None
        is_live = node.spec.kind[1].is_live
        open_inputs = self._open_live_source if is_live else self._open_source
        try:
            with self._calls.during(f"opening source {node.name}"):
                self.inputs = open_inputs(node, node.spec, self._restored())
        except (SourceFailed, StoreError) as error:
            is_wrong = isinstance(error, SchemaMismatch | SourceRefused)
            wrong = node.name if is_wrong else None
            return TaskProblem(message=str(error), where=node.name, wrong_definition=wrong)
        return None

    def _complete(self) -> Prepared:
        restored, chain, point = self._restored(), self._engine.chain.result(), self._point
        assert point is not None, "the state is restored first"
        assert self.inputs is not None, "the inputs are open"
        operators = chain.match_columns(restored.operators)
        if point.begun:
            bounds = {begun.operator: self._bound(begun) for begun in point.begun}
            operators = chain.begins_after(operators, bounds)
        state = replace(restored, operators=operators)
        self._state = None  # it would keep runs that the task drops later
        log, earlier = self._continue_log(chain, point, restored.chained_digest)
        output = None
        if self._consistency is not None and self._consistency.max_delay_s is not None:
            boot_id = self._process.core.status.boot_id
            output = LiveOutput(log, self._config.tentative_directory, boot_id)
        return Prepared(state, self.inputs, chain, log, earlier, output)

    def _bound(self, begun: BegunWindow) -> int:
        """The event time through which a window lacks rows."""
        own = ((self._event_times(epoch), added_us) for epoch, added_us in begun.own)
        return max([begun.after_us, *(times.newest_us + added_us for times, added_us in own)])

    def _event_times(self, epoch: int) -> EventTimes:
        """Of the own source, through an epoch that it had before the task's."""
        assert self._source is not None, "the inputs are open"
        if not isinstance(self._source, LiveInputs):
            return self._source.event_times(epoch)
        found = self._source.read_event_times(epoch)
        if found is None:
            raise CutsOvertaken(f"the record of epoch {epoch} of the source is gone")
        return found

    def _continue_log(
        self, chain: Chain, point: RestorePoint, chained: str
    ) -> tuple[OutputLog, EarlierBoots]:
        """`chained`: the chained digest at the restore point."""
        config = self._config
        log = self._open_log(chain)
        if not self._shipped or point.log_from is None:
            require_held(log, point)
        earlier = continue_log(log, config.log_directory, point.epoch, config.segment.replicas == 1)
        if self._shipped and point.log_from is not None:
            self._adopt(log, point, chained)
            require_held(log, point)
        return log, earlier

    def _adopt(self, log: OutputLog, point: RestorePoint, chained: str) -> None:
        """Begin with the log that is in the store. Raises LogCorrupt if that is of other output;
        the next boot does not report it."""
        path = path_to(self._shipped, point.epoch, chained)
        if not path or path[0].first > (point.log_from or 0):
            refuse_shipped(self._config.log_directory)
            raise LogCorrupt(
                f"the output log in the checkpoint store is not of the output up to epoch "
                f"{point.epoch}; what readers need is computed again from an older checkpoint"
            )
        log.start_at(point.epoch + 1, keep=False)
        log.adopt(
            [ShippedFile(self._store.piece_object(p), p.first, p.last, p.bytes) for p in path]
        )
        self._process.tell(partial(self._process.core.log_adopted, point.epoch))
        _log.info("epochs %d to %d are in the store's output log", path[0].first, point.epoch)

    def _subscribe(self, state: TaskState) -> StreamInputs:
        config, next_epoch, process = self._config, state.epoch + 1, self._process
        assert self._consistency is not None, "it reads streams"
        process.tell(partial(process.core.streams_opened, next_epoch, state.watermark))
        return StreamInputs(
            process,
            config.segment,
            config.ref.partition,
            self._consistency,
            next_epoch,
            stall_s=2 * config.epoch_interval_us / 1e6 + 2.0,
            connect=partial(StreamClient, identity=config.identity),
            check_size=partial(check_size, memory=config.memory),
        )

    def _open_source(self, node: Node, spec: SourceSpec, state: TaskState) -> SourceInputs:
        config = self._config
        source = open_source(
            spec,
            node,
            config.epoch_interval_us,
            config.data / "source",
            config.memory,
            config.ref.partition,
        )
        self._store.require_same_input(node, source.input_files)
        self._process.core.status.last_epoch = source.last_epoch
        self._source = source
        return SourceInputs(
            source,
            state.epoch + 1,
            state.watermark,
            origin_us=config.origin_us,
            epoch_interval_us=config.epoch_interval_us,
        )

    def _open_live_source(self, node: Node, spec: SourceSpec, state: TaskState) -> LiveInputs:
        config, times = self._config, spec.event_time
        own = config.ref.partition
        partitions = (own, *(p for p in range(node.partitions) if p != own))
        records = [self._store.cuts(node, partition) for partition in partitions]
        idle_us = times.idle_after if times else None
        rule = WatermarkRule(
            times.lateness if times else 0,
            None if idle_us is None else max(1, idle_us // config.epoch_interval_us),
        )
        source = open_live_source(
            spec,
            node,
            config.epoch_interval_us,
            config.data / "source",
            config.memory,
            config.ref.partition,
        )
        self._source = LiveInputs(
            source,
            records,
            PlannedCuts(state.epoch + 1, rule),
            state.epoch + 1,
            state.watermark,
            name=node.name,
            origin_us=config.origin_us,
            epoch_interval_us=config.epoch_interval_us,
            read_ahead_bytes=config.memory.read_ahead_bytes,
            dead_letters=open_dead_letters(spec, node, config.ref.partition, config.uid),
        )
        self._process.core.status.source = self._source.status
        return self._source

    def _open_log(self, chain: Chain) -> OutputLog:
        config = self._config
        if discard_log_if_marked(config.log_directory):
            _log.warning("the output log was discarded: its epochs are computed again")
        return OutputLog(
            config.log_directory,
            config.segment.stream,
            config.ref.partition,
            chain.output_schema,
            budget=config.topology.spec.log_budget,
            spill=self._store,
            spill_prefix=self._store.spill_prefix,
            fetched_bytes=fetched_bytes(config.memory.serve_bytes),
        )


def call_sizes(config: TaskConfig, call_size_file: CallSizeFile) -> CallSizes:
    """Sizes of calls: smaller than a call in which the task was killed."""
    sizes = CallSizes.of(config.memory)
    if (interrupted := call_size_file.interrupted()) is not None:
        sizes.killed_in(interrupted.epochs, interrupted.bytes)
        _log.warning(
            "the task was killed in a call of %d epochs, %d bytes; calls are smaller now",
            interrupted.epochs,
            interrupted.bytes,
        )
    return sizes
