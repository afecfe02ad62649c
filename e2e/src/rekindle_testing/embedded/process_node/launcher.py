"""The parent of one node: creates its namespaces, and cleans up after it.

Runs outside the node, so that it can kill a frozen one.  It ends the node when the
process that started it has ended.  After the end of the node it deletes its data
directory, control group and firewall table.
Standard library only, and nothing of Kubernetes: started as
`python -S -E -c BOOTSTRAP launcher IMPORT_ROOT CONFIG` (see `node.py`, which also writes CONFIG);
BOOTSTRAP calls `main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls

Config = dict[str, Any]


def main(config_path: str) -> None:
    config: Config = json.loads(Path(config_path).read_text())
    # A session of its own: neither Ctrl-C nor a signal to the creator's group reaches it.
    os.setsid()
    creator = os.pidfd_open(config["creator_pid"])
    _unshare()
    init = os.fork()
    if init == 0:
        _become_init(config)
    _restore_pid_namespace_of_children()
    Path(config["init_pid_file"]).write_text(str(init))
    _wait(creator, init)
    _clean_up(config)


def _unshare() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
    except PermissionError:
        # Without this privilege: a user namespace grants it for the node's own mounts.
        syscalls.unshare(syscalls.CLONE_NEWPID | syscalls.CLONE_NEWUSER)
    else:
        return
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _restore_pid_namespace_of_children() -> None:
    # Otherwise children of the launcher would be in the namespace of the dead init, which
    # the kernel refuses: `nft` in the clean-up could not be started.
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    with contextlib.suppress(OSError):
        syscalls.set_namespace(own, syscalls.CLONE_NEWPID)
    os.close(own)


def _become_init(config: Config) -> None:
    """Pid 1 of the node (`init.py`), which starts the agent."""
    syscalls.die_with_parent(signal.SIGKILL)
    # Not shared with the launcher: the node's mounts end with the node.
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # A group of its own, shared with the agent: killing it kills the node.
    os.setsid()
    if config["cgroup"]:
        (Path(config["cgroup"]) / "cgroup.procs").write_text("0")
    os.execve(config["init"][0], config["init"], config["environment"])


def _wait(creator: int, init: int) -> None:
    """Until the node is dead.  The kernel reaps a whole namespace before its pid 1."""
    node = os.pidfd_open(init)
    poll = select.poll()
    poll.register(creator, select.POLLIN)
    poll.register(node, select.POLLIN)
    while not (ready := {descriptor for descriptor, _ in poll.poll()}):
        pass
    if node not in ready:
        os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)


def _clean_up(config: Config) -> None:
    # Imported late: a launcher waits for hours and should use little memory meanwhile.
    import shutil
    import subprocess

    if config["nft_table"]:
        with contextlib.suppress(OSError):
            subprocess.run(
                ["nft", "delete", "table", "inet", config["nft_table"]],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    shutil.rmtree(config["data_directory"], ignore_errors=True)
    if config["cgroup"]:
        root = Path(config["cgroup"])
        for directory in sorted((d for d in root.rglob("*") if d.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                directory.rmdir()
        with contextlib.suppress(OSError):
            root.rmdir()
