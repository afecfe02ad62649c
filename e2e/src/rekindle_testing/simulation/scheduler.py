"""Simulated time, and processes that die, freeze and go on.

Everything that happens is an action at a time; actions of the same time happen in the order in
which they were scheduled. So a seed gives the same run on every machine.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from random import Random

Action = Callable[[], None]


class Scheduler:
    """`now` in seconds. All that is random in a simulation is drawn from `random`."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._actions, (self.now + delay_s, next(self._numbers), action))

    def between(self, least_s: float, most_s: float) -> float:
        return self.random.uniform(least_s, most_s)

    def run_until(self, end: float) -> None:
        while self._actions and self._actions[0][0] <= end:
            self.now, _, action = heapq.heappop(self._actions)
            action()
        self.now = end


class SimulatedProcess:
    """Something that runs on a host of the network. A frozen one does nothing until it is thawed,
    and then all that it has missed, in order: it does not know that time has passed."""

    def __init__(self, scheduler: Scheduler, host: str) -> None:
        self.scheduler = scheduler
        self.host = host
        self.dead = False
        self._freezes = 0
        self._missed: list[Action] = []
        self._on_death: list[Action] = []

    @property
    def frozen(self) -> bool:
        return self._freezes > 0

    def after(self, delay_s: float, action: Action) -> None:
        """Do something later, unless the process is dead by then."""
        self.scheduler.after(delay_s, partial(self.do, action))

    def every(self, interval_s: float, action: Action) -> None:
        """Do something again and again, beginning within the first interval."""

        def again() -> None:
            action()
            self.after(interval_s, again)

        self.after(self.scheduler.between(0, interval_s), again)

    def do(self, action: Action) -> None:
        """Do something now; once it is thawed, if it is frozen."""
        if self.dead:
            return
        if self._freezes:
            self._missed.append(action)
        else:
            action()

    def freeze(self) -> None:
        """Until as many calls of `thaw`."""
        self._freezes += 1

    def thaw(self) -> None:
        self._freezes -= 1
        if self._freezes:
            return
        missed, self._missed = self._missed, []
        for action in missed:
            self.do(action)

    def on_death(self, action: Action) -> None:
        self._on_death.append(action)

    def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self._missed = []
        for action in self._on_death:
            action()
