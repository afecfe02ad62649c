"""Events that all cores of a task have. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Woken:
    """Time has passed, or what the core waits for may be there."""
