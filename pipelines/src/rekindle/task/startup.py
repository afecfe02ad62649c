"""Prepares what a task needs before its first epoch: state, inputs, engine and log.

`core.start` decides the order and the retries. An attempt blocks only as long as the store or the
source does; between attempts the supervisor applies polls.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rekindle.checkpoints.fetching import Fetch
from rekindle.connectors.planned_cuts import CutsOvertaken, PlannedCuts, WatermarkRule
from rekindle.connectors.registry import open_live_source, open_source
from rekindle.connectors.source import EventTimes, ReplayableSource
from rekindle.engine.call_sizes import CallSizes, check_size
from rekindle.engine.failure import DiskFull
from rekindle.engine.model import Chain
from rekindle.errors import ObjectMissing, SchemaMismatch, SourceFailed, StoreError
from rekindle.protocol import BegunWindow, RestorePoint, TaskProblem, Upstream
from rekindle.streams.client import StreamClient
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog, fetched_bytes
from rekindle.task.attempts import AttemptFile
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.start import (
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
    StartCore,
    StartEffect,
)
from rekindle.task.core.status import TaskStatus
from rekindle.task.discard import discard_log_if_marked
from rekindle.task.earlier_boots import EarlierBoots, continue_log
from rekindle.task.engine import EngineStarter
from rekindle.task.inputs import SourceInputs
from rekindle.task.live_inputs import LiveInputs
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
    """The I/O around `StartCore`."""

    def __init__(
        self, config: TaskConfig, store: TaskStore, engine: EngineStarter, status: TaskStatus
    ) -> None:
        self._config = config
        self._store = store
        self._engine = engine
        self._status = status
        self._core = StartCore()
        self._waits_for_engine = False
        self._upstreams: Sequence[Upstream] = ()
        self._state: TaskState | None = None
        self._inputs: SourceInputs | LiveInputs | StreamInputs | None = None
        self._prepared: Prepared | None = None
        why = "the storage does not respond, or there is much to read"
        self._calls = CallTimer(SLOW_START_S, why=why)
        status.startup_delay = lambda: self._calls.problem
        self._begun_windows: tuple[BegunWindow, ...] = ()
        self._source: ReplayableSource | LiveInputs | None = None
        self.fetch: Fetch | None = None
        """Of the restored state; None if nothing has to be fetched."""

    def begin(self, point: RestorePoint) -> None:
        """Raises the error that prevents the start, as does `advance`."""
        self._begun_windows = point.begun
        self._apply(self._core.start_requested(point, time.monotonic()))

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """The newest routes, with which inputs are read ahead while the engine starts."""
        self._upstreams = upstreams
        if self._inputs is not None:
            self._inputs.route(upstreams)

    def event_times(self, epochs: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Newest event time and watermark of the source, if the task has opened one; called by any
        thread."""
        source = self._source
        if source is None:
            return {}
        times = ((epoch, source.event_times(epoch)) for epoch in epochs)
        return {epoch: (found.newest_us, found.watermark) for epoch, found in times if found}

    def advance(self) -> Prepared | None:
        """Retry a step that is due. Returns the result, once all steps have succeeded."""
        if self._waits_for_engine and self._engine.chain.done():
            self._waits_for_engine = False
            self._call_ended(None)
        else:
            self._apply(self._core.woken(time.monotonic()))
        prepared, self._prepared = self._prepared, None
        return prepared

    def _call_ended(self, problem: TaskProblem | None) -> None:
        if problem is None:
            self._apply(self._core.step_succeeded(time.monotonic()))
        else:
            self._apply(self._core.step_failed(problem, time.monotonic()))

    def _apply(self, effects: Sequence[StartEffect]) -> None:
        for effect in effects:
            match effect:
                case SetProblem(subject, problem):
                    self._status.set_problem(subject, problem)
                case RestoreState(point):
                    self._call_ended(self._restore(point))
                case OpenInputs():
                    self._call_ended(self._open_inputs())
                case AwaitEngine():
                    self._waits_for_engine = True
                case CompleteStart():
                    self._prepared = self._complete()

    def _restore(self, point: RestorePoint) -> TaskProblem | None:
        """Returns what is missing."""
        try:
            where = "checkpoint" if point.lender is None else "partner's state"
            with self._calls.during(f"reading the {where} of epoch {point.epoch}"):
                self._state, self.fetch = self._store.restore(point)
            self._status.fetch = self.fetch
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
            self._inputs = self._subscribe(self._restored())
            self._inputs.route(self._upstreams)
            return None
        is_live = node.spec.kind[1].is_live
        open_inputs = self._open_live_source if is_live else self._open_source
        try:
            with self._calls.during(f"opening source {node.name}"):
                self._inputs = open_inputs(node, node.spec, self._restored())
        except (SourceFailed, StoreError) as error:
            wrong = node.name if isinstance(error, SchemaMismatch) else None
            return TaskProblem(message=str(error), where=node.name, wrong_definition=wrong)
        return None

    def _complete(self) -> Prepared:
        restored, chain = self._restored(), self._engine.chain.result()
        assert self._inputs is not None, "the inputs are open"
        operators = chain.match_columns(restored.operators)
        if self._begun_windows:
            bounds = {begun.operator: self._bound(begun) for begun in self._begun_windows}
            operators = chain.begins_after(operators, bounds)
        state = replace(restored, operators=operators)
        self._state = None  # it would keep runs that the task drops later
        log, earlier = self._continue_log(chain, state.epoch)
        started = Prepared(state, self._inputs, chain, log, earlier)
        if not isinstance(self._inputs, StreamInputs) or not self._inputs.may_be_tentative:
            return started
        output = LiveOutput(log, self._config.tentative_directory, self._status.boot_id)
        self._inputs.attach(output)
        return replace(started, output=output)

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

    def _continue_log(self, chain: Chain, after: int) -> tuple[OutputLog, EarlierBoots]:
        log = self._open_log(chain)
        has_no_partners = self._config.segment.replicas == 1
        return log, continue_log(log, self._config.log_directory, after, has_no_partners)

    def _subscribe(self, state: TaskState) -> StreamInputs:
        config = self._config
        is_stable = config.topology.spec.max_delay is None
        attempts = None if is_stable else AttemptFile(config.attempts_file)
        return StreamInputs(
            config.segment,
            config.ref.partition,
            config.consistency(attempts.first if attempts is not None else 1),
            state.epoch + 1,
            state.watermark,
            stall_s=2 * config.epoch_interval_us / 1e6 + 2.0,
            connect=partial(StreamClient, identity=config.identity),
            check_size=partial(check_size, memory=config.memory),
            attempts=attempts,
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
        self._status.last_epoch = source.last_epoch
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
        )
        self._status.bad_records = self._source.bad_records
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
