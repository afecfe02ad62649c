"""Tasks of partitions that the newest generation does not have, until their pods are gone. Pure.

Their sinks have to stop before the start epoch of the new partitions is chosen: files that they
write after that epoch would stay, since files are never replaced. They keep routes and logs.

Design: docs/design/coordinator.md#new-generations.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Task

STOP_TIMEOUT_S = 3.0
"""How long the first manifest waits for tasks that respond and still write."""


def is_obsolete(task: Task, graph: Graph) -> bool:
    """Whether its partition is not in the newest generation (`graph.consumers` has each)."""
    return task.partition not in graph.consumers


def still_writing(tasks: Iterable[Task], graph: Graph) -> bool:
    """Whether obsolete tasks that respond still have sinks. A stopping task takes no new epochs."""
    return any(
        task.response is not None
        and task.response.sinks
        and task.phase.serves
        and not task.suspected
        and is_obsolete(task, graph)
        for task in tasks
    )
