"""Branches of an output log: tentative epochs beside the stable ones, dropped at no cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams.branches import Branches


@dataclass(frozen=True)
class Part:
    """Epochs of one branch."""

    branch: int
    first: int
    last: int


def stable(*lengths: int, begin: int = 0) -> Branches[Part]:
    branches: Branches[Part] = Branches()
    branches.stable.restart_at(begin)
    for length in lengths:
        first = branches.stable.next_epoch
        branches.stable.add(Part(0, first, first + length - 1))
    return branches


def test_a_branch_reads_stable_epochs_up_to_its_fork() -> None:
    branches = stable(10, 10)
    tentative = branches.fork(1, after=14)
    tentative.add(Part(1, 15, 17))
    branches.stable.add(Part(0, 20, 29))  # the corrected epochs
    seen = [branches.holding(1, epoch) for epoch in (3, 14, 15, 17, 18)]
    assert [part and part.branch for part in seen] == [0, 0, 1, 1, None]
    assert [part and part.first for part in seen] == [0, 10, 15, 15, None]


def test_dropping_a_branch_touches_no_other() -> None:
    branches = stable(10)
    for attempt in (1, 2):
        branches.fork(attempt, after=4).add(Part(attempt, 5, 9))
    assert branches.drop(1) == [Part(1, 5, 9)]
    assert branches.stable.extents == (Part(0, 0, 9),)
    assert branches.holding(2, 5) == Part(2, 5, 9)
    with pytest.raises(KeyError):
        branches.holding(1, 5)


def test_a_branch_outlives_the_truncation_of_what_it_forked_from() -> None:
    branches = stable(10, 10)
    branches.fork(1, after=19).add(Part(1, 20, 21))
    branches.stable.drop_through(19)
    assert branches.holding(1, 19) is None
    assert branches.holding(1, 20) == Part(1, 20, 21)


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_attempt_begins_one_branch(attempt: int) -> None:
    branches = stable(10)
    branches.fork(1, after=4)
    with pytest.raises(ValueError, match=f"attempt {attempt} cannot begin"):
        branches.fork(attempt, after=4)


@pytest.mark.parametrize("after", [3, 20])
def test_a_fork_follows_an_epoch_of_the_log(after: int) -> None:
    branches = stable(10, begin=5)
    branches.fork(1, after=4)
    with pytest.raises(ValueError, match=f"cannot follow epoch {after}"):
        branches.fork(2, after=after)


def test_extents_have_no_gaps() -> None:
    branches = stable(10)
    with pytest.raises(ValueError, match="epoch 11 cannot follow 9"):
        branches.stable.add(Part(0, 11, 12))


@given(st.lists(st.integers(1, 5), max_size=10), st.integers(-1, 60))
def test_whole_extents_up_to_the_floor_are_dropped(lengths: list[int], floor: int) -> None:
    branch = stable(*lengths).stable
    end = branch.next_epoch
    dropped = branch.drop_through(floor)
    assert all(part.last <= floor for part in dropped)
    assert all(part.last > floor for part in branch.extents)
    assert branch.next_epoch == end
    assert branch.base == (dropped[-1].last + 1 if dropped else 0)
    for epoch in range(-1, end + 1):
        part = branch.holding(epoch)
        assert (part is not None) == (branch.base <= epoch < end)
        assert part is None or part.first <= epoch <= part.last
