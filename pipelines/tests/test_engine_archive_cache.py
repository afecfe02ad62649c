"""Archives of Spark's classes in a directory: complete, created on demand, removed if unused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.directories import cache_root, state_root
from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.spark import archive_cache, session
from rekindle.engine.spark.jvm import JvmSpec
from rekindle_testing.waiting import eventually

NOW = 1_800_000_000.0
MONTH_S = 31 * 86400


class Training:
    """Replaces the process that creates an archive."""

    def __init__(self) -> None:
        self.made: list[Path] = []
        self.fails = False

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if self.fails:
            return subprocess.CompletedProcess(command, 1, stderr="no room")
        archive = Path(command[-1])
        self.made.append(archive)
        make(archive)
        return subprocess.CompletedProcess(command, 0)


def make(archive: Path) -> None:
    archive.touch()
    archive.with_name(archive.name + ".key").touch()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    java = tmp_path / "java"
    java.touch()
    training = Training()
    monkeypatch.setattr(session, "jvm_spec", lambda: JvmSpec(java, ()))
    monkeypatch.setattr(subprocess, "run", training.run)
    return training


def test_an_archive_is_made_once(tmp_path: Path, training: Training) -> None:
    first = archive_cache.ensure_archive(tmp_path / "cache")
    assert archive_cache.ensure_archive(tmp_path / "cache") == first
    assert training.made == [first]


def test_an_interrupted_archive_is_created_again(tmp_path: Path, training: Training) -> None:
    first = archive_cache.ensure_archive(tmp_path)
    first.with_name(first.name + ".key").unlink()
    assert archive_cache.ensure_archive(tmp_path) == first
    assert training.made == [first, first]


def test_a_failed_training_is_reported(tmp_path: Path, training: Training) -> None:
    training.fails = True
    with pytest.raises(EngineUnavailable, match="no room"):
        archive_cache.ensure_archive(tmp_path)


def test_a_failed_training_is_one_message_without_a_trace(
    tmp_path: Path,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training.fails = True
    monkeypatch.setattr(sys, "argv", ["archive_cache", str(tmp_path)])
    assert archive_cache.main() == 1
    assert capsys.readouterr().err == "the AppCDS archive could not be created: no room\n"


def test_no_archive_is_used_before_it_is_made(tmp_path: Path, training: Training) -> None:
    spec = session.jvm_spec()
    assert archive_cache.cached_archive(tmp_path, spec) is None
    made = archive_cache.ensure_archive(tmp_path)
    assert archive_cache.cached_archive(tmp_path, spec) == made


def test_a_jvm_without_a_possible_archive_starts(tmp_path: Path, training: Training) -> None:
    spec = session.jvm_spec()
    wildcard = replace(spec, jars=(tmp_path / "*",))
    assert archive_cache.cached_archive(tmp_path, wildcard) is None
    assert archive_cache.cached_archive(tmp_path, replace(spec, heap="2gb")) is None  # no size


def test_unused_archives_are_removed_after_a_month(tmp_path: Path) -> None:
    old, used = tmp_path / "spark-0a.jsa", tmp_path / "spark-0b.jsa"
    for archive, age_s in ((old, MONTH_S), (used, 86400)):
        make(archive)
        os.utime(archive, (NOW - MONTH_S, NOW - MONTH_S))
        os.utime(archive.with_name(archive.name + ".key"), (NOW - age_s, NOW - age_s))
    (tmp_path / "spark-0a.jsa.jars").mkdir()
    (tmp_path / "spark-0a.jsa.jars/a.jar").touch()
    archive_cache.remove_unused(tmp_path, NOW)
    assert [p.name for p in tmp_path.glob("spark-0a.*")] == []
    assert used.exists()


def test_an_archive_that_is_being_made_is_not_removed(tmp_path: Path) -> None:
    old = tmp_path / "spark-0a.jsa"
    make(old)
    os.utime(old.with_name(old.name + ".key"), (NOW - MONTH_S, NOW - MONTH_S))
    with archive_cache._locked(old.with_suffix(".lock")):
        archive_cache.remove_unused(tmp_path, NOW)
    assert old.exists()


def test_a_lock_that_was_removed_while_it_was_awaited_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "spark-0a.lock"
    entered: list[str] = []

    def enter() -> None:
        with archive_cache._locked(path):
            entered.append("second")

    waiting = threading.Thread(target=enter)
    with path.open("a") as removed:
        fcntl.flock(removed, fcntl.LOCK_EX)
        waiting.start()
        eventually(lambda: len(_holders(path)) == 2)
        path.unlink()
        with archive_cache._locked(path):
            removed.close()
            eventually(lambda: len(_holders(path)) == 2)  # it waits for the new file
            assert entered == []
    waiting.join(10)
    assert entered == ["second"]


def _holders(path: Path) -> list[str]:
    """The file descriptors of this process that have it open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += [descriptor.name] if descriptor.samefile(path) else []
    return found


@pytest.mark.process
def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    """Neither the training run nor its JVM, which here does not end with its standard input."""
    java, pid_file = tmp_path / "jdk/bin/java", tmp_path / "pid"
    (tmp_path / "jdk/lib").mkdir(parents=True)
    (tmp_path / "jdk/lib/modules").touch()
    java.parent.mkdir(parents=True)
    lines = (
        "#!/bin/sh",
        f'echo "$$ $PPID" > {pid_file}.tmp',
        f"mv {pid_file}.tmp {pid_file}",
        "exec sleep 600",
    )
    java.write_text("\n".join(lines))
    java.chmod(0o755)
    command = [sys.executable, "-m", "rekindle.engine.spark.archive_cache", str(tmp_path / "cache")]
    caller = subprocess.Popen(command, env={**os.environ, "JAVA_HOME": str(tmp_path / "jdk")})
    pids: list[int] = []
    try:
        eventually(pid_file.exists, 60)
        pids = [int(text) for text in pid_file.read_text().split()]
        caller.kill()
        caller.wait()
        eventually(lambda: not any(map(_runs, pids)), 10)
    finally:
        caller.kill()
        caller.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_directories_follow_the_xdg_specification() -> None:
    home = {"HOME": "/home/u"}
    assert cache_root(home) == Path("/home/u/.cache/rekindle")
    assert cache_root({**home, "XDG_CACHE_HOME": "/x"}) == Path("/x/rekindle")
    assert cache_root({**home, "XDG_CACHE_HOME": "/x", "REKINDLE_CACHE": "/own"}) == Path("/own")
    assert state_root(home) == Path("/home/u/.local/state/rekindle")
    assert state_root({**home, "XDG_STATE_HOME": "/x"}) == Path("/x/rekindle")
    assert state_root({**home, "XDG_STATE_HOME": "relative"}) == state_root(home)
