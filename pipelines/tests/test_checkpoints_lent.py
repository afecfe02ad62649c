"""A state that is lent has the entry and the objects that a checkpoint of it would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_parts import of_runs
from window_parts import SHAPE, epochs, folded, history

from rekindle.checkpoints import state as state_module
from rekindle.checkpoints.codec import LENT, CheckpointName
from rekindle.checkpoints.lent import LentState
from rekindle.checkpoints.state import StateStore, entry_digest
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.state.operator import EMPTY, match_columns
from rekindle.engine.state.runs import Run
from rekindle.engine.window_state import advance
from rekindle.errors import ObjectMissing, StateLost, StoreError

NAME = f"{LENT}boot/7"


class Partner:
    """A store with what one partner lends."""

    url = "http://partner"

    def __init__(self, lent: LentState) -> None:
        self.lent = lent
        self.reads: list[str] = []
        self.answers: Callable[[str], bytes] = lent.read

    def put(self, name: str, data: bytes) -> bool:
        raise StoreError("nothing is saved here")

    def get(self, name: str) -> bytes:
        uid, _, lent_name = name.partition("/")
        assert uid == "u"
        self.reads.append(lent_name)
        return self.answers(lent_name)

    read = get


def lend(state: State) -> Partner:
    at = CheckpointName("s", 0, 7, "")
    return Partner(LentState(NAME, "u", at, 70, ("op", "later"), state, "chained"))


def rows_of(state: State) -> list[pa.Table]:
    return [run.table for run in state.operators["op"].runs()]


@given(epochs, st.sampled_from([1, 100, 8 << 20]))
def test_a_borrowed_state_goes_on_as_the_lenders_does(drawn: list[Any], size: int) -> None:
    state = EMPTY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "OBJECT_BYTES", size)
        for rows, epoch in history(drawn):
            partner = lend(State({"op": state}))
            entry, found, fetch = StateStore(partner, "u").open(NAME)
            assert (entry.epoch, entry.watermark, entry.chain) == (7, 70, "chained")
            fetch.finish()
            borrowed = match_columns(SHAPE.run_shape, found.operators.get("op", EMPTY), "op")
            state = advance(SHAPE, state, rows, [epoch]).state
            # As text, since NaN is not equal to itself.
            assert repr(folded(advance(SHAPE, borrowed, rows, [epoch]).state)) == repr(
                folded(state)
            )


def test_it_is_the_entry_that_a_checkpoint_would_have(tmp_path: Path) -> None:
    state = State({"op": of_runs(Run(pa.table({"__w": [1, 2], "n": [3, 4]})))})
    saved = StateStore(Store(f"file://{tmp_path}/store"), "u")
    ref = saved.save("s", 0, 7, 70, ("op", "later"), state, None, "chained")
    assert ref.object is not None
    lent = StateStore(lend(state), "u").load_entry(NAME)
    assert entry_digest(lent) == entry_digest(saved.load_entry(ref.object))


def test_objects_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "OBJECT_BYTES", 1)
    runs = [Run(pa.table({"__w": [at], "n": [at]})) for at in range(3)]
    partner = lend(State({"op": of_runs(*runs)}))
    _, state, fetch = StateStore(partner, "u").open(NAME)
    assert partner.reads == [NAME]
    assert [run.is_available for run in state.operators["op"].runs()] == [False] * 3
    fetch.finish()
    assert sorted(partner.reads[1:]) == [f"{NAME}/{at}" for at in range(3)]
    assert [table["n"].to_pylist() for table in rows_of(state)] == [[0], [1], [2]]


def test_what_is_lent_no_longer_is_lost() -> None:
    partner = lend(State({"op": of_runs(Run(pa.table({"__w": [1], "n": [1]})))}))
    _, _, fetch = StateStore(partner, "u").open(NAME)

    def gone(name: str) -> bytes:
        raise ObjectMissing(name)

    partner.answers = gone
    with pytest.raises(StateLost):
        fetch.finish()
    with pytest.raises(ObjectMissing):
        StateStore(partner, "u").open(NAME)


def test_another_name_is_not_lent() -> None:
    with pytest.raises(ObjectMissing):
        lend(State({})).lent.read(f"{LENT}boot/8")
