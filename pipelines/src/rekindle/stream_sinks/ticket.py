"""Tickets of Flight: what a reader asks for, as JSON. Pure.

A reader writes the first one; each message has the next one, which is also valid at another
replica, and after a restart.

Design: docs/design/stream-sinks.md#tickets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rekindle.stream_sinks.cursor import Cursor
from rekindle.streams.epochs import NO_EPOCH

MAX_TICKET_BYTES = 4096
MAX_BYTES = 8 << 20
MAX_WAIT_S = 1.0
# What a reader may write; the other fields come from an earlier message.
_WRITTEN = ("query", "partition", "from_epoch", "tentative", "max_bytes", "wait_s")
# `held`: first and last tentative epoch that the reader has; `correcting`: the highest epoch that
# it has dropped and not got again (`Cursor`).
_FIELDS = frozenset((*_WRITTEN, "at", "held", "correcting"))


@dataclass(frozen=True, slots=True)
class TicketPosition:
    """A position in the output of the process `boot`: `rekindle.streams.live_history.Position`."""

    boot: str
    span: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """`cursor` None: from the oldest kept epoch on. `partition` None: any, for a task has one."""

    query: str
    partition: int | None = None
    cursor: Cursor | None = None
    tentative: bool = False
    at: TicketPosition | None = None
    max_bytes: int = MAX_BYTES
    wait_s: float = MAX_WAIT_S

    def encode(self) -> str:
        message: dict[str, Any] = {"query": self.query}
        if self.partition is not None:
            message["partition"] = self.partition
        if self.cursor is not None:
            message["from_epoch"] = self.cursor.next_stable
        if self.tentative:
            message["tentative"] = True
        if self.max_bytes != MAX_BYTES:
            message["max_bytes"] = self.max_bytes
        if self.wait_s != MAX_WAIT_S:
            message["wait_s"] = self.wait_s
        if self.at is not None:
            message["at"] = [self.at.boot, self.at.span, self.at.epoch]
        if self.cursor is not None and self.cursor.held is not None:
            message["held"] = list(self.cursor.held)
        if self.cursor is not None and self.cursor.correcting != NO_EPOCH:
            message["correcting"] = self.cursor.correcting
        return json.dumps(message)


def parse_ticket(content: bytes) -> Ticket:
    """Raises ValueError, which names the field."""
    if len(content) > MAX_TICKET_BYTES:
        raise ValueError(f"a ticket has at most {MAX_TICKET_BYTES} bytes, this one {len(content)}")
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError('a ticket is JSON, like {"query": "delays"}: ' + str(error)) from None
    if not isinstance(message, dict) or not isinstance(message.get("query"), str):
        raise ValueError('a ticket is a JSON object with a query, like {"query": "delays"}')
    if unknown := sorted(set(message) - _FIELDS):
        raise ValueError(f"a ticket has no field {unknown[0]}; it has {', '.join(_WRITTEN)}")
    tentative = message.get("tentative", False)
    if not isinstance(tentative, bool):
        raise ValueError("tentative in a ticket is true or false")
    wait_s = message.get("wait_s", MAX_WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s >= 0:
        raise ValueError("wait_s in a ticket is a number of seconds, at least 0")
    partition, at = _number(message, "partition"), message.get("at")
    if at is not None:
        if not (isinstance(at, list) and len(at) == 3 and isinstance(at[0], str)):
            raise ValueError("at in a ticket is that of an earlier message")
        at = TicketPosition(at[0], _whole(at[1], "at"), _whole(at[2], "at"))
    max_bytes = _number(message, "max_bytes")
    return Ticket(
        message["query"],
        partition,
        _cursor(message),
        tentative,
        at,
        MAX_BYTES if max_bytes is None else min(max_bytes, MAX_BYTES),
        min(float(wait_s), MAX_WAIT_S),
    )


def _cursor(message: dict[str, Any]) -> Cursor | None:
    stable, correcting = _number(message, "from_epoch"), _number(message, "correcting")
    if stable is None:
        return None
    held = message.get("held")
    if held is not None:
        if not (isinstance(held, list) and len(held) == 2):
            raise ValueError("held in a ticket is that of an earlier message")
        held = (_whole(held[0], "held"), _whole(held[1], "held"))
        if not stable <= held[0] <= held[1]:
            raise ValueError("held in a ticket has two epochs, not below from_epoch, in order")
    return Cursor(stable, held, NO_EPOCH if correcting is None else correcting)


def _number(message: dict[str, Any], field: str) -> int | None:
    value = message.get(field)
    if value is None:
        return None
    number = _whole(value, field)
    if number < 0:
        raise ValueError(f"{field} in a ticket is {number}; it is at least 0")
    return number


def _whole(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**62) < value < 2**62:
        raise ValueError(f"{field} in a ticket is {value!r}, not a whole number")
    return value
