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


Record = Cgroup | Link | Directory

_KINDS: dict[str, type[Record]] = {"cgroup": Cgroup, "link": Link, "directory": Directory}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_line(record: Record) -> str:
    return json.dumps({"kind": _NAMES[type(record)], **asdict(record)}) + "\n"


def parse(text: str) -> list[Record]:
    """The records of a file, each once. A last line that was not written to its end names nothing,
    since what it names was not made."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    found: list[Record] = []
    for line in lines:
        try:
            fields = json.loads(line)
            found.append(_KINDS[fields.pop("kind")](**fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KubeletNodeError(f"a line of a state file is no record: {line!r}") from error
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

    def records(self) -> list[Record]:
        try:
            return parse(self.path.read_text())
        except KubeletNodeError as error:
            raise KubeletNodeError(f"{self.path}: {error}") from error

    def record(self, *records: Record) -> None:
        """Durable against the end of this process; a crash of the machine takes the rest along."""
        for record in records:
            self._file.write(to_line(record))
        self._file.flush()

    def clear(self) -> None:
        """All that it names was removed."""
        os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        self._file.close()
