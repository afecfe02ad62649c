"""Waiting for a condition with a deadline: the only way in which tests and their tools wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DeadlineError(AssertionError):
    """A condition did not become true in time; the message has the last value."""


def wait_for(
    what: str, condition: Callable[[], T | None], timeout_s: float = 60.0, every_s: float = 0.05
) -> T:
    """Poll until `condition` returns something truthy, and return that; raises `DeadlineError`
    naming `what`."""
    end = time.monotonic() + timeout_s
    while True:
        last = condition()
        if last:
            return last
        if time.monotonic() > end:
            raise DeadlineError(f"waited {timeout_s:g} s for {what}; last seen: {last!r}")
        time.sleep(every_s)


def eventually(condition: Callable[[], T | None], timeout_s: float = 20.0) -> T:
    """`wait_for` without a description; the traceback shows the condition."""
    return wait_for("the condition of the failing line", condition, timeout_s, 0.01)
