"""Which task that waits restores the state of a partner, and which partner lends it. Pure.

A partner that is Live, trusted and of the same engine is asked to lend its newest state; the task
that waits gets that as its restore point. It gets an entry of the store instead if no partner can
lend, if it has started from lent states twice without being Live, or if it would take long until
the manifest keeps nothing before the lent epoch: until then it may not be Live (`may_be_live`),
because its log lacks epochs that may be needed.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.tasks.membership import Task, TaskPredicate
from rekindle.identity import LENDING_PROTOCOL
from rekindle.protocol import Endpoint, EntryRef, RestorePoint, TaskPhase
from rekindle.topology.model import Partition, Slot

MAX_ATTEMPTS = 2
"""Starts from lent states, of one incarnation, that ended before it was Live."""
ANSWER_S = 5.0
"""How long a task waits for a partner to lend."""
MAX_INTERVAL_S = 60.0
"""If checkpoints are further apart, nothing is lent."""
ALONE_S = 10.0
"""After this time without another replica a task that may not be Live has to start again."""
_ENDS = frozenset({TaskPhase.STOPPING, TaskPhase.FAILED})


def may_be_live(task: Task, manifest: Manifest) -> bool:
    """Whether a task's log has all that is needed after the entries that the manifest keeps."""
    if task.lent_from is None:
        return True
    refs = manifest.entries.get(task.partition.key, ())
    return bool(refs) and refs[-1].epoch >= task.lent_from


@dataclass(frozen=True, slots=True)
class _Request:
    boot: str  # of the task that waits
    since: float
    lender: Slot


class Lending:
    """Of one coordinator."""

    def __init__(self) -> None:
        self._requests: dict[Slot, _Request] = {}  # by the slot of the task that waits
        self._alone_since: dict[Slot, float] = {}
        self._now = 0.0

    def woken(self, now: float) -> None:
        """Time has passed."""
        self._now = now

    def is_lender(self, slot: Slot) -> bool:
        """Whether a task is to lend its state. What is asked for again and again does not expire,
        and the task that waits may not respond any more."""
        return any(
            request.lender == slot and self._now - request.since < ANSWER_S
            for request in self._requests.values()
        )

    def lender_for(self, slot: Slot) -> Slot | None:
        request = self._requests.get(slot)
        return request.lender if request is not None else None

    def forget(self, slot: Slot) -> None:
        """The slot's task has ended, or has a restore point."""
        self._requests.pop(slot, None)

    def restore_point(
        self,
        task: Task,
        replicas: Iterable[Task],
        refs: Sequence[EntryRef],
        is_suspected: TaskPredicate,
        interval_s: float,
        now: float,
    ) -> RestorePoint | None:
        """The lent restore point of a task that waits; None if there is none (yet: then it has a
        lender, `lender_for`). `replicas`: of its partition, that serve and are trusted; `refs`: the
        entries that the manifest keeps, newest first; `interval_s`: between checkpoints."""
        response, before = task.response, self._requests.pop(task.slot, None)
        may_borrow = len(refs) == 1 and interval_s <= MAX_INTERVAL_S
        if response is None or not may_borrow or task.lent_starts >= MAX_ATTEMPTS:
            return None
        lender = _lender(task, replicas, is_suspected)
        if lender is None or lender.response is None:
            return None
        lent, asked = lender.response.lent, before is not None and before.boot == response.boot_id
        # Only after it was asked: what it lends to nobody may expire at any moment.
        if asked and lent is not None and lent.epoch >= refs[0].epoch:
            endpoint = Endpoint(
                address=lender.endpoint,
                replica=lender.slot.replica,
                incarnation=lender.pod.incarnation,
            )
            return lent.model_copy(update={"lender": endpoint})
        since = before.since if before is not None and asked else now
        if now - since < ANSWER_S:
            self._requests[task.slot] = _Request(response.boot_id, since, lender.slot)
        return None

    def alone(
        self, tasks: Collection[Task], manifest: Manifest, is_suspected: TaskPredicate, now: float
    ) -> list[Task]:
        """Tasks that have to start again: they may not be Live, and for ALONE_S no other replica of
        their partition has responded that may be, or will restore an entry of the store."""
        waiting = [
            task
            for task in tasks
            if task.lent_from is not None
            and task.phase.serves
            and not may_be_live(task, manifest)
            and not is_suspected(task)
        ]
        partitions = {task.partition for task in waiting}
        others: set[Partition] = {
            task.partition
            for task in (tasks if waiting else ())
            if task.partition in partitions
            and task.response is not None
            and task.phase not in _ENDS
            and may_be_live(task, manifest)
            and not is_suspected(task)
        }
        alone = [task for task in waiting if task.partition not in others]
        since = {task.slot: self._alone_since.get(task.slot, now) for task in alone}
        self._alone_since = since
        return [task for task in alone if now - since[task.slot] >= ALONE_S]


def _lender(task: Task, replicas: Iterable[Task], is_suspected: TaskPredicate) -> Task | None:
    """One that lends already, rather; then the one that is furthest ahead."""
    assert task.response is not None
    engine = task.response.engine

    def can_lend(other: Task) -> bool:
        response = other.response
        return (
            other is not task
            and response is not None
            and response.phase is TaskPhase.LIVE
            and response.protocol >= LENDING_PROTOCOL
            and response.engine == engine
            and not is_suspected(other)
        )

    def preference(other: Task) -> tuple[bool, int, str]:
        assert other.response is not None
        return other.response.lent is None, -other.response.stable_epoch, other.slot.key

    if task.response.protocol < LENDING_PROTOCOL:
        return None
    return min(filter(can_lend, replicas), key=preference, default=None)
