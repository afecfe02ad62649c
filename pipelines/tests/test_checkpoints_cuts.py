"""Which cut records of live sources are garbage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.checkpoints.codec import cut_name, entry_name, manifest_name, parse_cut_name
from rekindle.checkpoints.cuts import CutObjects
from rekindle.checkpoints.garbage import CUT_AGE_S, find_garbage
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.manifests import ManifestStore
from rekindle.checkpoints.store import Store
from rekindle.connectors.planned_cuts import RECHECK_S
from rekindle.objects import ObjectInfo
from rekindle.protocol import EntryRef

NOW = 10_000.0
OLD = NOW - CUT_AGE_S - 1


def manifest(**epochs: int) -> Manifest:
    entries = {f"{s}/0": (EntryRef(epoch, f"entries/{s}", "d"),) for s, epoch in epochs.items()}
    return Manifest(1, 100, generation=1, fence=1, time="", entries=entries)


def garbage(
    manifest: Manifest, cuts: dict[int, float], references: tuple[str, ...] = ()
) -> list[int]:
    """`cuts`: when each was created, by its first epoch."""
    objects = [ObjectInfo(cut_name("op", 0, first), 1, at) for first, at in cuts.items()]
    objects.append(ObjectInfo(manifest_name(1), 1, NOW))
    found = find_garbage(objects, [manifest], dict.fromkeys(references, frozenset[str]()))
    names = [parse_cut_name(info.name) for info in found]
    return [name[1] for name in names if name is not None]


def test_a_name_has_chain_and_epoch() -> None:
    assert cut_name("op", 3, 17) == "cuts/op/3/000000000017.json"
    assert parse_cut_name(cut_name("op", 3, 17)) == ("cuts/op/3/", 17)
    assert parse_cut_name("sources/op.json") is None


def test_records_before_the_oldest_restore_point_are_deleted_in_order() -> None:
    cuts = dict.fromkeys((40, 10, 0, 20, 30), OLD)
    assert garbage(manifest(a=99, b=35), cuts) == [0, 10, 20]  # 30 has epoch 35


def test_the_record_that_ends_there_is_kept() -> None:
    assert garbage(manifest(a=19), dict.fromkeys((0, 10, 20), OLD)) == [0]


def test_a_pending_entry_keeps_its_records() -> None:
    older = entry_name("a", 0, 12, "d", "e")
    assert garbage(manifest(a=99), dict.fromkeys((0, 10, 20), OLD), (older,)) == [0]


def test_a_partition_that_has_saved_nothing_keeps_all() -> None:
    assert garbage(manifest(a=99, b=-1), dict.fromkeys((0, 10, 20), OLD)) == []


def test_records_of_the_last_minutes_are_kept() -> None:
    assert garbage(manifest(a=99), {0: OLD, 10: OLD + 2, 20: OLD + 2}) == [0]


def test_a_store_is_cleaned_and_its_chain_goes_on(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    cuts, manifests = CutObjects(store, "u", "op", 0), ManifestStore(store, "u")
    for first in (0, 10, 20):
        assert cuts.create(first, b"%d" % first)
    assert not cuts.create(10, b"another")
    for path in tmp_path.rglob("cuts/**/*.json"):
        os.utime(path, (0, 0))
    ref = EntryRef(25, None, "d")
    entries = {"a/0": (ref,)}
    assert manifests.write(Manifest(1, 25, generation=1, fence=1, time="", entries=entries))
    assert manifests.collect_garbage(retain=1) == 2
    assert cuts.list() == [20]
    assert (cuts.read(10), cuts.read(20)) == (None, b"20")


@pytest.mark.parametrize("epoch", [0, 10])
def test_the_newest_record_is_kept(epoch: int) -> None:
    assert garbage(manifest(a=99), {epoch: OLD}) == []


def test_a_reader_looks_again_long_before_records_are_deleted() -> None:
    assert CUT_AGE_S >= 10 * RECHECK_S
