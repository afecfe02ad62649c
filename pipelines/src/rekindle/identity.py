"""Which topology a process works for, and which protocol it speaks.

Addresses are reused: a pod may get the address of another topology's pod, and operator ids do not
contain the topology's name. So each poll, each read of a stream, and each response to one has the
topology's UID and protocol version; a process refuses messages for another topology. The token
proves that a peer belongs to the topology; a local run needs none. Pure.

Design: docs/design/fencing.md#identity.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

PROTOCOL = 2
"""Version of polls and poll responses that this release sends. Incremented when their meaning
changes, but not for a new field, since unknown fields are ignored."""
OLDEST_PROTOCOL = 2
"""The oldest version that this release understands."""
STREAM_PROTOCOL = 3
"""Version of the protocol by which tasks read streams from each other. Versions up to 2 used Arrow
Flight."""
OLDEST_STREAM_PROTOCOL = 3
"""The oldest stream protocol that this release understands."""
UNREPORTED_STREAM_PROTOCOL = 2
"""The stream protocol of a task whose poll responses do not name it."""
UNVERSIONED = 1
"""The version that a message without a version has."""
TOKEN_VARIABLE = "REKINDLE_TOKEN"

_SCHEME = "Bearer "
_READER_TOKEN_MESSAGE = b"rekindle reader of stream sinks"


@dataclass(frozen=True, slots=True)
class Identity:
    """`topology` is the UID. Without `token`, no token is sent or required."""

    topology: str = ""
    token: str | None = field(default=None, repr=False)

    @property
    def authorization(self) -> str | None:
        """Value of the header `Authorization`."""
        return None if self.token is None else f"{_SCHEME}{self.token}"

    def accepts(self, authorization: str | None) -> bool:
        """Whether a caller with this header `Authorization` is accepted."""
        if self.token is None:
            return True
        given = (authorization or "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, f"{_SCHEME}{self.token}".encode())

    @property
    def reader_token(self) -> str | None:
        """The token of readers outside of the topology, who may only read its stream sinks.
        `token` cannot be computed from it."""
        if self.token is None:
            return None
        return hmac.new(self.token.encode(), _READER_TOKEN_MESSAGE, "sha256").hexdigest()

    def accepts_reader(self, authorization: str | None) -> bool:
        """Whether a reader of stream sinks with this header `Authorization` is accepted."""
        return Identity(self.topology, self.reader_token).accepts(authorization)

    def mismatch(self, topology: str) -> str | None:
        """Why a message for (or from) this topology is refused; None if it is this process's."""
        if topology == self.topology:
            return None
        return f"it is for topology {topology or 'unknown'}, this is topology {self.topology}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The version that a peer sends, and the oldest one that it understands."""

    protocol: int = PROTOCOL
    oldest: int = OLDEST_PROTOCOL


STREAM_VERSIONS = Versions(STREAM_PROTOCOL, OLDEST_STREAM_PROTOCOL)


def stream_conflict(peers: Iterable[Versions]) -> tuple[int, ...]:
    """The stream protocols of `peers`, ascending, if some of them cannot read from others; else
    empty."""
    found = set(peers)
    conflict = any(incompatible(a, b) is not None for a in found for b in found)
    return tuple(sorted({v.protocol for v in found})) if conflict else ()


def incompatible(peer: Versions, own: Versions | None = None) -> str | None:
    """Why two versions cannot work together, naming both; None if they can."""
    own = own or Versions()
    if peer.protocol >= own.oldest and own.protocol >= peer.oldest:
        return None
    return (
        f"it speaks protocol {peer.protocol} (understands {peer.oldest} and newer), this process "
        f"speaks {own.protocol} (understands {own.oldest} and newer): use images of one release"
    )
