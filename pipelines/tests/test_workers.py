"""No thread ends silently: its error is reported, and it is restarted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from reader_parts import FakeClient, FakeReplicas, Harness, routes_to
from task_world import SINK, World

from rekindle.backoff import BackoffPolicy
from rekindle.streams.wire import ReadRequest, ReadResponse
from rekindle.task.state import TaskState
from rekindle.workers import CallTimer, Worker
from rekindle_testing.waiting import eventually

A, B = "a:1", "b:1"


class Work:
    """Fails in its first `fails` calls; then it runs until `done`."""

    def __init__(self, fails: int) -> None:
        self.fails, self.calls, self.done = fails, 0, False
        self.worker = Worker("work", self.run, policy=BackoffPolicy(first_s=0.01, longest_s=5.0))

    def run(self) -> None:
        self.calls += 1
        if self.calls <= self.fails:
            raise KeyError("channel")
        self.worker.progressed()
        while not self.done:
            time.sleep(0.005)


def test_failed_work_is_reported_and_restarted() -> None:
    work = Work(fails=1_000_000)
    work.worker.start()
    eventually(lambda: work.calls >= 3)
    assert work.worker.problem is not None
    assert "thread work failed and starts again" in work.worker.problem
    assert "KeyError('channel')" in work.worker.problem
    work.worker.stop()
    work.worker.join(5)
    assert not work.worker.alive


def test_a_problem_ends_when_the_work_continues() -> None:
    work = Work(fails=2)
    work.worker.start()
    eventually(lambda: work.calls == 3 and work.worker.problem is None)
    work.done = True
    work.worker.join(5)
    assert not work.worker.alive
    assert work.worker.restarts == 2


def test_a_call_that_does_not_return_is_reported_while_it_lasts() -> None:
    now = 0.0
    timer = CallTimer(slow_s=10, clock=lambda: now)
    with timer.during("writing epoch 7"):
        now = 9.9
        assert timer.problem is None
        now = 12.0
        assert timer.problem == (
            "writing epoch 7 has not ended after 12 s: the storage does not respond"
        )
    assert timer.problem is None


def test_a_call_that_fails_is_over() -> None:
    timer = CallTimer(slow_s=0)
    with pytest.raises(OSError, match="stale"), timer.during("reading"):
        raise OSError("stale")
    assert timer.problem is None


class NewerClient(FakeClient):
    """Responds with a header that this version cannot parse."""

    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        raise KeyError("channel")


def connect_newer(replicas: FakeReplicas, newer: Sequence[str]) -> Callable[[str], FakeClient]:
    return lambda a: NewerClient(replicas, a) if a in newer else FakeClient(replicas, a)


def test_a_reader_leaves_an_incompatible_replica() -> None:
    harness = Harness()
    harness.replicas.last = {A: 3, B: 3}
    harness.reader._connect = connect_newer(harness.replicas, [A])
    harness.reader.route(routes_to(A, B))
    harness.expect(4, within_s=20)
    assert harness.reader.problem() is None
    harness.close()


def test_a_reader_reports_why_it_cannot_read() -> None:
    harness = Harness()
    harness.replicas.last = {A: 3, B: 3}
    harness.reader._connect = connect_newer(harness.replicas, [A, B])
    harness.reader.route(routes_to(A, B))
    eventually(lambda: "KeyError('channel')" in (harness.reader.problem() or ""))
    harness.reader._connect = harness.replicas.connect
    harness.expect(4, within_s=20)
    assert harness.reader.problem() is None
    harness.close()


def test_a_reader_whose_thread_fails_starts_again() -> None:
    harness = Harness()
    harness.replicas.last = {A: 3, B: 3}
    failures = [ValueError("no such address"), ValueError("no such address")]

    def connect(address: str) -> FakeClient:
        if failures:
            raise failures.pop()
        return FakeClient(harness.replicas, address)

    harness.reader._connect = connect
    harness.reader.route(routes_to(A, B))
    harness.expect(4, within_s=20)
    assert harness.reader.problem() is None
    harness.close()


def test_a_saver_continues_after_its_thread_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    # An error that the saver does not catch.
    monkeypatch.setattr("rekindle.task.core.saver.SaverCore.entry_saved", None)
    saver = world.saver
    saver.offer(saved_state(world))
    eventually(lambda: "thread checkpoints failed" in (saver.problem or ""))
    monkeypatch.undo()
    saver.offer(saved_state(world))
    eventually(lambda: [d.epoch for d in saver.done()] == [9] and saver.problem is None)
    saver.stop(1)


def test_a_sink_continues_after_its_thread_fails(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run_to(3)
    failures = [pa.ArrowInvalid("a type that is new"), AttributeError("channel")]
    real = world.sink.last_epoch

    def last_epoch(after: int = -1) -> int:
        if failures:
            raise failures.pop()
        return real(after)

    world.sink.last_epoch = last_epoch  # type: ignore[method-assign]
    world.sinks.assign([SINK])
    eventually(lambda: world.sink.epochs == [0, 1, 2])
    eventually(lambda: world.sinks.problem() is None)
    world.sinks.stop()


def saved_state(world: World) -> TaskState:
    world.run_to(10)
    return world.saved[0]
