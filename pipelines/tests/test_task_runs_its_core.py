"""What runs a core: one event at a time, and each with all of its effects."""

from __future__ import annotations

import threading
from functools import partial

from task_world import REF

from rekindle.protocol import PollRequest, RestorePoint
from rekindle.task.core.messages import Respond, TaskEffect, TaskSettings
from rekindle.task.core.start import RestoreState
from rekindle.task.core.supervisor import RouteInputs
from rekindle.task.core.task import TaskCore
from rekindle.task.process import TaskProcess

POLL = PollRequest(fence=1, generation=1, task=REF, restore=RestorePoint(epoch=-1))


class Recorded:
    """A process whose effects are recorded; what `tells` has is told when the state is restored."""

    def __init__(self) -> None:
        self.core = TaskCore(TaskSettings(REF, "boot", 10, 1_000_000))
        self.process = TaskProcess(self.core, self._perform, lambda: self.effects.append(None))
        self.effects: list[type[TaskEffect] | None] = []  # None: the event has ended

    def _perform(self, effect: TaskEffect) -> None:
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


def test_an_event_that_fails_leaves_the_process_as_it_was() -> None:
    recorded = Recorded()

    def fails(now: float) -> list[TaskEffect]:
        raise ValueError("a bug")

    try:
        recorded.process.tell(fails)
    except ValueError:
        recorded.process.tell(partial(recorded.core.poll_received, POLL))
    assert Respond in recorded.effects
