"""A standby as a process: it waits for a slot in a file, becomes its task, and survives kill -9.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from test_task_process import Task, TinyCoordinator, make_spec, tasks_of, write_input

from rekindle.protocol import RestorePoint
from rekindle.task.config import BadEnvironment
from rekindle.task.standby import SLOT_FILE_VARIABLE, with_slot


def test_a_task_with_a_slot_in_its_environment_is_no_standby() -> None:
    assert with_slot({"REKINDLE_SEGMENT": "s"}) == {"REKINDLE_SEGMENT": "s"}


def test_a_standby_that_was_given_a_slot_starts_as_its_task(tmp_path: Path) -> None:
    file = tmp_path / "slot"
    file.write_text('{"segment": "s", "partition": 1, "replica": 2, "incarnation": 3}')
    env = with_slot({SLOT_FILE_VARIABLE: str(file), "REKINDLE_SEGMENT": "other"})
    assert {k: v for k, v in env.items() if k != SLOT_FILE_VARIABLE} == {
        "REKINDLE_SEGMENT": "s",
        "REKINDLE_PARTITION": "1",
        "REKINDLE_REPLICA": "2",
        "REKINDLE_INCARNATION": "3",
    }


@pytest.mark.parametrize("text", ["{", '{"segment": "s"}', "[]", "7"])
def test_a_slot_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "slot"
    file.write_text(text)
    with pytest.raises(BadEnvironment, match="is no slot"):
        with_slot({SLOT_FILE_VARIABLE: str(file)})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="REKINDLE_SLOT_FILE"):
        with_slot({SLOT_FILE_VARIABLE: str(tmp_path / "none")})


class StandbyProcess:
    """In the place of a task's process; `file` is the pod's annotation."""

    def __init__(self, task: Task, first_segment: str) -> None:
        self.task, self.file = task, task.home / "slot"
        self.file.write_text("")
        self.environment = {
            **os.environ,
            "REKINDLE_TOPOLOGY_FILE": str(task.topology),
            "REKINDLE_SEGMENT": first_segment,
            "REKINDLE_PARTITION": "0",
            "REKINDLE_REPLICA": "0",
            "REKINDLE_INCARNATION": "0",
            "REKINDLE_BIND": task.address,
            "REKINDLE_DATA": str(task.home / "data"),
            "REKINDLE_CDS_ARCHIVE": str(task.archive),
            SLOT_FILE_VARIABLE: str(self.file),
        }
        self.start()

    def start(self) -> None:
        with self.task.output.open("ab") as out:
            command = [sys.executable, "-m", "rekindle.task"]
            self.task.process = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out
            )

    def give(self) -> None:
        """As a kubelet writes an annotation: all or nothing."""
        new = self.file.with_suffix(".new")
        new.write_text(self.task.ref.model_dump_json())
        new.replace(self.file)

    def kill(self) -> None:
        self.task.end(signal.SIGKILL, 5)

    def probe(self, name: str) -> int | None:
        url = f"http://{self.task.address}:8080/{name}"
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def until(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.task.output.read_text()[-3000:]
            time.sleep(0.05)

    def until_warm(self) -> None:
        self.until(lambda: self.probe("startupz") == 200, 360)


@pytest.fixture
def tasks(tmp_path: Path, cds_archive: Path) -> Iterator[tuple[TinyCoordinator, list[Task]]]:
    write_input(tmp_path)
    spec = make_spec(tmp_path)
    for node in (*spec["sources"], *spec["operators"]):
        node["partitions"] = 1
    with tasks_of(tmp_path, cds_archive, spec) as (topology, made):
        yield TinyCoordinator(topology, made), made


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_standby_becomes_a_task_also_after_kill_9(
    tasks: tuple[TinyCoordinator, list[Task]],
) -> None:
    coordinator, made = tasks
    source, last = made
    source.start()
    standby = StandbyProcess(last, last.segment.id)
    standby.until(lambda: standby.probe("startupz") == 503, 180)
    standby.kill()  # before it is warm, and before it has a slot
    standby.start()
    standby.until_warm()
    assert standby.probe("readyz") == 503
    assert standby.probe("livez") == 200
    assert standby.probe("v1/poll") == 404
    pid = last.process.pid if last.process is not None else 0
    began = time.monotonic()
    standby.give()
    coordinator.until(lambda: last.answer is not None, 120)
    first_response_s = time.monotonic() - began
    coordinator.until(lambda: bool(last.answer and last.answer.phase == "Live"), 300)
    live_s = time.monotonic() - began
    print(f"first response after {first_response_s:.1f} s, Live after {live_s:.1f} s")
    assert last.process is not None
    assert last.process.pid == pid, "in the same process"
    assert last.output.read_text().count("warm after") == 1
    assert last.answer is not None
    boot, newest = last.answer.boot_id, max(last.saved, default=-1)
    if newest >= 0:
        last.restore = RestorePoint(epoch=newest, object=last.saved[newest].object)
    standby.kill()  # it has the slot: its container starts as the task
    standby.start()

    def is_live_again() -> bool:
        answer = last.answer
        return answer is not None and answer.boot_id != boot and answer.phase == "Live"

    coordinator.until(is_live_again, 300)
    assert last.output.read_text().count("warm after") == 1, "no standby any more"


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_a_standby_killed_while_it_is_given_a_slot_has_it_afterwards(
    tasks: tuple[TinyCoordinator, list[Task]],
) -> None:
    coordinator, (source, window) = tasks
    standby = StandbyProcess(source, window.segment.id)  # the source needs no JVM
    coordinator.tasks = [source]
    standby.until_warm()
    standby.give()
    standby.kill()  # before or after it has seen the slot
    standby.start()
    coordinator.until(lambda: bool(source.answer and source.answer.phase.serves), 180)
    assert source.process is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not psutil.Process(source.process.pid).children(), "a source needs no JVM"
    assert json.loads(standby.file.read_text())["incarnation"] == 1
