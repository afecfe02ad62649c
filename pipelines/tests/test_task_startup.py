"""What a task says while it starts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rekindle.errors import StoreError
from rekindle.protocol import RestorePoint, TaskRef
from rekindle.task import startup
from rekindle.task.core.status import TaskStatus
from rekindle.task.startup import Startup
from rekindle_testing.waiting import eventually


def test_a_start_that_waits_for_its_storage_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts a task is in the call, so nobody else can."""
    monkeypatch.setattr(startup, "SLOW_START_S", 0.01)
    status = TaskStatus(
        TaskRef(segment="s", partition=0, replica=0, incarnation=1), "boot", 0, 1, time.time
    )
    found: list[str] = []

    class Hanging:
        def restore(self, point: RestorePoint) -> None:
            eventually(lambda: status.response(1).problem is not None)
            problem = status.response(1).problem
            found.append(problem.message if problem is not None else "")
            raise StoreError("the store is away")

    unused: Any = None
    store: Any = Hanging()
    Startup(unused, store, unused, status).begin(RestorePoint(epoch=7, object="x"))
    assert found[0].startswith("reading the checkpoint of epoch 7 has not ended after ")
    problem = status.response(1).problem
    assert problem is not None
    assert problem.message == "the store is away"
