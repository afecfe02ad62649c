"""A listener at a real stream server: all kinds of output arrive, in order, each once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rekindle.identity import Identity
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle_testing.harness.stream_listener import StreamListener
from rekindle_testing.waiting import eventually

IDENTITY = Identity("uid-1", "token")
ROWS = pa.table({"n": [1, 2, 3]})


class Upstream:
    def __init__(self, directory: Path, *, live: bool) -> None:
        self.log = OutputLog(directory / "log", "s", 0, ROWS.schema)
        self.log.start_at(0)
        self.output = LiveOutput(self.log, directory / "tentative", "boot") if live else None
        self.server = StreamServer("127.0.0.1", 0, IDENTITY)
        self.server.serve_log(self.log, output=self.output)

    def listener(self, from_epoch: int) -> StreamListener:
        return StreamListener(f"127.0.0.1:{self.server.port}", "s", IDENTITY, from_epoch)

    def append(self, *epochs: int) -> None:
        for epoch in epochs:
            self.log.append(EpochBatch("s", 0, epoch, epoch, ROWS, digest_table(ROWS)))


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener ends after the call that waits for the next epoch."""
    monkeypatch.setattr("rekindle_testing.harness.stream_listener._WAIT_S", 0.1)


@pytest.fixture(params=[True, False], ids=["finite maxDelay", "infinite maxDelay"])
def upstream(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Upstream]:
    made = Upstream(tmp_path, live=request.param)
    yield made
    made.server.stop()


def seen(listener: StreamListener) -> list[tuple[str, int]]:
    return [(a.kind.value, a.epoch) for a in listener.arrivals]


def test_stable_epochs_arrive_once_from_the_first_one_asked_for(upstream: Upstream) -> None:
    upstream.append(0, 1, 2)
    with upstream.listener(1) as listener:
        eventually(lambda: len(seen(listener)) == 2)
        upstream.append(3)
        eventually(lambda: len(seen(listener)) == 3)
    assert seen(listener) == [("STABLE", 1), ("STABLE", 2), ("STABLE", 3)]
    assert {a.rows for a in listener.arrivals} == {3}


def test_a_failure_and_its_corrections_arrive_in_order(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path, live=True)
    output = upstream.output
    assert output is not None
    upstream.append(0)
    with upstream.listener(0) as listener:
        eventually(lambda: seen(listener) == [("STABLE", 0)])
        attempt = 1
        for epoch in (1, 2):
            output.append(attempt, epoch, epoch, ROWS)
        eventually(lambda: len(seen(listener)) == 3)
        output.undo(1)
        upstream.append(1, 2)
        output.reconciliation_done(2)
        upstream.append(3)
        eventually(lambda: ("STABLE", 3) in seen(listener))
    upstream.server.stop()
    undo, done = (BatchKind.UNDO.value, 1), (BatchKind.RECONCILIATION_DONE.value, 2)
    tentative = [(BatchKind.TENTATIVE.value, 1), (BatchKind.TENTATIVE.value, 2)]
    stable = [("STABLE", 1), ("STABLE", 2)]
    assert seen(listener) == [("STABLE", 0), *tentative, undo, *stable, done, ("STABLE", 3)]


def test_epochs_that_are_truncated_are_passed_over(upstream: Upstream) -> None:
    upstream.append(*range(5))
    upstream.log.start_at(3, keep=False)
    upstream.append(3, 4)
    with upstream.listener(1) as listener:
        eventually(lambda: len(seen(listener)) == 2)
    assert seen(listener) == [("STABLE", 3), ("STABLE", 4)]
