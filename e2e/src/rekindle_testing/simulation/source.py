"""The source of a simulated task, which time releases, as in `rekindle.task.inputs`."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.streams.epochs import EpochInput
from rekindle.task.core.source import released_epoch, released_in_s
from rekindle.topology.model import Partition
from rekindle_testing.simulation.scheduler import SimulatedProcess
from rekindle_testing.simulation.values import TaskComputation, rows_of

_LEAST_WAIT_S = 0.001
_ORIGIN_US = 0  # epoch 0 begins when the simulation does


class SimulatedSource:
    """A source. `clock`: Unix time of its node, in seconds."""

    def __init__(
        self,
        process: SimulatedProcess,
        partition: Partition,
        next_epoch: int,
        clock: Callable[[], float],
        epoch_interval_us: int,
        computation: TaskComputation,
    ) -> None:
        self._process = process
        self._partition = partition
        self._next = next_epoch
        self._clock = clock
        self._epoch_interval_us = epoch_interval_us
        self._computation = computation

    def head(self) -> int:
        return released_epoch(self._clock(), _ORIGIN_US, self._epoch_interval_us)

    def take(self, bounds: CallBounds) -> list[EpochInput]:
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            epoch, partition = self._next, self._partition
            rows = rows_of(self._computation.source_value(partition, epoch))
            watermark = self._computation.source_watermark
            before, after = (watermark(partition, e) for e in (epoch - 1, epoch))
            idle = self._computation.source_is_idle(partition, epoch)
            call.add(EpochInput(epoch, before, after, (rows,), idle=idle))
            self._next += 1
        return call.epochs

    def when_ready(self, action: Callable[[], None]) -> None:
        wait_s = released_in_s(self._next, self._clock(), _ORIGIN_US, self._epoch_interval_us)
        self._process.after(max(_LEAST_WAIT_S, wait_s), action)
