"""Child processes of the embedded cluster: logs, shutdown, ports.

Each child has its own process group and is stopped by that group's id, never by
name.  A reaper kills the groups when this process dies without stopping them.
Knows nothing about what the children do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rekindle_testing.embedded.errors import EmbeddedError

# Below the range of ports of outgoing connections (32768 on Linux), so that no
# connection uses a port before the component starts, or while it restarts.
_FIRST_PORT, _LAST_PORT = 20000, 29999


class ProcessError(EmbeddedError):
    """A child could not be started, or no port was free."""


class ChildProcess:
    """One child: leader of its process group, its output appended to a log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._popen = popen
        self._paused = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative signal number if a signal ended it."""
        return self._popen.poll()

    def pause(self) -> None:
        """Freeze the group: its sockets stay open. Returns when no thread of the child runs."""
        self.signal(signal.SIGSTOP)
        # The thread that gets the signal stops the others once it runs, which takes its time on a
        # busy machine.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._paused = True

    def resume(self) -> None:
        self.signal(signal.SIGCONT)
        self._paused = False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; nothing happens if it has ended."""
        # poll() reaps; until then the group's id cannot belong to another.
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL once the grace is over."""
        self.signal(signal.SIGTERM)
        if self._paused:
            self.resume()
        if not self.wait(grace_s):
            self.signal(signal.SIGKILL)
            self._popen.wait()

    def log_tail(self, lines: int = 20) -> str:
        with self.log.open(errors="replace") as file:
            return "".join(deque(file, maxlen=lines)).rstrip()


class ChildProcesses:
    """Starts children and ensures that none outlives this process."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._processes: list[ChildProcess] = []
        self._reaper: subprocess.Popen[str] | None = None

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start a child logging to NAME.log; a second one of that name appends to it."""
        self._log_directory.mkdir(parents=True, exist_ok=True)
        log = self._log_directory / f"{name}.log"
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise ProcessError(f"cannot start {name}: {error}") from error
        self._send_to_reaper(f"+{popen.pid}")
        process = ChildProcess(name, popen, log)
        self._processes.append(process)
        return process

    def stop(self, process: ChildProcess, grace_s: float) -> None:
        process.stop(grace_s)
        self._forget(process)

    def close(self, grace_s: float = 3.0) -> None:
        """Stop what still runs, the last started first, then the reaper.

        All get SIGTERM before the first is waited for, and then a second one: with the
        first, Kubernetes' servers drain for many seconds; with the second they exit.
        """
        for process in reversed(self._processes):
            process.signal(signal.SIGTERM)
        for process in reversed(self._processes.copy()):
            self.stop(process, grace_s)
        if self._reaper is not None:
            _pipe_of(self._reaper).close()
            self._reaper.wait()
            self._reaper = None

    def _forget(self, process: ChildProcess) -> None:
        # Once reaped, the id may become another group's.
        self._send_to_reaper(f"-{process.pid}")
        self._processes.remove(process)

    def _send_to_reaper(self, line: str) -> None:
        if self._reaper is None:
            script = Path(__file__).with_name("reaper.py")
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script)],
                stdin=subprocess.PIPE,
                text=True,
                # Ctrl-C in the terminal must not end the reaper before this process has stopped the
                # children.
                start_new_session=True,
            )
        # The reaper may have been killed from outside.
        with contextlib.suppress(BrokenPipeError):
            _pipe_of(self._reaper).write(line + "\n")
            _pipe_of(self._reaper).flush()


def choose_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Distinct ports that no process listens on at the moment."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(1000):
            port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT + 1)
            # Held until all are chosen, so that none is chosen twice.
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                probe.bind((address, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise ProcessError(f"no {count} free ports in {_FIRST_PORT}-{_LAST_PORT} on {address}")


def _pipe_of(reaper: subprocess.Popen[str]) -> IO[str]:
    assert reaper.stdin is not None
    return reaper.stdin
