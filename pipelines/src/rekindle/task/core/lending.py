"""Which states a task lends to replicas of its partition that start. Pure.

A state is lent when a poll asks for it, until nobody has read it for LEND_S. It is a named
snapshot, so what it keeps in memory is bounded with those of checkpoints. Only stable states are
lent. A name is used once: it has the boot and the epoch. Does not know how a state is encoded.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.checkpoints.codec import LENT
from rekindle.protocol import PollRequest, RestorePoint
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.snapshots import Holder, Snapshots, SnapshotsFull, StateSnapshot
from rekindle.task.state import TaskState

LEND_S = 30.0
"""How long a state is lent after it was read the last time."""


@dataclass(slots=True)
class _Lent:
    snapshot: StateSnapshot
    read_at: float  # or lent, if it was not read yet

    @property
    def expires_at(self) -> float:
        return self.read_at + LEND_S


class LendingCore:
    """The states that one boot of a task lends."""

    def __init__(self, boot_id: str, snapshots: Snapshots) -> None:
        self._boot_id = boot_id
        self._snapshots = snapshots
        self._lent: dict[str, _Lent] = {}  # by name, oldest first

    @property
    def newest(self) -> RestorePoint | None:
        name = next(reversed(self._lent), None)
        if name is None:
            return None
        return RestorePoint(epoch=self._lent[name].snapshot.epoch, object=name)

    @property
    def wake_at(self) -> float | None:
        return min((lent.expires_at for lent in self._lent.values()), default=None)

    def poll_accepted(self, poll: PollRequest, newest: TaskState, now: float) -> None:
        """`newest`: the task's newest state."""
        if poll.lend:
            committed = poll.committed
            self.requested(newest, committed.epoch if committed is not None else NO_EPOCH, now)

    def requested(self, state: TaskState, not_before: int, now: float) -> None:
        """A poll asks for a state that is not older than an epoch. `state`: the newest one."""
        self.woken(now)
        newest = next(reversed(self._lent.values()), None)
        if newest is not None and newest.snapshot.epoch >= not_before:
            newest.read_at = now  # it will be
            return
        if state.epoch < not_before:
            return
        try:
            snapshot = self._snapshots.take(Holder.PARTNER, state)
        except SnapshotsFull:
            return  # the coordinator does not wait for long
        self._lent[f"{LENT}{self._boot_id}/{state.epoch}"] = _Lent(snapshot, now)

    def read(self, name: str, now: float) -> TaskState | None:
        """The state of an entry, of which a part is read; None if it is not lent any more."""
        self.woken(now)
        lent = self._lent.get(name)
        if lent is None:
            return None
        lent.read_at = now
        return lent.snapshot.state

    def woken(self, now: float) -> None:
        """Time has passed."""
        for name, lent in [*self._lent.items()]:
            if now >= lent.expires_at:
                del self._lent[name]
                self._snapshots.release(lent.snapshot.name)
