"""A call of a reader to one replica; `follow` goes on at another one when it fails.

Design: docs/design/stream-sinks.md#readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from rekindle.errors import BelowFloor, RekindleError
from rekindle.protocol import ConsistencyState

_FLIGHT_PREFIX = re.compile(r"^Flight returned [a-z ]+ error, with message: ")
CALL_S = 20.0
"""Deadline of a call, which waits for a second and then sends a few MiB."""
PROBE_S = 2.0
"""Deadline of a call of a replica whose state is unknown, while another one serves."""


class ReplicaUnavailable(RekindleError):
    """A replica cannot be read now; names its address."""


class ReadRefused(RekindleError):
    """A replica refuses the request, as every other one would; says why."""


class NoLongerKept(BelowFloor):
    """A replica does not have the epoch any more; `oldest`: the lowest one that it has."""

    def __init__(self, message: str, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


@dataclass(frozen=True, slots=True)
class Received:
    """What a reader receives: epochs of kind STABLE or TENTATIVE have `rows`; UNDO and REC_DONE
    name an epoch; END ends a call. `ticket`: asks for what follows; `state`: of the replica's
    output."""

    kind: str
    epoch: int
    rows: pa.Table
    ticket: str
    state: ConsistencyState = ConsistencyState.STABLE


def read_call(
    address: str, ticket: str, token: str | None, timeout_s: float = CALL_S
) -> Iterator[Received]:
    """One call, of whole epochs. Raises NoLongerKept, ReadRefused, ReplicaUnavailable."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
    try:
        with flight.connect(f"grpc://{address}") as client:
            yield from _whole_epochs(client.do_get(flight.Ticket(ticket), options))
    except flight.FlightServerError as error:
        raise _refusal(address, error) from None
    except flight.FlightUnauthenticatedError as error:
        raise ReadRefused(f"{address}: {_first_line(error)}") from None
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise ReplicaUnavailable(f"{address} cannot be read: {_first_line(error)}") from None


def _whole_epochs(reader: Any) -> Iterator[Received]:
    parts: list[pa.RecordBatch] = []
    for chunk in reader:
        try:
            metadata = json.loads(chunk.app_metadata.to_pybytes())
            kind, epoch, ticket = metadata["kind"], int(metadata["epoch"]), str(metadata["next"])
            is_whole = metadata["part"] + 1 == metadata["parts"]
            state = ConsistencyState(metadata.get("state", ConsistencyState.STABLE))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"what it sends is not of a stream sink ({error!r})") from None
        parts.append(chunk.data)
        if is_whole:
            yield Received(kind, epoch, pa.Table.from_batches(parts, reader.schema), ticket, state)
            parts = []


def _refusal(address: str, error: Any) -> RekindleError:
    text = f"{address}: {_first_line(error)}"
    try:
        details = json.loads(error.extra_info)
        reason = details["error"]
        if reason == "BelowFloor":
            return NoLongerKept(text, int(details["oldest"]))
    except (ValueError, KeyError, TypeError):
        return ReplicaUnavailable(text)
    # Another process may serve at the address, or the task does not serve the query yet.
    gone = reason in ("UnknownQuery", "OtherPartition")
    return ReplicaUnavailable(text) if gone else ReadRefused(text)


def _first_line(error: Exception) -> str:
    """What the server says, or why there is none, without what gRPC and Arrow add."""
    text = str(error).partition("\n")[0]
    for added in (". Detail: ", ". gRPC client debug context"):
        text = text.partition(added)[0]
    text = _FLIGHT_PREFIX.sub("", text)
    return text.rpartition("Failed to connect to remote host: ")[2]
