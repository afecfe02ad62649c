"""A simulated task's output log in the simulated store.

`ship_log`, the names of pieces and what is chosen of them are the product's; a piece has the values
of epochs in place of their rows. A piece may be damaged in the store. What a task has adopted it
fetches when a reader asks for it, and a piece that is not what its name says costs the log from
there on.

Design: docs/design/checkpoints.md#output-logs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from rekindle.checkpoints.shipped import (
    Piece,
    PieceWriter,
    held_epochs_of,
    is_content_of,
    parse_piece_name,
    path_to,
    piece_name,
)
from rekindle.errors import BelowFloor, LogCorrupt, RekindleError
from rekindle.protocol import RestorePoint
from rekindle.streams.log_reading import EncodedEpoch
from rekindle.task.core.shipping import ShipLog, ShippingCore
from rekindle.task.log_shipper import LogEnd, ship_log
from rekindle.topology.model import Partition
from rekindle_testing.simulation.network import STORE
from rekindle_testing.simulation.values import is_idle, watermark_of

if TYPE_CHECKING:
    from rekindle_testing.simulation.store_and_sinks import SimulatedStore
    from rekindle_testing.simulation.surroundings import Surroundings
    from rekindle_testing.simulation.task import TaskBoot

FAR_BEHIND = -4
"""Intervals by which a reader is earlier far behind than in the product: waits are shorter."""
_DAMAGED = 0.05
_READ_EPOCHS = 5
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class StoredPiece:
    data: bytes
    saved_at: float


class SimulatedPieceWriter(PieceWriter):
    """Pieces of lines with an epoch and its value."""

    def _encode(self, epoch: EncodedEpoch) -> None:
        self._data += json.dumps([epoch.epoch, epoch.digest]).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class LogCopy:
    """A log as it was when a shipment began."""

    base: int
    values: Mapping[int, str]

    def read_encoded(self, from_epoch: int, max_bytes: int) -> list[EncodedEpoch]:
        if from_epoch not in self.values:
            raise BelowFloor(f"epoch {from_epoch} is not there")
        epochs = range(from_epoch, from_epoch + _READ_EPOCHS)
        return [
            EncodedEpoch(epoch, watermark_of(value), value, None, 0, is_idle(value))
            for epoch in epochs
            if (value := self.values.get(epoch)) is not None
        ]


@dataclass(frozen=True, slots=True)
class SimulatedPieces:
    """The pieces of a partition."""

    store: SimulatedStore
    partition: Partition
    now: float

    def pieces(self) -> list[Piece]:
        found = filter(None, map(parse_piece_name, self.store.pieces))
        return [piece for key, piece in found if key == self.partition.key]

    def put_piece(self, piece: Piece, data: bytes) -> None:
        name = piece_name(self.partition.key, piece)
        if Random(f"damage {name}").random() < _DAMAGED:
            epoch, value = json.loads(data.splitlines()[-1])
            data = data[: data.rindex(b"[")] + json.dumps([epoch, f"damaged {value}"]).encode()
        self.store.pieces.setdefault(name, StoredPiece(data, self.now))

    def read(self, name: str) -> dict[int, str] | None:
        """The values of a piece, as `TaskStore.get`; None if it is gone or damaged."""
        stored = self.store.pieces.get(name)
        if stored is None:
            return None
        if not is_content_of(name, stored.data):
            del self.store.pieces[name]
            return None
        return dict(map(json.loads, stored.data.splitlines()))


class SimulatedShipping:
    """Of one boot."""

    def __init__(self, task: TaskBoot, around: Surroundings) -> None:
        self._task = task
        self._around = around
        self._end = LogEnd()
        self._fetching: set[str] = set()
        self._found: list[Piece] = []

    def held_log(self, local: tuple[int, int] | None) -> tuple[int, int] | None:
        """What the task reports; `local`: of the log on its disk."""
        disk, around = self._task.pod.disk, self._around
        doubted = disk.discard or disk.compare or disk.disputed is not None or disk.refuses_shipped
        if local is not None or doubted or around.store.down:
            return local
        self._found = self._pieces().pieces()
        return held_epochs_of(self._found)

    def adopts(self, point: RestorePoint) -> bool:
        return bool(self._found) and point.log_from is not None

    def adopt(self, point: RestorePoint, chained: str) -> None:
        """Begin with the log that is in the store. Raises LogCorrupt."""
        disk = self._task.pod.disk
        path = path_to(self._found, point.epoch, chained)
        if not path or path[0].first > (point.log_from or 0):
            disk.refuses_shipped = True
            raise LogCorrupt("what is in the store is of other output")
        names = {p.first: (piece_name(self._task.partition.key, p), p.last) for p in path}
        disk.adopt(names, point.epoch)
        self._around.checks.adopted_logs += 1
        self._task.step(partial(self._task.core.log_adopted, point.epoch))

    def ship(self, request: ShipLog) -> None:
        task, disk = self._task, self._task.pod.disk
        self._around.checks.ships(task.pod, request.through)
        log = LogCopy(disk.base, dict(disk.values))
        pieces, end = self._pieces(), self._end

        def ship() -> RekindleError | None:
            try:
                ship_log(request, log, pieces, end, SimulatedPieceWriter)
            except RekindleError as error:
                return error
            return None

        def ended(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._end = LogEnd()
                self._report(lambda shipping, now: shipping.failed("no answer", now))
            else:
                self._report(lambda shipping, now: shipping.shipped(request.through, now))

        self._around.network.call(task.process, STORE, ship, ended, _TIMEOUT_S)

    def is_fetched(self, from_epoch: int, last: int, changed: Callable[[], None]) -> bool:
        """Whether the log has these epochs on its disk; what is missing is fetched, then `changed`
        is called."""
        disk = self._task.pod.disk
        for first, (name, end) in list(disk.shipped.items()):
            if first <= last and from_epoch <= end:
                if name not in self._fetching:
                    self._fetching.add(name)
                    self._fetch(first, name, changed)
                return False
        return True

    def _fetch(self, first: int, name: str, changed: Callable[[], None]) -> None:
        task, disk = self._task, self._task.pod.disk

        def ended(result: Any) -> None:
            self._fetching.discard(name)
            if isinstance(result, Exception):
                changed()  # the reader tries again
            elif result is not None:
                disk.fetched(first, result)
                changed()
            elif first in disk.shipped:
                disk.cut(first)  # as what is opened the next time; nothing is appended until then
                task.pod.restart()

        read = partial(self._pieces().read, name)
        self._around.network.call(task.process, STORE, read, ended, _TIMEOUT_S)

    def _pieces(self) -> SimulatedPieces:
        around = self._around
        return SimulatedPieces(around.store, self._task.partition, around.scheduler.now)

    def _report(self, happened: Callable[[ShippingCore, float], list[ShipLog]]) -> None:
        self._task.step(partial(self._task.core.shipping_reported, happened))
