"""The phases of a task: valid transitions, and refused events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.protocol import TaskPhase
from rekindle.task.core.phases import TRANSITIONS, TaskEvent, new_phase
from rekindle.transitions import InvalidTransition, StateMachine

EVENTS = st.lists(st.sampled_from(TaskEvent), max_size=12)


def run(events: list[TaskEvent]) -> StateMachine[TaskPhase, TaskEvent]:
    """Apply a sequence of events, without those that are refused."""
    machine = new_phase()
    for event in events:
        if event in TRANSITIONS[machine.state]:
            machine.step(event)
    return machine


def test_a_task_goes_from_waiting_to_live() -> None:
    machine = new_phase()
    seen = []
    for event in (TaskEvent.START_BEGUN, TaskEvent.STARTED, TaskEvent.CAUGHT_UP):
        machine.step(event)
        seen.append(machine.state)
    assert seen == [TaskPhase.RESTORING, TaskPhase.CATCHING_UP, TaskPhase.LIVE]


@given(EVENTS, st.sampled_from(TaskEvent))
def test_an_event_outside_the_table_changes_nothing(
    events: list[TaskEvent], event: TaskEvent
) -> None:
    machine = run(events)
    before = machine.state
    if event in TRANSITIONS[before]:
        machine.step(event)
        assert machine.state is TRANSITIONS[before][event]
    else:
        with pytest.raises(
            InvalidTransition, match=f"event '{event}' is invalid in state {before}"
        ):
            machine.step(event)
        assert machine.state is before


@given(EVENTS)
def test_a_failed_task_stays_failed(events: list[TaskEvent]) -> None:
    machine = run(events)
    machine.step(TaskEvent.FAILED)
    for event in TRANSITIONS[TaskPhase.FAILED]:
        machine.step(event)
        assert machine.state is TaskPhase.FAILED


@given(EVENTS)
def test_a_task_can_be_stopped_in_every_phase_but_stopping(events: list[TaskEvent]) -> None:
    machine = run(events)
    if machine.state is not TaskPhase.STOPPING:
        machine.step(TaskEvent.STOP_REQUESTED)
    assert not machine.state.serves


@given(EVENTS)
def test_no_task_serves_before_it_has_started(events: list[TaskEvent]) -> None:
    before_start: list[TaskEvent] = [event for event in events if event is not TaskEvent.STARTED]
    assert not run(before_start).state.serves


def test_every_phase_can_be_reached() -> None:
    targets = {after for events in TRANSITIONS.values() for after in events.values()}
    assert targets | {TaskPhase.WAITING} == set(TaskPhase) == set(TRANSITIONS)


def test_an_invalid_event_quotes_the_transitions_before_it() -> None:
    machine = new_phase()
    machine.step(TaskEvent.START_BEGUN)
    with pytest.raises(InvalidTransition, match="transitions before: Waiting: start begun"):
        machine.step(TaskEvent.CAUGHT_UP)
