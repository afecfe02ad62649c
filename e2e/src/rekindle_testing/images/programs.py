"""Runs programs and ends them: none outlives this process, however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rekindle_testing.embedded.process_node import syscalls
from rekindle_testing.images.errors import ImageError
from rekindle_testing.progress import OnProgress

_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class CompletedProgram:
    """`output`: stdout and stderr together."""

    exit_code: int
    output: str
    seconds: float


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> CompletedProgram:
    """Raises ImageError if the program is missing or does not end in time. `output`: a file that is
    read and written, which takes what the program prints while it runs."""
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
    except OSError as error:
        raise ImageError(f"cannot start {command[0]}: {error}") from error
    with process:
        try:
            text, _ = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            shown = " ".join(command[:12])
            raise ImageError(f"did not end within {timeout_s:.0f} s: {shown} ...") from None
        except BaseException:
            _end(process)
            raise
    if output is not None:
        output.seek(0)
        text = output.read().decode(errors="replace")
    return CompletedProgram(process.returncode, text, time.monotonic() - began)


def run_or_fail(
    what: str,
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> CompletedProgram:
    """As `run`; its output goes to the log, and an exit code other than 0 is an ImageError."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w+b") as file:
        done = run(command, timeout_s=timeout_s, environment=environment, output=file)
    if done.exit_code:
        last = "\n".join(done.output.splitlines()[-20:])
        raise ImageError(f"{what} failed with exit code {done.exit_code}:\n{last}\nSee {log}")
    return done


def works(command: Sequence[str]) -> bool:
    """Whether the program is installed, and ends in time with exit code 0."""
    if shutil.which(command[0]) is None:
        return False
    try:
        return run(command, timeout_s=20).exit_code == 0
    except ImageError:
        return False


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: Sequence[str], on_progress: OnProgress, log: Path) -> None:
    """With apt-get, as root."""
    on_progress(f"installing {', '.join(packages)}")
    quiet = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run([*quiet, "update"], timeout_s=600, environment=environment)
    command = [*quiet, "install", "-y", "--no-install-recommends", *packages]
    what = f"installing {', '.join(packages)}"
    run_or_fail(what, command, log, timeout_s=1800, environment=environment)


def _die_with_us() -> None:
    syscalls.die_with_parent(signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM to its group, which clients of a container engine pass on, then SIGKILL."""
    for number, timeout_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
            return
