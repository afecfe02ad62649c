"""Task cores with all their parts: alone, and three of them in simulated time."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.model import EpochOutput, State
from rekindle.errors import NotDeterministic, OperatorFailed
from rekindle.identity import LENDING_PROTOCOL
from rekindle.protocol import (
    Endpoint,
    EntryRef,
    PollRequest,
    PollResponse,
    RestorePoint,
    SinkAssignment,
    TaskRef,
)
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.sunion import Channel
from rekindle.task.core.loop import AppendEpochs, ProcessEpochs, TakeEpochs
from rekindle.task.core.messages import (
    CallSink,
    EndComparison,
    RefusePoll,
    Respond,
    ServeStreamSinks,
    StopSink,
    TaskEffect,
    TaskSettings,
)
from rekindle.task.core.sink import OpenSink, WriteEpochs
from rekindle.task.core.start import (
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
)
from rekindle.task.core.streams import InputEvent
from rekindle.task.core.supervisor import (
    REPORT_FAILURE_S,
    EndProcess,
    RouteInputs,
    TruncateLog,
)
from rekindle.task.core.task import TaskCore
from rekindle.task.state import TaskState
from rekindle.topology.model import Slot
from rekindle.topology.spec import SinkSpec
from rekindle_testing.fixtures.coordinator_parts import SimulatedSegment
from rekindle_testing.fixtures.simulated_task import RowsByDigest, SimulatedTask
from rekindle_testing.fixtures.simulated_topology import SimulatedTopology

REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=1)
SINK = SinkAssignment(query="q", from_epoch=0, sink=SinkSpec())
CHAIN = (
    SimulatedSegment("src"),
    SimulatedSegment("mid", ("src",)),
    SimulatedSegment("out", ("mid",), query=True),
)
JOINED = (
    SimulatedSegment("left", partitions=2),
    SimulatedSegment("right"),
    SimulatedSegment("both", ("left", "right"), query=True),
)


def poll(fence: int = 1, **changes: object) -> PollRequest:
    given = PollRequest(fence=fence, generation=1, task=REF, restore=RestorePoint(epoch=-1))
    return given.model_copy(update=changes)


def core() -> TaskCore:
    return TaskCore(
        TaskSettings(REF, "boot", checkpoint_interval_epochs=4, epoch_interval_us=1_000_000)
    )


def started() -> TaskCore:
    task_core = core()
    task_core.poll_received(poll(sinks=(SINK,)), 0.0)
    task_core.restored(TaskState(-1, 0, State()), 0, -1, 0.0)
    return task_core


def test_a_task_starts_with_the_first_restore_point() -> None:
    task_core = core()
    (response,) = task_core.poll_received(poll(restore=None), 0.0)
    assert isinstance(response, Respond)
    assert response.response.phase == "Waiting"
    effects = task_core.poll_received(poll(), 0.0)
    assert effects[1:] == [RestoreState(RestorePoint(epoch=-1)), RouteInputs(())]
    assert [type(task_core.start_step_succeeded(0.0)[0]) for _ in range(3)] == [
        OpenInputs,
        AwaitEngine,
        CompleteStart,
    ]
    state = TaskState(-1, 0, State())
    take = task_core.restored(state, 0, -1, 0.0)[-1]
    assert isinstance(take, TakeEpochs)
    assert task_core.response().phase == "CatchingUp"


def test_a_task_reports_the_entry_whose_state_it_fetches() -> None:
    made, point = core(), RestorePoint(epoch=3, object="entry")
    made.poll_received(poll(restore=point, saver=True), 0.0)
    assert made.response().restoring == "entry"
    state = TaskState(3, 0, State())
    made.restored(state, 4, 3, 0.0, complete=False)
    done = EntryRef(epoch=7, object="next", digest="d", bytes=1)
    made.saver.state_reached(TaskState(7, 0, State()), 0.0)
    made.saver_reported(lambda saver, now: saver.entry_saved(done, now), 0.0)
    assert (made.response().restoring, made.response().checkpoints) == ("entry", ())
    made.state_complete(0.0)
    assert (made.response().restoring, made.response().checkpoints) == (None, (done,))


def test_a_task_is_live_once_all_of_its_state_is_fetched() -> None:
    """Until then it adds no redundancy: what it has not fetched may be lost. It serves readers."""
    made, point = core(), RestorePoint(epoch=3, object="entry")
    made.poll_received(poll(restore=point), 0.0)
    made.restored(TaskState(3, 0, State()), 4, 3, 0.0, complete=False)
    made.head_advanced(4, 0.0)
    assert made.response().phase == "CatchingUp"
    assert made.response().phase.serves
    made.state_complete(0.0)
    assert made.response().phase == "Live"


LENT = RestorePoint(
    epoch=25, object="lent/b/25", lender=Endpoint(address="h:1", replica=1, incarnation=1)
)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_lent_state_that_is_incomplete_ends_with_a_coordinator_that_does_not_lend(
    allowed: bool,
) -> None:
    """Its polls do not say what the task may not do yet."""
    made = core()
    made.poll_received(poll(restore=LENT, may_be_live=False), 0.0)
    made.restored(TaskState(25, 0, State()), 26, 25, 0.0)
    made.poll_received(poll(may_be_live=allowed), 0.0)
    older = poll(2, restore=None, sinks=(SINK,), saver=True, protocol=LENDING_PROTOCOL - 1)
    asked = made.poll_received(older.model_copy(update={"ask_only": True}), 1.0)
    assert [type(effect) for effect in asked] == [Respond]
    effects = made.poll_received(older, 1.0)
    assert any(isinstance(effect, EndProcess) for effect in effects) is not allowed
    assert any(isinstance(effect, CallSink) for effect in effects) is allowed


def test_a_task_that_ends_does_not_start_any_more() -> None:
    task_core = core()
    task_core.poll_received(poll(), 0.0)
    (end,) = task_core.stop_requested(1.0)
    assert isinstance(end, EndProcess)
    assert task_core.restored(TaskState(-1, 0, State()), 0, -1, 2.0) == []
    assert task_core.response().phase == "Stopping"


def test_a_lower_fence_changes_nothing() -> None:
    task_core = core()
    task_core.poll_received(poll(4, restore=None), 0.0)
    (refused,) = task_core.poll_received(poll(3), 0.0)
    assert isinstance(refused, RefusePoll)
    assert refused.status == 409
    assert task_core.response().phase == "Waiting"


def test_events_of_a_sink_that_was_stopped_are_ignored() -> None:
    task_core = started()
    task_core.poll_received(poll(), 0.0)
    opened = task_core.sink_reported(SINK, lambda sink, now: sink.opened(7, None, now), 0.0)
    assert opened == []
    effects = task_core.poll_received(poll(sinks=(SINK,)), 0.0)
    assert CallSink(SINK, OpenSink(after=-1, read_first_epoch=False)) in effects


def test_a_permanent_error_is_reported_before_the_end() -> None:
    task_core = started()
    assert task_core.call_failed(OperatorFailed("division by zero"), 1.0) == [StopSink(SINK)]
    (response,) = task_core.poll_received(poll(ask_only=True), 2.0)[:1]
    assert isinstance(response, Respond)
    assert failure(response.response) == ("Failed", "division by zero")


def test_a_failure_without_a_poll_ends_in_time() -> None:
    task_core = started()
    task_core.call_failed(OperatorFailed("division by zero"), 1.0)
    assert task_core.wake_at == 1.0 + REPORT_FAILURE_S
    (end,) = task_core.woken(task_core.wake_at)
    assert isinstance(end, EndProcess)
    assert end.exit_status == 1


def test_a_task_whose_results_differ_each_time_stays() -> None:
    task_core = started()
    task_core.call_failed(NotDeterministic("three results"), 1.0)
    assert task_core.woken(100.0) == []
    assert failure(task_core.response()) == ("Failed", "three results")
    (end,) = task_core.stop_requested(101.0)
    assert isinstance(end, EndProcess)


def test_a_failure_during_the_start_ends_it() -> None:
    task_core = core()
    task_core.poll_received(poll(), 0.0)
    task_core.call_failed(OperatorFailed("no engine"), 1.0)
    assert task_core.start_step_succeeded(2.0) == []
    assert task_core.restored(TaskState(-1, 0, State()), 0, -1, 2.0) == []
    assert failure(task_core.response()) == ("Failed", "no engine")


def test_a_call_that_an_end_breaks_off_is_no_failure() -> None:
    task_core = started()
    task_core.stop_requested(1.0)
    assert task_core.call_failed(OperatorFailed("interrupted"), 2.0) == []
    assert task_core.response().phase == "Stopping"


def failure(response: PollResponse) -> tuple[str, str]:
    assert response.problem is not None
    return response.phase, response.problem.message


def test_an_epoch_is_not_stable_before_it_is_in_the_log() -> None:
    task_core = started()
    rows = RowsByDigest("d")
    epoch = EpochInput(0, 0, 0, (rows,))
    (process,) = task_core.loop_reported(lambda loop, now: loop.epochs_taken([epoch], now), 0.0)
    assert isinstance(process, ProcessEpochs)
    output = EpochOutput(0, 0, rows)
    assert task_core.loop_reported(
        lambda loop, now: loop.epochs_processed([output], State(), now), 0.0
    ) == [AppendEpochs([output])]
    assert task_core.response().stable_epoch == -1


def append(task_core: TaskCore, epoch: int) -> list[TaskEffect]:
    rows = RowsByDigest("d")
    taken, output = EpochInput(epoch, 0, 0, (rows,)), EpochOutput(epoch, 0, rows)
    task_core.loop_reported(lambda loop, now: loop.epochs_taken([taken], now), 0.0)
    task_core.loop_reported(lambda loop, now: loop.epochs_processed([output], State(), now), 0.0)
    return task_core.loop_reported(lambda loop, now: loop.epochs_appended(["d"], now), 0.0)


def write(task_core: TaskCore, epoch: int) -> list[TaskEffect]:
    return task_core.sink_reported(
        SINK, lambda sink, now: sink.epoch_written(epoch, None, now), 0.0
    )


def opened(task_core: TaskCore, last: int) -> list[TaskEffect]:
    first = 0
    return task_core.sink_reported(SINK, lambda sink, now: sink.opened(last, first, now), 0.0)


def test_a_sink_writes_what_is_appended() -> None:
    task_core = started()
    opened(task_core, -1)
    assert CallSink(SINK, WriteEpochs(0)) in append(task_core, 0)
    assert (task_core.may_write(SINK, 0), task_core.sinks_have_written(0)) == (True, False)
    write(task_core, 0)
    assert task_core.sinks_have_written(0)


def test_a_sink_that_is_stopped_may_write_nothing() -> None:
    task_core = started()
    assert StopSink(SINK) in task_core.poll_received(poll(), 0.0)
    assert not task_core.may_write(SINK, 0)


def test_the_log_keeps_what_a_sink_has_not_written() -> None:
    task_core = started()
    opened(task_core, -1)
    append(task_core, 0)
    append(task_core, 1)
    assert TruncateLog(0) not in task_core.poll_received(poll(floor=1, sinks=(SINK,)), 0.0)
    assert TruncateLog(0) in write(task_core, 0)


def test_a_sink_that_starts_has_the_limit_of_its_poll() -> None:
    task_core = started()
    other = SINK.model_copy(update={"query": "other"})
    task_core.poll_received(poll(sinks=(SINK, other), sinks_through=3), 0.0)
    assert (task_core.may_write(other, 3), task_core.may_write(other, 4)) == (True, False)


def test_a_comparison_of_files_ends_once() -> None:
    task_core = core()
    task_core.poll_received(poll(sinks=(SINK,)), 0.0)
    task_core.restored(TaskState(-1, 0, State()), 0, -1, 0.0, compare_files_from=0)
    opened(task_core, 1)
    append(task_core, 0)
    append(task_core, 1)
    ends = [EndComparison() in write(task_core, epoch) for epoch in (0, 1, 2)]
    assert ends == [False, True, False]


def test_stream_sinks_are_served_until_there_are_none() -> None:
    task_core = started()
    stream = SINK.model_copy(update={"sink": SinkSpec.model_validate({"stream": {}})})
    served = ServeStreamSinks(7, (stream,))
    assert served in task_core.poll_received(poll(sinks=(stream,), sinks_through=7), 0.0)
    assert ServeStreamSinks(None, ()) in task_core.poll_received(poll(), 0.0)
    last = task_core.poll_received(poll(), 0.0)
    assert not [effect for effect in last if isinstance(effect, ServeStreamSinks)]


def received(batch: EpochBatch) -> InputEvent:
    return lambda streams, now: streams.batch_received(Channel(0, 0), batch, now)


def test_a_task_whose_streams_have_failed_reports_that_and_ends() -> None:
    """Whatever happens after that raises nothing, since effects would be lost with it."""
    made = TaskCore(
        TaskSettings(REF, "boot", 4, 1_000_000, consistency=ConsistencySettings([[0, 1]]))
    )
    made.poll_received(poll(), 0.0)
    made.restored(TaskState(-1, 0, State()), 0, -1, 0.0)
    for replica in ("one", "other"):
        different = EpochBatch("s", 0, 0, 0, RowsByDigest(replica), replica)
        made.input_reported(received(different), 0.0)
    assert made.response().phase == "Failed"
    assert made.heads_checked((0, 0), 1.0) == made.woken(1.0) == made.head_advanced(0, 1.0) == []
    respond, end = made.poll_received(poll(), 2.0)
    assert isinstance(respond, Respond)
    assert isinstance(end, EndProcess)
    assert made.heads_checked((0, 0), 3.0) == made.poll_received(poll(), 3.0)[1:] == []


def test_streams_are_read_before_the_task_is_restored() -> None:
    task_core = TaskCore(
        TaskSettings(REF, "boot", 4, 1_000_000, consistency=ConsistencySettings([[0]]))
    )
    task_core.poll_received(poll(), 0.0)
    task_core.streams_opened(0, 0, 0.0)
    rows = pa.table({"n": [1]})
    early = EpochBatch("s", 0, 0, 0, rows, "d")
    channel = Channel(0, 0)
    task_core.input_reported(lambda inputs, now: inputs.batch_received(channel, early, now), 0.0)
    process = task_core.restored(TaskState(-1, 0, State()), 0, -1, 0.0)[-1]
    assert isinstance(process, ProcessEpochs)
    assert [epoch.epoch for epoch in process.epochs] == [0]


@pytest.mark.parametrize("parts", [CHAIN, JOINED])
def test_results_do_not_depend_on_how_epochs_are_released(
    parts: tuple[SimulatedSegment, ...],
) -> None:
    slow, fast = SimulatedTopology(parts), SimulatedTopology(parts)
    for _ in range(120):
        slow.release(1)
    for _ in range(3):
        fast.release(40)
    for slot, task in slow.tasks.items():
        other = fast.tasks[slot]
        assert task.state_epoch == other.state_epoch == 119
        assert task.logged == other.logged
        assert task.response().chained == other.response().chained


def test_polls_commit_what_is_saved_and_free_the_log() -> None:
    topology = SimulatedTopology(CHAIN, interval_epochs=10)
    for _ in range(12):
        topology.release(5)
        topology.poll_all()
    topology.poll_all()
    for task in topology.tasks.values():
        response = task.response()
        assert (response.checkpoints, response.log_base) == ((), 60)
        assert [s.durable for s in response.sinks] in ([], [59])


@pytest.mark.parametrize("saver", [True, False])
def test_only_the_saver_saves_checkpoints(saver: bool) -> None:
    task = SimulatedTask(Slot("seg", 0, 0), 1, checkpoint_interval_epochs=4)
    task.poll(poll(saver=saver))
    task.engine_started()
    for _ in range(9):
        task.take()
    assert [done.epoch for done in task.response().checkpoints] == ([3, 7] if saver else [])


def test_a_task_reports_the_log_that_it_has_until_it_starts() -> None:
    core = TaskCore(TaskSettings(REF, "boot", 4, 1_000_000, held_log=(3, 9)))
    assert core.response().held_log == (3, 9)
    core.status.start_from(RestorePoint(epoch=7, log_from=3))
    assert core.response().held_log is None
