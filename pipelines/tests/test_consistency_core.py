"""The consistency manager, failure by failure: one task or a row of them, with a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from consistency_world import (
    CALL_S,
    EPOCH_BYTES,
    SCHEMA,
    Record,
    Task,
    World,
    WorldOptions,
    failure_free,
)

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.messages import (
    ConsistencyEffect,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    ForkState,
    InvalidInput,
    Policy,
    ProcessStable,
    ProcessTentative,
    ReadLive,
    StopLive,
)
from rekindle.consistency.states import ConsistencyState
from rekindle.streams.epochs import BatchKind
from rekindle.streams.sunion import Channel

WAIT_S = 2.7  # of the 3 s that an epoch may take
SIDE = 1  # the link of the second input of the first task; task k has the links 2k and 2k + 1


def cut(options: WorldOptions, length_s: float, *, link: int = SIDE, run_s: float = 20.0) -> World:
    """One link is cut from 10 s on, for a while."""
    world = World(options)
    world.run(10.5)
    world.cut(link)
    world.run(10.5 + length_s)
    world.heal(link)
    world.run(10.5 + length_s + run_s)
    return world


def kinds(task: Task) -> str:
    """The output in short: S, T, U and R, repeated ones once."""
    letters = "".join(record.kind[0] for record in task.stream.records)
    return "".join(b for a, b in zip(" " + letters, letters, strict=False) if a != b)


def of_kind(task: Task, kind: BatchKind) -> list[Record]:
    return [record for record in task.stream.records if record.kind is kind]


def test_a_short_failure_delays_and_nothing_is_tentative() -> None:
    (task,) = cut(WorldOptions(), WAIT_S - 0.6).tasks
    assert kinds(task) == "S"


def test_a_long_failure_is_tentative_and_then_corrected() -> None:
    (task,) = cut(WorldOptions(), 10).tasks
    assert kinds(task).startswith("STU")
    assert kinds(task).endswith("SRS")
    (undo,), (done,) = of_kind(task, BatchKind.UNDO), of_kind(task, BatchKind.RECONCILIATION_DONE)
    tentative = [record.epoch for record in of_kind(task, BatchKind.TENTATIVE)]
    assert undo.epoch == tentative[0] == 10
    assert done.epoch >= tentative[-1]
    assert tentative == list(range(10, tentative[-1] + 1))


def test_the_first_tentative_epoch_waits_for_its_deadline() -> None:
    (task,) = cut(WorldOptions(), 10).tasks
    first = of_kind(task, BatchKind.TENTATIVE)[0]
    assert first.at - task.arrived[first.epoch] == pytest.approx(WAIT_S + CALL_S)
    assert first.channels == 1


@pytest.mark.parametrize("policy", [Policy.PROCESS, Policy.DELAY])
def test_only_delay_waits_for_tentative_input(policy: Policy) -> None:
    manager = core(during_failure=policy)
    receive(manager, 0.0, 0, BatchKind.TENTATIVE)
    waits = policy is Policy.DELAY
    assert (manager.wake_at is not None and manager.wake_at > 0.0) == waits
    assert (manager.tentative_epoch is None) == waits


def test_during_a_failure_process_does_not_wait_and_delay_does() -> None:
    def delays(policy: Policy) -> list[float]:
        (task,) = cut(WorldOptions(during_failure=policy), 20).tasks
        return [
            r.at - task.arrived[r.epoch] for r in of_kind(task, BatchKind.TENTATIVE) if r.at < 30
        ]

    assert max(delays(Policy.PROCESS)[4:]) < 0.1
    assert min(delays(Policy.DELAY)) > WAIT_S


@pytest.mark.parametrize("policy", Policy)
def test_only_suspend_stops_new_input_during_stabilization(policy: Policy) -> None:
    slow = WorldOptions(during_stabilization=policy, call_epochs=2, process_epoch_s=0.1)
    (task,) = cut(slow, 50).tasks
    (undo,) = of_kind(task, BatchKind.UNDO)
    new = [record for record in of_kind(task, BatchKind.TENTATIVE) if record.at > undo.at]
    assert bool(new) == (policy is not Policy.SUSPEND)


def test_delay_makes_fewer_tentative_epochs_than_process() -> None:
    def count(failure: Policy, stabilization: Policy) -> int:
        options = WorldOptions(during_failure=failure, during_stabilization=stabilization)
        return sum(len(of_kind(task, BatchKind.TENTATIVE)) for task in cut(options, 15).tasks)

    assert count(Policy.DELAY, Policy.DELAY) < count(Policy.PROCESS, Policy.PROCESS)


def test_nothing_is_processed_without_a_blocking_input() -> None:
    (task,) = cut(WorldOptions(blocking_inputs=frozenset({1})), 10).tasks
    assert kinds(task) == "S"
    assert len(task.stream.stable) == 40


def test_other_inputs_of_a_blocking_task_may_be_missing() -> None:
    (task,) = cut(WorldOptions(blocking_inputs=frozenset({0})), 10).tasks
    assert "T" in kinds(task)


def test_with_an_infinite_delay_it_waits() -> None:
    (task,) = cut(WorldOptions(max_delay_s=None), 30).tasks
    assert kinds(task) == "S"


def test_tentative_input_is_processed_with_all_channels() -> None:
    world = cut(WorldOptions(tasks=2), 10)
    second = world.tasks[1]
    assert "T" in kinds(second)
    tentative = of_kind(second, BatchKind.TENTATIVE)
    assert {record.channels for record in tentative[4:]} == {2}


def test_tasks_stabilize_one_after_another() -> None:
    world = cut(WorldOptions(tasks=4), 15)
    undone = [of_kind(task, BatchKind.UNDO)[0].at for task in world.tasks]
    done = [of_kind(task, BatchKind.RECONCILIATION_DONE)[0].at for task in world.tasks]
    assert undone == sorted(undone)
    assert done == sorted(done)


def test_inputs_that_heal_apart_are_corrected_in_parts() -> None:
    """Input 0 is missing from epoch 10 on, input 1 from epoch 15 on; input 0 is back first."""
    world = World(WorldOptions())
    world.run(10.5)
    world.cut(0)
    world.run(15.5)
    world.cut(1)
    world.run(30.5)
    (task,) = world.tasks
    assert kinds(task) == "ST"
    world.heal(0)
    world.run(40)
    assert world.states == [ConsistencyState.UP_FAILURE]
    assert kinds(task) == "STUSRT"
    assert task.core.stable_epoch == 14
    world.heal(1)
    world.run(50)
    assert world.states == [ConsistencyState.STABLE]
    values = [record.value for record in task.stream.stable]
    assert values == failure_free(world.options, len(values))[0]


def test_a_second_failure_during_a_failure_joins_it() -> None:
    """Both inputs of the second task fail, one after the other; it is corrected when both are."""
    world = World(WorldOptions(tasks=2))
    world.run(10.5)
    world.cut(3)
    world.run(15.5)
    world.cut(1)
    world.run(30.5)
    world.heal(3)
    world.run(35.5)
    second = world.tasks[1]
    assert kinds(second) == "ST"
    world.heal(1)
    world.run(50)
    assert second.core.state is ConsistencyState.STABLE
    assert len(of_kind(second, BatchKind.UNDO)) == 1


def test_a_failure_during_stabilization_comes_after_it() -> None:
    """REC_DONE is forced between the last stable epoch and the first new tentative one."""
    world = World(
        WorldOptions(call_epochs=2, process_epoch_s=0.1, read_ahead_bytes=8 * EPOCH_BYTES)
    )
    world.run(10.5)
    world.cut(1)
    world.run(40.5)
    world.heal(1)
    world.run(41.5)
    world.cut(1)
    world.run(70.5)
    (task,) = world.tasks
    done = of_kind(task, BatchKind.RECONCILIATION_DONE)[0]
    assert task.core.state is ConsistencyState.UP_FAILURE
    assert 11 < done.epoch == task.core.stable_epoch < 39
    at = task.stream.records.index(done)
    assert {record.kind for record in task.stream.records[at + 1 :]} == {BatchKind.TENTATIVE}
    assert task.stream.records[-1].epoch == 69


def test_a_partial_correction_upstream_is_passed_on() -> None:
    """The first task corrects a part and fails again; the second one corrects that part too."""
    world = World(
        WorldOptions(tasks=2, call_epochs=2, process_epoch_s=0.1, read_ahead_bytes=8 * EPOCH_BYTES)
    )
    world.run(10.5)
    world.cut(1)
    world.run(40.5)
    world.heal(1)
    world.run(41.5)
    world.cut(1)
    world.run(70.5)
    first, second = world.tasks
    assert 11 < first.core.stable_epoch < 39
    assert second.core.stable_epoch == first.core.stable_epoch
    assert second.core.state is ConsistencyState.UP_FAILURE
    assert of_kind(second, BatchKind.RECONCILIATION_DONE)[-1].epoch == second.core.stable_epoch


def test_a_long_failure_costs_bounded_memory() -> None:
    options = WorldOptions(read_ahead_bytes=20 * EPOCH_BYTES, max_buffered_epochs=20)
    world = cut(options, 400, run_s=60)
    (task,) = world.tasks
    assert task.most_buffered[0] < 100
    assert task.most_buffered[1] < 125 * EPOCH_BYTES
    assert task.stable_resumed == 1
    assert [r.value for r in task.stream.stable] == failure_free(options, world.epochs)[0]
    assert task.core.state is ConsistencyState.STABLE


@pytest.mark.parametrize("max_delay_s", [None, 3.0])
def test_epochs_are_bounded_as_well_as_bytes(max_delay_s: float | None) -> None:
    options = WorldOptions(max_delay_s=max_delay_s, max_buffered_epochs=20)
    (task,) = cut(options, 150).tasks
    assert task.most_buffered[0] <= 100
    assert task.core.stable_epoch >= 150


def test_live_input_is_bounded_behind_an_undone_epoch() -> None:
    """The fork waits for the engine, or for its partner: its next epoch has been undone, and what
    the channel delivers after it has to wait too."""
    channel = Channel(0, 0)
    settings = ConsistencySettings([[0]], [SCHEMA], max_delay_s=3.0, max_buffered_epochs=4)
    manager = ConsistencyCore(settings, next_epoch=0, watermark=-1)
    receive(manager, 0.0, 0, BatchKind.TENTATIVE, live=True)  # in a call from now on
    receive(manager, 0.1, 1, BatchKind.TENTATIVE, live=True)
    receive(manager, 0.2, 1, BatchKind.UNDO, live=True)
    epoch = 2
    while manager.may_read(channel, live=True) and epoch < 20:
        receive(manager, 0.3, epoch, BatchKind.TENTATIVE, live=True)
        epoch += 1
    assert manager.buffered()[0] == 4
    (call,) = manager.tentative_processed(1, 0, 0.4)
    assert isinstance(call, ProcessTentative)  # without the channel, which is beyond it
    assert (call.epoch.epoch, call.channels) == (1, ())
    (call,) = manager.tentative_processed(1, 1, 0.5)
    assert isinstance(call, ProcessTentative)
    assert (call.epoch.epoch, call.channels) == (2, (channel,))
    assert manager.may_read(channel, live=True)


def test_a_delay_that_becomes_infinite_ends_tentative_output() -> None:
    world = World(WorldOptions())
    world.run(10)
    world.cut(1)
    world.run(20)
    (task,) = world.tasks
    task.step(lambda core, now: core.max_delay_changed(None, now))
    world.run(30)
    assert of_kind(task, BatchKind.TENTATIVE)[-1].at <= 20.1
    world.heal(1)
    world.run(40)
    assert task.core.state is ConsistencyState.STABLE


def test_the_branches_have_the_engine_in_turns() -> None:
    """A call takes longer than an epoch: the fork would always have one that is due."""
    world = cut(WorldOptions(call_s=1.2, call_epochs=64), 30, run_s=60)
    assert world.states == [ConsistencyState.STABLE]
    assert world.tasks[0].core.stable_epoch >= world.epochs - 4


def test_short_epochs_and_calls_are_corrected_too() -> None:
    """As with an interval of 100 ms, calls of 120 ms and a gap of 2 s."""
    (task,) = cut(WorldOptions(call_s=1.2, max_delay_s=10.0), 20, run_s=100).tasks
    assert "T" in kinds(task)
    assert task.core.state is ConsistencyState.STABLE


def test_a_fork_that_is_far_behind_is_passed() -> None:
    """Calls of one epoch take more than half of an interval: there is no time for both branches."""
    world = cut(WorldOptions(call_s=0.7, call_epochs=1), 30, run_s=400)
    assert world.tasks[0].core.stable_epoch >= world.epochs - 4


@pytest.mark.parametrize("policy", Policy)
def test_an_input_that_is_always_too_late_holds_up_no_stable_epoch(policy: Policy) -> None:
    late_s = 5.0
    # The longest that tentative epochs hold up complete ones: four times `max_delay_s`.
    held_up_s = 12
    options = WorldOptions(latencies=(0.01, late_s), during_stabilization=policy)
    world = World(options)
    world.run(100)
    (task,) = world.tasks
    assert task.core.stable_epoch >= world.epochs - late_s - held_up_s - 1
    tentative = of_kind(task, BatchKind.TENTATIVE)
    assert max(r.at - task.arrived[r.epoch] for r in tentative[20:]) <= 3.0
    assert len(of_kind(task, BatchKind.UNDO)) <= 100 / held_up_s


# -- what a task must not do -----------------------------------------------------------------------


def core(during_failure: Policy = Policy.PROCESS) -> ConsistencyCore:
    settings = ConsistencySettings([[0]], [SCHEMA], max_delay_s=3.0, during_failure=during_failure)
    return ConsistencyCore(settings, next_epoch=0, watermark=-1)


def receive(
    manager: ConsistencyCore,
    now: float,
    epoch: int,
    kind: BatchKind = BatchKind.STABLE,
    *,
    live: bool = False,
) -> list[ConsistencyEffect]:
    batch = Record(0.0, kind, epoch).batch
    return manager.batch_received(Channel(0, 0), batch, now, live=live)


def process_stable(manager: ConsistencyCore, now: float) -> list[ConsistencyEffect]:
    """A stable call of one epoch ends."""
    (epoch,) = manager.take_stable(lambda ready: [ready.popleft()])
    return manager.stable_processed(epoch.epoch, now)


def test_a_stable_epoch_that_was_left_out_is_an_error() -> None:
    manager = core()
    receive(manager, 0.0, 0)
    with pytest.raises(InvalidInput, match="stable epoch 2 of stream s/0 follows 0"):
        receive(manager, 0.0, 2)


def test_a_stable_epoch_may_come_twice() -> None:
    manager = core()
    assert len(receive(manager, 0.0, 0)) == 1
    assert receive(manager, 0.0, 0) == []


def test_a_result_that_was_not_asked_for_is_an_error() -> None:
    manager = core()
    receive(manager, 0.0, 0)
    with pytest.raises(InvalidInput, match="stable epoch 3 was processed"):
        manager.stable_processed(3, 0.1)


def test_a_tentative_result_in_state_stable_shows_the_history() -> None:
    manager = core()
    receive(manager, 0.0, 0)
    with pytest.raises(Exception, match="transitions before: STABLE: batch_received"):
        manager.tentative_processed(1, 0, 0.1)


def test_a_single_tentative_input_is_processed_and_corrected() -> None:
    manager = core(Policy.DELAY)
    channel = Channel(0, 0)
    assert receive(manager, 0.0, 0, BatchKind.TENTATIVE) == [ReadLive(channel, 0)]
    assert manager.wake_at == pytest.approx(WAIT_S)
    fork, call = manager.woken(WAIT_S)
    assert fork == ForkState(attempt=1, after=-1)
    assert isinstance(call, ProcessTentative)
    assert call.channels == (channel,)
    assert manager.tentative_processed(1, 0, 3.0) == []
    assert receive(manager, 4.0, 0)[0] == EmitUndo(0)
    done = process_stable(manager, 4.1)
    assert done == [DropFork(1), EmitReconciliationDone(0), StopLive(channel)]


def test_tentative_input_that_is_corrected_already_is_not_hurried() -> None:
    """Its upstream was tentative for a moment: the stable version can be read."""
    first, second = Channel(0, 0), Channel(1, 0)
    settings = ConsistencySettings([[0], [0]], [SCHEMA, SCHEMA], max_delay_s=3.0)
    manager = ConsistencyCore(settings, next_epoch=0, watermark=-1)
    manager.upstream_reported(first, stable=-1, tentative=0, now=0.0)
    receive(manager, 0.1, 0, BatchKind.TENTATIVE, live=True)
    manager.upstream_reported(first, stable=0, tentative=-1, now=0.5)
    stable = Record(0.0, BatchKind.STABLE, 0).batch
    assert manager.batch_received(second, stable, 0.6) == []
    assert isinstance(receive(manager, 0.7, 0)[0], ProcessStable)
    assert manager.state is ConsistencyState.STABLE


def test_stabilization_ends_after_the_fork_is_passed() -> None:
    """Epoch 1 is tentative, not overdue, and not corrected: REC_DONE would come too early."""
    here, late = Channel(0, 0), Channel(1, 0)
    settings = ConsistencySettings([[0], [0]], [SCHEMA, SCHEMA], max_delay_s=3.0)
    manager = ConsistencyCore(settings, next_epoch=0, watermark=-1)
    zero, one = (Record(0.0, BatchKind.STABLE, epoch).batch for epoch in (0, 1))
    manager.batch_received(here, zero, 0.0)
    manager.woken(WAIT_S)
    manager.tentative_processed(1, 0, 2.8)
    manager.batch_received(here, one, 3.0)  # at once: the other channel has failed
    manager.tentative_processed(1, 1, 3.1)
    manager.upstream_reported(late, stable=1, tentative=-1, now=3.2)
    manager.batch_received(late, zero, 3.2)
    process_stable(manager, 3.3)
    assert manager.state is ConsistencyState.STABILIZATION
    manager.batch_received(late, one, 3.4)
    assert EmitReconciliationDone(1) in process_stable(manager, 3.5)


def test_a_part_is_corrected_when_the_upstream_says_it_is_done() -> None:
    """Epochs 0 and 1 are tentative; the upstream has corrected 0, and failed again."""
    manager = core()
    receive(manager, 0.0, 0, BatchKind.TENTATIVE)
    manager.woken(WAIT_S)
    receive(manager, 2.8, 1, BatchKind.TENTATIVE)
    manager.tentative_processed(1, 0, 2.9)
    manager.tentative_processed(1, 1, 3.0)
    assert receive(manager, 3.1, 0) == []
    assert EmitUndo(0) in receive(manager, 3.2, 0, BatchKind.RECONCILIATION_DONE)
    assert EmitReconciliationDone(0) in process_stable(manager, 3.3)
    assert manager.state is ConsistencyState.UP_FAILURE


def two_inputs(**settings: object) -> ConsistencyCore:
    schemas = [SCHEMA, SCHEMA]
    return ConsistencyCore(
        ConsistencySettings([[0], [0]], schemas, max_delay_s=3.0, **settings),  # type: ignore[arg-type]
        next_epoch=0,
        watermark=-1,
    )


@pytest.mark.parametrize("policy", [Policy.PROCESS, Policy.SUSPEND])
def test_an_ended_correction_counts_for_the_upstream_that_has_it(policy: Policy) -> None:
    """One replica has ended a correction through epoch 39; the other one, which is read next, has
    stable epochs through 20 only."""
    manager = two_inputs(during_stabilization=policy)
    here, lost = Channel(0, 0), Channel(1, 0)
    undone, late, pending = 0, list[float](), list[Callable[[float], list[ConsistencyEffect]]]()
    for tick in range(1000):
        now = tick / 10
        if tick % 10 == 0:
            batch = Record(0.0, BatchKind.STABLE, tick // 10).batch
            pending.append(partial(manager.batch_received, here, batch))
        if tick == 405:
            pending.append(partial(manager.upstream_reported, lost, 39, -1))
            ended = Record(0.0, BatchKind.RECONCILIATION_DONE, 39).batch
            pending.append(partial(manager.batch_received, lost, ended))
            stable = [Record(0.0, BatchKind.STABLE, epoch).batch for epoch in range(25)]
            pending += [partial(manager.batch_received, lost, batch) for batch in stable]
        if tick == 450:
            pending.append(partial(manager.upstream_reported, lost, 20, -1))
        pending.append(manager.woken)
        while pending:
            for effect in pending.pop(0)(now):
                match effect:
                    case ProcessStable():
                        pending.append(partial(process_stable, manager))
                    case ProcessTentative(attempt, epoch):
                        late.append(now - epoch.epoch)
                        pending.append(partial(manager.tentative_processed, attempt, epoch.epoch))
                    case EmitUndo():
                        undone += 1
    assert undone == 1
    assert max(late) <= 3.0


def test_undo_waits_for_the_epoch_that_is_being_processed() -> None:
    manager = core()
    receive(manager, 0.0, 0, BatchKind.TENTATIVE)
    manager.woken(WAIT_S)
    assert receive(manager, 2.8, 0) == []
    assert EmitUndo(0) in manager.tentative_processed(1, 0, 2.9)


def test_suspend_is_no_policy_during_a_failure() -> None:
    with pytest.raises(ValueError, match="cannot be suspended"):
        ConsistencySettings([[0]], [SCHEMA], during_failure=Policy.SUSPEND)
