"""Two replicas of a task: one always serves, while the other one corrects its output."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from consistency_world import CALL_S, Replicas, WorldOptions, failure_free
from hypothesis import given
from test_consistency_histories import SEEDS, X_S, check_output, drawn_cuts, outputs

from rekindle.consistency.messages import Policy
from rekindle.consistency.states import ConsistencyState
from rekindle.streams.epochs import BatchKind

pytestmark = pytest.mark.simulated

SLOW = WorldOptions(
    max_delay_s=X_S, during_stabilization=Policy.SUSPEND, call_epochs=2, process_epoch_s=0.1
)


def common_failure(length_s: float, options: WorldOptions = SLOW) -> Replicas:
    """The second input of both replicas is cut for `length_s`; each replica has two links."""
    world = Replicas(options)
    world.run(10)
    for link in (1, 3):
        world.cut(link)
    world.run(10 + length_s)
    world.heal_all()
    return world


def test_replicas_stabilize_one_after_another() -> None:
    world = common_failure(40)
    world.run(80)
    first, second = world.tasks
    undone = [[r.at for r in t.stream.records if r.kind is BatchKind.UNDO] for t in (first, second)]
    done = [
        [r.at for r in t.stream.records if r.kind is BatchKind.RECONCILIATION_DONE]
        for t in (first, second)
    ]
    assert undone[0][0] < done[0][0] <= undone[1][0] < done[1][0]


def test_both_stabilize_at_once_if_nobody_answers() -> None:
    """Messages are lost, so both begin without a promise; a call takes longer than an epoch."""
    options = WorldOptions(max_delay_s=X_S, call_s=1.2, call_epochs=64)
    world = Replicas(options)
    world.send_to_partner = lambda task, effect: None
    world.run(10)
    for link in (1, 3):
        world.cut(link)
    world.run(40)
    world.heal_all()
    world.run(110)
    for task in world.tasks:
        assert task.core.state is ConsistencyState.STABLE
        assert task.core.stable_epoch >= world.epochs - 4


@pytest.mark.parametrize("policy", Policy)
def test_replicas_with_an_input_that_is_always_too_late_both_go_on(policy: Policy) -> None:
    late_s = 5.0
    latencies = (0.01, late_s, 0.01, late_s)
    world = Replicas(
        WorldOptions(max_delay_s=X_S, during_stabilization=policy, latencies=latencies, call_s=0.1)
    )
    world.run(80)
    for task in world.tasks:
        assert task.core.stable_epoch >= world.epochs - late_s - 26


def test_a_replica_puts_out_nothing_tentative_while_its_partner_serves() -> None:
    world = common_failure(40, replace(SLOW, during_stabilization=Policy.PROCESS))
    world.run(60)
    kinds = [record.kind for record in world.tasks[0].stream.records]
    correction = kinds[kinds.index(BatchKind.UNDO) : kinds.index(BatchKind.RECONCILIATION_DONE)]
    assert BatchKind.TENTATIVE not in correction


def test_a_replica_stabilizes_when_its_partner_is_lost() -> None:
    world = common_failure(40)
    world.run(50.5)
    stabilization = ConsistencyState.STABILIZATION
    assert world.states == [stabilization, ConsistencyState.UP_FAILURE]
    world.tasks[1].step(lambda core, now: core.partner_changed(False, now))
    assert world.states == [stabilization, stabilization]


def play(seed: int) -> Replicas:
    """The links of both replicas are cut, apart or together."""
    random = Random(seed)
    world = Replicas(SLOW)
    for at, link, is_cut in drawn_cuts(random, len(world.links)):
        advance(world, at)
        together = [link, (link + 2) % 4] if random.random() < 0.7 else [link]
        for each in together:
            (world.cut if is_cut else world.heal)(each)
    world.heal_all()
    advance(world, world.now + 25)
    return world


CHECKED_EACH_S = 0.2
"""A correction takes longer: each call of two epochs takes 0.22 s."""


def advance(world: Replicas, until: float) -> None:
    while world.now < until:
        world.run(min(until, world.now + CHECKED_EACH_S))
        served = [task.core._partners.served(world.now) for task in world.tasks]
        for replica, state in enumerate(world.states):
            if state is ConsistencyState.STABILIZATION and served[replica]:
                other = world.tasks[1 - replica].core
                corrects = other.state is ConsistencyState.STABILIZATION and not other._caught_up()
                assert not corrects


@given(SEEDS)
def test_one_always_serves_and_both_end_stable_and_equal(seed: int) -> None:
    """New epochs are out at one of them in time, although input is suspended in stabilization.

    X bounds the wait of an epoch that arrives alone. If several arrive together, each also waits
    until those before it are processed.
    """
    world = play(seed)
    outs = [outputs(task) for task in world.tasks]
    out = [min(out.get(epoch, world.now) for out in outs) for epoch in range(world.epochs)]
    for epoch in range(world.epochs - 4):
        arrived = max(task.arrived[epoch] for task in world.tasks)
        before = sum(1 for each in out[:epoch] if each > arrived)
        assert out[epoch] - arrived <= X_S + before * (CALL_S + SLOW.process_epoch_s)
    expected = failure_free(world.options, world.epochs)[0]
    for task in world.tasks:
        check_output(task)
        assert task.core.state is ConsistencyState.STABLE
        got = [record.value for record in task.stream.stable]
        assert len(got) >= world.epochs - 4
        assert got == expected[: len(got)]
