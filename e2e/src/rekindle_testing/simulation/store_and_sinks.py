"""What is outside the topology: the checkpoint store and the sinks.

Both are put-if-absent. While one is down, calls fail after a while, or never end; what they had to
write may be there all the same, at once or some time later, as with a real store that does not
respond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rekindle.checkpoints.codec import entry_name, manifest_name
from rekindle.checkpoints.garbage import find_garbage, needed_entries
from rekindle.checkpoints.manifest import Manifest
from rekindle.objects import ObjectInfo
from rekindle.protocol import EntryRef
from rekindle.task.state import TaskState
from rekindle.topology.model import Partition
from rekindle_testing.simulation.late_requests import perform_now_later_or_never
from rekindle_testing.simulation.network import SINKS, STORE, Reply
from rekindle_testing.simulation.overlapping import OverlappingFaults
from rekindle_testing.simulation.scheduler import Scheduler, SimulatedProcess
from rekindle_testing.simulation.shipping import StoredPiece
from rekindle_testing.simulation.values import FoldedState, hash_of

_CALL_S = (0.002, 0.06)
_FAILS_S = (0.2, 2.0)


class Down(Exception):
    """The service did not respond; what was asked may have been done."""


class Outside:
    """A service at a host of its own. A request is a function, which is called at the service."""

    def __init__(self, scheduler: Scheduler, host: str) -> None:
        self.host = host
        self.process: SimulatedProcess | None = SimulatedProcess(scheduler, host)
        self.down = OverlappingFaults()
        self._scheduler = scheduler

    def serve(self, request: Callable[[], Any], reply: Reply) -> None:
        if not self.down:
            self._scheduler.after(self._scheduler.between(*_CALL_S), lambda: reply(request()))
            return
        perform_now_later_or_never(self._scheduler, request)
        if self._scheduler.random.random() < 0.5:
            self._scheduler.after(self._scheduler.between(*_FAILS_S), lambda: reply(Down()))


@dataclass(frozen=True, slots=True)
class StoredEntry:
    state: TaskState
    saved_at: float


class SimulatedStore(Outside):
    """The checkpoint store. `entries` and `pieces` of logs by name, `manifests` by number."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, STORE)
        self.entries: dict[str, StoredEntry] = {}
        self.manifests: dict[int, tuple[Manifest, float]] = {}
        self.pieces: dict[str, StoredPiece] = {}
        self._saves = 0

    @property
    def newest(self) -> Manifest | None:
        return self.manifests[max(self.manifests)][0] if self.manifests else None

    def save(self, partition: Partition, state: TaskState) -> EntryRef:
        operators = state.operators
        assert isinstance(operators, FoldedState)
        self._saves += 1
        digest = hash_of(operators.fold).ljust(16, "0")
        token = f"{self._saves:012x}"
        name = entry_name(partition.segment, partition.index, state.epoch, digest, token)
        self.entries[name] = StoredEntry(state, self._scheduler.now)
        return EntryRef(epoch=state.epoch, object=name, digest=digest, bytes=100)

    def load(self, name: str) -> TaskState | None:
        entry = self.entries.get(name)
        return entry.state if entry is not None else None

    def missing(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in self.entries)

    def write(self, manifest: Manifest) -> bool:
        """As `ManifestStore.write`: False if this number, or a higher one, is taken."""
        known, _ = self.manifests.setdefault(manifest.seq, (manifest, self._scheduler.now))
        return known == manifest and max(self.manifests) == manifest.seq

    def collect_garbage(self, retain: int, in_use: Set[str]) -> tuple[str, ...]:
        """Delete what the newest manifests do not need, except entries `in_use`. Returns the names
        of deleted entries and pieces."""
        numbers = sorted(self.manifests)[-retain:]
        manifests = [self.manifests[n][0] for n in numbers]
        objects = [ObjectInfo(n, 1, e.saved_at) for n, e in self.entries.items()]
        needed = needed_entries(objects, manifests) | (in_use & self.entries.keys())
        objects += [ObjectInfo(manifest_name(n), 1, at) for n, (_, at) in self.manifests.items()]
        objects += [ObjectInfo(n, 1, piece.saved_at) for n, piece in self.pieces.items()]
        garbage = find_garbage(objects, manifests, {name: frozenset() for name in needed})
        names = {info.name for info in garbage}
        self.manifests = {
            n: kept for n, kept in self.manifests.items() if manifest_name(n) not in names
        }
        deleted = tuple(name for name in (*self.entries, *self.pieces) if name in names)
        for name in deleted:
            self.entries.pop(name, None)
            self.pieces.pop(name, None)
        return deleted


class SimulatedSinks(Outside):
    """Files of all queries: the value of each epoch, by query and partition."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler, SINKS)
        self.files: dict[tuple[str, Partition], dict[int, str]] = {}
        # Epochs of files that a person has deleted, and that are not written again yet.
        self.deleted: dict[tuple[str, Partition], set[int]] = {}

    def last(self, query: str, partition: Partition, after: int) -> int:
        return max(self.files.get((query, partition), ()), default=after)

    def write(self, query: str, partition: Partition, epoch: int, value: str) -> str:
        """Create a file, unless it is there. Returns its value."""
        self.deleted.get((query, partition), set()).discard(epoch)
        return self.files.setdefault((query, partition), {}).setdefault(epoch, value)

    def durable(self, query: str, partition: Partition) -> int:
        """The newest epoch up to which all files exist, not counting those that a person has
        deleted."""
        files, epoch = self.files.get((query, partition), {}), 0
        deleted = self.deleted.get((query, partition), ())
        while epoch in files or epoch in deleted:
            epoch += 1
        return epoch - 1

    def delete(self, query: str, partition: Partition, epoch: int) -> None:
        del self.files[query, partition][epoch]
        self.deleted.setdefault((query, partition), set()).add(epoch)
