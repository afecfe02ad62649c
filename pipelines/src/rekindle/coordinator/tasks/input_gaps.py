"""Tasks whose next epoch no replica of an input has any more. Pure.

Floors and manifests keep what tasks will read (I5), so this only happens if an entry cannot be
restored, or the store has lost entries. Such a task would wait for ever, and its position would
keep the logs of its other inputs: it starts again, from a restore point or from a partner's state.

Design: docs/design/coordinator.md#retention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rekindle.coordinator.tasks.membership import Task
from rekindle.topology.model import Partition, Slot

GAP_S = 30.0
"""A task starts again after so long at its epoch, while no replica of an input has the next one."""
CHECK_INTERVAL_S = 5.0
"""How often all tasks and their inputs are checked."""

_Position = tuple[int, str, int]  # incarnation, boot, epoch


class InputGaps:
    def __init__(self) -> None:
        self._since: dict[Slot, tuple[_Position, float]] = {}
        self._checked_at: float | None = None

    def find(
        self,
        tasks: Iterable[Task],
        inputs: Mapping[Partition, Sequence[Partition]],
        readable: Mapping[Partition, Sequence[Task]],
        now: float,
    ) -> list[Task]:
        """Tasks that should start again. `readable`: replicas that are read from."""
        if self._checked_at is not None and now - self._checked_at < CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        bases = {partition: _base(replicas) for partition, replicas in readable.items()}
        before, self._since = self._since, {}
        found: list[Task] = []
        for task in tasks:
            response, epoch = task.response, task.position
            if response is None or epoch is None or not response.phase.serves:
                continue
            first = max((bases.get(p, 0) for p in inputs.get(task.partition, ())), default=0)
            if first <= epoch + 1:
                continue
            position = (task.pod.incarnation, response.boot_id, epoch)
            known = before.get(task.slot)
            since = known[1] if known is not None and known[0] == position else now
            self._since[task.slot] = position, since
            if now - since >= GAP_S:
                found.append(task)
        return found


def _base(replicas: Sequence[Task]) -> int:
    """The lowest epoch that any of these replicas has; 0 until all of them have responded."""
    known = [task.response.log_base for task in replicas if task.response is not None]
    return min(known, default=0) if len(known) == len(replicas) else 0
