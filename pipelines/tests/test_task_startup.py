"""What a task says while it starts."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle.engine.failure import EngineUnavailable
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


def test_moved_state_is_installed_while_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[Path] = []
    monkeypatch.setattr(
        startup, "install", lambda stored, files, operators: installed.append(stored)
    )

    class NotReady(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            assert installed == [Path("stored")]
            raise EngineUnavailable("it did not start")

    segment = SimpleNamespace(nodes=["n"])
    topology = SimpleNamespace(nodes={"n": SimpleNamespace(id="op")})
    config: Any = SimpleNamespace(segment=segment, topology=topology, run_files=None)
    engine: Any = SimpleNamespace(chain=NotReady())
    unused: Any = None
    status: Any = SimpleNamespace()
    with pytest.raises(EngineUnavailable):
        Startup(config, unused, engine, status).install(Path("stored"))
