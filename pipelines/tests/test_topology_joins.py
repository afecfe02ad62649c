"""Joins in a topology: keys of each input, columns, event time, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from joined_rows import topology

from rekindle.arrow_types import arrow_schema
from rekindle.engine.operators.join import open_join
from rekindle.errors import InvalidTopology
from rekindle.protocol import TaskRef
from rekindle.task.config import consistency_settings
from rekindle.topology.drawing.text import describe_node
from rekindle.topology.missed_rows import MissedRows, missed_rows
from rekindle.topology.model import Exchange, Topology
from rekindle.topology.operators.join import Bounds, JoinOperatorKind
from rekindle.topology.operators.registry import kind_of
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.joins import JoinCondition, analyze_join, parse_condition

ON = "orders.k = payments.ok"
WINDOW = '- {name: w, inputs: [both], window: {size: 1h, aggregate: "count(*) AS n"}}'


def join(**fields: Any) -> str:
    """The fields of a join as YAML."""
    text: str = yaml.safe_dump({"on": ON, "within": "1h", **fields}, default_flow_style=True)
    return text.strip()


def event_time(compiled: Topology) -> str | None:
    return compiled.nodes["both"].event_time


def test_each_input_is_distributed_by_its_own_key() -> None:
    text = f"{join()}, partitions: 3"
    segment = topology(text).segments[-1]
    assert segment.partitions == 3
    found = [(i.name, i.exchange, i.key_by) for i in segment.inputs]
    assert found == [
        ("orders", Exchange.HASH, ("k",)),
        ("payments", Exchange.HASH, ("ok",)),
    ]


def test_all_columns_of_both_are_selected() -> None:
    schema = topology(join()).nodes["both"].schema
    assert schema.names == ["k", "n", "t", "tags", "ok", "m", "u"]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("payments.u, orders.t AS ordered", "ordered"),
        ("payments.*", "u"),
        ("orders.* EXCEPT (t), payments.U AS late", "late"),
        ("orders.k, orders.t + INTERVAL 1 HOUR AS t", None),
    ],
)
def test_event_time_is_a_copy_of_one_input(select: str, expected: str | None) -> None:
    assert event_time(topology(join(select=select))) == expected


def test_a_window_needs_one_of_the_event_times() -> None:
    wrong = join(select="orders.k")
    with pytest.raises(InvalidTopology, match=r"both does not select orders\.t or payments\.u"):
        topology(wrong, WINDOW, "w")
    assert event_time(topology(join(), WINDOW, "w")) == "t"


def test_a_column_that_equals_two_others_is_one_column_of_the_pair() -> None:
    on = "orders.k = payments.ok AND orders.n = payments.m AND orders.n = payments.m2"
    compiled = topology(join(on=on), payments="ok STRING, m BIGINT, m2 BIGINT, u TIMESTAMP")
    assert [i.key_by for i in compiled.segments[-1].inputs] == [("k", "n", "n"), ("ok", "m", "m2")]
    node = compiled.nodes["both"]
    schemas = [arrow_schema(compiled.nodes[name].schema) for name in node.inputs]
    opened = open_join(node, compiled, schemas, lambda text, views: views["none"])
    assert opened.select([]).count("'n', ") == 1


def test_a_stream_is_joined_with_itself_under_another_name() -> None:
    schema = ddl_to_schema("k STRING, t TIMESTAMP")
    found = analyze_join("a.k = b.k", "a.k, b.t", {"a": schema, "b": schema}, ["a", "b"])
    assert found.copies == ((0, "k"), (1, "t"))


def test_joins_of_windows_need_no_bounds() -> None:
    windows = """
- {name: a, inputs: [orders], window: {size: 1h, groupBy: [k], aggregate: "count(*) AS n"}}
- {name: b, inputs: [payments], window: {size: 1h, groupBy: [ok], aggregate: "count(*) AS m"}}
- name: rates
  inputs: [a, b]
  join: {"on": "a.k = b.ok AND a.window_end = b.window_end",
         select: "a.k, a.window_end, a.n / b.m AS rate"}
- {name: days, inputs: [rates], window: {size: 1d, aggregate: "max(rate) AS rate"}}
"""
    compiled = topology(join(), windows, "days")
    node = compiled.nodes["rates"]
    assert (node.event_time, node.at_window_end) == ("window_end", True)
    kind = kind_of(node.spec)
    assert isinstance(kind, JoinOperatorKind)
    assert kind.bounds(["window_end", "window_end"]) == Bounds(0, 0)


def test_a_semi_join_has_the_columns_of_the_first_input() -> None:
    node = topology(join(type="Semi")).nodes["both"]
    assert node.schema.names == ["k", "n", "t", "tags"]
    assert node.event_time == "t"


@pytest.mark.parametrize(
    ("type", "select", "expected"),
    [
        ("Left", "orders.t, payments.u", "t"),
        ("Left", "payments.u", None),
        ("Anti", "orders.t", "t"),
        ("Right", "orders.t, payments.u", "u"),
        ("Full", "orders.t, payments.u", None),
    ],
)
def test_the_event_time_of_an_outer_join_is_never_null(
    type: str, select: str, expected: str | None
) -> None:
    assert event_time(topology(join(type=type, select=select))) == expected


def test_a_window_cannot_read_what_has_no_event_time() -> None:
    with pytest.raises(InvalidTopology, match="both, a Full join, may lack either event time"):
        topology(join(type="Full"), WINDOW, "w")
    with pytest.raises(InvalidTopology, match=r"both does not select payments\.u, an event time"):
        topology(join(type="Right", select="orders.t"), WINDOW, "w")


@pytest.mark.parametrize(
    ("type", "expected"),
    [("Left", (6, 20)), ("Anti", (6, 20)), ("Right", (21, 5)), ("Full", (21, 20))],
)
def test_what_matches_nothing_is_known_later(type: str, expected: tuple[int, int]) -> None:
    kind = kind_of(
        topology(f'{{"on": "{ON}", type: {type}, before: 5us, after: 20us}}').nodes["both"].spec
    )
    assert kind is not None
    assert kind.needs_all_rows
    results = kind.results()
    assert results is not None
    assert (results.first_complete(0), -results.first_open(0)) == expected


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        (ON, JoinCondition((("k", "ok"),), has_more=False)),
        ("payments.ok = orders.k", JoinCondition((("k", "ok"),), has_more=False)),
        (f"({ON}) AND (orders.n = payments.m)", JoinCondition((("k", "ok"), ("n", "m")), False)),
        (f"{ON} AND orders.n > payments.m", JoinCondition((("k", "ok"),), has_more=True)),
        (f"{ON} OR orders.n = payments.m", JoinCondition((), has_more=True)),
        ("orders.k = upper(payments.ok)", JoinCondition((), has_more=True)),
        ("orders.k = orders.k", JoinCondition((), has_more=True)),
        (f"NOT ({ON})", JoinCondition((), has_more=True)),
    ],
)
def test_equalities_between_inputs_are_keys(on: str, expected: JoinCondition) -> None:
    assert parse_condition(on, ["orders", "payments"]) == expected


def test_what_lacks_rows_lacks_pairs_for_as_long_as_rows_match() -> None:
    compiled = topology(join())
    begun = {compiled.nodes["both"].id: 4}
    assert missed_rows(compiled, begun)["both"] == {
        MissedRows("orders", 4),
        MissedRows("payments", 4),
    }
    kind = kind_of(compiled.nodes["both"].spec)
    assert kind is not None
    assert kind.reach_us() == 3_600_000_000
    assert not kind.needs_all_rows


def test_a_join_that_blocks_is_no_other_join() -> None:
    """What it computes is the same, so an edit of it keeps the state."""
    one, other = topology(join()), topology(join(whenMissing="Block"))
    assert [segment.blocks for segment in one.segments] == [False] * 3
    assert [segment.blocks for segment in other.segments] == [False, False, True]
    assert one.segments[-1].id == other.segments[-1].id
    task = TaskRef(segment=other.segments[-1].id, partition=0, replica=0, incarnation=1)
    blocking = [
        consistency_settings(compiled, compiled.segments[-1], task).blocking_inputs
        for compiled in (one, other)
    ]
    assert blocking == [frozenset(), frozenset({0, 1})]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("EmitMatches", [{"orders", "both", "w"}, {"payments", "both", "w"}]),
        ("Block", [{"orders", "payments", "both", "w"}] * 2),
    ],
)
def test_a_path_through_a_join_that_blocks_needs_both_inputs(
    missing: str, expected: list[set[str]]
) -> None:
    compiled = topology(join(whenMissing=missing), WINDOW, "w")
    names = {segment.id: segment.name for segment in compiled.segments}
    query = next(q for q in compiled.spec.queries if q.from_ == "w")
    assert [{names[id] for id in path} for path in compiled.paths(query)] == expected


def test_a_drawing_says_what_is_joined() -> None:
    found = describe_node(topology(join()).nodes["both"])
    assert found == "inner join on orders.k = payments.ok within 1h"
