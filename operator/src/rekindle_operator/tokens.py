"""The values of the Secret of a topology's token. Pure.

Its keys are `token`, what new pods have; `running`, what pods may have that were made before the
token was replaced; and `reader`, for readers of stream sinks. To replace the token, somebody writes
another one, with or without the other keys: the operator then replaces the pods one by one, and
writes it as `running` when no pod has the one before. A Secret that was deleted is restored with
the values that this process has seen, and `running` is what pods have, as their digests tell.

Design: docs/design/fencing.md#identity.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field, replace
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
        except (ValueError, TypeError):
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


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Of a Secret, what this process has seen: its values in the newest `version`, or before if
    they are missing there; and, by digest, tokens that pods have."""

    token: str = field(default="", repr=False)
    running: str = field(default="", repr=False)
    by_digest: Mapping[str, str] = field(default_factory=dict, repr=False)
    version: int = 0

    def with_values(self, values: Mapping[str, str], version: int) -> SeenTokens:
        if version < self.version or TOKEN_KEY not in values:
            return self
        token = values[TOKEN_KEY]
        running = values.get(RUNNING_TOKEN_KEY) or self.running or token
        fresh = {token_digest(text): text for text in (token, running)}
        return SeenTokens(token, running, {**self.by_digest, **fresh}, version)

    def without_unused(self, of_pods: Container[str]) -> SeenTokens:
        """`of_pods`: digests."""
        used = {
            digest: text
            for digest, text in self.by_digest.items()
            if digest in of_pods or text in (self.token, self.running)
        }
        return replace(self, by_digest=used)


def wanted_values(
    found: Mapping[str, str], seen: SeenTokens, of_pods: Collection[str]
) -> dict[str, str]:
    """What the Secret is to have. `found`: what it has; `of_pods`: digests of the tokens that pods
    have; empty for a pod of a version that writes none."""
    before = found.get(RUNNING_TOKEN_KEY) or seen.running
    token = found.get(TOKEN_KEY) or seen.token or before or secrets.token_urlsafe(_TOKEN_BYTES)
    others = sorted({*of_pods} - {token_digest(token)})
    known = {token_digest(before): before, **seen.by_digest}
    held = [before] if token_digest(before) in others else [known[d] for d in others if d in known]
    running = next(iter(held), before if others else "") or token
    reader = Identity(token=token).reader_token
    assert reader is not None
    return {TOKEN_KEY: token, RUNNING_TOKEN_KEY: running, READER_TOKEN_KEY: reader}
