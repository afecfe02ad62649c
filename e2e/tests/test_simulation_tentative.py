"""What simulations check of tentative results, and what they count."""

from __future__ import annotations

from rekindle.consistency import states
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import BatchKind
from rekindle.streams.wire import LivePosition
from rekindle.topology.model import Partition, Slot
from rekindle.transitions import StateMachine
from rekindle_testing.simulation.coverage import (
    CELLS,
    UNREACHABLE,
    counted,
    coverage_lines,
)
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.output import SimulatedOutput
from rekindle_testing.simulation.output_order import OutputOrder
from rekindle_testing.simulation.reading import SimulatedRead
from rekindle_testing.simulation.witnesses import Witnesses

P = Partition("seg", 0)
ONE, OTHER = Slot("seg", 0, 0), Slot("seg", 0, 1)
"""Two replicas of it. Calls of `computed` below give incarnation, epoch and result."""


def failed_order() -> OutputOrder:
    """Stable through epoch 1, then epochs 2 and 3 of the tentative attempt 1. Each call of an order
    returns what is wrong with it, or ""."""
    order = OutputOrder()
    steps = [order.stable(0), order.stable(1)]
    steps += [order.new_tentative(attempt=1, epoch=epoch) for epoch in (2, 3)]
    assert steps == ["", "", "", ""]
    return order


def test_a_failure_that_is_corrected_is_in_order() -> None:
    order = failed_order()
    assert order.undo(2) == ""
    assert [order.stable(2), order.stable(3)] == ["", ""]
    assert order.reconciliation_done(3) == ""
    assert order.settled() == ""


def test_a_new_failure_may_go_on_in_a_correction() -> None:
    order = failed_order()
    assert [order.undo(2), order.new_tentative(attempt=1, epoch=4), order.stable(2)] == ["", "", ""]
    assert order.reconciliation_done(2) == ""
    assert order.tentative == {4}
    assert "not corrected" in order.settled()


def test_corrections_need_undo_and_rec_done() -> None:
    assert "without an UNDO" in failed_order().stable(2)
    order = failed_order()
    order.undo(2)
    assert "without a REC_DONE" in order.settled()
    assert "UNDO follows" in order.undo(2)
    assert "follows no UNDO" in failed_order().reconciliation_done(3)


def test_undo_leaves_no_tentative_epoch() -> None:
    assert "leaves" in failed_order().undo(3)


def test_rec_done_says_what_is_corrected() -> None:
    order = failed_order()
    order.undo(2)
    order.new_tentative(attempt=1, epoch=4)
    assert "not corrected" in order.reconciliation_done(4)


def test_attempts_follow_each_other() -> None:
    order = failed_order()
    order.undo(2)
    assert "open" in order.new_tentative(attempt=2, epoch=4)
    assert "follows attempt" in order.new_tentative(attempt=1, epoch=5)


def test_a_live_reader_gets_all_kinds_in_order() -> None:
    disk, changes = Disk(), list[int]()
    output = SimulatedOutput(disk, "boot", lambda: changes.append(1))
    for epoch in range(2):
        disk.append(epoch, f"s{epoch}")
    assert output.append(attempt=1, epoch=2, value="t2")
    assert not output.append(attempt=1, epoch=1, value="late")
    output.enter(ConsistencyState.UP_FAILURE)
    request = SimulatedRead(None, from_epoch=0, live=LivePosition())
    items, position = output.read(request) or ((), None)
    assert [(i.kind, i.epoch, i.value) for i in items] == [
        (BatchKind.STABLE, 0, "s0"),
        (BatchKind.STABLE, 1, "s1"),
        (BatchKind.TENTATIVE, 2, "t2"),
    ]
    output.control(BatchKind.UNDO, 2)
    disk.append(2, "s2")
    output.control(BatchKind.RECONCILIATION_DONE, 2)
    assert position is not None
    items, _ = output.read(SimulatedRead(None, from_epoch=2, live=position)) or ((), None)
    assert [(i.kind, i.epoch) for i in items] == [
        (BatchKind.UNDO, 2),
        (BatchKind.STABLE, 2),
        (BatchKind.RECONCILIATION_DONE, 2),
    ]
    assert len(changes) == 4
    assert (output.report.newest_tentative, output.report.corrected_through) == (-1, 2)


def test_a_live_reader_below_the_log_gets_no_items() -> None:
    disk = Disk()
    for epoch in range(4):
        disk.append(epoch, str(epoch))
    disk.truncate(1)
    output = SimulatedOutput(disk, "boot", lambda: None)
    assert output.read(SimulatedRead(None, from_epoch=0, live=LivePosition())) is None


def test_two_replicas_that_compute_are_witnesses() -> None:
    witnesses = Witnesses(lambda partition: -1)
    witnesses.computed(P, ONE, 1, 5, "a", copied=None)
    assert not witnesses.is_known(P, 5)
    witnesses.computed(P, OTHER, 1, 5, "a", copied=None)
    assert witnesses.is_known(P, 5)
    assert witnesses.is_known(P, 4)


def test_a_copy_is_no_witness_until_its_state_is_committed() -> None:
    committed = [-1]
    witnesses = Witnesses(lambda partition: committed[0])
    witnesses.computed(P, ONE, 1, 5, "a", copied=None)
    witnesses.computed(P, OTHER, 1, 5, "a", copied=4)
    assert not witnesses.is_known(P, 5)
    committed[0] = 4
    assert witnesses.is_known(P, 5)


def test_a_copy_is_a_witness_once_its_state_was_computed_by_two() -> None:
    """A coordinator may ask only for a later epoch (seed 2602 of the simulations)."""
    witnesses = Witnesses(lambda partition: 3)
    third = Slot("seg", 0, 2)
    for slot, copied in ((ONE, None), (OTHER, 2)):
        witnesses.computed(P, slot, 1, 4, "a", copied)
    witnesses.computed(P, OTHER, 1, 5, "b", copied=2)
    assert not witnesses.is_known(P, 5)
    witnesses.computed(P, third, 1, 5, "b", copied=4)
    assert witnesses.is_known(P, 5)


def test_replicas_that_differ_are_no_witnesses_of_each_other() -> None:
    """Nor is the same result of one replica twice, but for another incarnation of it."""
    witnesses = Witnesses(lambda partition: -1)
    witnesses.computed(P, ONE, 1, 5, "a", copied=None)
    witnesses.computed(P, OTHER, 1, 5, "b", copied=None)
    witnesses.computed(P, ONE, 1, 5, "a", copied=None)
    assert not witnesses.is_known(P, 5)
    witnesses.computed(P, ONE, 2, 5, "a", copied=None)
    assert witnesses.is_known(P, 5)


def test_transitions_are_counted() -> None:
    with counted() as counts:
        machine = states.consistency_machine()
        machine.step("process_tentative")
        machine.step("process_tentative")
    state, after = ConsistencyState.STABLE, ConsistencyState.UP_FAILURE
    assert counts["consistency", state, "process_tentative"] == 1
    assert counts["consistency", after, "process_tentative"] == 1
    assert StateMachine.step.__name__ == "step"


def test_what_was_never_reached_is_printed_with_its_reason() -> None:
    unlisted = [cell for cell in CELLS if cell not in UNREACHABLE]
    lines = coverage_lines(dict.fromkeys(unlisted[1:], 1))
    never = [line for line in lines if line.startswith("never reached")]
    assert len(never) == len(UNREACHABLE) + 1
    assert sum("not by these seeds" in line for line in never) == 1
    lines = coverage_lines({next(iter(UNREACHABLE)): 1})
    assert any("though listed" in line for line in lines)


def test_only_cells_of_tables_are_listed_as_unreachable() -> None:
    assert UNREACHABLE.keys() <= set(CELLS)
