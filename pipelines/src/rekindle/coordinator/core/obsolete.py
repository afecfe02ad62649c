"""Tasks whose partition is none of the newest generation's, until their pods are gone.

They are told to give up their sinks before their successors' start is chosen: what they wrote
beyond it would stand there instead, since a file is never replaced. Their routes and logs stay as
they are. Pure.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Task

STOP_TIMEOUT_S = 3.0
"""How long a claim waits for those that answer and go on writing."""
_WRITING = frozenset({"CatchingUp", "Live"})


def is_obsolete(task: Task, graph: Graph) -> bool:
    return task.partition not in graph.readers


def still_writing(tasks: Iterable[Task], graph: Graph) -> bool:
    """Whether some of them that can be reached have sinks. One that ends takes no new epochs."""
    return any(
        task.response is not None
        and task.response.sinks
        and task.phase in _WRITING
        and not task.suspected
        and is_obsolete(task, graph)
        for task in tasks
    )
