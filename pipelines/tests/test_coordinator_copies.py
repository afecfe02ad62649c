"""A replica that has started from a partner's state repeats the partner's results: it is no second
witness of them, and is contained with them.

Design: docs/design/lent-state.md#agreement.
"""

from __future__ import annotations

import pytest
from coordinator_world import World
from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.agreement.results import Computation, EpochDigests
from rekindle.protocol import TaskPhase
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.topology.model import Partition, Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment

MID = Partition("mid", 0)
SLOTS = tuple(Slot("mid", 0, replica) for replica in range(4))
LENDER, OTHER, COPY, FOURTH = (Computation(slot, 1, "a") for slot in SLOTS)

Results = dict[int, EpochDigests]


def results(wrong_from: int | None = None, mark: str = "!", epochs: int = 20) -> Results:
    """The chained and own digests of epochs, from 0 on; wrong ones have the mark."""
    found, before = {}, chained_digest_from(-1)
    for epoch in range(epochs):
        digest = f"d{epoch}" + (mark if wrong_from is not None and epoch >= wrong_from else "")
        before = chain_digest(before, epoch, 0, digest)
        found[epoch] = EpochDigests(before, digest)
    return found


def after(epoch: int, found: Results) -> Results:
    return {e: digests for e, digests in found.items() if e > epoch}


RIGHT, WRONG = results(), results(wrong_from=3)


def compared(replicas: int = 3) -> DigestComparison:
    comparison = DigestComparison()
    comparison.configured({MID: replicas})
    return comparison


def start_copy(comparison: DigestComparison, by: Computation, through: int, found: Results) -> None:
    """A borrower responds before it has state."""
    comparison.observed(by, {})
    comparison.observed(by, after(through, found), copied_through=through)


def wrong_lender(replicas: int = 3, through: int = 9) -> DigestComparison:
    """The lender is wrong from epoch 3 on, and a borrower has its state."""
    comparison = compared(replicas)
    comparison.observed(LENDER, WRONG)
    start_copy(comparison, COPY, through, WRONG)
    return comparison


# --- the comparison ---


def test_a_copy_is_no_second_witness() -> None:
    comparison = wrong_lender()
    assert comparison.witnessed(MID) == -1
    comparison.observed(OTHER, RIGHT)
    assert not comparison.diverged
    assert comparison.disputes[MID].agreed_through == 2


def test_a_copy_stays_a_copy_in_later_responses() -> None:
    comparison = wrong_lender()
    comparison.observed(COPY, {}, copied_through=9)
    comparison.observed(COPY, {}, copied_through=None)
    comparison.observed(OTHER, RIGHT)
    assert not comparison.diverged


def test_a_copy_whose_results_are_committed_is_a_witness() -> None:
    comparison = wrong_lender()
    comparison.committed(LENDER, 12)
    comparison.observed(OTHER, after(9, RIGHT))
    assert comparison.diverged.keys() == {OTHER.slot}


def test_results_after_a_checkpoint_are_matched_with_it_when_they_come() -> None:
    comparison = compared()
    comparison.observed(LENDER, WRONG)
    comparison.committed(LENDER, 12)
    start_copy(comparison, COPY, 9, WRONG)
    comparison.observed(OTHER, after(9, RIGHT))
    assert comparison.diverged.keys() == {OTHER.slot}


def test_a_checkpoint_with_other_results_makes_no_witness_of_a_copy() -> None:
    """The copy has not reported that epoch yet."""
    comparison = compared()
    comparison.observed(LENDER, WRONG)
    start_copy(comparison, COPY, 9, results(wrong_from=3, epochs=12))
    comparison.forget(LENDER.slot)
    comparison.observed(OTHER, {12: RIGHT[12]})
    comparison.committed(OTHER, 12)
    comparison.observed(COPY, {12: WRONG[12]})
    assert not comparison.diverged
    assert comparison.boot_to_restart(COPY.slot) == "a"


def test_results_that_left_the_response_are_still_those_of_the_checkpoint() -> None:
    comparison = wrong_lender()
    comparison.observed(LENDER, {12: EpochDigests(state="saved")})
    comparison.committed(LENDER, 12)
    comparison.observed(OTHER, after(9, RIGHT))
    assert comparison.diverged.keys() == {OTHER.slot}


def test_a_checkpoint_before_a_copy_started_makes_no_witness_of_it() -> None:
    comparison = wrong_lender()
    comparison.committed(LENDER, 9)
    comparison.observed(OTHER, after(9, RIGHT))
    assert not comparison.diverged


def test_a_copy_that_agrees_with_two_others_is_a_witness() -> None:
    comparison = compared(replicas=4)
    comparison.observed(LENDER, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    start_copy(comparison, COPY, 9, RIGHT)
    comparison.forget(FOURTH.slot)
    comparison.observed(OTHER, after(9, WRONG))
    assert comparison.diverged.keys() == {OTHER.slot}
    assert comparison.boot_to_restart(COPY.slot) is None


def test_agreement_of_others_makes_no_witness_of_a_copy() -> None:
    comparison = wrong_lender(replicas=4)
    comparison.forget(LENDER.slot)
    comparison.observed(Computation(LENDER.slot, 2, "a"), {2: RIGHT[2]})
    comparison.observed(FOURTH, {2: RIGHT[2], 30: EpochDigests("-1:x", "x")})
    comparison.observed(OTHER, {30: EpochDigests("-1:x", "x")})
    assert comparison.witnessed(MID) == 30
    comparison.observed(FOURTH, {19: RIGHT[19]})
    assert comparison.boot_to_restart(COPY.slot) == "a"
    assert not comparison.diverged


def test_agreement_with_others_is_known_of_each_replica() -> None:
    comparison = wrong_lender()
    comparison.observed(OTHER, {2: RIGHT[2]})
    pairs = ((LENDER, COPY), (LENDER, OTHER), (OTHER, COPY))
    assert [comparison.agree_through(a.slot, b.slot) for a, b in pairs] == [19, 2, -1]


def test_in_a_dispute_a_copy_computes_again() -> None:
    """At once: it is the third computation that decides."""
    comparison = wrong_lender()
    comparison.observed(OTHER, RIGHT)
    assert comparison.boot_to_restart(COPY.slot) == "a"
    assert not comparison.disputes[MID].is_party(COPY)
    comparison.observed(Computation(COPY.slot, 1, "b"), RIGHT, restored_from=2)
    assert comparison.diverged.keys() == {LENDER.slot}
    assert not comparison.disputes


def test_a_copy_without_results_of_the_disputed_epoch_computes_again() -> None:
    comparison = wrong_lender()
    comparison.observed(OTHER, {3: RIGHT[3]})
    assert comparison.disputes[MID].epoch == 3
    assert comparison.boot_to_restart(COPY.slot) == "a"


def test_a_copy_that_outlives_its_lender_is_disputed() -> None:
    """The other replica's result waits for the copy, which computes again."""
    comparison = wrong_lender()
    comparison.forget(LENDER.slot)
    comparison.observed(OTHER, RIGHT)
    assert [by for by, _ in comparison.disputes[MID].results] == [OTHER]
    assert comparison.boot_to_restart(COPY.slot) == "a"
    comparison.observed(Computation(COPY.slot, 1, "b"), RIGHT, restored_from=2)
    assert not comparison.disputes
    assert not comparison.diverged


def test_copies_that_differ_from_each_other_compute_again() -> None:
    comparison = compared()
    start_copy(comparison, COPY, 9, WRONG)
    start_copy(comparison, OTHER, 9, RIGHT)
    assert [comparison.boot_to_restart(by.slot) for by in (COPY, OTHER)] == ["a", "a"]
    assert len(comparison.take_untrusted_output()) == 1


def copies_that_differ() -> DigestComparison:
    comparison = compared()
    start_copy(comparison, COPY, 9, WRONG)
    start_copy(comparison, OTHER, 9, RIGHT)
    return comparison


def test_while_copies_that_differ_compute_again_neither_is_trusted() -> None:
    """The first of them to do so may be wrong again."""
    comparison = copies_that_differ()
    assert not comparison.disputes[MID].results
    comparison.observed(Computation(COPY.slot, 1, "b"), after(2, WRONG), restored_from=2)
    assert comparison.is_untrusted(COPY.slot)
    assert comparison.witnessed(MID) == -1
    comparison.observed(Computation(OTHER.slot, 1, "b"), after(2, WRONG), restored_from=2)
    assert not comparison.disputes
    assert comparison.witnessed(MID) == 19


def test_copies_that_differ_again_are_disputed_as_any() -> None:
    comparison = copies_that_differ()
    again = [Computation(by.slot, 1, "b") for by in (COPY, OTHER)]
    for by, found in zip(again, (WRONG, RIGHT), strict=True):
        comparison.observed(by, after(2, found), restored_from=2)
    assert [by for by, _ in comparison.disputes[MID].results] == again
    comparison.request_recomputation(MID, again, now=100.0)
    assert comparison.boot_to_restart(COPY.slot) == "b"
    comparison.observed(Computation(COPY.slot, 1, "c"), after(2, RIGHT), 2)
    assert comparison.diverged.keys() == {COPY.slot}
    assert not comparison.disputes


def test_a_checkpoint_ends_a_dispute_of_copies() -> None:
    comparison = copies_that_differ()
    comparison.observed(Computation(COPY.slot, 1, "b"), after(15, RIGHT), restored_from=15)
    assert not comparison.disputes


def test_a_borrower_that_starts_in_a_dispute_computes_again() -> None:
    """Its session should end, but it had started before it heard of that."""
    comparison = compared()
    comparison.observed(COPY, {})
    comparison.observed(LENDER, WRONG)
    comparison.observed(OTHER, RIGHT)
    assert comparison.boot_to_restart(COPY.slot) is None
    assert comparison.observed(COPY, {}, copied_through=9), "its boot has to end"
    assert comparison.boot_to_restart(COPY.slot) == "a"
    assert MID in comparison.disputes


def outvoted(*, copied_before: bool) -> DigestComparison:
    """The lender is wrong, and two others are right."""
    comparison = compared(replicas=4)
    comparison.observed(COPY, {})
    if copied_before:
        comparison.observed(COPY, {}, copied_through=19)
    comparison.observed(OTHER, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    comparison.observed(LENDER, WRONG)
    assert comparison.diverged.keys() == {LENDER.slot}
    return comparison


def test_copies_of_an_outvoted_replica_compute_again() -> None:
    assert outvoted(copied_before=True).boot_to_restart(COPY.slot) == "a"


def test_a_borrower_that_starts_from_a_diverged_replica_computes_again() -> None:
    comparison = outvoted(copied_before=False)
    assert comparison.boot_to_restart(COPY.slot) is None
    comparison.observed(COPY, {}, copied_through=19)
    assert comparison.boot_to_restart(COPY.slot) == "a"


def test_the_next_boot_of_that_borrower_may_have_another_lender() -> None:
    comparison = outvoted(copied_before=False)
    start_copy(comparison, Computation(COPY.slot, 1, "b"), 19, RIGHT)
    assert comparison.boot_to_restart(COPY.slot) is None


def test_a_copy_that_is_outvoted_computes_again_and_is_not_replaced() -> None:
    comparison = compared(replicas=4)
    comparison.observed(OTHER, RIGHT)
    comparison.observed(FOURTH, RIGHT)
    start_copy(comparison, COPY, 9, WRONG)
    assert not comparison.diverged
    assert not comparison.disputes
    assert comparison.boot_to_restart(COPY.slot) == "a"


def test_a_copy_of_a_state_that_differs_from_the_checkpoint_computes_again() -> None:
    comparison = compared(replicas=2)
    comparison.observed(LENDER, WRONG)
    start_copy(comparison, OTHER, 9, WRONG)
    comparison.checkpoint_differed(LENDER.slot, incarnation=1, epoch=5)
    assert comparison.boot_to_restart(OTHER.slot) == "a"
    assert [found.after for found in comparison.take_untrusted_output()] == [-1]


# --- any history ---


class Replica:
    """`chained`: the chained digest after its newest epoch, and whether it is wrong."""

    def __init__(self, slot: Slot, incarnation: int = 1) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.boot = 0
        self.restored_from: int | None = None
        self.copied_through: int | None = None
        self.started = False
        self.epoch, self.chained, self.wrong = -1, chained_digest_from(-1), False
        self.results: Results = {}

    @property
    def by(self) -> Computation:
        return Computation(self.slot, self.incarnation, str(self.boot))

    def reboot(self) -> None:
        self.boot += 1
        self.started, self.restored_from, self.copied_through = False, None, None
        self.results = {}

    def start(self, epoch: int, chained: str, wrong: bool) -> None:
        self.started = True
        self.epoch, self.chained, self.wrong = epoch, chained, wrong

    def compute(self, faulty: bool) -> None:
        self.epoch += 1
        self.wrong |= faulty
        digest = f"d{self.epoch}" + ("!" if self.wrong else "")
        self.chained = chain_digest(self.chained, self.epoch, 0, digest)
        self.results[self.epoch] = EpochDigests(self.chained, digest)


class Histories:
    """Three replicas. The node of the first one is faulty from an epoch on, the second one is right
    and never lost; the first and the third are lost and get the state of any other, also without
    hearing that it is not trusted any more."""

    def __init__(self, wrong_from: int) -> None:
        self.comparison = compared()
        self.replicas = [Replica(slot) for slot in SLOTS[:3]]
        self.committed = (-1, chained_digest_from(-1), False)
        self.wrong_from: int | None = wrong_from
        self.moving: dict[int, tuple[int, str, bool]] = {}  # to a borrower
        self.now = 0.0
        for replica in self.replicas:
            self.restore(replica)

    def restore(self, replica: Replica) -> None:
        replica.start(*self.committed)
        replica.restored_from = self.committed[0]
        self.report(replica)

    def report(self, replica: Replica) -> None:
        newest = {e: replica.results[e] for e in sorted(replica.results)[-16:]}
        restored_from = replica.restored_from if replica.started else None
        self.comparison.observed(replica.by, newest, restored_from, replica.copied_through)

    def lose(self, at: int, lender: int) -> None:
        giver, old = self.replicas[lender], self.replicas[at]
        if at == lender or at == 1 or not giver.started or at in self.moving:
            return
        self.comparison.forget(old.slot)
        new = self.replicas[at] = Replica(old.slot, old.incarnation + 1)
        self.report(new)
        if self.comparison.is_untrusted(giver.slot):
            self.restore(new)
        else:
            self.moving[at] = (giver.epoch, giver.chained, giver.wrong)

    def start(self, at: int) -> None:
        if at in self.moving:
            borrower = self.replicas[at]
            borrower.start(*self.moving.pop(at))
            borrower.copied_through = borrower.epoch
            self.report(borrower)

    def compute(self, at: int, epochs: int) -> None:
        replica = self.replicas[at]
        ahead = min(r.epoch for r in self.replicas) + 30  # digests of 64 epochs are kept
        for _ in range(epochs):
            if replica.started and replica.epoch < ahead:
                faulty = at == 0 and self.wrong_from is not None
                replica.compute(faulty and replica.epoch + 1 >= (self.wrong_from or 0))
        self.report(replica)

    def commit(self, at: int) -> None:
        replica, comparison = self.replicas[at], self.comparison
        if not replica.started or replica.epoch <= self.committed[0]:
            return
        if comparison.is_untrusted(replica.slot) or replica.epoch not in replica.results:
            return
        others = [r for r in self.replicas if r is not replica and r.started]
        agreed = [comparison.agree_through(replica.slot, r.slot) for r in others]
        if replica.epoch <= comparison.witnessed(MID) or min(agreed, default=0) >= replica.epoch:
            assert not replica.wrong
            self.committed = (replica.epoch, replica.chained, False)
            comparison.committed(replica.by, replica.epoch)

    def obey(self) -> None:
        """Tasks compute again, diverged ones are replaced, by one on another node."""
        self.now += 30.0
        alive = [r.by for r in self.replicas]
        self.comparison.request_recomputation(MID, alive, self.now)
        for at, replica in enumerate(self.replicas):
            if replica.slot in self.comparison.diverged:
                assert at == 0, "only one was wrong"
                self.wrong_from = None
                self.moving.pop(at, None)
                self.comparison.forget(replica.slot)
                self.replicas[at] = Replica(replica.slot, replica.incarnation + 1)
                self.restore(self.replicas[at])
            elif self.comparison.boot_to_restart(replica.slot) == replica.by.boot:
                self.moving.pop(at, None)
                replica.reboot()
                self.restore(replica)


steps = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("lose"), st.sampled_from([0, 2, 2]), st.integers(0, 2)),
    st.tuples(st.just("start"), st.integers(0, 2)),
    st.tuples(st.just("commit"), st.integers(0, 2)),
    st.tuples(st.just("obey")),
)


@given(
    st.integers(0, 6),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 6),
    st.lists(steps, max_size=20),
)
def test_no_wrong_result_is_committed_and_no_right_replica_is_replaced(
    wrong_from: int, lead: int, starts: bool, follows: int, history: list[tuple[str, int]]
) -> None:
    """Each history begins with what random steps seldom reach: the third replica gets the state of
    the first one, which is `lead` epochs ahead, and may compute `follows` more."""
    world = Histories(wrong_from)
    world.compute(0, lead)
    world.lose(2, lender=0)
    if starts:
        world.start(2)
        world.compute(2, follows)
    for name, *arguments in history:
        getattr(world, name)(*arguments)
    for _ in range(20):
        for at in range(3):
            world.start(at)
            world.compute(at, 3)
            world.commit(at)
        world.obey()
    assert not world.comparison.disputes
    assert not [r for r in world.replicas if r.wrong]


# --- the coordinator ---


@pytest.mark.parametrize("lag", [3, 8])
def test_the_results_of_a_wrong_lender_are_never_committed(lag: int) -> None:
    """Replica 0 is wrong, 1 is right and some epochs behind, 2 borrows the state of 0."""
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=3, query=True)]
    world = World(parts, lends=True)
    world.start_all()
    world.run_epochs(9)
    lender, other, copy = (by.slot for by in (LENDER, OTHER, COPY))
    world.tasks[lender].corruption = "!"
    world.kill(copy)
    world.run_while_stuck(other, 1)
    world.start_task(copy)
    world.run_while_stuck(other, 1 + lag)
    assert world.tasks[copy].core.status.lent_from is not None
    assert world.tasks[copy].state_corruption == "!"
    for _ in range(20):
        world.run_epochs(1)
        objects = [ref.object for refs in world.store[-1].entries.values() for ref in refs]
        assert not [name for name in objects if name and "!" in name]
    assert world.reports[-1]["diverged"] == [lender.key]
    assert world.tasks[copy].state_corruption == ""
    assert world.store[-1].entries["mid/0"][0].epoch > world.head - 8


def world_with_copy(lender: Slot, copy: Slot) -> World:
    """A replica was lost, and has just started from the state of the other one."""
    parts = [SimulatedSegment("src"), SimulatedSegment("mid", ("src",), replicas=2, query=True)]
    world = World(parts, lends=True)
    world.start_all()
    world.run_epochs(9)
    world.kill(copy)
    world.start_task(copy)
    world.run_while_stuck(copy, 2)
    assert world.tasks[copy].core.status.lent_from is not None
    return world


@pytest.mark.parametrize("stuck_epochs", [10, 22])
def test_checkpoints_wait_for_a_copy_that_has_not_computed_anything_yet(stuck_epochs: int) -> None:
    """Until it is 16 epochs behind. After it has started, its partner becomes wrong."""
    lender, copy = SLOTS[0], SLOTS[1]
    world = world_with_copy(lender, copy)
    world.work(copy, 0)
    world.poll_rounds(2)
    assert world.tasks[copy].phase is TaskPhase.CATCHING_UP
    world.tasks[lender].corruption = "!"
    world.run_while_stuck(copy, stuck_epochs)
    objects = [ref.object for refs in world.store[-1].entries.values() for ref in refs]
    assert any(name and "!" in name for name in objects) == (stuck_epochs > 16)


def test_a_lender_and_its_copy_commit_while_they_are_alone() -> None:
    lender, copy = SLOTS[0], SLOTS[1]
    world = world_with_copy(lender, copy)
    lent_from = world.tasks[copy].core.status.lent_from
    assert lent_from is not None
    world.run_epochs(8)
    assert world.store[-1].entries["mid/0"][0].epoch > lent_from
    assert world.tasks[copy].core.status.lent_from == lent_from
    assert world.tasks[copy].phase is TaskPhase.LIVE
