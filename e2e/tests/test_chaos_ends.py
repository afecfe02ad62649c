"""However a chaos run ends, none of its processes is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.platform("chaos", "harness", "embedded"),
    pytest.mark.timeout(200),
]

# In command lines of the cluster, of a node, and of the oracle.
_WORDS_OF_COMMANDS = ("etcd", "process_node", "rekindle run")


def _processes(directory: Path) -> dict[int, str]:
    """Processes whose command line has the run's directory."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(directory) in command and process.status() != psutil.STATUS_ZOMBIE:
            found[process.pid] = command
    return found


def _has_begun(directory: Path) -> bool:
    commands = _processes(directory).values()
    return all(any(word in command for command in commands) for word in _WORDS_OF_COMMANDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_processes(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rekindle_testing.chaos", "--seed", "900001", "--rounds", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=ROOT)
    try:
        wait_for("its processes", lambda: _has_begun(tmp_path), 120, 0.2)
        run.send_signal(number)
        run.wait(60)
        wait_for("their end", lambda: not _processes(tmp_path), 20, 0.2)
    finally:
        run.kill()
        run.wait()
