"""The chain on Spark: results of windows, and that bits do not depend on how a chain is run."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engine_fixtures import (
    MINUTE,
    edge_case_epochs,
    oracle,
    run,
    state_digests,
    topology,
)
from spark_parts import StartSession

from rekindle.engine.model import State
from rekindle.engine.operators.base import Aggregation
from rekindle.engine.state import spill
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import OperatorFailed, OperatorRefused, StateMismatch
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, EpochInput

pytest.importorskip("pyspark")
from py4j.java_gateway import JavaObject

from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import BATCH_ROWS

pytestmark = pytest.mark.spark

AGGREGATES = (
    "count(*) AS rows, count(v) AS values, sum(v) AS total, avg(v) AS mean, min(v) AS low,"
    " max(v) AS high, sum(n) AS whole, min(k) AS word, max(v) - min(v) AS range"
)


class Spark:
    """A Spark context that can be restarted with other cores."""

    def __init__(self, start: StartSession) -> None:
        self._start = start
        self.session = start("test")

    def restart(self, master: str = "local[1]", conf: Mapping[str, str] | None = None) -> None:
        sessions.stop_session(self.session, keep_jvm=True)
        self.session = self._start("test", master=master, conf=conf)


@pytest.fixture(scope="module")
def spark(start_shared: StartSession) -> Iterator[Spark]:
    started = Spark(start_shared)
    yield started
    sessions.stop_session(started.session, keep_jvm=True)


def chain_of(operators: str, last: str, spark: Spark, **options: Any) -> SparkChain:
    compiled = topology(operators, last)
    return SparkChain(compiled.segments[-1], compiled, spark.session, **options)


def window(size: str, keys: str = "k, g") -> str:
    spec = f"{{{size}, groupBy: [{keys}], aggregate: '{AGGREGATES}'}}"
    return f"- {{name: w, inputs: [rows], window: {spec}}}"


@pytest.mark.parametrize(
    ("size", "length", "slide"),
    [
        ("size: 5m", 5, 5),
        ("size: 6m, slide: 2m", 6, 2),
    ],
)
def test_windows_equal_those_of_an_oracle(spark: Spark, size: str, length: int, slide: int) -> None:
    epochs = edge_case_epochs(1, 12, 300, idle=[5])
    last = epochs[-1]
    epochs.append(EpochInput(12, last.watermark, END_OF_INPUT, (last.inputs[0].slice(0, 0),)))
    chain = chain_of(window(size), "w", spark)
    result = chain.process(State(), epochs)
    expected = oracle(epochs, length * MINUTE, slide * MINUTE, ["k", "g"])
    for output in result.outputs:
        groups = expected[output.epoch]
        got = {group_of(row): row for row in output.rows.to_pylist()}
        assert got.keys() == groups.keys()
        assert output.rows.num_rows == len(groups)
        for group, rows in groups.items():
            check(got[group], rows)
    (left,) = result.state.operators.values()
    assert left.is_empty


def test_saved_state_is_used_in_any_order_of_columns(spark: Spark) -> None:
    epochs = edge_case_epochs(1, 6, 100, idle=[])
    chain = chain_of(window("size: 5m"), "w", spark)
    half = chain.process(State(), epochs[:3]).state
    ((operator, saved),) = half.operators.items()

    def changed(kept: list[str]) -> State:
        moved: dict[object, Run] = {
            run.id: Run(run.table.select(kept), run.id) for run in saved.runs()
        }
        return State({operator: saved.with_runs(moved)})

    names = next(saved.runs()).table.schema.names
    aligned = chain.match_columns(changed(list(reversed(names))))
    assert chain.process(aligned, epochs[3:]).outputs == chain.process(half, epochs[3:]).outputs
    sums = [name for name in names if name.startswith("p_sum_")]
    with pytest.raises(StateMismatch, match=rf"operator w: .* column {sums[0]} is missing"):
        chain.match_columns(changed([name for name in names if name != sums[0]]))


def test_deltas_of_all_tables_are_joined_for_a_checkpoint(spark: Spark) -> None:
    chain, state = chain_of(window("size: 365d", keys="k"), "w", spark), State()
    for epoch in edge_case_epochs(1, 6, 100, idle=[]):
        state = chain.process(state, [epoch]).state
    joined = chain.join_deltas(state)
    levels = {delta.level for table in joined.operators.values() for delta in table.deltas}
    assert levels == {1}
    assert chain.folded(joined) == chain.folded(state)


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    start = int(row["window_start"].timestamp()) * 1_000_000
    g = row["g"]
    return (start, row["k"], "NaN" if g is not None and math.isnan(g) else g)


def check(got: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    values = [r["v"] for r in rows if r["v"] is not None]
    assert got["rows"] == len(rows)
    assert got["values"] == len(values)
    assert got["whole"] == (sum(w) if (w := [r["n"] for r in rows if r["n"] is not None]) else None)
    words = [r["k"] for r in rows if r["k"] is not None]
    assert got["word"] == (min(words) if words else None)
    if not values:
        assert [got[c] for c in ("total", "mean", "low", "high")] == [None] * 4
        return
    total = sum(values)
    assert got["total"] == pytest.approx(total, rel=1e-9, nan_ok=True)
    assert got["mean"] == pytest.approx(total / len(values), rel=1e-9, nan_ok=True)
    real = [v for v in values if not math.isnan(v)]
    has_nan = len(real) < len(values)
    assert got["low"] == pytest.approx(min(real) if real else math.nan, nan_ok=True)
    assert got["high"] == pytest.approx(math.nan if has_nan else max(real), nan_ok=True)


def test_one_input_of_a_window_has_window_ends_and_the_other_row_times(spark: Spark) -> None:
    operators = """
- {name: minutes, inputs: [rows], window: {size: 1m, aggregate: "count(*) AS n"}}
- {name: ends, inputs: [minutes], sql: "SELECT window_end AS t, n FROM minutes"}
- {name: plain, inputs: [rows], sql: "SELECT t, n FROM rows"}
- {name: both, inputs: [ends, plain], window: {size: 2m, aggregate: "count(*) AS c, sum(n) AS n"}}
"""
    compiled = topology(operators, "both")
    (segment,) = (s for s in compiled.segments if s.name == "both")

    def rows(*times_and_numbers: tuple[int, int]) -> pa.Table:
        times, numbers = (pa.array(x, pa.int64()) for x in zip(*times_and_numbers, strict=True))
        return pa.table({"t": times.cast(pa.timestamp("us", "UTC")), "n": numbers})

    ends = rows((1 * MINUTE, 1), (2 * MINUTE, 1), (3 * MINUTE, 1))
    plain = rows((0, 10), (1 * MINUTE, 10), (2 * MINUTE, 10), (4 * MINUTE - 1, 10))
    epoch = EpochInput(0, watermark_before=0, watermark=4 * MINUTE, inputs=(ends, plain))
    for method in (None, *Aggregation):
        chain = SparkChain(segment, compiled, spark.session, method=method)
        (output,) = chain.process(State(), [epoch]).outputs
        found = output.rows.select(["c", "n"]).to_pylist()
        assert found == [{"c": 4, "n": 22}, {"c": 3, "n": 21}]
        assert (chain.dropped["both"].late, chain.dropped["both"].null_event_time) == (0, 0)


LONG = """
- {name: clean, inputs: [rows], sql: "SELECT *, v * 1.1 AS w FROM rows WHERE n IS NOT NULL"}
- name: spread
  inputs: [clean]
  sql: "SELECT k, g, n, w, t, i FROM clean LATERAL VIEW explode(array(1, 2)) e AS i"
- name: fine
  inputs: [spread]
  window:
    size: 4m
    slide: 2m
    groupBy: [k, g, i]
    aggregate: "count(*) AS c, sum(w) AS s, max(w) AS high"
- name: half
  inputs: [fine]
  sql: "SELECT k, g, s / 2 AS s, high, c, window_end FROM fine WHERE i = 1 OR k IS NULL"
- name: coarse
  inputs: [half]
  window: {size: 8m, groupBy: [g], aggregate: "sum(s) AS s, sum(c) AS c, avg(high) AS h"}
- {name: end, inputs: [coarse], sql: "SELECT window_start, struct(*) AS whole, g, s FROM coarse"}
"""


def test_epochs_without_changes_may_be_left_out(spark: Spark) -> None:
    epochs = edge_case_epochs(3, 12, 200, idle=[0, 4, 5, 6, 11])
    changes = [e for e in epochs if e.inputs[0].num_rows or e.watermark != e.watermark_before]
    assert len(changes) == len(epochs) - 5
    chain = chain_of(LONG, "end", spark)
    every, state = run(chain, epochs, [12])
    for sizes in ([12], [1], [3]):
        some, other = run(chain, changes, sizes)
        of_epoch = dict(zip((e.epoch for e in changes), some, strict=True))
        nothing = digest_table(chain.output_schema.empty_table())
        assert [of_epoch.get(e.epoch, nothing) for e in epochs] == every
        assert state_digests(chain, other) == state_digests(chain, state)


def test_bits_do_not_depend_on_epochs_in_a_call_nor_on_cores(
    spark: Spark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Mixed sizes of calls on one core; all epochs in one call, and one in each, on four; windows
    closed in portions."""
    epochs = edge_case_epochs(2, 12, 400, idle=[6, 7])
    digests, states = [], []
    mixed = [3, 1, 5]
    for master, sizes in (("local[1]", mixed), ("local[4]", [12])):
        spark.restart(master)
        for method in Aggregation:
            chain = chain_of(LONG, "end", spark, method=method)
            outputs, state = run(chain, epochs, sizes)
            digests.append(outputs)
            states.append(state_digests(chain, state))
    chain = chain_of(LONG, "end", spark)
    outputs, state = run(chain, epochs, [1])
    digests.append(outputs)
    states.append(state_digests(chain, state))
    files = RunFiles(tmp_path / "runs", memory_bytes=0)
    monkeypatch.setattr(spill, "MIN_BUFFER_BYTES", 2_000)
    chain = chain_of(LONG, "end", spark, run_files=files, spark_job_input_bytes=2_000)
    outputs, state = run(chain, epochs, mixed)
    assert all(not r.in_memory for operator in state.operators.values() for r in operator.runs())
    digests.append(outputs)
    states.append(state_digests(chain, state))
    assert all(d == digests[0] for d in digests)
    assert all(s == states[0] for s in states)
    assert len(set(digests[0])) > 3


GROUPS = 20_000
LOST_ONES = [2.0**53, *[1.0] * 6, -(2.0**53)]
"""Summed in order they give 0.0, because each 1 is rounded away; in two partial sums not."""
EXPLODED = f"FROM rows LATERAL VIEW explode(sequence(1, {GROUPS})) e AS i"
ADAPTIVE = {"spark.sql.adaptive.enabled": "true"}


@pytest.mark.parametrize(
    ("sql", "repeated", "conf", "runs_hashed"),
    [
        pytest.param(f"SELECT v, t, i {EXPLODED}", 1, {}, True, id="reused-plan"),
        pytest.param("SELECT v, t, n AS i FROM rows", GROUPS, {}, True, id="plan-per-call"),
        pytest.param(f"SELECT v, t, i {EXPLODED}", 1, ADAPTIVE, False, id="order-not-in-plan"),
    ],
)
def test_bits_do_not_depend_on_memory(
    spark: Spark, sql: str, repeated: int, conf: dict[str, str], runs_hashed: bool
) -> None:
    values = [v for v in LOST_ONES for _ in range(repeated)]
    operators = f"""
- {{name: many, inputs: [rows], sql: "{sql}"}}
- {{name: w, inputs: [many], window: {{size: 5m, groupBy: [i], aggregate: "sum(v) AS s"}}}}
"""
    columns: dict[str, Any] = {
        "k": pa.nulls(len(values), pa.string()),
        "g": pa.nulls(len(values), pa.float64()),
        "v": values,
        "n": [1 + i % GROUPS for i in range(len(values))],
        "t": pa.array([0] * len(values)).cast(pa.timestamp("us", "UTC")),
    }
    epoch = EpochInput(0, watermark_before=-1, watermark=10 * MINUTE, inputs=(pa.table(columns),))

    def sums(chain: SparkChain) -> set[float]:
        (output,) = chain.process(State(), [epoch]).outputs
        assert output.rows.num_rows == GROUPS
        return set(output.rows.column("s").to_pylist())

    spark.restart(conf={"spark.memory.fraction": "0.02", **conf})
    try:
        assert sums(chain_of(operators, "w", spark, method=Aggregation.SORTED)) == {0.0}
        assert sums(chain_of(operators, "w", spark, method=Aggregation.HASHED)) != {0.0}
        chain = chain_of(operators, "w", spark)
        assert sums(chain) == {0.0}
        assert chain.jobs == runs_hashed + 2  # hashed if tried, sorted, and the windows that closed
        assert sums(chain) == {0.0}
        assert chain.jobs == runs_hashed + 4  # a size that did not fit is not tried again
    finally:
        spark.restart()


def test_an_epoch_that_changes_nothing_runs_no_job(spark: Spark) -> None:
    chain = chain_of(window("size: 5m"), "w", spark)
    epochs = edge_case_epochs(3, 3, 50)
    no_rows = epochs[0].inputs[0].slice(0, 0)
    first = chain.process(State(), epochs[:1])
    jobs = chain.jobs
    empty = EpochInput(1, epochs[0].watermark, epochs[0].watermark + 1, (no_rows,))
    second = chain.process(first.state, [empty])
    assert chain.jobs == jobs
    assert second.outputs[0].rows.num_rows == 0
    assert second.outputs[0].rows.schema == chain.output_schema
    assert state_digests(chain, second.state) == state_digests(chain, first.state)


@pytest.mark.parametrize("rows", [10, BATCH_ROWS + 1], ids=["one-batch", "two-batches"])
@pytest.mark.parametrize("method", [Aggregation.SORTED, None], ids=["sorted", "hashed"])
def test_python_keeps_no_objects_in_the_jvm(
    spark: Spark, rows: int, method: Aggregation | None
) -> None:
    spec = "{size: 1h, groupBy: [g], aggregate: 'sum(v) AS s'}"  # none closes
    chain = chain_of(f"- {{name: w, inputs: [rows], window: {spec}}}", "w", spark, method=method)
    first, *rest = edge_case_epochs(1, 3, rows)
    gc.disable()
    try:
        chain.process(State(), [first])
        before = objects_held()
        for epoch in rest:
            chain.process(State(), [epoch])
        assert objects_held() == before
    finally:
        gc.enable()


def objects_held() -> int:
    """Objects in the JVM that Python references."""
    return sum(isinstance(o, JavaObject) for o in gc.get_objects())


def test_row_wise_sql_keeps_order_and_hides_system_columns(spark: Spark) -> None:
    operators = """
- name: a-b
  inputs: [rows]
  sql: "SELECT *, v * n AS vn, to_json(struct(*)) AS js FROM rows AS r WHERE n > 0"
- name: c
  inputs: [a-b]
  sql: >-
    SELECT x.n, upper(x.k) AS k, js FROM `a-b` x
    UNION ALL SELECT n * 10 AS n, k, js FROM `a-b`
"""
    chain = chain_of(operators, "c", spark)
    assert chain.output_schema.names == ["n", "k", "js"]
    epochs = edge_case_epochs(4, 5, 100)
    result = chain.process(State(), epochs)
    assert chain.jobs == 1
    for epoch, output in zip(epochs, result.outputs, strict=True):
        n = [x for x in epoch.inputs[0].column("n").to_pylist() if x is not None and x > 0]
        assert output.rows.column("n").to_pylist() == n + [x * 10 for x in n]
        assert not any("__" in js for js in output.rows.column("js").to_pylist())
        (alone,) = chain.process(State(), [epoch]).outputs
        assert alone == output


def test_sql_that_spark_refuses_names_the_operator(spark: Spark) -> None:
    operators = '- {name: bad, inputs: [rows], sql: "SELECT make_date(k, k, k, k) AS d FROM rows"}'
    with pytest.raises(OperatorRefused, match="operator bad") as refused:
        chain_of(operators, "bad", spark)
    assert refused.value.operator == "bad"


def test_a_failure_at_run_time_names_operator_and_epochs(spark: Spark) -> None:
    sql = "SELECT CAST(raise_error(k) AS STRING) AS d FROM rows"
    operators = f'- {{name: loud, inputs: [rows], sql: "{sql}"}}'
    chain = chain_of(operators, "loud", spark)
    with pytest.raises(OperatorFailed, match="operator loud, epochs 0 to 1"):
        chain.process(State(), edge_case_epochs(5, 2, 10))


def test_dropped_rows_are_counted(spark: Spark) -> None:
    chain = chain_of(window("size: 5m"), "w", spark)
    epochs = edge_case_epochs(6, 10, 100)
    chain.process(State(), epochs)
    late = null_event_time = 0
    for e in epochs:
        for t in e.inputs[0].column("t").cast(pa.int64()).to_pylist():
            null_event_time += t is None
            if t is not None:
                late += t - t % (5 * MINUTE) + 5 * MINUTE <= e.watermark_before
    assert (chain.dropped["w"].late, chain.dropped["w"].null_event_time) == (late, null_event_time)
    assert late
    assert null_event_time


@pytest.mark.parametrize("size", ["size: 5m", "size: 6m, slide: 2m"])
def test_times_whose_windows_do_not_fit_into_64_bits_are_untimed_and_not_late(
    spark: Spark, size: str
) -> None:
    chain = chain_of(window(size), "w", spark)
    rows = edge_case_epochs(6, 1, 2)[0].inputs[0].slice(0, 2)
    extremes = pa.array([-(2**63), 2**63 - 1]).cast(rows.schema.field("t").type)
    rows = rows.set_column(rows.schema.get_field_index("t"), "t", extremes)
    chain.process(State(), [EpochInput(0, 0, MINUTE, (rows,))])
    assert (chain.dropped["w"].late, chain.dropped["w"].null_event_time) == (0, 2)
