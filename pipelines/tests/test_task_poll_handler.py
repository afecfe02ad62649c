"""Polls are fenced, level-triggered, and answered even if the engine is busy."""

from __future__ import annotations

import gc
import json
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from task_world import make_handler

from rekindle.engine.model import DroppedRows
from rekindle.errors import RekindleError
from rekindle.protocol import (
    Contained,
    PollRequest,
    PollResponse,
    RestorePoint,
    TaskRef,
)
from rekindle.task.config import BadEnvironment, TaskConfig, parse_origin
from rekindle.task.control import ControlServer
from rekindle.task.core.phases import TaskEvent
from rekindle.task.core.polls import PollRefused
from rekindle.task.core.supervisor import ProcessPhase
from rekindle.task.core.task import TaskCore
from rekindle.task.fence import FenceFile
from rekindle.task.metrics import make_registry
from rekindle.task.poll_handler import PollHandler

REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=3)


def poll(fence: int = 1, **changes: object) -> PollRequest:
    return PollRequest(fence=fence, generation=1, task=REF).model_copy(update=changes)


@pytest.fixture
def handler() -> PollHandler:
    return make_handler(REF)


@pytest.fixture
def core(handler: PollHandler) -> TaskCore:
    return handler._process.core


def test_a_source_responds_with_the_event_times_that_are_requested() -> None:
    handler = make_handler(REF, event_times=lambda es: {e: (10 * e, 9 * e) for e in es})
    assert handler.poll(poll(event_times_of=(3, 7))).event_times == {3: (30, 27), 7: (70, 63)}
    assert handler.poll(poll()).event_times == {}


def test_a_lower_fence_is_refused(handler: PollHandler) -> None:
    assert handler.poll(poll(4)).fence == 4
    with pytest.raises(PollRefused) as refused:
        handler.poll(poll(3))
    assert refused.value.status == 409
    assert handler._process.core.polls.desired == poll(4)


def test_a_late_poll_for_an_earlier_boot_only_asks(handler: PollHandler) -> None:
    core = handler._process.core
    response = handler.poll(poll(4, task_boot="an earlier boot", restore=RestorePoint(epoch=3)))
    assert (core.polls.desired, core.supervisor.phase) == (None, ProcessPhase.WAITING)
    handler.poll(poll(4, task_boot=response.boot_id, restore=RestorePoint(epoch=7)))
    assert core.supervisor.phase is ProcessPhase.STARTING


@pytest.mark.parametrize("field", ["segment", "partition", "replica", "incarnation"])
def test_a_poll_for_another_task_is_refused(handler: PollHandler, field: str) -> None:
    other = REF.model_copy(update={field: "x" if field == "segment" else 9})
    with pytest.raises(PollRefused) as refused:
        handler.poll(poll(9, task=other))
    assert refused.value.status == 410
    handler.poll(poll(1))  # and its fence was not accepted


def with_fence_file(data: Path, ref: TaskRef = REF) -> PollHandler:
    return make_handler(ref, FenceFile(data, "uid", ref))


def test_a_fence_outlives_the_container(tmp_path: Path) -> None:
    with_fence_file(tmp_path).poll(poll(4))
    restarted = with_fence_file(tmp_path)
    with pytest.raises(PollRefused) as refused:
        restarted.poll(poll(3))
    assert refused.value.status == 409
    assert restarted.poll(poll(4)).fence == 4


def test_a_fence_belongs_to_one_incarnation(tmp_path: Path) -> None:
    with_fence_file(tmp_path).poll(poll(4))
    for field in ("segment", "partition", "replica", "incarnation"):
        other = REF.model_copy(update={field: "x" if field == "segment" else 9})
        assert with_fence_file(tmp_path, other).poll(poll(1, task=other)).fence == 1


def test_polls_work_without_a_writable_disk(tmp_path: Path) -> None:
    (tmp_path / "fence").write_text("a file where a directory should be")
    handler = with_fence_file(tmp_path)
    assert handler.poll(poll(4)).fence == 4
    with pytest.raises(PollRefused):
        handler.poll(poll(3))
    (tmp_path / "fence").unlink()
    handler.poll(poll(4))
    assert FenceFile(tmp_path, "uid", REF).read() == 4


def test_an_ask_only_poll_keeps_the_desired_state(handler: PollHandler) -> None:
    handler.poll(poll(1, floor=7))
    handler.poll(poll(2, ask_only=True))
    assert handler._process.core.polls.desired == poll(1, floor=7)


@pytest.mark.parametrize("new", [poll(2), poll(1, coordinator_boot="b")])
def test_a_new_coordinator_learns_what_was_held_back(
    handler: PollHandler, new: PollRequest
) -> None:
    """Also one that has the same fence, since only its container has started again."""
    held_back = poll(1, sinks_through=7, digests_of=(8,), disputed_digest="state")
    assert handler.poll(held_back).contained is None
    asked = handler.poll(new.model_copy(update={"ask_only": True}))
    assert asked.contained == Contained(after=7, disputed=(8,), disputed_digest="state")
    assert handler.poll(new).contained is None


def test_a_failure_counts_as_reported_after_a_response(
    handler: PollHandler, core: TaskCore
) -> None:
    handler.poll(poll())
    core.call_failed(RekindleError("the JVM died"), 0.0)
    core.call_failed(RekindleError("and so did this"), 0.0)
    assert not core.supervisor.ended
    answer = handler.poll(poll())
    assert answer.phase == "Failed"
    assert answer.problem is not None
    assert answer.problem.message == "the JVM died"
    assert core.supervisor.ended


def serve(handler: PollHandler, port: int = 0) -> ControlServer:
    core = handler._process.core
    return ControlServer(
        "127.0.42.1",
        port,
        handler,
        alive=lambda: True,
        ready=lambda: core.status.phase.serves,
        registry=make_registry(core, "topo", "hourly"),
    )


@pytest.fixture
def control(handler: PollHandler) -> Iterator[ControlServer]:
    server = serve(handler)
    yield server
    server.stop()


def test_a_server_that_has_ended_or_cannot_bind_leaves_nothing_open(
    handler: PollHandler,
) -> None:
    server = serve(handler)
    with pytest.raises(OSError, match=str(server.port)):
        serve(handler, server.port)
    server.stop()
    del server
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gc.collect()
    assert [w for w in found if issubclass(w.category, ResourceWarning)] == []


def ask(control: ControlServer, path: str, body: str | None = None) -> tuple[int, str]:
    url = f"http://127.0.42.1:{control.port}{path}"
    try:
        with urllib.request.urlopen(url, body.encode() if body else None, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_follow_the_phase(control: ControlServer, core: TaskCore) -> None:
    assert ask(control, "/startupz")[0] == ask(control, "/livez")[0] == 200
    assert ask(control, "/readyz")[0] == 503
    for event in (TaskEvent.START_BEGUN, TaskEvent.STARTED, TaskEvent.CAUGHT_UP):
        core.status.step(event)
    assert ask(control, "/readyz")[0] == 200


def test_polls_work_over_http(control: ControlServer) -> None:
    status, text = ask(control, "/v1/poll", poll(5).model_dump_json())
    answer = PollResponse.model_validate_json(text)
    assert (status, answer.fence, answer.boot_id, answer.phase) == (200, 5, "boot", "Waiting")
    assert ask(control, "/v1/poll", poll(4).model_dump_json())[0] == 409
    other = poll(5, task=REF.model_copy(update={"incarnation": 2}))
    assert ask(control, "/v1/poll", other.model_dump_json())[0] == 410
    assert ask(control, "/v1/poll", json.dumps({"fence": 1}))[0] == 400


def test_metrics_have_the_labels_of_the_task(control: ControlServer) -> None:
    _, text = ask(control, "/metrics")
    assert 'rekindle_task_stable_epoch{partition="0",replica="0",segment="hourly"' in text
    assert 'phase="Waiting"' in text


def test_dropped_rows_are_counters_by_operator_and_reason(
    control: ControlServer, core: TaskCore
) -> None:
    daily = DroppedRows(late=2)
    core.status.dropped = {"hourly": DroppedRows(), "daily": daily}
    daily.late += 5
    _, text = ask(control, "/metrics")
    for operator, reason, count in (
        ("hourly", "late", 0),
        ("hourly", "untimed", 0),
        ("daily", "late", 7),
        ("daily", "untimed", 0),
    ):
        labels = f'operator="{operator}",partition="0",reason="{reason}",replica="0",'
        line = f'_dropped_rows_total{{{labels}segment="hourly",topology="topo"}} {count}.0'
        assert line in text
    assert "# TYPE rekindle_task_dropped_rows_total counter" in text


def test_the_origin_is_microseconds() -> None:
    assert parse_origin("1970-01-01T00:00:01.5Z") == 1_500_000
    with pytest.raises(ValueError, match="time zone"):
        parse_origin("1970-01-01T00:00:01")


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(BadEnvironment, match="REKINDLE_TOPOLOGY_FILE is not set"):
        TaskConfig.from_environment({})
    with pytest.raises(BadEnvironment, match="topology file /nowhere"):
        TaskConfig.from_environment({"REKINDLE_TOPOLOGY_FILE": "/nowhere"})
