"""The protocol between a reader and a task: a request, and a response of frames. Pure.

A request is JSON. A response is a sequence of frames, each a prefix (length of its header, CRC-32
of it), a header in JSON, and the `bytes` of payload that the header announces, with their CRC-32 as
`sum`. The first frame is the progress of the replica; its payload is the schema. Then come the
frames of epochs, without a gap from the requested one on; the payload is an Arrow IPC stream of
rows, and empty if there are none. A large epoch may come in `parts`, each a separate stream. The
last frame marks the end of the response, since a connection may break anywhere.

A *live* request is for all output of a task that may be tentative, in its order. Its frames have a
`kind` and a `segment`, from which the next call continues: the number of a span of the task's
output (`live_history`), not a segment of a topology; peers of older releases know that name. There
may be gaps between epochs, and UNDO and REC_DONE are frames without rows. A task of an older
release responds with stable epochs only; a request that is not live gets only stable epochs.

Requests and first frames contain the topology's UID, the incarnation and the version of this
protocol: addresses are reused, and stream ids do not contain the topology. Unknown fields are
ignored. Knows neither sockets nor logs.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from rekindle.errors import RekindleError
from rekindle.exchange.routing import Share
from rekindle.identity import STREAM_VERSIONS, UNVERSIONED, Identity, Versions, incompatible
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.log_reading import MAX_READ_EPOCHS

PATH = "/v3/epochs"
LENT_PATH = "/v3/lent"
"""For objects of a state that a task lends: a request is their name, a response the digest of their
bytes, and the bytes."""
_LENT_DIGEST_BYTES = 16
MAX_REQUEST_BYTES = 64 << 10
MAX_HEADER_BYTES = 64 << 10
MAX_SCHEMA_BYTES = 1 << 20
MAX_PART_BYTES = 32 << 20
"""Approximate maximum of the rows of a share that are encoded as one part."""
MAX_ERROR_BYTES = 16 << 10
MAX_SHARES = 1024
"""More than the partitions of any topology."""

_PREFIX = struct.Struct("!II")


class StreamUnavailable(RekindleError):
    """A replica cannot be read: it is gone or silent, or does not serve this stream (yet)."""


class StreamRefused(StreamUnavailable):
    """A replica refuses this reader: another topology, token or protocol version. Another attempt
    does not help, so it is reported."""


class CallTimedOut(StreamUnavailable):
    """The deadline passed before the first complete epoch."""


@dataclass(frozen=True, slots=True)
class MessageIdentity:
    """The identity in a request or response. `incarnation`: of the serving replica; None: any."""

    topology: str = ""
    incarnation: int | None = None
    protocol: int = UNVERSIONED
    oldest: int = UNVERSIONED

    @staticmethod
    def of(identity: Identity, incarnation: int | None) -> MessageIdentity:
        own = STREAM_VERSIONS
        return MessageIdentity(identity.topology, incarnation, own.protocol, own.oldest)

    @staticmethod
    def read(message: Mapping[str, Any]) -> MessageIdentity:
        """Raises ValueError, TypeError."""
        return MessageIdentity(
            message.get("topology", ""),
            message.get("incarnation"),
            int(message.get("protocol", UNVERSIONED)),
            int(message.get("oldest", UNVERSIONED)),
        )

    def message(self) -> dict[str, Any]:
        return {
            "topology": self.topology,
            "incarnation": self.incarnation,
            "protocol": self.protocol,
            "oldest": self.oldest,
        }

    def unfit_versions(self) -> str | None:
        return incompatible(Versions(self.protocol, self.oldest), STREAM_VERSIONS)

    def refusal(self, identity: Identity) -> str | None:
        """Why a peer with this identity refuses the message; None if it accepts it."""
        return self.unfit_versions() or identity.mismatch(self.topology)


@dataclass(frozen=True, slots=True)
class LivePosition:
    """The position from which a live reader continues: an epoch in a span of the output of one
    process. Without `boot`: from the beginning."""

    boot: str = ""
    span: int = 0
    epoch: int = NO_EPOCH

    def as_json(self) -> dict[str, Any]:
        return {"boot": self.boot, "segment": self.span, "epoch": self.epoch}

    @staticmethod
    def of(message: Mapping[str, Any]) -> LivePosition:
        """Raises ValueError, KeyError, TypeError."""
        return LivePosition(str(message["boot"]), int(message["segment"]), int(message["epoch"]))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Epochs of a stream partition from `from_epoch` on: at least one, and no further one after
    `max_bytes`. If there is none yet, the response waits `wait_s` for it. `live`: batches of all
    kinds, from a position on."""

    stream: str
    partition: int
    from_epoch: int
    max_bytes: int
    wait_s: float = 0.0
    share: Share | None = None
    incarnation: int | None = None
    live: LivePosition | None = None

    def message(self, identity: Identity) -> dict[str, Any]:
        message: dict[str, Any] = {
            "stream": self.stream,
            "partition": self.partition,
            "from_epoch": self.from_epoch,
            "max_bytes": self.max_bytes,
            "wait_s": self.wait_s,
        }
        if self.share is not None:
            message["share"] = asdict(self.share)
        if self.live is not None:
            message["live"] = self.live.as_json()
        return message | MessageIdentity.of(identity, self.incarnation).message()

    @staticmethod
    def of(message: Mapping[str, Any]) -> ReadRequest:
        """Raises ValueError, KeyError, TypeError."""
        share = message.get("share")
        if share is not None:
            key_by, partitions, index = share["key_by"], share["partitions"], share["index"]
            share = Share(tuple(map(str, key_by)), int(partitions), int(index))
            if not 0 <= share.index < share.partitions <= MAX_SHARES:
                raise ValueError(f"share {share.index} of {share.partitions}")
        wait_s = float(message.get("wait_s", 0.0))
        if not math.isfinite(wait_s):
            raise ValueError(f"a wait of {wait_s} s")
        live = message.get("live")
        return ReadRequest(
            str(message["stream"]),
            int(message["partition"]),
            int(message["from_epoch"]),
            int(message["max_bytes"]),
            wait_s,
            share,
            message.get("incarnation"),
            None if live is None else LivePosition.of(live),
        )


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """Progress of a replica: the epochs in its log, and its head: the newest epoch that was
    released to it (by time, or by its own upstreams), in messages called `released`. `live`: None
    if its output is never tentative."""

    base: int
    last: int
    head: int
    live: LiveReport | None = None

    @staticmethod
    def of(header: Mapping[str, Any]) -> StreamProgress:
        """From the header of a response's first frame."""
        live = header.get("live")
        return StreamProgress(
            int(header["base"]),
            int(header["last"]),
            int(header["released"]),
            None if live is None else LiveReport.of(live),
        )

    def header(self) -> dict[str, Any]:
        header: dict[str, Any] = {"base": self.base, "last": self.last, "released": self.head}
        return header if self.live is None else header | {"live": self.live.message()}


@dataclass(frozen=True, slots=True)
class LiveReport:
    """The state of a task's output, in each response. `boot`: of its process; `newest_tentative`:
    the newest tentative epoch that is not corrected; `corrected_through`: the epoch of the newest
    REC_DONE."""

    boot: str
    state: ConsistencyState = ConsistencyState.STABLE
    newest_tentative: int = NO_EPOCH
    corrected_through: int = NO_EPOCH

    def message(self) -> dict[str, Any]:
        return {
            "boot": self.boot,
            "state": self.state,
            "tentative": self.newest_tentative,
            "corrected": self.corrected_through,
        }

    @staticmethod
    def of(message: Mapping[str, Any]) -> LiveReport:
        """Raises ValueError, KeyError, TypeError."""
        state = ConsistencyState(message["state"])
        return LiveReport(
            str(message["boot"]), state, int(message["tentative"]), int(message["corrected"])
        )


@dataclass(frozen=True, slots=True)
class ReadResponse:
    """`epochs`: batches; of a live response also UNDO and REC_DONE. `live`: the position after them
    from which a live reader continues."""

    progress: StreamProgress
    epochs: tuple[EpochBatch, ...]
    live: LivePosition | None = None


CheckSize = Callable[[int, int], None]
"""Called with an epoch and its bytes before they are received; raises EpochTooLarge."""


# -- writing ---------------------------------------------------------------------------------------


def first_frame(sender: MessageIdentity, progress: StreamProgress, schema: pa.Buffer) -> bytes:
    """`schema`: serialized."""
    header = sender.message() | progress.header()
    return _frame(header, schema, zlib.crc32(schema)) + bytes(schema)


def epoch_frame(
    epoch: int,
    watermark: int,
    digest: str,
    payload: pa.Buffer | None,
    checksum: int,
    part: int = 0,
    parts: int = 1,
    live: Mapping[str, Any] | None = None,
    *,
    idle: bool = False,
) -> bytes:
    """The frame of an epoch without its payload, which the caller sends after it. `live`:
    `live_fields`."""
    header: dict[str, Any] = {"epoch": epoch, "watermark": watermark, "digest": digest}
    if parts > 1:
        header |= {"part": part, "parts": parts}
    if idle:
        header["idle"] = True
    if live is not None:
        header |= live
    return _frame(header, payload, checksum)


def live_fields(kind: BatchKind, attempt: int, span: int) -> dict[str, Any]:
    """Additional fields of the frames of a live response."""
    return {"kind": kind, "attempt": attempt, "segment": span}


def control_frame(kind: BatchKind, epoch: int, span: int) -> bytes:
    return epoch_frame(
        epoch,
        watermark=0,
        digest="",
        payload=None,
        checksum=0,
        live=live_fields(kind, attempt=0, span=span),
    )


LAST_FRAME_HEADER = {"end": True}


def last_frame() -> bytes:
    return _frame(LAST_FRAME_HEADER, None, 0)


def _frame(header: dict[str, Any], payload: pa.Buffer | None, checksum: int) -> bytes:
    if payload is not None:
        header |= {"bytes": payload.size, "sum": checksum}
    text = json.dumps(header, separators=(",", ":")).encode()
    return _PREFIX.pack(len(text), zlib.crc32(text)) + text


def lent_digest(data: bytes) -> bytes:
    """What precedes an object that is lent."""
    return hashlib.blake2b(data, digest_size=_LENT_DIGEST_BYTES).digest()


def lent_object(response: bytes) -> bytes:
    """The object in a response. Raises ValueError if it is damaged."""
    data = response[_LENT_DIGEST_BYTES:]
    if lent_digest(data) != response[:_LENT_DIGEST_BYTES]:
        raise ValueError(f"an object of {len(data)} bytes arrived damaged")
    return data


def error_body(error: Exception) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


# -- reading ---------------------------------------------------------------------------------------


class ResponseDecoder:
    """Decodes a response while its bytes arrive, in chunks of any size. Holds at most the epochs
    that were requested: it refuses what is too much before it allocates memory for it."""

    def __init__(
        self, request: ReadRequest, identity: Identity, address: str, check_size: CheckSize
    ) -> None:
        self.progress: StreamProgress | None = None
        self.epochs: list[EpochBatch] = []
        """The epochs that have arrived completely."""
        self.live: LivePosition | None = None
        self.ended = False
        self._request = request
        self._identity = identity
        self._address = address
        self._check_size = check_size
        self._incomplete = bytearray()  # of a prefix, or of a header
        self._prefix: tuple[int, int] | None = None  # length and checksum of the next header
        self._header: dict[str, Any] | None = None
        self._payload: pa.Buffer | None = None
        self._into: memoryview | None = None
        self._filled = 0
        self._sum = 0
        self._schema: pa.Schema | None = None
        self._parts: list[pa.Table] = []
        self._epoch_bytes = 0  # of the epoch whose parts arrive
        self._received = 0  # bytes of complete epochs

    def feed(self, data: bytes) -> None:
        """Decode received bytes. Raises StreamUnavailable if they are damaged or were not
        requested, EpochTooLarge."""
        view = memoryview(data)
        while len(view):
            if self.ended:
                raise self._wrong("bytes after the end of its response")
            if self._into is not None:
                view = self._fill(self._into, view)
            else:
                view = self._read_header(view)

    def _read_header(self, view: memoryview) -> memoryview:
        """Reads a prefix, or the header after it."""
        needed = _PREFIX.size if self._prefix is None else self._prefix[0]
        taken = view[: needed - len(self._incomplete)]
        self._incomplete += taken
        if len(self._incomplete) == needed:
            content, self._incomplete = bytes(self._incomplete), bytearray()
            if self._prefix is None:
                length, _ = self._prefix = _PREFIX.unpack(content)
                if not 0 < length <= MAX_HEADER_BYTES:
                    raise self._wrong(f"a header of {length} bytes")
            else:
                _, checksum = self._prefix
                self._prefix = None
                self._begin(content, checksum)
        return view[len(taken) :]

    def _begin(self, content: bytes, checksum: int) -> None:
        """A header has arrived."""
        if zlib.crc32(content) != checksum:
            raise self._wrong("a header with a wrong checksum")
        try:
            header = json.loads(content)
            size = int(header.get("bytes", 0))
            if self.progress is None:
                self._begin_response(header, size)
            elif header.get("end"):
                self.ended = True
                return
            else:
                self._begin_epoch(header, size)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise self._wrong(f"a header that it cannot read ({error!r})") from error
        self._header = header
        if size:
            self._payload = pa.allocate_buffer(size)
            self._into = memoryview(self._payload).cast("B")
            self._filled = self._sum = 0
        else:
            self._complete(None)

    def _begin_response(self, header: dict[str, Any], size: int) -> None:
        if (reason := MessageIdentity.read(header).refusal(self._identity)) is not None:
            raise StreamRefused(f"{self._address}: its response is refused: {reason}")
        if not 0 < size <= MAX_SCHEMA_BYTES:
            raise self._wrong(f"a schema of {size} bytes")
        self.progress = StreamProgress.of(header)

    def _begin_epoch(self, header: dict[str, Any], size: int) -> None:
        _require_types(header)
        epoch, part, parts = header["epoch"], header.get("part", 0), header.get("parts", 1)
        expected = self._request.from_epoch + len(self.epochs)
        if self._request.live is not None:
            expected = epoch  # there are gaps
        elif header.get("kind", BatchKind.STABLE) != BatchKind.STABLE:
            raise self._wrong(f"a {header['kind']} of epoch {epoch}, which was not requested")
        if epoch != expected or part != len(self._parts) or not part < parts:
            raise self._wrong(f"part {part} of {parts} of epoch {epoch} instead of {expected}")
        if size < 0 or (not size and parts > 1):
            raise self._wrong(f"a payload of {size} bytes")
        if not part and (
            (self.epochs and self._received >= self._request.max_bytes)
            or len(self.epochs) >= MAX_READ_EPOCHS
        ):
            raise self._wrong(
                f"more than the {self._request.max_bytes} bytes that were requested, or more than "
                f"{MAX_READ_EPOCHS} epochs"
            )
        self._epoch_bytes += size
        if size:
            self._check_size(epoch, self._epoch_bytes)

    def _fill(self, into: memoryview, view: memoryview) -> memoryview:
        taken = view[: len(into) - self._filled]
        into[self._filled : self._filled + len(taken)] = taken
        self._sum = zlib.crc32(taken, self._sum)
        self._filled += len(taken)
        if self._filled == len(into):
            self._into = None
            payload, self._payload = self._payload, None
            self._complete(payload)
        return view[len(taken) :]

    def _complete(self, payload: pa.Buffer | None) -> None:
        """A frame has arrived completely."""
        assert self._header is not None
        header, self._header = self._header, None
        damaged = payload is not None and self._sum != header.get("sum")
        try:
            if self._schema is None:
                if damaged:
                    raise self._wrong("a schema with a wrong checksum")
                assert payload is not None, "its size has been checked"
                self._schema = _schema(bytes(payload))
                return
            if damaged:
                raise StreamUnavailable(
                    f"{self._address}: {self._name(header['epoch'])} arrived with a wrong checksum"
                )
            if payload is None:
                self._parts.append(_empty_table(self._schema))
            else:
                self._parts.append(pa.ipc.open_stream(payload).read_all())
            if len(self._parts) == header.get("parts", 1):
                self._add_epoch(header)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise self._wrong(f"an epoch that cannot be read ({error!r})") from error

    def _add_epoch(self, header: dict[str, Any]) -> None:
        assert self._schema is not None
        rows = self._parts[0] if len(self._parts) == 1 else pa.concat_tables(self._parts)
        if not rows.schema.equals(self._schema):
            raise self._wrong("rows of another schema than it announced")
        if rows.num_rows:  # not a copy of the schema for each epoch
            rows = pa.Table.from_arrays(rows.columns, schema=self._schema)
        self._received += self._epoch_bytes
        self._parts, self._epoch_bytes = [], 0
        request, kind = self._request, BatchKind(header.get("kind", BatchKind.STABLE))
        self.epochs.append(
            EpochBatch(
                request.stream,
                request.partition,
                header["epoch"],
                header["watermark"],
                rows,
                header["digest"],
                kind,
                header.get("attempt", 0),
                header.get("idle", False),
            )
        )
        if request.live is not None:
            self._update_position(kind, header)

    def _update_position(self, kind: BatchKind, header: Mapping[str, Any]) -> None:
        """Set the position after a batch. A replica without a report has stable epochs only, and no
        positions."""
        assert self.progress is not None
        report, epoch, span = self.progress.live, header["epoch"], header.get("segment", 0)
        if kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE):
            span, epoch = span + 1, NO_EPOCH - 1
        if report is not None:
            self.live = LivePosition(report.boot, span, epoch + 1)

    def _name(self, epoch: int) -> str:
        return f"epoch {epoch} of stream {self._request.stream}/{self._request.partition}"

    def _wrong(self, what: str) -> StreamUnavailable:
        return StreamUnavailable(f"{self._address} sent {what}")


@lru_cache(16)
def _schema(serialized: bytes) -> pa.Schema:
    """Cached, because a reader gets the same one with each response."""
    return pa.ipc.read_schema(pa.py_buffer(serialized))


@lru_cache(16)
def _empty_table(schema: pa.Schema) -> pa.Table:
    return schema.empty_table()


_TYPES = {
    "epoch": int,
    "watermark": int,
    "digest": str,
    "part": int,
    "parts": int,
    "attempt": int,
    "segment": int,
    "idle": bool,
}
_OPTIONAL = ("part", "parts", "attempt", "segment", "idle")


def _require_types(header: Mapping[str, Any]) -> None:
    """Check the types in the header of an epoch. Raises KeyError, TypeError, ValueError."""
    for name, expected in _TYPES.items():
        value = header.get(name, expected()) if name in _OPTIONAL else header[name]
        if type(value) is not expected:
            raise TypeError(f"{name} is {value!r}")
    for name in ("epoch", "watermark"):
        if not -(1 << 63) <= header[name] < 1 << 63:
            raise ValueError(f"{name} is {header[name]}")
    BatchKind(header.get("kind", BatchKind.STABLE))
