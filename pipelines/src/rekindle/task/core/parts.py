"""What `core.task.TaskCore` has instead of a process's log, readers and threads. Used only by tests
and simulations. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.protocol import EntryRef, SinkAssignment, SinkProgress
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.loop import LoopCore
from rekindle.task.core.saver import SaverCore
from rekindle.task.core.sink import SinkCore
from rekindle.task.core.streams import StreamsCore


@dataclass(slots=True)
class LogPositions:
    base: int
    last: int
    local_bytes: int = 0


@dataclass(slots=True)
class InputPositions:
    """The head of inputs that are outside of the core, as the status reads it."""

    newest: int = NO_EPOCH

    def head(self) -> int:
        return self.newest

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        return None


class Sinks:
    """The sinks of one task, by query."""

    def __init__(self, written_through: int, compare_files_from: int | None) -> None:
        self.cores: dict[str, SinkCore] = {}
        self._written_through = written_through
        self._compare_files_from = compare_files_from

    def start(self, assigned: SinkAssignment, through: int | None) -> SinkCore:
        core = SinkCore(assigned, self._written_through, self._compare_files_from, through)
        self.cores[assigned.query] = core
        return core

    def progress(self) -> tuple[SinkProgress, ...]:
        return tuple(core.progress() for core in self.cores.values())

    def problem(self) -> str | None:
        return next((c.problem for c in self.cores.values() if c.problem is not None), None)


@dataclass(frozen=True, slots=True)
class SaverAdapter:
    """The saver as the status reads it (`status.SaverView`)."""

    core: SaverCore

    @property
    def problem(self) -> str | None:
        return self.core.problem

    def done(self) -> tuple[EntryRef, ...]:
        return self.core.saved()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a task has once it is restored. `streams`: None if it reads a source."""

    log: LogPositions
    loop: LoopCore
    sinks: Sinks
    streams: StreamsCore | None = None
