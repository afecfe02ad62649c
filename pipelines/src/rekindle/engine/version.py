"""Which engine computed something, and how its state is laid out.

Equal results on all replicas are promised for one engine: the same rules here, the same Spark, the
same Arrow, the same time zones. Results of different ones may differ, so they carry the version,
and are not compared.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

ENGINE = 3
"""Raised when the same input and state may give other bits than in the release before."""
STATE_FORMAT = 2
"""Raised when the meaning of a column of saved state changes while its name stays."""

_PARTS = {"spark": "pyspark", "arrow": "pyarrow", "tzdata": "tzdata"}


@cache
def engine_version() -> str:
    """Of this process. Imports neither Spark nor Arrow."""
    parts = (f"{part}{_installed(package)}" for part, package in _PARTS.items())
    return "+".join([str(ENGINE), *parts])


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
