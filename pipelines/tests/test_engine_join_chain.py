"""Joins on Spark: the condition and the columns of pairs, what follows in the same segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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


LEFT = "orders.k, orders.n, orders.t, payments.m"


def test_a_left_join_has_nulls_for_what_matches_nothing(session: Any) -> None:
    """A window behind it counts each row of the first input."""
    on = "orders.k = payments.ok AND orders.n > payments.m"
    operators = (
        '- {name: counted, inputs: [both], window: {size: 10us, aggregate: "count(*) AS c"}}'
    )
    text = f'{{type: Left, "on": "{on}", {BOUNDS}, select: "{LEFT}"}}'
    compiled = topology(text, operators, "counted")
    chain = SparkChain(compiled.segments[-2], compiled, session)
    found = epochs()
    one = chain.process(State(), found)
    rows = [(o.epoch, row["n"], row["m"]) for o in one.outputs for row in o.rows.to_pylist()]
    expected = [
        (epoch, left[1], right and right[1])
        for epoch, left, right in written(history(drawn(8, 40)), "Left")
        if left is not None
    ]
    assert sorted(rows, key=repr) == sorted(expected, key=repr)
    assert {m is None for _, _, m in rows} == {True, False}
    behind = SparkChain(compiled.segments[-1], compiled, session)
    read = [
        EpochInput(o.epoch, before, o.watermark, (o.rows,))
        for o, before in zip(
            one.outputs, [NO_WATERMARK, *(o.watermark for o in one.outputs)], strict=False
        )
    ]
    last = EpochInput(8, read[-1].watermark, END_OF_INPUT, (read[-1].inputs[0].slice(0, 0),))
    counts = behind.process(State(), [*read, last]).outputs
    assert sum(row["c"] for o in counts for row in o.rows.to_pylist()) == len(rows)
    assert behind.dropped["counted"].late == 0


def test_a_tentative_branch_of_an_outer_join_writes_matches_alone(session: Any) -> None:
    text = f'{{type: Left, "on": "orders.k = payments.ok", {BOUNDS}, select: "{LEFT}"}}'
    compiled = topology(text)
    chain = SparkChain(compiled.segments[-1], compiled, session)
    found = epochs()
    stable = chain.process(State(), found[:4]).state
    state, values = stable, list[Any]()
    for epoch in found[4:]:
        orders, payments = epoch.inputs
        fork = replace(epoch, inputs=(orders, payments.slice(0, 0)), complete=False)
        result = chain.process(state, [fork])
        state = result.state
        values += result.outputs[0].rows["m"].to_pylist()
    assert values
    assert None not in values
    with pytest.raises(ValueError, match="lack rows: each needs a call"):
        chain.process(stable, [replace(epoch, complete=False) for epoch in found[4:]])
    corrected = chain.process(stable, found[4:])
    expected = chain.process(State(), found)
    digests = [[digest_table(o.rows) for o in r.outputs] for r in (corrected, expected)]
    assert digests[0] == digests[1][4:]


def test_an_outer_join_that_begins_anew_keeps_all_that_it_reads(session: Any) -> None:
    text = f'{{type: Left, "on": "orders.k = payments.ok", {BOUNDS}, select: "{LEFT}"}}'
    compiled = topology(text)
    chain = SparkChain(compiled.segments[-1], compiled, session)
    begun = chain.begins_after(State(), {compiled.nodes["both"].id: 10**9})
    rows = chain.process(begun, epochs()).outputs
    values = [m for output in rows for m in output.rows["m"].to_pylist()]
    assert values == [
        m
        for o in chain.process(State(), epochs()).outputs
        for m in o.rows["m"].to_pylist()
        if m is not None
    ]


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
