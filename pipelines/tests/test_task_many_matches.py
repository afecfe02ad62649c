"""One row with a million matches, with real tasks: memory is bounded, and what does not fit is a
problem that names operator, epoch and limit, of a task that goes on responding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rekindle.connectors import read_sink
from rekindle.engine.memory import MIB
from rekindle.topology.model import Slot
from rekindle_testing.harness.task_processes import ReplicaProcess, TaskProcesses, task_processes

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

ROWS, SECONDS, MATCHED_AT = 1_000_000, 10, 12
WIDTH = 40
START_US = 1_767_225_600_000_000


def times(offsets_us: Any) -> pa.Array:
    column = pa.array(START_US + np.asarray(offsets_us), pa.int64())
    return column.cast(pa.timestamp("us", "UTC"))


def write_input(directory: Path) -> None:
    at = np.arange(ROWS) * SECONDS * 1_000_000 // ROWS
    many = {"k": ["hot"] * ROWS, "text": ["x" * WIDTH] * ROWS, "t": times(at)}
    pq.write_table(pa.table(many), directory / "many.parquet")
    seconds = np.array([0, MATCHED_AT, MATCHED_AT + 2])
    one = {"ok": ["none", "hot", "none"], "m": [0, 1, 2], "u": times(seconds * 1_000_000)}
    pq.write_table(pa.table(one), directory / "one.parquet")


def make_spec(directory: Path) -> dict[str, Any]:
    def source(name: str, schema: str, time: str) -> dict[str, Any]:
        url = f"file://{directory}/{name}.parquet"
        files = {"url": url, "format": "parquet", "orderBy": time, "speedup": 1}
        return {"name": name, "schema": schema, "eventTime": {"column": time}, "files": files}

    join = {"on": "many.k = one.ok", "within": "1h", "select": "many.text, one.m, many.t"}
    return {
        "epochInterval": "1s",
        "checkpoint": {"interval": "5s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            source("many", "k STRING, text STRING, t TIMESTAMP", "t"),
            source("one", "ok STRING, m BIGINT, u TIMESTAMP", "u"),
        ],
        "operators": [{"name": "pairs", "inputs": ["many", "one"], "join": join}],
        "queries": [
            {
                "name": "q",
                "from": "pairs",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "parquet"}},
            }
        ],
    }


class Observed:
    """The task of the join: how much memory it has had at most, and what it has said."""

    def __init__(self, tasks: TaskProcesses) -> None:
        topology = tasks.generation.topology
        segment = next(s for s in topology.segments if "pairs" in s.nodes)
        self._task: ReplicaProcess = tasks.replicas[Slot(segment.id, 0, 0)]
        self.bytes = 0
        self.hot_key = ""
        self.problems: set[str] = set()
        self.stable_epoch = self.durable_epoch = -1

    def look(self) -> None:
        self._task.start_again_if_ended()  # as a kubelet does
        try:
            process = psutil.Process(self._task.process.pid)
            family = [process, *process.children(recursive=True)]
            memory = [p.memory_info() for p in family]
            # Without pages of mapped files, which the kernel takes away when it needs them.
            self.bytes = max(self.bytes, sum(m.rss - m.shared for m in memory))
        except psutil.NoSuchProcess:
            pass
        if (response := self._task.response) is not None:
            self.stable_epoch = response.stable_epoch
            self.durable_epoch = min((sink.durable for sink in response.sinks), default=-1)
            self.hot_key = response.hot_key
            if response.problem is not None:
                self.problems.add(response.problem.message)


@pytest.mark.parametrize(("limit_mib", "fits"), [(2048, True), (1024, False)])
def test_a_million_matches_of_one_row(
    tmp_path: Path, cds_archive: Path, limit_mib: int, fits: bool
) -> None:
    write_input(tmp_path)
    limit = limit_mib * MIB
    environment = {"REKINDLE_CDS_ARCHIVE": str(cds_archive), "REKINDLE_MEMORY": str(limit)}
    with task_processes(tmp_path, make_spec(tmp_path), environment) as tasks:
        observed = Observed(tasks)

        def is_done() -> bool:
            observed.look()
            if fits:
                return observed.durable_epoch > MATCHED_AT
            return any("raise resources.limits.memory" in text for text in observed.problems)

        def has_problem() -> bool:
            observed.look()
            return bool(observed.problems)

        def has_hot_key() -> bool:
            observed.look()
            return bool(observed.hot_key)

        tasks.poll_until(is_done, 300)
        if fits:
            tasks.poll_until(has_hot_key, 120)
            assert observed.hot_key.startswith(
                "operator pairs, partition 0: about 100 % of its rows of many in 32 epochs have "
                "one key, k = 'hot'; more partitions do not divide them: "
            )
            tasks.poll_until(lambda: not has_hot_key(), 120)  # no rows come any more
        else:
            (problem,) = (text for text in observed.problems if "raise" in text)
            assert f"epoch {MATCHED_AT} (1 rows" in problem
            assert f"operator pairs, epochs {MATCHED_AT} to {MATCHED_AT}: the result has" in problem
            observed.problems.clear()
            # It starts again and serves what it has; the epoch is tried again.
            tasks.poll_until(has_problem, 300)
            assert observed.stable_epoch == MATCHED_AT - 1
    print(f"{observed.bytes / MIB:.0f} MiB of {limit_mib}")
    assert 0 < observed.bytes < limit
    if fits:
        assert read_sink(f"file://{tmp_path}/out").num_rows == ROWS
        assert not observed.problems
