"""The states of epochs that a holder still needs, by name. Pure.

A state is immutable, so a snapshot is a reference. Its cost is the memory that only it keeps: runs
that the newest state has compacted, dropped or moved to a file since. Snapshots are bounded, in
number and in bytes; if there are too many, `take` raises, and the caller decides what to release.
Runs in files, and those that are not fetched yet, take no memory. Does not know what a holder does
with a snapshot.

Design: docs/decisions/0048-lazy-restore.md#named-snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rekindle.engine.model import State
from rekindle.errors import RekindleError
from rekindle.task.state import TaskState

SNAPSHOTS = 8
"""Limit of the snapshots of one task. The saver has three at most."""
SNAPSHOT_BYTES = 256 << 20
"""Limit of their memory beyond the newest state."""


class Holder(StrEnum):
    """Who needs a snapshot."""

    CHECKPOINT = "checkpoint"  # until it is saved, or a newer one takes its place
    PARTNER = "partner"  # a state that is lent


class SnapshotsFull(RekindleError):
    """There are too many snapshots, or they keep too much memory; names them."""


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """`name` is unique in a task."""

    name: str
    holder: Holder
    state: TaskState

    @property
    def epoch(self) -> int:
        return self.state.epoch


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot's memory. `nbytes`: of the runs that it keeps in memory and the newest state does
    not. Runs that several snapshots share are counted for each."""

    name: str
    nbytes: int


class Snapshots:
    """Of one task. `most`, `most_bytes`: the bounds; bytes are of all snapshots, in memory, beyond
    the newest state that was taken."""

    def __init__(self, most: int = SNAPSHOTS, most_bytes: int = SNAPSHOT_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._taken = 0
        self._snapshots: dict[str, StateSnapshot] = {}

    def take(self, holder: Holder, state: TaskState) -> StateSnapshot:
        """Keep the task's newest state until it is released. Raises SnapshotsFull."""
        nbytes = sum(_beyond(self._snapshots.values(), state.operators).values())
        if len(self._snapshots) >= self._most or nbytes > self._most_bytes:
            raise SnapshotsFull(
                f"no snapshot of epoch {state.epoch} for a {holder}: {', '.join(self._snapshots)} "
                f"keep {nbytes:,} bytes beside the state; at most {self._most} may keep "
                f"{self._most_bytes:,}"
            )
        self._taken += 1
        snapshot = StateSnapshot(f"{holder}-{state.epoch}-{self._taken}", holder, state)
        self._snapshots[snapshot.name] = snapshot
        return snapshot

    def find(self, name: str) -> StateSnapshot | None:
        """None if it was released."""
        return self._snapshots.get(name)

    def release(self, name: str) -> None:
        """The holder does not need it any more. Does nothing if it was released."""
        self._snapshots.pop(name, None)

    def held(self, newest: State) -> tuple[Held, ...]:
        """All snapshots, oldest first, with the memory that they keep beyond the newest state."""
        return tuple(
            Held(snapshot.name, sum(_beyond([snapshot], newest).values()))
            for snapshot in self._snapshots.values()
        )


def _beyond(snapshots: Iterable[StateSnapshot], newest: State) -> Mapping[int, int]:
    """Bytes of the runs of snapshots that are in memory and that the newest state does not refer
    to; each run once, by its `id`."""
    kept = {id(run) for state in newest.operators.values() for run in state.runs()}
    return {
        id(run): run.nbytes
        for snapshot in snapshots
        for state in snapshot.state.operators.operators.values()
        for run in state.runs()
        if run.in_memory and id(run) not in kept
    }
