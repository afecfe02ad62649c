"""Which epochs are in a call, and what is retried, whatever inputs, engine and log do."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_histories import histories

from rekindle.engine.call_sizes import MAX_CRASHES, CallSizes
from rekindle.engine.failure import EngineUnavailable, OutOfMemory
from rekindle.engine.memory import plan_memory
from rekindle.engine.model import EpochOutput, State
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.streams.epochs import EpochInput
from rekindle.task.core.loop import (
    VALID_EVENTS,
    AppendEpochs,
    CallCompleted,
    CheckpointReached,
    EpochComputed,
    GiveUp,
    LoopCore,
    LoopEffect,
    LoopPhase,
    LoopRequest,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
    TentativeCompleted,
)
from rekindle.task.core.problems import SetProblem
from rekindle.task.state import TaskState
from rekindle.transitions import InvalidTransition

CHECKPOINT_EVERY = 4


@dataclass(frozen=True)
class FakeRows:
    num_rows: int = 1
    nbytes: int = 8


ROWS = FakeRows()


@dataclass
class FakeShell:
    """Inputs, an engine and a log in memory; each request succeeds or fails when a test says so."""

    core: LoopCore = field(
        default_factory=lambda: LoopCore(
            TaskState(-1, 0, State()), CHECKPOINT_EVERY, CallSizes.of(plan_memory())
        )
    )
    now: float = 0.0
    released: int = -1
    taken: int = -1
    request: LoopRequest | None = None
    log: list[str] = field(default_factory=list)
    chained: list[str] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    saved: list[TaskState] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    def perform(self, effects: list[LoopEffect]) -> None:
        for effect in effects:
            match effect:
                case SetProblem(subject, problem):
                    self.problems.pop(subject, None)
                    if problem is not None:
                        self.problems[subject] = problem.message
                case EpochComputed(epoch, _, chained):
                    assert epoch == len(self.chained)
                    self.chained.append(chained)
                case CallCompleted(epochs, _):
                    self.calls.append([e.epoch for e in epochs])
                case CheckpointReached(state):
                    self.saved.append(state)
                case GiveUp(error):
                    self.error = error
                case TentativeCompleted():
                    raise AssertionError("nothing is tentative without branches")
                case _:
                    assert self.request is None, "one request at a time"
                    self.request = effect

    def wake(self) -> None:
        if self.core.wake_at is not None:
            self.now = max(self.now, self.core.wake_at)
            self.perform(self.core.woken(self.now))

    def release(self) -> None:
        self.released += 3

    def succeed(self) -> None:
        request, self.request = self.request, None
        match request:
            case TakeEpochs(bounds):
                last = min(self.released, self.taken + bounds.max_epochs)
                epochs = [made(e) for e in range(self.taken + 1, last + 1)]
                self.taken = max(self.taken, last)
                self.perform(self.core.epochs_taken(epochs, self.now))
            case ProcessEpochs(_, epochs):
                outputs = tuple(EpochOutput(e.epoch, e.watermark, ROWS) for e in epochs)
                self.perform(self.core.epochs_processed(outputs, State(), self.now))
            case AppendEpochs(outputs):
                for output in outputs:
                    self.append(output)
            case RestartEngine():
                self.perform(self.core.engine_restarted(self.now))

    def append(self, output: EpochOutput) -> None:
        assert output.epoch == len(self.log)
        self.log.append(f"d{output.epoch}")
        self.perform(self.core.epochs_appended(self.log[-1:], self.now))

    def append_one_and_fail(self) -> None:
        if isinstance(self.request, AppendEpochs) and len(self.request.outputs) > 1:
            self.append(self.request.outputs[0])
        self.fail()

    def fail(self) -> None:
        if self.request is not None:
            self.request = None
            self.perform(self.core.request_failed("not now", self.now))

    def crash(self) -> None:
        """The engine dies in the call."""
        if isinstance(self.request, ProcessEpochs) and len(self.request.epochs) > 1:
            self.engine_failed(EngineUnavailable("the JVM died", -9))

    def engine_failed(self, error: EngineUnavailable | OutOfMemory) -> None:
        self.request = None
        self.perform(self.core.engine_failed(error, self.now))

    def die(self) -> None:
        """The engine died before the call began."""
        if isinstance(self.request, TakeEpochs | ProcessEpochs):
            self.request = None
            self.perform(self.core.idle_engine_died("the JVM died", self.now))


def made(epoch: int) -> EpochInput:
    return EpochInput(epoch, 10 * epoch, 10 * epoch + 10, (ROWS,))


MOVES = histories(
    (
        *("wake", "wake", "release", "succeed", "succeed", "succeed", "succeed"),
        *("append_one_and_fail", "fail", "crash", "die"),
    ),
    80,
)


def play(moves: list[str]) -> FakeShell:
    shell = FakeShell()
    for move in moves:
        getattr(shell, move)()
    return shell


@given(MOVES)
def test_every_epoch_is_appended_once_and_in_order(moves: list[str]) -> None:
    shell = play(moves)
    assert shell.error is None
    computed = [e for call in shell.calls for e in call]
    assert computed == list(range(len(computed)))
    assert shell.core.state.epoch == len(computed) - 1


@given(MOVES)
def test_no_call_goes_beyond_a_checkpoint_epoch(moves: list[str]) -> None:
    shell = play(moves)
    for call in shell.calls:
        assert call[0] // CHECKPOINT_EVERY == call[-1] // CHECKPOINT_EVERY
    done = shell.core.state.epoch
    assert [s.epoch for s in shell.saved] == list(
        range(CHECKPOINT_EVERY - 1, done + 1, CHECKPOINT_EVERY)
    )


@given(MOVES)
def test_a_chained_digest_does_not_depend_on_calls(moves: list[str]) -> None:
    shell, chained = play(moves), chained_digest_from(-1)
    for epoch, digest in enumerate(shell.log):
        chained = chain_digest(chained, epoch, 10 * epoch + 10, digest)
        assert shell.chained[epoch] == chained
    assert shell.core.chained == chained


@given(MOVES)
def test_all_is_computed_once_nothing_fails(moves: list[str]) -> None:
    shell = play([*moves, "release"])
    for _ in range(4 * shell.released + 20):
        shell.wake()
        shell.succeed()
    assert shell.core.state.epoch == shell.released
    assert (shell.problems, shell.core.phase) == ({}, LoopPhase.TAKING)


@given(MOVES)
def test_the_core_requests_something_or_says_when_to_wake_it(moves: list[str]) -> None:
    shell = play(moves)
    assert (shell.request is None) == (shell.core.wake_at is not None)


@given(MOVES, st.sampled_from(sorted(set().union(*VALID_EVENTS.values()))))
def test_an_event_outside_the_table_is_refused(moves: list[str], event: str) -> None:
    core = play(moves).core
    if event in VALID_EVENTS[core.phase]:
        return
    happened = getattr(core, event)
    with pytest.raises(InvalidTransition, match=f"loop: {event} while {core.phase}"):
        happened(*[None] * len(signature(happened).parameters))


def test_back_offs_grow_until_a_call_succeeds() -> None:
    shell, waits = FakeShell(), []
    shell.wake()
    for _ in range(7):
        shell.fail()
        assert shell.core.wake_at is not None
        waits.append(round(shell.core.wake_at - shell.now, 3))
        shell.wake()
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert shell.problems == {"input": "not now"}
    shell.succeed()
    assert shell.problems == {}
    shell.fail()
    assert shell.core.wake_at == shell.now + 0.1


def test_a_call_that_is_too_large_is_halved() -> None:
    shell = FakeShell()
    shell.released = 3
    shell.wake()
    shell.succeed()
    assert isinstance(shell.request, ProcessEpochs)
    shell.engine_failed(OutOfMemory("the heap is full"))
    assert isinstance(shell.request, RestartEngine)
    shell.succeed()
    assert isinstance(shell.request, ProcessEpochs)
    assert [e.epoch for e in shell.request.epochs] == [0, 1]
    assert shell.problems == {"engine": "the heap is full"}, "until a call succeeds"


def test_an_engine_that_keeps_dying_ends_the_task() -> None:
    shell = FakeShell()
    shell.released = 0
    shell.wake()
    shell.succeed()
    for _ in range(MAX_CRASHES + 1):
        assert shell.error is None
        shell.engine_failed(EngineUnavailable("the JVM died (status 134)", 134))
        shell.succeed()
    assert isinstance(shell.error, EngineUnavailable)


def test_an_engine_that_returns_other_epochs_is_a_bug() -> None:
    shell = FakeShell()
    shell.released = 1
    shell.wake()
    shell.succeed()
    shell.request = None
    shell.perform(shell.core.epochs_processed((EpochOutput(1, 0, ROWS),), State(), shell.now))
    assert "returned epochs [1] for [0, 1]" in str(shell.error)


# --- branches ---


@dataclass(slots=True, weakref_slot=True)
class Held:
    """Something large in a state."""


def state_of(held: Held) -> State:
    return State({"operator": cast(Any, held)})


def computed(core: LoopCore, epoch: int) -> list[object]:
    """One stable epoch."""
    outputs = (EpochOutput(epoch, 10 * epoch + 10, ROWS),)
    effects: list[object] = [*core.epochs_taken([made(epoch)], 0.0)]
    effects += core.epochs_processed(outputs, State(), 0.0)
    return [*effects, *core.epochs_appended([f"d{epoch}"], 0.0)]


def test_a_restored_state_is_not_kept() -> None:
    held = Held()
    kept = weakref.ref(held)
    core = LoopCore(TaskState(-1, 0, state_of(held)), CHECKPOINT_EVERY, CallSizes.of(plan_memory()))
    del held
    core.woken(0.0)
    computed(core, 0)
    assert kept() is None


def tentative(core: LoopCore, epoch: int, operators: State) -> None:
    core.tentative_taken(1, made(epoch), forks=True, now=0.0)
    core.epochs_processed((EpochOutput(epoch, 0, ROWS),), operators, 0.0)
    core.tentative_appended(0.0)


def with_branches() -> LoopCore:
    sizes = CallSizes.of(plan_memory())
    core = LoopCore(TaskState(-1, 0, State()), CHECKPOINT_EVERY, sizes, takes_again=True)
    core.woken(0.0)
    return core


def test_the_state_of_a_branch_is_not_kept_after_it() -> None:
    core, held = with_branches(), Held()
    kept = weakref.ref(held)
    tentative(core, 0, state_of(held))
    del held
    computed(core, 0)
    assert kept() is not None
    core.fork_dropped(0.0)
    assert kept() is None


def test_a_problem_of_a_branch_ends_with_it() -> None:
    core = with_branches()
    core.tentative_taken(1, made(0), forks=True, now=0.0)
    core.tentative_failed("a cast failed", 0.0)
    assert SetProblem("tentative", None) in core.fork_dropped(0.0)
