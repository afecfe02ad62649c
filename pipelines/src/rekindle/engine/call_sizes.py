"""The sizes of calls and Spark jobs: reduced after a call that did not fit into memory. Pure.

The call is halved, down to one epoch; then the rows of one epoch are divided into smaller Spark
jobs, if the operators allow that. Calls stay as small as was needed, because later rows are likely
to be similar, and each failure may cost a JVM.

Design: docs/design/engine.md#memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from rekindle.engine.bounds import CallBounds
from rekindle.engine.failure import EngineUnavailable, OutOfMemory
from rekindle.engine.memory import MIB, MemoryPlan, needed_bytes
from rekindle.errors import EpochTooLarge
from rekindle.streams.epochs import EpochInput

JOB_INPUT_DIVISOR = 16
SMALL_BYTES = 1 << 20
"""A call of fewer bytes is hardly the reason that a process was killed: larger calls would have
failed before. And with such a limit every later call would have only one epoch."""
MIN_SPARK_JOB_INPUT_BYTES = 256 << 10
COLUMN_BYTES = 2**31 - 1
"""Limit of a column of strings or lists in one epoch: Arrow's offsets have 32 bits."""
MAX_CRASHES = 2
"""Limit on consecutive crashes of the JVM in calls of one epoch, for reasons other than memory."""


@dataclass(slots=True)
class CallSizes:
    """Limits on the sizes of calls and Spark jobs; they are reduced after failures."""

    memory: MemoryPlan
    bounds: CallBounds
    spark_job_input_bytes: int
    _max_epochs: int | None = None  # in calls up to epoch `_reduced_through`
    _reduced_through: int = 0
    _crashes: int = 0

    @staticmethod
    def of(memory: MemoryPlan) -> CallSizes:
        return CallSizes(
            memory, CallBounds(max_bytes=memory.call_bytes), memory.spark_job_input_bytes
        )

    @property
    def next_call(self) -> CallBounds:
        return self.bounds.with_max_epochs(self._max_epochs or self.bounds.max_epochs)

    def killed_in(self, epochs: int, size: int) -> None:
        """Reduce the limits: the task's process was killed during a call of `epochs` epochs with
        `size` bytes. The cause may not have been memory, so no epoch is refused."""
        if epochs == 1:
            self.bounds = replace(self.bounds, max_bytes=max(SMALL_BYTES, size))
            self.spark_job_input_bytes = max(
                MIN_SPARK_JOB_INPUT_BYTES, self.spark_job_input_bytes // JOB_INPUT_DIVISOR
            )
        elif size // 2 >= SMALL_BYTES:
            self.bounds = replace(self.bounds, max_bytes=size // 2)
        else:
            self.bounds = self.bounds.with_max_epochs(epochs // 2)

    def succeeded(self, through: int) -> None:
        """A call whose last epoch is `through` succeeded."""
        if through >= self._reduced_through:
            self._max_epochs = None
        self._crashes = 0

    def failed(self, call: Sequence[EpochInput], error: EngineUnavailable | OutOfMemory) -> None:
        """Make the next call smaller. Raises EpochTooLarge, or the error, if that is impossible."""
        out_of_memory = isinstance(error, OutOfMemory) or error.out_of_memory
        if len(call) > 1:
            half = sum(e.nbytes for e in call) // 2
            if out_of_memory or half >= SMALL_BYTES:
                self.bounds = replace(self.bounds, max_bytes=max(1, half))
            self._max_epochs = len(call) // 2
            self._reduced_through = max(self._reduced_through, call[-1].epoch)
            return
        if not out_of_memory:
            self._crashes += 1
            if self._crashes > MAX_CRASHES:
                raise error
            return
        if self.spark_job_input_bytes // JOB_INPUT_DIVISOR < MIN_SPARK_JOB_INPUT_BYTES:
            raise EpochTooLarge(self._too_large(call[0], str(error))) from error
        self.spark_job_input_bytes //= JOB_INPUT_DIVISOR

    def check(self, epoch: EpochInput) -> None:
        """Raises EpochTooLarge for an epoch whose copies in Python would not all fit into memory,
        or for a column that is too large for Arrow."""
        check_size(describe(epoch), epoch.nbytes, self.memory)
        for table in epoch.inputs:
            check_column_sizes(epoch.epoch, table)

    def _too_large(self, epoch: EpochInput, error: str) -> str:
        heap = self.memory.heap_bytes // MIB
        return (
            f"{describe(epoch)} does not fit into the memory of the task, which is "
            f"{self.memory.limit_bytes // MIB} MiB with a JVM heap of {heap} MiB; raise "
            f"resources.limits.memory of the operator, or use shorter epochs: {error}"
        )


def check_size(what: str, size: int, memory: MemoryPlan) -> None:
    """Raises EpochTooLarge for an epoch of `size` bytes that does not fit into the task."""
    if size <= memory.epoch_bytes:
        return
    needed = needed_bytes(size, with_jvm=memory.heap_bytes > 0, branches=memory.branches) // MIB
    raise EpochTooLarge(
        f"{what} is larger than the {memory.epoch_bytes // MIB} MiB that a task of "
        f"{memory.limit_bytes // MIB} MiB has for one epoch; raise its resources.limits.memory to "
        f"{needed}Mi, or use shorter epochs"
    )


def check_column_sizes(epoch: int, table: pa.Table) -> None:
    """Raises EpochTooLarge for a column that Arrow cannot hold in one array."""
    if table.nbytes <= COLUMN_BYTES:
        return
    for column in table.schema:
        size = table.column(column.name).nbytes
        if size > COLUMN_BYTES and not pa.types.is_primitive(column.type):
            raise EpochTooLarge(
                f"column {column.name} of epoch {epoch} has {size / 2**30:.1f} GiB, and a column "
                f"of type {column.type} holds at most 2 GiB; use shorter epochs, or more partitions"
            )


def describe(epoch: EpochInput) -> str:
    """The number, rows and size of an epoch, for messages."""
    size = epoch.nbytes / MIB
    return f"epoch {epoch.epoch} ({epoch.num_rows:,} rows, {size:,.1f} MiB)"
