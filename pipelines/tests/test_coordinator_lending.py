"""Which task borrows whose state, and what it may not do before the lent epoch is committed.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

import pytest
from coordinator_world import World

from rekindle.coordinator.tasks.lending import ALONE_S, ANSWER_S, MAX_ATTEMPTS
from rekindle.protocol import PollRequest, TaskPhase
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_generation
from rekindle_testing.fixtures.simulated_task import SimulatedTask

SRC, READER = Slot("src", 0, 0), Slot("end", 0, 0)
LOST, PARTNER = Slot("mid", 0, 0), Slot("mid", 0, 1)


def live_world(replicas: int = 2) -> World:
    """All Live, and a checkpoint is committed."""
    world = World(
        [
            SimulatedSegment("src"),
            SimulatedSegment("mid", ("src",), replicas=replicas, query=True),
            SimulatedSegment("end", ("mid",), query=True),
        ],
        lends=True,
    )
    world.start_all()
    world.run_epochs(9)
    assert all(t.phase is TaskPhase.LIVE for t in world.tasks.values())
    return world


def poll_of(world: World, slot: Slot = LOST) -> PollRequest:
    poll = world.coordinator.poll_for(slot)
    assert poll is not None
    return poll


def borrower(world: World) -> SimulatedTask:
    """A replica was lost, and its successor starts with the partner's state."""
    task = world.start_task(LOST)
    world.poll_rounds(4)
    assert task.core.status.lent_from is not None
    return task


def oldest_kept(world: World, key: str = "mid/0") -> int:
    return world.store[-1].entries[key][-1].epoch


def test_a_lost_replica_begins_with_the_state_of_its_partner() -> None:
    world = live_world()
    newest = world.tasks[PARTNER].state_epoch
    task = borrower(world)
    assert task.restored_from == newest > oldest_kept(world)


def test_the_restore_point_names_the_lender() -> None:
    world = live_world()
    task = world.start_task(LOST)
    world.poll_rounds(4)
    points = [poll.restore for poll in task.polls if poll.restore is not None]
    assert len(points) == 1
    lender = points[0].lender
    assert lender is not None
    assert (lender.address, lender.replica, lender.incarnation) == ("mid.0.1:8815", 1, 1)
    assert points[0].begun == ()
    assert not poll_of(world, PARTNER).lend


def test_a_state_that_a_partner_lends_already_is_asked_for_once_more() -> None:
    """Nobody may have read it for long, so that it expires at any moment."""
    world = live_world()
    borrower(world)
    lender = world.tasks[PARTNER]
    asked = len([poll for poll in lender.polls if poll.lend])
    assert lender.core.lending.newest is not None
    world.tasks[LOST].reboot()
    world.poll_rounds(6)
    assert len([poll for poll in lender.polls if poll.lend]) > asked
    assert world.tasks[LOST].core.status.lent_from is not None


def test_it_takes_over_nothing_before_the_lent_epoch_is_committed() -> None:
    world = live_world()
    task = borrower(world)
    lent_from = task.restored_from
    assert lent_from is not None
    while oldest_kept(world) < lent_from:
        poll = poll_of(world)
        assert not poll.may_be_live
        assert not poll.saver
        assert poll.sinks == ()
        assert task.phase is not TaskPhase.LIVE
        world.run_epochs(1)
    world.run_epochs(1)
    poll = poll_of(world)
    assert poll.may_be_live
    assert poll.sinks
    assert task.phase is TaskPhase.LIVE


def test_it_is_not_live_before_that_either_if_it_is_obsolete() -> None:
    world = live_world()
    task = borrower(world)
    segments = [
        SimulatedSegment("src"),
        SimulatedSegment("mid", ("src",), replicas=2, query=True, edit="-2"),
        SimulatedSegment("end", ("mid",), query=True),
    ]
    world.hold_writes = True
    world.change_generation(make_generation(segments, 2), keep_old_pods=True)
    world.work(LOST, 1)
    world.poll_rounds(4)
    poll = poll_of(world)
    assert not poll.ask_only
    assert poll.restore is None
    assert not poll.may_be_live
    assert task.phase is TaskPhase.CATCHING_UP


def test_readers_may_read_it_before() -> None:
    world = live_world()
    task = borrower(world)
    world.work(LOST, 1)
    world.poll_rounds(1)
    assert task.phase is TaskPhase.CATCHING_UP
    (upstream,) = poll_of(world, READER).upstreams
    assert [endpoint.replica for endpoint in upstream.endpoints] == [1, 0]


def test_it_waits_for_the_oldest_entry_that_is_kept() -> None:
    """A consumer whose sink is slow may yet need older epochs."""
    world = live_world()
    task = borrower(world)
    lent_from = task.restored_from
    assert lent_from is not None
    world.tasks[READER].sink_lag = 100
    world.run_epochs(32)
    refs = world.store[-1].entries["mid/0"]
    assert refs[0].epoch >= lent_from > refs[-1].epoch
    assert not poll_of(world).may_be_live
    world.tasks[READER].sink_lag = 0
    world.run_epochs(12)
    assert task.phase is TaskPhase.LIVE


def test_nothing_is_lent_while_an_older_entry_is_kept() -> None:
    """It would be long until the replica counts."""
    world = live_world()
    world.tasks[READER].sink_lag = 100
    world.run_epochs(32)
    refs = world.store[-1].entries["mid/0"]
    assert len(refs) > 1
    task = world.start_task(LOST)
    world.poll_rounds(4)
    assert task.core.status.lent_from is None
    assert task.restored_from == refs[-1].epoch


@pytest.mark.parametrize("why", ["engine", "release", "suspected", "catches up"])
def test_a_partner_that_cannot_lend_is_not_asked(why: str) -> None:
    world = live_world()
    partner = world.tasks[PARTNER]
    match why:
        case "engine":
            partner.engine = "e2"
        case "release":
            partner.can_lend = False
        case "suspected":
            partner.frozen = True
            world.poll_rounds(30)
        case "catches up":
            world.release_epochs(40)
            world.work(SRC, 40)
            partner.head_advanced(world.head)
    world.poll_rounds(1)
    task = world.start_task(LOST)
    world.poll_rounds(3)
    assert task.restored_from is not None
    assert task.core.status.lent_from is None


def test_a_task_of_an_older_release_restores_from_the_store() -> None:
    world = live_world()
    task = world.start_task(LOST)
    task.can_lend = False
    world.poll_rounds(3)
    assert task.restored_from is not None
    assert task.core.status.lent_from is None


def test_a_partner_that_does_not_lend_is_not_waited_for_for_long() -> None:
    world = live_world()
    world.tasks[PARTNER].ignores_polls = True
    task = world.start_task(LOST)
    world.poll_rounds(int(ANSWER_S / 0.25) - 2)
    assert task.restored_from is None
    world.poll_rounds(8)
    assert task.restored_from is not None
    assert task.core.status.lent_from is None


def test_nothing_is_lent_for_long_to_a_task_that_does_not_respond_any_more() -> None:
    """What is lent costs the lender memory, and with it checkpoints."""
    world = live_world()
    task = world.start_task(LOST)
    while not poll_of(world, PARTNER).lend:
        world.poll_rounds(1)
    task.frozen = True
    world.poll_rounds(int(ANSWER_S / 0.25) - 2)
    assert poll_of(world, PARTNER).lend
    world.poll_rounds(4)
    assert not poll_of(world, PARTNER).lend


def test_after_two_boots_that_were_never_live_it_restores_from_the_store() -> None:
    world = live_world()
    task = borrower(world)
    world.poll_rounds(1)  # the coordinator has seen that it has begun
    for _ in range(MAX_ATTEMPTS - 1):
        task.reboot()
        world.poll_rounds(6)
        assert task.core.status.lent_from is not None
    task.reboot()
    world.poll_rounds(6)
    assert task.restored_from is not None
    assert task.core.status.lent_from is None


def test_inputs_are_kept_from_the_lent_epoch_on() -> None:
    """Checkpoints go on while it starts."""
    world = live_world()
    task = borrower(world)
    lent_from = task.restored_from
    assert lent_from is not None
    world.run_while_stuck(LOST, 14)
    assert world.tasks[SRC].log_base <= lent_from + 1
    assert not world.undeliverable_epochs()


def test_an_entry_that_is_lent_pins_none_in_the_store() -> None:
    world = live_world()
    borrower(world)
    world.run_while_stuck(LOST, 14)
    assert len(world.store[-1].entries["mid/0"]) == 1


def test_one_that_has_lost_its_lender_starts_again_from_the_store() -> None:
    world = live_world()
    task = borrower(world)
    world.work(LOST, 1)
    world.poll_rounds(1)
    world.kill(PARTNER)
    boot = task.boot
    world.poll_rounds(int(ALONE_S / 0.25) - 4)
    assert task.boot == boot
    world.poll_rounds(12)
    assert task.boot > boot
    world.run_epochs(12)
    assert task.core.status.lent_from is None
    assert task.phase is TaskPhase.LIVE
    assert not world.undeliverable_epochs()


def test_it_goes_on_if_another_one_has_taken_the_place_of_its_lender() -> None:
    """That one restores from the store: nobody Live is left to lend."""
    world = live_world()
    task = borrower(world)
    world.work(LOST, 1)
    world.poll_rounds(1)
    world.kill(PARTNER)
    world.poll_rounds(8)
    successor = world.start_task(PARTNER)
    boot = task.boot
    world.run_epochs(30)
    assert task.boot == boot
    assert successor.core.status.lent_from is None
    assert {task.phase, successor.phase} == {TaskPhase.LIVE}


def test_a_new_coordinator_knows_what_a_task_began_with() -> None:
    world = live_world()
    task = borrower(world)
    world.work(LOST, 1)
    world.start_coordinator()
    world.poll_rounds(4)
    poll = poll_of(world)
    assert not poll.ask_only
    assert not poll.may_be_live
    assert poll.sinks == ()
    world.run_epochs(12)
    assert task.phase is TaskPhase.LIVE


def test_the_lender_goes_on_to_save_checkpoints() -> None:
    """The other one does not know what of its state is in the store already."""
    world = live_world()
    borrower(world)
    world.run_epochs(12)
    savers = [slot for slot in (LOST, PARTNER) if poll_of(world, slot).saver]
    assert savers == [PARTNER]


def test_a_successor_in_a_planned_move_borrows_from_the_task_itself() -> None:
    world = live_world(replicas=1)
    task = world.start_task(LOST.alternate)
    world.poll_rounds(4)
    assert task.core.status.lent_from is not None
    world.run_epochs(12)
    assert task.phase is TaskPhase.LIVE
    world.kill(LOST)
    world.run_epochs(12)
    assert task.phase is TaskPhase.LIVE
    assert not world.undeliverable_epochs()
