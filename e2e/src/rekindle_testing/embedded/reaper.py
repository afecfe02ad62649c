"""Kills process groups when the process that started them is gone.

Started as a script by `processes.ChildProcesses`, which holds the other end of
standard input and writes `+GROUP` and `-GROUP` lines.  End of file means that
the process that started them ended, however it ended: kill -9 closes pipes too.
PR_SET_PDEATHSIG would do it without a process, but it follows the *thread* that
started the child, reaches no grandchildren, and exists on Linux only.
It must not import anything of this package: it runs isolated, to stay small.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        sign, group = line[0], int(line[1:])
        if sign == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
