"""Adopting attempts of an earlier agent from their directories."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle_testing.embedded.process_node.attempts import Attempt

LATE_SHIM = """
import pathlib, sys, time
from rekindle_testing.embedded.process_node import shim
time.sleep(0.5)
shim.hold_lock(pathlib.Path(sys.argv[1]))
time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "0"
    made.mkdir()
    return made


def write_spec(directory: Path, started_at: float) -> None:
    (directory / "spec.json").write_text(json.dumps({"started_at": started_at}))


@pytest.mark.process
def test_a_shim_that_has_just_started_is_waited_for(directory: Path) -> None:
    write_spec(directory, time.time())
    argv = [sys.executable, "-c", LATE_SHIM, str(directory)]

    async def adopt_and_end() -> None:
        with subprocess.Popen(argv) as shim:
            ended = asyncio.Event()
            attempt = Attempt.adopt(directory, ended.set)
            assert attempt.running
            assert attempt.shim_pid == shim.pid
            assert attempt.exit() is None
            shim.kill()
            await asyncio.wait_for(ended.wait(), 10)
            assert not attempt.running

    asyncio.run(adopt_and_end())


def test_a_shim_without_an_exit_code_has_ended(directory: Path) -> None:
    write_spec(directory, time.time() - 3600)
    (directory / "lock").write_text("1")
    attempt = Attempt.adopt(directory, lambda: None)
    assert not attempt.running
    first = attempt.exit()
    assert first is not None
    assert first.reason == "ContainerStatusUnknown"
    time.sleep(0.01)
    assert attempt.exit() == first
