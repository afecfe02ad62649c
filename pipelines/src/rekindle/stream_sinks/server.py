"""Arrow Flight for readers outside of the topology: the queries of one task.

A call is bounded: it waits at most a second for something new, then sends at most `max_bytes`, or
one epoch. Flight keeps a thread for each call in progress, so the number of calls is bounded, in
all and for each peer. Rows are sent to fewer calls at a time, since a reader may be slow to take
them. Nothing of the task waits for a call.

Design: docs/design/stream-sinks.md#calls.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from rekindle.errors import BelowFloor, RekindleError
from rekindle.identity import Identity
from rekindle.stream_sinks.reading import Message, ReadCall, ServedQuery
from rekindle.stream_sinks.ticket import Ticket, parse_ticket

MAX_CALLS = 128
MAX_CALLS_OF_PEER = 64
"""Most of them wait, which takes a thread and nothing else."""
MAX_SENDING = 32
MAX_SENDING_OF_PEER = 8
TURN_S = 1.0
"""How long a call that has something to send waits for its turn."""
STOP_S = 2.0
"""How long `stop` waits for the server."""
_AUTHORIZATION = "authorization"
_log = logging.getLogger(__name__)


class StreamSinkServer:
    """Serves the queries that were given to `serve` last; none before."""

    def __init__(self, address: str, port: int, identity: Identity) -> None:
        """Binds; raises OSError."""
        host = f"[{address}]" if ":" in address else address
        try:
            self._flight = _Flight(f"grpc://{host}:{port}", identity)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise OSError(f"port {port} of {address} cannot serve stream sinks: {error}") from error
        self.port: int = self._flight.port

    def serve(self, queries: Iterable[ServedQuery]) -> None:
        self._flight.queries = {query.query: query for query in queries}

    def stop(self) -> None:
        """End all calls that wait, and the server. What a reader does not take ends with the
        process."""
        queries, self._flight.queries = self._flight.queries, {}
        for query in queries.values():
            query.end()
        ending = threading.Thread(target=self._flight.shutdown, name="stream-sinks", daemon=True)
        ending.start()
        ending.join(STOP_S)


class Calls:
    """Which calls are in progress, and which of them are being sent rows, by peer. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_progress: Counter[str] = Counter()
        self._sending: Counter[str] = Counter()
        self._queue: list[_Turn] = []

    @property
    def queued(self) -> int:
        """How many wait to be sent something."""
        return len(self._queue)

    def begin(self, peer: str) -> None:
        """Raises FlightUnavailableError if there are too many."""
        with self._changed:
            of_peer, all_calls = self._in_progress[peer], self._in_progress.total()
            if of_peer >= MAX_CALLS_OF_PEER or all_calls >= MAX_CALLS:
                raise _too_many("serves", MAX_CALLS, MAX_CALLS_OF_PEER)
            self._in_progress[peer] += 1

    def end(self, peer: str) -> None:
        with self._changed:
            _decrement(self._in_progress, peer)

    @contextmanager
    def sending(self, peer: str) -> Iterator[None]:
        """A call's turn to be sent rows, in the order of calls. Raises FlightUnavailableError if
        others do not end in time."""
        turn = _Turn(peer)
        with self._changed:
            self._queue.append(turn)
            try:
                if not self._changed.wait_for(lambda: self._is_next(turn), TURN_S):
                    raise _too_many("sends rows to", MAX_SENDING, MAX_SENDING_OF_PEER)
                self._sending[peer] += 1
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                _decrement(self._sending, peer)
                self._changed.notify_all()

    def _is_next(self, turn: _Turn) -> bool:
        """Whether a call is the first in the queue whose peer may be sent rows in one more call."""
        if self._sending.total() >= MAX_SENDING:
            return False
        allowed = (t for t in self._queue if self._sending[t.peer] < MAX_SENDING_OF_PEER)
        return next(allowed, None) is turn


@dataclass(eq=False, frozen=True, slots=True)
class _Turn:
    peer: str


def _decrement(counts: Counter[str], peer: str) -> None:
    counts[peer] -= 1
    if not counts[peer]:
        del counts[peer]


def _too_many(does: str, most: int, of_peer: int) -> Any:
    return flight.FlightUnavailableError(
        f"a task {does} {most} calls at once, and {of_peer} of one address; try again, or read "
        f"another replica"
    )


class _Flight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, location: str, identity: Identity) -> None:
        self.queries: dict[str, ServedQuery] = {}
        self._calls = Calls()
        super().__init__(location, middleware={_AUTHORIZATION: _Admission(identity)})

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        return iter([_info(query) for query in self.queries.values()])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        path = [part.decode(errors="replace") for part in descriptor.path or ()]
        if len(path) != 1:
            raise _refused("InvalidPath", "a path has one name, that of a query")
        return _info(self._query(path[0]))

    def do_get(self, context: Any, ticket: Any) -> Any:
        try:
            asked = parse_ticket(ticket.ticket)
        except ValueError as error:
            raise _refused("InvalidTicket", str(error)) from None
        served = self._query(asked.query)
        _check(served, asked)
        peer = context.peer().rpartition(":")[0]
        self._calls.begin(peer)
        messages = self._messages(ReadCall(served, asked), served, asked.wait_s, peer)
        first = next(messages)  # before the response begins: what is refused is an error
        return flight.GeneratorStream(served.log.schema, _encoded(first, messages))

    def _query(self, name: str) -> ServedQuery:
        found = self.queries.get(name)
        if found is None:
            known = ", ".join(sorted(self.queries)) or "none (yet)"
            message = f"this task has no query {name} with a stream sink; it has {known}"
            raise _refused("UnknownQuery", message)
        return found

    def _messages(
        self, call: ReadCall, served: ServedQuery, wait_s: float, peer: str
    ) -> Iterator[Message]:
        try:
            served.wait(call, wait_s)
            if served.ended:
                raise flight.FlightUnavailableError(
                    f"query {served.query} is no longer served by this task; read another replica"
                )
            if call.has_more():
                with self._calls.sending(peer):
                    yield from call.messages()
            else:
                yield from call.messages(with_rows=False)
        except BelowFloor as error:
            raise _refused("BelowFloor", str(error), oldest=served.oldest) from None
        except RekindleError as error:
            raise flight.FlightUnavailableError(str(error)) from error
        finally:
            self._calls.end(peer)


def _check(served: ServedQuery, asked: Ticket) -> None:
    if asked.tentative and not served.tentative:
        message = (
            f"query {served.query} has no tentative results for readers: "
            f"set sink.stream.tentative: true in the topology"
        )
        raise _refused("NotTentative", message)
    own = served.log.partition
    if asked.partition is not None and asked.partition != own:
        message = (
            f"this task has partition {own} of query {served.query}, not {asked.partition}; "
            f"each partition is in a pod of its own"
        )
        raise _refused("OtherPartition", message)


def _refused(reason: str, message: str, **details: int) -> Any:
    """An error with details as JSON. Python's own errors would send a stack trace."""
    info = json.dumps({"error": reason, **details}).encode()
    return flight.FlightServerError(message, info)


def _encoded(first: Message, others: Iterator[Message]) -> Iterator[tuple[Any, pa.Buffer]]:
    yield first.rows, pa.py_buffer(first.metadata.encode())
    for rows, metadata in others:
        yield rows, pa.py_buffer(metadata.encode())


def _info(served: ServedQuery) -> Any:
    """Where reading begins, and what is kept."""
    metadata = {
        "query": served.query,
        "partition": served.log.partition,
        "oldest": served.oldest,
        "newest": served.newest,
        "tentative": served.tentative,
    }
    ticket = flight.Ticket(Ticket(served.query, served.log.partition).encode())
    return flight.FlightInfo(
        served.log.schema,
        flight.FlightDescriptor.for_path(served.query),
        [flight.FlightEndpoint(ticket, [])],
        app_metadata=json.dumps(metadata).encode(),
    )


class _Admission(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._identity = identity

    def start_call(self, info: Any, headers: Any) -> None:
        given = headers.get(_AUTHORIZATION) or [None]
        if not self._identity.accepts_reader(given[0]):
            raise flight.FlightUnauthenticatedError(
                "the header authorization needs `Bearer` and the reader's token of the topology "
                "(docs/read-a-stream.md#access)"
            )
