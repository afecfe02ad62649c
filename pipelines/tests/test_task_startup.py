"""What a task says while it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from task_world import Rows

from rekindle.engine.model import State
from rekindle.engine.state import operator
from rekindle.engine.state.operator import EMPTY
from rekindle.errors import StoreError
from rekindle.protocol import BegunWindow, RestorePoint, TaskRef
from rekindle.task import startup
from rekindle.task.core.status import TaskStatus
from rekindle.task.startup import Startup
from rekindle.task.state import TaskState
from rekindle_testing.waiting import eventually


def test_a_start_that_waits_for_its_storage_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts a task is in the call, so nobody else can."""
    monkeypatch.setattr(startup, "SLOW_START_S", 0.01)
    status = TaskStatus(
        TaskRef(segment="s", partition=0, replica=0, incarnation=1),
        "boot",
        origin_us=0,
        epoch_interval_us=1,
        clock=time.time,
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


def test_the_end_of_a_bounded_source_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(last_epoch=41, input_files=())
    monkeypatch.setattr(startup, "open_source", lambda *_: source)
    config: Any = SimpleNamespace(
        epoch_interval_us=1,
        origin_us=0,
        data=Path("data"),
        memory=None,
        ref=SimpleNamespace(partition=0),
    )
    store: Any = SimpleNamespace(require_same_input=lambda node, files: None)
    status: Any = SimpleNamespace()
    unused: Any = None
    started = Startup(config, store, unused, status)
    started._open_source(unused, unused, TaskState(1, 1, State({})))
    assert status.last_epoch == 41


@pytest.mark.parametrize(("own", "first"), [(((7, 5),), 101), (((7, 31), (6, 0)), 102), ((), 101)])
def test_a_window_that_begins_anew_knows_from_where_on_it_has_all_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[tuple[int, int], ...],
    first: int,
) -> None:
    topology = SimpleNamespace(spec=SimpleNamespace(max_delay=None))
    config: Any = SimpleNamespace(segment=SimpleNamespace(replicas=2), topology=topology)
    store: Any = SimpleNamespace(restore=lambda point: (TaskState(7, 1, State({})), None))
    chain: Future[Any] = Future()

    def begins_after(state: State, bounds: Mapping[str, int]) -> State:
        return State({id: operator.begins_after(EMPTY, us) for id, us in bounds.items()})

    chain.set_result(SimpleNamespace(match_columns=lambda state: state, begins_after=begins_after))
    engine: Any = SimpleNamespace(chain=chain)
    status: Any = SimpleNamespace()
    started = Startup(config, store, engine, status)

    def opened(self: Startup) -> None:
        self._source = Rows()
        opened_inputs(self)

    monkeypatch.setattr(Startup, "_open_inputs", opened)
    monkeypatch.setattr(Startup, "_continue_log", lambda *_: (object(), object()))
    begun = BegunWindow(operator="op", after_us=100, own=own)
    started.begin(RestorePoint(epoch=7, begun=(begun,)))
    prepared = started.advance()
    assert prepared is not None
    assert prepared.state.operators.operators["op"].first_live_pane_us == first
    assert started.event_times((3,)) == {3: (30, 30)}


def opened_inputs(self: Startup) -> None:
    self._inputs = object()  # type: ignore[assignment]
