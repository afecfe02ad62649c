"""When a query's rows were written, by its sink's files.

The status of a topology does not change while it has no coordinator; the files show the progress of
the data plane independently of it. An epoch without rows has no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from rekindle.connectors.files_sink import parse_name


def file_write_times(folder: Path) -> list[tuple[float, int]]:
    """(seconds since 1970, epoch) of each file of a files sink."""
    parsed = ((path, parse_name(path.name)) for path in folder.glob("*"))
    return [(path.stat().st_mtime, name.epoch) for path, name in parsed if name]


def longest_pause(
    files: Iterable[tuple[float, int]], since_s: float, until_s: float, epoch_s: float
) -> float:
    """The longest time without a file between `since_s` and `until_s`, minus the normal time of
    epochs without rows. An epoch is written with the last file of its partitions; after the last of
    all epochs there is no pause."""
    at_s: dict[int, float] = {}
    for time_s, epoch in files:
        at_s[epoch] = max(time_s, at_s.get(epoch, time_s))
    pauses = [
        at_s[b] - at_s[a] - (b - a - 1) * epoch_s
        for a, b in itertools.pairwise(sorted(at_s))
        if at_s[b] > since_s and at_s[a] < until_s
    ]
    return max(pauses, default=0.0)
