"""What a cluster of kubelet nodes has on this machine, in a file that outlives it.

A line is written before what it names is made. Whoever has the file's lock is responsible for
what it names; the kernel releases the lock when that process ends, however it ends, and the next
one that gets it removes what is left (`removal`). There is a file for each index of
`addresses.ClusterAddresses`, so the lock reserves the addresses too.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError

STATE_DIRECTORY = Path("/run/rekindle-kubelet-nodes")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """In every hierarchy, below its root; all processes in it and below are the cluster's. Their
    namespaces, mounts and firewall rules end with them."""

    name: str


@dataclass(frozen=True, slots=True)
class Link:
    """In the network namespace of the machine."""

    name: str


@dataclass(frozen=True, slots=True)
class Directory:
    """Is deleted with all that is in it."""

    path: str


HostResource = Cgroup | Link | Directory

_KINDS: dict[str, type[HostResource]] = {"cgroup": Cgroup, "link": Link, "directory": Directory}
_NAMES = {kind: name for name, kind in _KINDS.items()}


_OWN_CGROUP = re.compile(r"rekindle-kubelet-\d+(/[a-z0-9][a-z0-9.-]*)?")
_OWN_LINK = re.compile(r"rk\d+")
DATA_DIRECTORY_NAME = "data"
"""Name of the directory of a node's data: only directories of this name are deleted."""


def is_ours(resource: HostResource) -> bool:
    """Whether it may belong to a cluster of kubelet nodes. Removal runs as root and follows the
    file, so a file that names anything else, such as the root of all cgroups, is refused."""
    match resource:
        case Cgroup(name):
            return _OWN_CGROUP.fullmatch(name) is not None
        case Link(name):
            return _OWN_LINK.fullmatch(name) is not None
        case Directory(path):
            parts = Path(path).parts
            return (
                len(parts) > 2
                and parts[0] == "/"
                and parts[-1] == DATA_DIRECTORY_NAME
                and ".." not in parts
            )


def to_line(resource: HostResource) -> str:
    return json.dumps({"kind": _NAMES[type(resource)], **asdict(resource)}) + "\n"


def parse(text: str) -> list[HostResource]:
    """The resources that a file names, each once. A last line that was not written to its end names
    nothing, since what it names was not made."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    found: list[HostResource] = []
    for line in lines:
        try:
            fields = json.loads(line)
            resource = _KINDS[fields.pop("kind")](**fields)
            if not is_ours(resource):
                raise ValueError("not ours")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"a line of a state file names no host resource: {line!r}"
            raise KubeletNodeError(what) from error
        found.append(resource)
    return list(dict.fromkeys(found))


class StateFile:
    """A state file and its lock."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._file = file

    @classmethod
    def claim(cls, path: Path) -> StateFile | None:
        """The file, locked; None if another process has it."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(path, file)

    def resources(self) -> list[HostResource]:
        try:
            return parse(self.path.read_text())
        except KubeletNodeError as error:
            raise KubeletNodeError(f"{self.path}: {error}") from error

    def record(self, *resources: HostResource) -> None:
        """Append the resources. They are not synced to disk: the file has to outlive this process,
        not a restart of the machine, which ends cgroups and links too."""
        for resource in resources:
            if not is_ours(resource):
                raise KubeletNodeError(f"{resource} cannot belong to a kubelet node")
            self._file.write(to_line(resource))
        self._file.flush()

    def clear(self) -> None:
        """All that it names was removed."""
        os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        self._file.close()
