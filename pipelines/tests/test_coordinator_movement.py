"""What the coordinator decides of state movements when it sees replicas change (`ReplicaView`).

Design: docs/design/state-movement.md#the-coordinators-side.
Paper: Flux (Shah et al. 2004), sections 3.5 and 5.3.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rekindle.coordinator.checkpoints.retention import Progress as RetentionProgress
from rekindle.coordinator.model import Partition, PollNow
from rekindle.coordinator.movement.core import MovementCore, ReplicasObserved, TimePassed
from rekindle.coordinator.movement.phases import TRANSITIONS, MovementEvent, MovementPhase
from rekindle.coordinator.movement.session import MovementLimits
from rekindle.coordinator.movement.views import ReplicaView, ReplicaViews
from rekindle.exchange.state_mover.messages import (
    Directive,
    Hold,
    NewcomerReport,
    Order,
    Progress,
    Replica,
    Session,
    SessionVersion,
)
from rekindle.exchange.state_mover.phases import NewcomerPhase
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Slot
from rekindle.transitions import InvalidTransition, StateMachine

SRC, MID, END = Partition("src", 0), Partition("mid", 0), Partition("end", 0)
INPUTS: dict[Partition, tuple[Partition, ...]] = {SRC: (), MID: (SRC,), END: (MID,)}
LIMITS = MovementLimits(confirm_holds_s=10, stall_s=20, session_s=100, attempts=2, wait_s=300)
NEWCOMER = Replica(Slot("mid", 0, 1), 2)
FIRST = Session(NEWCOMER.slot, 2, SessionVersion(1, 1))
SECOND = replace(FIRST, version=SessionVersion(1, 2))


def live(segment: str, index: int = 0, incarnation: int = 1, **fields: Any) -> ReplicaView:
    slot = Slot(segment, 0, index)
    boot = f"{slot.key}-{incarnation}"
    known = {"boot": boot, "phase": TaskPhase.LIVE, "serves": True, "epoch": 20}
    return ReplicaView(slot, incarnation, **{**known, "restored_from": -1, **fields})


def waiting(
    replica: Replica = NEWCOMER, progress: Progress | None = None, **fields: Any
) -> ReplicaView:
    abandoned = fields.pop("abandoned", None)
    known: dict[str, Any] = {"boot": "new", "phase": TaskPhase.WAITING}
    known["newcomer"] = NewcomerReport(progress, abandoned)
    return ReplicaView(replica.slot, replica.incarnation, **{**known, **fields})


def progress(phase: NewcomerPhase, stored: int = 0, session: Session = FIRST) -> Progress:
    donor = Replica(Slot("mid", 0, 0), 1)
    return Progress(session, donor, needed=5, phase=phase, epoch=9, stored=stored, chunks=8)


class Observer:
    """A core, and the replicas that it is shown; `show` replaces views of the same slots."""

    def __init__(self, *views: ReplicaView, fence: int = 1) -> None:
        self.core = MovementCore(fence, LIMITS)
        self.now = 0.0
        self.views: dict[Replica, ReplicaView] = {}
        self.show(*views)

    def show(self, *views: ReplicaView, gone: tuple[Replica, ...] = ()) -> list[object]:
        self.views.update({view.replica: view for view in views})
        self.views = {r: v for r, v in self.views.items() if r not in gone}
        observed = ReplicasObserved(ReplicaViews(self.views.values(), INPUTS))
        return [*self.core.step(observed, self.now)]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.step(TimePassed(), self.now)

    def phase(self, replica: Replica = NEWCOMER) -> MovementPhase | None:
        return self.core.phase_of(replica)

    def directive(self, replica: Replica = NEWCOMER) -> Directive:
        return self.core.directive_for(replica)


def observer(*more: ReplicaView) -> Observer:
    """Two replicas of the source, a donor and a newcomer; a session begins."""
    return Observer(live("src", 0), live("src", 1), live("mid", 0), waiting(), *more)


def hold(session: Session, index: int, base: int) -> ReplicaView:
    return live("src", index, holds=(Hold(session, base),))


def moving() -> Observer:
    world = observer()
    world.show(hold(FIRST, 0, 5), hold(FIRST, 1, 7))
    assert world.phase() is MovementPhase.MOVING
    return world


# -- holds -----------------------------------------------------------------------------------------


def test_the_newcomer_may_go_on_when_all_upstream_replicas_have_confirmed() -> None:
    world = observer()
    assert world.directive(Replica(Slot("src", 0, 1), 1)).register == (FIRST,)
    world.show(hold(FIRST, 0, 5))
    order = world.directive().order
    assert order == Order(FIRST, "new", Replica(Slot("mid", 0, 0), 1), None)
    world.show(hold(FIRST, 1, 7))
    order = world.directive().order
    assert order is not None
    assert order.needed == 7, "the first epoch that both still have"


def test_a_lost_upstream_replica_is_not_waited_for() -> None:
    world = observer()
    world.show(hold(FIRST, 0, 5), gone=(Replica(Slot("src", 0, 1), 1),))
    assert world.phase() is MovementPhase.MOVING


def test_an_input_without_any_replica_confirms_nothing() -> None:
    world = Observer(live("mid", 0), waiting())
    assert world.phase() is MovementPhase.HOLDING


def test_everything_is_kept_until_the_holds_are_confirmed() -> None:
    world = observer()
    assert world.core.with_holds(RetentionProgress()).unknown == {MID}
    world.show(hold(FIRST, 0, 5), hold(FIRST, 1, 7))
    kept = world.core.with_holds(RetentionProgress(positions={MID: (30,)}))
    assert (min(kept.positions[MID]), kept.unknown) == (4, frozenset())


def test_holds_outlast_a_session_that_is_given_up() -> None:
    world = moving()
    world.show(live("mid", 0, trusted=False), hold(FIRST, 0, 5))
    assert world.phase() is MovementPhase.ABANDONING
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == ()
    world.show(waiting(abandoned=FIRST.version))
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == (FIRST,)


def test_holds_are_released_once_the_newcomers_own_position_counts() -> None:
    world = moving()
    world.show(waiting(phase=TaskPhase.CATCHING_UP, restored_from=9))
    assert world.phase() is MovementPhase.STARTED
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == (FIRST,)


def test_holds_of_a_replaced_newcomer_are_released() -> None:
    world = moving()
    world.show(waiting(Replica(NEWCOMER.slot, 3), boot="next"), gone=(NEWCOMER,))
    assert FIRST in world.directive(Replica(Slot("src", 0, 0), 1)).release


def test_holds_of_a_newcomer_that_has_not_responded_are_kept() -> None:
    world = Observer(
        hold(FIRST, 0, 5),
        live("src", 1),
        live("mid", 0, donates=(FIRST,)),
        ReplicaView(NEWCOMER.slot, 2),
        fence=2,
    )
    assert world.directive(Replica(Slot("src", 0, 0), 1)) == Directive()
    assert world.directive(Replica(Slot("mid", 0, 0), 1)) == Directive()
    assert world.core.with_holds(RetentionProgress()).positions == {MID: (4,)}


def test_a_session_ends_if_an_input_begins_after_what_it_needs() -> None:
    world = moving()
    world.show(live("src", 0, log_base=9), live("src", 1, log_base=7))
    assert world.phase() is MovementPhase.MOVING, "one has it"
    world.show(live("src", 1, 2, log_base=None))
    assert world.phase() is MovementPhase.MOVING, "one may have it"
    world.show(live("src", 1, 2, log_base=8))
    assert world.phase() is MovementPhase.ABANDONING
    assert world.core.with_holds(RetentionProgress()).positions[MID] == (6,)


def test_a_newcomer_needs_what_comes_after_the_offered_state() -> None:
    world = moving()
    offered = waiting(progress=progress(NewcomerPhase.RECEIVING))  # the state after epoch 9
    world.show(offered, live("src", 0, log_base=10), live("src", 1, log_base=10))
    assert world.phase() is MovementPhase.MOVING
    world.show(live("src", 0, log_base=11), live("src", 1, log_base=11))
    assert world.phase() is MovementPhase.ABANDONING


# -- donors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"phase": TaskPhase.CATCHING_UP}, {"trusted": False}, {"engine": "other"}],
)
def test_a_replica_that_cannot_give_is_no_donor(fields: dict[str, Any]) -> None:
    world = Observer(live("src", 0), live("mid", 0, **fields), waiting())
    assert world.phase() is MovementPhase.RESTORING
    assert world.directive().may_restore


def test_a_donor_has_one_session_at_a_time() -> None:
    third = Replica(Slot("mid", 0, 2), 1)
    world = observer(waiting(third, boot="third"))
    assert (world.phase(), world.phase(third)) == (MovementPhase.HOLDING, MovementPhase.QUEUED)


def test_inputs_get_their_state_before_their_readers() -> None:
    source = Replica(Slot("src", 0, 1), 2)
    world = Observer(
        live("src", 0), live("mid", 0), waiting(), waiting(source, boot="source"), fence=1
    )
    assert (world.phase(source), world.phase()) == (MovementPhase.HOLDING, MovementPhase.QUEUED)
    world.show()
    assert (world.phase(source), world.phase()) == (MovementPhase.MOVING, MovementPhase.QUEUED)
    world.show(waiting(source, boot="source", phase=TaskPhase.CATCHING_UP, restored_from=9))
    assert world.phase() is MovementPhase.HOLDING


# -- endings ---------------------------------------------------------------------------------------


def test_the_next_attempt_is_with_another_donor_and_a_newer_version() -> None:
    world = moving()
    world.show(live("mid", 2), live("mid", 0, boot="restarted"))
    assert world.directive().abandoned == FIRST.version
    world.show(waiting(abandoned=FIRST.version))
    order = world.directive().order
    assert order is not None
    assert (order.session, order.donor.slot.replica, order.needed) == (SECOND, 2, None)


def test_without_another_donor_it_restores_from_a_checkpoint() -> None:
    world = moving()
    world.show(gone=(Replica(Slot("mid", 0, 0), 1),))
    assert not world.directive().may_restore, "it may still start from what it has"
    world.show(waiting(abandoned=FIRST.version))
    assert world.directive() == Directive(abandoned=FIRST.version, may_restore=True)


def test_a_session_without_progress_is_given_up() -> None:
    world = moving()
    for stored in range(1, 4):
        world.now += LIMITS.stall_s - 1
        world.show(waiting(progress=progress(NewcomerPhase.RECEIVING, stored)))
        assert world.phase() is MovementPhase.MOVING
    world.wait(LIMITS.stall_s)
    assert world.phase() is MovementPhase.ABANDONING


def test_a_donor_that_reads_its_state_makes_progress() -> None:
    world = moving()
    asking = progress(NewcomerPhase.ASKING)
    for runs in range(1, 4):
        world.now += LIMITS.stall_s - 1
        world.show(waiting(progress=replace(asking, prepared=runs)))
        assert world.phase() is MovementPhase.MOVING
    world.wait(LIMITS.stall_s)
    assert world.phase() is MovementPhase.ABANDONING


def test_installing_may_take_longer_than_a_stall() -> None:
    world = moving()
    world.show(waiting(progress=progress(NewcomerPhase.INSTALLING, 8)))
    world.wait(LIMITS.stall_s)
    assert world.phase() is MovementPhase.MOVING
    world.wait(LIMITS.session_s)
    assert world.phase() is MovementPhase.ABANDONING


def test_a_session_that_is_slow_for_ever_is_given_up() -> None:
    world = moving()
    for stored in range(1, 12):
        world.now += 10
        world.show(waiting(progress=progress(NewcomerPhase.RECEIVING, stored)))
    assert world.phase() is MovementPhase.ABANDONING


def test_holds_that_are_not_confirmed_end_a_session() -> None:
    world = observer()
    world.wait(LIMITS.confirm_holds_s)
    assert world.phase() is MovementPhase.ABANDONING


def test_a_lost_donor_does_not_matter_once_all_is_stored() -> None:
    world = moving()
    world.show(
        waiting(progress=progress(NewcomerPhase.INSTALLING, 8)),
        gone=(Replica(Slot("mid", 0, 0), 1),),
    )
    assert world.phase() is MovementPhase.MOVING


def test_a_newcomer_that_started_meanwhile_is_not_abandoned() -> None:
    world = moving()
    world.show(gone=(Replica(Slot("mid", 0, 0), 1),))
    world.show(waiting(phase=TaskPhase.CATCHING_UP, restored_from=9))
    assert world.phase() is MovementPhase.STARTED


def test_a_failed_session_is_followed_by_another_attempt() -> None:
    world = moving()
    world.show(live("mid", 2))
    world.show(waiting(progress=progress(NewcomerPhase.FAILED)))
    order = world.directive().order
    assert order is not None
    assert order.session == SECOND


def test_another_boot_begins_anew() -> None:
    world = moving()
    world.show(waiting(boot="rebooted"))
    order = world.directive().order
    assert order is not None
    assert (order.session, order.boot, order.needed) == (SECOND, "rebooted", None)


# -- another coordinator ---------------------------------------------------------------------------


def test_a_new_coordinator_goes_on_with_the_session() -> None:
    world = Observer(
        hold(FIRST, 0, 5),
        hold(FIRST, 1, 5),
        live("mid", 0, donates=(FIRST,)),
        waiting(progress=progress(NewcomerPhase.RECEIVING, 3)),
        fence=2,
    )
    assert world.phase() is MovementPhase.MOVING
    assert world.directive().order == Order(FIRST, "new", Replica(Slot("mid", 0, 0), 1), 5)
    assert world.directive(Replica(Slot("mid", 0, 0), 1)).release == ()


def test_versions_of_a_new_coordinator_are_newer() -> None:
    world = observer()
    later = Observer(*world.views.values(), fence=2)
    order = later.directive().order
    assert order is not None
    assert order.session.version > FIRST.version


def test_sessions_of_an_earlier_coordinator_are_released_later() -> None:
    left = replace(FIRST, version=SessionVersion(1, 8))
    world = Observer(hold(left, 0, 5), waiting(), fence=2)
    assert world.phase() is MovementPhase.RESTORING
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == ()
    assert world.directive().abandoned == SessionVersion(2, 0)
    world.show(waiting(abandoned=SessionVersion(2, 0)))
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == (left,)


def test_sessions_of_an_earlier_process_of_a_coordinator_are_released_later() -> None:
    """Its container has started again, so its fence is the same."""
    left = replace(FIRST, version=SessionVersion(1, 8))
    world = Observer(hold(left, 0, 5), waiting(), fence=1)
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == ()
    assert world.directive().abandoned == left.version
    world.show(waiting(abandoned=left.version))
    assert world.directive(Replica(Slot("src", 0, 0), 1)).release == (left,)


def test_a_restarted_coordinator_gives_no_session_number_again() -> None:
    left = replace(FIRST, version=SessionVersion(1, 8))
    for view in (
        hold(left, 0, 5),
        live("mid", 0, donates=(left,)),
        waiting(abandoned=left.version),
        waiting(progress=replace(progress(NewcomerPhase.RECEIVING, 3), session=left)),
    ):
        world = observer()
        views = {v.replica: v for v in (*world.views.values(), view)}
        later = Observer(*views.values(), fence=1)
        order = later.directive().order
        assert order is not None
        assert order.session == left or order.session.version.number > 8


def test_a_session_that_ended_without_a_trace_has_another_number_than_later_ones() -> None:
    core = MovementCore(fence=1, last_session_number=70)
    views = ReplicaViews((live("mid", 0), waiting()), {})
    core.step(ReplicasObserved(views), now=0.0)
    order = core.directive_for(NEWCOMER).order
    assert order is not None
    assert order.session.version == SessionVersion(1, 71)


def test_an_order_of_an_earlier_process_that_arrives_late_is_abandoned() -> None:
    """The newcomer had no session when this coordinator first heard of it."""
    world = Observer(live("src", 0), waiting(), fence=1)
    assert world.phase() is MovementPhase.RESTORING
    late = replace(
        progress(NewcomerPhase.HOLDING, 0), session=replace(FIRST, version=SessionVersion(1, 8))
    )
    world.show(waiting(progress=late))
    assert world.directive().abandoned == SessionVersion(1, 8)


def test_tasks_whose_orders_change_are_polled_at_once() -> None:
    world = Observer(live("src", 0), live("mid", 0))
    effects = world.show(waiting())
    assert {e.slot.key for e in effects if isinstance(e, PollNow)} == {"mid/0/1", "src/0/0"}
    assert not [e for e in world.show() if isinstance(e, PollNow)]


def test_each_cell_of_the_table_is_a_transition_or_raises() -> None:
    for state, event in product(MovementPhase, MovementEvent):
        machine = StateMachine("newcomer", TRANSITIONS, state)
        if event in TRANSITIONS[state]:
            machine.step(event)
        else:
            with pytest.raises(InvalidTransition):
                machine.step(event)


def test_a_silent_donor_is_waited_for_only_briefly() -> None:
    world = Observer(live("src"), live("mid", suspected=True), waiting())
    assert world.phase() is MovementPhase.QUEUED
    world.wait(LIMITS.suspected_donor_s)
    assert world.phase() is MovementPhase.RESTORING


def test_a_donor_that_responds_again_is_asked() -> None:
    world = Observer(live("src"), live("mid", suspected=True), waiting())
    world.wait(LIMITS.suspected_donor_s - 1)
    world.show(live("mid"))
    assert world.phase() is MovementPhase.HOLDING


def test_attempts_of_boots_that_ended_in_a_session_count() -> None:
    """What kills the newcomer may be to install the state, or to go on from it."""
    world = observer()
    assert world.phase() is MovementPhase.HOLDING
    world.show(waiting(boot="second"))
    assert world.phase() is MovementPhase.HOLDING
    world.show(waiting(boot="second", restored_from=3, phase=TaskPhase.CATCHING_UP))
    assert world.phase() is MovementPhase.STARTED
    world.show(waiting(boot="third"))
    assert world.phase() is MovementPhase.RESTORING
    world.show(waiting(boot="third", restored_from=3, phase=TaskPhase.LIVE))
    world.show(waiting(boot="fourth"))
    assert world.phase() is MovementPhase.HOLDING
