"""The properties of state movements can fail: each planted bug is found by one of them.

`first` is a seed whose history finds it; seeds after it are tried if the world has changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from movement_world import World
from test_state_movement import (
    ACTIONS,
    play,
    play_abandonment_unknown_to_newcomer,
    unsettled_in_the_end,
)

from rekindle.coordinator.movement.core import MovementCore
from rekindle.coordinator.movement.phases import MovementPhase
from rekindle.coordinator.movement.session import Movement
from rekindle.exchange.state_mover import newcomer
from rekindle.exchange.state_mover.holds import Holds
from rekindle.exchange.state_mover.newcomer import NewcomerCore

pytestmark = pytest.mark.simulated

SEEDS = 300
Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]


def any_epoch_is_late_enough(patch: Patch) -> None:
    """The donor's state may be before what upstream logs still have."""
    confirmed = Movement.confirmed
    patch.setattr(Movement, "confirmed", lambda self, needed, now: confirmed(self, 0, now))


def holds_end_when_a_session_is_given_up(patch: Patch) -> None:
    """Not when the newcomer says that it has left."""
    early = (MovementPhase.HOLDING, MovementPhase.MOVING)
    patch.setattr(MovementPhase, "holds", property(lambda phase: phase in early))


def holds_keep_nothing(patch: Patch) -> None:
    """They are confirmed, and neither upstream replicas nor floors observe them."""
    patch.setattr(Holds, "floor", lambda self, floor: floor)
    patch.setattr(MovementCore, "with_holds", lambda self, progress: progress)


def digests_are_not_compared(patch: Patch) -> None:
    installed = NewcomerCore._installed

    def believed(self: NewcomerCore, session: Any, digest: str) -> Any:
        current = self._find(session)
        offered = current.offer.digest if current is not None and current.offer else digest
        return installed(self, session, offered)

    patch.setattr(NewcomerCore, "_installed", believed)
    arrived = NewcomerCore._chunk_arrived

    def unchecked(self: NewcomerCore, current: Any, chunk: Any, now: float) -> Any:
        patch.setattr(newcomer, "chunk_digest", lambda data: chunk.digest)
        return arrived(self, current, chunk, now)

    patch.setattr(NewcomerCore, "_chunk_arrived", unchecked)


def chunks_are_stored_as_they_come(patch: Patch) -> None:
    """A repeated chunk is stored in the place of the one that is expected."""
    arrived = NewcomerCore._chunk_arrived

    def misplaced(self: NewcomerCore, current: Any, chunk: Any, now: float) -> Any:
        if current.requested and chunk.number not in current.requested:
            object.__setattr__(chunk, "number", min(current.requested))
        return arrived(self, current, chunk, now)

    patch.setattr(NewcomerCore, "_chunk_arrived", misplaced)
    believe = NewcomerCore._installed
    patch.setattr(
        NewcomerCore,
        "_installed",
        lambda self, session, digest: believe(
            self, session, self._current.offer.digest if self._current else digest
        ),
    )


def everything_is_asked_for_at_once(patch: Patch) -> None:
    go_on = NewcomerCore._continue_transfer

    def greedy(self: NewcomerCore, current: Any, now: float) -> Any:
        object.__setattr__(self._limits, "chunks_at_once", 1000)
        try:
            return go_on(self, current, now)
        finally:
            object.__setattr__(self._limits, "chunks_at_once", 3)

    patch.setattr(NewcomerCore, "_continue_transfer", greedy)


MUTANTS: list[tuple[Mutant, int]] = [
    (any_epoch_is_late_enough, 1),
    (holds_end_when_a_session_is_given_up, 0),
    (holds_keep_nothing, 1),
    (digests_are_not_compared, 6),
    (chunks_are_stored_as_they_come, 0),
    (everything_is_asked_for_at_once, 1),
]


@pytest.mark.parametrize(("mutant", "first"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_each_planted_bug_is_found(
    mutant: Mutant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert any(found(seed) for seed in range(first, first + SEEDS))


def found(seed: int) -> list[str]:
    """What is wrong in the history of a seed, at its end if not before."""
    chosen = random.Random(seed)
    history = chosen.choices(ACTIONS, k=chosen.randint(15, 40))
    sizes = (chosen.randint(1, 3), chosen.randint(2, 3), chosen.randint(1, 2))
    world: World = play(seed, sizes, history)
    if not world.violations:
        world.violations += play_abandonment_unknown_to_newcomer(seed).violations
    if not world.violations:
        world.heal()
        world.violations += unsettled_in_the_end(world)
    return world.violations
