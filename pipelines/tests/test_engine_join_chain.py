"""Joins on Spark: the condition and the columns of pairs, what follows in the same segment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from joined_rows import history, inputs_of, oracle, topology, written
from spark_parts import StartSession

from rekindle.engine.model import EpochOutput, State
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK, EpochInput
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology

pytest.importorskip("pyspark")

from rekindle.engine.spark import session as sessions
from rekindle.engine.spark.chain import SparkChain

pytestmark = pytest.mark.spark
BOUNDS = "before: 5us, after: 20us"


@pytest.fixture(scope="module")
def session(start_shared: StartSession) -> Iterator[Any]:
    made = start_shared("test", master="local[2]")
    yield made
    sessions.stop_session(made, keep_jvm=True)


def epochs(count: int = 8, rows: int = 40) -> list[EpochInput]:
    return inputs_of(history(drawn(count, rows)))


def drawn(count: int, rows: int) -> list[tuple[Any, Any, int]]:
    rng = np.random.default_rng(7)

    def side(number: int) -> list[tuple[str | None, int, int | None]]:
        return [
            (
                None if rng.random() < 0.1 else "abcd"[int(rng.integers(4))],
                int(rng.integers(10)),
                None if rng.random() < 0.1 else int(number * 10 + rng.integers(-20, 20)),
            )
            for _ in range(rows)
        ]

    return [(side(number), side(number), 10) for number in range(count)]


@pytest.mark.parametrize(
    "select",
    [
        "orders.k, orders.n, payments.m, orders.t, payments.u",
        "orders.* EXCEPT (tags), payments.M, Payments.*  EXCEPT (ok, m)",
    ],
)
def test_condition_and_columns_are_those_of_spark(session: Any, select: str) -> None:
    on = "orders.k = payments.ok AND orders.n + payments.m > 9"
    compiled = topology(f'{{"on": "{on}", {BOUNDS}, select: "{select}"}}')
    chain = SparkChain(compiled.segments[-1], compiled, session)
    found = epochs()
    one = chain.process(State(), found)
    state, outputs = State(), list[EpochOutput]()
    for epoch in found:
        result = chain.process(state, [epoch])
        state, outputs = result.state, [*outputs, *result.outputs]
    assert [digest_table(o.rows) for o in one.outputs] == [digest_table(o.rows) for o in outputs]
    pairs, late, untimed = oracle(history(drawn(8, 40)))
    expected = [(e, r[1], p[1]) for e, r, p in pairs if r[1] + p[1] > 9]
    rows = [
        (output.epoch, row["n"], row["m" if "m" in row else "M"])
        for output in one.outputs
        for row in output.rows.to_pylist()
    ]
    assert rows == expected
    assert len(rows) > 20
    dropped = chain.dropped["both"]
    assert (dropped.late, dropped.null_event_time) == (2 * late, 2 * untimed)


def test_a_window_in_the_same_segment_loses_no_pair(session: Any) -> None:
    operators = """
- {name: named, inputs: [both], sql: "SELECT t AS at, n FROM both WHERE n > 2"}
- {name: counted, inputs: [named], window: {size: 10us, aggregate: "count(*) AS c"}}
"""
    text = f'{{"on": "orders.k = payments.ok", {BOUNDS}, select: "orders.n, orders.t"}}'
    compiled = topology(text, operators, "counted", queries="counted")
    segment = compiled.segments[-1]
    assert segment.nodes == ("both", "named", "counted")
    chain = SparkChain(segment, compiled, session)
    found = epochs()
    empty = tuple(table.slice(0, 0) for table in found[-1].inputs)
    found.append(EpochInput(8, found[-1].watermark, END_OF_INPUT, empty))
    one = chain.process(State(), found)
    pairs, _, _ = oracle(history(drawn(8, 40)))
    counted = sum(sum(output.rows["c"].to_pylist()) for output in one.outputs)
    assert counted == sum(left[1] > 2 for _, left, _ in pairs)
    assert chain.dropped["counted"].late == 0
    watermarks = [output.watermark for output in one.outputs]
    assert watermarks == [*(epoch.watermark - 20 for epoch in found[:-1]), END_OF_INPUT]
    many = SparkChain(segment, compiled, session)
    state = State()
    for epoch, expected in zip(found, one.outputs, strict=True):
        result = many.process(state, [epoch])
        state = result.state
        assert digest_table(result.outputs[0].rows) == digest_table(expected.rows)


def test_a_semi_join_evaluates_its_condition_on_spark(session: Any) -> None:
    on = "orders.k = payments.ok AND orders.n > payments.m"
    compiled = topology(f'{{type: Semi, "on": "{on}", {BOUNDS}, select: "orders.n, orders.t"}}')
    chain = SparkChain(compiled.segments[-1], compiled, session)
    result = chain.process(State(), epochs())
    found = [(o.epoch, row["n"]) for o in result.outputs for row in o.rows.to_pylist()]
    rows = written(history(drawn(8, 40)), "Semi")
    expected = [(epoch, left[1]) for epoch, left, _ in rows if left is not None]
    assert sorted(found) == sorted(expected)
    assert len(found) > 20


def test_epochs_without_pairs_run_no_job(session: Any) -> None:
    compiled = topology(f'{{"on": "orders.k = payments.ok", {BOUNDS}}}')
    chain = SparkChain(compiled.segments[-1], compiled, session)
    rows: list[tuple[Any, Any, int]] = [([("a", 1, 0)], [("b", 1, 0)], 1)]
    chain.process(State(), inputs_of(history(rows)))
    assert chain.jobs == 0


TIME = pa.timestamp("us", "UTC")


def compiled_of(sources: dict[str, str], operators: str, last: str) -> Topology:
    texts = "".join(
        f"""
- name: {name}
  schema: "{schema}"
  eventTime: {{column: t}}
  files: {{url: "file:///in", format: parquet, orderBy: t, rowsPerSecond: 1}}"""
        for name, schema in sources.items()
    )
    spec = f"""
checkpoint: {{store: "file:///store"}}
sources:{texts}
operators:{operators}
queries:
- {{name: q, from: {last}, sink: {{files: {{url: "file:///out"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(spec)), "test", skip_cluster_checks=True)


def test_all_columns_of_an_input_are_in_its_order(session: Any) -> None:
    compiled = compiled_of(
        {"o": "x BIGINT, t TIMESTAMP, y BIGINT", "p": "y BIGINT, t TIMESTAMP"},
        """
- {name: both, inputs: [o, p], join: {type: Semi, "on": "o.y = p.y", within: 5us}}
- {name: twice, inputs: [both], sql: "SELECT * FROM both UNION ALL SELECT x, t, y FROM both"}""",
        "twice",
    )
    chain = SparkChain(compiled.segments[-1], compiled, session)
    left = pa.table({"x": [1], "t": pa.array([10], TIME), "y": [100]})
    right = pa.table({"y": [100], "t": pa.array([10], TIME)})
    result = chain.process(State(), [EpochInput(0, NO_WATERMARK, 20, (left, right))])
    rows = result.outputs[0].rows.drop_columns(["t"]).to_pylist()
    assert rows == [{"x": 1, "y": 100}] * 2


def test_a_pair_with_the_end_of_a_window_is_not_late_behind_the_join(session: Any) -> None:
    """Its other row is as late as it may be."""
    compiled = compiled_of(
        {"o": "k BIGINT, t TIMESTAMP", "p": "k BIGINT, t TIMESTAMP"},
        """
- {name: a, inputs: [o], keyBy: [k], window: {size: 10us, groupBy: [k], aggregate: "count(*) AS n"}}
- name: both
  inputs: [a, p]
  join: {"on": "a.k = p.k", before: 0us, after: 5us, select: "a.window_end, p.t"}
- {name: counted, inputs: [both], window: {size: 10us, aggregate: "count(*) AS c"}}""",
        "counted",
    )
    chain = SparkChain(compiled.segments[-1], compiled, session)
    start, end = pa.array([0], TIME), pa.array([10], TIME)
    window = pa.table({"window_start": start, "window_end": end, "k": [1], "n": [1]})
    first, last = (pa.table({"k": [1], "t": pa.array([at], TIME)}) for at in (14, 15))
    nothing = window.slice(1)
    result = chain.process(
        State(),
        [
            EpochInput(0, NO_WATERMARK, 15, (window, first)),
            EpochInput(1, 15, 15, (nothing, last)),
            EpochInput(2, 15, 100, (nothing, last.slice(1))),
        ],
    )
    counts = [row["c"] for output in result.outputs for row in output.rows.to_pylist()]
    assert counts == [2]
    assert chain.dropped["counted"].late == 0
