"""How a task starts, follows polls, fails and ends, in whatever order that happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rekindle.protocol import PollRequest, RestorePoint, TaskRef
from rekindle.task.core.supervisor import (
    CALL_TIMEOUT_S,
    FLUSH_TIMEOUT_S,
    NEXT,
    REPORT_FAILURE_S,
    CompareSinkFiles,
    DiscardLog,
    EndProcess,
    ProcessPhase,
    ReportDigests,
    RouteInputs,
    RunLoop,
    SetCommittedEntry,
    SetSinks,
    StartTask,
    StopSinks,
    SupervisorCore,
    SupervisorEffect,
    TruncateLog,
)

REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=1)
NEEDS_COMPONENTS = SetSinks | SetCommittedEntry | TruncateLog | RunLoop


def poll(**changes: object) -> PollRequest:
    return PollRequest(fence=1, generation=1, task=REF).model_copy(update=changes)


RESTORE = poll(restore=RestorePoint(epoch=9), floor=20)


@dataclass
class Process:
    """Performs the core's effects; a start succeeds when a test says so."""

    core: SupervisorCore = field(default_factory=lambda: SupervisorCore("boot"))
    now: float = 0.0
    effects: list[SupervisorEffect] = field(default_factory=list)
    starting: bool = False
    running: bool = False
    failed: bool = False

    def perform(self, effects: list[SupervisorEffect]) -> list[SupervisorEffect]:
        for effect in effects:
            assert self.running or not isinstance(effect, NEEDS_COMPONENTS)
            self.starting |= isinstance(effect, StartTask)
        self.effects += effects
        return effects

    def accept(self, poll: PollRequest) -> list[SupervisorEffect]:
        return self.perform(self.core.poll_accepted(poll, self.now))

    def poll_without_restore_point(self) -> None:
        self.accept(poll())

    def restore(self) -> None:
        self.accept(RESTORE)

    def recompute(self) -> None:
        self.accept(RESTORE.model_copy(update={"recompute": "boot"}))

    def start(self) -> None:
        if self.starting and self.core.phase is ProcessPhase.STARTING:
            self.starting, self.running = False, True
            self.perform(self.core.started(self.now))

    def progress(self) -> None:
        self.perform(self.core.sinks_progressed([12, 30], self.now))

    def fail(self, permanent: bool = False) -> None:
        self.failed |= not self.core.ended
        self.perform(self.core.task_failed(permanent, self.now))

    def fail_permanently(self) -> None:
        self.fail(permanent=True)

    def report(self) -> None:
        self.perform(self.core.failure_reported(self.now))

    def stop(self) -> None:
        self.perform(self.core.stop_requested(self.now))

    def pass_time(self) -> None:
        self.now += 3
        self.perform(self.core.woken(self.now))

    def ends(self) -> list[EndProcess]:
        return [e for e in self.effects if isinstance(e, EndProcess)]


MOVES = (
    *("poll_without_restore_point", "restore", "recompute", "start", "progress"),
    *("fail", "fail_permanently", "report", "stop", "pass_time"),
)


def play(moves: list[str]) -> Process:
    process = Process()
    for move in moves:
        getattr(process, move)()
    return process


EARLY = st.lists(st.sampled_from(MOVES), max_size=6)
LATE = st.lists(st.sampled_from(MOVES), max_size=12)
HISTORIES = EARLY | LATE.map(lambda moves: ["restore", "start", *moves])


@given(HISTORIES)
def test_a_process_ends_once_and_then_does_nothing(moves: list[str]) -> None:
    process = play(moves)
    assert len(process.ends()) == process.core.ended
    if process.core.ended:
        for move in MOVES:
            getattr(process, move)()
        assert isinstance(process.effects[-1], EndProcess)


@given(HISTORIES)
def test_a_task_starts_once_and_sets_its_sinks_first(moves: list[str]) -> None:
    effects = play(moves).effects
    assert sum(isinstance(e, StartTask) for e in effects) <= 1
    assert sum(isinstance(e, RunLoop) for e in effects) <= 1
    sinks_first = [type(e) for e in effects if isinstance(e, SetSinks | RunLoop)]
    assert not sinks_first or sinks_first[0] is SetSinks


@given(HISTORIES)
def test_a_task_that_failed_ends_with_1_and_writes_nothing(moves: list[str]) -> None:
    process = play([*moves, "stop"])
    failed, ends = process.failed, process.ends()
    assert StopSinks() in process.effects or not failed
    assert [(e.exit_status, e.flush_s > 0 and failed) for e in ends] == [(int(failed), False)]


@given(HISTORIES)
def test_a_log_that_may_be_wrong_is_discarded_before_the_end(moves: list[str]) -> None:
    effects = play(moves).effects
    if DiscardLog() in effects:
        stop, end = effects[effects.index(DiscardLog()) + 1 :]
        assert isinstance(stop, StopSinks)
        assert isinstance(end, EndProcess)
        assert end.flush_s == 0.0


@given(HISTORIES)
def test_a_failure_ends_when_it_is_reported_or_in_time(moves: list[str]) -> None:
    process = play(moves)
    if process.core.phase is ProcessPhase.FAILED_UNREPORTED:
        process.core.woken(process.now + REPORT_FAILURE_S)
        assert process.core.ended


def test_every_phase_can_end() -> None:
    assert set(NEXT) == set(ProcessPhase)
    assert all(
        ProcessPhase.ENDED in after
        for phase, after in NEXT.items()
        if phase is not ProcessPhase.ENDED
    )


def test_what_a_poll_changes_is_applied_in_order() -> None:
    process = play(["restore"])
    assert process.effects == [StartTask(RestorePoint(epoch=9)), RouteInputs(())]
    process.start()
    assert process.effects[2:] == [
        RouteInputs(()),
        SetSinks(None, ()),
        ReportDigests(()),
        SetCommittedEntry(None),
        RunLoop(),
    ]


def test_no_sink_loses_an_epoch_that_it_has_not_written() -> None:
    process = play(["restore", "start"])
    assert process.core.sinks_progressed([12, 30], 0.0) == [TruncateLog(12)]
    assert process.core.sinks_progressed([], 0.0) == [TruncateLog(20)]


def test_a_task_whose_results_differ_each_time_stays() -> None:
    """Its next boot would only fail again: it stays until it has to stop or to compute again."""
    process = play(["restore", "start", "fail_permanently", "report", "pass_time", "pass_time"])
    assert process.core.phase is ProcessPhase.FAILED_PERMANENTLY
    process.recompute()
    assert process.core.ended


def test_a_task_in_order_finishes_its_call_and_its_sinks() -> None:
    (end,) = play(["restore", "start", "stop"]).ends()
    assert (end.exit_status, end.loop_s, end.flush_s) == (0, CALL_TIMEOUT_S, FLUSH_TIMEOUT_S)


def test_a_task_that_has_not_started_does_not_wait_for_its_engine() -> None:
    core = SupervisorCore("boot")
    core.poll_accepted(RESTORE, 0.0)
    (end,) = core.stop_requested(1.0)
    assert isinstance(end, EndProcess)
    assert end.loop_s == 0


def test_a_task_that_has_to_compute_again_discards_its_log() -> None:
    process = play(["restore", "start"])
    effects = process.accept(RESTORE.model_copy(update={"recompute": "boot"}))
    assert [type(effect) for effect in effects] == [DiscardLog, StopSinks, EndProcess]
    other = play(["restore", "start"])
    effects = other.accept(RESTORE.model_copy(update={"recompute": "an older boot"}))
    assert DiscardLog() not in effects


def test_a_task_discards_the_log_of_an_earlier_boot_before_it_starts() -> None:
    discard = {"discard_log": True}
    assert Process().accept(poll(**discard)) == [DiscardLog()]
    effects = Process().accept(RESTORE.model_copy(update=discard))
    assert [type(effect) for effect in effects] == [DiscardLog, StartTask, RouteInputs]
    running = play(["restore", "start"])
    assert DiscardLog() not in running.accept(RESTORE.model_copy(update=discard))


def test_a_task_that_has_to_compare_files_does_so_from_its_start_on() -> None:
    """The sinks compare files of earlier incarnations, also after a start from a partner's state,
    which arrives after the poll."""
    compare = {"compare_files": True}
    assert Process().accept(poll(**compare)) == [CompareSinkFiles()]
    effects = Process().accept(RESTORE.model_copy(update=compare))
    assert [type(effect) for effect in effects] == [CompareSinkFiles, StartTask, RouteInputs]
    running = play(["restore", "start"])
    assert CompareSinkFiles() not in running.accept(RESTORE.model_copy(update=compare))
