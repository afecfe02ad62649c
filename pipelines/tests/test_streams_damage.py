"""Bytes damaged on disk, in the store or in transit are detected, never served."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_parts import MemorySpill, batch, filled, open_log
from reader_parts import A, FakeClient, Harness, read_once, routes_to

from rekindle.errors import EpochTooLarge, LogCorrupt, ObjectMissing, RekindleError
from rekindle.exchange.routing import Share
from rekindle.identity import Identity
from rekindle.streams import records, response_frames, wire
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import (
    MessageIdentity,
    ReadRequest,
    ReadResponse,
    ResponseDecoder,
    StreamProgress,
    StreamUnavailable,
)
from rekindle.table_memory import memory_bytes
from rekindle_testing.waiting import eventually


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def value_of(path: Path, number: int) -> int:
    """The position of a value in a file; epoch e of `log_parts` has 100 e, 100 e + 1 and so on."""
    return path.read_bytes().index(number.to_bytes(8, "little"))


def test_a_flipped_byte_in_an_open_log_is_not_served(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    (path,) = tmp_path.glob("*.log")
    flip(path, value_of(path, 101))
    assert log.read(0, 0)[0].rows.equals(batch(0).rows)
    assert log.damage is None
    with pytest.raises(LogCorrupt, match="epoch 1 of stream stream/0 is damaged"):
        log.read(1, 0)
    assert "epoch 1" in str(log.damage)


def test_a_damaged_log_is_truncated_and_refilled(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    (path,) = tmp_path.glob("*.log")
    flip(path, value_of(path, 101))
    with pytest.raises(LogCorrupt):
        log.read(1, 0)
    again = open_log(tmp_path)
    assert (again.last, again.damage) == (0, None)
    for epoch in (1, 2):
        assert again.append(batch(epoch))
    assert [b.rows for b in again] == [batch(e).rows for e in range(3)]


def test_what_a_lost_spilled_file_had_is_computed_again(tmp_path: Path) -> None:
    """Otherwise a task without partners, whose log outlives it, could never serve it again."""
    spill = MemorySpill()
    log = filled(tmp_path, 60, budget=8000, spill=spill)
    spill.pop(sorted(spill)[1])
    with pytest.raises(LogCorrupt, match="is missing with") as lost:
        list(log)
    assert log.damage == str(lost.value)
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert 0 <= again.last < 59
    for epoch in range(again.last + 1, 60):
        assert again.append(batch(epoch))
    assert [b.rows for b in again] == [batch(e).rows for e in range(60)]


def test_a_spilled_file_that_was_truncated_is_no_damage(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 60, budget=8000, spill=spill)
    found = log.spilled(0)
    assert found is not None
    log.truncate(40)
    with pytest.raises(ObjectMissing):
        log.fetch(found[0])
    assert log.damage is None


def test_a_spilled_file_that_is_damaged_is_not_served(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 40, budget=8000, spill=spill)
    name, data = next(iter(spill.items()))
    log._fetched.clear()
    spill[name] = data.replace((1).to_bytes(8, "little"), (2).to_bytes(8, "little"))
    with pytest.raises(LogCorrupt, match=f"damaged in {name}"):
        log.read(0, 0)
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert (again.base, again.last) == (0, -1)


def test_a_log_that_was_found_damaged_refuses_appends(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 40, budget=8000, spill=spill)
    name, data = next(iter(spill.items()))
    log._fetched.clear()
    spill[name] = data.replace((1).to_bytes(8, "little"), (2).to_bytes(8, "little"))
    with pytest.raises(LogCorrupt):
        log.read(0, 0)
    with pytest.raises(LogCorrupt, match=f"damaged in {name}"):
        log.append(batch(40))  # before its owner has ended
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert (again.base, again.last) == (0, -1)


class OnceWrong(MemorySpill):
    """Returns a damaged object the first time."""

    def get(self, name: str) -> bytes:  # type: ignore[override]
        data, self.wrong = self[name], getattr(self, "wrong", 0) + 1
        return data[:200] + b"\0" + data[201:] if self.wrong == 1 else data


def test_a_spilled_file_damaged_in_transit_is_fetched_again(tmp_path: Path) -> None:
    log = filled(tmp_path, 40, budget=8000, spill=OnceWrong())
    assert log.read(0, 0)[0].rows.equals(batch(0).rows)
    assert log.damage is None


TYPES = pa.table(
    {
        "i": pa.array([1, None, 3], pa.int32()),
        "b": pa.array([True, None, False]),
        "f": pa.array([1.5, float("nan"), None]),
        "s": pa.array(["a", None, "ü" * 100]),
        "y": pa.array([b"x", b"", None]),
        "d": pa.array([Decimal("1.50"), None, Decimal("-2.25")], pa.decimal128(38, 2)),
        "t": pa.array([0, None, 2], pa.timestamp("us", "UTC")),
        "a": pa.array([["x"], None, []], pa.list_(pa.string())),
        "r": pa.array([{"k": 1, "v": ["y"]}, None, {"k": None, "v": None}]),
        "n": pa.nulls(3),
        "l": pa.array([2**40, None, 5]),
    }
)


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def served(tmp_path: Path, address: str) -> Iterator[OutputLog]:
    log = OutputLog(tmp_path, "s", 0, TYPES.schema)
    tables = [
        TYPES,
        TYPES.slice(1, 2),
        pa.concat_tables([TYPES, TYPES.slice(2)]),
        TYPES.slice(0, 0),
    ]
    for epoch, rows in enumerate(tables):
        log.append(EpochBatch("s", 0, epoch, 0, rows, digest_table(rows)))
    host, port = address.split(":")
    server = StreamServer(host, int(port))
    server.serve_log(log)
    yield log
    server.stop()


ALL = ReadRequest("s", 0, 0, 1 << 20)
DIGEST = digest_table(TYPES)


def get_all(address: str, share: Share | None = None, **options: Any) -> tuple[EpochBatch, ...]:
    return read_once(address, ReadRequest("s", 0, 0, 1 << 20, share=share), 10, **options).epochs


def test_checksums_hold_for_every_type(served: OutputLog, address: str) -> None:
    epochs = get_all(address)
    assert [digest_table(e.rows) for e in epochs] == [e.digest for e in served]


@pytest.mark.parametrize("share", [None, Share(("s",), 2, 0)])
def test_rows_damaged_in_transit_are_refused(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch, share: Share | None
) -> None:
    sent = wire.epoch_frame

    def damaged(
        epoch: int,
        watermark: int,
        digest: str,
        payload: pa.Buffer,
        checksum: int,
        *rest: Any,
        **live: Any,
    ) -> bytes:
        return sent(epoch, watermark, digest, payload, checksum + 1, *rest, **live)

    monkeypatch.setattr(response_frames, "epoch_frame", damaged)
    with pytest.raises(StreamUnavailable, match="epoch 0 of stream s/0 arrived with a wrong check"):
        get_all(address, share)


def test_a_damaged_file_is_found_by_the_server(served: OutputLog, address: str) -> None:
    (path,) = served._directory.glob("*.log")
    flip(path, value_of(path, 2**40))
    with pytest.raises(StreamUnavailable, match="epoch 0 of stream s/0 is damaged"):
        get_all(address)
    assert served.damage is not None


def test_a_large_share_is_sent_in_parts(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_frames, "BATCH_BYTES", 1)  # so that no epoch is small
    monkeypatch.setattr(response_frames, "MAX_PART_BYTES", 100)
    shares = [get_all(address, Share(("s",), 2, index)) for index in range(2)]
    monkeypatch.setattr(response_frames, "MAX_PART_BYTES", 1 << 20)
    whole = [get_all(address, Share(("s",), 2, index)) for index in range(2)]
    assert any(e.rows["s"].num_chunks > 1 for share in shares for e in share)
    for share, expected in zip(shares, whole, strict=True):
        assert [digest_table(e.rows) for e in share] == [digest_table(e.rows) for e in expected]


# -- what a client makes of any bytes -----------------------------------------------------------


def response(rows: pa.Table = TYPES, epochs: int = 2) -> list[bytes]:
    """Frames of a response."""
    sender = MessageIdentity.of(Identity(), None)
    payload = records.encode_rows(rows)
    checksum = records.checksum(payload)
    frames = [wire.first_frame(sender, StreamProgress(0, 9, 9), rows.schema.serialize())]
    frames += [
        wire.epoch_frame(e, 0, "d", payload, checksum) + bytes(payload) for e in range(epochs)
    ]
    return [*frames, wire.last_frame()]


def decoder(request: ReadRequest = ALL, **options: Any) -> ResponseDecoder:
    check = options.get("check_size", lambda epoch, size: None)
    return ResponseDecoder(request, Identity(), "a:1", check)


@given(st.lists(st.integers(1, 400), min_size=1))
def test_a_response_may_arrive_in_any_chunks(sizes: list[int]) -> None:
    data, made = b"".join(response()), decoder()
    for size in itertools.cycle(sizes):
        made.feed(data[:size])
        data = data[size:]
        if not data:
            break
    assert made.ended
    assert [(e.epoch, digest_table(e.rows)) for e in made.epochs] == [(0, DIGEST), (1, DIGEST)]


@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    content = bytearray(b"".join(response()))
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    made = decoder()
    with contextlib.suppress(RekindleError):
        made.feed(bytes(content))
        assert not made.ended
    assert all(digest_table(e.rows) == DIGEST for e in made.epochs)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bytes_are_refused_with_a_message(garbage: bytes, after: int) -> None:
    made = decoder()
    with contextlib.suppress(StreamUnavailable):
        made.feed(b"".join(response()[:after]) + garbage)
    assert len(made.epochs) <= 2


def test_an_incomplete_epoch_is_not_accepted() -> None:
    made, frames = decoder(), response()
    made.feed(b"".join(frames[:2]) + frames[2][:-1])
    assert [e.epoch for e in made.epochs] == [0]
    assert not made.ended


def test_more_than_was_requested_is_refused() -> None:
    made = decoder(ReadRequest("s", 0, 0, 1))
    with pytest.raises(StreamUnavailable, match="more than the 1 bytes that were requested"):
        made.feed(b"".join(response()))
    assert len(made.epochs) == 1


def test_an_epoch_out_of_order_is_refused() -> None:
    first, *_ = response()
    with pytest.raises(StreamUnavailable, match="epoch 7 instead of 0"):
        decoder().feed(first + wire.epoch_frame(7, 0, "d", None, 0))


def test_an_epoch_that_is_too_large_takes_no_memory() -> None:
    def check(epoch: int, size: int) -> None:
        raise EpochTooLarge(f"epoch {epoch} has {size} bytes")

    first, *_ = response()
    about = {"epoch": 0, "watermark": 0, "digest": "", "bytes": 1 << 60, "sum": 0}
    header = wire._frame(about, None, 0)
    with pytest.raises(EpochTooLarge, match=f"epoch 0 has {1 << 60} bytes"):
        decoder(check_size=check).feed(first + header)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "NEW"},
        {"epoch": 0.0},
        {"epoch": False},
        {"watermark": None},
        {"watermark": 1 << 63},
        {"watermark": "1"},
        {"digest": 7},
        {"part": None},
        {"attempt": "1"},
    ],
)
def test_an_epoch_with_another_header_is_a_failed_call(change: dict[str, Any]) -> None:
    first, *_ = response()
    header = {"epoch": 0, "watermark": 1, "digest": ""} | change
    made = decoder()
    with pytest.raises(StreamUnavailable, match="a header that it cannot read"):
        made.feed(first + wire._frame(header, None, 0))
    assert not made.epochs
    with pytest.raises(StreamUnavailable, match="a header that it cannot read"):
        decoder().feed(first + wire._frame({"epoch": 0}, None, 0))


def test_epochs_of_a_response_share_one_schema() -> None:
    made = decoder()
    made.feed(b"".join(response()))
    first, second = made.epochs
    assert first.rows.schema.metadata == second.rows.schema.metadata
    wide = pa.table({f"column_{n}": [1.0] for n in range(200)})
    before, kept = pa.total_allocated_bytes(), list[ResponseDecoder]()
    for _ in range(20):
        kept.append(decoder())
        kept[-1].feed(b"".join(response(wide)))
    counted = sum(memory_bytes(e.rows) for one in kept for e in one.epochs)
    assert pa.total_allocated_bytes() - before <= counted


def test_a_huge_header_is_refused() -> None:
    with pytest.raises(StreamUnavailable, match="a header of"):
        decoder().feed(b"\xff" * 8)


def test_the_size_of_an_epoch_is_of_all_its_parts(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_frames, "BATCH_BYTES", 1)
    monkeypatch.setattr(response_frames, "MAX_PART_BYTES", 100)
    sizes: list[int] = []

    def check(epoch: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            raise EpochTooLarge(f"epoch {epoch} has more than {size} bytes")

    with pytest.raises(EpochTooLarge, match="epoch 0 has more"):
        get_all(address, Share(("i",), 2, 0), check_size=check)
    assert sizes[1] > sizes[0]


def test_a_reader_gives_up_on_an_epoch_that_is_too_large() -> None:
    harness = Harness()
    refused: list[Exception] = []

    class TooLarge(FakeClient):
        async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
            raise EpochTooLarge("epoch 0 is larger than the 60 MiB")

    harness.reader._connect = lambda a: TooLarge(harness.replicas, a)
    harness.reader._on_fatal = refused.append
    harness.reader.route(routes_to(A))
    eventually(lambda: bool(refused))
    harness.close()
    assert isinstance(refused[0], EpochTooLarge)
