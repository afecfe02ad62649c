"""What is mounted where, from the text of /proc/self/mounts. Pure but for reading it."""

from __future__ import annotations

from pathlib import Path

# How the kernel escapes a blank; our paths have none of the other characters that it escapes.
_BLANK = "\\040"


def read() -> str:
    return Path("/proc/self/mounts").read_text()


def points_below(mounts: str, path: Path) -> list[str]:
    """Mount points at or below the path, in the order of mounting."""
    points = (line.split()[1].replace(_BLANK, " ") for line in mounts.splitlines())
    return [point for point in points if Path(point).is_relative_to(path)]


def file_system_of(mounts: str, path: Path) -> str:
    """The type of the file system that has the path."""
    found = ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace(_BLANK, " ")
        # The last of several mounts on one point hides the others.
        if path.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]
