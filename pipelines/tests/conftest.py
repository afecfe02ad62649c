"""What tests on Spark share: the archive from which its JVMs start in half the time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.directories import cache_root


@pytest.fixture(scope="session")
def cds_archive() -> Path:
    """In the user's cache, where it is made once (about 30 s) for a JVM and its jars."""
    from rekindle.engine.spark.archive_cache import ensure_archive

    return ensure_archive(cache_root(os.environ) / "appcds")
