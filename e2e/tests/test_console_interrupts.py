"""The first signal stops a program, the second does not interrupt its clean-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.process

PROGRAM = """
import pathlib, subprocess, sys, time
from rekindle_testing.console.interrupts import Interrupted, end_children, interruptible
ended = pathlib.Path(sys.argv[1])
try:
    with interruptible():
        try:
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            print(child.pid, flush=True)
            while True:  # one wait without an end can miss a signal that comes just before it
                time.sleep(0.1)
        finally:
            print("ending", flush=True)
            while not ended.exists():
                time.sleep(0.01)
            end_children()
except Interrupted as interrupted:
    sys.exit(interrupted.number)
"""


@pytest.mark.parametrize("number", [1, 2, 15])
def test_the_first_signal_stops_the_program_and_its_children(number: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "ended")],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        child = psutil.Process(int(program.stdout.readline()))
        program.send_signal(number)
        assert program.stdout.readline() == "ending\n"
        program.send_signal(2)
        (tmp_path / "ended").touch()
        assert program.wait(20) == number
    wait_for("the end of the child", lambda: not child.is_running())
