"""Shared by tests on Spark: the archive that halves the start time of its JVMs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.directories import cache_root


@pytest.fixture(scope="session")
def cds_archive() -> Path:
    """In the user's cache, created once (about 30 s) for a JVM and its jars."""
    from rekindle.engine.spark.archive_cache import ensure_archive

    return ensure_archive(cache_root(os.environ) / "appcds")
