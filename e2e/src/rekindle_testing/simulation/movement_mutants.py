"""Bugs that are planted in state movements, and in what copies of a state count for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.coordinator.agreement.comparison import DigestComparison
from rekindle.coordinator.movement.session import Movement
from rekindle_testing.simulation import movement
from rekindle_testing.simulation.planting import Mutant, replaced


def _copies_count(is_copy: Any) -> Any:
    return lambda self, partition, by: False


def _never_gives_up(why_give_up: Any) -> Any:
    return lambda self, *arguments: None


def _pins_other_epoch(pin: Any) -> Any:
    """The state of an epoch is moved under the number of the one before."""

    def wrong(self: movement.SimulatedMover, session: Any) -> None:
        newest = self._newest
        self._newest = lambda: replace(newest(), epoch=newest().epoch - 1)
        pin(self, session)
        self._newest = newest

    return wrong


MOVEMENT_MUTANTS: Mapping[str, Mutant] = {
    "a copy counts as a witness": replaced(DigestComparison, "_is_copy", _copies_count),
    "a movement is never given up": replaced(Movement, "why_give_up", _never_gives_up),
    "a state is moved under another epoch": replaced(
        movement.SimulatedMover, "_pin", _pins_other_epoch
    ),
}
