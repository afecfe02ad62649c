"""A real task process, and the coordinator's real core: a task is killed with -9 while one of its
readers waits for capacity, and goes on from its newest checkpoint, since its log has the rest.

A source with a sink, and a window that has no pod: it will need all epochs from the first one on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reader_parts import read_once

from rekindle.connectors.compare import read_sink
from rekindle.identity import Identity
from rekindle.protocol import PollResponse
from rekindle.streams.wire import ReadRequest, StreamUnavailable
from rekindle_testing.harness.task_processes import (
    UID,
    ReplicaProcess,
    TaskProcesses,
    task_processes,
)

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]

INTERVAL_EPOCHS = 5
REPLAYED_EPOCHS = 4 * INTERVAL_EPOCHS
"""Epochs since the newest committed checkpoint; on a slow machine a commit is late."""


def make_spec(directory: Path) -> dict[str, Any]:
    return {
        "epochInterval": "100ms",
        "logBudget": "16Mi",  # some 10 s, in files of 2 s; older ones are in the store
        "checkpoint": {"interval": "500ms", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "rows",
                "schema": "v BIGINT, t TIMESTAMP, wide STRING",
                "eventTime": {"column": "t"},
                "generator": {
                    "rowsPerSecond": 500,
                    "columns": {
                        "v": "sequence",
                        "t": "timestamp",
                        "wide": f"choice({'x' * 3000}, y)",
                    },
                },
            }
        ],
        "operators": [
            {
                "name": "sums",
                "inputs": ["rows"],
                "window": {"size": "8s", "groupBy": ["v"], "aggregate": "count(*) AS n"},
            }
        ],
        "queries": [
            {
                "name": "all",
                "from": "rows",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            },
            {
                "name": "totals",
                "from": "sums",
                "sink": {"files": {"url": f"file://{directory}/totals", "format": "parquet"}},
            },
        ],
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskProcesses]:
    directory = tmp_path_factory.mktemp("held")
    with task_processes(directory, make_spec(directory), waiting=("sums",)) as made:
        yield made


def source_of(tasks: TaskProcesses) -> ReplicaProcess:
    (source,) = tasks.replicas.values()
    return source


def answered(source: ReplicaProcess) -> PollResponse:
    assert source.response is not None
    return source.response


def log_files(data: Path) -> list[Path]:
    found = (path for end in ("log", "spilled") for path in (data / "log").rglob(f"*.{end}"))
    return sorted(found, key=lambda path: path.stem)


def leave_it(data: Path) -> None:
    pass


def tear_the_end(data: Path) -> None:
    path = log_files(data)[-1]
    os.truncate(path, path.stat().st_size - 10)


def tear_a_file_in_between(data: Path) -> None:
    """Found only when the log is opened: the first boot ends, the next one knows."""
    files = log_files(data)
    path = files[len(files) // 2]
    os.truncate(path, path.stat().st_size // 2)


def lose_the_log(data: Path) -> None:
    shutil.rmtree(data / "log")


@pytest.mark.parametrize(
    ("meanwhile", "is_short"),
    [
        pytest.param(leave_it, True, id="log-as-it-was"),
        pytest.param(tear_the_end, True, id="torn-end"),
        pytest.param(tear_a_file_in_between, False, id="torn-file"),
        pytest.param(lose_the_log, False, id="no-log"),
    ],
)
def test_a_killed_task_computes_again_only_what_its_log_lacks(
    tasks: TaskProcesses, meanwhile: Callable[[Path], None], is_short: bool
) -> None:
    source = source_of(tasks)
    before, committed = crash(tasks, meanwhile)
    restored_from = answered(source).restored_from
    assert restored_from is not None
    if is_short:
        assert restored_from >= committed
    else:
        assert restored_from == -1, "what the window needs has to be computed again"
    tasks.poll_until(lambda: answered(source).stable_epoch > before + 10, 60)
    require_all_rows(tasks, before + 10)


def test_a_part_of_the_log_that_the_store_has_lost_is_computed_again(tasks: TaskProcesses) -> None:
    source = source_of(tasks)
    before, committed = crash(tasks, lose_an_object)
    assert answered(source).restored_from == committed, "it is found when it is read"
    boot = answered(source).boot_id
    with pytest.raises(StreamUnavailable):
        rows_from_the_first(tasks, before)
    poll_until_live(tasks, boot)
    assert answered(source).restored_from == -1
    tasks.poll_until(lambda: answered(source).stable_epoch > before + 10, 60)
    require_all_rows(tasks, before + 10)


def lose_an_object(data: Path) -> None:
    spilled = [path for path in log_files(data) if path.suffix == ".spilled"]
    (objects,) = [path for path in data.parents[1].rglob("store") if path.is_dir()]
    name = json.loads(spilled[1].read_bytes().partition(b"\n")[0])["name"]
    (objects / name).unlink()


def crash(tasks: TaskProcesses, meanwhile: Callable[[Path], None]) -> tuple[int, int]:
    """Kill the source, and wait until it is Live again. Returns the epochs that it had computed and
    committed."""
    source = source_of(tasks)
    began = tasks.committed_epoch()

    def has_caught_up() -> bool:
        committed = tasks.committed_epoch()
        is_ahead = committed >= began + 8 * INTERVAL_EPOCHS
        behind = answered(source).stable_epoch - committed if is_ahead else REPLAYED_EPOCHS
        return tasks.all_live() and is_ahead and behind < REPLAYED_EPOCHS

    tasks.poll_until(has_caught_up, 90)
    before, boot = answered(source).stable_epoch, answered(source).boot_id
    committed = tasks.committed_epoch()
    source.crash(meanwhile)
    poll_until_live(tasks, boot)
    return before, committed


def poll_until_live(tasks: TaskProcesses, old_boot: str) -> None:
    """A later boot than `old_boot`."""
    source = source_of(tasks)

    def is_live() -> bool:
        source.start_again_if_ended()
        return tasks.all_live() and answered(source).boot_id != old_boot

    tasks.poll_until(is_live, 90)


def require_all_rows(tasks: TaskProcesses, through: int) -> None:
    """A reader gets each row once, in order, from the first epoch on; the sink has each once."""
    rows = rows_from_the_first(tasks, through)
    assert rows == list(range(len(rows)))
    assert len(rows) > through
    tasks.poll_until(
        lambda: all(sink.durable >= through for sink in answered(source_of(tasks)).sinks), 60
    )
    assert all(sink.conflict is None for sink in answered(source_of(tasks)).sinks)
    table = read_sink(f"file://{tasks.directory}/out", "parquet", until_epoch=through)
    assert sorted(table["v"].to_pylist()) == rows
    assert answered(source_of(tasks)).problem is None
    assert answered(source_of(tasks)).contradiction is None


def rows_from_the_first(tasks: TaskProcesses, through: int) -> list[int]:
    source, found, epoch = source_of(tasks), list[int](), 0
    (stream,) = (
        s.stream for s in tasks.generation.topology.segments if s.id == source.slot.segment
    )
    while epoch <= through:
        request = ReadRequest(stream, 0, epoch, 1 << 20)
        response = read_once(f"{source.address}:8815", request, 10, Identity(UID))
        for batch in response.epochs:
            assert batch.epoch == epoch
            if epoch <= through:
                found += batch.rows["v"].to_pylist()
            epoch += 1
    return found
