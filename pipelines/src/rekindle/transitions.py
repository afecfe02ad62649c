"""State machines as transition tables. An event outside of the table raises an error that contains
the last transitions. An event that is a call has the method's name. Pure.

Each package has the tables of its state machines in a module `phases.py`, or in the module of the
objects that have these states.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from rekindle.errors import RekindleError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=str)
Table = Mapping[S, Mapping[E, S]]
History = tuple[str, ...]

_HISTORY_LENGTH = 16


class InvalidTransition(RekindleError):
    """An event that is invalid in a state: a bug in the caller. Contains what led to it."""


def next_state(
    subject: str, table: Table[S, E], state: S, event: E, history: History = ()
) -> tuple[S, History]:
    """The state after `event`, and the transitions including it. `subject` is named in errors.
    Raises InvalidTransition."""
    after = table[state].get(event)
    if after is None:
        before = "; ".join(history) or "nothing"
        raise InvalidTransition(
            f"{subject}: event '{event}' is invalid in state {state}; transitions before: {before}"
        )
    return after, (*history, f"{state}: {event}")[-_HISTORY_LENGTH:]


class StateMachine(Generic[S, E]):
    def __init__(self, subject: str, table: Table[S, E], state: S) -> None:
        self.state = state
        self._subject = subject
        self._table = table
        self._history: History = ()

    def step(self, event: E) -> None:
        """Raises InvalidTransition."""
        self.state, self._history = next_state(
            self._subject, self._table, self.state, event, self._history
        )
