"""State machines as transition tables; any other event raises with the transitions so far. Pure.

`checkpoints.phases` and `agreement.disputes` have the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from rekindle.errors import RekindleError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Table = Mapping[S, Mapping[E, S]]
Story = tuple[str, ...]

_STORY = 16


class InvalidTransition(RekindleError):
    """An event that is invalid in a state: a bug in the coordinator. Contains the transitions
    before it."""


def next_state(
    subject: str, table: Table[S, E], state: S, event: E, story: Story = ()
) -> tuple[S, Story]:
    """The state after `event`, and the transitions including it. `subject` is named in errors.
    Raises InvalidTransition."""
    after = table[state].get(event)
    if after is None:
        before = "; ".join(story) or "nothing"
        raise InvalidTransition(
            f"{subject}: event '{event}' is invalid in phase {state}; transitions before: {before}"
        )
    return after, (*story, f"{state}: {event}")[-_STORY:]


class StateMachine(Generic[S, E]):
    def __init__(self, subject: str, table: Table[S, E], state: S) -> None:
        self.state = state
        self._subject = subject
        self._table = table
        self._story: Story = ()

    def step(self, event: E) -> None:
        """Raises InvalidTransition."""
        self.state, self._story = next_state(
            self._subject, self._table, self.state, event, self._story
        )
