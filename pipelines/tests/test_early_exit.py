"""Programs in pods exit at once if they get SIGTERM during their imports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.process


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a PID namespace")
@pytest.mark.parametrize("program", ["rekindle.task", "rekindle.coordinator", "rekindle_operator"])
def test_sigterm_ends_pid_1_during_imports(program: str) -> None:
    """PID 1 ignores a signal for which it has no handler. Without the signal the program would
    exit with another code, since it has no settings. A signal before Python runs its first line is
    ignored in any case, so it is sent repeatedly."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", program]
    with subprocess.Popen(command, env={}, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for pid_1 in psutil.Process(process.pid).children():
                        pid_1.send_signal(signal.SIGTERM)
                time.sleep(0.02)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
