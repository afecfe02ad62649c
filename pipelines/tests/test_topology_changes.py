"""What an edit does to operators and queries, before it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from topology_specs import query, random_specs, source, sql, topology_spec, window

from rekindle.cli import main
from rekindle.topology.changes import Changes, compare
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle_testing.fixtures.bad_manifests import good_manifest


def spec() -> dict[str, Any]:
    return copy.deepcopy(
        topology_spec(
            [source()],
            [sql("clean", "s"), sql("hot", "clean"), window("daily", "clean", keyBy=["origin"])],
            [query("alerts", "hot"), query("dashboard", "daily")],
        )
    )


def changes(edit: Callable[[dict[str, Any]], object]) -> Changes:
    edited = spec()
    edit(edited)
    return compare(*(compile_topology(load_spec(data), "t") for data in (spec(), edited)))


def causes(found: Changes) -> dict[str, str]:
    return {change.name: change.cause for change in found.begun}


def test_other_partitions_begin_anew() -> None:
    found = changes(lambda s: s["operators"][2].update(partitions=4))
    assert found.kept == ("s", "clean", "hot")
    assert causes(found) == {"daily": "partitions 1 -> 4"}
    assert [str(q) for q in found.incomplete] == [
        "dashboard (reads daily, which begins anew)",
    ]


def test_what_reads_an_edited_operator_begins_anew() -> None:
    found = changes(lambda s: s["operators"][0].update(sql="SELECT * FROM s WHERE n > 7"))
    assert found.kept == ("s",)
    assert causes(found) == {
        "clean": "its sql changed",
        "hot": "reads clean, which begins anew",
        "daily": "reads clean, which begins anew",
    }
    assert {q.name for q in found.incomplete} == {"alerts", "dashboard"}


def test_settings_keep_all_state() -> None:
    def edit(data: dict[str, Any]) -> None:
        data["replicas"] = 2
        data["operators"][2]["resources"] = {"requests": {"cpu": "100m"}}
        data["queries"][0]["priority"] = 7

    found = changes(edit)
    assert found.kept == ("s", "clean", "hot", "daily")
    assert not found.loses_results
    assert found.summary() == "all operators keep their state"


def test_a_moved_sink_leaves_a_gap() -> None:
    found = changes(lambda s: s["queries"].__setitem__(0, query("alerts", "hot", sink=OTHER_SINK)))
    assert not found.begun
    assert [str(q) for q in found.incomplete] == ["alerts (its sink changed)"]


OTHER_SINK = {"files": {"url": "file:///var/lib/rekindle/other"}}


def test_queries_that_are_added_and_removed_lose_nothing() -> None:
    found = changes(lambda s: s["queries"].__setitem__(0, query("second", "hot")))
    assert (found.added_queries, found.removed_queries) == (("second",), ("alerts",))
    assert not found.loses_results


def test_operators_that_are_added_lose_nothing() -> None:
    def edit(data: dict[str, Any]) -> None:
        data["operators"].append(sql("cold", "hot", sql="SELECT * FROM hot"))
        data["queries"].append(query("third", "cold"))

    found = changes(edit)
    assert (found.added, found.added_queries) == (("cold",), ("third",))
    assert not found.loses_results


@given(random_specs(), st.data())
def test_exactly_what_keeps_its_id_is_kept(data: dict[str, Any], drawn: st.DataObject) -> None:
    edited = copy.deepcopy(data)
    nodes = [*edited["sources"], *edited["operators"]]
    node = drawn.draw(st.sampled_from(nodes))
    if "sql" in node:
        node["sql"] = node["sql"].replace("n > 0", "n > 1")
    else:
        node["files"]["speedup"] = 61
    old, new = (compile_topology(load_spec(d), "t") for d in (data, edited))
    found = compare(old, new)
    assert set(found.kept) == {n for n in new.nodes if old.nodes[n].id == new.nodes[n].id}
    assert {c.name for c in found.begun} == set(new.nodes) - set(found.kept)
    assert all(c.cause != "its definition changed" for c in found.begun)


OUTPUT = """\
good: valid
  trips keeps its state
  paid keeps its state
  hourly begins anew: partitions 2 -> 3
  busy begins anew: reads hourly, which begins anew
  query alarms will lack results: reads busy, which begins anew
"""


def written(file: Path, partitions: int) -> str:
    manifest = good_manifest()
    manifest["spec"]["operators"][1]["partitions"] = partitions
    file.write_text(yaml.safe_dump(manifest))
    return str(file)


def test_validate_compares_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited, before = written(tmp_path / "new.yaml", 3), written(tmp_path / "old.yaml", 2)
    assert main(["validate", edited, "--against", before]) == 0
    assert capsys.readouterr().out == OUTPUT


def test_validate_compares_with_the_topology_of_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cluster:
        def topology(self, name: str) -> dict[str, Any]:
            assert name == "good"
            return good_manifest()

    monkeypatch.setattr("rekindle.cli.validate.open_cluster", lambda args: Cluster())
    assert main(["validate", written(tmp_path / "new.yaml", 3), "--against", "good"]) == 0
    assert capsys.readouterr().out == OUTPUT


def test_a_name_that_is_none_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = written(tmp_path / "new.yaml", 3)
    assert main(["validate", edited, "--against", "missing.yaml/"]) == 1
    assert "--against: no such file" in capsys.readouterr().err
