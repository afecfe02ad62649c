"""Pid 1 of a node: reaps orphans, and starts the agent again when it dies.

Nothing here may fail: when pid 1 ends, the kernel kills everything in the node.
Standard library only, and nothing of Kubernetes.
SIGUSR1 kills the agent and leaves it down; SIGUSR2 starts it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from rekindle_testing.embedded.process_node import syscalls

# So that an agent that cannot start does not occupy a core.
RESTART_DELAY_S = 0.5

_HANDLED_SIGNALS = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}


class _Agent:
    def __init__(self, argv: list[str], log: str) -> None:
        self._argv = argv
        self._log = log
        self._pid = 0
        self._wanted = True

    def start(self) -> None:
        self._wanted = True
        if self._pid:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        actions = [(os.POSIX_SPAWN_OPEN, fd, self._log, flags, 0o644) for fd in (1, 2)]
        self._pid = os.posix_spawn(
            self._argv[0], self._argv, dict(os.environ), file_actions=actions, setsigmask=[]
        )

    def kill(self) -> None:
        self._wanted = False
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reap ended processes; restart the agent if it is one of them."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            if pid == self._pid:
                self._pid = 0
        if self._wanted and not self._pid:
            time.sleep(RESTART_DELAY_S)
            self.start()


def main(config_path: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    config = json.loads(Path(config_path).read_text())
    syscalls.make_mounts_private()
    syscalls.mount("proc", "/proc", "proc")
    agent = _Agent(config["agent"], config["agent_log"])
    agent.start()
    while True:
        match signal.sigwait(_HANDLED_SIGNALS):
            case signal.SIGUSR1:
                agent.kill()
            case signal.SIGUSR2:
                agent.start()
            case _:
                agent.reap()
