"""Tasks whose output may be tentative, in random histories: real task cores, a fake engine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from consistency_world import failure_free
from hypothesis import given
from task_consistency_world import CoreTask, CoreWorld, WorldOptions, play_cuts, records_of
from test_consistency_histories import (
    SEEDS,
    X_S,
    check_buffers,
    check_in_time,
    check_output,
    drawn_cuts,
    drawn_options,
    outputs,
)

from rekindle.consistency.messages import Policy
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import BatchKind

pytestmark = pytest.mark.simulated


def cut_for(seconds: float, options: WorldOptions | None = None) -> CoreWorld:
    """One task, or more, whose second input is cut off after 10 s."""
    world = CoreWorld(options or WorldOptions())
    world.run(10)
    world.cut(1)
    world.run(10 + seconds)
    return world


# --- properties ---


@given(SEEDS)
def test_output_is_in_time_corrected_and_that_without_failures(seed: int) -> None:
    """And all is STABLE and complete after the last failure. If the engine fails as well, a
    tentative epoch that fails is left out, and a stable call that fails is made smaller."""
    random = Random(seed)
    options = replace(drawn_options(random, most_tasks=2), max_delay_s=X_S)
    world = CoreWorld(options)
    engines_fail = random.random() < 0.5
    if engines_fail:
        for task in world.tasks:
            task.fails = {
                kind: [random.choice(["", "", "memory", "crash", "operator"]) for _ in range(40)]
                for kind in (BatchKind.TENTATIVE, BatchKind.STABLE)
            }
            task.appends_fail = [random.choice(["", "disk"]) for _ in range(10)]
    play_cuts(world, drawn_cuts(random, len(world.links)), settle_s=40 if engines_fail else 25)
    expected = failure_free(options, world.epochs)
    for depth, (task, values) in enumerate(zip(world.tasks, expected, strict=True)):
        got = [record.value for record in task.stream.stable]
        assert got == values[: len(got)]
        assert len(got) >= world.epochs - (12 if engines_fail else 2 * (depth + 2))
        assert task.streams.state is ConsistencyState.STABLE
        if not engines_fail:
            check_corrected_in_time(task, options)


def check_corrected_in_time(task: CoreTask, options: WorldOptions) -> None:
    check_output(task)
    undone, done = (
        records_of(task, kind) for kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE)
    )
    assert len(undone) == len(done)
    if options.during_stabilization is not Policy.SUSPEND:
        check_in_time(task, options)
    check_buffers(task, options)


# --- one failure ---


def test_a_cut_input_makes_output_tentative_and_then_it_is_corrected() -> None:
    world = cut_for(8)
    (task,) = world.tasks
    response = task.task_core.response()
    assert response.consistency is ConsistencyState.UP_FAILURE
    assert response.missing == ("input-1",)
    assert response.tentative_epoch > response.stable_epoch
    world.heal_all()
    world.run(30)
    response = task.task_core.response()
    assert response.consistency is ConsistencyState.STABLE
    assert (response.missing, response.tentative_epoch) == ((), -1)
    assert response.stable_epoch == 28
    assert (
        len(records_of(task, BatchKind.UNDO))
        == len(records_of(task, BatchKind.RECONCILIATION_DONE))
        == 1
    )


def test_tentative_epochs_are_not_in_state_digests_or_checkpoints() -> None:
    with_failure, without = cut_for(8), CoreWorld(WorldOptions())
    with_failure.heal_all()
    with_failure.run(31)
    without.run(31)
    responses = [world.tasks[0].task_core.response() for world in (with_failure, without)]
    assert responses[0].chained == responses[1].chained
    assert responses[0].digests == responses[1].digests
    states = [world.tasks[0].stable_state for world in (with_failure, without)]
    assert states[0] == states[1]


def test_a_short_failure_makes_nothing_tentative() -> None:
    world = cut_for(2)
    world.heal_all()
    world.run(30)
    assert {record.kind for record in world.tasks[0].stream.records} == {BatchKind.STABLE}


def test_nothing_is_tentative_before_the_task_is_live() -> None:
    world = CoreWorld(WorldOptions())
    (task,) = world.tasks
    task.streams._tentative_allowed = False
    task.streams._core._deadlines.max_delay_s = None
    world.cut(1)
    world.run(20)
    assert task.stream.records == []


def failing(how: str) -> tuple[CoreWorld, CoreTask]:
    world = CoreWorld(WorldOptions())
    (task,) = world.tasks
    task.fails = {BatchKind.TENTATIVE: [how]}
    world.run(10)
    world.cut(1)
    return world, task


@pytest.mark.parametrize("how", ["memory", "crash", "operator"])
def test_a_tentative_epoch_that_fails_is_reported_and_left_out(how: str) -> None:
    world, task = failing(how)
    world.run(15)
    assert records_of(task, BatchKind.TENTATIVE) == []
    problem = task.task_core.response().problem
    assert problem is not None
    assert problem.message.startswith("tentative results are left out: ")
    world.run(30)  # it is tried again
    assert records_of(task, BatchKind.TENTATIVE)
    assert task.task_core.response().problem is None
    world.heal_all()
    world.run(60)
    assert task.task_core.response().consistency is ConsistencyState.STABLE


def test_a_branch_that_cannot_be_written_does_not_hold_up_the_stable_one() -> None:
    world = CoreWorld(WorldOptions())
    (task,) = world.tasks
    task.appends_fail = ["disk"]
    world.run(10)
    world.cut(1)
    world.run(14)
    world.heal_all()
    world.run(20)
    assert task.task_core.response().stable_epoch == 18
    assert records_of(task, BatchKind.TENTATIVE) == []


def test_an_engine_that_dies_while_it_is_idle_costs_no_epoch() -> None:
    world = CoreWorld(WorldOptions())
    world.run(10.95)
    (task,) = world.tasks
    task.report(lambda loop, now: loop.idle_engine_died("the JVM died", now))
    # restarted at 11.15; epoch 10 arrives at 11.01
    world.run(20)
    assert task.task_core.response().stable_epoch == 18


def test_a_call_that_had_to_be_smaller_lets_tentative_epochs_go_first() -> None:
    """While it corrects 20 epochs, new ones are answered within X."""
    world = CoreWorld(WorldOptions(process_epoch_s=0.1, call_epochs=16))
    (task,) = world.tasks
    world.run(10)
    world.cut(1)
    world.run(30)
    task.fails = {BatchKind.STABLE: ["memory"]}
    world.heal_all()
    world.run(60)
    out = outputs(task)
    assert max(out[e] - t for e, t in task.arrived.items() if e in out and e > 12) <= X_S + 0.5
    check_output(task)
    assert task.task_core.response().consistency is ConsistencyState.STABLE
