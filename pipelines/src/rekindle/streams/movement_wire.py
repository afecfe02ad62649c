"""The messages between a newcomer and its donor over HTTP: requests, and replies in frames. Pure.

A request is JSON, with the same identity as requests for epochs. A reply is one frame, like those
of epochs: a prefix (length of the header, CRC-32 of it), the header in JSON, and for a chunk its
bytes, which have their own digest. `later`: there is no reply yet, not even that an offer is being
prepared.

Design: docs/design/state-movement.md#over-http.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rekindle.exchange.state_mover.messages import (
    Chunk,
    ChunkRequest,
    MessageToDonor,
    MessageToNewcomer,
    Offer,
    OfferRequest,
    Preparing,
    Refusal,
    Release,
)
from rekindle.identity import Identity
from rekindle.streams.wire import MAX_HEADER_BYTES, MessageIdentity, StreamRefused

STATE_PATH = "/v3/state"
MIN_CHUNK_BYTES = 64 << 10

_PREFIX = struct.Struct("!II")
_REQUESTS: Mapping[str, TypeAdapter[Any]] = {
    "offer": TypeAdapter(OfferRequest),
    "chunk": TypeAdapter(ChunkRequest),
    "release": TypeAdapter(Release),
}
_REPLIES: Mapping[str, TypeAdapter[Any]] = {
    "preparing": TypeAdapter(Preparing),
    "offer": TypeAdapter(Offer),
    "chunk": TypeAdapter(Chunk),
    "refusal": TypeAdapter(Refusal),
}
_LATER = "later"


def request_body(message: MessageToDonor, incarnation: int, identity: Identity) -> dict[str, Any]:
    """`incarnation`: of the donor."""
    match message:
        case OfferRequest():
            kind = "offer"
        case ChunkRequest():
            kind = "chunk"
        case Release():
            kind = "release"
    identified = MessageIdentity.of(identity, incarnation).message()
    return {"kind": kind, "request": asdict(message)} | identified


def request_of(content: Mapping[str, Any]) -> MessageToDonor:
    """Raises ValueError, KeyError, TypeError; the identity has been checked."""
    message: MessageToDonor = _REQUESTS[content["kind"]].validate_python(content["request"])
    if isinstance(message, OfferRequest) and message.chunk_bytes < MIN_CHUNK_BYTES:
        raise ValueError(f"chunks of {message.chunk_bytes} bytes are too small")
    return message


def reply_frame(reply: MessageToNewcomer | None, sender: MessageIdentity) -> tuple[bytes, bytes]:
    """Prefix and header of the frame, and its bytes. `reply`: None if there is none yet
    (`later`)."""
    data = b""
    match reply:
        case None:
            header: dict[str, Any] = {"kind": _LATER}
        case Preparing():
            header = {"kind": "preparing", "reply": asdict(reply)}
        case Offer():
            header = {"kind": "offer", "reply": asdict(reply)}
        case Chunk():
            data = reply.data
            fields = {
                "session": asdict(reply.session),
                "boot": reply.boot,
                "number": reply.number,
                "digest": reply.digest,
            }
            header = {"kind": "chunk", "reply": fields, "bytes": len(data)}
        case Refusal():
            header = {"kind": "refusal", "reply": asdict(reply)}
    text = json.dumps(header | sender.message(), separators=(",", ":")).encode()
    return _PREFIX.pack(len(text), zlib.crc32(text)) + text, data


def max_reply_bytes(chunk_bytes: int) -> int:
    return _PREFIX.size + MAX_HEADER_BYTES + chunk_bytes


def reply_of(body: bytes | bytearray, identity: Identity) -> MessageToNewcomer | None:
    """The reply; None if there is none yet (`later`). Raises StreamRefused for a reply of another
    topology or version,
    ValueError for a damaged one; a chunk's digest is checked by the newcomer's core."""
    if len(body) < _PREFIX.size:
        raise ValueError(f"a reply of {len(body)} bytes")
    length, checksum = _PREFIX.unpack_from(body)
    end = _PREFIX.size + length
    text = body[_PREFIX.size : end]
    if length > MAX_HEADER_BYTES or len(text) != length or zlib.crc32(text) != checksum:
        raise ValueError("a damaged reply")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"a reply that is no JSON object: {text[:80]!r}")
    if (reason := MessageIdentity.read(header).refusal(identity)) is not None:
        raise StreamRefused(f"its reply is refused: {reason}")
    if header["kind"] == _LATER:
        return None
    fields = header["reply"]
    if header["kind"] == "chunk":
        data = bytes(memoryview(body)[end:])
        if len(data) != header["bytes"]:
            raise ValueError(f"{len(data)} of {header['bytes']} bytes of a chunk")
        fields = fields | {"data": data}
    try:
        reply: MessageToNewcomer = _REPLIES[header["kind"]].validate_python(fields)
    except (ValidationError, KeyError, TypeError) as error:
        raise ValueError(f"a reply that it cannot read ({error!r})") from error
    return reply
