"""Validation finds all problems, with field paths and hints."""

from __future__ import annotations

from typing import Any

import pytest
from topology_specs import query, source, spec_of, sql, window

from rekindle.errors import InvalidTopology, Problem
from rekindle.topology.load import load_topology
from rekindle.topology.spec import TopologySpec
from rekindle.topology.validate import validate
from rekindle_testing.fixtures.bad_manifests import BadManifest, bad_manifests, good_manifest

BAD = bad_manifests()


def problems_of(manifest: dict[str, Any], *, skip_cluster_checks: bool = False) -> list[Problem]:
    try:
        name, spec = load_topology(manifest)
    except InvalidTopology as error:
        return error.problems
    return validate(spec, name, skip_cluster_checks=skip_cluster_checks)


def reasons(spec: TopologySpec) -> dict[str, str]:
    return {p.path: p.reason for p in validate(spec, "t")}


def test_a_valid_resource_has_no_problem() -> None:
    assert problems_of(good_manifest()) == []


@pytest.mark.parametrize("stream", [{}, {"tentative": True}, {"retain": "8Mi"}])
def test_a_stream_sink_is_valid_with_a_small_log(stream: dict[str, Any]) -> None:
    manifest = good_manifest()
    manifest["spec"]["logBudget"] = "16Mi"
    manifest["spec"]["queries"][0]["sink"] = {"stream": stream}
    assert problems_of(manifest) == []


def test_bad_manifests_are_many_and_have_different_names() -> None:
    assert len(BAD) >= 40
    assert len({b.name for b in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_a_bad_manifest_is_refused_at_the_field_that_is_wrong(bad: BadManifest) -> None:
    found = problems_of(bad.manifest)
    hits = [p for p in found if (p.path, p.reason) == (bad.path, bad.reason)]
    assert hits, "\n".join(f"{p.reason} {p}" for p in found)
    assert any(bad.message in str(p) for p in hits), "\n".join(str(p) for p in hits)


def test_problems_are_in_the_order_of_the_resource() -> None:
    spec = spec_of(
        [source("s", eventTime={"column": "n"})],
        [sql("a", "s", sql="SELECT x FROM s"), sql("b", "a", sql="SELECT 1 FROM a")],
        [query("q", "b"), query("r", "c")],
        executors=2,
    )
    assert [(p.path, p.reason) for p in validate(spec, "t")] == [
        ("spec.executors", "NotSupportedYet"),
        ("spec.sources[0].eventTime.column", "NotATimestamp"),
        ("spec.operators[0].sql", "UnknownColumn"),
        ("spec.queries[1].from", "UnknownInput"),
    ]


def test_consequences_downstream_are_not_reported() -> None:
    broken = source("s", schema="origin STRNG")
    spec = spec_of(
        [broken], [window("w", "s"), sql("a", "w", sql="SELECT rows FROM w")], [query("q", "a")]
    )
    assert set(reasons(spec)) == {"spec.sources[0].schema"}


def test_file_urls_need_a_volume_except_in_local_runs() -> None:
    manifest = good_manifest()
    del manifest["spec"]["checkpoint"]["volume"]
    assert {p.reason for p in problems_of(manifest)} == {"NoVolume"}
    assert len(problems_of(manifest)) == 3
    assert problems_of(manifest, skip_cluster_checks=True) == []


def test_the_hint_has_volume_and_url() -> None:
    manifest = good_manifest()
    del manifest["spec"]["checkpoint"]["volume"]
    manifest["spec"]["checkpoint"]["store"] = "file:///data//ckpt/"
    found = {p.path: p.hint for p in problems_of(manifest)}
    assert found["spec.checkpoint.store"] == (
        "name a shared volume (an RWX claim) in spec.checkpoint.volume and write "
        "file:///var/lib/rekindle/data/ckpt, or use s3://..."
    )
    assert found["spec.queries[0].sink.files.url"] == (
        "name a shared volume (an RWX claim) in spec.checkpoint.volume, or use s3://..."
    )


@pytest.mark.parametrize(
    "url",
    [
        "file:///var/lib/rekindle",
        "file:///var/lib/rekindle/",
        "file:///var/lib/rekindle/../rekindle/a",
        "file:////var//lib/rekindle/a b?c#d",
        "local:///var/lib/rekindle/a",
    ],
)
def test_a_place_on_the_claim_is_valid(url: str) -> None:
    manifest = good_manifest()
    manifest["spec"]["checkpoint"]["store"] = url
    assert problems_of(manifest) == []


def test_places_beside_the_claim_are_valid_in_local_runs() -> None:
    manifest = good_manifest()
    manifest["spec"]["checkpoint"]["store"] = "file:///data/ckpt"
    manifest["spec"]["queries"][0]["sink"]["files"]["url"] = "file:///tmp/out"
    assert len(problems_of(manifest)) == 2
    assert problems_of(manifest, skip_cluster_checks=True) == []


def _mounting(volume: dict[str, Any], at: str) -> dict[str, Any]:
    """The good manifest, whose tasks mount another volume."""
    manifest = good_manifest()
    task = {"name": "task", "volumeMounts": [{"name": "other", "mountPath": at}]}
    pod = {"volumes": [{"name": "other", **volume}], "containers": [task]}
    manifest["spec"]["podTemplate"] = {"spec": pod}
    return manifest


_NFS = {"nfs": {"server": "nfs", "path": "/"}}


def test_a_sink_may_be_on_another_volume_of_the_tasks() -> None:
    manifest = _mounting(_NFS, "/data/")
    manifest["spec"]["queries"][0]["sink"]["files"]["url"] = "file:///data/out"
    assert problems_of(manifest) == []
    manifest["spec"]["podTemplate"]["spec"]["containers"][0]["name"] = "sidecar"
    assert "NoVolume" in {p.reason for p in problems_of(manifest)}


def test_a_checkpoint_store_is_on_no_volume_of_the_tasks_alone() -> None:
    manifest = _mounting(_NFS, "/data")
    manifest["spec"]["checkpoint"]["store"] = "file:///data/checkpoints"
    assert [(p.path, p.reason) for p in problems_of(manifest)] == [
        ("spec.checkpoint.store", "NoVolume")
    ]


def test_a_disk_of_the_pod_hides_the_claim() -> None:
    manifest = _mounting({"emptyDir": {}}, "/var/lib/rekindle/output")
    assert [(p.path, p.reason) for p in problems_of(manifest)] == [
        (f"spec.queries[{at}].sink.files.url", "NoVolume") for at in (0, 1)
    ]


@pytest.mark.parametrize(
    "pod",
    [
        {"volumes": "x", "containers": [None, "x", {"name": "task", "volumeMounts": [5]}]},
        {"volumes": [5, {}], "containers": [{"name": "task", "volumeMounts": [{"name": []}]}]},
        {"containers": [{"name": "task", "volumeMounts": [{"mountPath": at} for at in ("", 5)]}]},
        {"containers": {"name": "task"}},
    ],
)
def test_a_pod_template_of_any_shape_mounts_nothing(pod: dict[str, Any]) -> None:
    manifest = good_manifest()
    manifest["spec"]["podTemplate"] = {"spec": pod}
    assert "NoVolume" not in {p.reason for p in problems_of(manifest)}
    manifest["spec"]["checkpoint"]["store"] = "file:///data"
    assert "NoVolume" in {p.reason for p in problems_of(manifest)}


def test_what_the_operator_replaces_in_a_pod_template_is_refused() -> None:
    manifest = good_manifest()
    env = [{"name": "REKINDLE_MEMORY", "value": "1"}, {"name": "MINE", "value": "1"}]
    manifest["spec"]["podTemplate"] = {
        "metadata": {"labels": {"app.kubernetes.io/part-of": "shop", "app": "shop"}},
        "spec": {"containers": [{"name": "task", "env": env}]},
    }
    assert {p.path for p in problems_of(manifest) if p.reason == "Replaced"} == {
        "spec.podTemplate.metadata.labels[app.kubernetes.io/part-of]",
        "spec.podTemplate.spec.containers[0].env[0]",
    }


def test_files_of_a_source_may_be_in_the_image() -> None:
    manifest = good_manifest()
    manifest["spec"]["sources"][0]["files"]["url"] = "file:///opt/input/trips.csv"
    assert problems_of(manifest) == []


def _placed(store: str, files: str, sink: str) -> TopologySpec:
    source_spec = source()
    source_spec["files"]["url"] = files
    reader = query("q", "s", sink={"files": {"url": sink}})
    return spec_of([source_spec], [], [reader], checkpoint={"store": store})


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"])
def test_every_store_that_creates_conditionally_can_be_named(scheme: str) -> None:
    places = [f"{scheme}://bucket/{name}" for name in ("store", "input", "output")]
    assert validate(_placed(*places), "t") == []


def test_sources_accept_urls_without_conditional_create() -> None:
    for url in ("https://host/in.csv", "hdfs://namenode/in", "ftp://[::1]/in.csv"):
        assert validate(_placed("s3://bucket/store", url, "s3://bucket/output"), "t") == []


def test_memory_urls_are_for_local_runs() -> None:
    spec = _placed("memory://store", "memory://input", "memory://output")
    assert set(reasons(spec).values()) == {"InvalidUrl"}
    assert len(reasons(spec)) == 3
    assert validate(spec, "t", skip_cluster_checks=True) == []


def test_a_remote_store_needs_no_volume() -> None:
    spec = spec_of(
        [source()],
        [],
        [query("q", "s", sink={"files": {"url": "s3://bucket/out"}})],
        checkpoint={"store": "s3://bucket/checkpoints"},
    )
    assert validate(spec, "t") == []


def test_a_window_unions_inputs_of_one_schema() -> None:
    sources = [source("s"), source("u"), source("v", schema="ts TIMESTAMP, origin STRING")]
    for source_spec in sources:
        source_spec["files"]["url"] += source_spec["name"]
    good = spec_of(sources[:2], [window("w", "s", "u")], [query("q", "w")])
    assert validate(good, "t") == []
    bad = spec_of(
        sources, [window("w", "s", "v"), sql("x", "u")], [query("q", "w"), query("r", "x")]
    )
    assert reasons(bad) == {"spec.operators[0].inputs": "InputsDiffer"}


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ("max(trip.Fare) AS x", None),
        ("sum(trip.to.km + delay) / count(trip.to) AS x", None),
        ("avg(DELAY) FILTER (WHERE trip.to.km > 1) AS x", None),
        ("sum(size(filter(stops, s -> s.km > 1))) AS x", None),
        ("max(trip.fair) AS x", "column trip has no field fair (did you mean fare?)"),
        ("max(trip.to.k) AS x", "column trip has no field k (did you mean km?)"),
        ("max(tripp.fare) + min(tripp.fare) AS x", "unknown column tripp.fare"),
    ],
)
def test_an_aggregate_reads_fields_of_structs(aggregate: str, message: str | None) -> None:
    schema = (
        "trip STRUCT<fare: DOUBLE, to: STRUCT<km: INT>>, stops ARRAY<STRUCT<km: INT>>, "
        "delay DOUBLE, ts TIMESTAMP"
    )
    how = {"size": "1h", "aggregate": aggregate}
    spec = spec_of([source(schema=schema)], [window("w", "s", window=how)], [query("q", "w")])
    problems = [str(p) for p in validate(spec, "t")]
    assert len(problems) == (message is not None)
    assert all(p.startswith(f"spec.operators[0].window.aggregate: {message}") for p in problems)


def test_a_window_over_a_window_has_window_ends_as_event_time() -> None:
    day = {"size": "1d", "groupBy": ["origin"], "aggregate": "sum(rows) AS rows"}
    spec = spec_of([source()], [window("w", "s"), window("d", "w", window=day)], [query("q", "d")])
    assert validate(spec, "t") == []


def test_a_generator_has_an_expression_for_each_column() -> None:
    columns = {"origin": "choice(a, b)", "when": "timestamp"}
    generated = source("g", files=None, generator={"rowsPerSecond": 5, "columns": columns})
    assert reasons(spec_of([generated], [], [query("q", "g")])) == {
        "spec.sources[0].generator.columns[when]": "UnknownColumn",
        "spec.sources[0].generator.columns": "Missing",
    }


def test_limits_hold_for_sources_operators_and_queries() -> None:
    names = [f"n{i}" for i in range(65)]
    spec = spec_of([source()], [sql(n, "s") for n in names], [query(n, n) for n in names])
    assert reasons(spec) == {"spec.operators": "TooMany", "spec.queries": "TooMany"}


def test_a_problem_prints_its_path_message_and_hint() -> None:
    sources = [source("weather"), source("birds")]
    spec = spec_of(sources, [], [query("q", "weather")])
    assert [str(p) for p in validate(spec, "t")] == [
        "spec.sources[1]: no query needs birds (add a query that reads it, or remove it)",
    ]
