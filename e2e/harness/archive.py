"""The AppCDS archive of the Spark JVM, made once per JDK, flags and Spark version into the cache.

Images make theirs when they are built; process nodes share this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from embedded.cache import cache_root
from rekindle.engine.spark.cds import key_file

_KEY = "from rekindle.engine.spark import cds, session; print(cds.key_of(session.jvm_spec()))"


def ensure_cds_archive(java_home: Path, report: Callable[[str], None]) -> Path:
    """Path of the archive that fits this JDK and Spark; trains one (about 30 s) if there is none.

    The name carries what the JVM compares, so that a change of flags makes a new archive.
    """
    environment = {**os.environ, "JAVA_HOME": str(java_home)}
    asked = subprocess.run(
        [sys.executable, "-c", _KEY], env=environment, check=True, capture_output=True, text=True
    )
    archive = cache_root(os.environ) / "appcds" / f"spark-{asked.stdout.strip()[:16]}.jsa"
    # The key is written last: an archive without one is what an interrupted training left.
    key = key_file(archive)
    if archive.exists() and key.exists():
        return archive
    key.unlink(missing_ok=True)
    report("training the AppCDS archive of Spark's JVM")
    archive.parent.mkdir(parents=True, exist_ok=True)
    trained = subprocess.run(
        [sys.executable, "-m", "rekindle.engine.spark.training", str(archive)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if trained.returncode:
        raise RuntimeError(f"no AppCDS archive could be made:\n{trained.stderr[-2000:]}")
    return archive
