"""Bytes damaged on disk, in the store or in transit are detected, never served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from log_parts import MemorySpill, batch, filled, open_log
from reader_parts import A, FakeClient, Harness, endpoints

from rekindle.errors import EpochTooLarge, LogCorrupt
from rekindle.streams import flight
from rekindle.streams.checksum import checksum_batch
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.flight import (
    ReadRequest,
    ReadResponse,
    StreamClient,
    StreamServer,
    StreamUnavailable,
)
from rekindle.streams.log import OutputLog
from rekindle_testing.waiting import eventually


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def value_of(path: Path, number: int) -> int:
    """The position of a value in a file."""
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


def test_a_spilled_file_that_is_damaged_is_not_served(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 40, budget=8000, spill=spill)
    name, data = next(iter(spill.items()))
    log._fetched = None
    spill[name] = data.replace((1).to_bytes(8, "little"), (2).to_bytes(8, "little"))
    with pytest.raises(LogCorrupt, match=f"damaged in {name}"):
        log.read(0, 0)
    again = open_log(tmp_path, budget=8000, spill=spill)
    assert (again.base, again.last) == (0, -1)


def test_a_log_without_its_first_files_refuses_appends(tmp_path: Path) -> None:
    spill = MemorySpill()
    log = filled(tmp_path, 40, budget=8000, spill=spill)
    name, data = next(iter(spill.items()))
    log._fetched = None
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


def get_all(address: str) -> tuple[EpochBatch, ...]:
    client = StreamClient(address)
    try:
        return client.read(ReadRequest("s", 0, 0, 1 << 20), 10).epochs
    finally:
        client.close()


def test_checksums_hold_for_every_type(served: OutputLog, address: str) -> None:
    epochs = get_all(address)
    assert [digest_table(e.rows) for e in epochs] == [e.digest for e in served]


def test_rows_damaged_in_transit_are_refused(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "checksum_batch", lambda b: checksum_batch(b) + 1)
    sent = flight._json

    def as_sent(value: Any) -> pa.Buffer:
        if "checksum" in value:
            value = {**value, "checksum": value["checksum"] + 1}
        return sent(value)

    monkeypatch.setattr(flight, "_json", as_sent)
    with pytest.raises(StreamUnavailable, match="epoch 0 of stream s/0 arrived with a wrong check"):
        get_all(address)


def test_a_response_without_checksums_is_accepted(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = flight._json

    def without(value: Any) -> pa.Buffer:
        return sent({k: v for k, v in value.items() if k != "checksum"})

    monkeypatch.setattr(flight, "_json", without)
    assert len(get_all(address)) == 4


def test_a_large_epoch_is_sent_in_parts(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "MAX_MESSAGE_BYTES", 100)
    parts: list[int] = []
    sent = flight._json

    def count(value: Any) -> pa.Buffer:
        parts.append(value.get("parts", 1))
        return sent(value)

    monkeypatch.setattr(flight, "_json", count)
    epochs = get_all(address)
    assert [digest_table(e.rows) for e in epochs] == [e.digest for e in served]
    assert max(parts) > 1


def test_an_incomplete_epoch_is_not_accepted() -> None:
    (rows,) = TYPES.to_batches()
    header = {"epoch": 0, "watermark": 0, "digest": "", "kind": "STABLE", "attempt": 0}

    def message(**more: int) -> flight.Message:
        return rows, {**header, **more}

    whole = [message(epoch=0), message(epoch=1, part=0, parts=2)]
    request = ReadRequest("s", 0, 0, 1 << 20)
    assert [e.epoch for e in flight._epochs(request, whole, "a:1")] == [0]


def test_a_call_ends_when_its_epoch_becomes_too_large(
    served: OutputLog, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "MAX_MESSAGE_BYTES", 100)
    sizes: list[int] = []

    def check(what: str, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 2:
            raise EpochTooLarge(f"{what} has more than {size} bytes")

    client = StreamClient(address, check_size=check)
    with pytest.raises(EpochTooLarge, match="epoch 0 of stream s/0 has more"):
        client.read(ReadRequest("s", 0, 0, 1 << 20), 10)
    client.close()
    assert sizes[1] > sizes[0]


def test_a_reader_gives_up_on_an_epoch_that_is_too_large() -> None:
    harness = Harness()
    refused: list[Exception] = []

    class TooLarge(FakeClient):
        def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
            raise EpochTooLarge("epoch 0 is larger than the 60 MiB")

    harness.reader._connect = lambda a: TooLarge(harness.replicas, a)  # type: ignore[assignment,return-value]
    harness.reader._on_fatal = refused.append
    harness.reader.route(endpoints(A).endpoints)
    eventually(lambda: bool(refused))
    harness.reader.close()
    assert isinstance(refused[0], EpochTooLarge)
