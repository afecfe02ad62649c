"""A log that begins with files which another task has shipped to the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_parts import MemorySpill, batch, filled, open_log

from rekindle.errors import LogCorrupt
from rekindle.streams.log import OutputLog
from rekindle.streams.log_files import ShippedFile, held_epochs, refuses_shipped
from rekindle.task.earlier_boots import held_log, is_doubted

FILES = (("a", 0, 9), ("b", 10, 19))


class CountingSpill(MemorySpill):
    fetched = 0

    def get(self, name: str) -> bytes:  # type: ignore[override]
        self.fetched += 1
        return super().get(name)


@pytest.fixture
def store(tmp_path: Path) -> CountingSpill:
    """Two files of ten epochs each."""
    store = CountingSpill()
    log = filled(tmp_path / "before", 20, file_bytes=1 << 20)
    for name, first, last in FILES:
        part = open_log(tmp_path / name)
        part.start_at(first)
        for epoch in range(first, last + 1):
            part.append(log.read(epoch, 0)[0])
        (path,) = (tmp_path / name).glob("*.log")
        store[name] = path.read_bytes()
    return store


def adopting(directory: Path, store: MemorySpill) -> OutputLog:
    log = open_log(directory, spill=store)
    log.start_at(20, keep=False)
    log.adopt([ShippedFile(name, first, last, len(store[name])) for name, first, last in FILES])
    return log


def test_nothing_is_fetched_before_it_is_read(tmp_path: Path, store: CountingSpill) -> None:
    log = adopting(tmp_path / "log", store)
    assert (log.base, log.last) == (0, 19)
    log.append(batch(20))
    assert [b.epoch for b in log.read(20, 1 << 20)] == [20]
    assert store.fetched == 0
    assert log.local_bytes < 1000
    found = log.read(0, 1 << 20)
    assert [(b.epoch, b.digest) for b in found] == [(e, batch(e).digest) for e in range(21)]
    assert store.fetched == 2


def test_it_is_there_after_a_restart(tmp_path: Path, store: CountingSpill) -> None:
    home = tmp_path / "log"
    log = adopting(home, store)
    log.append(batch(20))
    log.close()
    assert held_epochs(home) == (0, 20)
    again = open_log(home, spill=store)
    assert [b.epoch for b in again.read(0, 1 << 20)] == list(range(21))
    assert set(again.results(5)) == {20}, "digests of what was shipped are not known"
    assert not again.append(batch(7)), "nor compared"


def test_truncation_leaves_the_objects_to_the_coordinator(
    tmp_path: Path, store: CountingSpill
) -> None:
    log = adopting(tmp_path / "log", store)
    log.truncate(12)
    assert log.base == 10
    assert set(store) == {"a", "b"}
    log.truncate(19)
    assert log.base == 20
    assert not list((tmp_path / "log").glob("*.spilled"))


def test_an_object_that_is_gone_costs_the_log_from_there_on(
    tmp_path: Path, store: CountingSpill
) -> None:
    home = tmp_path / "log"
    log = adopting(home, store)
    log.append(batch(20))
    del store["b"]
    assert len(log.read(0, 0)) == 1
    with pytest.raises(LogCorrupt, match="missing"):
        log.read(10, 0)
    assert log.damage is not None
    log.close()
    assert held_epochs(home) == (0, 9), "a later file would make the log begin too late"


@pytest.mark.parametrize("content", [None, b"RKL1", b"RKL9" + bytes(200)])
def test_what_cannot_be_read_is_not_adopted_again(
    tmp_path: Path, store: CountingSpill, content: bytes | None
) -> None:
    """Such as records of another release, or an object that the store does not delete: the task
    would restart for ever."""
    home = tmp_path / "log"
    log = adopting(home, store)
    assert not refuses_shipped(home)
    if content is None:
        del store["b"]
    else:
        store["b"] = content
    with pytest.raises(LogCorrupt):
        log.read(10, 0)
    log.close()
    assert refuses_shipped(home)
    assert is_doubted(home)
    assert held_log(home, has_no_partners=True) == (0, 9), "what can be read is the task's own"


def test_only_an_empty_log_adopts(tmp_path: Path, store: CountingSpill) -> None:
    log = filled(tmp_path / "log", 3, spill=store)
    with pytest.raises(ValueError, match="empty"):
        log.adopt([ShippedFile("a", 0, 9, 10)])
