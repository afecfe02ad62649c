"""A partner as a store: what it lends, over HTTP, from one process to the same.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from state_parts import of_runs, tables_of
from task_world import World

from rekindle.checkpoints.codec import CheckpointName
from rekindle.checkpoints.lent import LentState
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import UnreadableObject
from rekindle.engine.model import State
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import ObjectMissing, StoreError
from rekindle.identity import Identity
from rekindle.protocol import Endpoint, RestorePoint
from rekindle.streams import server as server_module
from rekindle.streams.server import StreamServer
from rekindle.task import lending
from rekindle.task.lending import LenderStore, StateLender
from rekindle.task.state import TaskState

ADDRESS = "127.0.43.1"
OWN = Identity("u", "token-a")
pytestmark = pytest.mark.process


class Lender:
    """A replica with a state of 20 runs, of which each is an object."""

    def __init__(self, directory: Path) -> None:
        runs = [Run(pa.table({"__w": [at] * 2048, "n": range(at, at + 2048)})) for at in range(20)]
        self.state = TaskState(29, 2900, State({"op": of_runs(*runs)}), "chained")
        self.world = World(directory, self.state)
        self.server = StreamServer(ADDRESS, 0, OWN, incarnation=2)
        self.lender = StateLender(self.world.process, self._describe)
        self.server.serve_lent(self.lender.read)

    def _describe(self, name: str, state: TaskState) -> LentState:
        at = CheckpointName("s", 0, state.epoch, "")
        operators = state.operators
        return LentState(name, "u", at, state.watermark, ("op",), operators, state.chained_digest)

    def lend(self, committed: int = 20) -> str:
        self.world.poll(lend=True, committed=RestorePoint(epoch=committed))
        newest = self.newest
        assert newest is not None
        assert newest.object is not None
        return newest.object

    @property
    def newest(self) -> RestorePoint | None:
        return self.world.core.lending.newest

    def store(self, identity: Identity = OWN, incarnation: int = 2) -> LenderStore:
        address = f"{ADDRESS}:{self.server.port}"
        return LenderStore(Endpoint(address=address, replica=0, incarnation=incarnation), identity)

    def stop(self) -> None:
        self.lender.stop(1)
        self.server.stop()
        self.world.saver.stop(1)


@pytest.fixture
def lender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    monkeypatch.setattr("rekindle.checkpoints.state.OBJECT_BYTES", 1)
    made = Lender(tmp_path / "log")
    yield made
    made.stop()


def test_a_partner_is_restored_from_like_the_store(lender: Lender, tmp_path: Path) -> None:
    name = lender.lend()
    states = StateStore(lender.store(), "u", RunFiles(tmp_path / "runs", memory_bytes=0))
    entry, state, fetch = states.open(name)
    lender.world.loop.state = TaskState(30, 3000, State({"op": of_runs()}))  # it goes on meanwhile
    assert (entry.epoch, entry.watermark, entry.chain) == (29, 2900, "chained")
    fetch.start()
    fetch.finish()
    fetch.stop()
    assert [table["n"][0].as_py() for table in tables_of(state)] == list(range(20))


def test_what_was_not_asked_for_is_not_lent(lender: Lender) -> None:
    with pytest.raises(ObjectMissing, match="not lent any more"):
        lender.store().get("u/lent/boot/29")


def test_a_poll_that_does_not_ask_lends_nothing(lender: Lender) -> None:
    lender.world.poll()
    assert lender.newest is None


def test_a_task_without_state_lends_nothing() -> None:
    server = StreamServer(ADDRESS, 0, OWN, incarnation=2)
    endpoint = Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=2)
    with pytest.raises(ObjectMissing, match="lends no state"):
        LenderStore(endpoint, OWN).get("u/lent/boot/29")
    server.stop()


@pytest.mark.parametrize(
    ("identity", "incarnation"),
    [(Identity("u", "other"), 2), (Identity("other", "token-a"), 2), (OWN, 3)],
)
def test_strangers_get_nothing(lender: Lender, identity: Identity, incarnation: int) -> None:
    name = lender.lend()
    with pytest.raises(ObjectMissing):
        lender.store(identity, incarnation).get(f"u/{name}")


def test_a_damaged_object_is_read_again(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    name, store = lender.lend(), lender.store()
    monkeypatch.setattr(server_module, "lent_digest", lambda data: bytes(16))
    with pytest.raises(UnreadableObject, match="arrived damaged"):
        store.get(f"u/{name}")
    monkeypatch.undo()
    assert store.get(f"u/{name}")


def test_a_lender_that_is_silent_for_long_is_lost(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, store = lender.lend(), lender.store()
    lender.server.stop()
    with pytest.raises(StoreError) as caught:
        store.get(f"u/{name}")
    assert not isinstance(caught.value, ObjectMissing)
    monkeypatch.setattr(lending, "SILENT_S", 0.0)
    with pytest.raises(ObjectMissing, match="does not lend"):
        store.get(f"u/{name}")


def test_a_state_that_nobody_reads_is_forgotten(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender.lend()
    monkeypatch.setattr("rekindle.task.core.lending.LEND_S", 0.0)
    lender.world.process.tell(lender.world.core.woken)
    assert lender.newest is None
    assert not lender.world.core.saver.snapshots.held(lender.state.operators)


def test_few_objects_are_in_memory_for_readers_that_take_none(lender: Lender) -> None:
    name = lender.lend()
    sending = list[int]()

    async def read_slowly(reader: int) -> None:
        async with lender.lender.read(name) as content:
            sending.append(len(content))
            await asyncio.sleep(3600)

    async def read_with_many() -> None:
        readers = [asyncio.create_task(read_slowly(reader)) for reader in range(10)]
        async with asyncio.timeout(10):
            while len(sending) < lending.OBJECTS_AT_ONCE:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # for one more, if there were no bound
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(read_with_many())
    assert len(sending) == lending.OBJECTS_AT_ONCE
