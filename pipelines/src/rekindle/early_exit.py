"""Imported first by the programs that run in pods, so that SIGTERM ends them during imports.

Imports take seconds. A container's first process is PID 1 of its namespace, to which the kernel
delivers only signals that it has a handler for: a pod that is deleted meanwhile would take the full
grace period to end.
"""

import os
import signal
from collections.abc import Sequence

signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def exit_status(status: int, received: Sequence[int]) -> int:
    """128 + the first of the `received` signals if the program ended without an error, by a signal.

    Not 0: if the containers of a pod that is evicted for a full disk exit with 0, the kubelet
    reports the pod as `Succeeded`, without a reason (kubernetes/kubernetes#141483).
    """
    return 128 + received[0] if received and status == 0 else status
