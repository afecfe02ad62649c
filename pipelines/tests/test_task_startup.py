"""What a task says while it starts."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from task_world import REF, Rows

from rekindle.engine.model import State
from rekindle.engine.state import operator
from rekindle.engine.state.operator import EMPTY
from rekindle.errors import StoreError
from rekindle.protocol import BegunWindow, PollRequest, RestorePoint
from rekindle.task import startup
from rekindle.task.core.messages import TaskSettings
from rekindle.task.core.start import CompleteStart, OpenInputs, RestoreState
from rekindle.task.core.task import TaskCore
from rekindle.task.process import TaskProcess
from rekindle.task.startup import Prepared, Startup
from rekindle.task.state import TaskState
from rekindle_testing.waiting import eventually


def test_a_start_that_waits_for_its_storage_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts a task is in the call, so nobody else can."""
    monkeypatch.setattr(startup, "SLOW_START_S", 0.01)
    core, point = TaskCore(TaskSettings(REF, "boot", 10, 1)), RestorePoint(epoch=7, object="x")
    process = TaskProcess(core, lambda effect: None)
    poll = PollRequest(fence=1, generation=1, task=REF, restore=point)
    process.tell(partial(core.poll_received, poll))
    found: list[str | None] = []

    class Hanging:
        def restore(self, point: RestorePoint) -> None:
            eventually(lambda: made.problem is not None)
            found.append(made.problem)
            raise StoreError("the store is away")

    unused: Any = None
    store: Any = Hanging()
    made = Startup(unused, store, unused, process, None, unused)
    made.perform(RestoreState(point))
    assert str(found[0]).startswith("reading the checkpoint of epoch 7 has not ended after ")
    problem = core.response().problem
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
    status = SimpleNamespace(last_epoch=None)
    process: Any = SimpleNamespace(core=SimpleNamespace(status=status))
    unused: Any = None
    started = Startup(config, store, unused, process, None, unused)
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
    process = TaskProcess(TaskCore(TaskSettings(REF, "boot", 10, 1)), lambda effect: None)
    all_prepared: list[Prepared] = []
    started = Startup(config, store, engine, process, None, all_prepared.append)

    def opened(self: Startup) -> None:
        self._source = Rows()
        self.inputs = object()  # type: ignore[assignment]

    monkeypatch.setattr(Startup, "_open_inputs", opened)
    monkeypatch.setattr(Startup, "_continue_log", lambda *_: (object(), object()))
    begun = BegunWindow(operator="op", after_us=100, own=own)
    for step in (
        RestoreState(RestorePoint(epoch=7, begun=(begun,))),
        OpenInputs(),
        CompleteStart(),
    ):
        started.perform(step)
    (prepared,) = all_prepared
    assert prepared.state.operators.operators["op"].first_live_pane_us == first
    assert started.event_times((3,)) == {3: (30, 30)}
