"""Limits of namespaces, as the administrator sets them: priorities and capacity. Pure.

A limit only affects the plan: running tasks are not stopped when a limit is lowered.

Design: docs/design/recovery.md#plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_DEFAULT = "*"

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class NamespaceLimits:
    """By namespace; `*`: all that are not named. `shares`: fraction of each resource of
    all usable nodes, from 0 to 1."""

    priorities: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    def max_priority(self, namespace: str) -> int | None:
        return self.priorities.get(namespace, self.priorities.get(_DEFAULT))

    def max_share(self, namespace: str) -> float:
        return self.shares.get(namespace, self.shares.get(_DEFAULT, 1.0))

    def priority(self, namespace: str, wanted: int) -> int:
        limit = self.max_priority(namespace)
        return wanted if limit is None else min(wanted, limit)


def read_limits(env: Mapping[str, str]) -> NamespaceLimits:
    """From `REKINDLE_MAX_PRIORITIES` and `REKINDLE_MAX_SHARES`, like `*=1000,team-a=100`."""
    limits = NamespaceLimits(
        _pairs(env, "REKINDLE_MAX_PRIORITIES", lambda text: int(float(text))),
        _pairs(env, "REKINDLE_MAX_SHARES", float),
    )
    for namespace, share in limits.shares.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"REKINDLE_MAX_SHARES: {namespace}={share:g} must be from 0 to 1")
    return limits


def _pairs(env: Mapping[str, str], name: str, parse: Callable[[str], N]) -> dict[str, N]:
    found: dict[str, N] = {}
    for pair in filter(None, (p.strip() for p in env.get(name, "").split(","))):
        namespace, _, value = pair.partition("=")
        try:
            found[namespace.strip()] = parse(value)
        except (ValueError, OverflowError):
            raise ValueError(f"{name}: cannot read {pair!r}; write pairs like team-a=100") from None
    return found
