"""Which definition of a query may write which epochs to a sink.

A sink identifies an epoch by its number, which is safe as long as all writers compute the same.
Two definitions of a query do not; and a task of the old one may keep running on a node that can
reach nothing but the sink. So a definition acquires ranges of epochs before it writes them, by
creating an object if absent:

  _rekindle/<query>/<first epoch of the range:012d>.json
      {"definition", "generation", "from", "through"}

The next range begins after the end of the newest one, so all definitions compete for one name. If
the newest range belongs to a newer definition, this one has been replaced and stops writing. If it
belongs to an older definition, this one acquires the next range and begins there: the older one has
written nothing after its own range, and never will. Ranges end at checkpoint epochs, so they are
short. Does not know rows or file names.

Design: docs/design/exactly-once.md#definitions.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from rekindle.errors import SinkRefused
from rekindle.objects import Objects, Retry, to_json

T = TypeVar("T")

EPOCH_RANGES_FOLDER = "_rekindle"
KEPT = 3
"""Number of ranges that are not deleted; only the newest one is needed."""
_FORMAT = 1
_ATTEMPTS = 1000
_NAME = re.compile(r"(?P<first>\d{12})\.json")


@dataclass(frozen=True, slots=True)
class Definition:
    """What a query computes and where it starts. The one with the higher `generation` is newer.
    `from_epoch`: the first epoch that it should write; it may have to begin later."""

    id: str
    generation: int
    from_epoch: int
    checkpoint_interval_epochs: int


@dataclass(frozen=True, slots=True)
class _Range:
    """`first` is in the object's name; `start`: the definition's first epoch in this sink."""

    first: int
    definition: str
    generation: int
    start: int
    through: int


class EpochRanges:
    """One definition's view of one query's ranges. Not shared between threads. All methods raise
    SinkRefused if the sink belongs to a newer definition, OSError if it cannot be accessed."""

    def __init__(
        self,
        objects: Objects,
        retry: Retry,
        query: str,
        mine: Definition,
        folder: str = EPOCH_RANGES_FOLDER,
    ) -> None:
        self._objects = objects
        self._retry = retry
        self._prefix = f"{folder}/{query}/"
        self._query = query
        self._mine = mine
        self._held: _Range | None = None

    def first_epoch(self) -> int:
        """The first epoch that this definition writes to this sink; the same for all its
        partitions, and it never changes. After this call has returned, no older definition can
        acquire a range."""
        return (self._held or self._acquire(None)).start

    def last_possible_epoch(self) -> int | None:
        """An epoch after which none was written before the call. None if it is unknown, because the
        sink may have files of a release without ranges."""
        held = self._held or self._acquire(None)
        return held.through if held.first > 0 else None

    def acquire(self, epoch: int) -> None:
        """Return once this epoch belongs to this definition."""
        held = self._held
        if held is None or epoch > held.through:
            held = self._acquire(epoch)
        if epoch < held.start:
            raise SinkRefused(
                f"query {self._query}: epoch {epoch} belongs to an older definition; this one "
                f"begins at epoch {held.start}"
            )

    def _acquire(self, epoch: int | None) -> _Range:
        for _ in range(_ATTEMPTS):
            newest = self._newest()
            if newest is not None and self._is_mine(newest):
                if epoch is None or epoch <= newest.through:
                    self._held = newest
                    return newest
                start = newest.start
            else:
                start = max(newest.through + 1 if newest else 0, self._mine.from_epoch)
            first = newest.through + 1 if newest else 0
            wanted = self._range(first, start, epoch)
            # Since the newest range was read, another writer may have acquired this range and later
            # ones, and deleted this one, which could then be created again.
            if self._create(wanted) and (listed := self._listed()) and listed[-1] == first:
                self._delete_old(listed)
                self._held = wanted
                return wanted
        raise SinkRefused(
            f"query {self._query}: {self._objects.url}/{self._prefix} keeps changing; check "
            "whether two topologies write there"
        )

    def _is_mine(self, newest: _Range) -> bool:
        """Whether the range belongs to this definition; False if to an older one. Raises
        SinkRefused if to a newer one."""
        mine = self._mine
        if (newest.definition, newest.generation) == (mine.id, mine.generation):
            return True
        if newest.generation < mine.generation:
            return False
        raise SinkRefused(
            f"query {self._query}: epochs from {newest.start} on belong to its definition of "
            f"generation {newest.generation} at {self._objects.url}; this task runs "
            f"generation {mine.generation} and stops writing"
        )

    def _range(self, first: int, start: int, epoch: int | None) -> _Range:
        mine, last = self._mine, max(start, epoch if epoch is not None else start)
        interval_epochs = mine.checkpoint_interval_epochs
        through = -(-(last + 1) // interval_epochs) * interval_epochs - 1  # next checkpoint epoch
        return _Range(first, mine.id, mine.generation, start, through)

    # -- objects ---------------------------------------------------------------------------------

    def _listed(self) -> list[int]:
        """The first epochs of the existing ranges, ascending."""
        infos = self._retried(lambda: self._objects.list(self._prefix))
        names = (_NAME.fullmatch(info.name.removeprefix(self._prefix)) for info in infos)
        return sorted(int(match["first"]) for match in names if match)

    def _newest(self) -> _Range | None:
        while listed := self._listed():
            name = self._name(listed[-1])
            try:
                data = self._retried(lambda name=name: self._objects.get(name))  # type: ignore[misc]
            except FileNotFoundError:
                continue  # deleted since it was listed: there are newer ones
            return self._decode(listed[-1], name, data)
        return None

    def _create(self, wanted: _Range) -> bool:
        fields = asdict(wanted)
        fields["from"] = fields.pop("start")
        data = to_json({"format": _FORMAT, **fields})
        return self._retried(lambda: self._objects.put(self._name(wanted.first), data))

    def _delete_old(self, listed: list[int]) -> None:
        """Delete old ranges. An error is ignored: ranges that stay only make listings longer."""
        with contextlib.suppress(OSError):
            self._delete(listed[:-KEPT])

    def _delete(self, listed: list[int]) -> None:
        for first in listed:
            self._retried(lambda first=first: self._objects.delete(self._name(first)))  # type: ignore[misc]

    def _decode(self, first: int, name: str, data: bytes) -> _Range:
        try:
            record = json.loads(data)
            if record["format"] > _FORMAT:
                raise ValueError(f"it has format {record['format']}, this release reads {_FORMAT}")
            return _Range(
                first,
                str(record["definition"]),
                int(record["generation"]),
                int(record["from"]),
                int(record["through"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SinkRefused(
                f"query {self._query}: {self._objects.url}/{name} cannot be read: {error}"
            ) from error

    def _name(self, first: int) -> str:
        return f"{self._prefix}{first:012d}.json"

    def _retried(self, action: Callable[[], T]) -> T:
        return self._retry.run(action)
