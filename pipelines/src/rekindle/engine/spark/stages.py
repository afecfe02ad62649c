"""A segment's chain as stages, each one Spark query; the SQL of each. Pure, no pyspark.

A stage begins at the segment's inputs or at the windows that closed, goes through `sql` nodes, and
ends in the segment's output or in the partial aggregates of the next window. Its text is constant:
all that differs between epochs is in the rows (`rekindle.engine.spark.rewrite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.engine.spark.rewrite import META, carry_meta, quote
from rekindle.engine.window_state import EPOCH, LATE, ROWS, UNTIMED, WINDOW
from rekindle.topology.aggregates import Decomposition, decompose
from rekindle.topology.model import Node, Segment, Topology
from rekindle.topology.spec import OperatorSpec, WindowSpec

ORDER = "__r"
MANY_ROWS = 50_000
"""From here on a window's rows are spread over the cores by key; below, one task is quicker."""


@dataclass(frozen=True, slots=True)
class WindowNode:
    """A window operator as the stages around it need it. Times in microseconds."""

    node: Node
    size: int
    slide: int
    keys: tuple[str, ...]
    decomposition: Decomposition
    time: str  # SQL of a row's event time in microseconds

    @property
    def closed_view(self) -> str:
        return f"__closed_{self.node.name}"


@dataclass(frozen=True, slots=True)
class Stage:
    """`begin` is None for the segment's inputs; `end` is None for its output."""

    begin: WindowNode | None
    sqls: tuple[Node, ...]
    end: WindowNode | None

    @property
    def operators(self) -> str:
        """For messages: the operators whose expressions this stage's query evaluates."""
        names = [n.node.name for n in (self.begin,) if n] + [n.name for n in self.sqls]
        return ", ".join(names + [n.node.name for n in (self.end,) if n])


def operators_of(segment: Segment, topology: Topology) -> tuple[Node, ...]:
    """The nodes that compute: all but the source."""
    return tuple(topology.nodes[n] for n in segment.nodes[1 if segment.is_source else 0 :])


def plan_stages(segment: Segment, topology: Topology) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    begin: WindowNode | None = None
    sqls: list[Node] = []
    for node in operators_of(segment, topology):
        spec = _operator(node)
        if spec.window is None:
            sqls.append(node)
            continue
        end = window_node(node, spec.window, topology)
        stages.append(Stage(begin, tuple(sqls), end))
        begin, sqls = end, []
    return (*stages, Stage(begin, tuple(sqls), None))


def window_node(node: Node, window: WindowSpec, topology: Topology) -> WindowNode:
    assert window.size is not None, f"{node.name}: validation lets time windows through only"
    column = topology.nodes[node.inputs[0]].event_time
    assert column is not None, f"{node.name}: validation wants an event time"
    time = f"unix_micros(CAST({quote(column)} AS TIMESTAMP))"
    if any(_is_window_end(topology, name) for name in node.inputs):
        time = f"{time} - 1L"
    decomposition = decompose(window.aggregate)
    slide = window.slide or window.size
    return WindowNode(node, window.size, slide, window.group_by, decomposition, time)


def _is_window_end(topology: Topology, name: str) -> bool:
    """Whether a stream's event time is the end of a window (exclusive), through `sql` or not."""
    spec = topology.nodes[name].spec
    if not isinstance(spec, OperatorSpec):
        return False
    return spec.window is not None or any(_is_window_end(topology, i) for i in spec.inputs)


def _operator(node: Node) -> OperatorSpec:
    assert isinstance(node.spec, OperatorSpec)
    return node.spec


def stage_sql(
    stage: Stage, sources: Sequence[str], *, float_keys: frozenset[str], many: bool
) -> str:
    """One query for a stage. `sources` are the views that hold the segment's inputs."""
    tables: list[tuple[str, str]] = []
    last = sources[0]
    if stage.begin is not None:
        last = stage.begin.node.name
        tables.append((last, finals_sql(stage.begin)))
    for node in stage.sqls:
        tables.append((node.name, carry_meta(_operator(node).sql or "", node.inputs)))
        last = node.name
    if stage.end is None:
        body = f"SELECT {META}.e AS {EPOCH}, * EXCEPT ({META}) FROM {quote(last)}"
    else:
        inputs = [last] if tables else sources
        tables += _window_tables(stage.end, inputs, float_keys)
        body = _partials_sql(stage.end, many)
    return _with(tables, body)


def _with(tables: Sequence[tuple[str, str]], body: str) -> str:
    if not tables:
        return body
    ctes = ",\n".join(f"{quote(name)} AS (\n{text}\n)" for name, text in tables)
    return f"WITH {ctes}\n{body}"


def finals_sql(window: WindowNode) -> str:
    """Closed windows -> the window operator's rows."""
    keys = [f"__k{i} AS {quote(name)}" for i, name in enumerate(window.keys)]
    finals = [f"{sql} AS {quote(alias)}" for alias, sql in window.decomposition.finals]
    columns = ", ".join([META, "window_start", "window_end", *keys, *finals])
    return f"SELECT {columns} FROM {quote(window.closed_view)}"


def _window_tables(
    window: WindowNode, inputs: Sequence[str], float_keys: frozenset[str]
) -> list[tuple[str, str]]:
    """Rows -> rows with their pane, canonical keys and place in the input's order.

    A window is put together of panes of one slide each (`rekindle.engine.window_state`). A row is
    late here if it is so for the newest window over its pane.

    Row-wise SQL keeps the input's order on any number of cores, so `monotonically_increasing_id`,
    which grows with partition and row, is that order; unlike a row number it also tells the rows
    that `explode` makes of one row apart.
    """
    rows = "\nUNION ALL\n".join(f"SELECT * FROM {quote(name)}" for name in inputs)
    timed = f"SELECT *, {window.time} AS __t, monotonically_increasing_id() AS {ORDER} FROM __in"
    pane = f"(__t - pmod(__t, {window.slide}L))"
    marker = (
        f"CASE WHEN __t IS NULL THEN {UNTIMED}L"
        f" WHEN {pane} + {window.size}L <= {META}.w THEN {LATE}L ELSE {pane} END"
    )
    keys = "".join(
        f"IF({WINDOW} <= {UNTIMED}L, NULL, {_canonical(name, name in float_keys)}) AS __k{i}, "
        for i, name in enumerate(window.keys)
    )
    keyed = f"SELECT {keys}{META}.e AS {EPOCH}, * EXCEPT ({META}, __t) FROM __paned"
    paned = f"SELECT *, {marker} AS {WINDOW} FROM __timed"
    return [("__in", rows), ("__timed", timed), ("__paned", paned), ("__placed", keyed)]


def _canonical(key: str, is_float: bool) -> str:
    """A key as it is grouped by. Floats as text, because Spark would sort by a form of its own:
    + 0.0 makes −0.0 into 0.0, and the shortest decimal form reads back as the same number."""
    return f"CAST({quote(key)} + 0.0D AS STRING)" if is_float else quote(key)


def _partials_sql(window: WindowNode, many: bool) -> str:
    """Fold each (group, pane, epoch) in row order, wholly in one place (design §3).

    Sorted input and sort-based aggregation, since hash aggregation that spills merges in an order
    of its own.
    """
    keys = [f"__k{i}" for i in range(len(window.keys))]
    spread = f"REPARTITION(8, {', '.join([*keys, WINDOW])})" if many else "COALESCE(1)"
    group = ", ".join([*keys, WINDOW, EPOCH])
    partials = "".join(f", {p.sql} AS {p.name}" for p in window.decomposition.partials)
    return (
        f"SELECT {group}, count(1) AS {ROWS}{partials} FROM (\n"
        f"SELECT /*+ {spread} */ * FROM __placed SORT BY {group}, {ORDER}\n"
        f") GROUP BY {group}"
    )
