"""Reading tentative results over HTTP: what is served, to whom, and in which order."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_parts import ADDRESS, IDENTITY, batch, make_log
from reader_parts import read_once

from rekindle.exchange.routing import Share
from rekindle.protocol import ConsistencyState, Endpoint
from rekindle.streams.epochs import BatchKind
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import (
    LivePosition,
    LiveReport,
    ReadRequest,
    ReadResponse,
    ResponseDecoder,
    StreamProgress,
    StreamUnavailable,
    epoch_frame,
    first_frame,
    live_fields,
)


class LiveServer:
    """A task whose output may be tentative, and its server."""

    def __init__(self, directory: Path) -> None:
        self.log = make_log(directory)
        self.output = LiveOutput(self.log, directory / "tentative", "boot")
        self.server = StreamServer(ADDRESS, 0, IDENTITY)
        self.server.serve_log(self.log, output=self.output)

    def stable(self, *epochs: int) -> None:
        for epoch in epochs:
            self.log.append(batch(epoch))

    def tentative(self, *epochs: int, rows: int = 2, attempt: int = 1) -> None:
        for epoch in epochs:
            self.output.append(attempt, epoch, epoch, batch(epoch, rows=rows).rows)

    def request(
        self,
        from_epoch: int,
        live: LivePosition | None = None,
        share: Share | None = None,
        wait_s: float = 0.0,
        max_bytes: int = 1 << 20,
    ) -> ReadResponse:
        request = ReadRequest("s", 0, from_epoch, max_bytes, wait_s, share, live=live)
        return read_once(f"{ADDRESS}:{self.server.port}", request, 10, IDENTITY)

    def live(self, from_epoch: int, **options: object) -> ReadResponse:
        return self.request(from_epoch, LivePosition(), **options)  # type: ignore[arg-type]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    made = LiveServer(tmp_path)
    yield made
    made.server.stop()


def kinds(response: ReadResponse) -> list[tuple[str, int, int]]:
    return [(str(b.kind), b.epoch, b.attempt) for b in response.epochs]


def correct(live: LiveServer) -> None:
    """Two stable epochs; two tentative ones that are corrected; another stable one."""
    live.stable(0, 1)
    live.tentative(2, 3)
    live.output.undo(2)
    live.stable(2, 3)
    live.output.reconciliation_done(3)
    live.stable(4)


def test_a_reader_of_stable_epochs_gets_no_others(live: LiveServer) -> None:
    live.stable(0)
    live.tentative(1, 2)
    assert kinds(live.request(0)) == [("STABLE", 0, 0)]
    assert live.request(0).progress.live == LiveReport(
        "boot", ConsistencyState.STABLE, newest_tentative=2, corrected_through=-1
    )


def test_a_live_reader_gets_tentative_epochs_too(live: LiveServer) -> None:
    live.stable(0)
    live.tentative(1, 2)
    response = live.live(0)
    assert kinds(response) == [("STABLE", 0, 0), ("TENTATIVE", 1, 1), ("TENTATIVE", 2, 1)]
    assert [len(b.rows) for b in response.epochs] == [3, 2, 2]
    assert response.live == LivePosition("boot", span=1, epoch=3)


def test_the_next_call_goes_on_where_one_ended(live: LiveServer) -> None:
    live.stable(0)
    live.tentative(1)
    before = live.live(1)
    live.output.undo(1)
    live.stable(1, 2)
    live.output.reconciliation_done(2)
    live.stable(3)
    after = live.request(1, before.live)
    assert kinds(after) == [
        ("UNDO", 1, 0),
        ("STABLE", 1, 0),
        ("STABLE", 2, 0),
        ("REC_DONE", 2, 0),
        ("STABLE", 3, 0),
    ]
    assert live.request(4, after.live).epochs == ()


def test_a_call_ends_within_its_bytes_and_goes_on(live: LiveServer) -> None:
    live.stable(0)
    live.tentative(*range(1, 40), rows=200)
    got, at, calls = list[int](), LivePosition(), 0
    while got[-1:] != [39]:
        response = live.request(got[-1] if got else 0, at, max_bytes=8_000)
        assert response.live is not None
        got += [b.epoch for b in response.epochs]
        at, calls = response.live, calls + 1
    assert got == list(range(40))
    assert calls > 5


def test_a_restarted_task_begins_again(live: LiveServer) -> None:
    correct(live)
    response = live.request(3, LivePosition("another boot", span=70, epoch=9))
    assert kinds(response) == [("STABLE", 3, 0), ("REC_DONE", 3, 0), ("STABLE", 4, 0)]


def test_shares_of_a_tentative_epoch_are_its_own(live: LiveServer) -> None:
    """Not those of another attempt, nor of the stable epoch."""
    shares = [Share(("n",), 2, index) for index in (0, 1)]
    live.stable(0)
    live.tentative(1, rows=40)
    before = [live.live(1, share=share) for share in shares]
    live.output.undo(1)
    live.output.reconciliation_done(0)
    live.tentative(1, rows=50, attempt=2)
    position = before[0].live
    after = [live.request(1, position, share) for share in shares]
    live.stable(1)
    stable = [live.request(1, share=share) for share in shares]
    rows = [
        sum(len(b.rows) for response in responses for b in response.epochs)
        for responses in (before, after, stable)
    ]
    assert rows == [40, 50, 3]
    assert kinds(after[0])[-1] == ("TENTATIVE", 1, 2)


def test_a_waiting_live_call_returns_with_a_tentative_epoch(live: LiveServer) -> None:
    live.stable(0)
    timer = threading.Timer(0.1, live.tentative, [1])
    timer.start()
    began = time.monotonic()
    assert kinds(live.live(1, wait_s=1.0)) == [("TENTATIVE", 1, 1)]
    assert time.monotonic() - began < 0.9


def test_a_waiting_reader_of_stable_epochs_hears_of_tentative_ones(live: LiveServer) -> None:
    """At once: it has to begin to read them."""
    live.stable(0)
    timer = threading.Timer(0.1, live.tentative, [1])
    timer.start()
    began = time.monotonic()
    response = live.request(1, wait_s=1.0)
    assert response.epochs == ()
    assert response.progress.live is not None
    assert response.progress.live.newest_tentative == 1
    assert time.monotonic() - began < 0.9


def test_a_task_without_tentative_output_responds_to_live_calls(tmp_path: Path) -> None:
    log, server = make_log(tmp_path), StreamServer(ADDRESS, 0, IDENTITY)
    server.serve_log(log)
    log.append(batch(0))
    request = ReadRequest("s", 0, 0, 1 << 20, live=LivePosition())
    response = read_once(f"{ADDRESS}:{server.port}", request, 10, IDENTITY)
    server.stop()
    assert (kinds(response), response.live) == ([("STABLE", 0, 0)], None)
    assert response.progress.live is None


def test_messages_without_tentative_output_have_no_new_fields(live: LiveServer) -> None:
    """Readers of older releases do not know them."""
    assert "live" not in ReadRequest("s", 0, 0, 1).message(IDENTITY)
    assert StreamProgress(base=0, last=4, head=5).header() == {"base": 0, "last": 4, "released": 5}
    header = json.loads(epoch_frame(3, 7, "d", None, 0)[8:])
    assert header == {"epoch": 3, "watermark": 7, "digest": "d"}
    idle = json.loads(epoch_frame(3, 7, "d", None, 0, idle=True)[8:])
    assert idle == {**header, "idle": True}


def test_a_tentative_epoch_that_was_not_requested_is_refused() -> None:
    log_schema = batch(0).rows.schema.serialize()
    decoder = ResponseDecoder(
        ReadRequest("s", 0, 3, 1 << 20), IDENTITY, "1.2.3.4:5", lambda epoch, size: None
    )
    from rekindle.streams.wire import MessageIdentity

    decoder.feed(first_frame(MessageIdentity.of(IDENTITY, 1), StreamProgress(0, 3, 3), log_schema))
    with pytest.raises(StreamUnavailable, match="a TENTATIVE of epoch 3, which was not requested"):
        decoder.feed(epoch_frame(3, 0, "", None, 0, live=live_fields(BatchKind.TENTATIVE, 1, 0)))


def test_a_state_of_a_newer_release_is_taken_as_stable() -> None:
    message = {"boot": "b", "state": "HALF_STABLE", "tentative": 4, "corrected": 2}
    assert LiveReport.of(message) == LiveReport(
        "b", ConsistencyState.STABLE, newest_tentative=4, corrected_through=2
    )
    endpoint = {"address": "a:1", "replica": 0, "incarnation": 1, "state": "HALF_STABLE"}
    assert Endpoint.model_validate(endpoint).state is ConsistencyState.STABLE
    with pytest.raises(ValueError, match="4"):
        LiveReport.of(message | {"state": 4})


def test_a_damaged_branch_costs_only_the_epochs_of_its_file(
    live: LiveServer, tmp_path: Path
) -> None:
    """Nobody computes them again; those after them are read and written."""
    live.stable(0, 1)
    live.tentative(2, 3)
    flip(tmp_path / "tentative" / "1" / "000000000002.log", 100)
    assert kinds(live.live(2)) == []
    live.tentative(4)
    assert kinds(live.live(2)) == [("TENTATIVE", 4, 1)]
    live.output.undo(2)
    live.stable(2)
    after = live.request(4, LivePosition("boot", span=1, epoch=5))
    assert kinds(after) == [("UNDO", 2, 0)]
    assert live.log.damage is None


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
