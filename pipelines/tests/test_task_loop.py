"""The epoch loop, sinks and saver, with a chain in plain Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from state_parts import value_in_state
from task_world import SINK, World

from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.store import UnreadableObject
from rekindle.engine.bounds import CallBounds
from rekindle.engine.model import State
from rekindle.errors import DifferentResults, ObjectMissing, StoreError
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.task.core.source import released_epoch
from rekindle.task.state import TaskState
from rekindle_testing.waiting import eventually


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.sinks.stop()
    made.saver.stop(1)


def test_an_epoch_is_released_when_its_time_is_over() -> None:
    assert [
        released_epoch(t, origin_us=5_000_000, epoch_interval_us=1_000_000)
        for t in (4.0, 5.9, 6.0, 7.5)
    ] == [-2, -1, 0, 1]


def test_a_live_task_makes_one_call_per_epoch(world: World) -> None:
    world.run_to(1)
    world.run_to(2)
    assert world.chain.calls == [[0], [1]]
    assert world.sums() == [0, 1]
    assert (world.log.read(1, 1)[0].watermark, world.loop.state.watermark) == (10, 10)


def test_a_call_ends_at_a_checkpoint_epoch(world: World) -> None:
    world.run_to(25)
    assert world.chain.calls == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert [s.epoch for s in world.saved] == [9, 19]
    assert value_in_state(world.saved[0].operators, "sum") == sum(range(10))


def test_deltas_are_joined_at_checkpoints_and_not_under_the_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polls wait for the lock."""
    joined: list[tuple[int, bool]] = []

    def join_deltas(state: State) -> State:
        joined.append((value_in_state(state, "sum"), world.process._stepping))
        return State({**state.operators, "joined": state.operators["sum"]})

    monkeypatch.setattr(world.chain, "join_deltas", join_deltas)
    world.run_to(15.0)
    assert joined == [], "another replica saves"
    world.poll(saver=True)
    world.run_to(35.0)
    assert joined == [(sum(range(20)), False), (sum(range(30)), False)]
    found = ["joined" in state.operators.operators for state in world.saved]
    assert found == [False, True, True]


def test_a_call_is_bounded_in_rows(tmp_path: Path) -> None:
    world = World(tmp_path, per_epoch=90_000)
    world.run_to(5)
    assert world.chain.calls == [[0, 1], [2, 3], [4]]
    assert CallBounds().max_epochs == 64


def test_results_do_not_depend_on_calls(tmp_path: Path) -> None:
    one, many = World(tmp_path / "one"), World(tmp_path / "many")
    for now in range(1, 24):
        one.run_to(now)
    many.run_to(23)
    assert one.log.results(0) == many.log.results(0)


def test_a_restart_computes_again_and_compares(tmp_path: Path) -> None:
    first = World(tmp_path)
    first.run_to(15)
    first.log.close()
    saved = first.saved[0]
    again = World(tmp_path, saved)
    again.run_to(18)
    assert again.chain.calls[0][0] == 10
    assert again.sums() == [sum(range(e + 1)) for e in range(18)]
    wrong = World(tmp_path, TaskState(saved.epoch, saved.watermark, State()))
    with pytest.raises(DifferentResults, match="epoch 10"):
        wrong.run_to(18)


def test_a_missing_source_is_reported_and_retried(world: World) -> None:
    world.source.fails = 2
    world.run_to(1)
    assert world.problems == ["the file cannot be read", "the file cannot be read", None]
    assert world.sums() == [0]
    assert world.status.response(1).problem is None


def test_cut_epochs_survive_a_missing_source(world: World) -> None:
    world.source.fails, world.source.fails_from = 2, 3
    world.run_to(6)
    assert world.sums() == [sum(range(e + 1)) for e in range(6)]
    assert [epochs[0] for epochs in world.chain.calls] == [0, 3]


def test_phase_head_and_lag_follow_the_clock(world: World) -> None:
    world.now = 20.5
    world.pass_time()
    answer = world.status.response(3)
    assert (answer.phase, answer.head_epoch, answer.stable_epoch) == ("CatchingUp", 19, -1)
    assert answer.lag_s == pytest.approx(19.5)
    world.run_to(20.5)
    world.pass_time()
    world.status.last_epoch = 30
    answer = world.status.response(3)
    assert (answer.phase, answer.stable_epoch, answer.lag_s) == ("Live", 19, 0.0)
    assert answer.last_epoch == 30
    assert len(answer.digests) == 16
    world.now = 25
    world.pass_time()
    assert world.status.phase == "Live"  # a short delay is not a catch-up
    world.now = 40
    world.pass_time()
    assert world.status.phase == "CatchingUp"


def durable(world: World) -> dict[str, int]:
    return {s.assigned.query: s.durable for s in world.sinks.progress()}


def test_sinks_start_after_their_newest_output(world: World) -> None:
    world.run_to(5)
    world.sink.epochs = [0, 1]
    world.sinks.assign([SINK])
    eventually(lambda: durable(world) == {"q": 4})
    assert world.sink.epochs == [0, 1, 2, 3, 4]
    from_another_epoch = SINK.model_copy(update={"from_epoch": 3})
    world.sinks.assign(
        [from_another_epoch, SINK.model_copy(update={"query": "late", "from_epoch": 8})]
    )
    assert set(durable(world)) == {"q", "late"}
    assert durable(world)["late"] == 7
    world.sinks.assign([])
    assert durable(world) == {}


def test_a_failing_sink_delays_only_checkpoints(world: World) -> None:
    world.sink.refuse = 2
    world.sinks.assign([SINK])
    world.run_to(12)
    assert world.log.last == 11
    world.saver.offer(world.saved[0])
    eventually(lambda: world.sinks.problem() is not None)
    problem = world.status.response(1).problem
    assert problem is not None
    assert not problem.saving
    assert durable(world) == {"q": -1}
    eventually(lambda: durable(world) == {"q": 11})
    assert world.sink.epochs == list(range(12))
    eventually(lambda: [d.epoch for d in world.status.response(1).checkpoints] == [9])
    eventually(lambda: world.sinks.problem() is None)


def test_saved_checkpoints_are_reported_until_committed(world: World) -> None:
    world.states.failures_left = 1
    world.run_to(30)
    for state in world.saved[:2]:
        world.saver.offer(state)
    eventually(lambda: [d.epoch for d in world.saver.done()] == [9, 19])
    world.saver.commit(RestorePoint(epoch=9, object="entry-9"))
    assert [d.epoch for d in world.saver.done()] == [19]
    world.saver.offer(world.saved[2])
    eventually(lambda: [d.epoch for d in world.saver.done()] == [19, 29])
    assert world.states.saved == [(9, None), (19, "entry-9"), (29, "entry-19")]


def test_a_save_that_fails_is_marked_in_the_response(world: World) -> None:
    world.states.failures_left = 1000
    world.run_to(12)
    world.saver.offer(world.saved[0])
    eventually(lambda: world.status.response(1).problem is not None)
    problem = world.status.response(1).problem
    assert problem is not None
    assert problem.saving


@pytest.mark.parametrize("error", [ObjectMissing, UnreadableObject])
def test_without_its_committed_entry_a_state_is_saved_as_a_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[StoreError]
) -> None:
    def load_entry(name: str) -> Entry:
        raise error(name)

    monkeypatch.setattr(world.states, "load_entry", load_entry)
    world.saver.commit(RestorePoint(epoch=9, object="entry-9"))
    world.saver.offer(TaskState(19, 0, State()))
    eventually(lambda: world.states.saved == [(19, None)])
    assert world.saver.problem is None


def test_the_oldest_and_the_newest_saved_entries_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.task.core.saver.MAX_REPORTED", 3)

    def saved() -> list[int]:
        return [d.epoch for d in world.saver.done()]

    for epoch in (9, 19, 29, 39, 49):
        world.saver.offer(TaskState(epoch, 0, State()))
        eventually(lambda e=epoch: saved()[-1:] == [e])  # type: ignore[misc]
    assert saved() == [9, 19, 49]


def test_a_slow_store_gets_the_newest_checkpoints(world: World) -> None:
    world.states.failures_left = 1
    gate = threading.Event()
    real = world.states.save

    def save(state: TaskState, previous: Entry | None) -> EntryRef:
        gate.wait(5)
        return real(state, previous)

    world.states.save = save  # type: ignore[method-assign]  # of this one object
    for epoch in (9, 19, 29, 39):
        world.saver.offer(TaskState(epoch, 0, State()))
        time.sleep(0.02)
    gate.set()
    eventually(lambda: [d.epoch for d in world.saver.done()] == [29, 39])


def test_a_log_of_an_earlier_boot_does_not_make_a_task_live(tmp_path: Path) -> None:
    World(tmp_path).run_to(60)
    again = World(tmp_path)
    again.now = 60
    again.pass_time()
    assert (again.status.phase, again.status.response(1).stable_epoch) == ("CatchingUp", 59)
    again.run_to(60)
    again.pass_time()
    assert again.status.phase == "Live"
