"""Failures of an engine itself, as opposed to those of an operator. No Spark here.

State and inputs are untouched by each of them, so the same epochs can be run again.

Design: docs/design/task.md#failures.
"""

from __future__ import annotations

from rekindle.errors import RekindleError

HEAP_EXHAUSTED = frozenset({3, 52})
"""Exit statuses: of -XX:+ExitOnOutOfMemoryError, and of Spark when a task of its own met one."""
KILLED = frozenset({-9, 137})
"""By SIGKILL, as the kernel does when a pod has used up its memory."""


class EngineLost(RekindleError):
    """The JVM is gone; only a new one can go on. `status` is its exit status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def out_of_memory(self) -> bool:
        """Whether its heap was full, which the same call would fill again."""
        return self.status in HEAP_EXHAUSTED


class OutOfMemory(RekindleError):
    """A call did not fit into memory; the engine goes on."""


class DiskFull(RekindleError):
    """A call found no room for its temporary files; it can be run again once there is some."""


def describe_death(status: int | None, heap: str) -> str:
    """What an exit status says, in words for a user."""
    if status in HEAP_EXHAUSTED:
        return (
            f"the JVM ran out of memory (status {status}, heap {heap}); it has more with a higher "
            "resources.limits.memory of the operator, or spark.driver.memory in sparkConf"
        )
    if status in KILLED:
        return (
            f"the JVM died: it was killed (status {status}), as the kernel does when a pod has "
            "used up its memory"
        )
    return f"the JVM died (status {status})"
