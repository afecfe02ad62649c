"""Tasks that fail: what they report, what they write, how they end."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from state_parts import count_state

from rekindle.checkpoints import StateStore, Store
from rekindle.errors import OperatorRefused
from rekindle.protocol import PollRequest, RestorePoint, SinkAssignment
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSizeFile
from rekindle.task.config import TaskConfig
from rekindle.task.core.start import StartStep
from rekindle.task.runtime import TaskRuntime
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.spec import SinkSpec
from rekindle_testing.embedded.process_node.indexes import IndexReservation
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

_NETWORK = IndexReservation(None)
ADDRESS = f"127.{_NETWORK.index}.0.1"


def config_of(directory: Path) -> TaskConfig:
    """The configuration of a source alone, which needs no JVM."""
    spec = {
        "checkpoint": {"store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "numbers",
                "schema": "n BIGINT",
                "generator": {"rowsPerSecond": 1, "columns": {"n": "sequence"}},
            }
        ],
        "queries": [
            {"name": "q", "from": "numbers", "sink": {"files": {"url": f"file://{directory}/out"}}}
        ],
    }
    (segment,) = compile_topology(load_spec(spec), "t", skip_cluster_checks=True).segments
    file = directory / "topology.json"
    head = {"name": "t", "uid": "uid-1", "generation": 1, "origin": "2026-01-01T00:00:00Z"}
    file.write_text(json.dumps({**head, "spec": spec}))
    return TaskConfig.from_environment(
        {
            "REKINDLE_TOPOLOGY_FILE": str(file),
            "REKINDLE_SEGMENT": segment.id,
            "REKINDLE_PARTITION": "0",
            "REKINDLE_REPLICA": "0",
            "REKINDLE_INCARNATION": "1",
            "REKINDLE_BIND": ADDRESS,
            "REKINDLE_DATA": str(directory / "data"),
        }
    )


@pytest.fixture
def failed(tmp_path: Path) -> Iterator[TaskRuntime]:
    """A task that finds a file with three results of one epoch."""
    config = config_of(tmp_path)
    log = config.data / "log" / config.uid / config.segment.stream / "0"
    log.mkdir(parents=True)
    noted = {"epoch": 3, "results": [["a", 0], ["b", 0], ["c", 0]]}
    (log / "disputed.json").write_text(json.dumps(noted))
    runtime = TaskRuntime(config)
    thread = threading.Thread(target=runtime.run, daemon=True)
    thread.start()
    poll = PollRequest(
        topology="uid-1", fence=1, generation=1, task=config.ref, restore=RestorePoint(epoch=-1)
    )
    runtime.polls.poll(poll)
    eventually(lambda: runtime.polls.poll(poll).phase == "Failed", 10)
    yield runtime
    assert thread.is_alive(), "it has not ended by itself"
    runtime.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_failed_task_reports_why_and_passes_its_liveness_probe(failed: TaskRuntime) -> None:
    answer = failed.status.response(1)
    assert answer.problem is not None
    assert answer.problem.message.startswith("epoch 3 of stream")
    assert "3 different results" in answer.problem.message
    with urllib.request.urlopen(f"http://{ADDRESS}:8080/livez", timeout=5) as live:
        assert live.status == 200


def test_a_failed_task_writes_nothing(failed: TaskRuntime, tmp_path: Path) -> None:
    assert failed.status.response(1).sinks == ()
    assert not list(tmp_path.glob("out/*.parquet"))


def test_a_task_whose_engine_does_not_start_reports_that_and_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    runtime = TaskRuntime(config)
    runtime.engine.chain = Future()
    runtime.engine.chain.set_exception(OperatorRefused("Spark refuses it", "numbers"))
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(runtime.run()), daemon=True)
    thread.start()
    poll = PollRequest(topology="uid-1", fence=1, generation=1, task=config.ref)
    eventually(lambda: runtime.polls.poll(poll).phase == "Failed", 10)
    answer = runtime.polls.poll(poll)
    assert answer.problem is not None
    assert answer.problem.wrong_definition == "numbers"
    thread.join(10)
    assert ended == [1]


def test_a_task_that_serves_no_longer_reports_that_and_ends(tmp_path: Path) -> None:
    def fail() -> None:
        raise SystemExit("the loop is broken")

    runtime = TaskRuntime(config_of(tmp_path))
    runtime.engine.chain = Future()
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(runtime.run()), daemon=True)
    thread.start()
    runtime.server._io.call(fail)
    poll = PollRequest(topology="uid-1", fence=1, generation=1, task=runtime._config.ref)
    eventually(lambda: runtime.polls.poll(poll).phase == "Failed", 10)
    answer = runtime.polls.poll(poll)
    assert answer.problem is not None
    assert answer.problem.message.startswith("thread stream-server has ended: SystemExit")
    thread.join(10)
    assert ended == [1]


def saved_entry(config: TaskConfig, epoch: int) -> str:
    store = Store(config.topology.spec.checkpoint.store)
    operator = config.topology.nodes[config.segment.nodes[0]].id
    states = StateStore(store, config.uid)
    ref = states.save(
        config.segment.id,
        0,
        epoch,
        watermark=0,
        operator_ids=(operator,),
        state=count_state(operator, 7),
        previous=None,
    )
    assert ref.object is not None
    return ref.object


def run_from(
    config: TaskConfig, entry: str, ended: list[int]
) -> tuple[TaskRuntime, threading.Thread, PollRequest]:
    runtime = TaskRuntime(config)
    thread = threading.Thread(target=lambda: ended.append(runtime.run()), daemon=True)
    thread.start()
    point = RestorePoint(epoch=9, object=entry)
    poll = PollRequest(topology="uid-1", fence=1, generation=1, task=config.ref, restore=point)
    return runtime, thread, poll


def test_a_task_runs_before_its_state_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so until it is."""
    config, ended, goes_on = config_of(tmp_path), list[int](), threading.Event()
    entry = saved_entry(config, 9)
    get = Store.get

    def slow(store: Store, name: str) -> bytes:
        assert "/state/" not in name or goes_on.wait(10)
        return get(store, name)

    monkeypatch.setattr(Store, "get", slow)
    runtime, thread, poll = run_from(config, entry, ended)
    eventually(lambda: runtime.polls.poll(poll).stable_epoch > 9, 10)
    answer = runtime.polls.poll(poll)
    assert (answer.restoring, answer.phase) == (entry, "CatchingUp")
    assert runtime.status.hot_keys is not None
    fetch = runtime.startup.fetch
    assert fetch is not None
    # A kill during this wait must not make calls smaller.
    assert fetch.during_wait.__qualname__ == CallSizeFile.during_wait.__qualname__
    goes_on.set()
    eventually(lambda: runtime.polls.poll(poll).restoring is None, 10)
    runtime.stop()
    thread.join(10)
    assert ended == [0]


def test_a_task_whose_restored_state_is_lost_ends(tmp_path: Path) -> None:
    """Its next boot gets another restore point."""
    config, ended = config_of(tmp_path), list[int]()
    entry = saved_entry(config, 9)
    for file in (tmp_path / "store").rglob("*.arrow"):
        file.unlink()
    runtime, thread, poll = run_from(config, entry, ended)
    eventually(lambda: runtime.polls.poll(poll).phase == "Failed", 10)
    answer = runtime.polls.poll(poll)
    assert answer.problem is not None
    assert "does not exist" in answer.problem.message
    assert answer.restoring == entry
    store = Store(config.topology.spec.checkpoint.store)
    (objects,) = StateStore(store, config.uid).load_entry(entry).objects.values()
    assert answer.lost in objects
    thread.join(10)
    assert ended == [1]


def test_a_task_that_is_stopped_while_it_starts_ends_at_once(tmp_path: Path) -> None:
    runtime = TaskRuntime(config_of(tmp_path))
    runtime.engine.chain = Future()  # it starts, for long
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(runtime.run()), daemon=True)
    thread.start()
    point = RestorePoint(epoch=-1)
    config = runtime._config
    runtime.polls.poll(
        PollRequest(topology="uid-1", fence=1, generation=1, task=config.ref, restore=point)
    )
    eventually(lambda: runtime.core.start.waits_for is StartStep.ENGINE, 10)
    runtime.stop()
    thread.join(10)
    assert ended == [0]


def test_a_task_that_cannot_mark_its_log_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: Path) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rekindle.task.runtime.mark_for_discard", full)
    config, ended = config_of(tmp_path), list[int]()
    runtime, thread, poll = run_from(config, saved_entry(config, 9), ended)
    eventually(lambda: runtime.polls.poll(poll).stable_epoch > 9, 10)
    recompute = {"recompute": runtime.core.response().boot_id}
    runtime.polls.poll(poll.model_copy(update=recompute))
    thread.join(20)
    assert ended == [1]


def test_a_log_keeps_what_stream_sinks_retain_from_its_first_epoch_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of its files depends on that; the port of stream sinks may open later."""
    config, ended = config_of(tmp_path), list[int]()
    monkeypatch.setattr(TaskRuntime, "_perform_later", lambda *_: None)
    runtime = TaskRuntime(config)
    retains: list[int] = []
    append = OutputLog.append

    def noted(log: OutputLog, batch: EpochBatch) -> bool:
        retains.append(log._retain_bytes)
        return append(log, batch)

    monkeypatch.setattr(OutputLog, "append", noted)
    thread = threading.Thread(target=lambda: ended.append(runtime.run()), daemon=True)
    thread.start()
    sink = SinkSpec.model_validate({"stream": {"retain": "1Mi"}})
    poll = PollRequest(
        topology="uid-1",
        fence=1,
        generation=1,
        task=config.ref,
        restore=RestorePoint(epoch=-1),
        sinks=(SinkAssignment(query="q", from_epoch=0, sink=sink),),
    )
    runtime.polls.poll(poll)
    eventually(lambda: retains, 10)
    assert retains[0] == 1 << 20
    runtime.stop()
    thread.join(20)
    assert ended == [0]


class SlowTruncation:
    """Of a log some of whose files are in a store that does not respond."""

    def __init__(self, config: TaskConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        self.ended: list[int] = []
        monkeypatch.setattr(OutputLog, "truncate", self._truncate)
        self.runtime = TaskRuntime(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        sink = SinkSpec.model_validate({"stream": {"retain": "1Mi"}})
        self.poll = PollRequest(
            topology="uid-1",
            fence=1,
            generation=1,
            task=config.ref,
            restore=RestorePoint(epoch=-1),
            sinks=(SinkAssignment(query="q", from_epoch=0, sink=sink),),
        )
        self.runtime.polls.poll(self.poll)
        eventually(lambda: self.runtime.polls.poll(self.poll).stable_epoch >= 3, 10)
        self.poll = self.poll.model_copy(update={"floor": 2})
        self.runtime.polls.poll(self.poll)
        assert self.begun.wait(10)

    def _truncate(self, floor: int) -> None:
        self.begun.set()
        self.released.wait(30)

    def _run(self) -> None:
        self.ended.append(self.runtime.run())

    def end(self) -> None:
        self.released.set()
        self.runtime.stop()
        self._thread.join(20)


@pytest.fixture
def truncating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTruncation]:
    made = SlowTruncation(config_of(tmp_path), monkeypatch)
    yield made
    made.end()


def test_time_passes_while_the_log_is_truncated(truncating: SlowTruncation) -> None:
    def head() -> int:
        return truncating.runtime.polls.poll(truncating.poll).head_epoch

    before = head()
    eventually(lambda: head() > before, 5)
    assert not truncating.released.is_set()
    truncating.end()
    assert truncating.ended == [0]


def test_suspect_epochs_are_not_served_until_a_truncation_or_a_call_ends(
    truncating: SlowTruncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = truncating.runtime
    streams = runtime._stream_sinks
    assert streams is not None
    assert streams._server is not None
    monkeypatch.setattr(runtime._engine_thread, "join", truncating.released.wait)
    recompute = {"recompute": runtime.core.response().boot_id}
    runtime.polls.poll(truncating.poll.model_copy(update=recompute))
    eventually(lambda: streams._server is None, 5)
    assert not truncating.released.is_set()
    truncating.end()
    assert truncating.ended == [0]


def test_an_engine_that_does_not_stop_does_not_block_the_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.task.runtime.STOP_S", 0.2)
    released = threading.Event()
    runtime = TaskRuntime(config_of(tmp_path))
    monkeypatch.setattr(runtime.engine, "stop", lambda timeout_s: released.wait())
    thread = threading.Thread(target=runtime.run, daemon=True)
    thread.start()
    runtime.stop()
    thread.join(10)
    released.set()
    assert not thread.is_alive()


def test_a_signal_at_any_line_of_the_supervisor_ends_the_task(tmp_path: Path) -> None:
    """Its handler runs in the same thread, which may hold any lock."""
    runtime = TaskRuntime(config_of(tmp_path))

    def signal(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        runtime.stop()
        return signal

    def run() -> None:
        sys.settrace(signal)
        runtime.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_an_error_while_a_task_ends_does_not_block_the_exit() -> None:
    """A thread of a pool may wait for a store that does not respond."""
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
from rekindle.task.__main__ import run_and_exit

def run():
    raise TimeoutError("the server did not stop")

ThreadPoolExecutor(1).submit(time.sleep, 600)
run_and_exit(run)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "the server did not stop" in done.stderr + done.stdout
