"""The chain of one segment on Spark: `rekindle.engine.model.Chain` for `sql` and operators with
state.

Each step of a chain is at most one Spark job for all epochs of a call, and none without rows. State
is in `rekindle.engine.state`, outside Spark.
Results are bit-identical for given state and epochs, so a task can release output before its state
is saved.

Design: docs/design/engine.md, docs/design/determinism.md#what-it-gives.
Paper: FlameStream (Trofimov et al. 2019), section V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import pyarrow as pa
from pyspark.sql import SparkSession

from rekindle.engine.epochs import (
    SYSTEM_COLUMNS,
    Clock,
    concatenate_epochs,
    split_by_epoch,
)
from rekindle.engine.failure import OutOfMemory
from rekindle.engine.memory import MIB, plan_memory
from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.engine.operators.base import (
    LACKS,
    Aggregation,
    Operator,
    tables_of,
    view_name,
)
from rekindle.engine.operators.running import delayed, run_operator, view_of
from rekindle.engine.spark.analysis import Analyzer
from rekindle.engine.spark.query import SqlRunner
from rekindle.engine.spark.steps import Step, is_divisible, plan_steps, step_sql
from rekindle.engine.state.compaction import join_single_deltas
from rekindle.engine.state.operator import (
    BEGIN_OF_PANES,
    EMPTY,
    OperatorState,
    begins_after,
    match_columns,
)
from rekindle.engine.state.reading import read
from rekindle.engine.state.spill import RunFiles
from rekindle.streams.epochs import END_OF_INPUT, EpochInput
from rekindle.topology.model import Segment, Topology

HASH_BYTES = 16 * 2**20
"""Largest input of an operator's query for hash aggregation: a fraction of the 127 MB of execution
memory in a heap of 512 MB, so that the hash map is rarely full."""
MANY_ROWS = 50_000
"""Number of rows from which sort aggregation is distributed over the cores."""


SPARK_JOB_INPUT_BYTES = plan_memory().spark_job_input_bytes
_ToView = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True, slots=True)
class _StepQueries:
    """A step with its SQL for each method of aggregation; no `texts`: it is no query."""

    step: Step
    texts: Mapping[Aggregation, str]
    divisible: bool
    """Whether the concatenated results for consecutive parts of the rows are the result for all."""


@dataclass(slots=True)
class _CallHistory:
    """What earlier calls have found out."""

    hash_bytes: dict[str, int] = field(default_factory=dict)
    """By `Step.operators` of a step whose query groups rows: the largest input for which the hash
    map was never full."""
    dropped: dict[str, DroppedRows] = field(default_factory=dict)
    """By operator with state."""


class SparkChain:
    """Construction analyzes the whole chain on empty inputs: SQL that Spark refuses raises
    OperatorRefused here, before the first row."""

    def __init__(
        self,
        segment: Segment,
        topology: Topology,
        session: SparkSession,
        *,
        method: Aggregation | None = None,
        spark_job_input_bytes: int = SPARK_JOB_INPUT_BYTES,
        result_bytes: int | None = None,
        run_files: RunFiles | None = None,
    ) -> None:
        """`method`: fixes how rows are aggregated, for tests; otherwise by the size of the
        input. `spark_job_input_bytes`: input of one Spark job, if a step's input can be divided by
        rows; `result_bytes`: limit on the results of all jobs of such a step in one call.
        `run_files`: for state that does not fit into memory."""
        self._sql_runner = SqlRunner(session.newSession())
        self._method = method
        self._spark_job_input_bytes = spark_job_input_bytes
        self._result_bytes = result_bytes
        self._run_files = run_files
        self._history = _CallHistory()
        analyzer = Analyzer(topology, self._sql_runner)
        self._inputs = [(name, analyzer.schema(name)) for name in _input_names(segment)]
        *steps, last = plan_steps(segment, topology, analyzer.operator)
        prepared = [self._prepare(step) for step in steps]
        self._steps_for_epochs = [*prepared, self._prepare(last)]
        self._steps_for_one_epoch = [
            *prepared,
            self._prepare(replace(last, has_epoch_column=False)),
        ]
        self._output_schema = analyzer.schema(segment.nodes[-1])

    def _prepare(self, step: Step) -> _StepQueries:
        if step.end is not None:
            self._history.dropped[step.end.node.name] = DroppedRows()
        sources = [name for name, _ in self._inputs]
        texts = {method: step_sql(step, sources, method) for method in Aggregation}
        found = {method: text for method, text in texts.items() if text is not None}
        return _StepQueries(step, found, is_divisible(step, sources))

    @property
    def output_schema(self) -> pa.Schema:
        return self._output_schema

    @property
    def jobs(self) -> int:
        """Spark jobs run so far."""
        return self._sql_runner.jobs

    @property
    def dropped(self) -> Mapping[str, DroppedRows]:
        return self._history.dropped

    def match_columns(self, state: State) -> State:
        """Raises StateMismatch."""
        states = dict(state.operators)
        for operator, name, table in self._tables():
            if table in states:
                shape = operator.tables[name]
                states[table] = match_columns(shape, states[table], operator.node.name)
        return State(states)

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        begun = {
            table: begins_after(state.operators.get(table, EMPTY), bounds[operator.node.id])
            for operator, name, table in self._tables()
            if operator.node.id in bounds and (name == LACKS or LACKS not in operator.tables)
        }
        return State({**state.operators, **begun})

    def join_deltas(self, state: State) -> State:
        joined = {
            table: join_single_deltas(operator.tables[name], states)
            for operator, name, table in self._tables()
            if (states := state.operators.get(table)) is not None
        }
        return State({**state.operators, **joined})

    def folded(self, state: State) -> Mapping[str, pa.Table]:
        """For tests: by table, its rows, in an order that is the same for any layout."""
        return {
            table: read(operator.tables[name], states, BEGIN_OF_PANES, END_OF_INPUT)
            for operator, name, table in self._tables()
            if (states := state.operators.get(table)) is not None
        }

    def _tables(self) -> Iterator[tuple[Operator, str, str]]:
        """Operator, name and id of each table."""
        for prepared in self._steps_for_epochs:
            if (operator := prepared.step.end) is not None:
                for name, table in tables_of(operator).items():
                    yield operator, name, table

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        """Run epochs in their order. Raises OperatorFailed (operators, epochs), OutOfMemory,
        DiskFull, EngineUnavailable."""
        _check_order(epochs)
        if not epochs:
            return ChainResult((), state)
        span = f"epochs {epochs[0].epoch} to {epochs[-1].epoch}"
        clock: Clock = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
        views = {
            name: concatenate_epochs(schema, [(e, e.inputs[at]) for e in epochs])
            for at, (name, schema) in enumerate(self._inputs)
        }
        states: Mapping[str, OperatorState] = state.operators
        rows: Sequence[pa.Table | None] = ()
        to_view = _same
        for prepared in self._steps_for_one_epoch if len(epochs) == 1 else self._steps_for_epochs:
            rows = self._run(prepared, views, to_view, span)
            if (operator := prepared.step.end) is not None:
                complete = all(epoch.complete for epoch in epochs)
                states, found = self._advance(operator, states, rows, clock, span, complete)
                clock = delayed(clock, operator.delay_us)
                views = {view_name(operator): found}
                to_view = partial(view_of, operator, clock=clock)
        if self._run_files is not None:
            states = self._run_files.spill(states)
        tables = split_by_epoch(self._output_schema, rows[0], [e.epoch for e in epochs])
        outputs = tuple(
            EpochOutput(epoch.epoch, after, table, epoch.idle)
            for epoch, (_, _, after), table in zip(epochs, clock, tables, strict=True)
        )
        return ChainResult(outputs, State(states))

    def _run(
        self, prepared: _StepQueries, tables: Mapping[str, pa.Table], to_view: _ToView, span: str
    ) -> Sequence[pa.Table | None]:
        """The result of a step, or the rows of each input; None if there are no rows. `to_view`:
        makes the content of a view from a table, or from consecutive rows of it."""
        if not prepared.texts:
            return [table if table.num_rows else None for table in tables.values()]
        if not any(t.num_rows for t in tables.values()):
            return [None]
        return [self._run_query(prepared, tables, to_view, span)]

    def _run_query(
        self, prepared: _StepQueries, tables: Mapping[str, pa.Table], to_view: _ToView, span: str
    ) -> pa.Table:
        hidden = [name for name in SYSTEM_COLUMNS.names if name not in prepared.step.system_columns]

        def views_of(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
            return {name: to_view(table).drop_columns(hidden) for name, table in tables.items()}

        what = f"operator {prepared.step.operators}, {span}"
        visible = [
            t.select([n for n in t.schema.names if n not in hidden]) for t in tables.values()
        ]
        size = sum(t.nbytes for t in visible)
        if prepared.divisible and size > self._spark_job_input_bytes:
            parts = _divided(tables, -(-size // self._spark_job_input_bytes))
            text = prepared.texts[self._method or self._sort_aggregation(tables)]
            return self._run_divided(text, map(views_of, parts), what)
        views = views_of(tables)
        size = sum(t.nbytes for t in views.values())
        if self._uses_hash_aggregation(prepared, size):
            rows = self._sql_runner.run_hashed(prepared.texts[Aggregation.HASHED], views, what)
            if rows is not None:  # None: its hash map was full, so rows may be in another order
                return rows
            self._history.hash_bytes[prepared.step.operators] = size - 1
        text = prepared.texts[self._method or self._sort_aggregation(views)]
        return self._sql_runner.run(text, views, what)

    def _run_divided(
        self, text: str, parts: Iterable[Mapping[str, pa.Table]], what: str
    ) -> pa.Table:
        """Raises OutOfMemory when the results exceed `result_bytes`."""
        results: list[pa.Table] = []
        size = 0
        for part in parts:
            results.append(self._sql_runner.run(text, part, what))
            size += results[-1].nbytes
            if self._result_bytes is not None and size > self._result_bytes:
                limit = self._result_bytes / MIB
                raise OutOfMemory(f"{what}: the result has more than {limit:,.1f} MiB")
        return pa.concat_tables(results)

    def _uses_hash_aggregation(self, prepared: _StepQueries, size: int) -> bool:
        operator = prepared.step.end
        if self._method is not None or operator is None or not operator.hashes_groups:
            return False
        return size <= self._history.hash_bytes.get(prepared.step.operators, HASH_BYTES)

    def _sort_aggregation(self, views: Mapping[str, pa.Table]) -> Aggregation:
        rows = sum(t.num_rows for t in views.values())
        return (
            Aggregation.PARTITIONED
            if rows >= MANY_ROWS and self._sql_runner.cores > 1
            else Aggregation.SORTED
        )

    def _advance(
        self,
        operator: Operator,
        states: Mapping[str, OperatorState],
        rows: Sequence[pa.Table | None],
        clock: Clock,
        span: str,
        complete: bool,
    ) -> tuple[Mapping[str, OperatorState], pa.Table]:
        evaluate = partial(self._sql_runner.run, what=f"operator {operator.node.name}, {span}")
        states, found, missed = run_operator(
            operator, states, rows, clock, self._run_files, evaluate, complete=complete
        )
        dropped = self._history.dropped[operator.node.name]
        dropped.late += missed.late
        dropped.null_event_time += missed.null_event_time
        return states, found


def _input_names(segment: Segment) -> list[str]:
    return [segment.nodes[0]] if segment.is_source else [i.name for i in segment.inputs]


def _divided(tables: Mapping[str, pa.Table], parts: int) -> Iterator[dict[str, pa.Table]]:
    """The only input of a divisible step, in parts of equal row counts, in order."""
    ((name, table),) = tables.items()
    rows = -(-table.num_rows // parts)
    for start in range(0, table.num_rows, rows):
        yield {name: table.slice(start, rows)}


def _check_order(epochs: Sequence[EpochInput]) -> None:
    for one, two in pairwise(epochs):
        if two.epoch <= one.epoch or two.watermark_before != one.watermark:
            raise ValueError(f"epoch {two.epoch} does not follow epoch {one.epoch}")
    if len(epochs) > 1 and not all(epoch.complete for epoch in epochs):
        raise ValueError(f"epoch {epochs[0].epoch} and later ones lack rows: each needs a call")


def _same(table: pa.Table) -> pa.Table:
    return table
