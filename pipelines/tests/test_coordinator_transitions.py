"""State machines of the coordinator: events outside their tables raise, and never happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.coordinator.agreement import disputes
from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.agreement.disputes import DisputeEvent, DisputePhase
from rekindle.coordinator.agreement.results import Computation, EpochDigests
from rekindle.coordinator.checkpoints import phases
from rekindle.coordinator.checkpoints.committer import Committer
from rekindle.coordinator.checkpoints.phases import CommitEvent, CommitPhase
from rekindle.topology.model import Partition, Slot
from rekindle.transitions import InvalidTransition, StateMachine, next_state

LEFT = Partition("left", 0)

COMPUTATIONS = st.builds(
    Computation,
    slot=st.builds(Slot, st.just("left"), st.just(0), st.integers(0, 2)),
    incarnation=st.integers(1, 3),
    boot=st.sampled_from("ab"),
)
EVENTS = st.one_of(
    st.tuples(
        st.just("observed"), COMPUTATIONS, st.sampled_from("xyz"), st.none() | st.integers(0, 6)
    ),
    st.tuples(st.just("forget"), COMPUTATIONS),
    st.tuples(st.just("discard"), COMPUTATIONS),
    st.tuples(st.just("input_was_wrong"), st.lists(COMPUTATIONS, max_size=3)),
    st.tuples(st.just("inherited"), COMPUTATIONS, st.sampled_from(["", "?", "x", "y"])),
    st.tuples(st.just("recompute"), st.lists(COMPUTATIONS, max_size=3), st.integers(0, 200)),
    st.tuples(st.just("configured"), st.integers(1, 3)),
    st.tuples(st.just("checkpoint_differed"), COMPUTATIONS),
)
"""Calls of DigestComparison. "inherited": of `containment_inherited`, what an older coordinator had
contained: "?" is a dispute without a result, "" no dispute."""


def apply(comparison: DigestComparison, event: tuple[object, ...]) -> None:
    match event:
        case ("observed", Computation() as by, str(digest), restored_from):
            assert restored_from is None or isinstance(restored_from, int)
            comparison.observed(by, {3: EpochDigests(digest=digest)}, restored_from)
        case ("forget", Computation() as by):
            comparison.forget(by.slot)
        case ("discard", Computation() as by):
            comparison.discard([by])
        case ("input_was_wrong", list(running)):
            comparison.input_was_wrong(LEFT, running)
        case ("inherited", Computation() as by, str(digest)):
            result = EpochDigests(digest=digest) if digest != "?" else None
            comparison.containment_inherited(by, 2, {3: result} if digest else {})
        case ("recompute", list(alive), int(now)):
            comparison.request_recomputation(LEFT, alive, float(now))
        case ("configured", int(replicas)):
            comparison.configured({LEFT: replicas})
        case ("checkpoint_differed", Computation() as by):
            comparison.checkpoint_differed(by.slot, by.incarnation, 3)


@given(st.lists(EVENTS, max_size=40))
def test_a_dispute_refuses_events_outside_its_table(history: list[tuple[object, ...]]) -> None:
    comparison = DigestComparison()
    for event in history:
        apply(comparison, event)  # raises InvalidTransition
        phases_ = {dispute.phase for dispute in comparison.disputes.values()}
        assert phases_ <= {DisputePhase.OPEN, DisputePhase.UNRESOLVED}


@pytest.mark.parametrize("phase", DisputePhase)
@pytest.mark.parametrize("event", DisputeEvent)
def test_an_ended_dispute_refuses_all_events(phase: DisputePhase, event: DisputeEvent) -> None:
    if event in disputes.TRANSITIONS[phase]:
        assert phase in (DisputePhase.OPEN, DisputePhase.UNRESOLVED)
        return
    with pytest.raises(InvalidTransition, match=f"event '{event}' is invalid in state {phase}"):
        next_state("dispute", disputes.TRANSITIONS, phase, event)


@given(st.lists(st.sampled_from(CommitEvent), max_size=30))
def test_the_newest_manifest_is_read_before_the_next_is_written(events: list[CommitEvent]) -> None:
    machine: StateMachine[CommitPhase, CommitEvent] = phases.commit_machine()
    manifest_is_read = False
    for event in events:
        if event not in phases.TRANSITIONS[machine.state]:
            with pytest.raises(InvalidTransition):
                machine.step(event)
            continue
        machine.step(event)
        manifest_is_read = (
            manifest_is_read or event is CommitEvent.READ_ENDED
        ) and machine.state in (
            CommitPhase.READY,
            CommitPhase.WRITING,
        )
        assert manifest_is_read or machine.state in (CommitPhase.UNREAD, CommitPhase.READING)


def test_an_invalid_transition_shows_the_ones_before() -> None:
    committer = Committer(fence=1)
    committer.step(None, 0.0)
    committer.store_failed("down", 0.0)
    history = "transitions before: unread: read started; reading: store failed"
    with pytest.raises(InvalidTransition, match=history):
        committer.race_lost()
