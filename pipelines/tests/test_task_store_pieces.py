"""Pieces of an output log in a real store, as a task puts and reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.checkpoints.shipped import Piece, content_digest
from rekindle.checkpoints.store import Store
from rekindle.errors import ObjectMissing, StoreError
from rekindle.identity import Identity
from rekindle.protocol import TaskRef
from rekindle.task.config import TaskConfig
from rekindle.task.store import TaskStore
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec

DATA = b"epochs"
PIECE = Piece(0, 9, len(DATA), "-1:", "-1:a", content_digest(DATA))


@pytest.fixture
def store(tmp_path: Path) -> TaskStore:
    url = f"file://{tmp_path}/store"
    files = {"url": f"file://{tmp_path}/in", "format": "json", "rowsPerSecond": 10}
    spec = {
        "checkpoint": {"store": url, "volume": "v"},
        "sources": [{"name": "rows", "schema": "k INT", "files": files}],
        "queries": [
            {"name": "q", "from": "rows", "sink": {"files": {"url": f"file://{tmp_path}/out"}}}
        ],
    }
    Store(url)
    topology = compile_topology(load_spec(spec), "t", skip_cluster_checks=True)
    segment = topology.segments[0]
    return TaskStore(
        TaskConfig(
            ref=TaskRef(segment=segment.id, partition=0, replica=0, incarnation=1),
            bind="127.0.0.1",
            data=tmp_path / "data",
            identity=Identity("uid-1"),
            generation=1,
            origin_us=0,
            topology=topology,
            segment=segment,
            cds_archive=None,
        )
    )


def test_a_piece_is_found_and_read(store: TaskStore) -> None:
    store.put_piece(PIECE, DATA)
    store.put_piece(PIECE, DATA)
    assert store.pieces() == [PIECE]
    assert store.get(store.piece_object(PIECE)) == DATA


@pytest.mark.parametrize("deletes", [True, False])
def test_a_damaged_piece_is_missing(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """Also in a store that refuses to delete: whoever reads it would wait for ever."""

    def refuse(store: Store, name: str) -> None:
        raise StoreError("403")

    if not deletes:
        monkeypatch.setattr(Store, "delete", refuse)
    name = store.piece_object(PIECE)
    store.put(name, b"damage")
    with pytest.raises(ObjectMissing):
        store.get(name)
    assert store.pieces() == ([] if deletes else [PIECE])
