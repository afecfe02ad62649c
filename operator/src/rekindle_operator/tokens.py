"""The values of the Secret of a topology's token. Pure.

Its keys are `token`, what new pods have; `running`, what pods may have that were made before the
token was replaced; and `reader`, for readers of stream sinks. To replace the token, somebody writes
another one: the operator then replaces the pods one by one, and writes it as `running` when no pod
has the one before. A Secret that was deleted is restored with the values that this process has
seen.

Design: docs/design/fencing.md#identity.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.identity import Identity
from rekindle.names import READER_TOKEN_KEY, RUNNING_TOKEN_KEY, TOKEN_KEY

_TOKEN_BYTES = 32
_USABLE = re.compile(r"[!-~]{1,1024}")  # one word of an HTTP header


@dataclass(frozen=True, slots=True)
class TokenDigests:
    """What may be kept in a snapshot. `is_complete`: no value is missing or does not fit;
    `is_refused`: somebody has written a token that no request can carry."""

    token: str
    running: str
    is_complete: bool
    is_refused: bool = False

    @property
    def is_replaced(self) -> bool:
        """Pods may still have the one before."""
        return self.is_complete and self.token != self.running

    def differs_from(self, of_pod: str) -> bool:
        """Whether a pod with this digest was made before the token was replaced. A version of the
        operator that writes none (empty) has made its pods before. No pod is replaced before the
        Secret is complete: the new one would know the new token alone."""
        return self.is_complete and (self.token != of_pod if of_pod else self.is_replaced)


def decoded(data: Mapping[str, Any] | None) -> dict[str, str]:
    """The texts of a Secret's `data` that can be tokens: ASCII without spaces or line ends."""
    found = {}
    for key, value in (data or {}).items():
        try:
            text = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, TypeError):
            continue
        if _USABLE.fullmatch(text):
            found[key] = text
    return found


def encoded(values: Mapping[str, str]) -> dict[str, str]:
    """`data` of a Secret."""
    return {key: base64.b64encode(text.encode()).decode() for key, text in values.items()}


def digests_of(values: Mapping[str, str], *, immutable: bool) -> TokenDigests:
    """`immutable`: a version before this one has created the Secret; it stays as it is."""
    token = values.get(TOKEN_KEY, "")
    running = token if immutable else values.get(RUNNING_TOKEN_KEY, "")
    is_reader = values.get(READER_TOKEN_KEY) == Identity(token=token).reader_token
    is_complete = bool(token and running and (is_reader or immutable))
    return TokenDigests(token_digest(token), token_digest(running), is_complete)


def token_digest(token: str) -> str:
    """Empty for no token. It does not help to guess one: tokens are random."""
    return hashlib.sha256(token.encode()).hexdigest()[:16] if token else ""


def wanted_values(
    found: Mapping[str, str], seen: Mapping[str, str], *, settles: bool
) -> dict[str, str]:
    """What the Secret is to have. `found`: what it has; `seen`: what it had when this process last
    saw it; `settles`: no pod has the token before this one any more."""
    before = found.get(RUNNING_TOKEN_KEY) or seen.get(RUNNING_TOKEN_KEY) or seen.get(TOKEN_KEY)
    token = found.get(TOKEN_KEY) or seen.get(TOKEN_KEY) or before
    token = token or secrets.token_urlsafe(_TOKEN_BYTES)
    running = token if settles or not before else before
    reader = Identity(token=token).reader_token
    assert reader is not None
    return {TOKEN_KEY: token, RUNNING_TOKEN_KEY: running, READER_TOKEN_KEY: reader}
