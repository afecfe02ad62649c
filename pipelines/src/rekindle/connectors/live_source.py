"""The interface of live sources: positions, and the rows between two of them.

What an epoch contains depends on when somebody looks, so it is planned and recorded
(`rekindle.connectors.planned_cuts`). A source only says how far it can be read, and reads a range,
any number of times, with the same rows each time.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rekindle.connectors.cut_records import Position
from rekindle.connectors.dead_letters import DeadLetter


@dataclass(frozen=True, slots=True)
class Reach:
    """How far one epoch may read. `start`: where it begins, also for splits that are new; `end`:
    at least `start`. `caught_up`: splits of which nothing more can be read after `end`. `identity`:
    what the positions are of; another topic or table of the same name has another one. `pending`:
    splits with rows that cannot be read yet, as of an open transaction; they are not idle.
    `available`: how far all can be read that is there, if `end` is before it."""

    start: Position
    end: Position
    caught_up: frozenset[str]
    identity: str = ""
    pending: frozenset[str] = frozenset()
    available: Position = field(default_factory=dict, compare=False)

    def behind(self, position: Position) -> dict[str, int]:
        """How many positions are there that `position` has not passed, by split."""
        ends = {**self.end, **self.available}
        return {split: max(0, end - position.get(split, end)) for split, end in ends.items()}


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a range, which ends at `end`, by split and position. `newest_us`: the newest
    event time of each split that has any in the range, microseconds UTC. `dropped`: how many
    records of the range are no rows; `example`: one of them, and why. `dead_letters`: all of them,
    if they are to be kept."""

    end: Position
    table: pa.Table
    newest_us: Mapping[str, int]
    dropped: int = 0
    example: str = ""
    dead_letters: Sequence[DeadLetter] = ()


class LiveSource(Protocol):
    """One partition of a live source; used by one thread, but for `close` and `waiting_for`."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def identity(self) -> str:
        """See `Reach`. Raises SourceFailed."""
        ...

    def ends(self, after: Position | None) -> Reach:
        """How far the epoch after `after` may read; None: it is the first one. Succeeds only if all
        splits have been heard from. Raises SourceFailed."""
        ...

    def read_some(self, start: Position, end: Position) -> SourceRows:
        """As `read`, but the range may end before, where it has as many bytes as one epoch may
        have. It has at least one row if there is one."""
        ...

    def read(self, start: Position, end: Position) -> SourceRows:
        """The rows of all splits from `start` to before `end`. Waits until they have arrived.
        Raises SourceFailed."""
        ...

    def waiting_for(self) -> str | None:
        """What a call that does not return waits for: the broker and the topic, for a person."""
        ...

    def close(self) -> None: ...
