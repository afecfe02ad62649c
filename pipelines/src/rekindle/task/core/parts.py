"""What a task has once it is restored. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.protocol import SinkAssignment, SinkProgress
from rekindle.task.core.loop import LoopCore
from rekindle.task.core.sink import SinkCore


@dataclass(slots=True)
class LogPositions:
    """What the core knows of the output log: it holds epochs `base` to `last`."""

    base: int
    last: int


class Sinks:
    """The sinks of one task, by query."""

    def __init__(self, written_through: int, compare_files_from: int | None) -> None:
        self.cores: dict[str, SinkCore] = {}
        self._written_through = written_through
        self._compare_files_from = compare_files_from
        self._compares = compare_files_from is not None

    def start(self, assigned: SinkAssignment, through: int | None) -> SinkCore:
        core = SinkCore(assigned, self._written_through, self._compare_files_from, through)
        self.cores[assigned.query] = core
        return core

    def progress(self) -> tuple[SinkProgress, ...]:
        return tuple(core.progress() for core in self.cores.values())

    def end_comparison(self) -> bool:
        """Whether all files that earlier boots may have written are compared now, and equal; True
        only once."""
        if not self._compares or not self.cores or any(c.compares for c in self.cores.values()):
            return False
        self._compares = False
        return True

    def problem(self) -> str | None:
        return next((c.problem for c in self.cores.values() if c.problem is not None), None)


@dataclass(frozen=True, slots=True)
class Parts:
    log: LogPositions
    loop: LoopCore
    sinks: Sinks
