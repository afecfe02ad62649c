"""Real task processes with Spark: an input is cut for some seconds, and healed.

A source in two partitions, then a window in two partitions, then files. While one partition of the
source cannot be reached, the windows answer without it; then they correct themselves, and the files
are what all rows say, of the time without the input too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reader_parts import read_once
from test_task_process import (
    SOURCE,
    Task,
    TinyCoordinator,
    make_spec,
    seconds,
    stable,
    tasks_of,
    write_input,
)

from rekindle.connectors.compare import read_sink
from rekindle.identity import Identity
from rekindle.protocol import ConsistencyState, PollRequest
from rekindle.streams.epochs import BatchKind
from rekindle.streams.wire import LivePosition, ReadRequest, ReadResponse
from rekindle.topology.model import Topology

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,  # on a cluster: test_tentative_results.py
]

PER_SECOND = 30
EPOCHS_OF_A_WINDOW = 14  # of 20 s of event time: 200 rows, in epochs of 15


def tentative_spec(directory: Path) -> dict[str, Any]:
    spec = make_spec(directory)
    (source,) = spec["sources"]
    source["files"]["rowsPerSecond"] = PER_SECOND
    return spec | {"maxDelay": "2s"}


class Cutting(TinyCoordinator):
    """Gives no routes to some tasks, and keeps all logs for a reader that it does not know."""

    def __init__(self, topology: Topology, tasks: list[Task]) -> None:
        super().__init__(topology, tasks)
        self.cut: set[str] = set()  # addresses

    def desired(self, task: Task) -> PollRequest:
        desired = super().desired(task)
        upstreams = tuple(
            upstream.model_copy(
                update={
                    "endpoints": tuple(
                        e for e in upstream.endpoints if e.address.split(":")[0] not in self.cut
                    )
                }
            )
            for upstream in desired.upstreams
        )
        return desired.model_copy(update={"upstreams": upstreams, "floor": None})


@pytest.fixture
def tasks(tmp_path: Path, cds_archive: Path) -> Iterator[tuple[Topology, list[Task]]]:
    with tasks_of(tmp_path, cds_archive, tentative_spec(tmp_path)) as made:
        yield made


def state(task: Task) -> ConsistencyState | None:
    return task.answer.consistency if task.answer is not None else None


def read(task: Task, from_epoch: int, live: LivePosition | None = None) -> ReadResponse:
    request = ReadRequest(
        task.segment.stream, task.partition, from_epoch, 8 << 20, live=live or LivePosition()
    )
    return read_once(f"{task.address}:8815", request, 10, Identity("uid-1"))


def kinds_after(task: Task, epoch: int, response: ReadResponse) -> set[BatchKind]:
    """Of all that a live reader gets from there on: a call has a limited number of epochs."""
    kinds: set[BatchKind] = set()
    while response.epochs:
        response = read(task, epoch + 1, response.live)
        kinds |= {batch.kind for batch in response.epochs}
    return kinds


@pytest.mark.timeout(600)
def test_windows_answer_without_an_input_and_correct_themselves(
    tmp_path: Path, tasks: tuple[Topology, list[Task]]
) -> None:
    expected = write_input(tmp_path)
    topology, all_tasks = tasks
    *_, cut, first, second = all_tasks
    coordinator = Cutting(topology, all_tasks)
    for task in all_tasks:
        task.start()

    windows = (first, second)
    coordinator.until(lambda: all(t.answer and t.answer.phase == "Live" for t in windows), 240)
    coordinator.until(lambda: all(stable(t) > 5 for t in windows), 60)
    assert [state(t) for t in windows] == [ConsistencyState.STABLE] * 2

    coordinator.cut = {cut.address}
    coordinator.until(lambda: all(state(t) is ConsistencyState.UP_FAILURE for t in windows), 60)
    began = [stable(t) for t in windows]
    coordinator.until(
        lambda: all(t.answer and t.answer.tentative_epoch > stable(t) + 15 for t in windows), 120
    )
    assert [stable(t) for t in windows] == began
    assert all(t.answer and t.answer.missing == (SOURCE,) for t in windows)
    during = [read(t, at + 1) for t, at in zip(windows, began, strict=True)]
    assert {b.kind for r in during for b in r.epochs} == {BatchKind.TENTATIVE}

    coordinator.cut = set()
    coordinator.until(lambda: all(state(t) is ConsistencyState.STABLE for t in windows), 180)
    for task, at, response in zip(windows, began, during, strict=True):
        assert {BatchKind.UNDO, BatchKind.RECONCILIATION_DONE} <= kinds_after(task, at, response)

    through = max(stable(t) for t in windows) + EPOCHS_OF_A_WINDOW

    def written() -> bool:
        return all(
            t.answer and t.answer.sinks and all(s.durable >= through for s in t.answer.sinks)
            for t in windows
        )

    coordinator.until(written, 120)
    rows = read_sink(f"file://{tmp_path}/out", "parquet", until_epoch=through).to_pylist()
    assert any(max(began) < r["_epoch"] for r in rows)
    got = {(r["k"], seconds(r["window_end"])): r["total"] for r in rows}
    assert len(rows) == len(got)
    last = max(end for _, end in got)
    assert got == {(key, end): total for (key, end), total in expected.items() if end <= last}
    assert all(t.answer and t.answer.problem is None for t in windows)
