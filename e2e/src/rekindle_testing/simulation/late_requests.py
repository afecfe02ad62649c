"""Requests that fail, and are done all the same: at once, or so late that whoever sent them may
have been replaced meanwhile (docs/design/fencing.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rekindle_testing.simulation.scheduler import Scheduler

MAX_REQUEST_DELAY_S = 10.0
_DONE_PROBABILITY = 0.4
_LATE_IF_DONE_PROBABILITY = 0.4


def perform_now_later_or_never(scheduler: Scheduler, request: Callable[[], Any]) -> None:
    """Do what was asked, do it later, or never."""
    random = scheduler.random
    if random.random() >= _DONE_PROBABILITY:
        return
    if random.random() < _LATE_IF_DONE_PROBABILITY:
        scheduler.after(scheduler.between(0.0, MAX_REQUEST_DELAY_S), request)
    else:
        request()
