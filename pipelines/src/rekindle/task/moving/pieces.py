"""Encodes state and output log of a task as pieces, and installs state and log from pieces.

A transfer is one sequence of bytes: a header, the runs of the state, the epochs of the log. The
header is JSON behind a prefix of 64 bytes: the layouts of the operators, which name runs by their
number, and the length of each run. A run is an Arrow IPC stream, without compression, so that its
size is known before it is encoded. An epoch is a record of the log (`streams.records`). All of them
begin at multiples of 64 bytes, so that a mapped file of them gives aligned buffers.

Runs and closed records (to which no further epoch without rows is added) never change, so the same
bytes can be cut from them at any time. The digest is of contents, not of bytes: layouts, rows of
runs, results of epochs. The newcomer computes it from the state and log that it has installed.

Design: docs/design/state-movement.md#pieces, docs/decisions/0050-state-from-a-partner.md.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.engine.model import State, operator_of
from rekindle.engine.state import layout
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import Run, RunId
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.version import MOVEMENT_FORMAT, STATE_FORMAT, engine_version
from rekindle.errors import BelowFloor, RekindleError
from rekindle.exchange.state_mover.chunks import Slice
from rekindle.objects import to_json
from rekindle.streams import records
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog, Result
from rekindle.streams.log_reading import EncodedEpoch
from rekindle.streams.records import DamagedRecord, Record, RecordKind
from rekindle.task.earlier_boots import EarlierBoots, continue_log
from rekindle.task.state import TaskState

MAGIC = b"RKSM"
FILE_BYTES = 8 << 20
"""The newcomer writes runs of about so many bytes to one file."""
READ_BYTES = 4 << 20
_PREFIX = struct.Struct("<4sIQ")
_ALIGN = records.ALIGN


class NotMovable(RekindleError):
    """State that cannot be sent, or received state that cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a newcomer has installed: the state, and the epochs from `base` on in its log."""

    state: TaskState
    base: int
    digest: str


class Pieces:
    """What a donor sends: `state`, and the epochs `base` to `state.epoch` of `log`, which must not
    be truncated meanwhile. `sizes`: of each piece, in order; `digest`: of all."""

    def __init__(
        self,
        state: TaskState,
        log: OutputLog,
        base: int,
        progressed: Callable[[int], None] = lambda runs: None,
    ) -> None:
        """Reads all of it; `progressed` is called with the number of runs read, and may raise.
        Raises NotMovable, LogCorrupt, BelowFloor."""
        self._runs = [*_runs_of(state.operators).values()]
        if any(not run.is_available for run in self._runs):
            raise NotMovable("some of its own state is still in the checkpoint store")
        self._log = log
        self._base = base
        contents = [c for c in log.contents(base) if c[0] <= state.epoch]
        if [epoch for epoch, _, _ in contents] != list(range(base, state.epoch + 1)):
            raise BelowFloor(f"the log does not hold epochs {base} to {state.epoch}")
        lengths = [_length(run.table) for run in self._runs]
        content = _describe(state, base)
        self._header = _header(content, lengths)
        self._encoded: tuple[int, pa.Buffer] | None = None  # the run that was read last
        self.epoch = state.epoch
        results = ((epoch, result) for epoch, result, _ in contents)
        self.digest = _digest(content, self._runs, results, progressed)
        self.sizes: list[int] = [
            len(self._header),
            *(_padded(length) for length in lengths),
            *(records.HEADER_BYTES + _padded(length) for _, _, length in contents),
        ]

    def read(self, slices: Sequence[Slice]) -> bytes:
        """The bytes of these slices, one after another. Raises BelowFloor, LogCorrupt,
        StoreError."""
        parts: list[bytes | memoryview] = []
        first_epoch = 1 + len(self._runs)
        for part in slices:
            if part.piece < first_epoch:
                piece = memoryview(self._header if not part.piece else self._run(part.piece - 1))
                parts.append(piece[part.offset : part.offset + part.nbytes])
        epochs = [part for part in slices if part.piece >= first_epoch]
        if epochs:
            parts += self._epochs(epochs, self._base - first_epoch)
        return b"".join(parts)

    def _run(self, number: int) -> pa.Buffer:
        if self._encoded is None or self._encoded[0] != number:
            self._encoded = None
            self._encoded = number, _encode(self._runs[number].table)
        return self._encoded[1]

    def _epochs(self, slices: Sequence[Slice], offset: int) -> Iterator[memoryview]:
        """`offset`: the number of an epoch minus that of its piece."""
        wanted = {part.piece + offset: part for part in slices}
        epoch = min(wanted)
        while (first := epoch) in wanted:
            for found in self._log.read_encoded(epoch, READ_BYTES):
                part = wanted.get(epoch)
                if part is None:
                    return
                yield from _record_bytes(found, part.offset, part.nbytes)
                epoch += 1
            if epoch == first:
                raise BelowFloor(f"the log does not hold epoch {epoch} any more")


def install(stored: Path, files: RunFiles | None, operators: Iterable[str]) -> Installation:
    """Decode the pieces in a file. Raises NotMovable."""
    with pa.memory_map(str(stored)) as file:
        data = file.read_buffer()
    return Installation(data, files, frozenset(operators))


class Installation:
    """The state and log in pieces that have arrived. `data`: all pieces; `files`: where runs are
    written; `operators`: ids of the chain."""

    def __init__(self, data: pa.Buffer, files: RunFiles | None, operators: frozenset[str]) -> None:
        self._data = data
        self._content, at = _read_header(data)
        content = self._content
        try:
            self.base = int(content["base"])
            runs: list[Run] = []
            for length in content["runs"]:
                runs.append(Run(_decode(data.slice(at, length))))
                at += _padded(length)
            self._runs = _written(runs, files)
            # Layouts name a run by its object in the checkpoint store and its number there; what
            # is moved counts as one object, 0.
            places = {(0, number): run for number, run in enumerate(self._runs)}
            states = {o: layout.decode(found, places) for o, found in content["operators"].items()}
            self.state = TaskState(
                int(content["epoch"]), int(content["watermark"]), State(states), content["chain"]
            )
        except (LookupError, TypeError, ValueError, pa.ArrowException, OSError) as error:
            raise NotMovable(f"what arrived cannot be read: {error!r}") from error
        if unknown := sorted({operator_of(table) for table in states} - operators):
            names = ", ".join(unknown)
            raise NotMovable(f"it has state of operators {names}, which this task does not have")
        self._log_at = at

    def write_log(
        self, log: OutputLog, directory: Path, is_over: Callable[[], bool]
    ) -> EarlierBoots:
        """Replace the content of this task's log, in `directory`, by these epochs. Raises
        NotMovable, also if an earlier boot had another result: then the epoch has to be computed
        again, from a checkpoint, to decide which result is right. `is_over`: whether the log is no
        longer needed."""
        own = log.results(self.base)
        for epoch, result in self._results():
            if own.get(epoch, result) != result:
                raise NotMovable(
                    f"epoch {epoch} of the donor's log differs from what an earlier boot of this "
                    "replica had in its own"
                )
        earlier = continue_log(log, directory, self.base - 1, has_no_partners=False)
        try:
            for batch in self.epochs(log):
                if is_over():
                    raise NotMovable("the task restores from a checkpoint")
                log.append(batch)
        except BaseException:
            log.start_at(self.base, keep=False)  # they are not results of this replica
            raise
        return earlier

    def _results(self) -> Iterator[tuple[int, Result]]:
        """The results in the records' headers. Raises NotMovable."""
        view, at = memoryview(self._data), self._log_at
        for epoch in range(self.base, self.state.epoch + 1):
            try:
                record = records.header_at(view, at)
            except DamagedRecord as error:
                raise NotMovable(f"epoch {epoch} cannot be read: {error}") from error
            yield epoch, Result(record.digest, record.watermark)
            at = record.end

    def epochs(self, log: OutputLog) -> Iterator[EpochBatch]:
        """The epochs for `log`, in order; the digests of their rows are checked. Raises
        NotMovable."""
        no_rows = log.schema.empty_table()
        view, at = memoryview(self._data), self._log_at
        for epoch in range(self.base, self.state.epoch + 1):
            try:
                record = records.header_at(view, at)
                records.verify_checksum(view, record)
                if record.epoch != epoch or record.epochs != 1:
                    raise NotMovable(f"epoch {record.epoch} arrived in place of {epoch}")
                payload = self._data.slice(record.payload_start, record.length)
                rows = records.decode_rows(payload) if record.length else no_rows
            except (DamagedRecord, pa.ArrowException, OSError) as error:
                raise NotMovable(f"epoch {epoch} cannot be read: {error}") from error
            if digest_table(rows) != record.digest:
                raise NotMovable(f"the rows of epoch {epoch} do not match its digest")
            watermark, digest = record.watermark, record.digest
            yield EpochBatch(log.stream, log.partition, epoch, watermark, rows, digest)
            at = record.end
        if at != len(view):
            raise NotMovable(f"{len(view) - at} bytes follow the last epoch")

    def digest(self, log: OutputLog) -> str:
        """The digest of the installed state, and of these epochs in `log`. Raises LogCorrupt."""
        found = log.results(self.base)
        epochs = range(self.base, self.state.epoch + 1)
        content = _describe(self.state, self.base)
        results = ((e, found[e]) for e in epochs if e in found)
        return _digest(content, [*_runs_of(self.state.operators).values()], results)


def _runs_of(state: State) -> dict[RunId, Run]:
    """All runs of a state, each once, in an order that follows from the state."""
    operators = sorted(state.operators.items())
    return {run.id: run for _, operator_state in operators for run in operator_state.runs()}


def _describe(state: TaskState, base: int) -> dict[str, Any]:
    """The state and its position, without rows."""
    numbers = {run: number for number, run in enumerate(_runs_of(state.operators))}
    operators = sorted(state.operators.operators.items())

    def describe(operator_state: OperatorState) -> dict[str, Any]:
        return layout.encode(operator_state, lambda run: (0, numbers[run.id]), ())

    return {
        "stateFormat": STATE_FORMAT,
        "engine": engine_version(),
        "epoch": state.epoch,
        "watermark": state.watermark,
        "chain": state.chained_digest,
        "operators": {name: describe(operator_state) for name, operator_state in operators},
        "base": base,
    }


def _header(content: Mapping[str, Any], lengths: Sequence[int]) -> bytes:
    text = to_json({**content, "runs": list(lengths)})
    prefix = _PREFIX.pack(MAGIC, MOVEMENT_FORMAT, len(text)).ljust(_ALIGN, b"\0")
    return prefix + text + bytes(-len(text) % _ALIGN)


def require_format(data: pa.Buffer | bytes) -> int:
    """The length of the header at the begin of these bytes, of which there are enough. Raises
    NotMovable, if they have the format of another release."""
    magic, found, length = _PREFIX.unpack_from(data)
    if magic != MAGIC or found != MOVEMENT_FORMAT:
        raise NotMovable(
            f"state of format {magic!r} {found}; this release reads {MAGIC!r} {MOVEMENT_FORMAT}: "
            "use images of one release"
        )
    return int(length)


def _read_header(data: pa.Buffer) -> tuple[dict[str, Any], int]:
    """The header, and where the runs begin. Raises NotMovable."""
    if data.size < _ALIGN:
        raise NotMovable(f"{data.size} bytes are too few for a header")
    length = require_format(data)
    if length > data.size - _ALIGN:
        raise NotMovable(f"the header has {length} bytes, of {data.size} bytes in all")
    try:
        content = json.loads(data.slice(_ALIGN, length).to_pybytes())
        state_format, engine = content["stateFormat"], content["engine"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotMovable(f"the header cannot be read: {error!r}") from error
    if (state_format, engine) != (STATE_FORMAT, engine_version()):
        raise NotMovable(
            f"state of format {state_format} of engine {engine}; this is engine {engine_version()} "
            f"with format {STATE_FORMAT}: use images of one release"
        )
    return content, _ALIGN + _padded(length)


def _digest(
    content: Mapping[str, Any],
    runs: Sequence[Run],
    results: Iterable[tuple[int, Result]],
    progressed: Callable[[int], None] = lambda runs: None,
) -> str:
    digest = hashlib.blake2b(to_json(content), digest_size=16)
    for number, run in enumerate(runs, 1):
        digest.update(bytes.fromhex(digest_table(run.table)))
        progressed(number)
    for epoch, result in results:
        digest.update(f"{epoch}/{result.watermark}/{result.digest};".encode())
    return digest.hexdigest()


def _written(runs: Sequence[Run], files: RunFiles | None) -> list[Run]:
    """The same runs, in files of about FILE_BYTES. Raises DiskFull."""
    if files is None:
        return list(runs)
    written: list[Run] = []
    part: list[Run] = []
    for run in runs:
        if part and (run.schema != part[0].schema or _nbytes(part) >= FILE_BYTES):
            written += files.write(part[0].schema, part)
            part = []
        part.append(run)
    return written + (files.write(part[0].schema, part) if part else [])


def _nbytes(runs: Iterable[Run]) -> int:
    return sum(run.nbytes for run in runs)


def _padded(length: int) -> int:
    return length + -length % _ALIGN


def _length(table: pa.Table) -> int:
    size = pa.MockOutputStream()
    _write(table, size)
    return int(size.size())


def _encode(table: pa.Table) -> pa.Buffer:
    """The table as an Arrow IPC stream, padded."""
    encoded = pa.allocate_buffer(_padded(_length(table)))
    memoryview(encoded).cast("B")[-_ALIGN:] = bytes(_ALIGN)
    with pa.FixedSizeBufferWriter(encoded) as sink:
        _write(table, sink)
    return encoded


def _write(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.combine_chunks().to_batches():
            writer.write_batch(batch)


def _decode(data: pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(data).read_all().combine_chunks()


def _record_bytes(epoch: EncodedEpoch, offset: int, nbytes: int) -> Iterator[memoryview]:
    """`nbytes` bytes of an epoch's record, from `offset` on."""
    length = 0 if epoch.payload is None else epoch.payload.size
    record = Record(
        RecordKind.STABLE,
        branch=0,
        epoch=epoch.epoch,
        epochs=1,
        watermark=epoch.watermark,
        digest=epoch.digest,
        start=0,
        length=length,
        previous=0,
    )
    parts: list[memoryview] = [memoryview(records.encode_header(record, epoch.checksum))]
    if epoch.payload is not None:
        parts += [memoryview(epoch.payload).cast("B"), memoryview(bytes(-length % _ALIGN))]
    at, end = 0, offset + nbytes
    for part in parts:
        if at < end and at + len(part) > offset:
            yield part[max(0, offset - at) : end - at]
        at += len(part)
