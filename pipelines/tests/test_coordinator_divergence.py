"""Of two replicas that disagree neither is trusted: a third result decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from coordinator_world import DIAMOND, World, next_polls, started
from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.agreement.comparison import RECOMPUTATION_TIMEOUT_S, DigestComparison
from rekindle.coordinator.agreement.containment import Containment
from rekindle.coordinator.agreement.results import Computation, EpochDigests, epoch_digests
from rekindle.coordinator.checkpoints.committer import Committer
from rekindle.coordinator.model import Pod
from rekindle.coordinator.tasks.membership import Membership
from rekindle.protocol import (
    Contained,
    Contradiction,
    EntryRef,
    PollResponse,
    TaskPhase,
    TaskRef,
)
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.topology.model import Partition, Slot
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment, make_generation
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build

pytestmark = pytest.mark.simulated

LEFT = Partition("left", 0)
REPLICAS = (Slot("left", 0, 0), Slot("left", 0, 1))
BOTH = Slot("both", 0, 0)


def chained(digests: list[str], base: int = -1) -> dict[int, EpochDigests]:
    results, before = {}, chained_digest_from(base)
    for epoch, digest in enumerate(digests, base + 1):
        before = chain_digest(before, epoch, 0, digest)
        results[epoch] = EpochDigests(before, digest)
    return results


def newest(results: dict[int, EpochDigests], count: int = 16) -> dict[int, EpochDigests]:
    return {e: results[e] for e in sorted(results)[-count:]}


def computation(replica: int, incarnation: int = 1, boot: str = "a") -> Computation:
    return Computation(REPLICAS[replica], incarnation, boot)


# --- the comparison ---


@given(length=st.integers(20, 200), data=st.data())
def test_any_difference_shows_in_the_newest_epochs(length: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, length - 1))
    good = [f"d{e}" for e in range(length)]
    bad = [*good[:wrong], "other", *good[wrong + 1 :]]
    comparison = DigestComparison()
    comparison.observed(computation(0), newest(chained(good)))
    comparison.observed(computation(1), newest(chained(bad)))
    assert LEFT in comparison.disputes


@given(base=st.integers(0, 40), length=st.integers(42, 90))
def test_digests_of_different_bases_are_compared_one_by_one(base: int, length: int) -> None:
    digests = [f"d{e}" for e in range(length)]
    comparison = DigestComparison()
    comparison.observed(computation(0), newest(chained(digests)))
    comparison.observed(computation(1), newest(chained(digests[base + 1 :], base)))
    assert not comparison.disputes
    assert comparison.witnessed(LEFT) == length - 1


def test_a_state_that_differs_is_disputed() -> None:
    comparison = DigestComparison()
    for replica, state in enumerate(("s", "t")):
        comparison.observed(computation(replica), {3: EpochDigests("-1:c", "d", state)})
    assert comparison.disputes[LEFT].digest_name == "state"


def disputed() -> DigestComparison:
    comparison = DigestComparison()
    comparison.observed(computation(0), chained(["d0", "right"]))
    comparison.observed(computation(1), chained(["d0", "wrong"]))
    assert comparison.disputes[LEFT].agreed_through == 0
    return comparison


def disputed_and_replaced() -> DigestComparison:
    """Both repeat their results, and replica 1 is replaced."""
    comparison = disputed()
    comparison.observed(computation(0, boot="b"), chained(["d0", "right"]))
    comparison.observed(computation(1, boot="b"), chained(["d0", "wrong"]))
    both = [computation(0, boot="b"), computation(1, boot="b")]
    comparison.request_recomputation(LEFT, both, now=0.0)
    assert comparison.diverged.keys() == {REPLICAS[1]}
    comparison.forget(REPLICAS[1])
    return comparison


def test_neither_of_two_replicas_is_trusted() -> None:
    comparison = disputed()
    assert not comparison.diverged
    assert all(comparison.is_untrusted(slot) for slot in REPLICAS)


@pytest.mark.parametrize(("result", "wrong"), [("right", 1), ("wrong", 0)])
def test_a_third_node_decides_for_two_of_three(result: str, wrong: int) -> None:
    comparison = disputed()
    comparison.observed(Computation(Slot("left", 0, 2), 1, "c"), chained(["d0", result]))
    assert set(comparison.diverged) == {REPLICAS[wrong]}
    assert not comparison.disputes


def test_a_diverged_replica_decides_nothing() -> None:
    """It runs until the operator has replaced it."""
    comparison = DigestComparison()
    by = [computation(0), computation(1), Computation(Slot("left", 0, 2), 1, "a")]
    for one, digest in zip(by, ("d0", "d0", "wrong"), strict=True):
        comparison.observed(one, chained([digest]))
    assert comparison.diverged.keys() == {by[2].slot}
    comparison.observed(by[0], chained(["d0", "right"]))
    comparison.observed(by[1], chained(["d0", "flaky"]))
    before = comparison.disputes[LEFT]
    comparison.observed(by[2], chained(["wrong", "other"]))
    assert comparison.disputes[LEFT] == before
    comparison.request_recomputation(LEFT, by, now=0.0)
    assert comparison.boot_to_restart(by[1].slot) == "a", "nobody waits for its result"
    comparison.observed(Computation(by[2].slot, 2, "a"), chained(["d0", "right"]))
    assert comparison.diverged.keys() == {by[1].slot}


def test_a_replica_that_has_ended_is_not_named() -> None:
    """Its result was wrong, but nothing has to be replaced."""
    comparison = disputed()
    comparison.forget(REPLICAS[1])
    comparison.observed(Computation(Slot("left", 0, 2), 1, "c"), chained(["d0", "right"]))
    assert not comparison.disputes
    assert not comparison.diverged


def test_a_replica_that_is_about_to_compute_again_is_named() -> None:
    comparison = disputed()
    comparison.request_recomputation(LEFT, [computation(0), computation(1)], now=0.0)
    comparison.observed(Computation(Slot("left", 0, 2), 1, "c"), chained(["d0", "right"]))
    assert comparison.diverged.keys() == {REPLICAS[1]}
    assert comparison.boot_to_restart(REPLICAS[1]) is None


def test_a_replica_that_changes_its_result_has_diverged() -> None:
    comparison = disputed()
    comparison.observed(computation(1, boot="b"), chained(["d0", "right"]))
    assert set(comparison.diverged) == {REPLICAS[1]}


def test_a_replica_that_repeats_itself_decides_nothing() -> None:
    comparison = disputed()
    comparison.observed(computation(1, boot="b"), chained(["d0", "wrong"]))
    assert not comparison.diverged
    comparison.request_recomputation(LEFT, [computation(0), computation(1, boot="b")], now=100.0)
    assert comparison.boot_to_restart(REPLICAS[0]) == "a"
    assert comparison.boot_to_restart(REPLICAS[1]) is None


def test_when_both_repeat_themselves_one_is_replaced() -> None:
    comparison = disputed()
    for replica, result in enumerate(("right", "wrong")):
        comparison.observed(computation(replica, boot="b"), chained(["d0", result]))
    alive = [computation(0, boot="b"), computation(1, boot="b")]
    comparison.request_recomputation(LEFT, alive, now=100.0)
    assert set(comparison.diverged) == {REPLICAS[1]}
    comparison.observed(computation(1, incarnation=2), chained(["d0", "right"]))
    assert not comparison.diverged
    assert not comparison.disputes


def unresolved() -> DigestComparison:
    """Both contradict themselves."""
    comparison = disputed()
    for replica, result in ((1, "third"), (0, "fourth")):
        comparison.observed(computation(replica, boot="b"), chained(["d0", result]))
    return comparison


def test_replicas_that_all_contradict_themselves_decide_nothing() -> None:
    comparison = unresolved()
    assert comparison.disputes[LEFT].unresolved
    alive = [computation(0, boot="b"), computation(1, boot="b")]
    comparison.request_recomputation(LEFT, alive, now=1000.0)
    assert comparison.boot_to_restart(REPLICAS[0]) is None
    assert not comparison.diverged


@pytest.mark.parametrize("flaky", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_replica_that_contradicts_itself_is_replaced(flaky: int, first: int) -> None:
    comparison = disputed()
    for replica in (first, 1 - first):
        result = "third" if replica == flaky else ("right", "wrong")[replica]
        comparison.observed(computation(replica, boot="b"), chained(["d0", result]))
    assert set(comparison.diverged) == {REPLICAS[flaky]}
    comparison.forget(REPLICAS[flaky])
    result = ("wrong", "right")[flaky]  # twice the result of the other one
    comparison.observed(computation(flaky, incarnation=2), chained(["d0", result]))
    assert not comparison.disputes
    assert not comparison.diverged


def test_after_a_contradiction_the_other_replica_computes_again() -> None:
    comparison = disputed()
    comparison.observed(computation(1, boot="b"), chained(["d0", "third"]))
    assert not comparison.diverged
    comparison.request_recomputation(LEFT, [computation(0), computation(1, boot="b")], now=1000.0)
    assert comparison.boot_to_restart(REPLICAS[0]) == "a"
    assert comparison.boot_to_restart(REPLICAS[1]) is None


def test_a_dispute_ends_if_no_boot_can_be_compared_with_it() -> None:
    comparison = DigestComparison()
    digests = [f"d{e}" for e in range(30)]
    comparison.observed(computation(0), newest(chained(digests)))
    comparison.observed(computation(1), newest(chained([*digests[:20], "other", *digests[21:]])))
    # Restored from an entry of a generation whose operators are fused into other segments.
    again = chained(digests[11:], 10)
    comparison.observed(computation(1, boot="b"), again, restored_from=10)
    assert LEFT in comparison.disputes
    comparison.observed(computation(0, boot="b"), again, restored_from=10)
    assert LEFT not in comparison.disputes
    assert comparison.witnessed(LEFT) == 29


def test_a_checkpoint_of_a_later_epoch_ends_the_dispute_and_nobody_goes_on_without_it() -> None:
    """Both were behind a checkpoint, and one computes again from it: the other one may be wrong."""
    comparison = disputed()
    both = [computation(0), computation(1)]
    comparison.request_recomputation(LEFT, both, now=0.0)
    assert comparison.observed(computation(1, boot="b"), {}, restored_from=7)
    assert not comparison.disputes
    assert comparison.boot_to_restart(REPLICAS[0]) == computation(0).boot
    assert comparison.boot_to_restart(REPLICAS[1]) is None
    assert comparison.is_untrusted(REPLICAS[0])
    assert not comparison.is_untrusted(REPLICAS[1])
    comparison.observed(computation(0, boot="b"), {}, restored_from=7)
    assert not comparison.is_untrusted(REPLICAS[0])


def alone_and_then_superseded(agreed: list[str], checkpoint: int) -> DigestComparison:
    """Replica 0 has computed all, and another one the first epochs. Its next incarnation
    differs, and computes again from a checkpoint beyond that."""
    comparison = DigestComparison()
    digests = [f"d{e}" for e in range(12)]
    comparison.observed(computation(0), chained(digests))
    comparison.observed(computation(1), chained(agreed))
    comparison.committed(computation(0), checkpoint)
    comparison.forget(REPLICAS[1])
    comparison.observed(computation(1, 2), chained([*digests[:5], "other"]), restored_from=-1)
    comparison.observed(computation(1, 2, "b"), {}, restored_from=checkpoint)
    assert not comparison.disputes
    return comparison


def test_a_checkpoint_that_one_replica_computed_decides_nothing_silently() -> None:
    comparison = alone_and_then_superseded(["d0", "d1"], checkpoint=8)
    (found,) = comparison.unverified
    assert (found.partition, found.agreed_through, found.checkpoint) == (LEFT, 4, 8)


def test_a_checkpoint_that_two_replicas_computed_ends_a_dispute_for_good() -> None:
    comparison = alone_and_then_superseded([f"d{e}" for e in range(10)], checkpoint=8)
    assert not comparison.unverified


@pytest.mark.parametrize("again", ["right", "wrong"])
def test_a_dispute_goes_on_while_its_parties_compute_again(again: str) -> None:
    """They may have read a wrong epoch: but one of them may be wrong by itself, and is so again."""
    comparison = disputed()
    comparison.discard([computation(0), computation(1)])
    assert not comparison.disputes[LEFT].results
    comparison.observed(computation(1, boot="b"), chained(["d0", again]))
    assert all(comparison.is_untrusted(slot) for slot in REPLICAS)
    comparison.observed(computation(0, boot="b"), chained(["d0", "right"]))
    assert (LEFT in comparison.disputes) == (again == "wrong")
    assert not comparison.diverged


def test_an_unresolved_dispute_is_open_again_if_a_party_has_to_compute_again() -> None:
    comparison = disputed()
    comparison.observed(Computation(Slot("left", 0, 2), 1, "c"), chained(["d0", "another"]))
    assert comparison.disputes[LEFT].unresolved
    comparison.discard([computation(1)])
    assert not comparison.disputes[LEFT].unresolved
    comparison.observed(computation(1, boot="b"), chained(["d0", "right"]))
    assert comparison.diverged.keys() == {Slot("left", 0, 2)}


def test_an_unresolved_dispute_ends_with_its_parties() -> None:
    comparison = unresolved()
    comparison.forget(REPLICAS[0])
    assert LEFT in comparison.disputes
    comparison.forget(REPLICAS[1])
    assert LEFT not in comparison.disputes


def test_a_new_node_that_agrees_ends_an_unresolved_dispute() -> None:
    comparison = disputed_and_replaced()
    comparison.observed(computation(1, incarnation=2), chained(["d0", "third"]))
    assert comparison.disputes[LEFT].unresolved
    comparison.forget(REPLICAS[1])
    comparison.observed(computation(1, incarnation=3), chained(["d0", "right"]))
    assert not comparison.disputes
    assert not comparison.diverged


def test_the_next_incarnation_of_a_lost_replica_repeats_its_result() -> None:
    """It may be on the same faulty node."""
    comparison = disputed()
    comparison.forget(REPLICAS[1])
    comparison.observed(computation(1, incarnation=2), chained(["d0", "wrong"]))
    assert not comparison.diverged
    assert comparison.disputes[LEFT].repeated == {REPLICAS[1]}
    comparison.observed(computation(0, boot="b"), chained(["d0", "right"]))
    alive = [computation(0, boot="b"), computation(1, incarnation=2)]
    comparison.request_recomputation(LEFT, alive, now=0.0)
    assert comparison.diverged.keys() == {REPLICAS[1]}
    comparison.forget(REPLICAS[1])
    comparison.observed(computation(1, incarnation=3), chained(["d0", "right"]))
    assert not comparison.disputes


def test_a_node_that_was_replaced_for_a_dispute_is_another_witness() -> None:
    """Although its result is that of the replica before: then the other one was wrong."""
    comparison = disputed_and_replaced()
    comparison.observed(computation(1, incarnation=2), chained(["d0", "wrong"]))
    assert comparison.diverged.keys() == {REPLICAS[0]}


def on_node(computation: Computation, node: str) -> Computation:
    return replace(computation, node=node)


def replaced_on_a_node(node: str) -> DigestComparison:
    """Both repeat their results; replica 1, of node-1, is replaced and runs on `node`, where its
    result is still that of node-1."""
    comparison = DigestComparison()
    for boot in "ab":
        for replica, result in enumerate(("right", "wrong")):
            by = on_node(computation(replica, boot=boot), f"node-{replica}")
            comparison.observed(by, chained(["d0", result]))
    both = [computation(0, boot="b"), computation(1, boot="b")]
    comparison.request_recomputation(LEFT, both, now=0.0)
    assert comparison.diverged.keys() == {REPLICAS[1]}
    comparison.forget(REPLICAS[1])
    by = on_node(computation(1, incarnation=2), node)
    comparison.observed(by, chained(["d0", "wrong"]))
    return comparison


def test_a_replaced_replica_on_the_same_node_decides_nothing() -> None:
    comparison = replaced_on_a_node("node-1")
    assert not comparison.diverged
    assert LEFT in comparison.disputes
    both = [computation(0, boot="b"), computation(1, incarnation=2)]
    comparison.request_recomputation(LEFT, both, now=1.0)
    assert comparison.diverged.keys() == {REPLICAS[1]}, "it is replaced until another node decides"
    comparison.forget(REPLICAS[1])
    by = on_node(computation(1, incarnation=3), "node-2")
    comparison.observed(by, chained(["d0", "right"]))
    assert not comparison.disputes
    assert not comparison.diverged


def test_a_replaced_replica_on_another_node_decides() -> None:
    comparison = replaced_on_a_node("node-2")
    assert comparison.diverged.keys() == {REPLICAS[0]}


def test_a_lost_replica_that_runs_on_another_node_decides() -> None:
    comparison = DigestComparison()
    for replica, result in enumerate(("right", "wrong")):
        by = on_node(computation(replica), f"node-{replica}")
        comparison.observed(by, chained(["d0", result]))
    comparison.forget(REPLICAS[1])
    by = on_node(computation(1, incarnation=2), "node-2")
    comparison.observed(by, chained(["d0", "right"]))
    assert not comparison.disputes


def test_a_node_is_one_witness_whichever_replica_runs_on_it() -> None:
    comparison = DigestComparison()
    for replica, result in enumerate(("right", "wrong")):
        by = on_node(computation(replica), f"node-{replica}")
        comparison.observed(by, chained(["d0", result]))
    for slot in REPLICAS:
        comparison.forget(slot)
    by = on_node(computation(0, incarnation=2), "node-1")
    comparison.observed(by, chained(["d0", "wrong"]))
    assert not comparison.diverged
    assert LEFT in comparison.disputes


def test_only_one_replica_computes_again_at_a_time() -> None:
    comparison = disputed()
    both = [computation(0), computation(1)]
    comparison.request_recomputation(LEFT, both, now=100.0)
    comparison.request_recomputation(LEFT, both, now=101.0)
    restarted = [comparison.boot_to_restart(slot) for slot in REPLICAS]
    assert restarted == [None, "a"]
    comparison.request_recomputation(LEFT, [computation(0)], now=101.0 + RECOMPUTATION_TIMEOUT_S)
    assert comparison.boot_to_restart(REPLICAS[0]) == "a"


def test_no_other_replica_computes_again_while_one_waits_for_a_restore_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may be unavailable; then the other one would wait, too."""
    timeout_s = 8
    name = "rekindle.coordinator.agreement.comparison.RECOMPUTATION_TIMEOUT_S"
    monkeypatch.setattr(name, float(timeout_s))
    world = started()
    world.store_up = False
    world.run_epochs(8)
    world.tasks[REPLICAS[0]].corruption = "!"
    for _ in range(2 * timeout_s):
        world.run_epochs(1)
    assert world.tasks[REPLICAS[1]].phase is TaskPhase.WAITING
    assert [world.tasks[slot].boot for slot in REPLICAS] == [0, 1]
    world.store_up = True
    world.tasks[REPLICAS[0]].corruption = ""
    world.run_while_stuck(REPLICAS[1], timeout_s - 5)
    assert [world.tasks[slot].boot for slot in REPLICAS] == [0, 1]
    world.run_while_stuck(REPLICAS[1], 8)
    assert [world.tasks[slot].boot for slot in REPLICAS] == [1, 1]


def test_a_response_of_an_older_release_has_only_digests() -> None:
    ref = {"segment": "left", "partition": 0, "replica": 0, "incarnation": 1}
    response = PollResponse(task=ref, boot_id="a", fence=1, phase="Live", digests={3: "d"})
    assert epoch_digests(response) == {3: EpochDigests(None, "d", None)}


# --- the coordinator ---


@copy_of_one_build
def with_wrong_replica(replica: int, *, forever: bool = False, epochs: int = 12) -> World:
    """A replica computes wrongly from some epoch on, in its first boot only or always."""
    world = started()
    corrupt = REPLICAS[replica]
    world.tasks[corrupt].corruption, world.tasks[corrupt].corrupt_from = "!", 10
    for _ in range(epochs):
        world.run_epochs(1)
        if not forever and world.tasks[corrupt].boot:
            world.tasks[corrupt].corruption = ""
    return world


def committed_objects(world: World) -> set[str]:
    refs = (ref for manifest in world.store for entry in manifest.entries.values() for ref in entry)
    return {ref.object for ref in refs if ref.object}


@pytest.mark.parametrize("corrupt", [0, 1])
def test_the_wrong_replica_is_named_whatever_its_index(corrupt: int) -> None:
    world = with_wrong_replica(corrupt)
    assert world.reports[-1]["diverged"] == [REPLICAS[corrupt].key]


def test_results_of_a_wrong_replica_are_never_committed() -> None:
    world = with_wrong_replica(1)
    assert not [name for name in committed_objects(world) if "!" in name]


def test_results_of_a_replica_that_is_always_wrong_are_never_committed() -> None:
    world = with_wrong_replica(0, forever=True, epochs=16)
    assert not [name for name in committed_objects(world) if "!" in name]


@pytest.mark.parametrize("corrupt", [0, 1])
def test_readers_of_a_wrong_epoch_compute_again(corrupt: int) -> None:
    world = with_wrong_replica(corrupt)
    assert world.tasks[BOTH].boot == 1
    assert world.tasks[BOTH].state_corruption == ""


def test_readers_of_a_contradicted_result_compute_again() -> None:
    world = started()
    newest = world.tasks[REPLICAS[0]].state_epoch
    result = Contradiction(epoch=newest, message="epoch differs")
    world.tasks[REPLICAS[0]].contradiction = result
    world.poll_rounds(8)
    assert world.tasks[BOTH].boot == 1, "once, however often it is reported"
    assert [world.tasks[slot].boot for slot in REPLICAS] == [0, 0]
    assert world.reports[-1]["inconsistent"] == ["left/0: epoch differs"]
    world.tasks[REPLICAS[0]].contradiction = None
    world.run_epochs(8)
    assert world.reports[-1]["inconsistent"] == []
    assert world.store[-1].epoch > newest


SOURCE, AGG = Partition("src", 0), Partition("agg", 0)
READERS = (Slot("agg", 0, 0), Slot("agg", 0, 1))


@copy_of_one_build
def readers(replicas: int = 2) -> World:
    """Replicas that read a source, and agree."""
    parts = (
        SimulatedSegment("src", replicas=2),
        SimulatedSegment("agg", ("src",), replicas=replicas, query=True),
    )
    world = World(parts)
    world.start_all()
    world.run_epochs(10)
    return world


def source_was_wrong(world: World, epoch: int) -> None:
    """All that read the source compute again."""
    source = world.tasks[Slot("src", 0, 0)]
    source.contradiction = Contradiction(epoch=epoch, message="epoch differs")
    world.poll(source.slot)


def test_what_agreed_on_a_wrong_input_has_not_agreed() -> None:
    world = readers()
    comparison = world.coordinator.containment.comparison
    assert comparison.witnessed(AGG) == world.head
    source_was_wrong(world, world.head - 1)
    assert comparison.witnessed(AGG) == comparison.witnessed(SOURCE) == world.head - 2


def agreed_through_15() -> World:
    """The replicas that read the source have agreed on a checkpoint that is not committed yet."""
    world = readers()
    world.run_epochs(3)
    for _ in range(3):
        world.release_epochs()
        for slot in world.tasks:
            world.work(slot, 1)
    for slot in READERS:
        world.poll(slot)
    assert world.coordinator.containment.comparison.witnessed(AGG) == 15
    return world


def compute_again(world: World) -> None:
    """The replica that is ahead has wrong results this time."""
    ahead = world.tasks[READERS[0]]
    ahead.corruption, ahead.corrupt_from = "!", 14
    for _ in range(3):
        world.poll_round()
        for slot in READERS:
            world.work(slot, 1)
    world.poll_round()
    world.run_while_stuck(READERS[1], 6)
    assert ahead.state_corruption == "!"


def test_agreement_on_a_wrong_input_commits_no_wrong_result() -> None:
    world = agreed_through_15()
    source_was_wrong(world, 13)
    compute_again(world)
    assert world.store[-1].entries["src/0"][0].epoch > 11
    assert not [name for name in committed_objects(world) if "!" in name]


def test_agreement_of_boots_that_have_ended_commits_no_result_of_new_ones() -> None:
    world = agreed_through_15()
    for slot in READERS:
        world.tasks[slot].reboot()
    compute_again(world)
    world.run_epochs(2)
    assert not [name for name in committed_objects(world) if "!" in name]
    assert "replicas disagree on epoch 14" in world.reports[-1]["inconsistent"][0]


def test_a_task_that_has_computed_again_is_trusted_while_another_engine_runs() -> None:
    """It may be the one for which a roll waits."""
    world = readers(replicas=3)
    late = Slot("agg", 0, 2)
    world.tasks[READERS[1]].engine = "e2"
    world.poll_rounds(2)
    source_was_wrong(world, world.head)
    world.tasks[late].frozen = True
    for _ in range(3):
        world.poll_round()
        for slot in READERS:
            world.work(slot, 8)
    world.tasks[late].frozen = False
    world.run_epochs(6)
    comparison = world.coordinator.containment.comparison
    assert not [slot for slot in world.tasks if comparison.is_untrusted(slot)]


def results(through: int, state: str | None = None) -> dict[int, EpochDigests]:
    """Of epochs, the last one with the digest of its state."""
    found = {e: EpochDigests(f"-1:c{e}", f"d{e}") for e in range(through)}
    return {**found, through: EpochDigests(f"-1:c{through}", f"d{through}", state)}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_checkpoint_with_a_state_that_only_one_has_is_reported(replicas: int) -> None:
    """Their output is equal, so the checkpoint was committed."""
    comparison = DigestComparison()
    boots = [Computation(Slot("left", 0, replica), 1, "a") for replica in range(replicas)]
    for boot in boots:
        comparison.observed(boot, results(5))
    comparison.observed(boots[0], results(5, "s"))
    comparison.committed(boots[0], 5)
    for boot in boots[2:]:
        comparison.observed(boot, results(5, "s"))
    comparison.observed(boots[1], results(5, "t"))
    comparison.checkpoint_differed(REPLICAS[1], incarnation=1, epoch=5)
    assert [u.checkpoint for u in comparison.unverified] == ([5] if replicas == 2 else [])


def test_nothing_is_kept_of_a_partition_that_an_edit_removed() -> None:
    comparison = DigestComparison()
    for replica in (0, 1):
        comparison.observed(computation(replica), results(5))
    comparison.checkpoint_differed(REPLICAS[1], incarnation=1, epoch=5)
    assert comparison.unverified
    assert comparison.witnessed(LEFT) == 5
    comparison.configured({SOURCE: 2})
    assert not comparison.unverified
    assert comparison.witnessed(LEFT) == -1


@pytest.mark.parametrize("diverged", [False, True])
def test_a_diverged_replica_that_waits_keeps_no_dispute_open(diverged: bool) -> None:
    comparison = DigestComparison()
    third = Computation(Slot("left", 0, 2), 1, "a")
    if diverged:
        comparison.observed(third, {})
        comparison.checkpoint_differed(third.slot, incarnation=1, epoch=3)
    comparison.observed(computation(0), chained(["d0", "x"]))
    comparison.observed(computation(1), chained(["d0", "y"]))
    parties = [computation(0), computation(1)]
    comparison.request_recomputation(LEFT, [*parties, third], 0.0, waiting=[third.slot])
    restarted = [slot for slot in REPLICAS[:2] if comparison.boot_to_restart(slot)]
    assert len(restarted) == diverged


def test_a_result_that_is_discarded_does_not_open_a_dispute_again() -> None:
    """A new coordinator reads that its input was wrong before it reads its own dispute."""
    comparison = DigestComparison()
    comparison.discard([computation(0)])
    disputed = {5: EpochDigests("-1:w", "w")}
    assert comparison.containment_inherited(computation(0), 4, disputed, REPLICAS)
    (dispute,) = comparison.disputes.values()
    assert not dispute.results


@pytest.mark.parametrize("has_result", [False, True])
def test_a_dispute_about_a_state_waits_until_a_state_is_saved(has_result: bool) -> None:
    comparison = DigestComparison()
    first = {5: EpochDigests("-1:c5", "d5") if has_result else None}
    by = computation(1, boot="a" if has_result else "b")
    comparison.containment_inherited(by, 4, first, REPLICAS, "state")
    for replica in (0, 1):
        comparison.observed(computation(replica, boot="b"), results(5), restored_from=3)
    for replica in (0, 1):
        comparison.observed(computation(replica, boot="b"), results(5, "s"), restored_from=3)
    assert not comparison.disputes
    assert not comparison.diverged


def test_results_of_a_wrong_input_decide_nothing_after_it() -> None:
    """Neither those of boots that have ended."""
    world = readers()
    both = [world.tasks[slot] for slot in READERS]
    for task, corruption in zip(both, "!?", strict=True):
        task.corruption, task.corrupt_from = corruption, world.head + 1
    world.release_epochs()
    while [task.boot for task in both] != [1, 1]:
        for slot in world.tasks:
            world.work(slot, 8)
        world.poll_round()
    (dispute,) = world.coordinator.containment.comparison.disputes.values()
    assert dispute.repeated == {READERS[1]}
    for task in both:
        task.corruption = ""
    source_was_wrong(world, world.head)
    world.run_epochs(4)
    assert world.reports[-1]["diverged"] == []
    assert world.reports[-1]["inconsistent"] == ["src/0: epoch differs"]


def test_a_verdict_from_results_of_a_wrong_input_does_not_count() -> None:
    """The one that was named may have been the only one that had read the right input."""
    world = readers(replicas=3)
    wrong = [world.tasks[slot] for slot in READERS]
    for task in wrong:
        task.corruption = "!"
    world.run_epochs(1)
    assert world.reports[-1]["diverged"] == ["agg/0/2"]
    for task in wrong:
        task.corruption = ""
    source_was_wrong(world, world.head)
    assert not world.coordinator.containment.comparison.diverged
    world.run_epochs(4)
    assert world.reports[-1]["diverged"] == []
    assert not [task for task in world.tasks.values() if task.state_corruption]


def test_readers_of_a_replica_that_differs_from_the_checkpoint_compute_again() -> None:
    """The replica that saved it has died, and nobody else has computed what they read."""
    world = started()
    wrong = world.tasks[REPLICAS[1]]
    wrong.frozen, world.hold_writes = True, True
    world.run_epochs(2)
    world.poll_rounds(2)  # the manifest with the entry at 11 is being written
    world.kill(REPLICAS[0])
    wrong.frozen, world.hold_writes = False, False
    wrong.corruption, wrong.corrupt_from = "!", 10
    world.poll_rounds(2)  # now it saves
    world.run_epochs(2)
    assert world.tasks[BOTH].state_corruption == "!"
    world.release_writes()
    assert world.store[-1].entries[LEFT.key][0].object == "left/0@11"
    world.run_epochs(1)
    assert world.reports[-1]["diverged"] == [REPLICAS[1].key]
    for slot in REPLICAS:
        world.start_task(slot)
    world.run_epochs(8)
    assert world.tasks[BOTH].boot == 1
    assert world.tasks[BOTH].state_corruption == ""
    assert not [name for name in committed_objects(world) if "!" in name]


@pytest.mark.parametrize(("through", "untrusted"), [(8, [3]), (5, [])])
def test_what_another_replica_has_agreed_with_is_right_although_the_state_differs(
    through: int, untrusted: list[int]
) -> None:
    comparison = DigestComparison()
    digests = [f"d{e}" for e in range(9)]
    comparison.observed(computation(0), chained(digests[:6]))
    comparison.observed(computation(1), chained(digests[: through + 1]))
    comparison.checkpoint_differed(REPLICAS[1], incarnation=1, epoch=3)
    assert [found.after for found in comparison.take_untrusted_output()] == untrusted


def test_a_contradiction_counts_while_the_partner_runs_another_engine() -> None:
    """Both of its results are of one engine."""
    world = started()
    world.tasks[REPLICAS[1]].engine = "e2"
    world.poll_rounds(1)
    newest = world.tasks[REPLICAS[0]].state_epoch
    world.tasks[REPLICAS[0]].contradiction = Contradiction(epoch=newest, message="epoch differs")
    world.poll_rounds(4)
    assert world.tasks[BOTH].boot == 1
    assert [world.tasks[slot].boot for slot in REPLICAS] == [0, 0]


def test_a_reader_that_ends_before_it_is_told_to_compute_again_serves_no_old_log() -> None:
    """It has no partners, so that its next boot would go on with the log."""
    world = started()
    world.tasks[REPLICAS[0]].corruption = "!"
    world.release_epochs()
    for slot in (Slot("src", 0, 0), *REPLICAS, Slot("left", 1, 0), Slot("right", 0, 0), BOTH):
        world.work(slot, 1)
    reader = world.tasks[BOTH]
    wrong = reader.state_epoch
    assert reader.state_corruption == "!"
    for slot in (*REPLICAS, Slot("right", 0, 0)):
        world.poll(slot)
    assert next_polls(world)[BOTH].recompute == reader.boot_id
    reader.reboot()
    for _ in range(4):
        world.poll(BOTH)
    assert reader.restored_from is not None
    assert reader.log_last <= reader.restored_from < wrong
    assert reader.boot == 1, "it need not end again"
    assert not next_polls(world)[BOTH].discard_log


@pytest.mark.parametrize("boots", ["b", "bc"])
def test_boots_after_one_that_had_to_compute_again_start_without_its_log(boots: str) -> None:
    """It may have ended by itself, and so may those that follow."""
    comparison = DigestComparison()
    comparison.configured({LEFT: 1})
    comparison.observed(computation(0), chained(["d0"]), restored_from=-1)
    comparison.discard([computation(0)])
    for boot in boots:
        comparison.observed(computation(0, boot=boot), {})
        assert comparison.discards_log(REPLICAS[0])
    comparison.observed(computation(0, boot=boots[-1]), {}, restored_from=-1)
    assert not comparison.discards_log(REPLICAS[0])
    comparison.observed(computation(0, boot="d"), {})
    assert not comparison.discards_log(REPLICAS[0])


def test_sinks_wait_while_replicas_disagree() -> None:
    world = started()
    world.tasks[REPLICAS[1]].corruption = "!"
    agreed = world.tasks[REPLICAS[0]].state_epoch
    world.release_epochs()
    for slot in (Slot("src", 0, 0), *REPLICAS):
        world.work(slot, 1)
    world.poll_round()
    world.poll_round()
    polls = next_polls(world)
    held = {s: polls[s].sinks_through for s in (*REPLICAS, BOTH, Slot("left", 1, 0))}
    assert held == {
        REPLICAS[0]: agreed,
        REPLICAS[1]: agreed,
        BOTH: agreed,
        Slot("left", 1, 0): None,
    }


@pytest.mark.parametrize("corrupt", [0, 1])
def test_a_diverged_replica_writes_no_sink(corrupt: int) -> None:
    world = with_wrong_replica(corrupt)
    polls = next_polls(world)
    given = [polls[slot].sinks_through for slot in (REPLICAS[corrupt], REPLICAS[1 - corrupt])]
    assert given == [-1, None]


@pytest.mark.parametrize(("corrupt", "is_coordinator_new"), [(0, False), (1, True)])
def test_new_pods_compare_files_that_may_be_wrong(corrupt: int, is_coordinator_new: bool) -> None:
    """Those that had to compare them may be replaced before they do so."""
    world = with_wrong_replica(corrupt, forever=True, epochs=2)
    if is_coordinator_new:
        world.start_coordinator()
        world.run_epochs(1)
    new = (*REPLICAS, BOTH, Slot("right", 0, 0))
    for slot in new:
        world.start_task(slot)
        world.poll(slot)
    polls = next_polls(world)
    assert [polls[slot].compare_files for slot in new] == [True, True, True, False]
    world.run_epochs(4)
    assert not any(poll.compare_files for poll in next_polls(world).values()), "they have started"


def test_replicas_learn_in_which_digest_they_disagree() -> None:
    """They report it to the next coordinator."""
    world = started()
    world.tasks[REPLICAS[1]].corruption = "!"
    world.run_epochs(1)
    polls = next_polls(world)
    given = {polls[slot].disputed_digest for slot in REPLICAS}
    assert given == {"chained"}
    assert polls[BOTH].disputed_digest is None


def test_nobody_reads_replicas_that_disagree() -> None:
    world = started()
    world.tasks[REPLICAS[1]].corruption = "!"
    world.run_epochs(1)
    routes = {(u.stream, u.partition): u.endpoints for u in next_polls(world)[BOTH].upstreams}
    assert routes["op-left", 0] == ()
    assert len(routes["op-left", 1]) == 2


def test_sinks_and_checkpoints_go_on_after_a_decision() -> None:
    world = with_wrong_replica(1, epochs=8)
    corrupt = world.start_task(REPLICAS[1])  # the operator replaces it
    corrupt.corruption = ""
    before = world.store[-1].epoch
    world.run_epochs(12)
    polls = next_polls(world)
    assert {p.sinks_through for p in polls.values()} == {None}
    assert world.store[-1].epoch > before
    assert world.reports[-1]["inconsistent"] == []
    assert not world.undeliverable_epochs()


def test_a_third_node_outvotes_one_that_is_always_wrong() -> None:
    world = with_wrong_replica(0, forever=True, epochs=16)
    (named,) = world.reports[-1]["diverged"]
    replaced = next(slot for slot in REPLICAS if slot.key == named)
    world.start_task(replaced)  # on another node
    world.run_epochs(12)
    assert world.reports[-1]["diverged"] == [REPLICAS[0].key]


def test_a_faulty_node_is_not_trusted_because_its_replica_was_replaced() -> None:
    """Replica 1 is on it, and so is the first pod that replaces it."""
    world = started()
    world.nodes = {slot: f"node-{slot.replica_index}" for slot in REPLICAS}
    world.list_pods()
    world.tasks[REPLICAS[1]].corruption = "!"
    replaced = []
    for _ in range(20):
        world.run_epochs(1)
        for key in world.reports[-1]["diverged"]:
            replaced.append(key)
            slot = next(slot for slot in REPLICAS if slot.key == key)
            is_another = len(replaced) > 1
            world.nodes[slot] = "node-2" if is_another else f"node-{slot.replica_index}"
            world.start_task(slot).corruption = "" if is_another else "!"
    assert replaced == [REPLICAS[1].key] * 2
    assert world.reports[-1]["inconsistent"] == []
    assert world.store[-1].epoch > world.head - 8
    assert not [name for name in committed_objects(world) if "!" in name]


@pytest.mark.parametrize("corrupt", [0, 1])
def test_a_node_that_becomes_wrong_is_replaced(corrupt: int) -> None:
    world = started()
    world.tasks[
        REPLICAS[corrupt]
    ].corruption = "!"  # computed again, it is wrong in earlier epochs, too
    for _ in range(18):
        world.run_epochs(1)
        for key in world.reports[-1]["diverged"]:
            world.start_task(next(slot for slot in REPLICAS if slot.key == key))
    assert world.reports[-1]["inconsistent"] == []
    assert world.store[-1].epoch > world.head - 8
    assert not [name for name in committed_objects(world) if "!" in name]


def test_an_operator_that_is_not_deterministic_is_named() -> None:
    world = started()
    world.tasks[REPLICAS[0]].corruption = "!"
    for _ in range(16):
        world.run_epochs(1)
        if world.tasks[REPLICAS[1]].boot:
            world.tasks[REPLICAS[1]].corruption = "?"
    (result,) = world.reports[-1]["inconsistent"]
    assert result.startswith("left/0: epoch ")
    assert "operator left is not deterministic" in result


def edited(replicas: int, edit: str) -> World:
    """Replicas disagree, and then the topology is edited."""
    world = started()
    world.allow_migrations = True
    world.tasks[REPLICAS[1]].corruption = "!"
    world.run_epochs(1)
    assert world.reports[-1]["inconsistent"]
    left = SimulatedSegment("left", ("src",), 2, replicas, query=True, edit=edit)
    both = SimulatedSegment("both", ("left", "right"), query=True, edit=edit)
    parts = (DIAMOND[0], left, DIAMOND[2], both)
    world.change_generation(make_generation(parts, 2), keep_old_pods=True)
    for slot in world.generation.topology.slots():
        if slot not in world.tasks:
            world.start_task(slot)
    world.run_epochs(4)
    for slot in set(world.tasks) - set(world.generation.topology.slots()):
        world.kill(slot)
    world.run_epochs(8)
    return world


@pytest.mark.parametrize(("replicas", "edit"), [(1, ""), (2, "2")])
def test_a_dispute_ends_with_the_replicas_that_were_compared(replicas: int, edit: str) -> None:
    world = edited(replicas, edit)
    assert world.reports[-1]["inconsistent"] == []
    assert {poll.sinks_through for poll in next_polls(world).values()} == {None}
    assert world.store[-1].epoch > world.head - 8
    assert world.tasks[Slot(f"both{edit}", 0, 0)].state_epoch > world.head - 4


def cut_otherwise(*, is_coordinator_new: bool) -> World:
    """Replicas of a segment disagree, and then an edit reads a stream inside of it, so that its
    operators are in two segments."""
    src = SimulatedSegment("src")
    chain = SimulatedSegment("chain", ("src",), replicas=2, query=True, operators=("a", "b"))
    reader = SimulatedSegment("reader", ("chain",), query=True)
    world = World((src, chain, reader, SimulatedSegment("other", ("src",), query=True)))
    world.start_all()
    world.run_epochs(10)
    world.allow_migrations = True
    world.tasks[Slot("chain", 0, 1)].corruption = "!"
    world.run_epochs(1)
    assert world.reports[-1]["inconsistent"]
    first = SimulatedSegment("first", ("src",), replicas=2, query=True, operators=("a",))
    rest = replace(chain, inputs=("first",), edit="2", operators=("b",))
    other = SimulatedSegment("other", ("src",), query=True)
    after = make_generation((src, first, rest, reader, other), 2)
    operator_ids = {**world.generation.operator_ids, **after.operator_ids}
    world.change_generation(replace(after, operator_ids=operator_ids), keep_old_pods=True)
    if is_coordinator_new:
        world.start_coordinator()
    world.run_epochs(2)
    return world


@pytest.mark.parametrize("is_coordinator_new", [False, True])
def test_new_pods_compare_files_that_an_older_segment_may_have_written(
    is_coordinator_new: bool,
) -> None:
    world = cut_otherwise(is_coordinator_new=is_coordinator_new)
    new = [Slot(name, 0, 0) for name in ("chain2", "reader", "other")]
    for slot in new:
        world.start_task(slot)
        world.poll(slot)
    polls = next_polls(world)
    assert [polls[slot].compare_files for slot in new] == [True, True, False]


def test_nothing_is_kept_of_slots_and_partitions_that_are_gone() -> None:
    world = with_wrong_replica(1, epochs=8)
    containment = world.coordinator.containment
    assert containment._untrusted == {LEFT}
    assert REPLICAS[1] in containment._reported
    world.kill(REPLICAS[1])
    assert REPLICAS[1] not in containment._reported
    world.allow_migrations = True
    world.change_generation(make_generation((DIAMOND[0], DIAMOND[2]), 2))
    assert not containment._untrusted
    assert containment._reported.keys() <= world.tasks.keys()


# --- a partition of one replica, in a planned move ---

OLD = Computation(Slot("left", 0, 0), 1, "a")
NEW = Computation(OLD.slot.alternate, 1, "a")


def again(computation: Computation, boot: str) -> Computation:
    return Computation(computation.slot, computation.incarnation, boot)


def disputed_move() -> DigestComparison:
    """The task and its successor compute different results."""
    comparison = DigestComparison()
    comparison.configured({LEFT: 1})
    comparison.observed(OLD, chained(["d0", "right"]))
    comparison.observed(NEW, chained(["d0", "wrong"]))
    assert comparison.disputes[LEFT].agreed_through == 0
    return comparison


def one_remains(computation: Computation) -> DigestComparison:
    """Of the disputed move, only this one is left; it computes again."""
    comparison = disputed_move()
    comparison.forget(OLD.slot if computation is NEW else NEW.slot)
    comparison.request_recomputation(LEFT, [computation], now=0.0, existing=[computation.slot])
    assert comparison.boot_to_restart(computation.slot) == "a"
    return comparison


def test_in_a_move_a_third_computation_decides() -> None:
    comparison = disputed_move()
    comparison.request_recomputation(LEFT, [OLD, NEW], now=0.0, existing=[OLD.slot, NEW.slot])
    assert comparison.boot_to_restart(NEW.slot) == "a"
    comparison.observed(again(NEW, "b"), chained(["d0", "right"]))
    assert not comparison.disputes
    assert comparison.diverged.keys() == {NEW.slot}


@pytest.mark.parametrize(("computation", "result"), [(OLD, "right"), (NEW, "wrong")])
def test_one_that_is_left_and_repeats_itself_is_accepted(
    computation: Computation, result: str
) -> None:
    comparison = one_remains(computation)
    comparison.observed(again(computation, "b"), chained(["d0", result]))
    assert comparison.disputes, "no other replica has the same result"
    comparison.request_recomputation(
        LEFT, [again(computation, "b")], now=1.0, existing=[computation.slot]
    )
    assert not comparison.disputes
    assert not comparison.diverged
    assert not comparison.is_untrusted(computation.slot)


def test_one_that_is_left_and_agrees_with_the_other_one_has_diverged() -> None:
    comparison = one_remains(NEW)
    comparison.observed(again(NEW, "b"), chained(["d0", "right"]))
    assert not comparison.disputes
    assert comparison.diverged.keys() == {NEW.slot}


def test_one_that_is_left_and_contradicts_itself_is_replaced() -> None:
    comparison = one_remains(OLD)
    comparison.observed(again(OLD, "b"), chained(["d0", "third"]))
    comparison.request_recomputation(LEFT, [again(OLD, "b")], now=1.0, existing=[OLD.slot])
    assert comparison.diverged.keys() == {OLD.slot}
    assert LEFT in comparison.disputes


def test_one_that_is_left_is_accepted_if_its_node_is_the_only_one() -> None:
    """Its next incarnation runs on the same node, so it is no second witness."""
    comparison = one_remains(OLD)
    comparison.observed(on_node(again(OLD, "b"), "node"), chained(["d0", "third"]))
    comparison.request_recomputation(LEFT, [again(OLD, "b")], now=1.0, existing=[OLD.slot])
    comparison.forget(OLD.slot)
    next_incarnation = replace(OLD, incarnation=2, node="node")
    comparison.observed(next_incarnation, chained(["d0", "third"]))
    comparison.request_recomputation(LEFT, [next_incarnation], now=2.0, existing=[OLD.slot])
    assert not comparison.disputes
    assert not comparison.is_untrusted(OLD.slot)


def test_nobody_is_accepted_while_another_one_is_to_start() -> None:
    comparison = disputed_move()
    for computation, result in ((NEW, "wrong"), (OLD, "right")):
        comparison.observed(again(computation, "b"), chained(["d0", result]))
    both = [again(OLD, "b"), again(NEW, "b")]
    comparison.request_recomputation(LEFT, both, now=1.0, existing=[OLD.slot, NEW.slot])
    assert comparison.diverged.keys() == {NEW.slot}
    comparison.forget(NEW.slot)
    # The next incarnation of the other one exists, and has not started.
    comparison.request_recomputation(LEFT, both[:1], now=2.0, existing=[OLD.slot, NEW.slot])
    assert LEFT in comparison.disputes
    comparison.observed(Computation(NEW.slot, 2, "c"), chained(["d0", "wrong"]))
    assert comparison.diverged.keys() == {OLD.slot}


def test_an_edit_ends_no_dispute_in_a_move() -> None:
    comparison = disputed_move()
    comparison.configured({LEFT: 1})
    assert LEFT in comparison.disputes


RIGHT = Slot("right", 0, 0)


def moving(corrupt: Slot) -> World:
    """The only replica of a partition has a successor, and one of them is wrong."""
    world = started()
    world.start_task(RIGHT.alternate)
    world.tasks[corrupt].corruption = "!"
    world.run_epochs(2)
    assert world.reports[-1]["inconsistent"]
    return world


@pytest.mark.parametrize(
    ("corrupt", "stays"), [(RIGHT, RIGHT.alternate), (RIGHT.alternate, RIGHT.alternate)]
)
def test_a_dispute_ends_with_the_move(corrupt: Slot, stays: Slot) -> None:
    world = moving(corrupt)
    world.kill(stays.alternate)
    world.run_epochs(16)
    if world.reports[-1]["diverged"]:
        world.start_task(stays)  # the operator replaces it
        world.run_epochs(12)
    assert world.reports[-1]["inconsistent"] == []
    assert {poll.sinks_through for poll in next_polls(world).values()} == {None}
    assert world.store[-1].entries["right/0"][0].epoch > world.head - 8
    assert world.tasks[BOTH].state_epoch > world.head - 4


def test_what_may_not_be_read_is_reported() -> None:
    world = moving(RIGHT.alternate)
    untrusted = {t["slot"] for t in world.reports[-1]["tasks"] if t.get("untrusted")}
    assert {RIGHT.key, RIGHT.alternate.key} <= untrusted
    assert Slot("src", 0, 0).key not in untrusted


def test_a_new_coordinator_holds_back_what_moves_and_is_disputed() -> None:
    world = moving(RIGHT.alternate)
    world.run_while_stuck(RIGHT.alternate, 2)
    before = {slot: poll.sinks_through for slot, poll in next_polls(world).items()}
    assert before[BOTH] is not None
    world.start_coordinator()
    world.run_while_stuck(RIGHT.alternate, 12)
    after = {slot: poll.sinks_through for slot, poll in next_polls(world).items()}
    assert after == before


def test_a_new_coordinator_finds_the_dispute_again() -> None:
    world = started()
    world.tasks[REPLICAS[0]].corruption = "!"
    world.run_epochs(2)
    world.start_coordinator()
    for _ in range(12):
        world.run_epochs(1)
        if world.tasks[REPLICAS[0]].boot:
            world.tasks[REPLICAS[0]].corruption = ""
    assert not [name for name in committed_objects(world) if "!" in name]
    assert world.tasks[BOTH].state_corruption == ""


STARTS = [World.start_coordinator, World.restart_coordinator]
"""Of a new coordinator: its next incarnation, or another process of the same incarnation."""


@copy_of_one_build
def disputed_while_one_computes_again(corrupt: int) -> World:
    """Replica 1 computes again, and has not come to the epoch yet."""
    world = started()
    world.tasks[REPLICAS[corrupt]].corruption = "!"
    world.run_epochs(1)
    world.run_while_stuck(REPLICAS[1], 2)
    assert [world.tasks[slot].boot for slot in REPLICAS] == [0, 1]
    return world


@pytest.mark.parametrize(("start", "corrupt"), [*zip(STARTS, (0, 1), strict=True)])
def test_a_new_coordinator_holds_back_what_the_one_before_did(
    corrupt: int, start: Callable[[World], None]
) -> None:
    world = disputed_while_one_computes_again(corrupt)
    before = {slot: poll.sinks_through for slot, poll in next_polls(world).items()}
    start(world)
    world.run_while_stuck(REPLICAS[1], 12)
    after = {slot: poll.sinks_through for slot, poll in next_polls(world).items()}
    assert after == before
    assert not [name for name in committed_objects(world) if "!" in name]
    assert world.tasks[BOTH].state_corruption == ""


@pytest.mark.parametrize(("start", "corrupt"), [*zip(STARTS, (0, 1), strict=True)])
def test_a_new_coordinator_holds_back_what_nobody_has_computed_again_yet(
    corrupt: int, start: Callable[[World], None]
) -> None:
    """Replica 0 is lost, so that no task has a result of the disputed epoch."""
    world = disputed_while_one_computes_again(corrupt)
    before = next_polls(world)[REPLICAS[1]].sinks_through
    assert before is not None
    world.kill(REPLICAS[0])
    start(world)
    world.run_while_stuck(REPLICAS[1], 2)
    assert {next_polls(world)[slot].sinks_through for slot in (REPLICAS[1], BOTH)} == {before}
    world.run_epochs(4)
    assert next_polls(world)[BOTH].sinks_through == before
    assert not [name for name in committed_objects(world) if "!" in name]


def test_a_dispute_that_a_new_coordinator_knows_without_results_ends() -> None:
    world = disputed_while_one_computes_again(1)
    world.kill(REPLICAS[0])
    world.start_coordinator()
    world.run_while_stuck(REPLICAS[1], 2)
    world.tasks[REPLICAS[1]].corruption = ""
    world.start_task(REPLICAS[0])
    world.run_epochs(16)
    assert world.reports[-1]["inconsistent"] == []
    assert {poll.sinks_through for poll in next_polls(world).values()} == {None}
    assert world.store[-1].epoch > world.head - 8


@pytest.mark.parametrize(("start", "corrupt"), [*zip(STARTS, (0, 1), strict=True)])
def test_a_new_coordinator_ends_the_dispute_of_the_one_before(
    corrupt: int, start: Callable[[World], None]
) -> None:
    world = disputed_while_one_computes_again(corrupt)
    start(world)
    for _ in range(8):
        world.run_epochs(1)
        if world.tasks[REPLICAS[corrupt]].boot:
            world.tasks[REPLICAS[corrupt]].corruption = ""
    world.start_task(REPLICAS[corrupt])  # the operator replaces it, if it was named
    world.run_epochs(12)
    assert {poll.sinks_through for poll in next_polls(world).values()} == {None}
    assert world.store[-1].entries[LEFT.key][0].epoch > world.head - 8
    assert not [name for name in committed_objects(world) if "!" in name]
    assert world.reports[-1]["inconsistent"] == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_inherited_result_may_be_repeated_before_the_other_one_is_known(wrong: int) -> None:
    """A new coordinator knows one result, whose replica repeats it. The result of the other replica
    is the second one then, not a third that matches none."""
    comparison = DigestComparison()
    results = [chained(["d0", ("right", "wrong")[replica == wrong]]) for replica in (0, 1)]
    existing = set(REPLICAS)
    comparison.containment_inherited(computation(1), 0, {1: results[1][1]}, existing)
    comparison.observed(computation(1, boot="b"), results[1])
    comparison.observed(computation(0), results[0])
    assert not comparison.disputes[LEFT].unresolved
    alive = [computation(0), computation(1, boot="b")]
    comparison.request_recomputation(LEFT, alive, now=1000.0)
    assert comparison.boot_to_restart(REPLICAS[0]) == "a"
    comparison.observed(computation(0, boot="b"), results[1 - wrong])  # a bit flip, or as before
    assert comparison.disputes.keys() == ({LEFT} if wrong == 1 else set())
    assert comparison.diverged.keys() == ({REPLICAS[0]} if wrong == 0 else set())


def response_of(
    by: Computation,
    phase: TaskPhase,
    results: dict[int, EpochDigests],
    contained: Contained | None = None,
) -> PollResponse:
    slot = by.slot
    ref = TaskRef.of(slot, by.incarnation)
    return PollResponse(
        task=ref,
        boot_id=by.boot,
        fence=2,
        phase=phase,
        digests={e: found.digest for e, found in results.items() if found.digest},
        chained={e: found.chained for e, found in results.items() if found.chained},
        checkpoints=tuple(
            EntryRef(epoch=e, object=f"{slot.key}@{e}", digest=found.state, bytes=1)
            for e, found in results.items()
            if found.state
        ),
        contained=contained,
    )


@pytest.mark.parametrize("state", ["s", "t"])
def test_a_new_coordinator_waits_for_the_state_that_is_disputed(state: str) -> None:
    """Replica 1 had another state than replica 0, whose output is the same, and computes again."""
    containment = Containment()
    containment.comparison.configured({LEFT: 2})
    tasks = Membership()
    pods = (Pod(s.key, s, 1, s.key, may_be_running=True, was_ready=True) for s in REPLICAS)
    tasks.pods_listed(pods, 0.0)
    contained = Contained(after=4, disputed=(5,), disputed_digest="state")

    def answered(by: Computation, found: str | None, contained: Contained | None = None) -> None:
        results = {5: EpochDigests("-1:c", "d", found)}
        response = response_of(by, TaskPhase.LIVE, results, contained)
        context = (tasks, None, Committer(2))
        containment.keep_contained(by.slot, response, *context)
        containment.observed(by.slot, response, *context)

    answered(computation(0), "s", contained)
    answered(computation(1, boot="b"), None)
    assert containment.comparison.disputes[LEFT].digest_name == "state"
    assert containment.comparison.witnessed(LEFT) < 5
    answered(computation(1, boot="b"), state)
    assert (LEFT in containment.comparison.disputes) == (state == "t")


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_replica_too_many_saves_is_committed(replicas: int) -> None:
    """`replicas` was lowered while replica 0 was lost. Replica 1 has its state, runs until replica
    0 is Live, and is not compared any more; and replica 0, which began with a lent state, is not
    Live before its partition has a newer entry."""
    containment, tasks = Containment(), Membership()
    containment.comparison.configured({LEFT: replicas})
    pods = (Pod(s.key, s, 1, s.key, may_be_running=True, was_ready=True) for s in REPLICAS)
    tasks.pods_listed(pods, 0.0)
    phases = {0: TaskPhase.CATCHING_UP, 1: TaskPhase.LIVE}
    for replica, epoch in ((0, 4), (1, 5)):
        by = computation(replica)
        response = response_of(by, phases[replica], {epoch: EpochDigests("-1:c", "d", "s")})
        task = tasks.get(by.slot)
        assert task is not None
        tasks.answered(task, response, 0.0)
        containment.observed(by.slot, response, tasks, None, Committer(2))
    saved = response.checkpoints
    found = containment.agreed_entries(REPLICAS[1], saved, {LEFT: list(tasks)}, lambda task: False)
    assert found == (list(saved) if replicas == 1 else [])


def test_readers_that_are_discovered_late_compute_again() -> None:
    world = started()
    corrupt = world.tasks[REPLICAS[0]]
    corrupt.corruption = "!"
    world.release_epochs()
    for slot in (Slot("src", 0, 0), *REPLICAS, Slot("left", 1, 0), Slot("right", 0, 0), BOTH):
        world.work(slot, 1)  # while no coordinator runs
    assert world.tasks[BOTH].state_corruption == "!"
    world.start_coordinator()
    for _ in range(12):
        world.run_epochs(1)
        corrupt.corruption = "" if corrupt.boot else "!"
    assert world.tasks[BOTH].state_corruption == ""
    assert not [name for name in committed_objects(world) if "!" in name]


def test_sinks_of_a_replica_left_alone_in_a_dispute_keep_waiting() -> None:
    world = disputed_while_one_computes_again(0)
    agreed = next_polls(world)[BOTH].sinks_through
    world.kill(REPLICAS[1])
    world.start_coordinator()
    world.run_epochs(12)
    assert next_polls(world)[REPLICAS[0]].sinks_through == agreed
    assert not [name for name in committed_objects(world) if "!" in name]


def test_a_new_coordinator_lets_diverged_replicas_recompute() -> None:
    world = with_wrong_replica(0)
    world.kill(REPLICAS[1])
    boot = world.tasks[REPLICAS[0]].boot
    world.start_coordinator()
    world.run_epochs(2)
    assert world.tasks[REPLICAS[0]].boot == boot + 1


def test_sinks_of_a_task_that_computes_again_write_nothing() -> None:
    world = started()
    newest = world.tasks[REPLICAS[0]].state_epoch
    world.tasks[REPLICAS[0]].contradiction = Contradiction(epoch=newest, message="epoch differs")
    world.poll(REPLICAS[0])
    poll = next_polls(world)[BOTH]
    assert (poll.recompute, poll.sinks_through) == (world.tasks[BOTH].boot_id, -1)


def test_a_checkpoint_waits_for_the_agreement_of_a_live_replica() -> None:
    world = started()
    first, second = (world.tasks[slot] for slot in REPLICAS)
    world.run_while_stuck(REPLICAS[1], 6)  # it stays at its epoch, and reports Live
    entry = world.store[-1].entries[LEFT.key][0]
    assert entry.epoch <= second.state_epoch < first.state_epoch
    world.run_while_stuck(REPLICAS[1], 12)
    assert world.store[-1].entries[LEFT.key][0].epoch > entry.epoch


def returning(epochs: int) -> World:
    """Replica 1 is lost, and replica 0 is wrong from then on. The next incarnation of replica 1
    has computed some epochs, and is five behind."""
    world = World(DIAMOND, interval_epochs=8)
    world.start_all()
    world.run_epochs(13 + epochs)
    world.kill(REPLICAS[1])
    wrong = world.tasks[REPLICAS[0]]
    wrong.corruption, wrong.corrupt_from = "!", world.head + 1
    world.start_task(REPLICAS[1])
    world.run_while_stuck(REPLICAS[1], 1)
    for _ in range(epochs):
        world.work(REPLICAS[1], 1)
        world.poll_round()
    return world


def test_a_checkpoint_waits_for_a_replica_that_has_almost_caught_up() -> None:
    world = returning(epochs=1)
    assert world.tasks[REPLICAS[1]].phase is TaskPhase.CATCHING_UP
    for _ in range(10):
        world.run_while_stuck(REPLICAS[1], 1)
        world.work(REPLICAS[1], 1)
        world.poll_round()
    world.run_epochs(10)
    assert not [name for name in committed_objects(world) if "!" in name]


def test_a_checkpoint_of_one_replica_that_ends_a_dispute_is_reported() -> None:
    """All go on from it: nothing can show any more that it is wrong."""
    world = returning(epochs=0)
    world.run_while_stuck(REPLICAS[1], 4)
    for _ in range(14):
        world.run_while_stuck(REPLICAS[1], 1)
        world.work(REPLICAS[1], 1)
        world.poll_round()
    world.run_epochs(4)
    assert [world.tasks[slot].state_corruption for slot in REPLICAS] == ["!", "!"]
    (text,) = world.reports[-1]["inconsistent"]
    assert text.startswith("left/0: replicas disagreed")
    assert text.endswith("results after epoch 12 may be wrong")


@pytest.mark.parametrize(("interval_epochs", "lag"), [(1, 8), (2, 4), (4, 8)])
def test_a_readers_checkpoint_waits_for_its_inputs_agreement(
    interval_epochs: int, lag: int
) -> None:
    """One Live replica is some epochs behind and right; the one that is ahead is wrong."""
    ahead, behind, reader = Slot("src", 0, 0), Slot("src", 0, 1), Slot("agg", 0, 0)
    parts = (SimulatedSegment("src", replicas=2), SimulatedSegment("agg", ("src",), query=True))
    world = World(parts, interval_epochs=interval_epochs)
    world.start_all()
    world.run_epochs(12)
    world.run_while_stuck(behind, lag)
    world.tasks[ahead].corruption = "!"
    world.tasks[ahead].corrupt_from = world.head + 1
    for _ in range(lag + 1):
        world.release_epochs()
        world.work(behind, 1)
        for _ in range(4):
            world.work(ahead, 8)
            world.work(reader, 8)
            world.poll_round()
        objects = [ref.object for refs in world.store[-1].entries.values() for ref in refs]
        assert not [name for name in objects if "!" in (name or "")]
    assert world.store[-1].epoch >= 11


@pytest.mark.parametrize("interval_epochs", [1, 4])
def test_a_reader_whose_sinks_were_down_is_not_committed_before_what_it_has_read(
    interval_epochs: int,
) -> None:
    """Sources have gone on, so no checkpoint waits any more for the partitions whose sinks were
    down. When they are back the reader has written at once; one of the replicas that it may have
    read is some epochs behind and right, and the other one is wrong."""
    ahead, behind, reader = Slot("once", 0, 0), Slot("once", 0, 1), Slot("agg", 0, 0)
    parts = (
        SimulatedSegment("src"),
        SimulatedSegment("once", ("src",), query=True, replicas=2),
        SimulatedSegment("agg", ("once",), query=True),
    )
    world = World(parts, interval_epochs=interval_epochs)
    world.start_all()
    world.run_epochs(12)
    for slot in (ahead, behind, reader):
        world.tasks[slot].sink_lag = 1000
    world.run_epochs(40)
    world.tasks[ahead].corruption = "!"
    world.tasks[ahead].corrupt_from = world.head + 1
    world.run_while_stuck(behind, 8)
    committed = world.store[-1].entries
    assert committed["src/0"][0].epoch > committed["agg/0"][0].epoch + 30
    for slot in (ahead, reader):
        world.tasks[slot].sink_lag = 0
    world.run_while_stuck(behind, 4)
    assert not [name for name in committed_objects(world) if "!" in name]
    assert world.store[-1].entries["agg/0"][0].epoch > committed["agg/0"][0].epoch + 30
