"""The output log in the checkpoint store: what is shipped, and what a successor in a new pod uses.

Histories of shipments by several replicas, which fail at any call, with objects that are lost, torn
or of other output: a successor either has exactly what was committed, or says that it has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.checkpoints.garbage import find_garbage
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.shipped import (
    Piece,
    PieceWriter,
    content_digest,
    held_epochs_of,
    is_content_of,
    parse_piece_name,
    path_to,
    piece_name,
)
from rekindle.errors import BelowFloor, StoreError
from rekindle.objects import ObjectInfo
from rekindle.protocol import EntryRef
from rekindle.streams import records
from rekindle.streams.digest import chain_digest, chained_digest_from, digest_table
from rekindle.streams.log_reading import EncodedEpoch
from rekindle.task import log_shipper
from rekindle.task.core.shipping import ShipLog
from rekindle.task.log_shipper import LogEnd, ship_log

KEY = "segment-1/0"


def output_of(epochs: int, salt: int = 0, *, from_epoch: int = 0) -> list[EncodedEpoch]:
    """Every third epoch has no rows, and some are idle. `salt` changes what the epochs from
    `from_epoch` on have."""
    found = []
    for epoch in range(epochs):
        value = epoch * 10 + (salt if epoch >= from_epoch else 0)
        rows = pa.table({"v": pa.array([] if epoch % 3 == 2 else [value], pa.int64())})
        payload = records.encode_rows(rows)
        encoded = payload if payload.size else None
        idle = epoch % 5 > 2
        found.append(EncodedEpoch(epoch, value // 20, digest_table(rows), encoded, 0, idle))
    return found


def chain_of(output: Sequence[EncodedEpoch]) -> dict[int, str]:
    chained = {-1: chained_digest_from(-1)}
    for e in output:
        before = chained[e.epoch - 1]
        chained[e.epoch] = chain_digest(before, e.epoch, e.watermark, e.digest, e.idle)
    return chained


@dataclass
class FakeLog:
    output: list[EncodedEpoch]
    base: int = 0

    def read_encoded(self, from_epoch: int, max_bytes: int) -> list[EncodedEpoch]:
        if from_epoch < self.base:
            raise BelowFloor("gone")
        return self.output[from_epoch : from_epoch + 5]


@dataclass
class FakeStore:
    """`fails`: for each put, whether it fails, and whether it has happened all the same."""

    objects: dict[str, bytes] = field(default_factory=dict)
    fails: list[tuple[bool, bool]] = field(default_factory=list)

    def pieces(self) -> list[Piece]:
        return [found[1] for name in self.objects if (found := parse_piece_name(name))]

    def put_piece(self, piece: Piece, data: bytes) -> None:
        fails, arrives = self.fails.pop(0) if self.fails else (False, True)
        if arrives or not fails:
            self.objects.setdefault(piece_name(KEY, piece), data)
        if fails:
            raise StoreError("it does not respond")

    def epochs(self, path: Sequence[Piece]) -> list[tuple[int, int, str, bool]]:
        """Of pieces: epoch, watermark and digest of each of their epochs, and whether it is
        idle."""
        found = []
        for piece in path:
            data = memoryview(self.objects[piece_name(KEY, piece)])
            for record in records.forward(data):
                changes = records.watermark_changes(data, record)
                watermarks = records.watermarks(changes, record, record.epoch)
                found += [
                    (record.epoch + i, watermark, record.digest, record.idle)
                    for i, watermark in enumerate(watermarks)
                ]
        return found


def facts(output: Sequence[EncodedEpoch]) -> list[tuple[int, int, str, bool]]:
    return [(e.epoch, e.watermark, e.digest, e.idle) for e in output]


def test_a_name_says_what_its_object_is() -> None:
    piece = Piece(3, 17, 5, "-1:", "-1:0a", content_digest(b"bytes"))
    name = piece_name(KEY, piece)
    assert parse_piece_name(name) == (KEY, piece)
    assert parse_piece_name(f"uid-1/{name}") == (KEY, piece)
    assert is_content_of(name, b"bytes")
    assert not is_content_of(name, b"byte")
    assert not is_content_of(name, b"other")


@pytest.mark.parametrize(
    "name", ["logs/s/0/1-2/000000000003-abcdef", "entries/s/0/1.json", "logs/s/0/shipped/1-2_3_x"]
)
def test_other_names_are_no_pieces(name: str) -> None:
    assert parse_piece_name(name) is None


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_pieces_are_log_files_that_follow_one_another(cuts: list[bool]) -> None:
    output, store = output_of(len(cuts)), FakeStore()
    writer = PieceWriter(chained_digest_from(-1))
    for epoch, cut in zip(output, cuts, strict=True):
        writer.add(epoch)
        if cut or epoch is output[-1]:
            taken = writer.take()
            assert taken is not None
            store.put_piece(*taken)
    assert writer.take() is None
    last = len(cuts) - 1
    path = path_to(store.pieces(), last, chain_of(output)[last])
    assert store.epochs(path) == facts(output)


PIECES = st.lists(
    st.builds(
        lambda first, length, before, after: Piece(
            first, first + length, 1, f"-1:{before}", f"-1:{after}", "d"
        ),
        st.integers(0, 6),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(0, 1),
    ),
    max_size=9,
)


@given(PIECES, st.integers(0, 9), st.integers(0, 1))
def test_the_longest_sequence_of_pieces_is_found(
    pieces: list[Piece], epoch: int, chained: int
) -> None:
    def longest(last: int, after: str) -> int:
        """The first epoch of the longest sequence; `last + 1` if there is none."""
        ends = [p for p in pieces if (p.last, p.after) == (last, after)]
        return min((min(p.first, longest(p.first - 1, p.before)) for p in ends), default=last + 1)

    after = f"-1:{chained}"
    path = path_to(pieces, epoch, after)
    assert (path[0].first if path else epoch + 1) == longest(epoch, after)
    for one, next_one in pairwise(path):
        assert (one.last + 1, one.after) == (next_one.first, next_one.before)
    if path:
        assert (path[-1].last, path[-1].after) == (epoch, after)
    held = held_epochs_of(pieces)
    if pieces:
        last = max(p.last for p in pieces)
        firsts = [longest(last, p.after) for p in pieces if p.last == last]
        assert held == (min(firsts), last)
    else:
        assert held is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ship", "ship", "ship", "restart", "other", "diverged", "lose", "tear"]),
        st.integers(1, 12),
        st.lists(st.tuples(st.booleans(), st.booleans()), max_size=3),
    ),
    max_size=12,
)


@given(STEPS, st.booleans())
def test_a_successor_has_what_was_committed_or_says_that_it_has_not(
    steps: list[tuple[str, int, list[tuple[bool, bool]]]], small: bool
) -> None:
    """Each step commits some epochs, and then ships, by one of two replicas or by one that has
    computed something else. `restart`: in its pod, from an entry before what was shipped."""
    output = output_of(150)
    chained, store = chain_of(output), FakeStore()
    ends = {"ship": LogEnd(), "other": LogEnd()}
    committed, known, damaged = 0, {-1: chained[-1]}, False
    for action, number, fails in steps:
        committed += number
        known[committed] = chained[committed]
        store.fails = list(fails)
        if action in ("lose", "tear") and store.objects:
            name = sorted(store.objects)[number % len(store.objects)]
            damaged = True
            if action == "lose":
                del store.objects[name]
            else:
                store.objects[name] = store.objects[name][:-1]
            ends = {"ship": LogEnd(), "other": LogEnd()}
        elif action == "restart":
            known = {committed: chained[committed]}
            ends["ship"] = LogEnd()
        elif action == "diverged":
            wrong = output_of(150, salt=7, from_epoch=committed)
            ship(ShipLog(0, committed, {-1: chained[-1]}), wrong, store, LogEnd(), small)
        elif action in ends:
            ship(ShipLog(0, committed, dict(known)), output, store, ends[action], small)
        require_sound_or_refused(store, committed, chained, output)
    store.fails = []
    ship(ShipLog(0, committed, dict(known)), output, store, LogEnd(), small)
    path = require_sound_or_refused(store, committed, chained, output)
    assert damaged or (path and path[0].first == 0), "what was shipped before is continued"


def ship(
    request: ShipLog, output: list[EncodedEpoch], store: FakeStore, end: LogEnd, small: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_shipper, "PIECE_BYTES", 300 if small else 8 << 20)
        try:
            ship_log(request, FakeLog(output), store, end)
        except StoreError:
            return
    assert end.epoch == request.through


def require_sound_or_refused(
    store: FakeStore, committed: int, chained: dict[int, str], output: list[EncodedEpoch]
) -> tuple[Piece, ...]:
    """Of the pieces whose bytes are what their names say: others are deleted when they are read."""
    assert all(piece.last <= committed for piece in store.pieces())
    sound = [
        found[1]
        for name, data in store.objects.items()
        if is_content_of(name, data) and (found := parse_piece_name(name))
    ]
    path = path_to(sound, committed, chained[committed])
    if path:
        assert store.epochs(path) == facts(output[path[0].first : committed + 1])
    return path


def test_a_log_that_begins_later_than_what_was_shipped_begins_anew() -> None:
    output = output_of(60)
    chained, store, end = chain_of(output), FakeStore(), LogEnd()
    ship_log(ShipLog(0, 9, {9: chained[9]}), FakeLog(output), store, end)
    ship_log(ShipLog(0, 49, {49: chained[49]}), FakeLog(output, base=30), store, end)
    path = path_to(store.pieces(), 49, chained[49])
    assert (path[0].first, path[-1].last) == (30, 49)
    assert held_epochs_of(store.pieces()) == (30, 49)


def test_pieces_that_no_restart_needs_are_garbage() -> None:
    def ref(epoch: int) -> EntryRef:
        return EntryRef(epoch, None, "")

    def named(first: int, last: int, key: str = KEY) -> str:
        return piece_name(key, Piece(first, last, 1, "-1:", "-1:a", "0" * 32))

    manifests = [
        Manifest(1, 60, 1, 1, "", {KEY: (ref(60), ref(19))}),
        Manifest(2, 80, 1, 1, "", {KEY: (ref(80), ref(39))}),
    ]
    names = {
        named(0, 19): True,
        named(10, 20): False,
        named(20, 39): False,  # the older manifest is retained
        named(40, 80): False,
        named(0, 80, "gone-1/0"): True,
    }
    objects = [ObjectInfo(name, 1, 5.0) for name in names]
    objects += [ObjectInfo(f"manifests/{seq:012d}.json", 1, 10.0) for seq in (1, 2)]
    found = {info.name for info in find_garbage(objects, manifests, {})}
    assert found == {name for name, is_garbage in names.items() if is_garbage}
    young = [ObjectInfo(name, 1, 11.0) for name in names] + objects[-2:]
    assert not find_garbage(young, manifests, {})
