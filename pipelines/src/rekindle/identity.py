"""Which topology a process works for, and which protocol it speaks.

Addresses are reused: a pod may get the address of another topology's pod, and operator ids do not
contain the topology's name. So each poll, answer, Flight ticket and Flight answer carries the
topology's UID and protocol version, and whoever is meant by none of it refuses. The token proves
that a peer belongs to the topology; it is absent where nothing has to be proved (a local run).
Pure.

Design: docs/design/fencing.md#identity.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

PROTOCOL = 2
"""Version of polls, answers and tickets that this release sends. Raised when their meaning changes;
a field that is only added does not raise it, since unknown fields are ignored."""
OLDEST_PROTOCOL = 2
"""The oldest version that this release understands."""
UNVERSIONED = 1
"""What a message without a version speaks."""
TOKEN_VARIABLE = "REKINDLE_TOKEN"

_SCHEME = "Bearer "


@dataclass(frozen=True, slots=True)
class Identity:
    """`topology` is the UID. Without a `token` none is sent, and none is required."""

    topology: str = ""
    token: str | None = field(default=None, repr=False)

    @property
    def authorization(self) -> str | None:
        """Value of the header `Authorization`."""
        return None if self.token is None else f"{_SCHEME}{self.token}"

    def accepts(self, authorization: str | None) -> bool:
        """Whether a caller that sends this header may be answered."""
        if self.token is None:
            return True
        given = (authorization or "").encode(errors="surrogateescape")
        return hmac.compare_digest(given, f"{_SCHEME}{self.token}".encode())

    def mismatch(self, topology: str) -> str | None:
        """Why a message for (or of) this topology is refused; None if it is ours."""
        if topology == self.topology:
            return None
        return f"it is for topology {topology or 'unknown'}, this is topology {self.topology}"


@dataclass(frozen=True, slots=True)
class Versions:
    """What a peer sends, and the oldest that it understands."""

    protocol: int = PROTOCOL
    oldest: int = OLDEST_PROTOCOL


def incompatible(peer: Versions, own: Versions | None = None) -> str | None:
    """Why two versions cannot work together, naming both; None if they can."""
    own = own or Versions()
    if peer.protocol >= own.oldest and own.protocol >= peer.oldest:
        return None
    return (
        f"it speaks protocol {peer.protocol} (understands {peer.oldest} and newer), this process "
        f"speaks {own.protocol} (understands {own.oldest} and newer): use images of one release"
    )
