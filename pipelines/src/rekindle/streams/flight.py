"""Epochs over Arrow Flight: one server in each task, bounded calls only.

A Flight call holds a server thread and cannot be woken, so no call is a subscription: `get` asks
for epochs from a number on, waits at most MAX_WAIT_S for the first of them, and returns. Knows
logs, not engines; which replica to ask and when to ask again is the reader's affair.

The ticket is `Get` as JSON. The answer's first message is a header without rows (`Head`), then one
message for each epoch with its boundary in `app_metadata`, or several if the epoch is large, each
with the checksum of its rows. With a share, each epoch has only the rows of one consumer partition,
and `digest` remains that of the whole epoch.

Tickets and headers carry the topology's UID, the incarnation and the protocol version, as polls do
(`rekindle.protocol`): addresses are reused, and stream ids do not contain the topology. Calls need
the topology's token as a header; fields that a peer does not know are ignored.

Design: docs/design/streams.md#flight.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
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
PART_BYTES = 32 << 20
"""Of one message: an epoch with more is sent in parts."""

Message = tuple[pa.RecordBatch, dict[str, Any]]
"""Rows, and what was said of them."""

_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # else a new client inherits the old one's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class StreamUnavailable(RekindleError):
    """A replica cannot be read: it is away, silent, or does not serve this stream (yet)."""


class CallTimedOut(StreamUnavailable):
    """The deadline came before the first whole epoch."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose ticket or header it is. `incarnation`: of the replica that serves, or is meant to;
    None: any."""

    topology: str = ""
    incarnation: int | None = None
    protocol: int = UNVERSIONED
    oldest: int = UNVERSIONED

    @staticmethod
    def of(identity: Identity, incarnation: int | None) -> Stamp:
        own = Versions()
        return Stamp(identity.topology, incarnation, own.protocol, own.oldest)

    def refusal(self, identity: Identity) -> str | None:
        """Why a peer of this identity does not take it."""
        versions = incompatible(Versions(self.protocol, self.oldest))
        return versions or identity.mismatch(self.topology)


@dataclass(frozen=True, slots=True)
class Get:
    stream: str
    partition: int
    from_epoch: int
    max_bytes: int
    wait_s: float = 0.0
    share: Share | None = None
    incarnation: int | None = None

    def to_ticket(self, identity: Identity) -> flight.Ticket:
        stamp = asdict(Stamp.of(identity, self.incarnation))
        return flight.Ticket(json.dumps({**asdict(self), **stamp}).encode())

    @staticmethod
    def of(said: dict[str, Any]) -> Get:
        """From a ticket's JSON."""
        share = said.pop("share", None)
        if share is not None:
            share = Share(tuple(share["key_by"]), share["partitions"], share["index"])
        return Get(**_known(Get, said), share=share)


@dataclass(frozen=True, slots=True)
class Head:
    """What a replica says of its stream partition: the epochs in its log and the newest one that
    has been released to it (by time, or by its own upstreams)."""

    base: int
    last: int
    released: int


@dataclass(frozen=True, slots=True)
class Got:
    head: Head
    epochs: tuple[EpochBatch, ...]


class StreamServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the logs it is given. Before `serve` a stream is unknown: a task that restarts answers
    no reader before it is consistent."""

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

    def serve_log(self, log: OutputLog, released: Callable[[], int] = lambda: NO_EPOCH) -> None:
        with self._lock:
            self._logs[(log.stream, log.partition)] = (log, released)

    def stop(self) -> None:
        """Wake all waiting calls and shut down."""
        with self._lock:
            logs, self._logs = self._logs, {}
        for log, _ in logs.values():
            log.close()
        self.shutdown()

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        try:
            said = json.loads(ticket.ticket)
            self._admit(Stamp(**_known(Stamp, said)))  # first: another release's may differ
            return self._answer(Get.of(said))
        except RekindleError as error:
            raise _to_flight(error) from error
        except (ValueError, KeyError, TypeError) as error:
            message = f"not a valid ticket or key: {error}"
            raise flight.FlightServerError(message, extra_info=b"BadRequest") from error
        except Exception as error:
            _log.exception("a call of a reader failed")
            raise flight.FlightServerError(repr(error), extra_info=b"Internal") from error

    def _admit(self, stamp: Stamp) -> None:
        """Refuse what is not meant for this task."""
        if (reason := stamp.refusal(self._identity)) is not None:
            raise StreamUnavailable(f"ticket refused: {reason}")
        meant = stamp.incarnation
        if meant is not None and self._incarnation is not None and meant != self._incarnation:
            raise StreamUnavailable(
                f"ticket refused: it is for incarnation {meant}, this is {self._incarnation}"
            )

    def _answer(self, get: Get) -> flight.FlightDataStream:
        with self._lock:
            served = self._logs.get((get.stream, get.partition))
        if served is None:
            raise StreamUnavailable(
                f"this task does not serve stream {get.stream}/{get.partition} (yet)"
            )
        log, released = served
        log.wait_for(get.from_epoch, min(get.wait_s, MAX_WAIT_S))
        batches = log.read(get.from_epoch, _bytes_to_read(get))
        head = Head(log.base, log.last, max(released(), log.last))
        return flight.GeneratorStream(log.schema, self._messages(log.schema, head, batches, get))

    def _messages(
        self, schema: pa.Schema, head: Head, batches: list[EpochBatch], get: Get
    ) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
        stamp = asdict(Stamp.of(self._identity, self._incarnation))
        yield _no_rows(schema), _json({**stamp, **asdict(head)})
        for batch in batches:
            boundary = {
                "epoch": batch.epoch,
                "watermark": batch.watermark,
                "digest": batch.digest,
                "kind": batch.kind,
                "attempt": batch.attempt,
            }
            yield from _parts(self._share(batch, get.share), boundary)

    def _share(self, batch: EpochBatch, share: Share | None) -> pa.Table:
        if share is None or not batch.rows.num_rows:
            return batch.rows
        key = (batch.stream, batch.partition, batch.epoch, share.key_by, share.partitions)
        tables = self._splits.get(key, lambda: split(batch.rows, share.key_by, share.partitions))
        return tables[share.index]


class StreamClient:
    """One connection to one replica. Not thread-safe; a failed one is closed and made anew."""

    def __init__(
        self,
        address: str,
        identity: Identity | None = None,
        check_size: Callable[[str, int], None] = lambda what, size: None,
    ) -> None:
        """`check_size` gets an epoch's name and its bytes so far; what it raises ends the call."""
        self.address = address
        self._check_size = check_size
        self._identity = identity or Identity()
        sent = self._identity.authorization
        self._headers = [] if sent is None else [(_AUTHORIZATION.encode(), sent.encode())]
        self._client = flight.FlightClient(f"grpc://{address}", generic_options=_CHANNEL)

    def get(self, get: Get, timeout_s: float) -> Got:
        """One bounded call; at the deadline, the epochs that have come by then. Raises BelowFloor,
        CallTimedOut if none has, or StreamUnavailable for all else that can fail."""
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        messages: list[Message] = []
        late: Exception | None = None
        try:
            reader = self._client.do_get(get.to_ticket(self._identity), options)
            for message in reader:
                messages.append((message.data, json.loads(message.app_metadata.to_pybytes())))
                self._check(get, messages, reader)
        except flight.FlightTimedOutError as error:
            late = error
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise _from_flight(error, self.address) from error
        epochs = _epochs(get, messages[1:], self.address)
        if late is not None and not epochs:
            text = f"{self.address} gave no whole epoch in {timeout_s:g} s"
            raise CallTimedOut(text) from late
        if not messages:
            raise StreamUnavailable(f"{self.address} gave an answer without a header")
        return Got(self._head(messages[0][1]), epochs)

    def _check(self, get: Get, messages: list[Message], reader: Any) -> None:
        """Look at the size of an epoch while its parts come, for the whole may be too large."""
        said = messages[-1][1]
        if said.get("parts", 1) == 1:
            return
        size = sum(data.nbytes for data, _ in messages[-1 - said["part"] :])
        try:
            self._check_size(f"epoch {said['epoch']} of stream {get.stream}/{get.partition}", size)
        except Exception:
            reader.cancel()
            raise

    def _head(self, said: dict[str, Any]) -> Head:
        if (reason := Stamp(**_known(Stamp, said)).refusal(self._identity)) is not None:
            raise StreamUnavailable(f"{self.address}: its answer is refused: {reason}")
        return Head(**_known(Head, said))

    def close(self) -> None:
        self._client.close()


class _RequireToken(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses each call that does not bring the topology's token, before its ticket is read."""

    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._identity = identity

    def start_call(self, info: Any, headers: Any) -> None:
        given = headers.get(_AUTHORIZATION) or [None]
        if not self._identity.accepts(given[0]):
            raise flight.FlightUnauthenticatedError("this port needs the topology's token")


def _bytes_to_read(get: Get) -> int:
    """A consumer's share is some part of what is read: but not more at once than splits are kept
    of, or the other consumers would split it all again."""
    shares = get.share.partitions if get.share else 1
    return max(get.max_bytes, min(get.max_bytes * shares, SPLIT_CACHE_BYTES))


def _parts(rows: pa.Table, boundary: dict[str, Any]) -> Iterator[tuple[pa.RecordBatch, pa.Buffer]]:
    """An epoch's messages: one, unless it is large. A string column of one message has at most 2
    GB, and a large table is not copied into one piece."""
    if rows.nbytes <= PART_BYTES:
        batches = rows.combine_chunks().to_batches()
    else:
        most = max(1, rows.num_rows * PART_BYTES // rows.nbytes)
        batches = rows.to_batches(max_chunksize=most)
    batches = batches or [_no_rows(rows.schema)]
    for part, batch in enumerate(batches):
        said = dict(boundary)
        if batch.num_rows:
            said["checksum"] = checksum_batch(batch)
        if len(batches) > 1:
            said |= {"part": part, "parts": len(batches)}
        yield batch, _json(said)


def _epochs(get: Get, messages: list[Message], address: str) -> tuple[EpochBatch, ...]:
    """The epochs whose parts have all come. Raises StreamUnavailable for damaged ones."""
    epochs: list[EpochBatch] = []
    parts: list[pa.RecordBatch] = []
    for data, said in messages:
        if said.get("checksum") is not None and said["checksum"] != checksum_batch(data):
            raise StreamUnavailable(
                f"{address}: epoch {said['epoch']} of stream {get.stream}/{get.partition} arrived "
                "with a wrong checksum"
            )
        parts.append(data)
        if said.get("part", 0) + 1 == said.get("parts", 1):
            epochs.append(_epoch(get, parts, said))
            parts = []
    return tuple(epochs)


def _epoch(get: Get, parts: list[pa.RecordBatch], said: dict[str, Any]) -> EpochBatch:
    boundary = _known(EpochBatch, said)
    boundary["kind"] = Kind(boundary["kind"])
    empty = EpochBatch(get.stream, get.partition, 0, 0, pa.Table.from_batches(parts), "")
    return replace(empty, **boundary)


def _known(kind: type, said: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: a newer peer may send more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in said.items() if name in names}


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
