"""Removes what a state file names: the cgroups, links and directories of a cluster on this machine.
Idempotent: what is already removed is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from rekindle_testing.embedded.kubelet_node import cgroups, commands, mounts
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError
from rekindle_testing.embedded.kubelet_node.state_file import (
    STATE_DIRECTORY,
    Cgroup,
    Directory,
    HostResource,
    Link,
    StateFile,
)
from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.progress import OnProgress, no_progress

_TIMEOUT_S = 20.0
_POLL_S = 0.02


def remove_leftovers(
    directory: Path = STATE_DIRECTORY, on_progress: OnProgress = no_progress
) -> None:
    """Remove the nodes and networks of processes that ended without removing them."""
    for path in sorted(directory.glob("*.jsonl")):
        state = StateFile.claim(path)
        if state is None:
            continue
        with contextlib.closing(state):
            remove_all(state, on_progress)


def remove_all(state: StateFile, on_progress: OnProgress = no_progress) -> None:
    """Remove what the state file names, and empty it. This process holds the file's lock."""
    resources = state.resources()
    if not resources:
        return
    if present := leftovers(resources):
        on_progress(f"removing {len(present)} leftovers of kubelet nodes named by {state.path}")
    remove(resources)
    if present := leftovers(resources):
        raise KubeletNodeError(
            f"could not be removed: {', '.join(present)}; {state.path} still names them"
        )
    state.clear()


def remove(resources: Iterable[HostResource]) -> None:
    """Kills the processes first: their namespaces end with them, and so does what is in these."""
    resources = list(resources)
    names = [resource.name for resource in resources if isinstance(resource, Cgroup)]
    kill(names)
    for resource in resources:
        if isinstance(resource, Link) and _has_link(resource.name):
            # It may vanish meanwhile, with the namespace that has its other end.
            with contextlib.suppress(KubeletNodeError):
                commands.ip([f"link delete {resource.name}"])
    for resource in resources:
        if isinstance(resource, Directory):
            delete_directory(Path(resource.path))
    _remove_cgroups(names)


def leftovers(resources: Iterable[HostResource]) -> list[str]:
    """Descriptions of those resources that still exist."""
    found = []
    for resource in resources:
        match resource:
            case Cgroup(name):
                found += [f"process {pid} of {name}" for pid in sorted(cgroups.processes(name))]
                found += [f"cgroup {name}"] if cgroups.exists(name) else []
            case Link(name):
                found += [f"link {name}"] if _has_link(name) else []
            case Directory(path):
                found += [f"directory {path}"] if Path(path).exists() else []
                found += [f"mount {point}" for point in _mounts_below(Path(path))]
    return found


def kill(names: Iterable[str]) -> None:
    """SIGKILL to all processes in these cgroups, until there is none."""
    names = list(names)
    deadline = time.monotonic() + _TIMEOUT_S
    while pids := set[int]().union(*map(cgroups.processes, names)):
        if time.monotonic() > deadline:
            raise KubeletNodeError(f"processes {sorted(pids)} do not end by SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _remove_cgroups(names: list[str]) -> None:
    """Remove the cgroups. A process that a killed one had just started may still join a cgroup: it
    is killed too. Once the cgroup is removed, such a process fails to join, and ends."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        kill(names)
        # Those with the longest path first: children before their parents.
        gone = [cgroups.remove(name) for name in sorted(names, key=len, reverse=True)]
        if all(gone):
            return
        if time.monotonic() > deadline:
            raise KubeletNodeError(f"cgroups {', '.join(names)} stay busy")
        time.sleep(_POLL_S)


def delete_directory(path: Path) -> None:
    """Nothing happens if it is gone. What is mounted below is unmounted first."""
    for point in reversed(_mounts_below(path)):
        syscalls.unmount(point)
    deadline = time.monotonic() + _TIMEOUT_S
    while path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            # The kernel may still be at work on an overlay whose last process has just ended.
            if time.monotonic() > deadline:
                raise KubeletNodeError(f"{path} cannot be deleted: {error}") from error
            time.sleep(_POLL_S)


def _mounts_below(path: Path) -> list[str]:
    return mounts.points_below(mounts.read(), path)


def _has_link(name: str) -> bool:
    return (Path("/sys/class/net") / name).exists()
