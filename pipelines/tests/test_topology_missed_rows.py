"""Which rows operators have missed that began later than their topology."""

from __future__ import annotations

from topology_specs import query, source, spec_of, sql, window

from rekindle.topology.compile import compile_topology
from rekindle.topology.missed_rows import MissedRows, missed_rows

HOUR = 3_600_000_000

TOPOLOGY = compile_topology(
    spec_of(
        [source("a"), source("b")],
        [
            sql("both", "a", "b"),
            window("hourly", "both"),
            sql("busy", "hourly", sql="SELECT * FROM hourly"),
            window("daily", "busy", window={"size": "24h", "aggregate": "count(*) AS n"}),
        ],
        [query("q", "daily")],
    ),
    "t",
)


def missed(**begun: int) -> dict[str, set[MissedRows]]:
    ids = {TOPOLOGY.nodes[name].id: epoch for name, epoch in begun.items()}
    return {name: set(found) for name, found in missed_rows(TOPOLOGY, ids).items() if found}


def test_what_began_with_the_topology_has_missed_nothing() -> None:
    assert missed() == {}


def test_a_window_misses_all_sources_through_its_beginning() -> None:
    assert missed(hourly=7, busy=7, daily=7)["hourly"] == {MissedRows("a", 7), MissedRows("b", 7)}


def test_a_window_over_windows_lacks_those_that_lack_rows() -> None:
    found = missed(hourly=7, busy=7, daily=9)
    assert found["daily"] == {
        MissedRows("a", 9, HOUR - 1),  # what is asked of epoch 7 may be deleted
        MissedRows("b", 9, HOUR - 1),
    }
    assert missed(daily=9) == {"daily": {MissedRows("a", 9), MissedRows("b", 9)}}


def test_a_source_that_is_added_lacks_its_own_rows_alone() -> None:
    assert missed(b=4)["hourly"] == {MissedRows("b", 4)}


def test_an_edit_of_an_edit_contains_the_first() -> None:
    assert missed(both=4, hourly=9)["hourly"] == {MissedRows("a", 9), MissedRows("b", 9)}
