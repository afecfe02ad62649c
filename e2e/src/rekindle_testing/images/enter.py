"""A container of an image that buildah has built: `python -m rekindle_testing.images.enter SPEC`.

Runs as PID 1 of its own mount and process namespaces (`engines.UNSHARE_COMMAND`), becomes the
image's process, and has what a pod gives it: the image's user and environment, a read-only root and
the directories that are writable. Network and control groups are the machine's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.embedded.process_node.rootfs import make_devices

_HOST_FILES = ("/etc/hosts", "/etc/resolv.conf")


def enter(spec: dict[str, Any]) -> None:
    """Never returns. `mount`: the command that mounts the image and prints where; `writable`:
    directories that get a tmpfs; `directory`: the working directory."""
    done = subprocess.run(spec["mount"], check=True, stdout=subprocess.PIPE, text=True)
    root = done.stdout.strip()
    for name in _HOST_FILES:
        Path(root + name).touch()
    syscalls.bind(root, root, read_only=True, recursive=False)
    syscalls.mount("proc", f"{root}/proc", "proc")
    syscalls.bind("/sys", f"{root}/sys", read_only=True)
    make_devices(f"{root}/dev")
    for name in _HOST_FILES:
        syscalls.bind(name, root + name, read_only=True)
    for directory in spec["writable"]:
        syscalls.mount("tmpfs", root + directory, "tmpfs", syscalls.MS_NOSUID, "mode=1777")
    os.chroot(root)
    os.chdir(spec["directory"])
    user, _, group = spec["user"].partition(":")
    os.setgroups([])
    os.setgid(int(group or user))
    os.setuid(int(user))
    syscalls.no_new_privileges()
    syscalls.die_with_parent(signal.SIGKILL)  # again: the change of user has cleared it
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
