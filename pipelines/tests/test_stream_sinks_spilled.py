"""What calls hold of spilled files, whoever reads slowly."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from log_parts import MemorySpill, batch, filled

from rekindle.errors import RekindleError
from rekindle.stream_sinks.cursor import Cursor
from rekindle.stream_sinks.reading import Message, ReadCall, ServedQuery
from rekindle.stream_sinks.spilled import SpilledReads, TooManySpilledReads
from rekindle.stream_sinks.ticket import Ticket
from rekindle.streams.log import OutputLog

ROWS = 2000  # 44 KiB
EPOCHS = 60


@pytest.fixture
def log(tmp_path: Path) -> OutputLog:
    """Most of it is in the store, each epoch in a file of its own; none of it is cached."""
    made = filled(tmp_path, EPOCHS, ROWS, budget=400_000, spill=MemorySpill(), fetched_bytes=1)
    made._fetched.clear()
    return made


Messages = Generator[Message, None, None]


def messages(served: ServedQuery, epoch: int) -> Messages:
    return cast(Messages, ReadCall(served, Ticket("q", cursor=Cursor(epoch))).messages())


def epochs(found: Iterator[Message]) -> list[int]:
    parsed = [json.loads(metadata) for _, metadata in found]
    return [metadata["epoch"] for metadata in parsed if metadata["kind"] == "STABLE"]


def test_spilled_epochs_are_read(log: OutputLog) -> None:
    assert log.spilled(0) is not None
    served = ServedQuery("q", log, None)
    found = list(messages(served, 0))
    assert epochs(iter(found)) == list(range(EPOCHS))
    assert found[7].rows.equals(batch(7, ROWS).rows.to_batches()[0])
    assert not served.spilled.held_bytes


def test_slow_readers_hold_no_files(log: OutputLog) -> None:
    served = ServedQuery("q", log, None)
    slow = [messages(served, epoch) for epoch in range(0, 40, 4)]
    for reader in slow:
        next(reader)
    assert len(log._fetched._in_use) <= 1
    for reader in slow:
        reader.close()
    assert not served.spilled.held_bytes


def test_what_slow_readers_hold_is_bounded(log: OutputLog) -> None:
    spilled = SpilledReads(max_bytes=3 << 20, wait_s=0.01)
    served = ServedQuery("q", log, None, spilled=spilled)
    slow = [messages(served, 0) for _ in range(2)]
    for reader in slow:
        next(reader)
    assert 2 << 20 > spilled.held_bytes > 1 << 20
    third = messages(served, 0)
    next(third)
    with closing(messages(served, 0)) as refused, pytest.raises(RekindleError, match="try again"):
        next(refused)
    assert epochs(messages(served, EPOCHS - 1)) == [EPOCHS - 1], "local ones need none of it"
    third.close()
    with closing(messages(served, 0)) as again:
        next(again)


def test_a_call_ends_early_rather_than_wait(log: OutputLog) -> None:
    class BusyAfterOne(SpilledReads):
        def _hold(self, size: int) -> None:
            if self.calls:
                raise TooManySpilledReads("try again")
            self.calls += 1
            super()._hold(size)

        calls = 0

    served = ServedQuery("q", log, None, spilled=BusyAfterOne())
    found = list(messages(served, 0))
    sent = epochs(iter(found))
    assert sent == list(range(len(sent)))
    assert 0 < len(sent) < EPOCHS
    assert json.loads(found[-1].metadata)["kind"] == "END"


def test_one_epoch_may_be_larger(log: OutputLog) -> None:
    served = ServedQuery("q", log, None, spilled=SpilledReads(max_bytes=1))
    assert epochs(messages(served, 0)) == list(range(EPOCHS))
