"""Prepares what a task needs before its first epoch: state, inputs, engine and log.

The task may have to wait for each: the checkpoint store or the source's files may be missing, and
Spark takes seconds to start. It reports what it waits for as its problem.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.checkpoints.store import ObjectMissing
from rekindle.connectors.registry import open_source
from rekindle.engine.model import Chain
from rekindle.engine.retry import CallSizes, check_size
from rekindle.errors import SchemaMismatch, SourceFailed, StoreError
from rekindle.protocol import RestorePoint, TaskProblem
from rekindle.streams.flight import StreamClient
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.core.status import TaskStatus
from rekindle.task.discard import discard_marked
from rekindle.task.earlier_boots import EarlierBoots, continue_log
from rekindle.task.engine import EngineStarter
from rekindle.task.inputs import Inputs, SourceInputs, StreamInputs
from rekindle.task.state import TaskState
from rekindle.task.store import TaskStore
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec

_BACKOFF = BackoffPolicy(first_s=0.05, longest_s=5.0)
STEADY = BackoffPolicy(first_s=0.05, longest_s=0.05)

T = TypeVar("T")
_log = logging.getLogger(__name__)


class StartInterrupted(Exception):
    """The task has to stop while it waits for something."""


@dataclass(frozen=True, slots=True)
class Started:
    """Arguments of the epoch loop after the start."""

    state: TaskState
    inputs: Inputs
    chain: Chain
    log: OutputLog
    earlier: EarlierBoots


class Startup:
    """`interrupted(seconds)` waits, and returns True if the task has to stop."""

    def __init__(
        self,
        config: TaskConfig,
        store: TaskStore,
        engine: EngineStarter,
        status: TaskStatus,
        interrupted: Callable[[float], bool],
    ) -> None:
        self._config = config
        self._store = store
        self._engine = engine
        self._status = status
        self._interrupted = interrupted

    def start(self, point: RestorePoint, route: Callable[[Inputs], None]) -> Started:
        """`route` is called repeatedly while the engine starts, so that inputs are read ahead with
        the newest routes. Raises StartInterrupted, or the error that prevents the start."""
        restored = self._restore(point)
        inputs = self._open_inputs(restored)
        chain = self._wait_for_chain(lambda: route(inputs))
        state = replace(restored, operators=chain.align_state(restored.operators))
        directory = self._config.log_directory
        if discarded := discard_marked(directory):
            _log.warning("the output log was discarded: its epochs are computed again")
        log = self._open_log(chain)
        alone = self._config.segment.replicas == 1
        earlier = continue_log(log, directory, state.epoch, alone, discarded)
        return Started(state, inputs, chain, log, earlier)

    def wait(self, attempt: Callable[[], T | None], policy: BackoffPolicy = _BACKOFF) -> T:
        """Retry until there is a result. Raises StartInterrupted, or the error of the engine."""
        backoff = Backoff(policy)
        while (result := attempt()) is None:
            chain = self._engine.chain
            if chain.done() and (error := chain.exception()) is not None:
                raise error
            if self._interrupted(backoff.failed()):
                raise StartInterrupted
        return result

    def _restore(self, point: RestorePoint) -> TaskState:
        def load() -> TaskState | None:
            try:
                return self._store.restore(point)
            except ObjectMissing:
                raise  # it was garbage-collected: a restarted task gets a newer restore point
            except StoreError as error:
                self._status.problem("restore", TaskProblem(message=str(error)))
                return None

        state = self.wait(load)
        self._status.problem("restore", None)
        return state

    def _open_inputs(self, state: TaskState) -> Inputs:
        node = self._config.topology.nodes[self._config.segment.nodes[0]]
        if isinstance(node.spec, SourceSpec):
            return self._open_source(node, node.spec, state)
        return self._subscribe(state)

    def _subscribe(self, state: TaskState) -> StreamInputs:
        config = self._config
        return StreamInputs(
            config.segment,
            config.ref.partition,
            state.epoch + 1,
            state.watermark,
            stall_s=2 * config.interval_us / 1e6 + 2.0,
            connect=partial(
                StreamClient,
                identity=config.identity,
                check_size=partial(check_size, memory=config.memory),
            ),
            ahead_bytes=config.memory.ahead_bytes,
        )

    def _open_source(self, node: Node, spec: SourceSpec, state: TaskState) -> SourceInputs:
        config = self._config

        def attempt() -> SourceInputs | None:
            try:
                source = open_source(
                    spec, node, config.interval_us, config.data / "source", config.memory
                )
                self._store.require_same_input(node, source.input)
            except (SourceFailed, StoreError) as error:
                refused = node.name if isinstance(error, SchemaMismatch) else None
                problem = TaskProblem(message=str(error), operator=node.name, refused=refused)
                self._status.problem("source", problem)
                return None
            return SourceInputs(
                source,
                state.epoch + 1,
                state.watermark,
                origin_us=config.origin_us,
                interval_us=config.interval_us,
            )

        inputs = self.wait(attempt)
        self._status.problem("source", None)
        return inputs

    def _wait_for_chain(self, route: Callable[[], None]) -> Chain:
        def attempt() -> Chain | None:
            route()
            return self._engine.chain.result() if self._engine.chain.done() else None

        return self.wait(attempt, STEADY)

    def _open_log(self, chain: Chain) -> OutputLog:
        config = self._config
        return OutputLog(
            config.log_directory,
            config.segment.stream,
            config.ref.partition,
            chain.output_schema,
            budget=config.topology.spec.log_budget,
            spill=self._store,
            spill_prefix=self._store.spill_prefix,
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
