"""The state of a task after an epoch: it is restored, updated by the loop, and saved.

It refers to immutable tables, so keeping one is cheap.

Design: docs/design/task.md#epoch-loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rekindle.engine.model import State
from rekindle.engine.state.operator import EMPTY
from rekindle.engine.window_state import begins_after


@dataclass(frozen=True, slots=True)
class TaskState:
    """State of a task's operators and the chain's watermark after `epoch`, and the chained digest
    of all output through it; empty: not known, so that it begins here."""

    epoch: int
    watermark: int
    operators: State
    chained_digest: str = ""

    def begun_after(self, bounds: Mapping[str, int]) -> TaskState:
        """With window operators that begin later than the topology. `bounds`: by operator id, the
        event time through which each may lack rows."""
        states = self.operators.operators
        begun = {o: begins_after(states.get(o, EMPTY), us) for o, us in bounds.items()}
        return replace(self, operators=State({**states, **begun})) if begun else self
