"""The chain of one segment on Spark: `rekindle.engine.model.Chain` for `sql` and `window` nodes.

Each step of a chain is at most one Spark job for all epochs of a call, and none without rows. The
state of windows is in `rekindle.engine.state`, outside Spark.
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
    EPOCH,
    LATE_BEFORE,
    SYSTEM_COLUMNS,
    concatenate_epochs,
    split_by_epoch,
)
from rekindle.engine.exact_sums import combine_all_sums, combined_partials
from rekindle.engine.failure import OutOfMemory
from rekindle.engine.memory import MIB, plan_memory
from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.engine.spark.analysis import Analyzer, all_nullable
from rekindle.engine.spark.query import SqlRunner
from rekindle.engine.spark.steps import (
    Aggregation,
    Step,
    WindowNode,
    is_divisible,
    plan_steps,
    step_sql,
)
from rekindle.engine.state.operator import BEGIN_OF_PANES, EMPTY, OperatorState
from rekindle.engine.state.reading import read
from rekindle.engine.state.runs import PANE
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import WindowShape, advance, match_columns
from rekindle.streams.epochs import END_OF_INPUT, EpochInput
from rekindle.topology.model import Segment, Topology
from rekindle.topology.windows.kind import END, START

HASH_BYTES = 16 * 2**20
"""Largest input of a window for hash aggregation: a fraction of the 127 MB of execution memory in a
heap of 512 MB, so that the hash map is rarely full."""
MANY_ROWS = 50_000
"""Number of rows from which sort aggregation is distributed over the cores."""


SPARK_JOB_INPUT_BYTES = plan_memory().spark_job_input_bytes
_ToView = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True, slots=True)
class _StepQueries:
    """A step with its SQL for each method of aggregation; `shape`: of the window that it ends
    in."""

    step: Step
    texts: Mapping[Aggregation, str]
    shape: WindowShape | None
    divisible: bool
    """Whether the concatenated results for consecutive parts of the rows are the result for all."""


@dataclass(slots=True)
class _CallHistory:
    """What earlier calls have found out."""

    hash_bytes: dict[str, int] = field(default_factory=dict)
    """By `Step.operators` of a step that ends in a window: the largest input for which the hash map
    was never full."""
    dropped: dict[str, DroppedRows] = field(default_factory=dict)
    """By window operator."""


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
        """`method`: fixes how windows are aggregated, for tests; otherwise by the size of the
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
        *steps, last = plan_steps(segment, topology)
        prepared = [self._prepare(step, analyzer) for step in steps]
        self._steps_for_epochs = [*prepared, self._prepare(last, analyzer)]
        self._steps_for_one_epoch = [
            *prepared,
            self._prepare(replace(last, has_epoch_column=False), analyzer),
        ]
        self._output_schema = analyzer.schema(segment.nodes[-1])

    def _prepare(self, step: Step, analyzer: Analyzer) -> _StepQueries:
        shape, float_keys = None, frozenset[str]()
        if step.end is not None:  # the window whose partial aggregates it computes
            analysis = analyzer.window(step.end)
            shape, float_keys = analysis.shape, analysis.float_keys
            self._history.dropped[step.end.node.name] = DroppedRows()
            step = replace(step, end=analysis.node)
        sources = [name for name, _ in self._inputs]
        texts = {method: step_sql(step, sources, method, float_keys) for method in Aggregation}
        return _StepQueries(step, texts, shape, is_divisible(step, sources))

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
        for window, shape in self._windows():
            if window.node.id in states:
                states[window.node.id] = match_columns(
                    shape, states[window.node.id], window.node.name
                )
        return State(states)

    def folded(self, state: State) -> Mapping[str, pa.Table]:
        """For tests: by operator id, one row for each group and pane; equal for equal states with
        any layout."""
        return {
            window.node.id: read(shape.run_shape, states, BEGIN_OF_PANES, END_OF_INPUT)
            for window, shape in self._windows()
            if (states := state.operators.get(window.node.id)) is not None
        }

    def _windows(self) -> Iterator[tuple[WindowNode, WindowShape]]:
        for prepared in self._steps_for_epochs:
            if prepared.step.end is not None and prepared.shape is not None:
                yield prepared.step.end, prepared.shape

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        """Run epochs in their order. Raises OperatorFailed (operators, epochs), OutOfMemory,
        DiskFull, EngineUnavailable."""
        _check_order(epochs)
        if not epochs:
            return ChainResult((), state)
        span = f"epochs {epochs[0].epoch} to {epochs[-1].epoch}"
        views = {
            name: concatenate_epochs(schema, [(e, e.inputs[at]) for e in epochs])
            for at, (name, schema) in enumerate(self._inputs)
        }
        states: Mapping[str, OperatorState] = state.operators
        rows: pa.Table | None = None
        to_view = _same
        for prepared in self._steps_for_one_epoch if len(epochs) == 1 else self._steps_for_epochs:
            rows = self._run(prepared, views, to_view, span)
            window = prepared.step.end
            if window is not None and prepared.shape is not None:
                old = states.get(window.node.id, EMPTY)
                new, closed = self._advance(window, prepared.shape, old, rows, epochs)
                states = {**states, window.node.id: new}
                views = {window.closed_view: closed}
                to_view = partial(_closed_view, shape=prepared.shape, epochs=epochs)
        if self._run_files is not None:
            states = self._run_files.spill(states)
        tables = split_by_epoch(self._output_schema, rows, [e.epoch for e in epochs])
        outputs = zip(epochs, tables, strict=True)
        return ChainResult(
            tuple(EpochOutput(e.epoch, e.watermark, t) for e, t in outputs), State(states)
        )

    def _run(
        self, prepared: _StepQueries, tables: Mapping[str, pa.Table], to_view: _ToView, span: str
    ) -> pa.Table | None:
        """Run one step; None if there are no rows. `to_view`: makes the content of a view from a
        table, or from consecutive rows of it."""
        if not any(t.num_rows for t in tables.values()):
            return None
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
        if self._method is not None or prepared.shape is None:
            return False
        if not all(_can_hash(data_type) for _, data_type, _ in prepared.shape.partials):
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
        window: WindowNode,
        shape: WindowShape,
        old: OperatorState,
        rows: pa.Table | None,
        epochs: Sequence[EpochInput],
    ) -> tuple[OperatorState, pa.Table]:
        watermarks = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
        advanced = advance(shape, old, rows, watermarks, self._run_files)
        dropped = self._history.dropped[window.node.name]
        dropped.late += advanced.late
        dropped.null_event_time += advanced.null_event_time
        return advanced.state, advanced.closed


def _input_names(segment: Segment) -> list[str]:
    return [segment.nodes[0]] if segment.is_source else [i.name for i in segment.inputs]


def _divided(tables: Mapping[str, pa.Table], parts: int) -> Iterator[dict[str, pa.Table]]:
    """The only input of a divisible step, in parts of equal row counts, in order."""
    ((name, table),) = tables.items()
    rows = -(-table.num_rows // parts)
    for start in range(0, table.num_rows, rows):
        yield {name: table.slice(start, rows)}


def _can_hash(data_type: pa.DataType) -> bool:
    """Whether Spark can use hash aggregation for a partial of this type."""
    return not (
        pa.types.is_string(data_type)
        or pa.types.is_binary(data_type)
        or pa.types.is_null(data_type)
    )


def _check_order(epochs: Sequence[EpochInput]) -> None:
    for one, two in pairwise(epochs):
        if two.epoch <= one.epoch or two.watermark_before != one.watermark:
            raise ValueError(f"epoch {two.epoch} does not follow epoch {one.epoch}")


def _same(table: pa.Table) -> pa.Table:
    return table


def _closed_view(closed: pa.Table, shape: WindowShape, epochs: Sequence[EpochInput]) -> pa.Table:
    """The view that `steps.output_sql` selects from: system columns, and the bounds, keys and
    partials of closed windows."""
    before = {e.epoch: e.watermark_before for e in epochs}
    numbers = closed.column(EPOCH).to_numpy()
    start = closed.column(PANE).to_numpy()
    columns = {
        EPOCH: pa.array(numbers),
        LATE_BEFORE: pa.array([before[e] for e in numbers.tolist()], pa.int64()),
        START: pa.array(start).cast(pa.timestamp("us", "UTC")),
        END: pa.array(shape.assigner.ends(start)).cast(pa.timestamp("us", "UTC")),
    }
    results = combined_partials(shape)
    rest = [*shape.key_names, *(name for name, _ in results)]
    data_types = [*shape.keys, *(data_type for _, data_type in results)]
    closed = combine_all_sums(closed, shape)
    table = pa.table({**columns, **{name: closed.column(name) for name in rest}})
    fields = [*list(table.schema)[: len(columns)], *map(pa.field, rest, data_types)]
    return table.cast(all_nullable(pa.schema(fields)), safe=False)
