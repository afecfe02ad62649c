"""The AppCDS archive of the Spark JVM, made once per JDK and Spark version into the cache.

Images make theirs when they are built; process nodes share this one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from embedded.cache import cache_root


def ensure_cds_archive(java_home: Path, report: Callable[[str], None]) -> Path:
    """Path of the archive for this JDK and Spark; trains one (about 30 s) when there is none."""
    identity = f"{java_home.resolve()}|{(java_home / 'release').read_text()}|{version('pyspark')}"
    identity += f"|{sys.prefix}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    archive = cache_root(os.environ) / "appcds" / f"spark-{key}.jsa"
    if archive.exists():
        return archive
    report("training the AppCDS archive of Spark's JVM")
    archive.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "rekindle.engine.spark.cds", str(archive)],
        env={**os.environ, "JAVA_HOME": str(java_home)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return archive
