"""Which engine computed something, and how its state is laid out.

Equal results on all replicas are promised for one engine: the same rules here, the same Spark, the
same Arrow. Results of different ones may differ, so they carry the version, and are not compared.

Design: docs/design/determinism.md#sources-of-difference.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

ENGINE = 2
"""Raised when the same input and state may give other bits than in the release before."""
STATE_FORMAT = 2
"""Raised when the meaning of a column of saved state changes while its name stays."""


@cache
def engine_version() -> str:
    """Of this process. Imports neither Spark nor Arrow."""
    return f"{ENGINE}+spark{_installed('pyspark')}+arrow{_installed('pyarrow')}"


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"
