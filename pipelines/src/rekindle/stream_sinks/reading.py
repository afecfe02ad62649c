"""What one call of a reader is sent: the kept epochs of a query's partition, within bounds.

Rows are read out of the log's mapped files as they are sent, so a reader that takes none holds only
its own thread, and of spilled files what `spilled` allows.

Design: docs/design/stream-sinks.md#calls.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from rekindle.errors import BelowFloor
from rekindle.protocol import ConsistencyState
from rekindle.stream_sinks.cursor import Control, Cursor
from rekindle.stream_sinks.spilled import SpilledReads, TooManySpilledReads
from rekindle.stream_sinks.ticket import Ticket, TicketPosition
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.live_history import Position, Span
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.table_memory import memory_bytes

READ_BYTES = 1 << 20
"""Limit of the epochs that are read from the log at a time."""
PART_BYTES = 1 << 20
"""Limit of the rows in one message, but a single row may be larger: clients in Go refuse more than
4 MiB by default."""
MAX_EPOCHS = 4096
"""Limit of the epochs of one call. Calls that reach it have mostly epochs without rows."""
_EMPTY_EPOCH_BYTES = 64
"""What an epoch without rows takes of `max_bytes`."""


class Message(NamedTuple):
    """`rows`, and their metadata as JSON."""

    rows: pa.RecordBatch
    metadata: str


class ServedQuery:
    """One query of a task. `output`: the log and its tentative branches, if it may have any;
    `from_epoch`: the first epoch that belongs to the query; `spilled`: shared by all queries of the
    task. Thread-safe."""

    def __init__(
        self,
        query: str,
        log: OutputLog,
        output: LiveOutput | None,
        from_epoch: int = 0,
        tentative: bool = False,
        spilled: SpilledReads | None = None,
    ) -> None:
        self.query = query
        self.log = log
        self.output = output
        self.from_epoch = from_epoch
        self.tentative = tentative
        self.spilled = SpilledReads() if spilled is None else spilled
        self.through: int | None = None
        """No epoch above it is sent, because replicas disagree; None: all are."""
        self.ended = False
        self._changed = threading.Condition()
        self._changes = 0
        log.listen(self._note_change)
        if output is not None:
            output.listen(self._note_change)

    @property
    def oldest(self) -> int:
        """The lowest epoch that is kept."""
        return max(self.log.base, self.from_epoch)

    @property
    def newest(self) -> int:
        """The newest stable epoch that may be sent."""
        last, through = self.log.last, self.through
        return last if through is None else min(last, through)

    @property
    def state(self) -> ConsistencyState:
        """Of the task's output."""
        return ConsistencyState.STABLE if self.output is None else self.output.report.state

    def limit(self, through: int | None) -> None:
        """See `through`."""
        self.through = through
        self._note_change()

    def end(self) -> None:
        """Wake all who wait: the query is no longer served."""
        self.ended = True
        self._note_change()

    def _note_change(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def wait(self, call: ReadCall, timeout_s: float) -> None:
        """Wait until there is something for a call, or something else has happened."""
        with self._changed:
            before = self._changes
        if not call.has_more() and not self.ended:
            with self._changed:
                self._changed.wait_for(lambda: self._changes != before, timeout_s)


class ReadCall:
    """The messages of one call. Raises BelowFloor if the next epoch is no longer kept."""

    def __init__(self, served: ServedQuery, ticket: Ticket) -> None:
        self._served = served
        self._output = served.output if ticket.tentative else None
        self._cursor = ticket.cursor or Cursor(served.oldest)
        self._position: Position | None = None
        at, output = ticket.at, self._output
        if at is not None and output is not None and at.boot == output.boot:
            self._position = Position(at.span, at.epoch)
        self._ticket = ticket
        self._bytes_left = ticket.max_bytes
        self._epochs = 0
        self._no_rows = served.log.schema.empty_table().to_batches() or [
            pa.RecordBatch.from_pylist([], schema=served.log.schema)
        ]

    def has_more(self) -> bool:
        """Whether it has anything to send now."""
        return self._next_span() is not None

    def messages(self, *, with_rows: bool = True) -> Iterator[Message]:
        """At least one, the last of which is of the kind END. `with_rows=False`: nothing has come
        while the call waited."""
        self._require_kept()
        yield from self._corrected()
        while with_rows and not self._full and (found := self._next_span()) is not None:
            yield from self._span(*found)
        yield self._message("END", self._cursor.next_stable - 1)

    @property
    def _full(self) -> bool:
        return self._bytes_left <= 0 or self._epochs >= MAX_EPOCHS

    def _require_kept(self) -> None:
        served, epoch = self._served, self._cursor.next_stable
        if epoch < served.oldest:
            raise BelowFloor(
                f"epoch {epoch} of query {served.query}, partition {served.log.partition}, is no "
                f"longer kept by this replica: its oldest kept epoch is {served.oldest}. Read it "
                f"from another replica, or set from_epoch to {served.oldest}"
            )

    def _next_span(self) -> tuple[Span, OutputLog] | None:
        """Stable epochs first, out of the log; then, for tentative results, the order of the
        output from there on."""
        log, through = self._served.log, self._served.through
        stable, newest = self._cursor.next_stable, self._served.newest
        # Number -1: it is not in the order of the output.
        from_log = Span(BatchKind.STABLE, attempt=0, number=-1, first=stable, last=newest)
        of_log = (from_log, log) if stable <= newest else None
        if self._output is None or (self._position is None and of_log is not None):
            return of_log
        found = self._output.next(self._position, stable)
        if self._position is not None and not self._output.has(self._position):
            # Forgotten, perhaps since the call began: what is stable comes out of the log first.
            self._position = None
            return self._next_span()
        if self._position is None and through is not None and stable <= log.last:
            return None  # what follows stable epochs that are held back has to wait for them
        if found is None or found[0].is_control:
            return found
        span, branch = found
        if span.kind is BatchKind.STABLE:
            if span.first > stable:  # the order of what is between is forgotten
                self._position = None
                return of_log
            span = replace(span, last=min(span.last, newest))
        elif through is not None:
            span = replace(span, last=min(span.last, through))
            if span.first > span.last and of_log is not None:
                self._position = None  # it is corrected before it may be sent
                return of_log
        return (span, branch) if span.first <= span.last else None

    def _span(self, span: Span, log: OutputLog) -> Iterator[Message]:
        if span.kind is BatchKind.UNDO:
            controls, self._cursor = self._cursor.undo(span.first)
            self._position = Position(span.number + 1, NO_EPOCH)
            yield from map(self._control, controls)
        elif span.kind is BatchKind.RECONCILIATION_DONE:
            self._position = Position(span.number + 1, NO_EPOCH)
            yield from self._reconciliation_done()
        elif span.kind is BatchKind.TENTATIVE:
            yield from self._tentative(span, log)
        else:
            yield from self._stable(span, log)

    def _stable(self, span: Span, log: OutputLog) -> Iterator[Message]:
        for batch in self._read(log, span.first, span.last):
            controls, self._cursor = self._cursor.before_stable(batch.epoch)
            yield from map(self._control, controls)
            at = Position(span.number, batch.epoch + 1) if span.number >= 0 else self._position
            yield from self._rows(batch, self._cursor.after_stable(batch.epoch), at)
            yield from self._corrected()

    def _tentative(self, span: Span, log: OutputLog) -> Iterator[Message]:
        first = self._cursor.first_tentative(span.first)
        try:
            for batch in self._read(log, first, span.last):
                at = Position(span.number, batch.epoch + 1)
                yield from self._rows(batch, self._cursor.after_tentative(batch.epoch), at)
        except BelowFloor:  # dropped meanwhile: the reader goes on behind them
            self._position = Position(span.number, span.last + 1)
        if first > span.last:
            self._position = Position(span.number, span.last + 1)

    def _read(self, log: OutputLog, epoch: int, last: int) -> Iterator[EpochBatch]:
        while epoch <= last and not self._full:
            try:
                with self._served.spilled.read(log, epoch, READ_BYTES) as read:
                    if not read:
                        return
                    for batch in read:
                        if batch.epoch > last or self._full:
                            return
                        self._bytes_left -= (
                            memory_bytes(batch.rows) if batch.rows.num_rows else _EMPTY_EPOCH_BYTES
                        )
                        self._epochs += 1
                        epoch = batch.epoch + 1
                        yield batch
            except TooManySpilledReads:
                if not self._epochs:
                    raise
                self._bytes_left = 0  # the call ends with what it has sent

    def _corrected(self) -> Iterator[Message]:
        """REC_DONE, if all that the reader has dropped has come again."""
        if self._cursor.is_corrected:
            yield from self._reconciliation_done()

    def _reconciliation_done(self) -> Iterator[Message]:
        controls, self._cursor = self._cursor.reconciliation_done()
        yield from map(self._control, controls)

    # -- messages --------------------------------------------------------------------------------

    def _rows(self, batch: EpochBatch, after: Cursor, at: Position | None) -> Iterator[Message]:
        """The messages of an epoch. The ticket in the last one asks for what follows; the tickets
        in those before it ask for this epoch again, since a reader may go on with any of them."""
        parts = _parts(batch.rows)
        for number, rows in enumerate(parts):
            if number + 1 == len(parts):
                self._cursor, self._position = after, at
            yield self._message(batch.kind, batch.epoch, rows, number, len(parts))
        self._cursor, self._position = after, at

    def _control(self, control: Control) -> Message:
        return self._message(control.kind, control.epoch)

    def _message(
        self,
        kind: str,
        epoch: int,
        rows: pa.RecordBatch | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> Message:
        output, position = self._output, self._position
        at = None
        if output is not None and position is not None:
            at = TicketPosition(output.boot, position.span, position.epoch)
        ticket = replace(
            self._ticket, partition=self._served.log.partition, cursor=self._cursor, at=at
        )
        metadata = {
            "kind": str(kind),
            "epoch": epoch,
            "part": part,
            "parts": parts,
            "state": str(self._served.state),
            "next": ticket.encode(),
        }
        return Message(self._no_rows[0] if rows is None else rows, json.dumps(metadata))


def _parts(rows: pa.Table) -> list[pa.RecordBatch]:
    """Each has at most PART_BYTES, or one row. An epoch without rows has no part."""
    parts: list[pa.RecordBatch] = []
    for batch in rows.to_batches():
        at = 0
        while at < batch.num_rows:
            count = _fitting(batch.slice(at))
            parts.append(batch.slice(at, count))
            at += count
    return parts


def _fitting(rows: pa.RecordBatch) -> int:
    """How many of the first rows are one part. The first guess is by the average of all."""
    count, size = int(rows.num_rows), int(rows.nbytes)
    while size > PART_BYTES and count > 1:
        count = max(1, count * PART_BYTES // size)
        size = rows.slice(0, count).nbytes
    return count
