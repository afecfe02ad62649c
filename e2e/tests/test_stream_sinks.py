"""A stream sink in a cluster: `rekindle tail` goes on while the replica it reads is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from cluster_types import every_cluster_type_kubelet_marked_long, storms_topology

from rekindle.connectors.files_sink import parse_name
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.oracle import run_reference
from rekindle_testing.harness.run import Run
from rekindle_testing.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.failures, pytest.mark.timeout(900)]

EPOCHS = 15
Rows = dict[tuple[int, int], list[str]]  # by partition and epoch, as JSON


@pytest.fixture(scope="module")
def cluster(shared_cluster: Cluster) -> Cluster:
    return shared_cluster


def streamed(name: str) -> dict[str, Any]:
    document = storms_topology(name)
    (query,) = document["spec"]["queries"]
    query["sink"] = {"stream": {"retain": "8Mi"}}
    return document


class Tail:
    """`rekindle tail --json`, and what it has printed."""

    def __init__(self, cluster: Cluster, topology: str, query: str) -> None:
        command = [sys.executable, "-m", "rekindle.cli", "tail", topology, query, "--json"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
        )
        self.lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    @property
    def newest(self) -> int:
        return max((line["epoch"] for line in self.lines[-1:]), default=-1)

    def wait(self, epoch: int) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None, self.end()
            return self.newest >= epoch

        wait_for(f"epoch {epoch} from rekindle tail", is_there, 180)

    def end(self) -> str:
        """What it has written to stderr."""
        assert self.process.stderr is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        self._thread.join(10)
        return self.process.stderr.read()

    def rows(self, through: int) -> Rows:
        found: Rows = defaultdict(list)
        for line in self.lines:
            assert line["kind"] == "STABLE"
            if line["epoch"] <= through:
                found[line["partition"], line["epoch"]].append(json.dumps(line["row"]))
        return dict(found)


def expected_rows(directory: Path, through: int) -> Rows:
    found: Rows = {}
    for path in directory.glob("*.parquet"):
        name = parse_name(path.name)
        assert name is not None
        if name.epoch <= through:
            rows = pq.read_table(path).to_pylist()
            found[name.partition, name.epoch] = [json.dumps(r, default=str) for r in rows]
    return found


@every_cluster_type_kubelet_marked_long
def test_a_reader_gets_each_row_once_while_its_replica_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    document = streamed("streamed")
    (query,) = document["spec"]["queries"]
    run_reference(document, cluster.shared, tmp_path / "reference")
    with Run(cluster, document) as run:
        run.wait_live()
        tail = Tail(cluster, run.name, query["name"])
        try:
            tail.wait(EPOCHS)
            run.kill_pod_processes(run.task_pods(query["from"])[0])
            tail.wait(tail.newest + EPOCHS)
            run.wait_redundant()
            tail.wait(tail.newest + EPOCHS)
        finally:
            errors = tail.end()
        through = tail.newest - 1
        rows = tail.rows(through)
        print(f"{sum(map(len, rows.values()))} rows through epoch {through}; {errors}")
        assert rows == expected_rows(tmp_path / "reference" / query["name"], through)
        assert "trying again" in errors
