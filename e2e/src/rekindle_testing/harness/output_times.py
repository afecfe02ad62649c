"""When the rows of a query's output were written, by the files of its sink: pauses, latencies,
rates.

A file of a `files` sink appears once, whole, and is never written again, so its time of
modification is when its rows became stable. Times are seconds since 1970. Pure but for
`written_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from rekindle.connectors.files_sink import parse_name


@dataclass(frozen=True, slots=True, order=True)
class WrittenFile:
    """The rows of one epoch of one partition, and when they were written."""

    at_s: float
    epoch: int
    partition: int
    rows: int


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p99: float
    worst: float


def written_files(folder: Path) -> list[WrittenFile]:
    """The Parquet files of a sink, in the order of their times."""
    found = []
    for path in folder.glob("*.parquet"):
        if (name := parse_name(path.name)) is not None:
            rows = pq.read_metadata(path).num_rows
            found.append(WrittenFile(path.stat().st_mtime, name.epoch, name.partition, rows))
    return sorted(found)


def completed_at(files: Iterable[WrittenFile]) -> dict[int, float]:
    """Epoch -> when the last of its partitions was written."""
    at_s: dict[int, float] = {}
    for file in files:
        at_s[file.epoch] = max(file.at_s, at_s.get(file.epoch, file.at_s))
    return at_s


def latencies(
    files: Iterable[WrittenFile], origin_s: float, epoch_s: float, since_s: float, until_s: float
) -> list[float]:
    """Seconds from the end of each epoch that ends between `since_s` and `until_s` until all its
    partitions were written; epoch 0 begins at `origin_s`."""
    ends = ((origin_s + (epoch + 1) * epoch_s, at) for epoch, at in completed_at(files).items())
    return [at - end for end, at in sorted(ends) if since_s <= end < until_s]


def intervals(files: Iterable[WrittenFile], since_s: float, until_s: float) -> list[float]:
    """Seconds from the completion of each epoch to that of the next, for those intervals that
    overlap the time between `since_s` and `until_s`."""
    at_s = [at for _, at in sorted(completed_at(files).items())]
    return [b - a for a, b in pairwise(at_s) if b > since_s and a < until_s]


def rows_per_s(
    files: Iterable[WrittenFile], since_s: float, until_s: float, bin_s: float
) -> list[float]:
    """The rate in each of the bins of `bin_s` between the two times; the last may end later."""
    rows = [0] * max(0, int(np.ceil(round((until_s - since_s) / bin_s, 6))))
    for file in files:
        number = int((file.at_s - since_s) // bin_s)
        if 0 <= number < len(rows):
            rows[number] += file.rows
    return [count / bin_s for count in rows]


def percentiles(values: Sequence[float]) -> Percentiles:
    """Each percentile is one of `values` (not empty): the smallest one that at least this share of
    the values does not exceed."""
    p50, p99 = np.percentile(values, [50, 99], method="inverted_cdf")
    return Percentiles(float(p50), float(p99), max(values))
