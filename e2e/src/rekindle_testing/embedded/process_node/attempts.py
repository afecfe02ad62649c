"""One attempt at a container: its directory, its shim, its exit.

All state is in the directory, so that a restarted agent can adopt an attempt: `lock`
is locked while the shim runs and contains its pid. The agent writes `spec.json`, which the shim
reads, and `reason`; the shim writes `state.json`, with the container's pid, and `exit.json`, the
result.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.embedded.process_node.restarts import Exit

_IMPORT_ROOT = Path(__file__).parents[3]
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rekindle_testing.embedded.process_node.shim import main; main(sys.argv[2])"
)

# Time from the start of a shim until it has its lock; later it counts as dead.
_START_S = 5.0


class Attempt:
    """A container that runs, or ran.  `on_exit` is called once, in the event loop."""

    def __init__(self, directory: Path, on_exit: Callable[[], None]) -> None:
        self.directory = directory
        self.number = int(directory.name)
        self.started_at = time.time()
        self._on_exit = on_exit
        self._pidfd: int | None = None
        self._shim_pid = 0
        self._found_ended_at: float | None = None

    @classmethod
    def start(
        cls, directory: Path, shim_spec: dict[str, Any], on_exit: Callable[[], None]
    ) -> Attempt:
        attempt = cls(directory, on_exit)
        for name in ("root", "overlays"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / "termination-log").touch()
        # One start time for this agent, the shim, and an agent that adopts it.
        content = {**shim_spec, "started_at": attempt.started_at}
        syscalls.write_json(directory / "spec.json", content)
        argv = [sys.executable, "-S", "-E", "-c", _BOOTSTRAP, str(_IMPORT_ROOT), str(directory)]
        # In its own session: pods outlive the agent.
        # Signals are blocked until the shim can forward them: before, they would kill it.
        attempt._shim_pid = os.posix_spawn(
            argv[0], argv, {}, setsid=True, setsigmask=[signal.SIGTERM, signal.SIGUSR1]
        )
        attempt._watch(os.pidfd_open(attempt._shim_pid))
        return attempt

    @classmethod
    def adopt(cls, directory: Path, on_exit: Callable[[], None]) -> Attempt:
        """Take over what an earlier agent started; it may have ended since."""
        attempt = cls(directory, on_exit)
        made_at = directory.stat().st_mtime
        attempt.started_at = attempt._read("spec.json").get("started_at", made_at)
        attempt._shim_pid = attempt._find_shim()
        if attempt._shim_pid:
            with contextlib.suppress(ProcessLookupError):
                attempt._watch(os.pidfd_open(attempt._shim_pid))
        return attempt

    @property
    def running(self) -> bool:
        return self._pidfd is not None

    @property
    def shim_pid(self) -> int:
        """0 if there is none."""
        return self._shim_pid

    @property
    def pid(self) -> int | None:
        """Of the container's first process, once it has started."""
        pid: int | None = self._read("state.json").get("pid")
        return pid

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def send(self, number: signal.Signals) -> None:
        """SIGTERM reaches the container's first process; SIGUSR1 kills all of it."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self, reason: str = "") -> None:
        """SIGKILL; the status has the reason instead of `Error`."""
        if reason:
            (self.directory / "reason").write_text(reason)
        self.send(signal.SIGUSR1)

    def exit(self) -> Exit | None:
        """How it ended; None while it runs."""
        if self.running:
            return None
        end = self._read("exit.json")
        if not end:
            message = "the container's shim is gone and left no exit code"
            # Always the same time: otherwise a back-off would never end.
            if self._found_ended_at is None:
                self._found_ended_at = time.time()
            at_s = self._found_ended_at
            return Exit(
                exit_code=137,
                signal=0,
                reason="ContainerStatusUnknown",
                message=message,
                started_at=self.started_at,
                finished_at=at_s,
            )
        if end["start_error"]:
            reason, message = "StartError", end["start_error"]
        else:
            reason, message = "Error" if end["exit_code"] else "Completed", end["message"]
        with contextlib.suppress(FileNotFoundError):
            reason = (self.directory / "reason").read_text()
        return Exit(
            end["exit_code"], end["signal"], reason, message, end["started_at"], end["finished_at"]
        )

    def _find_shim(self) -> int:
        """Its pid, or 0 if it has ended; one that has just been started is waited for."""
        while True:
            is_young = 0 <= time.time() - self.started_at < _START_S
            if is_locked := _is_locked(self.directory / "lock"):
                with contextlib.suppress(ValueError):
                    return int((self.directory / "lock").read_text())
            if (self.directory / "exit.json").exists() or not (is_young or is_locked):
                return 0
            time.sleep(0.02)

    def _watch(self, pidfd: int) -> None:
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended)

    def _ended(self) -> None:
        assert self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        # An adopted shim is a child of the init, which reaps it.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._shim_pid, 0)
        self._on_exit()

    def _read(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.directory / name).read_text())
        except FileNotFoundError:
            return {}
        return content


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
