"""What a core reports to be wrong with its part of the task. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.protocol import TaskProblem


@dataclass(frozen=True, slots=True)
class SetProblem:
    """Report the problem of a part of the task; None: it has recovered."""

    subject: str
    problem: TaskProblem | None
