"""What all cores of a task have in common: being woken, reporting problems. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.protocol import TaskProblem


@dataclass(frozen=True, slots=True)
class Woken:
    """Time has passed, or what the core waits for may have arrived."""


@dataclass(frozen=True, slots=True)
class SetProblem:
    """Report the problem of a part of the task; None: it has recovered."""

    subject: str
    problem: TaskProblem | None
