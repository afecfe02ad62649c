"""What a task prepares before its first epoch, in order, whatever is missing for a while."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.protocol import RestorePoint, TaskProblem
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.start import (
    NEXT,
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
    StartCall,
    StartCore,
    StartEffect,
    StartStep,
)
from rekindle.transitions import InvalidTransition

POINT = RestorePoint(epoch=9)


@dataclass
class FakeShell:
    core: StartCore = field(default_factory=StartCore)
    now: float = 0.0
    call: StartCall | None = None
    done: list[type] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def perform(self, effects: list[StartEffect]) -> None:
        for effect in effects:
            match effect:
                case SetProblem(subject, problem):
                    self.problems.pop(subject, None)
                    if problem is not None:
                        self.problems[subject] = problem.message
                case CompleteStart():
                    self.done.append(CompleteStart)
                case _:
                    assert self.call is None, "one call at a time"
                    self.call = effect

    def succeed(self) -> None:
        if self.call is not None:
            self.done.append(type(self.call))
            self.call = None
            self.perform(self.core.step_succeeded(self.now))

    def fail(self) -> None:
        if isinstance(self.call, RestoreState | OpenInputs):
            self.call = None
            self.perform(self.core.step_failed(TaskProblem(message="not there"), self.now))

    def wake(self) -> None:
        self.now = max(self.now, self.core.wake_at or 0.0)
        self.perform(self.core.woken(self.now))


ORDER = [RestoreState, OpenInputs, AwaitEngine, CompleteStart]
MOVES = st.lists(st.sampled_from(("succeed", "fail", "wake")), max_size=12)


def play(moves: list[str]) -> FakeShell:
    shell = FakeShell()
    shell.perform(shell.core.start_requested(POINT, 0.0))
    for move in moves:
        getattr(shell, move)()
    return shell


@given(MOVES)
def test_steps_of_a_start_succeed_once_and_in_order(moves: list[str]) -> None:
    shell = play(moves)
    assert shell.done == ORDER[: len(shell.done)]
    for _ in range(8):
        shell.succeed()
        shell.wake()
    assert shell.done == ORDER
    assert shell.problems == {}


@given(MOVES)
def test_what_is_missing_is_reported(moves: list[str]) -> None:
    shell = play(moves)
    waits = shell.core.wake_at is not None
    assert not waits or shell.problems
    assert (shell.call is not None) + waits == (shell.core.waits_for is not StartStep.NOTHING)


def test_back_offs_grow_and_begin_anew_with_each_step() -> None:
    shell, waits = play([]), []
    for _ in range(9):
        shell.fail()
        assert shell.core.wake_at is not None
        waits.append(round(shell.core.wake_at - shell.now, 2))
        shell.wake()
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    shell.succeed()
    shell.fail()
    assert shell.core.wake_at == shell.now + 0.05


def test_events_out_of_order_are_refused() -> None:
    with pytest.raises(InvalidTransition, match="invalid in state a restore point"):
        StartCore().step_failed(TaskProblem(message="x"), 0.0)
    with pytest.raises(InvalidTransition, match="invalid in state its engine"):
        play(["succeed", "succeed"]).core.start_requested(POINT, 0.0)
    with pytest.raises(InvalidTransition, match="invalid in state nothing"):
        play(["succeed"] * 3).core.step_succeeded(0.0)


def test_every_step_leads_to_the_end() -> None:
    assert set(NEXT) == set(StartStep)
    after = {step for row in NEXT.values() for step in row.values()}
    assert after | {StartStep.RESTORE_POINT} == set(StartStep)
