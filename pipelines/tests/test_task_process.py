"""Real task processes on loopback addresses, driven by a coordinator of a few lines.

A source in two partitions, then a window in two partitions on Spark, then files. One window task is
killed with -9 and its log torn, while the other has to recompute; then an engine dies. The files
must be what the rows say, no more.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rekindle.checkpoints.store import Store
from rekindle.connectors.compare import read_sink
from rekindle.protocol import (
    Endpoint,
    EntryRef,
    PollRequest,
    PollResponse,
    RestorePoint,
    SinkAssignment,
    TaskRef,
    Upstream,
)
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Segment, Topology
from rekindle_testing.embedded.process_node.indexes import IndexReservation

pytestmark = pytest.mark.spark

SOURCE = "rows"
ROWS, PER_SECOND, INTERVAL_S, KEYS = 3000, 100, 0.5, 7
LAST_EPOCH = int(ROWS / PER_SECOND / INTERVAL_S)  # the first without rows: END_OF_INPUT
WINDOW_S = 20
FILES = 8


def write_input(directory: Path) -> collections.Counter[tuple[str, int]]:
    """Files of rows 0.1 s apart in event time. Returns the expected sum by (key, window end in
    seconds)."""
    expected: collections.Counter[tuple[str, int]] = collections.Counter()
    lines = []
    for i in range(ROWS):
        key, second = f"k{i * i % KEYS}", i // 10
        expected[key, (second // WINDOW_S + 1) * WINDOW_S] += i
        moment = dt.datetime(2026, 1, 1) + dt.timedelta(milliseconds=100 * i)
        lines.append(f"{key},{i},{moment.isoformat(sep=' ')}")
    for n in range(FILES):
        text = "\n".join(("k,v,t", *lines[n * ROWS // FILES : (n + 1) * ROWS // FILES]))
        (directory / f"rows-{n}.csv").write_text(text + "\n")
    return expected


def make_spec(directory: Path) -> dict[str, Any]:
    return {
        "epochInterval": f"{INTERVAL_S * 1000:.0f}ms",
        "checkpoint": {"interval": "2s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": SOURCE,
                "partitions": 2,
                "schema": "k STRING, v BIGINT, t TIMESTAMP",
                "eventTime": {"column": "t"},
                "files": {
                    "url": f"file://{directory}/rows-*.csv",
                    "format": "csv",
                    "orderBy": "t",
                    "rowsPerSecond": PER_SECOND,
                },
            }
        ],
        "operators": [
            {
                "name": "sums",
                "inputs": [SOURCE],
                "keyBy": ["k"],
                "partitions": 2,
                "window": {
                    "size": f"{WINDOW_S}s",
                    "groupBy": ["k"],
                    "aggregate": "sum(v) AS total, count(*) AS n",
                },
            }
        ],
        "queries": [
            {
                "name": "totals",
                "from": "sums",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            }
        ],
    }


class Task:
    """One task process, its directory and its last response."""

    def __init__(
        self, directory: Path, segment: Segment, partition: int, address: str, archive: Path
    ) -> None:
        self.archive = archive
        self.segment, self.partition, self.address = segment, partition, address
        self.home = directory / f"{segment.name}-{partition}"
        self.home.mkdir()
        self.topology = directory / "topology.json"
        self.ref = TaskRef(segment=segment.id, partition=partition, replica=0, incarnation=1)
        self.answer: PollResponse | None = None
        self.restore = RestorePoint(epoch=-1)
        self.recompute: str | None = None
        self.digests_of: tuple[int, ...] = ()
        self.saved: dict[int, EntryRef] = {}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        return self.home / "stdout"

    def start(self) -> None:
        env = {
            **os.environ,
            "REKINDLE_TOPOLOGY_FILE": str(self.topology),
            "REKINDLE_SEGMENT": self.segment.id,
            "REKINDLE_PARTITION": str(self.partition),
            "REKINDLE_REPLICA": "0",
            "REKINDLE_INCARNATION": "1",
            "REKINDLE_BIND": self.address,
            "REKINDLE_DATA": str(self.home / "data"),
            "REKINDLE_CDS_ARCHIVE": str(self.archive),
        }
        self.answer = None
        with self.output.open("ab") as out:
            command = [sys.executable, "-m", "rekindle.task"]
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def end(self, number: signal.Signals, timeout_s: float) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


class TinyCoordinator:
    """Polls all tasks with the same desired state; commits each checkpoint that is reported."""

    def __init__(self, topology: Topology, tasks: list[Task]) -> None:
        self.topology, self.tasks = topology, tasks
        self.slowest_s = 0.0

    def desired(self, task: Task) -> PollRequest:
        upstreams = [
            Upstream(
                stream=i.stream,
                partition=source.partition,
                endpoints=(Endpoint(address=f"{source.address}:8815", replica=0, incarnation=1),),
            )
            for i in task.segment.inputs
            for source in self.tasks
            if source.segment.stream == i.stream
        ]
        newest = max(task.saved.values(), key=lambda c: c.epoch, default=None)
        committed = RestorePoint(epoch=newest.epoch, object=newest.object) if newest else None
        waits = task.answer is not None and task.answer.phase == "Waiting"
        readers = [t for t in self.tasks if t.segment.inputs]
        floor = min((max(t.saved, default=-1) for t in readers), default=-1)
        return PollRequest(
            topology="uid-1",
            fence=1,
            generation=1,
            task=task.ref,
            restore=task.restore if waits else None,
            upstreams=tuple(upstreams),
            sinks=tuple(
                SinkAssignment(query=q.name, from_epoch=0, sink=q.sink)
                for q in self.topology.spec.queries
                if q.name in task.segment.queries
            ),
            saver=True,
            committed=committed,
            recompute=task.recompute,
            digests_of=task.digests_of,
            floor=floor if floor >= 0 else None,
        )

    def round(self) -> None:
        for task in self.tasks:
            if task.process is not None and task.recompute and task.process.poll() == 0:
                task.recompute = None
                task.start()  # as its container is
            body = self.desired(task).model_dump_json().encode()
            try:
                sent_at = time.monotonic()
                url = f"http://{task.address}:8080/v1/poll"
                with urllib.request.urlopen(url, body, timeout=1) as answer:
                    task.answer = PollResponse.model_validate_json(answer.read())
            except OSError:
                assert task.process is not None
                ended = task.process.poll()
                assert ended is None or task.recompute, task.output.read_text()[-3000:]
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - sent_at)
            for done in task.answer.checkpoints:
                task.saved[done.epoch] = done

    def until(self, condition: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            responses = [t.answer for t in self.tasks]
            assert time.monotonic() < deadline, f"not in {within_s} s: {responses}"
            self.round()
            time.sleep(0.1)


def stable(task: Task) -> int:
    return task.answer.stable_epoch if task.answer else -1


@contextlib.contextmanager
def tasks_of(
    directory: Path, archive: Path, spec: dict[str, Any]
) -> Iterator[tuple[Topology, list[Task]]]:
    """The tasks of a topology, none of which has started."""
    Store(spec["checkpoint"]["store"])
    topology = compile_topology(load_spec(spec), "test", skip_cluster_checks=True)
    origin = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=2)
    document = {"name": "test", "uid": "uid-1", "generation": 1, "origin": origin.isoformat()}
    (directory / "topology.json").write_text(json.dumps({**document, "spec": spec}))
    network = IndexReservation(None)
    made = [
        Task(directory, segment, partition, f"127.{network.index}.{at}.{partition + 1}", archive)
        for at, segment in enumerate(topology.segments)
        for partition in range(segment.partitions)
    ]
    yield topology, made
    for task in made:
        if task.process is not None and task.process.poll() is None:
            task.process.kill()
            task.process.wait(10)
    network.release()


@dataclass
class Running:
    """Tasks that have started; `expected`: what the files have to be in the end."""

    directory: Path
    coordinator: TinyCoordinator
    expected: collections.Counter[tuple[str, int]]

    @property
    def windows(self) -> list[Task]:
        return self.coordinator.tasks[2:]

    def until_some_epochs_are_not_saved(self) -> None:
        """What a restart from the checkpoint has to compute again."""

        def is_ahead(task: Task) -> bool:
            live = task.answer is not None and task.answer.phase == "Live"
            return live and bool(task.saved) and stable(task) > max(task.saved) + 2

        self.coordinator.until(lambda: all(is_ahead(task) for task in self.windows), 180)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, cds_archive: Path) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("tasks")
    expected = write_input(directory)
    with tasks_of(directory, cds_archive, make_spec(directory)) as (topology, tasks):
        for task in tasks:
            task.start()
        yield Running(directory, TinyCoordinator(topology, tasks), expected)


@pytest.mark.timeout(480)
def test_a_torn_log_is_continued_and_one_to_recompute_discarded(running: Running) -> None:
    first, second = running.windows
    running.until_some_epochs_are_not_saved()
    assert second.answer is not None
    old_boot, before = second.answer.boot_id, second.answer.chained
    epoch = max(before)
    for task in running.windows:
        newest = task.saved[max(task.saved)]
        task.restore = RestorePoint(epoch=newest.epoch, object=newest.object)
    first.end(signal.SIGKILL, 5)
    tear(first.home)
    first.start()
    second.recompute, second.digests_of = old_boot, (epoch,)

    def computed_again() -> bool:
        answer = second.answer
        return answer is not None and answer.boot_id != old_boot and epoch in answer.chained

    def recovered() -> bool:
        return bool(first.answer and first.answer.phase == "Live") and computed_again()

    running.coordinator.until(recovered, 180)
    assert first.answer is not None
    assert first.answer.restored_from == first.restore.epoch
    assert first.answer.problem is None
    assert "output log ends before damage" in first.output.read_text()
    assert second.answer.chained[epoch] == before[epoch]
    assert "the output log was discarded" in second.output.read_text()


@pytest.mark.timeout(480)
def test_an_engine_that_dies_is_restarted_in_the_same_process(running: Running) -> None:
    task = running.windows[1]
    running.coordinator.until(lambda: bool(task.answer and task.answer.phase == "Live"), 180)
    assert task.process is not None
    (jvm,) = psutil.Process(task.process.pid).children()
    jvm.kill()
    running.coordinator.until(lambda: bool(task.answer and task.answer.problem), 30)
    assert task.answer is not None
    assert "the JVM was killed" in str(task.answer.problem)
    running.coordinator.until(lambda: bool(task.answer and task.answer.problem is None), 60)


@pytest.mark.timeout(480)
def test_the_files_are_what_the_rows_say(running: Running) -> None:
    """After the failures of the tests above, and up to the end of the input."""
    tasks = running.coordinator.tasks

    def finished() -> bool:
        return all(
            t.answer and t.answer.sinks and all(s.durable >= LAST_EPOCH for s in t.answer.sinks)
            for t in running.windows
        )

    running.coordinator.until(finished, 180)
    running.coordinator.until(lambda: all(t.answer and t.answer.phase == "Live" for t in tasks), 60)
    assert all(stable(task) >= LAST_EPOCH for task in tasks)
    rows = read_sink(f"file://{running.directory}/out", "parquet").to_pylist()
    got = {(r["k"], seconds(r["window_end"])): r["total"] for r in rows}
    assert len(rows) == len(got)
    assert got == dict(running.expected)
    print(f"slowest answer to a poll: {running.coordinator.slowest_s:.3f} s")
    assert [t.end(signal.SIGTERM, 60) for t in tasks] == [128 + signal.SIGTERM] * 4


def tear(home: Path) -> None:
    path = sorted((home / "data" / "log").rglob("*.log"))[-1]
    os.truncate(path, path.stat().st_size - 10)


def seconds(moment: dt.datetime) -> int:
    return int((moment - dt.datetime(2026, 1, 1, tzinfo=dt.UTC)).total_seconds())
