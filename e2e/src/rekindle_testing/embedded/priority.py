"""Which processes have this machine's processors first. Standard library only: for shims too.

Source: sched(7), "The nice value and group scheduling": where the kernel schedules sessions as
groups, the weight of a session's group counts, and that of a process only within it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

POD_NICE = 10
"""A cluster's control plane has machines of its own; here it has the processors before all pods."""
BACKGROUND_NICE = 19


def lower_priority(nice: int, pid: int | None = None) -> None:
    """Of the first process of a session, and of what it starts later. None: this process."""
    os.setpriority(os.PRIO_PROCESS, pid or 0, nice)
    with contextlib.suppress(OSError):  # a kernel without groups of sessions
        Path("/proc", str(pid or "self"), "autogroup").write_text(str(nice))
