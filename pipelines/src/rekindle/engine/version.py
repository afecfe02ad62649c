"""The version of the engine and of its state format.

Replicas have equal results if they run the same engine: this code, Spark, Arrow and time zones.
Results of different engines may differ, so reports of results contain the version, and results of
different versions are not compared.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

ENGINE = 7
"""Incremented when the same input and state may give other bits than in the previous release."""
STATE_FORMAT = 4
"""Incremented when the meaning of a column of saved state changes, but not its name, and when
earlier releases would read what is new as something else."""
READABLE_STATE_FORMATS = (3, STATE_FORMAT)
"""Format 3 has no deltas with values."""

_PARTS = {"spark": "pyspark", "arrow": "pyarrow", "tzdata": "tzdata"}


@cache
def engine_version() -> str:
    """The engine version of this process. Imports neither Spark nor Arrow."""
    parts = (f"{part}{_installed(package)}" for part, package in _PARTS.items())
    return "+".join([str(ENGINE), *parts])


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
