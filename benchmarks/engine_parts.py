"""Topologies, rows and a task's loop that the engine's benchmarks share.

`BenchTask` is the part of a task between its inputs and its sinks, of the task's own classes: epoch
loop, output log on disk, saver in the background, file store. The benchmark is its supervisor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import yaml

from rekindle.checkpoints.store import Store
from rekindle.engine.bounds import MAX_EPOCHS, CallBounds, take_ready
from rekindle.engine.memory import MemoryPlan, plan_memory
from rekindle.engine.model import Chain, State
from rekindle.identity import Identity
from rekindle.protocol import EntryRef, RestorePoint, TaskPhase, TaskRef
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.streams.log import OutputLog
from rekindle.task.config import TaskConfig
from rekindle.task.core.messages import TaskSettings
from rekindle.task.engine_calls import EngineParts, EngineRestarter
from rekindle.task.state import TaskState
from rekindle.task.store import TaskStore
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology
from rekindle_testing.fixtures.local_task import LocalParts, LocalTask

SAVE_TIMEOUT_S = 60.0
POLL_S = 0.0005
_REQUESTS = 5
"""Of the loop, with which an epoch is done although the engine is restarted."""
MINUTE_US = 60_000_000
GROUPS = 1_000
SCHEMA = "k STRING, v DOUBLE, n BIGINT, t TIMESTAMP"
SQL = "SELECT k, t, v * 1.5 AS v, upper(k) AS u, n % 7 AS m FROM rows WHERE v > -1"
AGGREGATE = "count(*) AS rows, sum(v) AS total, avg(v) AS mean, max(v) AS high"
WINDOW = f"{{size: 5m, groupBy: [k], aggregate: '{AGGREGATE}'}}"
SESSIONS = f"{{session: 30s, groupBy: [k], aggregate: '{AGGREGATE}'}}"
OPERATORS = {
    "sql": f'- {{name: last, inputs: [rows], sql: "{SQL}"}}',
    "window": f"- {{name: last, inputs: [rows], window: {WINDOW}}}",
    "session": f"- {{name: last, inputs: [rows], window: {SESSIONS}}}",
}


JOIN = "a.k = b.k AND a.v < b.v + 3000"
JOINS = {"join": "Inner", "left": "Left"}
"""Types, by kind."""
JOINED = "a.k, a.v, b.v AS w, a.t"


def join_operator(kind: str, minutes: int) -> str:
    join = f'{{type: {JOINS[kind]}, "on": "{JOIN}", within: {minutes}m, select: "{JOINED}"}}'
    return f"- {{name: last, inputs: [a, b], join: {join}}}"


def topology(
    kind: str,
    directory: Path,
    operator: str = "",
    sources: Iterable[str] = ("rows",),
    schema: str = SCHEMA,
) -> Topology:
    """Its checkpoint store is below `directory`. `operator`: instead of the one of a kind, named
    `last`; with one source, it is in the only segment, and otherwise in the last one."""
    of_sources = "".join(
        f"""
- name: {name}
  schema: "{schema}"
  eventTime: {{column: t}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}}"""
        for name in sources
    )
    text = f"""
checkpoint: {{store: "file://{directory}/store"}}
sources:{of_sources}
operators:
{operator or OPERATORS[kind]}
queries:
- {{name: q, from: last, sink: {{files: {{url: "file:///tmp/sink"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(text)), "bench", skip_cluster_checks=True)


def make_epoch_input(number: int, rows: int, rng: np.random.Generator) -> EpochInput:
    """A minute of event time; the watermark follows a minute behind."""
    start = number * MINUTE_US
    table = pa.table(
        {
            "k": pa.array(np.char.add("key-", rng.integers(0, GROUPS, rows).astype(str))),
            "v": rng.standard_normal(rows) * 1000,
            "n": rng.integers(0, 1_000_000, rows),
            "t": pa.array(start + rng.integers(0, MINUTE_US, rows)).cast(pa.timestamp("us", "UTC")),
        }
    )
    return EpochInput(number, start - 2 * MINUTE_US, start - MINUTE_US, (table,))


class JoinInputs:
    """Epochs of two inputs, each with half of the rows, from number `first` on. The first
    `FILL_EPOCHS` epochs together have `retained` rows, of `minutes`; each later one has `rows`, of
    a minute. A row of one input matches about one of the other, which may be `minutes` away."""

    FILL_EPOCHS = 10

    def __init__(self, rows: int, retained: int, first: int) -> None:
        self.minutes = max(self.FILL_EPOCHS, retained // rows)
        self._rng = np.random.default_rng(rows)
        self._rows = rows
        self._retained = retained
        self._first = first

    def epoch(self, number: int) -> EpochInput:
        of_fill, fills = self.minutes // self.FILL_EPOCHS, self.FILL_EPOCHS
        at = number - self._first
        if at < fills:
            begin, minutes, rows = at * of_fill, of_fill, self._retained // fills
        else:
            begin, minutes, rows = fills * of_fill + at - fills, 1, self._rows
        before = (begin - (of_fill if at <= fills else 1)) * MINUTE_US
        begin_us = begin * MINUTE_US
        tables = tuple(self._table(begin_us, minutes, rows // 2) for _ in range(2))
        return EpochInput(number, before if at else NO_WATERMARK, begin_us, tables)

    def _table(self, begin_us: int, minutes: int, rows: int) -> pa.Table:
        times = begin_us + self._rng.integers(0, minutes * MINUTE_US, rows)
        keys = self._rng.integers(0, max(1, self._retained // 2), rows).astype(str)
        return pa.table(
            {
                "k": pa.array(np.char.add("key-", keys)),
                "v": self._rng.standard_normal(rows) * 1000,
                "n": self._rng.integers(0, 1_000_000, rows),
                "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
            }
        )


class InMemoryInputs:
    """Epochs that are in memory; at most `max_epochs` of them a call."""

    def __init__(self, max_epochs: int) -> None:
        self._epochs: deque[EpochInput] = deque()
        self._max_epochs = max_epochs

    def offer(self, epochs: Iterable[EpochInput]) -> None:
        self._epochs.extend(epochs)

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        return take_ready(self._epochs, bounds.with_max_epochs(self._max_epochs))


class CpuMeter:
    """CPU of this process and of those that it has started when this is created: its JVM."""

    def __init__(self) -> None:
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)


def task_config(compiled: Topology, directory: Path, memory: MemoryPlan) -> TaskConfig:
    """Of the last segment's task, its data below `directory`."""
    segment = compiled.segments[-1]
    return TaskConfig(
        ref=TaskRef(segment=segment.id, partition=0, replica=0, incarnation=1),
        bind="127.0.0.1",
        data=directory,
        identity=Identity(directory.name),
        generation=1,
        origin_us=0,
        topology=compiled,
        segment=segment,
        cds_archive=None,
        memory=memory,
    )


class BenchTask:
    """The only task of a topology, whose next epoch is `first`; its log is below `directory`. It
    begins with the state of the checkpoint `begin`, which another task of the topology may have
    saved, if the name of its directory is the same; otherwise with none.

    At most `max_epochs` epochs go into a call, and never more than the loop allows;
    `checkpoint_interval_epochs` is the topology's own if it is not given. `offer`, `run_next` and
    `commit_saved_checkpoint` are called by one thread.
    """

    def __init__(
        self,
        compiled: Topology,
        chain: Chain,
        directory: Path,
        first: int,
        *,
        max_epochs: int = MAX_EPOCHS,
        checkpoint_interval_epochs: int | None = None,
        memory: MemoryPlan | None = None,
        engine: EngineRestarter | None = None,
        make_log: Callable[..., OutputLog] = OutputLog,
        begin: EntryRef | None = None,
    ) -> None:
        config = task_config(compiled, directory, memory or plan_memory())
        segment, ref = config.segment, config.ref
        Store(compiled.spec.checkpoint.store)  # the coordinator's part: tasks make no store
        states = TaskStore(config)
        self._may_restart_engine = engine is not None
        self._committed = first - 1
        self._inputs = InMemoryInputs(max_epochs)
        self._states = states
        self._config = config
        self._log = make_log(
            directory / "log",
            segment.stream,
            0,
            chain.output_schema,
            budget=compiled.spec.log_budget,
            spill=states,
            spill_prefix=states.spill_prefix,
        )
        self._log.start_at(first)
        self._interval_epochs = (
            checkpoint_interval_epochs or compiled.spec.checkpoint_interval_epochs
        )
        self._task = LocalTask(
            TaskSettings(
                ref, "bench", self._interval_epochs, config.epoch_interval_us, memory=config.memory
            ),
            TaskState(first - 1, NO_WATERMARK, State()) if begin is None else self.restore(begin),
            LocalParts(
                EngineParts(chain, self._log, source=self._inputs, engine=engine), store=states
            ),
        )
        if begin is not None:
            self._task.poll(committed=_restore_point(begin))

    @property
    def epoch(self) -> int:
        """The newest that is done: in the log, and offered to the saver if it is a checkpoint's."""
        return self._task.loop.state.epoch

    @property
    def state(self) -> State:
        return self._task.loop.state.operators

    def offer(self, epochs: Iterable[EpochInput]) -> None:
        self._inputs.offer(epochs)

    def run_next(self) -> None:
        """What a task does for the next epochs: chain, digests, output log, and at a checkpoint
        epoch the hand-over to the saver. If no epoch was completed, raises RuntimeError; with an
        engine that may have been restarted, call it again."""
        before = self.epoch
        for _ in range(_REQUESTS):
            self._task.run_next()
            if self.epoch != before:
                return
            if self._task.core.status.phase is TaskPhase.FAILED:
                break
        else:
            if self._may_restart_engine:
                return
        problem = self._task.core.response().problem
        raise RuntimeError(f"no epoch after {before}: {problem.message if problem else 'unknown'}")

    def wait_saved(self) -> None:
        """Until the newest checkpoint is in the store. Raises TimeoutError."""
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        awaited = (self.epoch + 1) // self._interval_epochs * self._interval_epochs - 1
        while awaited > self._committed and awaited not in [done.epoch for done in self._saved()]:
            if time.monotonic() > deadline:
                problem = self._task.core.response().problem
                raise TimeoutError(f"epoch {awaited}: {problem or 'not saved'}")
            time.sleep(POLL_S)
            self._task.wake()

    @property
    def saved(self) -> EntryRef | None:
        """The newest checkpoint in the store that is not committed yet."""
        return done[-1] if (done := self._saved()) else None

    def restore(self, saved: EntryRef) -> TaskState:
        """What a task does when it starts from a checkpoint, until all of its state is local."""
        state, fetch = self._states.restore(_restore_point(saved))
        if fetch is not None:
            fetch.finish()
        return state

    def stored_bytes(self, saved: EntryRef) -> int:
        """Of the objects in the store that a restore from this checkpoint reads."""
        assert saved.object is not None, "it has state"
        needed = self._states.load_entry(saved.object).objects.values()
        names = {f"{self._config.uid}/{name}" for objects in needed for name in objects}
        listed = Store(self._config.topology.spec.checkpoint.store).list(self._config.uid)
        return sum(info.bytes for info in listed if info.name in names)

    def commit_saved_checkpoint(self) -> tuple[EntryRef, ...]:
        """What the coordinator and the supervisor do: the newest saved checkpoint is committed,
        the next save need not repeat it, and the log is truncated to the epochs after it. Returns
        what was saved since the last commit."""
        saved = self._saved()
        if saved:
            newest = saved[-1]
            self._task.poll(committed=_restore_point(newest))
            self._log.truncate(newest.epoch)
            self._committed = newest.epoch
        return saved

    def stop(self) -> None:
        self._task.stop(SAVE_TIMEOUT_S)
        self._log.close()

    def _saved(self) -> tuple[EntryRef, ...]:
        with self._task.process.lock:
            return self._task.core.saver.saved()


def _restore_point(saved: EntryRef) -> RestorePoint:
    return RestorePoint(epoch=saved.epoch, object=saved.object)
