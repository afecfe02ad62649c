"""The AppCDS archive of the Spark JVM in the user's cache, which all process nodes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rekindle.directories import cache_root
from rekindle_testing.progress import OnProgress


def ensure_cds_archive(java_home: Path, on_progress: OnProgress) -> Path:
    """Path of the archive for this JDK and Spark; creates it (about 30 s) if there is none."""
    on_progress("looking for the AppCDS archive of Spark's JVM, or creating it (30 s, once)")
    # In its own process, with another JDK than this environment's.
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "rekindle.engine.spark.archive_cache",
            str(cache_root(os.environ) / "appcds"),
        ],
        env={**os.environ, "JAVA_HOME": str(java_home)},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr[-2000:])
    return Path(finished.stdout.strip())
