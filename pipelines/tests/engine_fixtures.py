"""Topologies, edge-case rows and an oracle in plain Python for the engine's tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from rekindle.engine.model import ChainResult, State
from rekindle.engine.operators.base import Operator
from rekindle.engine.operators.window import WindowOperator, window_sql
from rekindle.engine.window_state import GroupShape
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Node, Topology

SECOND = 1_000_000
MINUTE = 60 * SECOND
SCHEMA = "k STRING, g DOUBLE, v DOUBLE, n BIGINT, t TIMESTAMP"
_STORE = "checkpoint: {store: 'file:///tmp/store'}"


def topology(operators: str, last: str, *, schema: str = SCHEMA) -> Topology:
    """One source `rows` with event time `t`, `operators` as YAML, one query on `last`."""
    text = f"""
{_STORE}
sources:
- name: rows
  schema: "{schema}"
  eventTime: {{column: t}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}}
operators:
{operators}
queries:
- {{name: q, from: {last}, sink: {{files: {{url: "file:///tmp/sink"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(text)), "test", skip_cluster_checks=True)


def operator_without_spark(
    compiled: Topology, float_keys: frozenset[str] = frozenset()
) -> Callable[[Node], Operator]:
    """The SQL of windows whose types nobody has analyzed."""

    def operator_of(node: Node) -> Operator:
        sql = replace(window_sql(node, compiled), float_keys=float_keys)
        return WindowOperator(sql, GroupShape((), ()))

    return operator_of


def edge_case_rows(rng: np.random.Generator, count: int, base: int, spread: int) -> pa.Table:
    """Doubles of magnitudes 1e-3 to 1e15, NaN, −0.0, NULLs everywhere, times on window borders: in
    `[base, base + spread)`, in microseconds."""
    v = rng.choice([-1.0, 1.0], count) * 10.0 ** rng.uniform(-3, 15, count)
    v[rng.random(count) < 0.02] = -0.0
    g = rng.choice([0.0, -0.0, 1.5, math.nan], count)
    t = base + rng.integers(0, spread, count)
    t[rng.random(count) < 0.1] = base
    k = np.array(["a", "b", "", "ü", "longer than eight bytes"], dtype=object)[
        rng.integers(0, 5, count)
    ]

    def nulls(share: float) -> Any:
        return rng.random(count) < share

    v[nulls(0.002)] = math.nan
    return pa.table(
        {
            "k": pa.array(k, pa.string(), mask=nulls(0.1)),
            "g": pa.array(g, pa.float64(), mask=nulls(0.1), from_pandas=False),
            "v": pa.array(v, pa.float64(), mask=nulls(0.05), from_pandas=False),
            "n": pa.array(rng.integers(-5, 5, count), pa.int64(), mask=nulls(0.05)),
            "t": pa.array(t, pa.int64(), mask=nulls(0.03)).cast(pa.timestamp("us", "UTC")),
        }
    )


def edge_case_epochs(
    seed: int, count: int, rows: int, *, idle: Sequence[int] = ()
) -> list[EpochInput]:
    """Epochs of a minute of event time each; some rows late by up to ten minutes. `idle`: those
    without rows, after which the watermark is what it was."""
    rng = np.random.default_rng(seed)
    epochs, before = [], NO_WATERMARK
    for number in range(count):
        base = (number + 30) * MINUTE
        size = 0 if number in idle else rows
        now = edge_case_rows(rng, size, base - 2 * MINUTE, 3 * MINUTE)
        old = edge_case_rows(rng, size // 20, base - 12 * MINUTE, 10 * MINUTE)
        after = before if number in idle else base - MINUTE
        epochs.append(EpochInput(number, before, after, (pa.concat_tables([now, old]),)))
        before = after
    return epochs


def run(chain: Any, epochs: Sequence[EpochInput], sizes: Sequence[int]) -> tuple[list[str], State]:
    """Process in calls of `sizes` epochs, repeated; digests of outputs, and the last state."""
    state, digests, at, step = State(), list[str](), 0, 0
    while at < len(epochs):
        size = sizes[step % len(sizes)]
        result: ChainResult = chain.process(state, epochs[at : at + size])
        state = result.state
        digests += [digest_table(o.rows) for o in result.outputs]
        at, step = at + size, step + 1
    return digests, state


def state_digests(chain: Any, state: State) -> dict[str, str]:
    """Of the folded rows of each operator, and its own."""
    return {
        operator: f"{digest_table(rows)} {state.operators[operator].digest}"
        for operator, rows in chain.folded(state).items()
    }


def key_of(value: Any) -> Any:
    """NaN equal to itself, −0.0 equal to 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def windows_of(time: int, size: int, slide: int) -> list[int]:
    """When the windows begin that a time is in."""
    last = time - time % slide
    starts = [last - i * slide for i in range(-(-size // slide))]
    return [s for s in starts if s + size > time]


def oracle(
    epochs: Sequence[EpochInput], size: int, slide: int, keys: Sequence[str]
) -> dict[int, dict[Any, list[dict[str, Any]]]]:
    """epoch -> (window start, *keys) -> the rows of the window that closes in that epoch."""
    open_rows: dict[Any, list[dict[str, Any]]] = {}
    closed: dict[int, dict[Any, list[dict[str, Any]]]] = {}
    for epoch in epochs:
        micros = epoch.inputs[0].column("t").cast(pa.int64()).to_pylist()
        for row, time in zip(epoch.inputs[0].to_pylist(), micros, strict=True):
            for start in windows_of(time, size, slide) if time is not None else ():
                if start + size > epoch.watermark_before:
                    group = (start, *(key_of(row[k]) for k in keys))
                    open_rows.setdefault(group, []).append(row)
        done = [g for g in open_rows if g[0] + size <= epoch.watermark]
        closed[epoch.epoch] = {g: open_rows.pop(g) for g in done}
    return closed
