"""`make cluster` as a user does it: apply the example, kill a node, add one, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rekindle import names
from rekindle_testing.console.sockets import DIRECTORY_VARIABLE
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.platform("console", "harness", "embedded"),
    pytest.mark.timeout(1200),
]


class Console:
    """The program in one terminal, and commands in another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "TMPDIR": str(directory),
            DIRECTORY_VARIABLE: str(directory / "run"),
        }
        self._output = directory / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rekindle_testing.console"],
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def read(self) -> str:
        return self._output.read_text()

    def wait_ready(self) -> None:
        """Until it has printed its `export` line, whose variables then hold."""
        line = wait_for("the export line", self._export_line, 400)
        for name, value in re.findall(r"(\w+)=(\S+)", line):
            self.environment[name] = value.replace("$PATH", os.environ["PATH"])

    def _export_line(self) -> str | None:
        assert self.process.poll() is None, self.read()
        found = re.search(r"^ *export (.*)$", self.read(), re.MULTILINE)
        return found[1] if found else None

    def type(self, *command: str) -> str:
        """A command with the programs and the kubeconfig that the `export` line names."""
        done = subprocess.run(
            ["env", *command], env=self.environment, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self, number: signal.Signals, times: int = 1) -> int:
        """Signal it; returns its exit code once none of its processes is left."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for _ in range(times):
            self.process.send_signal(number)
        code = self.process.wait(90)
        wait_for(
            "the end of its processes",
            lambda: not self._own_processes() and not any(map(psutil.Process.is_running, family)),
            20,
        )
        return code

    def _own_processes(self) -> list[int]:
        """Processes whose command line or environment names the folder of this cluster."""
        found = []
        for process in psutil.process_iter():
            try:
                known = " ".join([*process.cmdline(), *process.environ().values()])
            except psutil.Error:
                continue
            if str(self.directory) in known:
                found.append(process.pid)
        return found


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    console = Console(tmp_path)
    yield console
    console.process.kill()
    console.process.wait()


def _queries(console: Console) -> list[dict[str, Any]]:
    text = console.type("kubectl", "get", "topo", "flights", "-o", "json")
    return list(json.loads(text).get("status", {}).get("queries", []))


def _all_live(console: Console) -> bool:
    queries = _queries(console)
    return bool(queries) and all(query.get("state") == "Live" for query in queries)


def test_the_example_survives_a_lost_node_and_sigint_stops_all(console: Console) -> None:
    console.wait_ready()
    console.type("kubectl", "apply", "-f", "examples/flights/topology.yaml")
    wait_for("all queries Live", lambda: _all_live(console), 300, 1)

    selector = f"{names.LABEL_SEGMENT_NAME}=routes"  # which has one replica
    pods = json.loads(console.type("kubectl", "get", "pods", "-l", selector, "-o", "json"))
    victim = pods["items"][0]["spec"]["nodeName"]
    assert console.type("rekindle-cluster", "kill", victim) == f"{victim}: killed\n"
    assert re.search(rf"{victim} +killed", console.type("rekindle-cluster", "status"))
    wait_for("a query that is not Live", lambda: not _all_live(console), 60, 0.5)
    assert "Ready" in console.type("rekindle-cluster", "add-node")
    wait_for("all queries Live again", lambda: _all_live(console), 300, 1)

    assert console.end(signal.SIGINT) == 0, console.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_during_the_start_stop_all(console: Console, number: signal.Signals) -> None:
    wait_for("process nodes", lambda: "process nodes" in console.read(), 120)
    assert console.end(number, times=2) == 128 + number, console.read()
