"""The format of an output log: what was appended is read, forward and backward, or damage is found.

Properties of pure code: the writes of `append_epoch` go to bytes in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK
from rekindle.streams.records import (
    ALIGN,
    DamagedRecord,
    Record,
    RecordKind,
    backward,
    encode_header,
    forward,
    header_at,
    headers,
    locate,
    outline,
    read_outline,
    verify_checksum,
    watermark_changes,
    watermarks,
)
from rekindle.streams.sparse_index import SPACING_BYTES, SparseIndex
from rekindle.streams.tail import MAX_WATERMARK_CHANGES_BYTES, Appended, Tail, append_epoch

DIGESTS = ("0" * 32, "f" * 32)
FIRST = 7
"""The first epoch of the files."""


class Epoch(NamedTuple):
    watermark: int
    digest: str
    payload: bytes
    idle: bool = False


EPOCHS = st.lists(
    st.builds(
        Epoch,
        st.sampled_from((NO_WATERMARK, 0, 1, 2, END_OF_INPUT)),
        st.sampled_from(DIGESTS),
        st.sampled_from((b"", b"", b"", b"x", b"RKL2" * 16, b"y" * 100)),
        st.sampled_from((False, False, True)),
    ),
    max_size=40,
)
KINDS = st.sampled_from(RecordKind)
VALID = Record(
    RecordKind.STABLE,
    branch=2,
    epoch=0,
    epochs=1,
    watermark=0,
    digest=DIGESTS[1],
    start=0,
    length=0,
    previous=0,
)


def apply(data: bytearray, writes: Iterable[tuple[int, bytes | pa.Buffer]]) -> None:
    for offset, piece in writes:
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(memoryview(piece))] = bytes(memoryview(piece))


def appended(tail: Tail, epoch: Epoch, kind: RecordKind, branch: int) -> Appended:
    payload = pa.py_buffer(epoch.payload)
    return append_epoch(tail, epoch.watermark, epoch.digest, payload, kind, branch, epoch.idle)


def filled(
    epochs: Iterable[Epoch], kind: RecordKind = RecordKind.STABLE, branch: int = 0
) -> tuple[bytearray, Tail]:
    data, tail = bytearray(), Tail(FIRST)
    for epoch in epochs:
        step = appended(tail, epoch, kind, branch)
        apply(data, step.writes)
        tail = step.tail
    return data, tail


def expanded(data: memoryview, found: Iterable[Record]) -> Iterator[Epoch]:
    for record in found:
        payload = b"" if record.empty else bytes(data[record.payload_start :][: record.length])
        for watermark in watermarks(watermark_changes(data, record), record, record.epoch):
            yield Epoch(watermark, record.digest, payload, record.idle)


def read(data: bytes | bytearray) -> tuple[list[Epoch], bool]:
    """The epochs of a file, and whether damage follows them."""
    found: list[Epoch] = []
    try:
        for record in forward(memoryview(data)):
            found += expanded(memoryview(data), [record])
    except DamagedRecord:
        return found, True
    return found, False


@given(EPOCHS, KINDS, st.integers(0, (1 << 32) - 1))
def test_what_is_appended_is_read(epochs: list[Epoch], kind: RecordKind, branch: int) -> None:
    data, tail = filled(epochs, kind, branch)
    assert (len(data), len(data) % ALIGN) == (tail.size, 0)
    assert read(data) == (epochs, False)
    found = list(forward(memoryview(data)))
    assert {(r.kind, r.branch) for r in found} <= {(kind, branch)}
    assert (len(found), tail.next_epoch) == (tail.records, FIRST + len(epochs))


@given(EPOCHS)
def test_reading_backward_gives_the_same_records(epochs: list[Epoch]) -> None:
    data = memoryview(filled(epochs)[0])
    assert list(backward(data)) == list(forward(data))[::-1]


@given(EPOCHS, st.floats(0, 1))
def test_a_file_cut_anywhere_has_the_epochs_before_the_cut(
    epochs: list[Epoch], where: float
) -> None:
    data, _ = filled(epochs)
    ends = {record.end for record in forward(memoryview(data))} | {0}
    cut = int(where * len(data))
    found, damaged = read(data[:cut])
    assert found == epochs[: len(found)]
    assert damaged == (cut not in ends)


@given(EPOCHS.filter(bool), st.integers(0, 3))
def test_a_process_killed_between_writes_leaves_all_or_nothing(
    epochs: list[Epoch], written: int
) -> None:
    data, tail = filled(epochs[:-1])
    apply(data, appended(tail, epochs[-1], RecordKind.STABLE, 0).writes[:written])
    assert read(data)[0] in (epochs[:-1], epochs)


@given(EPOCHS.filter(bool), st.data())
def test_a_failed_write_is_undone(epochs: list[Epoch], data: st.DataObject) -> None:
    content, tail = filled(epochs[:-1])
    before = bytes(content)
    step = appended(tail, epochs[-1], RecordKind.STABLE, 0)
    offset, piece = step.writes[-1]
    torn = bytes(memoryview(piece))[: data.draw(st.integers(0, len(memoryview(piece))))]
    apply(content, (*step.writes[:-1], (offset, torn)))
    if step.undo is not None:
        apply(content, [step.undo])
    del content[tail.size :]
    assert read(content) == read(before)


@given(EPOCHS.filter(bool), st.data())
def test_a_flipped_bit_never_gives_another_epoch(epochs: list[Epoch], data: st.DataObject) -> None:
    content, _ = filled(epochs)
    sound = list(forward(memoryview(bytes(content))))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    found, damaged = read(content)
    assert found == epochs[: len(found)]
    assert damaged or found == epochs  # padding, which nobody reads
    from_end: list[Record] = []
    try:
        for record in backward(memoryview(content)):
            from_end.append(record)
    except DamagedRecord:
        assert damaged
    assert from_end == sound[::-1][: len(from_end)]


@given(EPOCHS.filter(bool), st.data())
def test_every_epoch_is_found_from_any_record_before_it(
    epochs: list[Epoch], data: st.DataObject
) -> None:
    content = memoryview(filled(epochs)[0])
    wanted = data.draw(st.integers(FIRST, FIRST + len(epochs) - 1))
    found = list(forward(content))
    for start in (r.start for r in found if r.epoch <= wanted):
        at = locate(content, start, len(content), wanted)
        record = next(headers(content, at, len(content)))
        assert record.epoch <= wanted < record.next_epoch
        assert (
            next(watermarks(watermark_changes(content, record), record, wanted))
            == epochs[wanted - FIRST].watermark
        )
    end = FIRST + len(epochs)
    with pytest.raises(DamagedRecord, match=f"no record of epoch {end}"):
        locate(content, 0, len(content), end)


@given(EPOCHS)
def test_an_outline_has_all_but_the_rows(epochs: list[Epoch]) -> None:
    data = memoryview(filled(epochs)[0])
    found = read_outline(memoryview(outline(data)))
    results = [
        (w, r.digest, r.idle) for r, payload in found for w in watermarks(payload, r, r.epoch)
    ]
    assert results == [(e.watermark, e.digest, e.idle) for e in epochs]


def test_consecutive_empty_epochs_are_one_record_of_64_bytes() -> None:
    data, tail = filled([Epoch(5, DIGESTS[0], b"")] * 10_000)
    assert (len(data), tail.records) == (ALIGN, 1)


def test_an_empty_record_takes_16_bytes_for_each_new_watermark() -> None:
    count = 4 * (MAX_WATERMARK_CHANGES_BYTES // 16 + 1)
    data, tail = filled(Epoch(i, DIGESTS[0], b"") for i in range(count))
    assert (len(data), tail.records) == (4 * (ALIGN + MAX_WATERMARK_CHANGES_BYTES), 4)


def test_control_records_leave_the_epochs_consecutive() -> None:
    """They are reserved: no log has them yet."""
    data = bytearray()
    before = 0
    for kind, epoch, count in [
        (RecordKind.WINDOW_CHECKPOINT, 2, 0),
        (RecordKind.TENTATIVE, 3, 2),
        (RecordKind.UNDO, 4, 0),
        (RecordKind.WINDOW_CHECKPOINT, 4, 0),
        (RecordKind.TENTATIVE, 5, 1),
        (RecordKind.RECONCILIATION_DONE, 5, 0),
    ]:
        record = VALID._replace(
            kind=kind, epoch=epoch, epochs=count, start=len(data), previous=before
        )
        data += encode_header(record, 0)
        before = record.size
    found = list(forward(memoryview(data)))
    assert [(r.kind.name, r.epoch) for r in found] == [
        ("WINDOW_CHECKPOINT", 2),
        ("TENTATIVE", 3),
        ("UNDO", 4),
        ("WINDOW_CHECKPOINT", 4),
        ("TENTATIVE", 5),
        ("RECONCILIATION_DONE", 5),
    ]
    assert list(backward(memoryview(data))) == found[::-1]
    assert locate(memoryview(data), 0, len(data), 5) == 4 * ALIGN


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"RKL1", "a record of log format 1; this release reads 2"),
        (b"RKL3", "a record of log format 3; this release reads 2"),
        (b"RKL2\x63", "a record of unknown kind 99"),
        (b"PAR1", "no record"),
    ],
)
def test_records_of_other_formats_are_refused_with_a_reason(header: bytes, reason: str) -> None:
    with pytest.raises(DamagedRecord, match=reason):
        next(forward(memoryview(header.ljust(ALIGN, b"\0"))))


@pytest.mark.parametrize(
    "record",
    [
        VALID._replace(branch=-1),
        VALID._replace(epoch=1 << 63),
        VALID._replace(digest="abc0"),
    ],
)
def test_what_does_not_fit_a_header_is_not_written(record: Record) -> None:
    with pytest.raises(ValueError, match=r"does not fit the format|32 hexadecimal"):
        encode_header(record, 0)


def test_a_log_in_the_rows_of_a_record_is_not_taken_for_its_end() -> None:
    inner, _ = filled([Epoch(1, DIGESTS[0], b"z" * 64)])
    data = memoryview(filled([Epoch(2, DIGESTS[1], b"." * 64 + bytes(inner) + b"." * 64)])[0])
    (record,) = backward(data)
    assert (record.digest, record.start) == (DIGESTS[1], 0)
    verify_checksum(data, header_at(data, 0))


@given(st.lists(st.integers(1, 40), max_size=300))
def test_a_sparse_index_is_small_and_close(blocks: list[int]) -> None:
    index, offset = SparseIndex(), 0
    offsets = []
    for epoch, size in enumerate(blocks):
        index.add(epoch, offset)
        offsets.append(offset)
        offset += size * 1024
    assert len(index) <= 1 + offset // SPACING_BYTES
    for epoch, exact in enumerate(offsets):
        assert exact - SPACING_BYTES < index.offset_before(epoch) <= exact
