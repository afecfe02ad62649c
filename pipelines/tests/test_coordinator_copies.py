"""A replica that has started from a partner's state repeats the partner's results: it is no second
witness of them, and is contained with them.

Design: docs/design/state-movement.md#agreement.
"""

from __future__ import annotations

import pytest
from coordinator_world import World

from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.agreement.results import Computation, EpochDigests
from rekindle.coordinator.model import Partition
from rekindle.protocol import TaskPhase
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.topology.model import Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment

MID = Partition("mid", 0)
SLOTS = tuple(Slot("mid", 0, replica) for replica in range(4))
DONOR, OTHER, COPY, FOURTH = (Computation(slot, 1, "a") for slot in SLOTS)

Results = dict[int, EpochDigests]


def results(wrong_from: int | None = None, mark: str = "!", epochs: int = 20) -> Results:
    """The chained and own digests of epochs 0 to 19, wrong from an epoch on."""
    found, before = {}, chained_digest_from(-1)
    for epoch in range(epochs):
        digest = f"d{epoch}" + (mark if wrong_from is not None and epoch >= wrong_from else "")
        before = chain_digest(before, epoch, 0, digest)
        found[epoch] = EpochDigests(before, digest)
    return found


def after(epoch: int, found: Results) -> Results:
    return {e: digests for e, digests in found.items() if e > epoch}


RIGHT, WRONG = results(), results(wrong_from=3)


def compared(committed: int = 2, replicas: int = 3) -> DigestComparison:
    comparison = DigestComparison()
    comparison.configured({MID: replicas})
    comparison.committed(MID, committed)
    return comparison


def start_copy(comparison: DigestComparison, by: Computation, through: int, found: Results) -> None:
    """A newcomer responds before it has state."""
    comparison.observed(by, {})
    comparison.observed(by, after(through, found), copied_through=through)


def wrong_donor(committed: int = 2, replicas: int = 3, through: int = 9) -> DigestComparison:
    """The donor is wrong from epoch 3 on, and a newcomer has its state."""
    comparison = compared(committed, replicas)
    comparison.observed(DONOR, WRONG)
    start_copy(comparison, COPY, through, WRONG)
    return comparison


# --- the comparison ---


def test_a_copy_is_no_second_witness() -> None:
    comparison = wrong_donor()
    assert comparison.witnessed(MID) == -1
    comparison.observed(OTHER, RIGHT)
    assert not comparison.diverged
    assert comparison.disputes[MID].agreed_through == 2


def test_it_stays_a_copy_in_later_responses() -> None:
    comparison = wrong_donor()
    comparison.observed(COPY, {}, copied_through=9)
    comparison.observed(COPY, {}, copied_through=None)
    comparison.observed(OTHER, RIGHT)
    assert not comparison.diverged


def test_a_copy_of_what_is_committed_is_a_witness() -> None:
    comparison = wrong_donor(committed=9)
    comparison.observed(OTHER, after(9, RIGHT))
    assert comparison.diverged.keys() == {OTHER.slot}


def test_a_copy_that_agrees_with_two_others_is_a_witness() -> None:
    comparison = compared(replicas=4)
    comparison.observed(DONOR, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    start_copy(comparison, COPY, 9, RIGHT)
    comparison.forget(FOURTH.slot)
    comparison.observed(OTHER, after(9, WRONG))
    assert comparison.diverged.keys() == {OTHER.slot}
    assert comparison.must_restart(COPY.slot) is None


def test_agreement_of_others_makes_no_witness_of_a_copy() -> None:
    comparison = wrong_donor(replicas=4)
    comparison.forget(DONOR.slot)
    comparison.observed(Computation(DONOR.slot, 2, "a"), {2: RIGHT[2]})
    comparison.observed(FOURTH, {2: RIGHT[2], 30: EpochDigests("-1:x", "x")})
    comparison.observed(OTHER, {30: EpochDigests("-1:x", "x")})
    assert comparison.witnessed(MID) == 30
    comparison.observed(FOURTH, {19: RIGHT[19]})
    assert comparison.must_restart(COPY.slot) == "a"
    assert not comparison.diverged


def test_who_agrees_with_others_is_known_of_each_replica() -> None:
    comparison = wrong_donor()
    comparison.observed(OTHER, {2: RIGHT[2]})
    assert [comparison.agrees_through(by.slot) for by in (DONOR, OTHER, COPY)] == [19, 2, 19]


def test_in_a_dispute_a_copy_computes_again() -> None:
    """At once: it is the third computation that decides."""
    comparison = wrong_donor()
    comparison.observed(OTHER, RIGHT)
    assert comparison.must_restart(COPY.slot) == "a"
    assert not comparison.disputes[MID].is_party(COPY)
    comparison.observed(Computation(COPY.slot, 1, "b"), RIGHT, 2)
    assert comparison.diverged.keys() == {DONOR.slot}
    assert not comparison.disputes


def test_a_copy_without_results_of_the_disputed_epoch_computes_again() -> None:
    comparison = wrong_donor()
    comparison.observed(OTHER, {3: RIGHT[3]})
    assert comparison.disputes[MID].epoch == 3
    assert comparison.must_restart(COPY.slot) == "a"


def test_a_copy_that_outlives_its_donor_is_disputed() -> None:
    """The other replica's result waits for the copy, which computes again."""
    comparison = wrong_donor()
    comparison.forget(DONOR.slot)
    comparison.observed(OTHER, RIGHT)
    assert [by for by, _ in comparison.disputes[MID].results] == [OTHER]
    assert comparison.must_restart(COPY.slot) == "a"
    comparison.observed(Computation(COPY.slot, 1, "b"), RIGHT, 2)
    assert not comparison.disputes
    assert not comparison.diverged


def test_copies_that_differ_from_each_other_compute_again() -> None:
    comparison = compared()
    start_copy(comparison, COPY, 9, WRONG)
    start_copy(comparison, OTHER, 9, RIGHT)
    assert not comparison.disputes
    assert [comparison.must_restart(by.slot) for by in (COPY, OTHER)] == ["a", "a"]
    assert len(comparison.take_untrusted()) == 1


def test_a_newcomer_that_starts_in_a_dispute_computes_again() -> None:
    """Its session should end, but it had started before it heard of that."""
    comparison = compared()
    comparison.observed(COPY, {})
    comparison.observed(DONOR, WRONG)
    comparison.observed(OTHER, RIGHT)
    assert comparison.must_restart(COPY.slot) is None
    assert comparison.observed(COPY, {}, copied_through=9)
    assert comparison.must_restart(COPY.slot) == "a"
    assert MID in comparison.disputes


def outvoted(*, copied_before: bool) -> DigestComparison:
    """The donor is wrong, and two others are right."""
    comparison = compared(replicas=4)
    comparison.observed(COPY, {})
    if copied_before:
        comparison.observed(COPY, {}, copied_through=19)
    comparison.observed(OTHER, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    comparison.observed(DONOR, WRONG)
    assert comparison.diverged.keys() == {DONOR.slot}
    return comparison


def test_copies_of_an_outvoted_replica_compute_again() -> None:
    assert outvoted(copied_before=True).must_restart(COPY.slot) == "a"


def test_a_newcomer_that_starts_from_a_diverged_replica_computes_again() -> None:
    comparison = outvoted(copied_before=False)
    assert comparison.must_restart(COPY.slot) is None
    comparison.observed(COPY, {}, copied_through=19)
    assert comparison.must_restart(COPY.slot) == "a"


def test_the_next_boot_of_that_newcomer_may_have_another_donor() -> None:
    comparison = outvoted(copied_before=False)
    start_copy(comparison, Computation(COPY.slot, 1, "b"), 19, RIGHT)
    assert comparison.must_restart(COPY.slot) is None


def test_a_copy_that_is_outvoted_computes_again_and_is_not_replaced() -> None:
    comparison = compared(replicas=4)
    comparison.observed(OTHER, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    start_copy(comparison, COPY, 9, WRONG)
    assert not comparison.diverged
    assert not comparison.disputes
    assert comparison.must_restart(COPY.slot) == "a"


def test_a_copy_of_a_state_that_differs_from_the_checkpoint_computes_again() -> None:
    comparison = compared(committed=5, replicas=2)
    comparison.observed(DONOR, WRONG)
    start_copy(comparison, OTHER, 9, WRONG)
    comparison.checkpoint_differed(DONOR.slot, 1, 5)
    assert comparison.must_restart(OTHER.slot) == "a"
    assert [found.after for found in comparison.take_untrusted()] == [-1]


# --- the coordinator ---


@pytest.mark.parametrize("lag", [3, 8])
def test_the_results_of_a_wrong_donor_are_never_committed(lag: int) -> None:
    """Replica 0 is wrong, 1 is right and some epochs behind, 2 gets the state of 0."""
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=3, query=True)]
    world = World(parts)
    world.start_all()
    for task in world.tasks.values():
        task.moves = True
    world.run_epochs(9)
    donor, other, copy = (by.slot for by in (DONOR, OTHER, COPY))
    world.tasks[donor].corruption = "!"
    world.kill(copy)
    world.start_task(copy).moves = True
    world.run_with_idle(other, 2)
    world.tasks[copy].move_from(world.tasks[donor])
    world.run_with_idle(other, lag)
    assert world.tasks[copy].phase is TaskPhase.LIVE
    assert world.tasks[copy].state_corruption == "!"
    for _ in range(24):
        world.run_epochs(1)
        objects = [ref.object for refs in world.store[-1].entries.values() for ref in refs]
        assert not [name for name in objects if name and "!" in name]
    assert world.reports[-1]["diverged"] == [donor.key]
    assert world.tasks[copy].state_corruption == ""
    assert world.store[-1].entries["mid/0"][0].epoch > world.head - 8


def test_a_donor_and_its_copy_commit_while_they_are_alone() -> None:
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=2, query=True)]
    world = World(parts)
    world.start_all()
    for task in world.tasks.values():
        task.moves = True
    world.run_epochs(9)
    donor, copy = SLOTS[0], SLOTS[1]
    world.kill(copy)
    world.start_task(copy).moves = True
    world.run_with_idle(copy, 2)
    world.tasks[copy].move_from(world.tasks[donor])
    moved = world.tasks[copy].core.status.moved_through
    assert moved is not None
    world.run_epochs(8)
    assert world.store[-1].entries["mid/0"][0].epoch > moved
    assert world.tasks[copy].core.status.moved_through == moved
