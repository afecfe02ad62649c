"""The input of a source must not change: another one is refused, naming the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.checkpoints.store import Store
from rekindle.connectors.files_source import FilesSource
from rekindle.connectors.input_identity import (
    InputFile,
    decode_input_files,
    difference,
    encode_input_files,
    identify,
)
from rekindle.connectors.registry import open_source
from rekindle.errors import SchemaMismatch, StoreError
from rekindle.identity import Identity
from rekindle.protocol import TaskRef
from rekindle.task.config import TaskConfig
from rekindle.task.store import TaskStore
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.spec import SourceSpec

A, B = InputFile("/in/a", 3, "blake2b:1"), InputFile("/in/b", 3, "blake2b:2")


class Node:
    """A node with its own disk that runs the source's task."""

    def __init__(
        self, shared: Path, name: str, uid: str = "uid", partition: tuple[int, int] = (0, 1)
    ) -> None:
        """`partition`: its number, and how many there are."""
        self.disk = shared / name
        spec = {
            "checkpoint": {"store": f"file://{shared}/store", "volume": "v"},
            "sources": [
                {
                    "name": "rows",
                    "partitions": partition[1],
                    "schema": "k INT",
                    "files": {"url": f"file://{shared}/in", "format": "json", "rowsPerSecond": 10},
                }
            ],
            "queries": [
                {"name": "q", "from": "rows", "sink": {"files": {"url": f"file://{shared}/out"}}}
            ],
        }
        self.topology = compile_topology(load_spec(spec), "t", skip_cluster_checks=True)
        self.source = self.topology.nodes["rows"]
        self.partition = partition[0]
        self.states = TaskStore(make_config(self.topology, self.disk, uid))

    def open(self) -> list[int]:
        """The rows of epoch 5, as a task would read them."""
        assert isinstance(self.source.spec, SourceSpec)
        opened = open_source(
            self.source.spec, self.source, 1_000_000, self.disk, partition=self.partition
        )
        assert isinstance(opened, FilesSource)
        self.states.require_same_input(self.source, opened.input_files)
        return opened.cut(5).rows.column("k").to_pylist()  # type: ignore[no-any-return]


def make_config(topology: Any, data: Path, uid: str) -> TaskConfig:
    segment = topology.segments[0]
    return TaskConfig(
        ref=TaskRef(segment=segment.id, partition=0, replica=0, incarnation=1),
        bind="127.0.0.1",
        data=data,
        identity=Identity(uid),
        generation=1,
        origin_us=0,
        topology=topology,
        segment=segment,
        cds_archive=None,
    )


def write(path: Path, first: int, rows: int) -> None:
    path.write_text("".join(json.dumps({"k": first + i}) + "\n" for i in range(rows)))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/b.json", 0, 100)
    Store(f"file://{tmp_path}/store")
    return tmp_path


def add_before(shared: Path) -> None:
    write(shared / "in/a.json", 1000, 25)


def add_after(shared: Path) -> None:
    write(shared / "in/z.json", 1000, 25)


def grow(shared: Path) -> None:
    with (shared / "in/b.json").open("a") as file:
        file.write('{"k": 7}\n')


def edit(shared: Path) -> None:
    path = shared / "in/b.json"
    path.write_text(path.read_text().replace("55", "66"))


def rename(shared: Path) -> None:
    (shared / "in/b.json").rename(shared / "in/c.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_before, "/in/a.json was added"),
        (add_after, "/in/z.json was added"),
        (grow, r"/in/b.json has \d+ bytes instead of \d+"),
        (edit, "/in/b.json has different content of the same size"),
        (rename, "/in/b.json is missing"),
    ],
)
@pytest.mark.parametrize("place", ["one", "another"])
def test_another_input_is_refused_wherever_it_is_opened(
    shared: Path, change: Callable[[Path], None], message: str, place: str
) -> None:
    Node(shared, "one").open()
    change(shared)
    with pytest.raises(
        SchemaMismatch, match=f"source rows: .*{message} since the topology first read"
    ):
        Node(shared, place).open()


@pytest.mark.parametrize("partition", [0, 1])
def test_partitions_share_the_record_of_the_whole_input(shared: Path, partition: int) -> None:
    write(shared / "in/c.json", 100, 100)
    nodes = [Node(shared, f"{n}", partition=(n, 2)) for n in range(2)]
    assert [node.open() for node in nodes] == [list(range(50, 60)), []]
    assert len(list((shared / "store").rglob("sources/*"))) == 1
    edit(shared)  # b.json, of partition 0
    with pytest.raises(SchemaMismatch, match=r"/in/b\.json has different content"):
        nodes[partition].open()


def test_restored_files_are_the_same_input(shared: Path) -> None:
    rows = Node(shared, "one").open()
    add_before(shared)
    (shared / "in/a.json").unlink()
    os.utime(shared / "in/b.json", (1, 1))
    assert Node(shared, "one").open() == rows
    assert Node(shared, "another").open() == rows


def test_another_topology_reads_the_current_files(shared: Path) -> None:
    Node(shared, "one").open()
    add_before(shared)
    assert Node(shared, "other", uid="another").open() != []


def test_no_row_is_read_while_the_record_is_unreadable(shared: Path) -> None:
    task = Node(shared, "one")
    (shared / "store").rename(shared / "away")
    with pytest.raises(StoreError):
        task.open()


def test_a_record_is_read_back_and_knows_its_format() -> None:
    assert decode_input_files(encode_input_files((A, B))) == (A, B)
    with pytest.raises(ValueError, match="format 9; this release reads 1"):
        decode_input_files(b'{"format": 9}')
    with pytest.raises(ValueError, match="not a record of input files"):
        decode_input_files(b'{"format": 1}')


def test_the_order_of_files_is_part_of_the_input() -> None:
    assert difference((A, B), (A, B)) is None
    assert difference((A, B), (B, A)) == "its files are read in a different order"


def test_an_etag_replaces_a_hash_of_the_bytes() -> None:
    class Remote:
        def info(self, path: str) -> dict[str, Any]:
            return {"size": 3, "ETag": '"abc"'}

    assert identify(Remote(), ["bucket/a"], "s") == (InputFile("bucket/a", 3, 'etag:"abc"'),)
