"""Bugs that are planted in what joins the parts of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rekindle.task.core.parts import Sinks
from rekindle.task.core.supervisor import SupervisorCore, TruncateLog
from rekindle.task.core.task import TaskCore
from rekindle_testing.simulation.planting import Mutant, replaced


def _truncates_what_sinks_have(truncate: Any) -> Any:
    """Whatever restarts and readers need."""

    def wrong(self: TaskCore) -> list[Any]:
        durable = [core.next_epoch - 1 for core in self._sink_cores()]
        return [*truncate(self), TruncateLog(min(durable))] if durable else truncate(self)

    return wrong


def _wakes_no_sink(log_grew: Any) -> Any:
    return lambda self: []


def _saves_always(is_saver: Any) -> Any:
    return property(lambda self: True)


def _forgets_the_limit(start: Any) -> Any:
    """Of a sink that starts while replicas disagree; it gets the next one."""
    return lambda self, assigned, through: start(self, assigned, None)


WIRING_MUTANTS: Mapping[str, Mutant] = {
    "a log is truncated as far as its sinks have written": replaced(
        TaskCore, "_truncate", _truncates_what_sinks_have
    ),
    "sinks do not learn that the log grew": replaced(TaskCore, "_log_grew", _wakes_no_sink),
    "a task saves checkpoints that another replica saves": replaced(
        SupervisorCore, "is_saver", _saves_always
    ),
}
LIMIT_MUTANTS: Mapping[str, Mutant] = {
    "a sink that starts writes beyond the agreed epoch": replaced(
        Sinks, "start", _forgets_the_limit
    ),
}
"""Only simulations with wrong results find them."""
