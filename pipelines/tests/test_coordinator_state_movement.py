"""State movements in the coordinator: orders, restore points, floors, and a new coordinator. What
tasks ask each other is lost, so that only the coordinator's side is seen.

Design: docs/design/state-movement.md#the-coordinators-side.
"""

from __future__ import annotations

from coordinator_world import World

from rekindle.coordinator.movement.core import MovementCoreEvent, MovementEffect
from rekindle.coordinator.movement.phases import MovementPhase
from rekindle.coordinator.movement.session import MovementLimits
from rekindle.exchange.state_mover.messages import Directive, Order, Replica
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment

SRC, LOST, PARTNER = Slot("src", 0, 0), Slot("mid", 0, 0), Slot("mid", 0, 1)
LIMITS = MovementLimits()


def live_world() -> World:
    """All Live, and a checkpoint is committed."""
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=2, query=True)]
    world = World(parts)
    world.start_all()
    for task in world.tasks.values():
        task.can_move_state = True
    world.run_epochs(9)
    assert all(t.phase is TaskPhase.LIVE for t in world.tasks.values())
    return world


def world_with_newcomer() -> World:
    """A replica is lost, and replaced."""
    world = live_world()
    world.start_task(LOST).can_move_state = True
    world.poll_rounds(2)
    return world


def order_of(world: World) -> Order | None:
    poll = world.coordinator.poll_for(LOST)
    assert poll is not None
    return (poll.movement or Directive()).order


def test_a_newcomer_is_ordered_to_get_state_from_its_partner() -> None:
    world = world_with_newcomer()
    order = order_of(world)
    assert order is not None
    assert order.donor == Replica(PARTNER, 1)
    poll = world.coordinator.poll_for(LOST)
    assert poll is not None
    assert poll.movement is not None
    assert poll.movement.donor_address == "mid.0.1:8815"
    assert poll.restore is None
    world.poll_rounds(4)
    confirmed = order_of(world)
    assert confirmed is not None
    assert confirmed.needed == world.tasks[SRC].log_base


def test_inputs_are_kept_for_a_newcomer() -> None:
    world = world_with_newcomer()
    base = world.tasks[SRC].log_base
    for _ in range(20):
        world.run_while_stuck(LOST, 1)
        if order_of(world) is None:
            break
        assert world.tasks[SRC].log_base == base
    assert world.store[-1].epoch > base + 4


def test_a_session_without_changes_is_observed_once_a_second() -> None:
    """To look at thousands of tasks takes as long as a tick."""
    world = world_with_newcomer()
    world.poll_rounds(4)
    core, steps = world.coordinator.movements.core, []
    step = core.step

    def counted(event: MovementCoreEvent, now: float) -> list[MovementEffect]:
        steps.append(now)
        return step(event, now)

    core.step = counted  # type: ignore[method-assign]
    for _ in range(20):
        world.poll_round(0.1)
    assert len(steps) <= 3
    world.tasks[LOST].reboot()
    world.poll_round(0.1)
    assert steps[-1] == world.now, "another boot is news"


def test_an_input_that_is_lost_begins_again_where_a_newcomer_reads() -> None:
    """Checkpoints go on in the session; manifests keep the entry from which to compute what the
    newcomer will need."""
    world = world_with_newcomer()
    world.poll_rounds(6)
    order = order_of(world)
    assert order is not None
    assert order.needed is not None
    while world.store[-1].epoch <= order.needed + 2:
        world.run_while_stuck(LOST, 1)
    world.kill(SRC)
    world.start_task(SRC).can_move_state = True
    world.run_while_stuck(LOST, 2)
    assert world.tasks[SRC].phase is TaskPhase.LIVE
    assert world.tasks[SRC].log_base <= order.needed
    assert order_of(world) == order


def test_without_progress_it_restores_from_the_checkpoint() -> None:
    world = world_with_newcomer()
    seconds = LIMITS.attempts * (LIMITS.stall_s + LIMITS.confirm_holds_s)
    for _ in range(int(seconds / 0.25)):
        world.poll_round()
        if world.tasks[LOST].restored_from is not None:
            break
        assert world.coordinator.membership.get(LOST) is not None
    assert world.tasks[LOST].restored_from == world.store[-1].entries["mid/0"][-1].epoch
    world.run_epochs(12)
    assert world.tasks[LOST].phase is TaskPhase.LIVE
    assert not world.tasks[SRC].response().movement.holds  # type: ignore[union-attr]
    assert not world.undeliverable_epochs()


def test_without_a_partner_it_restores_at_once() -> None:
    world = world_with_newcomer()
    world.kill(PARTNER)
    world.start_task(LOST).can_move_state = True
    world.poll_rounds(3)
    assert world.tasks[LOST].restored_from is not None


def test_a_partner_of_another_engine_is_no_donor() -> None:
    world = world_with_newcomer()
    world.tasks[PARTNER].engine = "e2"
    world.poll_rounds(1)
    world.start_task(LOST).can_move_state = True
    world.poll_rounds(3)
    assert world.tasks[LOST].restored_from is not None


def test_a_new_coordinator_adopts_the_session() -> None:
    world = world_with_newcomer()
    world.poll_rounds(4)
    before = order_of(world)
    world.start_coordinator()
    world.poll_rounds(4)
    assert before is not None
    assert order_of(world) == before
    core = world.coordinator.movements.core
    assert core.phase_of(Replica(LOST, 2)) is MovementPhase.MOVING
    assert world.tasks[LOST].restored_from is None


def test_the_donor_goes_on_to_save_checkpoints() -> None:
    """The newcomer does not know what of the state is in the store already."""
    world = live_world()
    world.tasks[LOST].core.status.moved_through = 3
    world.poll_rounds(1)
    savers = [s for s in (LOST, PARTNER) if (p := world.coordinator.poll_for(s)) and p.saver]
    assert savers == [PARTNER]
