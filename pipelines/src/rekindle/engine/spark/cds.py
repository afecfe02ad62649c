"""AppCDS: the JVM's classes, parsed and verified once at image build (recipes: 8.0 s -> 3.8 s).

`python -m rekindle.engine.spark.cds OUT.jsa` runs a small topology through a session and archives
what it loaded. An archive serves the same JVM, flags and class path only; beside it stands a key of
these, because the JVM itself would ignore an archive that does not fit without a word.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rekindle.engine.spark.jvm import JvmSpec

log = logging.getLogger(__name__)

DUMP_TIMEOUT_S = 300.0
"""Writing the archive takes 15 s on a quiet machine, at the JVM's exit."""


def key_of(spec: JvmSpec) -> str:
    """Hash of what the JVM compares: itself, its flags, and its jars by name, size and time."""
    parts = [_stamp(spec.java), _stamp(_libjvm(spec.java)), *spec.flags, *map(_stamp, spec.jars)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path} {stat.st_size} {int(stat.st_mtime)}"


def _libjvm(java: Path) -> Path:
    library = java.parent.parent / "lib" / "server" / "libjvm.so"
    return library if library.exists() else java


def key_file(archive: Path) -> Path:
    return archive.with_name(archive.name + ".key")


def flags_for(spec: JvmSpec, archive: Path | None) -> tuple[str, ...]:
    """JVM flags that use `archive`, or none, with a warning that says why."""
    if archive is None:
        return ()
    try:
        key = json.loads(key_file(archive).read_text())["key"]
        fits = archive.exists() and key == key_of(spec)
    except (OSError, ValueError, KeyError):
        fits = False
    if fits:
        return (f"-XX:SharedArchiveFile={archive}", "-Xshare:auto")
    log.warning(
        "AppCDS archive %s is missing or was made for another JVM, flags or class path; "
        "Spark starts slower. Make it with: python -m rekindle.engine.spark.cds %s",
        archive,
        archive,
    )
    return ()


def make_archive(archive: Path) -> None:
    """Train in a JVM of its own and write the archive and its key."""
    from rekindle.engine.spark import session, training
    from rekindle.engine.spark.jvm import launch

    archive = archive.resolve()
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="rekindle-cds-"))
    spec = session.jvm_spec()
    session.adopt(
        launch(
            spec,
            directory=directory,
            archive_flags=(f"-XX:ArchiveClassesAtExit={archive}", "-Xlog:cds=error"),
            environment={"SPARK_LOCAL_IP": "127.0.0.1"},
        )
    )
    spark = session.start_session("training", data_dir=directory)
    training.train(spark)
    session.stop_session(spark, timeout_s=DUMP_TIMEOUT_S)
    shutil.rmtree(directory, ignore_errors=True)
    if not archive.exists():
        raise SystemExit(f"the JVM wrote no archive to {archive}")
    _check_usable(spec, archive)
    write_key(spec, archive)


def write_key(spec: JvmSpec, archive: Path) -> None:
    key_file(archive).write_text(json.dumps({"key": key_of(spec)}))


def _check_usable(spec: JvmSpec, archive: Path) -> None:
    """`-Xshare:on` makes a JVM refuse to start over an archive that does not fit."""
    flags = (*spec.flags, "-Xshare:on", f"-XX:SharedArchiveFile={archive}")
    command = [str(spec.java), *flags, "-cp", spec.class_path, "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the JVM refuses the archive {archive}: {done.stderr or done.stdout}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="e.g. /opt/rekindle/spark.jsa")
    make_archive(parser.parse_args(arguments).archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
