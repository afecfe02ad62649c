"""When a sink is opened, written to and checked, whatever it and the log do."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from random_histories import histories

from rekindle.protocol import SinkAssignment
from rekindle.streams.epochs import last_of_group
from rekindle.task.core.sink import (
    RETRY_CONFLICTS_S,
    CheckConflicts,
    OpenSink,
    SinkCore,
    SinkEffect,
    StartWriter,
    StopWriter,
    WriteEpochs,
    assignment_changes,
)
from rekindle.topology.spec import SinkSpec

FROM = 5


def assigned(query: str = "q", from_epoch: int = FROM) -> SinkAssignment:
    return SinkAssignment(query=query, from_epoch=from_epoch, sink=SinkSpec())


class FakeShell:
    """A log and a sink in memory, which perform the core's calls when a test requests it."""

    def __init__(self, newest_in_sink: int = -1, written_through: int = -1, group: int = 1) -> None:
        self.group = group  # epochs in a group
        self.core = SinkCore(assigned(), written_through)
        self.now = 0.0
        self.log_last = -1
        self.through: int | None = None
        self.newest_in_sink = newest_in_sink  # at its start
        self.written: list[int] = []
        self.opened = 0
        self.conflict: str | None = None
        self.checks: list[float] = []
        self.call: SinkEffect | None = None
        self.perform(self.core.woken(self.now))

    def perform(self, effects: list[SinkEffect]) -> None:
        for effect in effects:
            assert self.call is None, "one call at a time"
            assert not isinstance(effect, WriteEpochs) or self.opened
            self.call = effect

    def succeed(self) -> None:
        call, self.call = self.call, None
        match call:
            case OpenSink(after, _):
                self.opened += 1
                last = max(self.newest_in_sink, after)
                self.perform(self.core.opened(last, None, self.now, self.group))
            case WriteEpochs(epoch):
                while self._may_write_group(last := last_of_group(epoch, self.group)):
                    self.write(epoch, last)
                    epoch = last + 1
                self.perform(self.core.write_ended(self.now))
            case CheckConflicts():
                self.checks.append(self.now)
                self.perform(self.core.conflicts_checked(self.conflict, self.now))

    def _may_write_group(self, last: int) -> bool:
        return last <= self.log_last and self.core.may_write(last)

    def write(self, epoch: int, last: int) -> None:
        assert self.through is None or last <= self.through
        self.written += range(epoch, last + 1)
        self.perform(self.core.epoch_written(last, self.conflict, self.now))

    def write_one_and_fail(self) -> None:
        call = self.call
        if isinstance(call, WriteEpochs):
            last = last_of_group(call.from_epoch, self.group)
            assert last <= self.log_last, "a group is written once the log has all of it"
            if self.core.may_write(last):
                self.write(call.from_epoch, last)
        self.fail()

    def fail(self) -> None:
        if self.call is not None:
            self.call = None
            self.perform(self.core.call_failed("the disk is full", self.now))

    def abandon(self) -> None:
        self.call = None
        self.perform(self.core.call_abandoned(self.now))

    def grow(self) -> None:
        self.log_last += 3
        self.perform(self.core.log_grew(self.log_last, self.now))

    def pause(self) -> None:
        self.through = self.log_last - 1
        self.perform(self.core.write_limit_changed(self.through, self.now))

    def resume(self) -> None:
        self.through = None
        self.perform(self.core.write_limit_changed(None, self.now))

    def begin_conflict(self) -> None:
        self.conflict = "epoch 5 exists with rows that differ"

    def end_conflict(self) -> None:
        self.conflict = None

    def pass_time(self) -> None:
        self.now += 0.4
        self.perform(self.core.woken(self.now))


MOVES = histories(
    (
        *("pass_time", "succeed", "succeed", "succeed", "grow", "grow", "resume"),
        *("write_one_and_fail", "fail", "abandon", "pause", "begin_conflict", "end_conflict"),
    ),
    60,
)
NEWEST = st.integers(-1, 20)


def play(
    moves: list[str], newest_in_sink: int = -1, written_through: int = -1, group: int = 1
) -> FakeShell:
    shell = FakeShell(newest_in_sink, written_through, group)
    for move in moves:
        getattr(shell, move)()
    return shell


@given(MOVES, NEWEST, NEWEST, st.integers(1, 5))
def test_epochs_are_written_in_order_after_the_newest_one(
    moves: list[str], newest_in_sink: int, written_through: int, group: int
) -> None:
    shell = play(moves, newest_in_sink, written_through, group)
    first = max(FROM, newest_in_sink + 1, written_through + 1)
    assert shell.written == list(range(first, first + len(shell.written)))
    if shell.written:
        assert shell.core.progress().durable == shell.written[-1]


@given(MOVES, st.integers(1, 5))
def test_all_is_written_once_nothing_fails(moves: list[str], group: int) -> None:
    """In whole groups: the rest waits."""
    shell = play(moves, group=group)
    shell.end_conflict()
    shell.resume()
    shell.grow()
    shell.grow()
    for _ in range(6):
        shell.succeed()
        if shell.core.wake_at is not None:
            shell.now = max(shell.now, shell.core.wake_at)
            shell.perform(shell.core.woken(shell.now))
    whole = shell.log_last - (shell.log_last + 1) % group
    assert shell.core.progress().durable == max(whole, FROM - 1)
    assert shell.core.has_written(shell.log_last)
    assert shell.core.problem is None
    assert shell.core.progress().conflict is None


@given(MOVES)
def test_conflicts_are_checked_at_a_slow_pace(moves: list[str]) -> None:
    checks = play([*moves, "begin_conflict", *["pass_time", "succeed"] * 30]).checks
    assert all(b - a >= RETRY_CONFLICTS_S for a, b in itertools.pairwise(checks))


@given(MOVES)
def test_a_core_waits_for_no_time_during_a_call(moves: list[str]) -> None:
    core = (shell := play(moves)).core
    assert shell.call is None or core.wake_at is None


def test_a_failed_call_is_repeated_after_a_growing_back_off() -> None:
    shell = FakeShell()
    waits = []
    for _ in range(8):
        shell.fail()
        assert shell.core.wake_at is not None
        waits.append(round(shell.core.wake_at - shell.now, 3))
        shell.now = shell.core.wake_at
        shell.perform(shell.core.woken(shell.now))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_slow_check_is_followed_by_a_longer_pause() -> None:
    shell = play(["succeed", "grow", "grow", "grow", "begin_conflict", "succeed"])
    assert isinstance(shell.call, CheckConflicts)
    shell.now += 10
    shell.succeed()
    assert shell.core.wake_at == shell.now + 40


def test_epochs_of_a_boot_that_may_be_wrong_are_compared() -> None:
    core = SinkCore(assigned(from_epoch=0), written_through=3, compare_files_from=8)
    assert core.woken(0.0) == [OpenSink(3, read_first_epoch=True)]
    core.opened(last=20, first=0, now=0.0)
    assert core.next_epoch == 8
    newer_definition = SinkCore(assigned(from_epoch=0), written_through=3, compare_files_from=8)
    newer_definition.woken(0.0)
    newer_definition.opened(last=20, first=12, now=0.0)
    assert newer_definition.next_epoch == 12, "not before its definition's first epoch"


def test_a_changed_assignment_replaces_its_writer() -> None:
    a, b, c = assigned("a"), assigned("b"), assigned("c")
    from_another_epoch = assigned("b", from_epoch=9)
    assert assignment_changes({"a": a, "b": b}, [a, from_another_epoch, c]) == [
        StopWriter("b"),
        StartWriter(from_another_epoch),
        StartWriter(c),
    ]
    assert assignment_changes({"a": a}, []) == [StopWriter("a")]
    assert assignment_changes({"a": a}, [a]) == []


def test_a_setting_that_changes_in_place_keeps_its_writer() -> None:
    before = SinkAssignment(query="q", from_epoch=3, sink=stream_sink(retain="1Mi"))
    after = SinkAssignment(query="q", from_epoch=3, sink=stream_sink(retain="2Mi", tentative=True))
    moved = SinkAssignment(query="q", from_epoch=9, sink=after.sink)
    assert assignment_changes({"q": before}, [after]) == []
    assert assignment_changes({"q": before}, [moved]) == [StopWriter("q"), StartWriter(moved)]


def stream_sink(**options: object) -> SinkSpec:
    return SinkSpec.model_validate({"stream": options})
