"""A reader of one partition of a query: goes on at another replica when one fails.

Design: docs/design/stream-sinks.md#readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from rekindle.errors import BelowFloor, RekindleError

CALL_S = 20.0
"""Deadline of a call, which waits for a second and then sends a few MiB."""


class ReplicaUnavailable(RekindleError):
    """A replica cannot be read now; names its address."""


class ReadRefused(RekindleError):
    """No replica would serve this; says why."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a reader is told: epochs of kind STABLE or TENTATIVE have `rows`; UNDO and REC_DONE name
    an epoch; END ends a call. `ticket`: asks for what follows."""

    kind: str
    epoch: int
    rows: pa.Table
    ticket: str


def read_call(address: str, ticket: str, token: str | None) -> Iterator[Received]:
    """One call, of whole epochs. Raises BelowFloor, ReadRefused, ReplicaUnavailable."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    options = flight.FlightCallOptions(timeout=CALL_S, headers=headers)
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
        told = json.loads(chunk.app_metadata.to_pybytes())
        parts.append(chunk.data)
        if told["part"] + 1 == told["parts"]:
            rows = pa.Table.from_batches(parts, reader.schema)
            parts = []
            yield Received(told["kind"], told["epoch"], rows, told["next"])


def _refusal(address: str, error: Any) -> RekindleError:
    text = f"{address}: {_first_line(error)}"
    try:
        reason = json.loads(error.extra_info)["error"]
    except (ValueError, KeyError, TypeError):
        return ReplicaUnavailable(text)
    if reason == "BelowFloor":
        return BelowFloor(text)
    # Another process may serve at the address, or the query is not assigned yet.
    gone = reason in ("UnknownQuery", "OtherPartition")
    return ReplicaUnavailable(text) if gone else ReadRefused(text)


def _first_line(error: Exception) -> str:
    """What the server says, without what gRPC adds."""
    text = str(error).partition("\n")[0]
    for added in (". Detail: ", ". gRPC client debug context"):
        text = text.partition(added)[0]
    return text
