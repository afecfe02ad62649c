"""Compilation: segments cover the graph, ids depend only on what is computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_specs import query, random_specs, source, spec_of, sql, topology_spec, window

from rekindle.errors import InvalidTopology
from rekindle.topology.checks.urls import check_urls
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec, load_topology
from rekindle.topology.model import Exchange, Resources, Topology
from rekindle.topology.resources import task_limits

EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"


def compiled(data: dict[str, Any], name: str = "t") -> Topology:
    return compile_topology(load_spec(data), name)


def ids(topology: Topology) -> dict[str, str]:
    return {name: node.id for name, node in topology.nodes.items()}


def test_the_example_becomes_four_segments() -> None:
    name, spec = load_topology(EXAMPLE.read_text())
    topology = compile_topology(spec, name)
    shape = {s.name: (s.nodes, s.partitions, s.replicas, s.queries) for s in topology.segments}
    assert shape == {
        "flown": (("departures", "flown"), 1, 2, ()),
        "storms": (("weather", "storms"), 1, 1, ("storm-watch",)),
        "alarms": (("delays", "alarms"), 2, 2, ("delay-alarms",)),
        "routes": (("routes",), 1, 1, ("route-report",)),
    }
    alarms = next(s for s in topology.segments if s.name == "alarms")
    assert [(i.name, i.exchange, i.key_by) for i in alarms.inputs] == [
        ("flown", Exchange.HASH, ("origin",))
    ]
    assert topology.nodes["alarms"].schema.names[:3] == ["origin", "carrier", "window_end"]
    assert topology.nodes["alarms"].event_time == "window_end"


@given(random_specs())
def test_every_node_is_in_exactly_one_segment_and_inputs_come_first(data: dict[str, Any]) -> None:
    topology = compiled(data)
    placed = [n for s in topology.segments for n in s.nodes]
    assert sorted(placed) == sorted(topology.nodes)
    seen: set[str] = set()
    for segment in topology.segments:
        assert {i.stream for i in segment.inputs} <= seen
        seen.add(segment.stream)
    sources = [s.is_source for s in topology.segments]
    assert sources == sorted(sources, reverse=True)
    assert len({s.id for s in topology.segments}) == len(topology.segments)
    assert len(set(ids(topology).values())) == len(topology.nodes)


@given(random_specs())
def test_only_the_end_of_a_segment_is_read_by_others(data: dict[str, Any]) -> None:
    topology = compiled(data)
    queried = {q["from"] for q in data["queries"]}
    for segment in topology.segments:
        for before, after in zip(segment.nodes, segment.nodes[1:], strict=False):
            readers = [n.name for n in topology.nodes.values() if before in n.inputs]
            assert readers == [after]
            assert before not in queried
            assert topology.nodes[after].inputs == (before,)


@given(random_specs())
def test_exchanges_fit_the_partitions(data: dict[str, Any]) -> None:
    for segment in compiled(data).segments:
        for stream in segment.inputs:
            match stream.exchange:
                case Exchange.FORWARD:
                    assert stream.partitions == segment.partitions
                case Exchange.GATHER:
                    assert segment.partitions == 1 < stream.partitions
                case Exchange.HASH:
                    assert stream.key_by


@given(random_specs(), st.randoms(use_true_random=False))
def test_ids_do_not_depend_on_the_order_in_the_resource(data: dict[str, Any], random: Any) -> None:
    before = compiled(data)
    shuffled = copy.deepcopy(data)
    for part in ("sources", "operators", "queries"):
        random.shuffle(shuffled[part])
    after = compiled(shuffled)
    assert ids(before) == ids(after)
    assert {s.id for s in before.segments} == {s.id for s in after.segments}


@given(random_specs(), st.data())
def test_a_changed_operator_changes_the_ids_downstream(
    data: dict[str, Any], draw: st.DataObject
) -> None:
    if not data["operators"]:
        return
    before = compiled(data)
    at = draw.draw(st.integers(0, len(data["operators"]) - 1))
    changed = copy.deepcopy(data)
    operator = changed["operators"][at]
    operator["sql"] = operator["sql"].replace("n > 0", "n > 1")
    after = ids(compiled(changed))
    behind = {operator["name"]}
    for name, node in before.nodes.items():
        if behind & set(node.inputs):
            behind.add(name)
    assert {n for n, i in ids(before).items() if after[n] != i} == behind


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"suspend": True},
        {"resources": {"requests": {"cpu": 2}}},
        {"image": "another"},
        {"logBudget": "2Gi"},
    ],
)
def test_ids_do_not_depend_on_how_a_topology_runs(change: dict[str, Any]) -> None:
    parts = ([source()], [sql("a", "s"), window("w", "a")], [query("q", "w")])
    before, after = compiled(topology_spec(*parts)), compiled(topology_spec(*parts, **change), "u")
    assert ids(before) == ids(after)
    assert [s.id for s in before.segments] == [s.id for s in after.segments]


def test_ids_do_not_depend_on_priority_sink_or_an_operators_own_resources() -> None:
    before = compiled(topology_spec([source()], [sql("a", "s")], [query("q", "a")]))
    other = query("q", "a", priority=7, sink={"files": {"url": "s3://bucket/elsewhere"}})
    own = sql("a", "s", resources={"requests": {"memory": "2Gi"}})
    after = compiled(topology_spec([source()], [own], [other]))
    assert ids(before) == ids(after)


AVRO_SCHEMA = '{"type": "record", "name": "R", "fields": []}'


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"bootstrapServers": "c:9092"}, True),
        ({"maxRowsPerEpoch": 5}, True),
        ({"onBadRecord": "Drop"}, True),
        ({"onDataLoss": "Skip"}, True),
        ({"topic": "u"}, False),
        ({"startingOffsets": "Latest"}, False),
        ({"offsetColumn": "o"}, False),
        ({"security": {"tls": {}}}, True),
        ({"schemaRegistry": {"url": "http://b", "secretRef": "b-rekindle"}}, True),
        ({"schemaRegistry": None}, False),
        ({"avroSchema": AVRO_SCHEMA.replace("R", "Q")}, False),
    ],
)
def test_a_topic_is_read_on_after_edits_that_change_no_epoch(
    change: dict[str, Any], same: bool
) -> None:
    def with_kafka(**more: Any) -> dict[str, str]:
        kafka = {
            "bootstrapServers": "b:9092",
            "topic": "t",
            "format": "avro",
            "avroSchema": AVRO_SCHEMA,
            "schemaRegistry": {"url": "http://a"},
            **more,
        }
        clicks = {k: v for k, v in source().items() if k != "files"} | {"kafka": kafka}
        return ids(compiled(topology_spec([clicks], [sql("a", "s")], [query("q", "a")])))

    assert (with_kafka() == with_kafka(**change)) is same


def test_ids_are_the_same_in_every_version() -> None:
    """Names of checkpoints contain them: a change would lose state in an upgrade."""
    topology = compiled(topology_spec([source()], [window("w", "s")], [query("q", "w")]))
    assert ids(topology) == {"s": "a05809b005d6ae4c", "w": "f7cd614c3960a800"}


def test_partitions_of_a_source_are_those_of_what_is_fused_with_it() -> None:
    parts = [sql("f", "s"), window("w", "f"), window("k", "f", keyBy=["origin"], partitions=2)]
    queries = [query("q", "w"), query("r", "k")]
    topology = compiled(topology_spec([source(partitions=3)], parts, queries))
    shape = {s.name: (s.partitions, [i.exchange for i in s.inputs]) for s in topology.segments}
    assert shape == {"f": (3, []), "w": (1, [Exchange.GATHER]), "k": (2, [Exchange.HASH])}
    assert len(topology.slots()) == 3 + 1 + 2


def test_the_number_of_a_sources_partitions_is_in_all_ids_that_follow() -> None:
    def ids_with(**more: Any) -> dict[str, str]:
        sources = [source(**more), source("other")]
        nodes = [sql("f", "s"), sql("o", "other")]
        return ids(compiled(topology_spec(sources, nodes, [query("q", "f"), query("r", "o")])))

    assert ids_with(partitions=1) == ids_with()
    changed = {name for name, id in ids_with(partitions=2).items() if id != ids_with()[name]}
    assert changed == {"s", "f"}


def test_a_sql_operator_inherits_partitions_and_a_window_without_keys_gathers() -> None:
    keyed = sql("k", "s", keyBy=["origin"], partitions=3)
    topology = compiled(
        topology_spec([source()], [keyed, sql("f", "k"), window("w", "f")], [query("q", "w")])
    )
    assert [(s.name, s.partitions) for s in topology.segments] == [("s", 1), ("f", 3), ("w", 1)]
    assert topology.segments[2].inputs[0].exchange is Exchange.GATHER


def test_a_query_in_the_middle_of_a_chain_ends_a_segment() -> None:
    operators = [sql("a", "s"), sql("b", "a")]
    topology = compiled(topology_spec([source()], operators, [query("q", "a"), query("r", "b")]))
    assert [s.nodes for s in topology.segments] == [("s", "a"), ("b",)]


def test_a_segment_requests_the_maximum_of_its_nodes() -> None:
    spec = spec_of(
        [source(resources={"requests": {"cpu": "250m"}})],
        [sql("a", "s", resources={"requests": {"cpu": "1.5"}, "limits": {"memory": "512Mi"}})],
        [query("q", "a")],
        resources={"requests": {"cpu": 4, "memory": "8Gi"}},
    )
    assert compile_topology(spec, "t").segments[0].resources == Resources(1500, 512 * 1024**2)


def test_resources_come_from_the_topology_or_are_half_a_cpu_and_a_gibibyte() -> None:
    parts: tuple[Any, ...] = ([source()], [], [query("q", "s")])
    assert compile_topology(spec_of(*parts), "t").segments[0].resources == Resources(500, 1024**3)
    given = spec_of(*parts, resources={"requests": {"cpu": 4}})
    assert compile_topology(given, "t").segments[0].resources == Resources(4000, 1024**3)


def test_limits_are_the_highest_of_the_nodes_as_written_and_never_below_the_request() -> None:
    requests = {"cpu": "1500m", "memory": str(1024**3)}
    own = [{"limits": {"cpu": 2, "memory": "4Gi"}}, None, {"limits": {"cpu": "1900m"}}]
    default = {"limits": {"cpu": 8, "memory": "1G"}}
    assert task_limits(own, default, requests) == {"cpu": 2, "memory": "4Gi"}
    assert task_limits(own[::-1], default, requests) == {"cpu": 2, "memory": "4Gi"}
    assert task_limits([None], default, requests) == {"cpu": 8, "memory": str(1024**3)}
    assert task_limits([{"limits": {"memory": "2Gi"}}], {}, requests) == {"memory": "2Gi"}
    assert task_limits([{"requests": {"cpu": 9}}], {}, requests) == {}


def test_a_bad_topology_is_refused_with_all_its_problems() -> None:
    spec = spec_of([source()], [sql("a", "x")], [query("q", "a"), query("q", "s")])
    with pytest.raises(InvalidTopology) as caught:
        compile_topology(spec, "t")
    assert {p.reason for p in caught.value.problems} == {
        "UnknownInput",
        "DuplicateName",
        "SharedPlace",
    }


@pytest.mark.parametrize(
    "other",
    [
        "file:///var/lib/rekindle/output//q/",
        "file:///var/lib/rekindle/output/./q",
        "file:///var/lib/rekindle/output/p/../q",
        "file:////var/lib/rekindle/output/q",
        "local:///var/lib/rekindle/output/q",
    ],
)
def test_a_directory_is_shared_however_it_is_spelled(other: str) -> None:
    assert _shared("file:///var/lib/rekindle/output/q", other)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("s3://b/q", "s3a://b/q/", True),
        ("gs://b/q", "gcs://b/q", True),
        ("abfs://c@a.dfs.core.windows.net/q", "abfss://c@A.dfs.core.Windows.net/q", True),
        ("memory://q", "memory:///q", True),
        ("s3://b/q", "s3a://b/q/r", True),  # readers of the first would read the second
        ("s3://b/q/r/t", "s3://b/q", True),
        ("s3://b/q/_r", "s3://b/q", False),  # which readers leave out
        ("s3://b/q", "s3://b/qr", False),
        ("s3://b/q", "gs://b/q", False),
        ("s3://b/q", "s3://b/Q", False),
        ("s3://b/x/q", "s3://b/x//q", False),  # keys are taken literally
        ("file:///var/lib/rekindle/a b", "file:///var/lib/rekindle/a%20b", False),
    ],
)
def test_urls_are_compared_as_their_store_reads_them(one: str, other: str, shared: bool) -> None:
    assert _shared(one, other) == shared


def _shared(one: str, other: str) -> bool:
    queries = [query(n, "s", sink={"files": {"url": u}}) for n, u in (("a", one), ("b", other))]
    spec = spec_of([source()], [], queries)
    return any(p.reason == "SharedPlace" for p in check_urls(spec, skip_cluster_checks=True))


@pytest.mark.parametrize(
    ("read", "output", "refused"),
    [
        ("file:///data/feed", "file:///data/feed/out", True),
        ("file:///data/feed/", "local:///data/feed", True),
        ("file:///data/feed", "file:///data/feed/_out", False),
        ("file:///data/feed", "file:///data/feed/.work/out", False),
        ("file:///data/feed", "file:///data/feeds/out", False),
        ("file:///data/feed/a.csv", "file:///data/feed/out", False),
        ("file:///data/feed/*.parquet", "file:///data/feed", True),
        ("file:///data/feed/*.csv", "file:///data/feed", False),
        ("file:///data/feed/*", "file:///data/feed/out", False),
        ("file:///data/*/*.parquet", "file:///data/feed", True),
        ("file:///data/**", "file:///data/feed/out", True),
        ("file:///data/**", "file:///data/feed/_out", False),
        ("file:///data/f??d/[a-z]*.parquet", "file:///data/feed", True),
        ("file:///data//feed/./*.parquet", "local:///data/feed", True),
        ("s3a://b/feed/*.parquet", "s3://b/feed", True),
        ("s3://b/feed", "s3a://b/feed/out", True),
        ("s3://b/feed", "gs://b/feed/out", False),
    ],
)
@pytest.mark.parametrize("is_store", [True, False])
def test_no_output_is_where_a_source_reads(
    read: str, output: str, refused: bool, is_store: bool
) -> None:
    sink = {"files": {"url": "file:///elsewhere" if is_store else output}}
    files = {**source()["files"], "url": read}
    spec = spec_of([source(files=files)], [], [query("q", "s", sink=sink)])
    if is_store:
        checkpoint = spec.checkpoint.model_copy(update={"store": output})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
    found = [p for p in check_urls(spec, skip_cluster_checks=True) if p.reason == "SharedPlace"]
    path = "spec.checkpoint.store" if is_store else "spec.queries[0].sink.files.url"
    no_file = is_store and read.endswith(".parquet")  # a store has no such files
    assert [p.path for p in found] == ([path] if refused and not no_file else [])


@pytest.mark.parametrize(
    ("pattern", "refused"), [("q-p*", True), ("q-p000*.jsonl", True), ("other-p*", False)]
)
def test_the_files_of_a_sink_are_named_after_its_query(pattern: str, refused: bool) -> None:
    files = {**source()["files"], "url": f"file:///data/feed/{pattern}"}
    sink = {"files": {"url": "file:///data/feed"}}
    spec = spec_of([source(files=files)], [], [query("q", "s", sink=sink)])
    found = [p for p in check_urls(spec, skip_cluster_checks=True) if p.reason == "SharedPlace"]
    assert bool(found) == refused


@pytest.mark.parametrize("url", ["s3://b/in/**.parquet", "file:///data/flights**"])
def test_a_pattern_that_no_store_reads_is_refused(url: str) -> None:
    spec = spec_of([source(files={**source()["files"], "url": url})], [], [query("q", "s")])
    found = list(check_urls(spec, skip_cluster_checks=True))
    assert [(p.path, p.reason) for p in found] == [("spec.sources[0].files.url", "InvalidUrl")]


def test_a_local_run_may_use_a_local_disk() -> None:
    data = topology_spec([source()], [], [query("q", "s")])
    del data["checkpoint"]["volume"]
    with pytest.raises(InvalidTopology, match="lost with the node"):
        compiled(data)
    assert compile_topology(load_spec(data), "t", skip_cluster_checks=True).segments


def test_a_query_is_what_it_reads_and_writes() -> None:
    def identity(sink: dict[str, Any], node: str = "s") -> str:
        spec = spec_of([source("s"), source("o")], [], [query("q", node, sink=sink)])
        return spec.queries[0].input_and_sink

    stream = {"stream": {"retain": "2Mi", "tentative": True}}
    assert identity(stream) == identity({"stream": {}}) == '{"from":"s","sink":{"stream":{}}}'
    files = {"url": "file:///a"}
    assert identity({"files": files}) == '{"from":"s","sink":{"files":{"url":"file:///a"}}}'
    assert identity({"files": files | {"format": "json"}}) != identity({"files": files})
    assert len({identity(stream), identity(stream, "o"), identity({"files": files})}) == 3
