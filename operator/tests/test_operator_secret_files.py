"""Secrets of sources are files of the tasks that read them, and of no other pod."""

from __future__ import annotations

from typing import Any

from model_cluster import ModelCluster

SPEC: dict[str, Any] = {
    "checkpoint": {"interval": "10s", "store": "s3://b/c"},
    "sources": [
        {
            "name": "clicks",
            "schema": "id BIGINT",
            "kafka": {
                "bootstrapServers": "kafka:9092",
                "topic": "clicks",
                "format": "avro",
                "schemaRegistry": {"url": "https://registry", "secretRef": "registry-rekindle"},
                "security": {
                    "sasl": {"mechanism": "PLAIN", "secretRef": "user-rekindle"},
                    "tls": {"secretRef": "registry-rekindle"},
                },
            },
        }
    ],
    "operators": [
        {
            "name": "odd",
            "inputs": ["clicks"],
            "sql": "SELECT id FROM clicks",
            "partitions": 2,
            "keyBy": ["id"],
        },
    ],
    "queries": [
        {"name": "q", "from": "odd", "sink": {"files": {"url": "s3://b/out"}}},
    ],
}


def test_they_are_mounted_where_they_are_read(cluster: ModelCluster) -> None:
    cluster.add_topology("clicks", SPEC)
    cluster.add_node("a", cpu_m=64_000, memory=64 << 30)
    cluster.add_node("b", cpu_m=64_000, memory=64 << 30)
    cluster.settle()
    mounted = dict[str, set[tuple[str, str]]]()
    for pod in cluster.raw_pods.values():
        if pod["metadata"]["labels"].get("rekindle.dev/topology") != "clicks":
            continue
        secrets = {
            v["name"]: v["secret"]["secretName"]
            for v in pod["spec"]["volumes"]
            if v["name"].startswith("rekindle-secret")
        }
        assert all(v["secret"]["optional"] for v in pod["spec"]["volumes"] if "secret" in v)
        mounts = {
            (secrets[m["name"]], m["mountPath"])
            for c in pod["spec"]["containers"]
            for m in c["volumeMounts"]
            if m["name"] in secrets
        }
        segment = pod["metadata"]["labels"].get("rekindle.dev/segment-name", "coordinator")
        mounted.setdefault(segment, set()).update(mounts)
        assert "registry-rekindle" not in str(pod["spec"]["containers"][0].get("env"))
    assert mounted["clicks"] == {
        ("registry-rekindle", "/etc/rekindle-secrets/registry-rekindle"),
        ("user-rekindle", "/etc/rekindle-secrets/user-rekindle"),
    }
    assert len(mounted) == 3
    assert not mounted["odd"] | mounted["coordinator"]
