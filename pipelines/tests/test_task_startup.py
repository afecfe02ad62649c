"""What a task says while it starts."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from log_parts import SCHEMA, batch, open_log
from task_world import Rows
from test_task_moving_pieces import bytes_of, some_pieces

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import State
from rekindle.errors import StoreError
from rekindle.protocol import BegunWindow, RestorePoint, TaskRef
from rekindle.streams.log import OutputLog
from rekindle.task import startup
from rekindle.task.core.status import TaskStatus
from rekindle.task.moving.pieces import Installation, NotMovable
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


def test_a_late_installation_leaves_the_log_of_a_running_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session was given up while it decoded state: the task runs from a checkpoint by now."""
    segment = SimpleNamespace(nodes=["n"], stream="stream", replicas=2)
    spec = SimpleNamespace(log_budget=None)
    topology = SimpleNamespace(nodes={"n": SimpleNamespace(id="op")}, spec=spec)
    config: Any = SimpleNamespace(
        segment=segment,
        topology=topology,
        run_files=None,
        log_directory=tmp_path / "own",
        ref=SimpleNamespace(partition=0),
        memory=SimpleNamespace(serve_bytes=1 << 20),
    )
    store: Any = SimpleNamespace(
        spill_prefix="", restore=lambda point: (TaskState(1, 1, State({})), None)
    )
    chain: Future[Any] = Future()
    engine: Any = SimpleNamespace(chain=chain)
    status: Any = SimpleNamespace()
    late = Startup(config, store, engine, status)
    running: list[OutputLog] = []

    def decoded(stored: Path, files: Any, operators: Any) -> Any:
        late.begin(RestorePoint(epoch=1, object="x"))
        chain.set_result(SimpleNamespace(output_schema=SCHEMA, match_columns=lambda state: state))
        prepared = late.advance()
        assert prepared is not None
        running.append(prepared.log)
        prepared.log.append(batch(2))
        return Installation(pa.py_buffer(bytes_of(some_pieces(tmp_path))), None, frozenset({"op"}))

    monkeypatch.setattr(startup, "install", decoded)
    monkeypatch.setattr(Startup, "_open_inputs", opened_inputs)
    with pytest.raises(NotMovable, match="restores from a checkpoint"):
        late.install(Path("stored"))
    (log,) = running
    assert [b.epoch for b in log.read(2, 1)] == [2]
    assert open_log(config.log_directory).last == 2


@pytest.mark.parametrize(("own", "first"), [(((7, 5),), 101), (((7, 31), (6, 0)), 102), ((), 101)])
def test_a_window_that_begins_anew_knows_from_where_on_it_has_all_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[tuple[int, int], ...],
    first: int,
) -> None:
    config: Any = SimpleNamespace(segment=SimpleNamespace(replicas=2))
    store: Any = SimpleNamespace(restore=lambda point: (TaskState(7, 1, State({})), None))
    chain: Future[Any] = Future()
    chain.set_result(SimpleNamespace(match_columns=lambda state: state))
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
