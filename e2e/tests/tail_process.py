"""`rekindle tail` beside a cluster, and what sinks of files have instead."""

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

from rekindle.connectors.files_sink import parse_name
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.waiting import wait_for

Rows = dict[tuple[int, int], list[str]]  # by partition and epoch, as JSON


class Tail:
    """`rekindle tail --json`, and what it has printed."""

    def __init__(self, cluster: Cluster, topology: str, query: str, *flags: str) -> None:
        command = [sys.executable, "-m", "rekindle.cli", "tail", topology, query, "--json", *flags]
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

    def through(self) -> int:
        """The newest epoch of which all rows of all partitions are there."""
        newest = {line["partition"]: line["epoch"] for line in self.lines}
        return min(newest.values(), default=0) - 1

    def kinds(self) -> set[str]:
        return {line["kind"] for line in self.lines}

    def rows(self, through: int) -> Rows:
        """Those that are stable. A tentative row has been dropped when its stable version comes."""
        stable: Rows = defaultdict(list)
        tentative: set[tuple[int, int]] = set()
        for line in self.lines:
            place = line["partition"], line["epoch"]
            if line["kind"] == "TENTATIVE":
                tentative.add(place)
            elif line["kind"] == "UNDO":
                tentative = {t for t in tentative if t[0] != place[0] or t[1] < place[1]}
            elif line["kind"] != "REC_DONE" and line["epoch"] <= through:
                assert place not in tentative
                stable[place].append(json.dumps(line["row"]))
        assert not tentative
        return dict(stable)


def expected_rows(directory: Path, through: int) -> Rows:
    found: Rows = {}
    for path in directory.glob("*.parquet"):
        name = parse_name(path.name)
        assert name is not None
        if name.epoch <= through:
            rows = pq.read_table(path).to_pylist()
            found[name.partition, name.epoch] = [json.dumps(r, default=str) for r in rows]
    return found
