"""Topologies for tests: small specs and random ones. No test in here."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rekindle.topology.load import load_spec
from rekindle.topology.spec import TopologySpec

SCHEMA = "origin STRING, carrier STRING, delay DOUBLE, n BIGINT, ts TIMESTAMP"


def source(name: str = "s", **more: Any) -> dict[str, Any]:
    files = {"url": f"file:///input/{name}.csv", "format": "csv", "orderBy": "ts", "speedup": 60}
    base = {"name": name, "schema": SCHEMA, "eventTime": {"column": "ts"}, "files": files}
    return base | more


def sql(name: str, *inputs: str, **more: Any) -> dict[str, Any]:
    text = " UNION ALL ".join(f"SELECT * FROM `{i}` WHERE n > 0" for i in inputs)
    return {"name": name, "inputs": list(inputs), "sql": text} | more


def window(name: str, *inputs: str, **more: Any) -> dict[str, Any]:
    how = {"size": "1h", "groupBy": ["origin"], "aggregate": "count(*) AS rows"}
    return {"name": name, "inputs": list(inputs), "window": how} | more


def query(name: str, node: str, **more: Any) -> dict[str, Any]:
    sink = {"files": {"url": f"file:///var/lib/rekindle/output/{name}"}}
    return {"name": name, "from": node, "sink": sink} | more


def topology_spec(
    sources: list[dict[str, Any]],
    operators: list[dict[str, Any]],
    queries: list[dict[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    checkpoint = {
        "interval": "10s",
        "store": "file:///var/lib/rekindle/checkpoints",
        "volume": "shared",
    }
    parts = {"sources": sources, "operators": operators, "queries": queries}
    return {"checkpoint": checkpoint} | parts | more


def spec_of(*args: Any, **more: Any) -> TopologySpec:
    return load_spec(topology_spec(*args, **more))


@st.composite
def random_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A valid spec of up to 5 row-wise operators over up to 3 sources, every node in use."""
    sources = [
        source(f"s{i}", replicas=draw(st.integers(1, 2)), partitions=draw(st.integers(1, 3)))
        for i in range(draw(st.integers(1, 3)))
    ]
    partitions = {s["name"]: s["partitions"] for s in sources}
    operators: list[dict[str, Any]] = []
    for at in range(draw(st.integers(0, 5))):
        names = draw(
            st.lists(st.sampled_from(sorted(partitions)), min_size=1, max_size=3, unique=True)
        )
        keyed: dict[str, Any] = {"replicas": draw(st.integers(1, 2))}
        counts = {partitions[n] for n in names}
        partitions[f"o{at}"] = counts.pop() if len(counts) == 1 else 1
        if draw(st.booleans()):
            partitions[f"o{at}"] = draw(st.integers(1, 3))
            keyed |= {"keyBy": ["origin"], "partitions": partitions[f"o{at}"]}
        operators.append(sql(f"o{at}", *names, **keyed))
    read = {i for o in operators for i in o["inputs"]}
    queries = [
        query(f"q-{name}", name, priority=draw(st.integers(0, 9)))
        for name in partitions
        if name not in read or draw(st.booleans())
    ]
    return topology_spec(sources, operators, queries)
