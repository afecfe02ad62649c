"""Ships the output log to the checkpoint store, in a thread of its own.

An epoch, a checkpoint and a reader never wait for it: a slow store only means that less is shipped.
`ship_log` reads the log as any consumer; the thread exists from the first shipment on.

Design: docs/design/checkpoints.md#output-logs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from rekindle.checkpoints.shipped import Piece, PieceWriter
from rekindle.errors import RekindleError
from rekindle.streams.digest import chained_digest_from
from rekindle.streams.log_reading import EncodedEpoch
from rekindle.task.core.shipping import ShipLog, ShippingCore
from rekindle.task.process import TaskProcess
from rekindle.workers import CallTimer, Worker

PIECE_BYTES = 8 << 20
"""A piece is not larger, unless an epoch is; a reader that is behind fetches whole pieces."""
FIND_S = 5.0
"""A new pod waits so long for the names of what is in the store, while the engine starts."""
_READ_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class PieceStore(Protocol):
    """The pieces of one partition. They raise StoreError."""

    def pieces(self) -> Sequence[Piece]: ...
    def put_piece(self, piece: Piece, data: bytes) -> object: ...


class ReadableLog(Protocol):
    """Of `rekindle.streams.log.OutputLog`."""

    @property
    def base(self) -> int: ...
    def read_encoded(self, from_epoch: int, max_bytes: int) -> list[EncodedEpoch]: ...


class LogEnd:
    """The end of what is in the store; None until it was looked for. `chained`: see
    `PieceWriter`."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.chained = ""


def ship_log(
    request: ShipLog,
    log: ReadableLog,
    store: PieceStore,
    end: LogEnd,
    writer_of: Callable[[str], PieceWriter] = PieceWriter,
) -> None:
    """Put the pieces that the store lacks; `end` is updated. Raises StoreError, LogCorrupt,
    BelowFloor. `writer_of` makes the writer from a chained digest."""
    if end.epoch is None or end.epoch + 1 < max(log.base, request.first):
        _find_end(request, log, store, end)
    assert end.epoch is not None
    writer = writer_of(end.chained)
    while end.epoch < request.through:
        next_epoch = end.epoch + 1
        while next_epoch <= request.through and writer.size < PIECE_BYTES:
            for epoch in log.read_encoded(next_epoch, _READ_BYTES):
                if epoch.epoch > request.through or writer.size >= PIECE_BYTES:
                    break
                writer.add(epoch, request.chained.get(epoch.epoch))
                next_epoch = epoch.epoch + 1
        taken = writer.take()
        assert taken is not None, "the log has what is committed"
        store.put_piece(*taken)
        end.epoch, end.chained = taken[0].last, writer.chained


def _find_end(request: ShipLog, log: ReadableLog, store: PieceStore, end: LogEnd) -> None:
    """The last piece in the store that this log continues; without one, before its first epoch."""
    base = max(log.base, request.first)
    for piece in sorted(store.pieces(), key=lambda p: -p.last):
        if base - 1 <= piece.last <= request.through and _is_continued(piece, request, log):
            end.epoch, end.chained = piece.last, piece.after
            return
    end.epoch = base - 1
    end.chained = request.chained.get(base - 1) or chained_digest_from(base - 1)


def _is_continued(piece: Piece, request: ShipLog, log: ReadableLog) -> bool:
    """Whether this log has the output that follows a piece: its own chained digest there, or later,
    is the one that follows from the piece's."""
    epoch, chained = piece.last, piece.after
    known = min((e for e in request.chained if e >= epoch), default=None)
    if known is None:
        return False
    while epoch < known:
        for read in log.read_encoded(epoch + 1, _READ_BYTES):
            if epoch < known:
                chained = read.chained_after(chained)
                epoch = read.epoch
    return chained == request.chained[known]


def find_shipped(store: PieceStore) -> list[Piece]:
    """The pieces of the log that are in the store, before the task answers its first poll; none if
    the store does not respond in time: the task computes again what readers need."""
    found = SimpleQueue[Sequence[Piece]]()

    def find() -> None:
        try:
            found.put(store.pieces())
        except Exception as error:  # a new topology's store does not exist yet
            _log.info("whether the output log is in the store is not known: %s", error)
            found.put(())

    threading.Thread(target=find, name="log-shipper", daemon=True).start()
    try:
        return list(found.get(timeout=FIND_S))
    except Empty:
        _log.warning("whether the output log is in the store is not known after %g s", FIND_S)
        return []


class LogShipper:
    """`request` is called under the lock of the process."""

    def __init__(self, process: TaskProcess, store: PieceStore) -> None:
        self._process = process
        self._store = store
        self._call_timer = CallTimer()
        self._requests = SimpleQueue[tuple[ShipLog, ReadableLog] | None]()  # None: it has to end
        self._end = LogEnd()
        self._stopping = False
        self._worker: Worker | None = None

    @property
    def problem(self) -> str | None:
        worker = self._worker.problem if self._worker is not None else None
        return worker or self._call_timer.problem

    def request(self, request: ShipLog, log: ReadableLog) -> None:
        self._requests.put((request, log))
        if self._worker is None:
            self._worker = Worker("log-shipper", self._run)
            self._worker.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._requests.put(None)
        if self._worker is not None:
            self._worker.stop()
            self._worker.join(timeout_s)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (requested := self._requests.get()) is not None and not self._stopping:
            self._ship(*requested)

    def _ship(self, request: ShipLog, log: ReadableLog) -> None:
        through = request.through
        what = f"shipping the output log through epoch {through}"
        try:
            with self._call_timer.during(what):
                ship_log(request, log, self._store, self._end)
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception(what)
            self._end = LogEnd()  # look for it again
            message = str(error) or repr(error)
            self._report(lambda shipping, now: shipping.failed(message, now))
            return
        self._report(lambda shipping, now: shipping.shipped(through, now))
        assert self._worker is not None
        self._worker.progressed()

    def _report(self, happened: Callable[[ShippingCore, float], list[ShipLog]]) -> None:
        self._process.tell(partial(self._process.core.shipping_reported, happened))
