"""When nothing fails: then the operator has no reason to replace anything."""

from __future__ import annotations

from rekindle_testing.simulation.scheduler import Scheduler

_CALM_S = 20.0
_PROVES_NOTHING_S = 2.0
"""A silence that is shorter is no proof of a loss (docs/design/recovery.md#loss)."""


class Calm:
    """Counts the faults that last."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._faults = 0
        self._since = 0.0  # the last fault ended, or the first of those that last began
        self._calm_before_s = 0.0  # for how long nothing had failed then

    def fault_began(self) -> None:
        if not self._faults:
            self._calm_before_s = self._scheduler.now - self._since
            self._since = self._scheduler.now
        self._faults += 1

    def fault_ended(self) -> None:
        self._faults -= 1
        if not self._faults:
            self._since = self._scheduler.now

    def all_ended(self) -> None:
        self._faults, self._since = 0, self._scheduler.now

    @property
    def is_no_loss_proved(self) -> bool:
        """Whether nothing has failed for long, or only since a moment ago."""
        lasting_s = self._scheduler.now - self._since
        if not self._faults:
            return lasting_s > _CALM_S
        return self._calm_before_s > _CALM_S and lasting_s < _PROVES_NOTHING_S
