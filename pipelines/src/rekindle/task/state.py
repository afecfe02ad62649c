"""The state of a task after an epoch: it is restored, updated by the loop, and saved.

It refers to immutable tables, so keeping one is cheap.

Design: docs/design/task.md#epoch-loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.model import State


@dataclass(frozen=True, slots=True)
class TaskState:
    """State of a task's operators and the chain's watermark after `epoch`, and the chained digest
    of all output through it; empty: not known, so that it begins here."""

    epoch: int
    watermark: int
    operators: State
    chained_digest: str = ""
