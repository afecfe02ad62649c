"""A Java runtime for Spark: found, or installed if possible.

Spark runs on 17 and 21.  A version is read from the runtime's `release` file,
which every JDK since 9 has, so that nothing is started to find it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.progress import OnProgress, no_progress

SUITABLE = (17, 21)

_JVM_DIRECTORY = Path("/usr/lib/jvm")


class JavaError(EmbeddedError):
    """There is no suitable Java and none could be installed."""


def ensure_java(
    on_progress: OnProgress = no_progress, environment: Mapping[str, str] | None = None
) -> Path:
    """JAVA_HOME of a Java 17 or 21; installs Debian's as root where there is none."""
    environment = os.environ if environment is None else environment
    found = find_java(environment)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        _install(on_progress)
        found = find_java(environment)
    if found is None:
        raise JavaError(
            "Spark needs a Java 17 or 21, and none is at JAVA_HOME, on PATH or in "
            f"{_JVM_DIRECTORY}: install one (Debian: openjdk-17-jre-headless) or set JAVA_HOME"
        )
    return found


def find_java(environment: Mapping[str, str], jvm_directory: Path = _JVM_DIRECTORY) -> Path | None:
    """The first suitable home: JAVA_HOME, then PATH, then the system's directory."""
    homes = _homes(environment, jvm_directory)
    return next((home for home in homes if java_version(home) in SUITABLE), None)


def java_version(home: Path) -> int:
    """The major version of the Java at `home`; 0 if there is no Java."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return 0
    try:
        release = (home / "release").read_text()
    except OSError:
        return 0
    found = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
    return int(found[1]) if found else 0


def _homes(environment: Mapping[str, str], jvm_directory: Path) -> Iterator[Path]:
    if home := environment.get("JAVA_HOME"):
        yield Path(home)
    if program := shutil.which("java", path=environment.get("PATH", "")):
        # Distributions put a link on PATH; the home is where it leads.
        yield Path(program).resolve().parent.parent
    if jvm_directory.is_dir():
        yield from sorted(jvm_directory.iterdir())


def _install(on_progress: OnProgress) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    quiet = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    subprocess.run([*quiet, "update"], env=environment, capture_output=True, timeout=600)
    for version in SUITABLE:
        package = f"openjdk-{version}-jre-headless"
        on_progress(f"installing {package}")
        install = [*quiet, "install", "-y", "--no-install-recommends", package]
        done = subprocess.run(install, env=environment, capture_output=True, timeout=1800)
        if done.returncode == 0:
            return
