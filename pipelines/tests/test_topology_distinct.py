"""`distinct` in a topology: partitions, segments, columns, event time."""

from __future__ import annotations

import pytest
from distinct_rows import SCHEMA, distinct
from engine_fixtures import topology

from rekindle.topology.drawing.text import describe_node
from rekindle.topology.model import Exchange
from rekindle.topology.operators.registry import kind_of

SQL = '- {name: some, inputs: [rows], sql: "SELECT * FROM rows WHERE n > 0"}\n'


def of_some(keep: str = "First", more: str = "") -> str:
    return f"{SQL}{distinct(keep, '[d, k]')}".replace("[rows], distinct", f"[some], {more}distinct")


def test_rows_are_distributed_by_the_keys() -> None:
    compiled = topology(of_some(more="partitions: 3, "), "once", schema=SCHEMA)
    assert [segment.nodes for segment in compiled.segments] == [("rows", "some"), ("once",)]
    (read,) = compiled.segments[-1].inputs
    assert (read.name, read.exchange, read.key_by) == ("some", Exchange.HASH, ("d", "k"))
    assert compiled.segments[-1].partitions == 3


def test_one_partition_is_in_the_segment_of_its_input() -> None:
    compiled = topology(of_some(), "once", schema=SCHEMA)
    assert [segment.nodes for segment in compiled.segments] == [("rows", "some", "once")]


@pytest.mark.parametrize("keep", ["First", "Last"])
def test_the_output_has_the_columns_and_the_event_time_of_the_input(keep: str) -> None:
    compiled = topology(of_some(keep), "once", schema=SCHEMA)
    node, of = compiled.nodes["once"], compiled.nodes["rows"]
    assert node.schema == of.schema
    assert node.event_time == "t"
    kind = kind_of(node.spec)
    assert kind is not None
    assert kind.needs_all_rows == (keep == "Last")
    results = kind.results()
    assert (results is None) == (keep == "First")
    if results is not None:  # of rows through 100 some are missing; 100 is the watermark
        assert (results.first_complete(100), results.first_open(100)) == (101, 91)


def test_a_drawing_says_which_row_is_kept() -> None:
    found = describe_node(topology(of_some("Last"), "once", schema=SCHEMA).nodes["once"])
    assert found == "last row by d, k within 10us"
