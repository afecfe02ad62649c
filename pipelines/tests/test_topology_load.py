"""A topology file becomes a spec, or problems with its field paths."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rekindle.errors import InvalidTopology
from rekindle.topology.documents import read_documents
from rekindle.topology.load import load_spec, load_topology
from rekindle.topology.units import SECOND, parse_cpu
from rekindle.topology.validate import validate
from rekindle_testing.fixtures.bad_manifests import good_manifest


def problems(source: Any) -> list[str]:
    with pytest.raises(InvalidTopology) as caught:
        load_topology(source)
    return [str(p) for p in caught.value.problems]


def test_text_and_object_give_the_same_spec() -> None:
    manifest = good_manifest()
    assert load_topology(json.dumps(manifest)) == load_topology(manifest)
    name, spec = load_topology(manifest)
    assert (name, spec.epoch_interval) == ("good", SECOND)
    assert load_spec(manifest["spec"]) == spec


def test_a_topology_is_found_among_other_documents() -> None:
    text = "kind: ConfigMap\n---\n" + json.dumps(good_manifest())
    assert load_topology(text)[0] == "good"


def _text(extra: str) -> str:
    return f"""\
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {{name: twice}}
spec:
  checkpoint:
    store: s3://bucket/a
{extra}"""


def test_a_key_that_is_written_twice_is_refused() -> None:
    assert problems(_text("    store: s3://bucket/b\n")) == [
        "spec.checkpoint.store: is in line 6 and again in line 7: only the last one would be read "
        "(leave one out)"
    ]


def test_all_repeated_keys_are_reported_by_line() -> None:
    text = """\
    "store": s3://bucket/b
  sources: [{name: a, name: b}]
  sparkConf:
    spark.a.b: x
    spark.a.b: y
    'spark.a.b': z
kind: StreamTopology
"""
    assert [p.partition(": only")[0] for p in problems(_text(text))] == [
        "spec.checkpoint.store: is in line 6 and again in line 7",
        "spec.sources[0].name: is in line 8 twice",
        "spec.sparkConf[spark.a.b]: is in line 10 and again in line 11",
        "spec.sparkConf[spark.a.b]: is in line 10 and again in line 12",
        "kind: is in line 2 and again in line 13",
    ]


def test_a_merged_key_may_be_written_again() -> None:
    manifest = good_manifest()
    text = json.dumps(manifest["spec"]["queries"][0])[1:]
    both = "x: &x {priority: 5}\nqueries: [{<<: *x, " + text + ", *x]"
    (document,) = read_documents(both)
    assert document.problems == ()
    assert document.data["queries"][0]["priority"] == 9


def test_a_document_that_contains_itself_is_read_once() -> None:
    (document,) = read_documents("&a {a: *a, b: [*a, 1], b: 2}")
    assert [p.path for p in document.problems] == ["b"]


def test_keys_of_other_documents_may_repeat() -> None:
    text = "kind: ConfigMap\nkind: ConfigMap\n---\n" + json.dumps(good_manifest())
    assert load_topology(text)[0] == "good"


def test_fields_of_the_api_server_are_accepted() -> None:
    manifest = good_manifest() | {"status": {"phase": "Running"}}
    manifest["metadata"] |= {"uid": "u", "generation": 3}
    assert load_topology(manifest) == load_topology(good_manifest())


def test_all_problems_are_reported_at_once() -> None:
    manifest = good_manifest()
    manifest["spec"]["sources"][0]["filez"] = manifest["spec"]["sources"][0].pop("files")
    manifest["spec"]["operators"][1]["window"]["size"] = "an hour"
    del manifest["spec"]["queries"][0]["from"]
    manifest["spec"]["checkpoint"]["retain"] = 0
    assert problems(manifest) == [
        "spec.checkpoint.retain: 0 is less than 1 (write 1 or more)",
        "spec.sources[0].filez: unknown field filez (did you mean files?)",
        "spec.operators[1].window.size: an hour is not a duration "
        "(write it like 250ms, 10s, 1h30m or 2d)",
        "spec.queries[0].from: is missing (it is required)",
    ]


def test_a_misspelt_field_hides_nothing_elsewhere() -> None:
    manifest = good_manifest()
    manifest["spec"]["replicaz"] = 2
    manifest["spec"]["queries"][0]["sink"] = {"files": {"url": "no-url"}}
    manifest["spec"]["operators"][2]["sql"] = "SELECT * FROM hourly WHERE tripz > 5"
    assert problems(manifest) == [
        "spec.replicaz: unknown field replicaz (did you mean replicas?)",
        "spec.operators[2].sql: unknown column tripz (did you mean trips?)",
        "spec.queries[0].sink.files.url: 'no-url' is not a URL "
        "(write it like file:///path or s3://bucket/path)",
    ]


def test_consequences_of_a_misspelt_field_are_left_out() -> None:
    manifest = good_manifest()
    manifest["spec"]["sources"][0]["eventTim"] = manifest["spec"]["sources"][0].pop("eventTime")
    del manifest["spec"]["operators"][0]["name"]
    assert problems(manifest) == [
        "spec.sources[0].eventTim: unknown field eventTim (did you mean eventTime?)",
        "spec.operators[0].name: is missing (it is required)",
    ]


def test_misspelt_operators_make_no_unknown_inputs() -> None:
    manifest = good_manifest()
    manifest["spec"]["operatrs"] = manifest["spec"].pop("operators")
    assert problems(manifest) == ["spec.operatrs: unknown field operatrs (did you mean operators?)"]


def test_a_missing_name_hides_no_problem_of_the_spec() -> None:
    manifest = good_manifest()
    del manifest["metadata"]["name"]
    manifest["spec"]["replicaz"] = 2
    assert [p.partition(":")[0] for p in problems(manifest)] == ["metadata.name", "spec.replicaz"]
    del manifest["spec"]["replicaz"]
    manifest["spec"]["operators"][2]["sql"] = "SELECT * FROM hourly WHERE tripz > 5"
    assert problems(manifest) == [
        "metadata.name: a topology needs a name",
        "spec.operators[2].sql: unknown column tripz (did you mean trips?)",
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replicas", "two", "two is not a whole number (write it without quotes, like 2)"),
        ("replicas", None, "has no value (write one, or leave the field out)"),
        ("suspend", "true", '"true" is a string (write true, without quotes)'),
        ("suspend", "no way", "no way is not true or false (write true or false, without quotes)"),
        (
            "checkpoint",
            "s3://b",
            "s3://b has no fields (write its fields below it, each as name: value)",
        ),
        ("sources", "trips", "trips is not a list (write [trips])"),
        ("image", ["a", "b"], '["a", "b"] is not a string (write one string: "a, b")'),
        ("image", 5, "5 is not a string (write it in quotes)"),
    ],
)
def test_a_wrong_value_is_reported_in_yaml(field: str, value: object, message: str) -> None:
    manifest = good_manifest()
    manifest["spec"][field] = value
    assert problems(manifest) == [f"spec.{field}: {message}"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("latin1", "write ISO-8859-1"), ("cp1252", "write windows-1252"), ("utf7", "write UTF-8, ")],
)
def test_an_encoding_has_one_name(name: str, hint: str) -> None:
    manifest = good_manifest()
    manifest["spec"]["sources"][0]["files"]["encoding"] = name
    (problem,) = problems(manifest)
    assert problem.startswith(f"spec.sources[0].files.encoding: is {name} ({hint}")


def test_a_rate_is_a_finite_number() -> None:
    manifest = good_manifest()
    files = manifest["spec"]["sources"][0]["files"]
    files.pop("speedup", None)
    files["rowsPerSecond"] = math.inf
    assert problems(manifest) == [
        "spec.sources[0].files.rowsPerSecond: Infinity is not a number "
        "(write it without quotes, like 2.5)"
    ]


def test_a_number_without_a_fraction_is_a_whole_number() -> None:
    """YAML reads `3.0` as a float; the API server gets JSON, in which it is 3."""
    manifest = good_manifest()
    manifest["spec"]["checkpoint"]["retain"] = 3.0
    assert load_topology(manifest)[1].checkpoint.retain == 3


def test_a_stream_sink_without_a_value_needs_braces() -> None:
    manifest = good_manifest()
    manifest["spec"]["queries"][0]["sink"] = {"stream": None}
    name, spec = load_topology(manifest)
    assert [str(p) for p in validate(spec, name)] == [
        "spec.queries[0].sink.stream: has no value (write {}, or its fields below it, each as "
        "name: value)"
    ]


def test_a_field_called_on_needs_quotes() -> None:
    manifest = good_manifest()
    manifest["spec"]["operators"][2]["join"] = {True: "a = b"}
    assert problems(manifest) == [
        "spec.operators[2].join: a field is called true: "
        "YAML reads on, off, yes and no as true and false (write it in quotes)"
    ]


def test_a_number_is_not_a_duration() -> None:
    manifest = good_manifest()
    manifest["spec"]["checkpoint"]["interval"] = 10
    manifest["spec"]["podTemplate"] = {"spec": {"size": 5}}
    assert problems(manifest) == [
        "spec.checkpoint.interval: 10 has no unit (write it like 250ms, 10s, 1h30m or 2d)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("", "the file is not a Kubernetes object"),
        ("kind: Pod", "kind: is 'Pod' (write StreamTopology)"),
        ("since: 2013-13-01", "not YAML: month must be in 1..12"),
        ("a: \x01", "not YAML: unacceptable character"),
        (
            "a: größe".encode("latin-1"),
            "not YAML: unacceptable character #x00f6: invalid start byte",
        ),
    ],
)
def test_invalid_documents_are_refused(text: str | bytes, message: str) -> None:
    assert any(p.startswith(message) for p in problems(text))


def test_a_file_has_one_topology_beside_other_objects() -> None:
    claim = "kind: PersistentVolumeClaim\nmetadata: {name: shared}\n"
    good = json.dumps(good_manifest())
    assert load_topology(f"{claim}---\n{good}\n---\n{claim}") == load_topology(good)
    assert problems(f"{good}\n---\n{claim}---\n{good}") == [
        "has 2 topologies, and only one would be read (write each into a file of its own)"
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_files_bytes_are_read_as_yaml_says(encoding: str) -> None:
    manifest = good_manifest()
    manifest["metadata"]["labels"] = {"team": "größe"}
    text = json.dumps(manifest, ensure_ascii=False)
    assert load_topology(text.encode(encoding)) == load_topology(manifest)


def test_cpus_are_read_as_kubernetes_writes_them() -> None:
    assert [parse_cpu(v) for v in ("500m", "1.5", 2, "0.25", 1.0)] == [500, 1500, 2000, 250, 1000]
    with pytest.raises(ValueError, match="write it like 500m"):
        parse_cpu("fast")
