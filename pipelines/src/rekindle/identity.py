"""Which topology a process works for, and which protocol it speaks.

Addresses are reused: a pod may get the address of another topology's pod, and operator ids do not
contain the topology's name. So each poll, each read of a stream, and each response to one has the
topology's UID and protocol version; a process refuses messages for another topology. The token
proves that a peer belongs to the topology; a local run needs none. While the pods of a topology are
replaced after its token was, newer ones have both tokens, and show and accept either. Pure.

Design: docs/design/fencing.md#identity.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PROTOCOL = 3
"""Version of polls and poll responses that this release sends. Incremented when their meaning
changes, but not for a new field, since unknown fields are ignored. Since version 3, a restore point
may name a lender."""
LENDING_PROTOCOL = 3
"""Since this version, tasks lend and borrow states."""
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
PREVIOUS_TOKEN_VARIABLE = "REKINDLE_PREVIOUS_TOKEN"
TOKEN_VARIABLES = (TOKEN_VARIABLE, PREVIOUS_TOKEN_VARIABLE)

_SCHEME = "Bearer "
_READER_TOKEN_MESSAGE = b"rekindle reader of stream sinks"


@dataclass(frozen=True, slots=True)
class Identity:
    """`topology` is the UID. Without `token`, no token is sent or required. `previous_token`: of
    pods that have not been replaced yet since the token was; None if it was not."""

    topology: str = ""
    token: str | None = field(default=None, repr=False)
    previous_token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, topology: str, environment: Mapping[str, str]) -> Identity:
        """With the tokens of a pod's environment."""
        token, previous = (environment.get(name) or None for name in TOKEN_VARIABLES)
        return cls(topology, token, previous if previous != token else None)

    @property
    def authorization(self) -> str | None:
        """Value of the header `Authorization`: all tokens, since a peer may know only one."""
        return None if self.token is None else _SCHEME + " ".join(self._tokens)

    @property
    def _tokens(self) -> list[str]:
        return [token for token in (self.token, self.previous_token) if token is not None]

    def accepts(self, authorization: str | None) -> bool:
        """Whether a caller with this header `Authorization` is accepted."""
        if self.token is None:
            return True
        given = (authorization or "").encode(errors="surrogateescape")
        scheme = _SCHEME.encode()
        whole = given.removeprefix(scheme) if given.startswith(scheme) else b""
        # A list, since `any` would end with the first match: the time must not tell.
        shown = [whole, *whole.split(b" ")[:2]]
        return True in [hmac.compare_digest(s, t.encode()) for s in shown for t in self._tokens]

    @property
    def reader_token(self) -> str | None:
        """The token of readers outside of the topology, who may only read its stream sinks.
        `token` cannot be computed from it."""
        return None if self.token is None else _reader_token(self.token)

    def accepts_reader(self, authorization: str | None) -> bool:
        """Whether a reader of stream sinks with this header `Authorization` is accepted."""
        readers = [_reader_token(token) for token in self._tokens]
        return Identity(self.topology, *readers).accepts(authorization)

    def mismatch(self, topology: str) -> str | None:
        """Why a message for (or from) this topology is refused; None if it is this process's."""
        if topology == self.topology:
            return None
        return f"it is for topology {topology or 'unknown'}, this is topology {self.topology}"


def _reader_token(token: str) -> str:
    return hmac.new(token.encode(), _READER_TOKEN_MESSAGE, "sha256").hexdigest()


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
