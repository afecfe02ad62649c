"""Failures of the engine itself, not of an operator. No Spark here.

They do not change state or inputs, so the same epochs can be run again.

Design: docs/design/task.md#failures.
"""

from __future__ import annotations

from rekindle.errors import RekindleError

HEAP_EXHAUSTED = frozenset({3, 52})
"""Exit statuses after an OutOfMemoryError: with -XX:+ExitOnOutOfMemoryError, and of Spark if it was
in a Spark task."""
KILLED = frozenset({-9, 137})
"""Exit statuses after SIGKILL, which the kernel sends when a pod exceeds its memory limit."""


class EngineUnavailable(RekindleError):
    """There is no JVM: it did not start, or has exited with `status`; a new one must be started."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def out_of_memory(self) -> bool:
        """Whether its heap was full: the same call would fill it again."""
        return self.status in HEAP_EXHAUSTED


class OutOfMemory(RekindleError):
    """A call did not fit into memory; the engine is still usable."""


class DiskFull(RekindleError):
    """A call had no disk space for temporary files; it can be run again when there is some."""


def describe_exit(status: int | None, heap: str) -> str:
    """A message for the user about an exit status."""
    if status in HEAP_EXHAUSTED:
        return (
            f"the JVM ran out of memory (status {status}, heap {heap}); raise "
            "resources.limits.memory of the operator, or spark.driver.memory in sparkConf"
        )
    if status in KILLED:
        return (
            f"the JVM was killed (status {status}), probably because the pod exceeded its memory "
            "limit"
        )
    return f"the JVM died (status {status})"
