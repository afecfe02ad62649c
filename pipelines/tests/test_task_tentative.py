"""A task whose input is cut, over HTTP and with real logs: its inputs, loop and output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from edge_parts import ADDRESS
from reader_parts import read_once
from state_parts import count_state, value_in_state
from task_world import REF

from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.protocol import ConsistencyState, Endpoint, PollResponse, Upstream
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, EpochInput
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.server import StreamServer
from rekindle.streams.wire import LivePosition, ReadRequest
from rekindle.task.attempts import BLOCK, AttemptFile
from rekindle.task.core.hot_keys import HotKeys
from rekindle.task.core.messages import TaskSettings
from rekindle.task.engine_calls import EngineParts
from rekindle.task.state import TaskState
from rekindle.topology.model import Exchange, Input, Resources, Segment
from rekindle.topology.schema import Schema
from rekindle_testing.fixtures.local_task import LocalParts, LocalTask
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process

SCHEMA = pa.schema([("n", pa.int64())])
X_S = 0.5
"""`maxDelay`, which the paper calls X."""


class Source:
    """A stream of one row in each epoch, and its server."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.log = OutputLog(directory / name, name, 0, SCHEMA)
        self.server = StreamServer(ADDRESS, 0)
        self.server.serve_log(self.log, head=lambda: self.log.last)

    def release(self, *epochs: int) -> None:
        for epoch in epochs:
            rows = pa.table({"n": [epoch * 10 + len(self.name)]}, schema=SCHEMA)
            self.log.append(EpochBatch(self.name, 0, epoch, epoch, rows, digest_table(rows)))


class Adding:
    """Adds up all rows of all inputs; an epoch of `fails` cannot be processed."""

    output_schema = SCHEMA

    def __init__(self) -> None:
        self.dropped: dict[str, DroppedRows] = {"window": DroppedRows()}
        self.fails: set[int] = set()

    def match_columns(self, state: State) -> State:
        return state

    def join_deltas(self, state: State) -> State:
        return state

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        return state

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        total, outputs = value_in_state(state, "sum"), []
        for epoch in epochs:
            if epoch.epoch in self.fails:
                self.fails.discard(epoch.epoch)
                raise pa.ArrowInvalid(f"epoch {epoch.epoch} cannot be processed")
            total += sum(sum(table["n"].to_pylist()) for table in epoch.inputs)
            self.dropped["window"].late += 1
            rows = pa.table({"n": [total]}, schema=SCHEMA)
            outputs.append(EpochOutput(epoch.epoch, epoch.watermark, rows))
        return ChainResult(tuple(outputs), count_state("sum", total))


class CountedEpochs(HotKeys):
    """Records of which epochs keys are counted."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def add(self, epochs: Sequence[EpochInput]) -> None:
        self.epochs += [epoch.epoch for epoch in epochs]

    def text(self, epoch: int) -> str:
        return ""


class RunningTask:
    """A task's inputs, loop, log, branches and server."""

    def __init__(self, directory: Path, name: str, *upstreams: tuple[str, StreamServer]) -> None:
        self.name = name
        names = [stream for stream, _ in upstreams]
        self.servers = dict(upstreams)
        self.attempts = AttemptFile(directory / f"{name}-attempts")
        settings = ConsistencySettings(
            [[0] for _ in names],
            [SCHEMA for _ in names],
            max_delay_s=X_S,
            first_attempt=self.attempts.first,
        )
        self.log = OutputLog(directory / name, name, 0, SCHEMA)
        boot = f"boot {self.attempts.first}"
        self.output = LiveOutput(self.log, directory / name / "tentative", boot)
        self.chain = Adding()
        self.hot_keys = CountedEpochs()
        engine = EngineParts(
            self.chain,
            self.log,
            output=self.output,
            attempts=self.attempts,
            hot_keys=self.hot_keys,
        )
        self.task = LocalTask(
            TaskSettings(
                REF, "boot", 1000, 1_000_000, consistency=settings, input_names=tuple(names)
            ),
            TaskState(NO_EPOCH, NO_EPOCH, State()),
            LocalParts(engine, segment_of(name, names)),
        )
        assert self.task.inputs is not None
        self.inputs = self.task.inputs
        self.server = StreamServer(ADDRESS, 0)
        self.server.serve_log(self.log, self.inputs.head, self.output)
        self.route(*names)
        self.task.allow_tentative()
        self.task.start()

    def route(self, *streams: str) -> None:
        """Read these from their servers; others from nowhere."""
        self.inputs.route(
            [
                Upstream(
                    stream=name,
                    partition=0,
                    endpoints=(
                        Endpoint(address=f"{ADDRESS}:{server.port}", replica=0, incarnation=1),
                    )
                    if name in streams
                    else (),
                )
                for name, server in self.servers.items()
            ]
        )

    def expect(self, state: ConsistencyState, stable: int, within_s: float = 20) -> None:
        def reached() -> bool:
            return self.answer.consistency is state and self.log.last >= stable

        eventually(reached, within_s)

    @property
    def answer(self) -> PollResponse:
        with self.task.process.lock:
            return self.task.core.response()

    def live(self, from_epoch: int) -> list[EpochBatch]:
        request = ReadRequest(self.name, 0, from_epoch, 1 << 20, live=LivePosition())
        return list(read_once(f"{ADDRESS}:{self.server.port}", request, 10).epochs)

    def sums(self) -> list[int]:
        return [batch.rows["n"][0].as_py() for batch in self.log]

    def close(self) -> None:
        self.task.stop()
        self.server.stop()


def segment_of(name: str, streams: Sequence[str]) -> Segment:
    inputs = tuple(Input(s, s, Schema(), 1, Exchange.FORWARD, ()) for s in streams)
    return Segment(
        id=name,
        name=name,
        nodes=(name,),
        stream=name,
        inputs=inputs,
        partitions=1,
        replicas=1,
        queries=(),
        resources=Resources(100, 1 << 20),
    )


def expected(epochs: int, *names: str) -> list[int]:
    sums, total = list[int](), 0
    for epoch in range(epochs):
        total += sum(epoch * 10 + len(name) for name in names)
        sums.append(total)
    return sums


class World:
    def __init__(self, directory: Path) -> None:
        self.sources = [Source(directory, "left"), Source(directory, "right-side")]
        self.task = RunningTask(
            directory, "task", *((source.name, source.server) for source in self.sources)
        )
        self.tasks = [self.task]
        self.directory = directory

    def follow(self) -> RunningTask:
        """Another task, which reads the first one alone."""
        made = RunningTask(self.directory, "next", (self.task.name, self.task.server))
        self.tasks.append(made)
        return made

    def restart(self) -> None:
        """The first task, without its state, and with its log."""
        self.task.close()
        self.tasks.remove(self.task)
        self.task = RunningTask(
            self.directory, "task", *((source.name, source.server) for source in self.sources)
        )
        for task in self.tasks:
            task.servers[self.task.name] = self.task.server
            task.route(self.task.name)
        self.tasks.insert(0, self.task)

    def release(self, *epochs: int, cut: bool = False) -> None:
        """With `cut` the right side has none."""
        for source in self.sources[: 1 if cut else 2]:
            source.release(*epochs)

    def close(self) -> None:
        for task in reversed(self.tasks):
            task.close()
        for source in self.sources:
            source.server.stop()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def kinds(batches: Sequence[EpochBatch]) -> list[BatchKind]:
    return [batch.kind for batch in batches]


def test_a_cut_input_is_answered_tentatively_and_corrected(world: World) -> None:
    task = world.task
    world.release(*range(5))
    task.expect(ConsistencyState.STABLE, 4)
    world.release(5, 6, 7, cut=True)
    eventually(lambda: task.answer.tentative_epoch == 7, 20)
    answer = task.answer
    assert (answer.consistency, answer.missing) == (ConsistencyState.UP_FAILURE, ("right-side",))
    eventually(lambda: task.output.report.newest_tentative == 7, 20)
    tentative = task.live(5)
    assert kinds(tentative) == [BatchKind.TENTATIVE] * 3
    only_left = [expected(5, "left", "right-side")[-1] + 54]  # 54: the row of epoch 5 of `left`
    assert tentative[0].rows["n"].to_pylist() == only_left
    assert {batch.attempt for batch in tentative} == {1}
    assert task.log.last == 4
    world.sources[1].release(5, 6, 7)
    task.expect(ConsistencyState.STABLE, 7)
    assert task.sums() == expected(8, "left", "right-side")
    eventually(lambda: task.output.report.corrected_through == 7, 20)
    assert task.chain.dropped["window"].late == 8  # tentative calls do not count
    assert task.hot_keys.epochs == list(range(8))
    assert task.task.loop.state.epoch == 7


def test_a_tentative_upstream_is_followed_and_its_correction_too(world: World) -> None:
    last = world.follow()
    world.release(*range(3))
    last.expect(ConsistencyState.STABLE, 2)
    world.release(3, 4, 5, cut=True)
    eventually(lambda: last.output.report.newest_tentative == 5, 20)
    assert last.answer.consistency is ConsistencyState.UP_FAILURE
    assert last.log.last == 2
    world.sources[1].release(3, 4, 5)
    last.expect(ConsistencyState.STABLE, 5)
    sums, total = expected(6, "left", "right-side"), 0
    folded = [total := total + value for value in sums]
    assert last.sums() == folded
    world.release(6)
    last.expect(ConsistencyState.STABLE, 6)


def test_a_tentative_upstream_that_restarts_is_corrected(world: World) -> None:
    """Its attempts, and the order of its output, are of another process then."""
    last = world.follow()
    world.release(*range(3))
    last.expect(ConsistencyState.STABLE, 2)
    world.release(3, 4, cut=True)
    eventually(lambda: last.output.report.newest_tentative == 4, 20)
    world.restart()
    world.release(5, cut=True)
    eventually(lambda: last.output.report.newest_tentative == 5, 20)
    assert world.task.output.report.newest_tentative == 5
    attempts = {batch.attempt for batch in world.task.live(3)}
    assert min(attempts) > BLOCK
    world.sources[1].release(3, 4, 5)
    last.expect(ConsistencyState.STABLE, 5)
    total = 0
    assert last.sums() == [total := total + value for value in expected(6, "left", "right-side")]


def test_an_upstream_that_cannot_be_reached_is_a_cut(world: World) -> None:
    task = world.task
    world.release(*range(3))
    task.expect(ConsistencyState.STABLE, 2)
    task.route("left")
    world.release(3, 4)
    eventually(lambda: task.output.report.newest_tentative >= 3, 20)
    task.route("left", "right-side")
    task.expect(ConsistencyState.STABLE, 4)
    assert task.sums() == expected(5, "left", "right-side")


def test_a_tentative_epoch_that_fails_leaves_the_task_running(world: World) -> None:
    task = world.task
    world.release(0)
    task.expect(ConsistencyState.STABLE, 0)
    task.chain.fails = {1}
    world.release(1, cut=True)
    eventually(lambda: task.answer.problem is not None, 20)
    problem = task.answer.problem
    assert problem is not None
    assert "tentative results are left out: epoch 1 cannot" in problem.message
    world.sources[1].release(1)
    task.expect(ConsistencyState.STABLE, 1)
    assert task.sums() == expected(2, "left", "right-side")


def test_attempts_of_a_restarted_process_are_higher(tmp_path: Path) -> None:
    file = tmp_path / "attempts" / "s-0"
    first = AttemptFile(file)
    assert first.first == 1
    first.reserve(1 + 2 * BLOCK)
    second = AttemptFile(file)
    assert second.first > 1 + 2 * BLOCK
    assert AttemptFile(file).first > second.first


def test_attempts_that_cannot_be_read_begin_again(tmp_path: Path) -> None:
    file = tmp_path / "s-0"
    file.write_text("what?")
    assert AttemptFile(file).first == 1
