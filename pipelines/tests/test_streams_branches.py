"""A branch of an output log: consecutive epochs in extents (log files)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams.branches import Branch


@dataclass(frozen=True)
class FakeLogFile:
    """An extent."""

    first: int
    last: int


def branch_of(*lengths: int) -> Branch[FakeLogFile]:
    branch: Branch[FakeLogFile] = Branch(0)
    for length in lengths:
        first = branch.next_epoch
        branch.add(FakeLogFile(first, first + length - 1))
    return branch


def test_extents_have_no_gaps() -> None:
    with pytest.raises(ValueError, match="epoch 11 cannot follow 9"):
        branch_of(10).add(FakeLogFile(11, 12))


def test_a_branch_begins_again_without_extents() -> None:
    branch = branch_of(10, 3)
    assert branch.restart_at(20) == [FakeLogFile(0, 9), FakeLogFile(10, 12)]
    assert (branch.base, branch.next_epoch, branch.newest) == (20, 20, None)


@given(st.lists(st.integers(1, 5), max_size=10), st.integers(-1, 60))
def test_whole_extents_up_to_the_floor_are_dropped(lengths: list[int], floor: int) -> None:
    branch = branch_of(*lengths)
    end = branch.next_epoch
    dropped = branch.drop_through(floor)
    assert all(part.last <= floor for part in dropped)
    assert all(part.last > floor for part in branch.extents)
    assert branch.next_epoch == end
    assert branch.base == (dropped[-1].last + 1 if dropped else 0)
    for epoch in range(-1, end + 1):
        part = branch.find(epoch)
        assert (part is not None) == (branch.base <= epoch < end)
        assert part is None or part.first <= epoch <= part.last
