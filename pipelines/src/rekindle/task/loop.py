"""The epoch loop: runs complete epochs through the chain and appends the results to the output log.

One call takes as many epochs as are complete, bounded in epochs, rows and bytes, and never goes
beyond a checkpoint epoch: a task that is behind runs many epochs in one Spark job, and the state
at a checkpoint epoch can be saved. Once an epoch is in the log, sinks and readers may read
it. Independent of clock, network and Spark.

Design: docs/design/task.md#epoch-loop, docs/design/engine.md#calls.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.engine.bounds import take_ready
from rekindle.engine.failure import DiskFull, EngineLost, OutOfMemory
from rekindle.engine.memory import plan_memory
from rekindle.engine.model import Chain, ChainResult
from rekindle.engine.retry import CallSizes, check_columns
from rekindle.errors import LogFull, RekindleError, SourceFailed, StoreError
from rekindle.protocol import TaskProblem
from rekindle.streams.digest import chain_digest, chained_digest_from, digest_table
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSize, CallSizeFile
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.inputs import Inputs
from rekindle.task.state import TaskState
from rekindle.task.status import TaskStatus

RELEASED_BYTES = 4 << 20
"""Arrow releases unused memory after calls larger than this; for small ones it would take too
long."""
_BACKOFF = BackoffPolicy(first_s=0.1, longest_s=2.0)

_log = logging.getLogger(__name__)
_TRANSIENT = (SourceFailed, LogFull, StoreError, DiskFull, OSError)
"""Errors after which the same step is retried; they are reported."""


class EngineRestarter(Protocol):
    """Restarts the chain's engine. A chain without a JVM needs none."""

    def lost(self) -> EngineLost | None:
        """Why the engine is gone; None while it runs."""
        ...

    def restart(self, job_bytes: int) -> Chain:
        """The chain in a new engine. Raises EngineLost."""
        ...


class EpochLoop:
    """`wait(seconds)` sleeps, and returns True if the task has to stop."""

    def __init__(
        self,
        *,
        chain: Chain,
        state: TaskState,
        inputs: Inputs,
        log: OutputLog,
        checkpoint_every: int,
        save: Callable[[TaskState], None],
        status: TaskStatus,
        wait: Callable[[float], bool],
        sizes: CallSizes | None = None,
        engine: EngineRestarter | None = None,
        call_size_file: CallSizeFile | None = None,
        earlier: EarlierBoots | None = None,
    ) -> None:
        self._chain = chain
        self.state = state
        self._inputs = inputs
        self._log = log
        self._checkpoint_every = checkpoint_every
        self._save = save
        self._status = status
        self._wait = wait
        self._sizes = sizes or CallSizes.of(plan_memory())
        self._engine = engine
        self._call_size_file = call_size_file
        self._earlier = earlier
        self._taken: deque[EpochInput] = deque()  # taken from the inputs, not yet in the log

    def run(self) -> None:
        """Run until the task has to stop. Raises permanent errors: OperatorFailed, EpochTooLarge,
        Diverged, EngineLost."""
        while not self._wait(0):
            self.run_call(0.25)

    def run_call(self, timeout_s: float) -> int:
        """One call of the chain, if epochs arrive within the timeout. Returns the number of
        epochs."""
        self._restart_dead_engine()
        if not self._taken:
            self._taken.extend(self._take(timeout_s))
        epochs = take_ready(deque(self._taken), self._sizes.next_call)
        if not epochs:
            return 0
        started = time.perf_counter()
        result = self._process(epochs)
        if result is None:
            return 0
        _check(epochs, result)
        chained = self.state.chained_digest or chained_digest_from(self.state.epoch)
        for output in result.outputs:
            check_columns(output.epoch, output.rows)
            digest = digest_table(output.rows)
            batch = EpochBatch(
                self._log.stream,
                self._log.partition,
                output.epoch,
                output.watermark,
                output.rows,
                digest,
            )
            self._compare(batch)
            if not self._append(batch):
                return 0
            chained = chain_digest(chained, batch.epoch, batch.watermark, digest)
            self._status.computed(batch.epoch, digest, chained)
        for _ in epochs:
            self._taken.popleft()
        if sum(e.nbytes for e in epochs) > RELEASED_BYTES:
            pa.default_memory_pool().release_unused()  # otherwise the process keeps it
        newest = epochs[-1]
        self._status.processed(newest.epoch, time.perf_counter() - started)
        save = self.is_checkpoint(newest.epoch)
        operators = result.state.sealed() if save else result.state
        self.state = TaskState(newest.epoch, newest.watermark, operators, chained)
        if save:
            self._save(self.state)
        return len(epochs)

    def is_checkpoint(self, epoch: int) -> bool:
        return (epoch + 1) % self._checkpoint_every == 0

    def _take(self, timeout_s: float) -> Sequence[EpochInput]:
        done = self.state.epoch + 1
        until_checkpoint = self._checkpoint_every - done % self._checkpoint_every
        bounds = self._sizes.bounds.within(until_checkpoint)
        backoff = Backoff(_BACKOFF)
        while True:
            try:
                epochs = self._inputs.take(bounds, timeout_s)
                self._status.problem("input", None)
                return epochs
            except _TRANSIENT as error:
                self._report_problem("input", error)
                if self._wait(backoff.failed()):
                    return ()

    def _process(self, epochs: Sequence[EpochInput]) -> ChainResult | None:
        """The chain's result; None if the same epochs must be retried, or the task has to stop.
        Raises permanent errors."""
        for epoch in epochs:
            self._sizes.check(epoch)
        if self._call_size_file is None:
            return self._process_with_retries(epochs)
        size = CallSize(len(epochs), sum(e.nbytes for e in epochs))
        self._call_size_file.begin(size)
        result = None
        try:
            result = self._process_with_retries(epochs)
        finally:
            self._call_size_file.end(size if result is not None else None)
        return result

    def _process_with_retries(self, epochs: Sequence[EpochInput]) -> ChainResult | None:
        backoff = Backoff(_BACKOFF)
        while True:
            try:
                result = self._chain.process(self.state.operators, epochs)
            except _TRANSIENT as error:
                self._report_problem("engine", error)
                if self._wait(backoff.failed()):
                    return None
            except (EngineLost, OutOfMemory) as error:
                if self._engine is None:
                    raise
                self._report_problem("engine", error)
                self._sizes.failed(epochs, error)
                self._restart(self._engine)
                return None
            else:
                self._sizes.succeeded(epochs[-1].epoch)
                self._status.problem("engine", None)
                return result

    def _restart_dead_engine(self) -> None:
        """Restart an engine that died while it was idle."""
        if self._engine is None or (error := self._engine.lost()) is None:
            return
        self._report_problem("engine", error)
        self._restart(self._engine)
        self._status.problem("engine", None)

    def _restart(self, engine: EngineRestarter) -> None:
        backoff = Backoff(_BACKOFF)
        while True:
            try:
                self._chain = engine.restart(self._sizes.job_bytes)
                break
            except OSError as error:  # for instance a full disk
                self._report_problem("engine", error)
                if self._wait(backoff.failed()):
                    return
        self._status.dropped = self._chain.dropped

    def _compare(self, batch: EpochBatch) -> None:
        message = self._earlier.check(batch) if self._earlier is not None else None
        if message is not None:
            _log.error("%s", message)
            self._status.contradicted(batch.epoch, message)

    def _append(self, batch: EpochBatch) -> bool:
        """Append, retrying until it succeeds; False if the task has to stop before that."""
        backoff = Backoff(_BACKOFF)
        while True:
            try:
                self._log.append(batch)
                self._status.problem("log", None)
                return True
            except _TRANSIENT as error:
                self._report_problem("log", error)
                if self._wait(backoff.failed()):
                    return False

    def _report_problem(self, subject: str, error: Exception) -> None:
        _log.warning("%s: %s", subject, error)
        problem = TaskProblem(message=str(error), epoch=self.state.epoch + 1)
        self._status.problem(subject, problem)


def _check(epochs: Sequence[EpochInput], result: ChainResult) -> None:
    wanted, got = [e.epoch for e in epochs], [o.epoch for o in result.outputs]
    if wanted != got:
        raise RekindleError(f"the engine returned epochs {got} for {wanted}: this is a bug")
