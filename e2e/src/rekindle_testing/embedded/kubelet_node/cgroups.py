"""Cgroups of kubelet nodes, in every hierarchy of cgroup v1 and in that of v2.

Names are below the roots of the hierarchies: `rekindle-kubelet-0/node-1`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError


@dataclass(frozen=True, slots=True)
class Hierarchy:
    root: Path
    is_v2: bool
    is_cpuset: bool = False


def hierarchies(mounts: str) -> list[Hierarchy]:
    """From the text of /proc/self/mounts."""
    found = []
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append(Hierarchy(Path(point), is_v2=True))
        elif kind == "cgroup":
            found.append(
                Hierarchy(Path(point), is_v2=False, is_cpuset="cpuset" in options.split(","))
            )
    return found


def mounted() -> list[Hierarchy]:
    return hierarchies(Path("/proc/self/mounts").read_text())


def make(name: str) -> None:
    """Make a cgroup and its parents in every hierarchy; those that exist are left as they are."""
    for hierarchy in mounted():
        path = hierarchy.root
        for part in PurePosixPath(name).parts:
            if hierarchy.is_v2:
                _delegate(path)
            parent, path = path, path / part
            path.mkdir(exist_ok=True)
            if hierarchy.is_cpuset:
                _fill_cpuset(parent, path)


def process_files(name: str) -> list[Path]:
    """A process that writes 0 to each of these has joined."""
    return [hierarchy.root / name / "cgroup.procs" for hierarchy in mounted()]


def processes(name: str) -> set[int]:
    """Ids of the processes in the cgroup or below it."""
    found: set[int] = set()
    for hierarchy in mounted():
        for file in (hierarchy.root / name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in file.read_text().split()}
    # 0 is a process of another PID namespace, which cannot be named here.
    return found - {0}


def remove(name: str) -> bool:
    """Remove the cgroup and those below it, if they exist. Returns whether all are removed; a
    cgroup with a process in it stays."""
    gone = True
    for hierarchy in mounted():
        root = hierarchy.root / name
        for path in [*_below(root), root]:
            gone &= _remove_directory(path)
        # The parent, once its last child is gone.
        if root.parent != hierarchy.root:
            _remove_directory(root.parent)
    return gone


def exists(name: str) -> bool:
    return any((hierarchy.root / name).exists() for hierarchy in mounted())


def _below(root: Path) -> Iterator[Path]:
    """Children before their parents."""
    return iter(sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True))


def _remove_directory(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise KubeletNodeError(f"cgroup {path} cannot be removed: {error}") from error
        return False
    return True


def _fill_cpuset(parent: Path, path: Path) -> None:
    """A new cpuset of v1 is empty: no process can join it before it has processors and memory."""
    for file in ("cpuset.cpus", "cpuset.mems"):
        if not (path / file).read_text().strip():
            (path / file).write_text((parent / file).read_text())


def _delegate(path: Path) -> None:
    """Enable the controllers of a v2 cgroup for its children, one by one: some may be refused."""
    for controller in (path / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):
            (path / "cgroup.subtree_control").write_text(f"+{controller}")
