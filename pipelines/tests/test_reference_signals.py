"""A run that is terminated by a signal leaves no files, processes or traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ENDLESS = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: endless}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: a
    schema: "k BIGINT, t TIMESTAMP"
    eventTime: {column: t}
    generator: {rowsPerSecond: 1000, columns: {k: sequence, t: timestamp}}
  operators:
OPERATORS
  queries:
  - {name: q, from: LAST, sink: {files: {url: "file:///unused"}}}
"""
PLAIN = ENDLESS.replace("  operators:\nOPERATORS\n", "").replace("LAST", "a")
FILTERED = ENDLESS.replace(
    "OPERATORS", '  - {name: o, inputs: [a], sql: "SELECT k FROM a WHERE k > 1"}'
).replace("LAST", "o")


class Run:
    """`rekindle run` as a process, with its own temporary directory."""

    def __init__(self, directory: Path, manifest: str) -> None:
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        file = directory / "topology.yaml"
        file.write_text(manifest)
        self._out = (directory / "out.txt").open("wb+")
        command = [sys.executable, "-m", "rekindle.cli", "run", str(file), "--until-epoch"]
        self.process = subprocess.Popen(
            [*command, "999999999", "--output", str(directory / "output")],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )
        self._children: list[psutil.Process] = []

    def output(self) -> str:
        return Path(self._out.name).read_text()

    def children(self) -> list[psutil.Process]:
        """All child processes so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._children += [c for c in found if c not in self._children]
        return self._children

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            self.children()
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def require_clean_end(self, number: signal.Signals) -> None:
        assert self.process.wait(60) == 128 + number, self.output()
        assert not list(self.temporary.iterdir())
        assert not [c for c in self.children() if c.is_running()]
        assert "Traceback" not in self.output()
        assert self.output().splitlines()[-1] == f"rekindle: terminated by {number.name}"

    def close(self) -> None:
        self.children()
        self.process.kill()
        self.process.wait()
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._out.close()


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Under nohup, the runs would inherit that SIGHUP is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    with contextlib.ExitStack() as stack:

        def started(manifest: str) -> Run:
            run = Run(tmp_path, manifest)
            stack.callback(run.close)
            return run

        yield started


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_without_leftovers(
    start: Callable[[str], Run], number: signal.Signals
) -> None:
    run = start(PLAIN)
    run.wait_for(lambda: "epoch " in run.output())
    assert list(run.temporary.iterdir())
    run.process.send_signal(number)
    run.require_clean_end(number)


@pytest.mark.spark
@pytest.mark.usefixtures("cds_archive")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_its_jvm(
    start: Callable[[str], Run], number: signal.Signals
) -> None:
    """The JVM handles SIGTERM, and ignores SIGINT, as SIGHUP (`test_engine_jvm`)."""
    run = start(FILTERED)
    run.wait_for(lambda: "epoch " in run.output())
    assert run.children()
    os.killpg(run.process.pid, number)  # as a terminal or a supervisor does
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, number)  # a user presses Ctrl-C again
    run.require_clean_end(number)


@pytest.mark.spark
def test_a_signal_ends_a_run_whose_jvm_starts(start: Callable[[str], Run]) -> None:
    run = start(FILTERED)
    run.wait_for(lambda: [c for c in run.children() if "java" in c.name()])
    run.process.send_signal(signal.SIGTERM)
    run.require_clean_end(signal.SIGTERM)
