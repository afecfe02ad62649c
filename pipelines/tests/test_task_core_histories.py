"""A task core in random histories: its inputs, engine, log, store and sink fail, and it restarts.

Nothing is skipped, written twice or dropped before it is written; once nothing fails, all is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from hypothesis import given
from random_histories import histories

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import EpochOutput
from rekindle.protocol import PollRequest, RestorePoint, SinkAssignment, TaskProblem
from rekindle.task.core.loop import AppendEpochs, ProcessEpochs, TakeEpochs
from rekindle.task.core.messages import (
    CallSink,
    TaskCoreEvent,
    TaskEffect,
)
from rekindle.task.core.saver import SaveState
from rekindle.task.core.sink import OpenSink
from rekindle.task.core.start import OpenInputs, RestoreState
from rekindle.topology.model import Slot
from rekindle.topology.spec import SinkSpec
from rekindle_testing.fixtures.simulated_task import SimulatedTask

SINK = SinkAssignment(query="q", from_epoch=0, sink=SinkSpec())
PARTS = ("input", "engine", "log", "store", "sink")


class World(SimulatedTask):
    """A source task with a sink that outlives it, and the coordinator's part of its polls."""

    def __init__(self) -> None:
        super().__init__(Slot("src", 0, 0), 1, checkpoint_interval_epochs=4)
        self.failing: set[str] = set()
        self.crashes = 0
        self.written: list[int] = []  # in the sink
        self.results: dict[int, set[str]] = {}  # digests of each epoch, of all boots
        self.committed = RestorePoint(epoch=-1)
        self.through: int | None = None
        self.head = -1

    # --- what fails ---

    def _perform(self, effect: TaskEffect) -> Iterable[TaskCoreEvent]:
        failures = list(self._failures(effect))
        if failures:
            return failures
        if isinstance(effect, CallSink) and isinstance(effect.call, OpenSink):
            newest = self.written[-1] if self.written else -1
            return [self._opened(effect.assigned, max(newest, effect.call.after))]
        return super()._perform(effect)

    def _failures(self, effect: TaskEffect) -> Iterable[TaskCoreEvent]:
        match effect:
            case RestoreState() if "store" in self.failing:
                yield self._start_step_failed("the store is down")
            case OpenInputs() if "input" in self.failing:
                yield self._start_step_failed("the file cannot be read")
            case TakeEpochs() if "input" in self.failing:
                yield self._request_failed("the file cannot be read")
            case ProcessEpochs(_, epochs) if self.crashes and len(epochs) > 1:
                self.crashes -= 1
                error = EngineUnavailable("the JVM died", -9)
                yield self._of_loop(lambda loop, now: loop.engine_failed(error, now))
            case ProcessEpochs() if "engine" in self.failing:
                yield self._request_failed("no disk space")
            case AppendEpochs(outputs) if "log" in self.failing:
                if len(outputs) > 1:
                    digest = self._append(outputs[0])
                    yield self._of_loop(lambda loop, now: loop.epochs_appended([digest], now))
                yield self._request_failed("the log is full")
            case SaveState() if "store" in self.failing:
                yield self._of_saver(lambda saver, now: saver.save_failed("down", now))
            case CallSink(assigned) if "sink" in self.failing:
                yield self._of_sink(assigned, lambda sink, now: sink.call_failed("full", now))

    def _start_step_failed(self, message: str) -> TaskCoreEvent:
        return partial(self.core.start_step_failed, TaskProblem(message=message))

    def _request_failed(self, message: str) -> TaskCoreEvent:
        return self._of_loop(lambda loop, now: loop.request_failed(message, now))

    def _append(self, output: EpochOutput) -> str:
        digest = super()._append(output)
        self.results.setdefault(output.epoch, set()).add(digest)
        return digest

    def _written(self, assigned: SinkAssignment, epoch: int) -> TaskCoreEvent:
        assert self.through is None or epoch <= self.through
        assert self.log_base <= epoch <= self.log_last
        self.written.append(epoch)
        return super()._written(assigned, epoch)

    # --- what happens ---

    def release(self) -> None:
        self.head += 3
        self.work()

    def work(self) -> None:
        self.engine_started()
        self.head_advanced(self.head)
        while self.waits_for_epochs and self.state_epoch < self.head:
            self.take([""])

    def pass_time(self) -> None:
        self.now += 0.7
        self.wake()
        self.work()

    def poll_and_commit(self) -> None:
        """What is saved, and written by the sink, is committed."""
        response = self.response()
        durable = min((s.durable for s in response.sinks), default=-1)
        for done in response.checkpoints:
            if self.committed.epoch < done.epoch <= durable:
                self.committed = RestorePoint(epoch=done.epoch, object=done.object)
        poll = PollRequest(
            fence=1,
            generation=1,
            task=self.core.ref,
            restore=self.committed,
            sinks=(SINK,),
            saver=True,
            committed=self.committed if self.committed.object else None,
            floor=self.log_last,  # all readers have received it
            sinks_through=self.through,
        )
        assert self.poll(poll) is not None

    def sink_durable(self) -> int:
        return self.written[-1] if self.written else -1

    def pause(self) -> None:
        self.through = max(self.sink_durable(), self.head - 4)
        self.poll_and_commit()

    def resume(self) -> None:
        self.through = None
        self.poll_and_commit()

    def crash(self) -> None:
        self.crashes += 1

    def die(self) -> None:
        self.reboot()

    def damage(self, part: str) -> None:
        self.failing.add(part)

    def repair(self, part: str) -> None:
        self.failing.discard(part)


MOVES = (
    *("pass_time", "pass_time", "poll_and_commit", "poll_and_commit"),
    *("release", "release", "resume", "resume"),
    *("pause", "crash", "die", *(f"repair {part}" for part in PARTS)),
    *(f"damage {part}" for part in PARTS),
)
HISTORIES = histories(MOVES, 60)


def play(moves: list[str]) -> World:
    world = World()
    for move in moves:
        name, _, part = move.partition(" ")
        getattr(world, name)(*([part] if part else []))
    return world


@given(HISTORIES)
def test_epochs_have_one_result_and_are_written_once_and_in_order(moves: list[str]) -> None:
    """What is committed was written; all is done once nothing fails."""
    world = play(moves)
    assert world.written == list(range(len(world.written)))
    assert all(len(digests) == 1 for digests in world.results.values())
    assert world.committed.epoch <= world.sink_durable()
    world.failing, world.crashes = set(), 0
    world.resume()
    world.release()
    for _ in range(12):
        world.poll_and_commit()
        world.pass_time()
    world.poll_and_commit()
    response = world.response()
    assert (response.phase, response.problem) == ("Live", None)
    assert (response.stable_epoch, response.sinks[0].durable) == (world.head, world.head)
    assert world.committed.epoch == (world.head + 1) // 4 * 4 - 1
    assert response.checkpoints == ()
