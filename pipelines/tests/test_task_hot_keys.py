"""What a task says of a key that most of its rows have: where, which, and what to do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from topology_specs import query, source, spec_of, sql, window

from rekindle.exchange.hot_keys import BLOCK_EPOCHS
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.task.core.hot_keys import HotKeys
from rekindle.topology.compile import compile_topology

ROWS = 10_000
"""Of a window; a join needs 1,000."""


def hot_keys(operator: dict[str, Any], *sources: str) -> HotKeys:
    """Of partition 1 of an operator that reads these."""
    nodes = [source(name, partitions=2) for name in sources]
    spec = spec_of(nodes, [operator], [query("q", operator["name"])])
    topology = compile_topology(spec, "t", skip_cluster_checks=True)
    segment = next(s for s in topology.segments if operator["name"] in s.nodes)
    return HotKeys(topology, segment, 1)


def rows_of(origin: str | None, count: int, hot: int) -> pa.Table:
    """The first `hot` rows have this origin."""
    origins = [origin] * hot + [f"o{n}" for n in range(count - hot)]
    return pa.table({"origin": pa.array(origins, pa.string()), "carrier": ["AA"] * count})


def process(hot_keys: HotKeys, first_block: int, *inputs: pa.Table) -> int:
    """A block of epochs, in calls of several, and the first epoch after it. Gives that epoch."""
    first = first_block * BLOCK_EPOCHS
    epochs = [
        EpochInput(epoch, NO_WATERMARK, NO_WATERMARK, inputs)
        for epoch in range(first, first + BLOCK_EPOCHS + 1)
    ]
    for begin in range(0, len(epochs), 5):
        hot_keys.add(epochs[begin : begin + 5])
    return epochs[-1].epoch


def keyed(**more: Any) -> dict[str, Any]:
    return window("w", "s", keyBy=["origin"], partitions=2, **more)


def join(of_type: str) -> dict[str, Any]:
    spec = {"on": "a.origin = b.origin", "within": "1h", "type": of_type, "select": "a.n, a.ts"}
    return {"name": "j", "inputs": ["a", "b"], "partitions": 2, "join": spec}


def hopping(*group_by: str) -> dict[str, Any]:
    return {"size": "1h", "groupBy": list(group_by), "aggregate": "count(*) AS rows"}


SESSION = {"session": "30m", "groupBy": ["origin"], "aggregate": "count(*) AS rows"}
AGAIN = "write one more column into groupBy and keyBy"
KEYED = {
    "part of the group": (keyed(window=hopping("origin", "carrier")), "add carrier to keyBy"),
    "whole group": (keyed(), f"{AGAIN}, and combine its groups in a second window"),
    "session": (keyed(window=SESSION), AGAIN),
    "sql": (sql("x", "s", keyBy=["origin"], partitions=2), "write more columns into keyBy"),
    "distinct": (
        {
            "name": "d",
            "inputs": ["s"],
            "partitions": 2,
            "distinct": {"keys": ["origin"], "within": "1h"},
        },
        "write more columns into keys",
    ),
}


@pytest.mark.parametrize("case", KEYED)
def test_operator_partition_key_share_and_remedy_are_named(case: str) -> None:
    operator, remedy = KEYED[case]
    found = hot_keys(operator, "s")
    epoch = process(found, 0, rows_of("JFK", ROWS, 7000))
    assert found.text(epoch) == (
        f"operator {operator['name']}, partition 1: about 70 % of its rows of s in 32 epochs have "
        f"one key, origin = 'JFK'; more partitions do not divide them: {remedy}"
    )
    assert round(found.shares(epoch)["s"], 1) == 0.7
    epoch = process(found, 1, rows_of("JFK", ROWS, 1000))
    assert (found.text(epoch), found.shares(epoch)) == ("", {"s": 0.0})


def test_each_input_of_a_join_is_looked_at() -> None:
    found = hot_keys(join("Inner"), "a", "b")
    epoch = process(found, 0, rows_of("JFK", 1000, 100), rows_of(None, 1000, 900))
    assert found.text(epoch) == (
        "operator j, partition 1: about 90 % of its rows of b in 32 epochs have one key, origin = "
        "NULL; more partitions do not divide them: write more equalities into on, or a "
        "shorter within"
    )
    assert (found.shares(epoch)["a"], found.shares(epoch)["b"] > 0.8) == (0.0, True)
    found = hot_keys(join("Semi"), "a", "b")
    epoch = process(found, 0, *[rows_of("JFK", 1000, 900)] * 2)
    assert found.text(epoch).count("one key, origin = 'JFK'") == 2


@pytest.mark.parametrize("kind", ["join", "distinct"])
def test_a_column_that_is_a_key_twice_is_named_once(kind: str) -> None:
    repeated = join("Inner")
    repeated["join"]["on"] = "a.origin = b.origin AND a.origin = b.carrier"
    if kind == "distinct":
        twice = {"keys": ["origin", "origin"], "within": "1h"}
        repeated = {"name": "j", "inputs": ["a"], "partitions": 2, "distinct": twice}
    found = hot_keys(repeated, *repeated["inputs"])
    rows = [rows_of("AA", ROWS, 7000) for _ in repeated["inputs"]]
    text = found.text(process(found, 0, *rows))
    assert "rows of a in 32 epochs have one key, origin = 'AA';" in text
    if kind == "join":
        assert "rows of b in 32 epochs have one key, origin = 'AA', carrier = 'AA';" in text


def test_replicas_that_start_at_different_times_say_the_same() -> None:
    rows = rows_of("JFK", ROWS, 7000)
    found = [hot_keys(keyed(), "s") for _ in range(2)]
    for block in range(3):
        process(found[0], block, rows)
    found[1].add([EpochInput(40, NO_WATERMARK, NO_WATERMARK, (rows,))])
    epoch = process(found[1], 2, rows)
    assert found[0].text(epoch) == found[1].text(epoch) != ""


def test_rows_that_are_not_distributed_have_no_key() -> None:
    found = hot_keys(sql("x", "s"), "s")
    assert found.text(process(found, 0, rows_of("JFK", ROWS, ROWS))) == ""
    assert found.shares(0) == {}
