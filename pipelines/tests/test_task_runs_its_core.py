"""What runs a core: one event at a time, and each with all of its effects."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from task_world import REF

from rekindle.protocol import PollRequest, RestorePoint, TaskPhase
from rekindle.task.core.messages import Respond, TaskEffect, TaskSettings
from rekindle.task.core.start import RestoreState
from rekindle.task.core.supervisor import DiscardLog, EndProcess, RouteInputs
from rekindle.task.core.task import TaskCore
from rekindle.task.process import TaskProcess

POLL = PollRequest(fence=1, generation=1, task=REF, restore=RestorePoint(epoch=-1))


class Recorded:
    """A process whose effects are recorded; what `tells` has is told when the state is restored."""

    def __init__(self) -> None:
        self.core = TaskCore(TaskSettings(REF, "boot", 10, 1_000_000))
        self.process = TaskProcess(self.core, self._perform, lambda: self.effects.append(None))
        self.effects: list[type[TaskEffect] | None] = []  # None: the event has ended
        self.fails_at: type[TaskEffect] | None = None

    def _perform(self, effect: TaskEffect) -> None:
        if type(effect) is self.fails_at:
            raise RuntimeError("can't start new thread")
        if isinstance(effect, RestoreState):
            self.process.tell(partial(self.core.poll_received, POLL))
        self.effects.append(type(effect))


def test_an_event_that_an_effect_leads_to_comes_after_the_other_effects() -> None:
    recorded = Recorded()
    recorded.process.tell(partial(recorded.core.poll_received, POLL))
    one, two = [Respond, RestoreState, RouteInputs, None], [Respond, RouteInputs, None]
    assert recorded.effects == [*one, *two]


def test_events_of_threads_are_told_one_after_another() -> None:
    recorded = Recorded()
    polls = 50

    def tell() -> None:
        for _ in range(polls):
            recorded.process.tell(partial(recorded.core.poll_received, POLL))

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    effects = recorded.effects[4:]
    assert effects == [Respond, RouteInputs, None] * (4 * polls)


def test_an_event_that_fails_fails_the_task() -> None:
    recorded = Recorded()

    def fails(now: float) -> list[TaskEffect]:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        recorded.process.tell(fails)
    assert recorded.core.status.phase is TaskPhase.FAILED
    recorded.process.tell(partial(recorded.core.poll_received, POLL))
    assert recorded.effects[-3:] == [Respond, EndProcess, None]


def test_an_effect_that_fails_fails_the_task_after_the_other_effects() -> None:
    recorded = Recorded()
    recorded.fails_at = RestoreState
    with pytest.raises(RuntimeError, match="can't start new thread"):
        recorded.process.tell(partial(recorded.core.poll_received, POLL))
    assert recorded.effects == [Respond, RouteInputs, None, None]
    problem = recorded.core.response().problem
    assert problem is not None
    assert "can't start new thread" in problem.message


def test_a_process_whose_effects_fail_ends() -> None:
    recorded = Recorded()
    recorded.process.tell(partial(recorded.core.poll_received, POLL))
    recorded.fails_at = DiscardLog
    with pytest.raises(RuntimeError):
        recorded.process.tell(
            partial(recorded.core.poll_received, POLL.model_copy(update={"recompute": "boot"}))
        )
    assert EndProcess in recorded.effects
