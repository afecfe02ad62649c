"""The JVM of this process: its command line, start and exit. No pyspark here.

PySpark starts `spark-submit`, which runs a bash script, a first JVM that prints a command line, and
then the JVM with Spark. Here the command line is built directly (with the flags of Spark's
launcher; a test compares them), which saves a JVM start, fixes the class path for AppCDS, and makes
the JVM a child process whose exit can be observed. PySpark finds it by `PYSPARK_GATEWAY_PORT`.

Design: docs/design/engine.md#jvm.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.spark.time_zones import make_java_home
from rekindle.termination import signals_blocked

log = logging.getLogger(__name__)

MAIN = "org.apache.spark.api.python.PythonGatewayServer"
START_TIMEOUT_S = 120.0

_OPENED_PACKAGES = (
    "java.base/java.lang java.base/java.lang.invoke java.base/java.lang.reflect java.base/java.io"
    " java.base/java.net java.base/java.nio java.base/java.util java.base/java.util.concurrent"
    " java.base/java.util.concurrent.atomic java.base/jdk.internal.ref java.base/sun.nio.ch"
    " java.base/sun.nio.cs java.base/sun.security.action java.base/sun.util.calendar"
    " java.security.jgss/sun.security.krb5"
)
MODULE_FLAGS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "--add-modules=jdk.incubator.vector",
    *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED_PACKAGES.split()),
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dderby.connection.requireAuthentication=false",
)
"""Flags that Spark's launcher passes to every JVM."""

OUR_FLAGS = (
    "-XX:+UseSerialGC",  # one collector thread: the smallest footprint
    "-XX:TieredStopAtLevel=1",  # C1 only: fast after seconds, no memory for C2
    # Keep the rows of an epoch in the young generation, to avoid full collections for them.
    "-XX:SurvivorRatio=2",
    "-XX:TargetSurvivorRatio=90",
    "-XX:+ExitOnOutOfMemoryError",  # exit rather than run on in an undefined state
    "-XX:-UsePerfData",  # no memory-mapped file in /tmp
    # No check of bounds and NULL flags at each value: C1 does not inline them.
    "-Darrow.enable_unsafe_memory_access=true",
    "-Darrow.enable_null_check_for_get=false",
)
_EXCLUDED_JAR_PREFIX = "spark-mllib_"
_PR_SET_PDEATHSIG = 1
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC")


@dataclass(frozen=True, slots=True)
class JvmSpec:
    """All that determines the command line, and so which AppCDS archive matches."""

    java: Path
    jars: tuple[Path, ...]
    heap: str = "512m"
    direct: str = "128m"
    """Limit of the buffers of Arrow and Netty, outside the heap."""
    extra_flags: tuple[str, ...] = ()
    archive_flags: tuple[str, ...] = ()
    """Flags to use or create an archive; the JVM does not compare these."""

    @property
    def flags(self) -> tuple[str, ...]:
        ours: tuple[str, ...] = OUR_FLAGS
        if any(_COLLECTOR.fullmatch(f) for f in self.extra_flags):  # a JVM refuses two collectors
            ours = tuple(f for f in ours if not _COLLECTOR.fullmatch(f))
        return (*self.size_flags, *ours, *MODULE_FLAGS, *self.extra_flags)

    @property
    def size_flags(self) -> tuple[str, ...]:
        return (f"-Xmx{self.heap}", f"-XX:MaxDirectMemorySize={self.direct}")

    @property
    def class_path(self) -> str:
        return os.pathsep.join(str(j) for j in self.jars)


@dataclass(slots=True)
class Jvm:
    """A running JVM and the address of its gateway, the Py4J server that PySpark talks to."""

    spec: JvmSpec
    process: subprocess.Popen[bytes]
    port: int
    secret: str
    stopping: bool = False
    on_exit: Callable[[int], None] | None = None
    _watcher: threading.Thread | None = field(default=None, repr=False)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def watch(self) -> None:
        """Call `on_exit` with the exit status as soon as the JVM exits unexpectedly."""
        self._watcher = threading.Thread(target=self._wait, name="jvm-watcher", daemon=True)
        self._watcher.start()

    def _wait(self) -> None:
        status = self.process.wait()
        if not self.stopping:
            log.error("the JVM died with status %d", status)
            if self.on_exit is not None:
                self.on_exit(status)

    def kill(self) -> None:
        self.stopping = True
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Close the JVM's standard input, whereupon its gateway exits; kill the JVM if it does
        not."""
        self.stopping = True
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def find_java() -> Path:
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if not found or not Path(found).exists():
        raise EngineUnavailable("no java: set JAVA_HOME to a JDK 17 or 21, or put java on the PATH")
    return Path(found).resolve()


def find_jars(spark_home: Path) -> tuple[Path, ...]:
    """Spark's jars, in an order that does not depend on the directory (AppCDS compares it).

    Without MLlib, which registers functions with each session; the Scala reflection for that takes
    half of the time that a session needs to start.
    """
    found = (
        j
        for j in (spark_home / "jars").glob("*.jar")
        if not j.name.startswith(_EXCLUDED_JAR_PREFIX)
    )
    jars = sorted(found, key=lambda j: (_rank(j), j.name))
    if not jars:
        raise EngineUnavailable(f"no Spark jars in {spark_home / 'jars'}: install rekindle[spark]")
    return tuple(jars)


def _rank(jar: Path) -> int:
    # Spark's launcher puts it first on the class path, too.
    return 0 if jar.name.startswith("slf4j-api") else 1


def launch(
    spec: JvmSpec,
    *,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    log_file: Path | None = None,
    ends_with_thread: bool = False,
) -> Jvm:
    """Start the JVM and wait for its gateway. `directory`: for temporary files; `meanwhile` is
    called while the JVM starts; `log_file`: for its output, by default that of this process.
    `ends_with_thread`: the JVM is killed, instead of an orderly exit, if this process is killed; or
    once this thread ends."""
    directory.mkdir(parents=True, exist_ok=True)
    home = make_java_home(spec.java, directory)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        info = Path(scratch) / "gateway"
        process: subprocess.Popen[bytes] | None = None
        try:
            # A signal in the middle of Popen would leave an unknown process.
            with signals_blocked() as mask, _opened_log(log_file) as output:
                process = subprocess.Popen(
                    [
                        str(spec.java),
                        *spec.flags,
                        *spec.archive_flags,
                        f"-Djava.io.tmpdir={directory}",
                        f"-Djava.home={home}",
                        "-cp",
                        spec.class_path,
                        MAIN,
                    ],
                    stdin=subprocess.PIPE,  # the gateway exits when this process does
                    stdout=output,
                    stderr=output,
                    env={
                        **os.environ,
                        **(environment or {}),
                        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info),
                    },
                    preexec_fn=functools.partial(
                        _set_signals, mask, ending_with_parent() if ends_with_thread else None
                    ),
                )
            meanwhile()
            port, secret = _wait_for_gateway(process, info)
        except BaseException:
            if process is not None:
                process.kill()
                process.wait()
            raise
    jvm = Jvm(spec, process, port, secret)
    jvm.watch()
    return jvm


@contextlib.contextmanager
def _opened_log(log_file: Path | None) -> Iterator[IO[bytes] | None]:
    if log_file is None:
        yield None
        return
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        yield output


def ending_with_parent() -> Callable[[], None]:
    """A function to be called in a child process before it executes its program: the kernel kills
    it once the thread that has started it ends, and so if the parent process is killed. Only on
    Linux; elsewhere it does nothing."""
    if sys.platform != "linux":
        return lambda: None
    parent, libc = os.getpid(), ctypes.CDLL(None)  # here: a forked child should not load a library

    def end_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before that
            os._exit(1)

    return end_with_parent


def _set_signals(mask: set[int], end_with_parent: Callable[[], None] | None) -> None:
    """In the JVM's process: ignore the signals of a terminal. The parent process handles them, and
    closes the JVM's input."""
    if end_with_parent is not None:
        end_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _wait_for_gateway(process: subprocess.Popen[bytes], info: Path) -> tuple[int, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not info.exists():
        if process.poll() is not None:
            raise EngineUnavailable(
                f"the JVM ended with status {process.returncode} while starting"
            )
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"the JVM's gateway did not start within {START_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.01)
    data = info.read_bytes()  # the gateway renames it into place: port, length, secret
    port, length = struct.unpack_from(">ii", data)
    return port, data[8 : 8 + length].decode()
