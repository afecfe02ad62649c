"""The SQL of an operator's steps. What Spark makes of it: test_engine_chain.py."""

from __future__ import annotations

import pytest
from engine_fixtures import operator_without_spark, topology

from rekindle.engine.operators.base import Aggregation
from rekindle.engine.spark.steps import plan_steps, step_sql
from rekindle.engine.window_state import ROW_ORDER

OPERATORS = """
- name: w
  inputs: [rows]
  window: {size: 1m, groupBy: [k, g], aggregate: "sum(v) AS total"}
"""


@pytest.mark.parametrize("method", [m for m in Aggregation if m is not Aggregation.HASHED])
def test_rows_of_a_group_are_sorted_by_their_position(method: Aggregation) -> None:
    """Spark's sort keeps the order of equal rows by chance, until it spills."""
    compiled = topology(OPERATORS, "w")
    operator_of = operator_without_spark(compiled, frozenset({"g"}))
    step = plan_steps(compiled.segments[-1], compiled, operator_of)[0]
    sql = step_sql(step, ["rows"], method) or ""
    _, _, sort = sql.partition(" SORT BY ")
    keys = sort.partition(")")[0].split(", ")
    assert keys[-1] == ROW_ORDER
    assert set(keys) > {"__k0", "__k1"}
    assert f"monotonically_increasing_id() AS {ROW_ORDER}" in sql
