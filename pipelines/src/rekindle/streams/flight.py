"""Epochs over Arrow Flight: one server in each task, bounded calls only.

A Flight call holds a server thread and cannot be woken, so no call is a subscription: `read` asks
for epochs from a number on, waits at most MAX_WAIT_S for the first of them, and returns. Knows
logs, not engines; the reader decides which replica to call, and when.

The ticket is a `ReadRequest` as JSON. The response's first message is a header without rows
(`StreamProgress`). One message follows for each epoch, or several if it is large: its boundary is
in `app_metadata`, with the checksum of the message's rows. If the request names a share, each epoch
has only the rows of one consumer partition, and `digest` remains that of the whole epoch.

Tickets and headers carry the topology's UID, the incarnation and the protocol version, as polls do
(`rekindle.protocol`): addresses are reused, and stream ids do not contain the topology. Calls need
the topology's token as a header; fields that a peer does not know are ignored.

Design: docs/design/streams.md#flight.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa
from pyarrow import flight

from rekindle.errors import BelowFloor, RekindleError
from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import SplitCache, split
from rekindle.identity import UNVERSIONED, Identity, Versions, incompatible
from rekindle.streams.checksum import checksum_batch
from rekindle.streams.epochs import NO_EPOCH, EpochBatch, Kind
from rekindle.streams.log import OutputLog

_log = logging.getLogger(__name__)

MAX_WAIT_S = 1.0
_AUTHORIZATION = "authorization"
SPLIT_CACHE_BYTES = 16 << 20
MAX_MESSAGE_BYTES = 32 << 20
"""An epoch with more bytes is sent in parts."""

Message = tuple[pa.RecordBatch, dict[str, Any]]
"""Rows and their metadata."""

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a new client inherits the old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class StreamUnavailable(RekindleError):
    """A replica cannot be read: it is gone or silent, or does not serve this stream (yet)."""


class CallTimedOut(StreamUnavailable):
    """The deadline passed before the first complete epoch."""


@dataclass(frozen=True, slots=True)
class MessageIdentity:
    """The identity in a ticket or a header. `incarnation`: of the serving replica; None: any."""

    topology: str = ""
    incarnation: int | None = None
    protocol: int = UNVERSIONED
    oldest: int = UNVERSIONED

    @staticmethod
    def of(identity: Identity, incarnation: int | None) -> MessageIdentity:
        own = Versions()
        return MessageIdentity(identity.topology, incarnation, own.protocol, own.oldest)

    def refusal(self, identity: Identity) -> str | None:
        """Why a peer with this identity refuses the message; None if it accepts it."""
        versions = incompatible(Versions(self.protocol, self.oldest))
        return versions or identity.mismatch(self.topology)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    stream: str
    partition: int
    from_epoch: int
    max_bytes: int
    wait_s: float = 0.0
    share: Share | None = None
    incarnation: int | None = None

    def to_ticket(self, identity: Identity) -> flight.Ticket:
        identity_fields = asdict(MessageIdentity.of(identity, self.incarnation))
        return flight.Ticket(json.dumps({**asdict(self), **identity_fields}).encode())

    @staticmethod
    def of(ticket: dict[str, Any]) -> ReadRequest:
        """From a ticket's JSON."""
        share = ticket.pop("share", None)
        if share is not None:
            share = Share(tuple(share["key_by"]), share["partitions"], share["index"])
        return ReadRequest(**_known(ReadRequest, ticket), share=share)


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """Progress of a replica: the epochs in its log, and its head: the newest epoch that was
    released to it (by time, or by its own upstreams); `released` on the wire."""

    base: int
    last: int
    head: int

    @staticmethod
    def of(header: Mapping[str, Any]) -> StreamProgress:
        """From the JSON of a response's header."""
        return StreamProgress(header["base"], header["last"], header["released"])

    def header(self) -> dict[str, int]:
        return {"base": self.base, "last": self.last, "released": self.head}


@dataclass(frozen=True, slots=True)
class ReadResponse:
    progress: StreamProgress
    epochs: tuple[EpochBatch, ...]


class StreamServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves logs. A stream is unknown before `serve_log`: a restarted task does not serve
    readers before it is consistent."""

    def __init__(
        self,
        address: str,
        port: int,
        identity: Identity | None = None,
        incarnation: int | None = None,
    ) -> None:
        """`incarnation` is that of the task that serves."""
        self._identity = identity or Identity()
        self._incarnation = incarnation
        token = {"token": _RequireToken(self._identity)} if self._identity.token else None
        super().__init__(f"grpc://{address}:{port}", middleware=token)
        self._lock = threading.Lock()
        self._logs: dict[tuple[str, int], tuple[OutputLog, Callable[[], int]]] = {}
        self._splits = SplitCache(SPLIT_CACHE_BYTES)

    def serve_log(self, log: OutputLog, head: Callable[[], int] = lambda: NO_EPOCH) -> None:
        with self._lock:
            self._logs[(log.stream, log.partition)] = (log, head)

    def stop(self) -> None:
        """Wake all waiting calls and shut down."""
        with self._lock:
            logs, self._logs = self._logs, {}
        for log, _ in logs.values():
            log.close()
        self.shutdown()

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        try:
            content = json.loads(ticket.ticket)
            self._admit(
                MessageIdentity(**_known(MessageIdentity, content))
            )  # before the rest: a ticket of another release may have other fields
            return self._respond(ReadRequest.of(content))
        except RekindleError as error:
            raise _to_flight(error) from error
        except (ValueError, KeyError, TypeError) as error:
            message = f"not a valid ticket or key: {error}"
            raise flight.FlightServerError(message, extra_info=b"BadRequest") from error
        except Exception as error:
            _log.exception("a call of a reader failed")
            raise flight.FlightServerError(repr(error), extra_info=b"Internal") from error

    def _admit(self, sender: MessageIdentity) -> None:
        """Refuse tickets that are not for this task."""
        if (reason := sender.refusal(self._identity)) is not None:
            raise StreamUnavailable(f"ticket refused: {reason}")
        meant = sender.incarnation
        if meant is not None and self._incarnation is not None and meant != self._incarnation:
            raise StreamUnavailable(
                f"ticket refused: it is for incarnation {meant}, this is {self._incarnation}"
            )

    def _respond(self, request: ReadRequest) -> flight.FlightDataStream:
        with self._lock:
            served = self._logs.get((request.stream, request.partition))
        if served is None:
            raise StreamUnavailable(
                f"this task does not serve stream {request.stream}/{request.partition} (yet)"
            )
        log, head = served
        log.wait_for(request.from_epoch, min(request.wait_s, MAX_WAIT_S))
        batches = log.read(request.from_epoch, _bytes_to_read(request))
        progress = StreamProgress(log.base, log.last, max(head(), log.last))
        return flight.GeneratorStream(
            log.schema, self._messages(log.schema, progress, batches, request)
        )

    def _messages(
        self,
        schema: pa.Schema,
        progress: StreamProgress,
        batches: list[EpochBatch],
        request: ReadRequest,
    ) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
        identity_fields = asdict(MessageIdentity.of(self._identity, self._incarnation))
        yield _no_rows(schema), _json({**identity_fields, **progress.header()})
        for batch in batches:
            boundary = {
                "epoch": batch.epoch,
                "watermark": batch.watermark,
                "digest": batch.digest,
                "kind": batch.kind,
                "attempt": batch.attempt,
            }
            yield from _parts(self._share(batch, request.share), boundary)

    def _share(self, batch: EpochBatch, share: Share | None) -> pa.Table:
        if share is None or not batch.rows.num_rows:
            return batch.rows
        key = (batch.stream, batch.partition, batch.epoch, share.key_by, share.partitions)
        tables = self._splits.get(key, lambda: split(batch.rows, share.key_by, share.partitions))
        return tables[share.index]


class StreamClient:
    """One connection to one replica. Not thread-safe; after a failure it is closed and replaced."""

    def __init__(
        self,
        address: str,
        identity: Identity | None = None,
        check_size: Callable[[str, int], None] = lambda what, size: None,
    ) -> None:
        """`check_size` is called with an epoch's name and its bytes so far; if it raises, the call
        ends."""
        self.address = address
        self._check_size = check_size
        self._identity = identity or Identity()
        sent = self._identity.authorization
        self._headers = [] if sent is None else [(_AUTHORIZATION.encode(), sent.encode())]
        self._client = flight.FlightClient(f"grpc://{address}", generic_options=_CHANNEL)

    def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        """One bounded call. At the deadline it returns the epochs that have arrived. Raises
        BelowFloor, CallTimedOut if none has arrived, StreamUnavailable for other failures."""
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        messages: list[Message] = []
        late: Exception | None = None
        try:
            reader = self._client.do_get(request.to_ticket(self._identity), options)
            for message in reader:
                messages.append((message.data, json.loads(message.app_metadata.to_pybytes())))
                self._check(request, messages, reader)
        except flight.FlightTimedOutError as error:
            late = error
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise _from_flight(error, self.address) from error
        epochs = _epochs(request, messages[1:], self.address)
        if late is not None and not epochs:
            text = f"{self.address} sent no complete epoch within {timeout_s:g} s"
            raise CallTimedOut(text) from late
        if not messages:
            raise StreamUnavailable(f"{self.address} sent a response without a header")
        return ReadResponse(self._progress(messages[0][1]), epochs)

    def _check(self, request: ReadRequest, messages: list[Message], reader: Any) -> None:
        """Check the size of an epoch while its parts arrive, because it may be too large."""
        metadata = messages[-1][1]
        if metadata.get("parts", 1) == 1:
            return
        size = sum(data.nbytes for data, _ in messages[-1 - metadata["part"] :])
        try:
            self._check_size(
                f"epoch {metadata['epoch']} of stream {request.stream}/{request.partition}", size
            )
        except Exception:
            reader.cancel()
            raise

    def _progress(self, metadata: dict[str, Any]) -> StreamProgress:
        if (
            reason := MessageIdentity(**_known(MessageIdentity, metadata)).refusal(self._identity)
        ) is not None:
            raise StreamUnavailable(f"{self.address}: its response is refused: {reason}")
        return StreamProgress.of(metadata)

    def close(self) -> None:
        self._client.close()


class _RequireToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without the topology's token, before their tickets are read."""

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._identity = identity

    def start_call(self, info: Any, headers: Any) -> None:
        given = headers.get(_AUTHORIZATION) or [None]
        if not self._identity.accepts(given[0]):
            raise flight.FlightUnauthenticatedError("this port needs the topology's token")


def _bytes_to_read(request: ReadRequest) -> int:
    """More than requested, since a share is only a part of what is read; but not more than the
    split cache holds, otherwise other consumers would split it again."""
    shares = request.share.partitions if request.share else 1
    return max(request.max_bytes, min(request.max_bytes * shares, SPLIT_CACHE_BYTES))


def _parts(rows: pa.Table, boundary: dict[str, Any]) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """An epoch's messages: one, unless it is large. A string column of one message has at most 2
    GB, and a large table is not copied into one batch."""
    if rows.nbytes <= MAX_MESSAGE_BYTES:
        batches = rows.combine_chunks().to_batches()
    else:
        most = max(1, rows.num_rows * MAX_MESSAGE_BYTES // rows.nbytes)
        batches = rows.to_batches(max_chunksize=most)
    batches = batches or [_no_rows(rows.schema)]
    for part, batch in enumerate(batches):
        metadata = dict(boundary)
        if batch.num_rows:
            metadata["checksum"] = checksum_batch(batch)
        if len(batches) > 1:
            metadata |= {"part": part, "parts": len(batches)}
        yield batch, _json(metadata)


def _epochs(request: ReadRequest, messages: list[Message], address: str) -> tuple[EpochBatch, ...]:
    """The epochs whose parts have all arrived. Raises StreamUnavailable for damaged ones."""
    epochs: list[EpochBatch] = []
    parts: list[pa.RecordBatch] = []
    for data, metadata in messages:
        if metadata.get("checksum") is not None and metadata["checksum"] != checksum_batch(data):
            raise StreamUnavailable(
                f"{address}: epoch {metadata['epoch']} of stream {request.stream}/"
                f"{request.partition} arrived with a wrong checksum"
            )
        parts.append(data)
        if metadata.get("part", 0) + 1 == metadata.get("parts", 1):
            epochs.append(_epoch(request, parts, metadata))
            parts = []
    return tuple(epochs)


def _epoch(
    request: ReadRequest, parts: list[pa.RecordBatch], metadata: dict[str, Any]
) -> EpochBatch:
    boundary = _known(EpochBatch, metadata)
    boundary["kind"] = Kind(boundary["kind"])
    empty = EpochBatch(request.stream, request.partition, 0, 0, pa.Table.from_batches(parts), "")
    return replace(empty, **boundary)


def _known(kind: type, metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; a newer peer may send more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in metadata.items() if name in names}


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def _json(value: Any) -> pa.Buffer:
    return pa.py_buffer(json.dumps(value).encode())


def _to_flight(error: RekindleError) -> flight.FlightError:
    name = type(error).__name__.encode()
    return flight.FlightServerError(str(error), extra_info=name)


def _from_flight(error: Exception, address: str) -> RekindleError:
    text = str(error).split(". Detail:")[0]
    if getattr(error, "extra_info", b"") == BelowFloor.__name__.encode():
        return BelowFloor(text)
    return StreamUnavailable(f"{address}: {text}")
