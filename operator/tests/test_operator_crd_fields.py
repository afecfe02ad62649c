"""What an older or newer CRD lacks, and a status without it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle_operator.crd_fields import missing_fields, required_missing_fields, without_missing
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.core import reconcile
from rekindle_testing.fixtures.crd import resource_schema, undeclared_in

OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
TEXT = {"type": "string"}


def schema(spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None) -> Any:
    return {"properties": {"spec": fields(**(spec or {})), "status": fields(**(status or {}))}}


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def items(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


def values(of: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": of}


def state(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def paths_of(node: Any, path: str) -> Iterator[str]:
    """Of all fields that are not below a node which preserves unknown fields."""
    for name, field in node.get("properties", {}).items():
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name}"
        yield from paths_of(field, f"{path}.{name}")
    if "items" in node:
        yield from paths_of(node["items"], f"{path}[]")


STATUS_PATHS = sorted(paths_of(resource_schema()["properties"]["status"], "status"))


def older(paths: list[str]) -> Any:
    """This version's schema without these fields."""
    made = copy.deepcopy(resource_schema())
    for path in paths:
        at: Any = made
        *parents, last = path.split(".")
        for name in parents:
            at = at.get("properties", {}).get(name.removesuffix("[]"), {})
            at = at.get("items", {}) if name.endswith("[]") else at
        at.get("properties", {}).pop(last, None)
    return made


def test_the_same_crd_lacks_nothing() -> None:
    assert missing_fields(resource_schema(), resource_schema()) == ()


def test_an_older_crd_lacks_fields_of_spec_and_status() -> None:
    lacks = ["spec.suspend", "status.queries[].lag", "status.redundancy"]
    assert missing_fields(resource_schema(), older(lacks[::-1])) == tuple(lacks)


def test_a_newer_crd_lacks_nothing() -> None:
    assert missing_fields(older(["spec.suspend", "status.phase"]), resource_schema()) == ()


@pytest.mark.parametrize(
    ("needed", "served", "missing"),
    [
        (fields(b=TEXT), fields(), ("spec.a.b",)),
        (fields(b=fields(c=TEXT)), fields(), ("spec.a.b",)),
        (fields(b=TEXT), {"type": "object"}, ("spec.a.b",)),
        (fields(b=fields(c=TEXT)), OPEN, ()),
        (fields(b=fields(c=TEXT)), {**OPEN, **fields(b=fields())}, ("spec.a.b.c",)),
        (fields(b=fields(c=TEXT)), {**OPEN, **fields(b=OPEN)}, ()),
        (OPEN, fields(), ()),
        (items(fields(b=TEXT)), items(fields()), ("spec.a[].b",)),
        (items(TEXT), {"type": "array"}, ("spec.a[]",)),
        (items(items(fields(b=TEXT))), items(items(fields())), ("spec.a[][].b",)),
        (values(fields(b=TEXT)), values(fields()), ("spec.a{}.b",)),
        (values(TEXT), {"type": "object"}, ("spec.a{}",)),
        (values(True), values(True), ()),
        (fields(b=TEXT), values(TEXT), ()),
        (state("x", "y", "z"), state("y"), ("spec.a=x", "spec.a=z")),
        (state("x"), TEXT, ()),
        (TEXT, state("x"), ()),
    ],
)
def test_what_is_missing_below_a_field(needed: Any, served: Any, missing: tuple[str, ...]) -> None:
    assert missing_fields(schema({"a": needed}), schema({"a": served})) == missing


def test_a_crd_without_a_status_lacks_all_of_it() -> None:
    served = {"properties": {"spec": fields()}}
    assert missing_fields(schema(), served) == ("status",)
    assert required_missing_fields(["spec.a", "status"]) == ["status"]


def test_missing_fields_and_values_are_left_out() -> None:
    status = {
        "phase": "Paused",
        "lag": "1s",
        "queries": [{"name": "q", "state": "Paused", "lag": "1s"}, {"name": "r", "state": "Live"}],
        "tags": ["old", "new"],
    }
    missing = ("spec.lag", "status.lag", "status.queries[].state=Paused", "status.tags[]=new")
    assert without_missing(status, missing) == {
        "phase": "Paused",
        "queries": [{"name": "q", "lag": "1s"}, {"name": "r", "state": "Live"}],
        "tags": ["old"],
    }
    assert without_missing(status, ()) == status


def test_the_fields_of_fencing_are_never_left_out() -> None:
    status = {"slots": [{"slot": "a", "incarnation": 1}], "generations": [{"generation": 1}]}
    missing = ("status.generations", "status.slots", "status.slots[].incarnation")
    assert without_missing(status, missing) == status
    assert required_missing_fields([*missing, "status.slotsReady", "status.lag"]) == list(missing)


def test_the_status_has_no_maps() -> None:
    """Paths of their values would have to be found, too."""
    assert "additionalProperties" not in str(resource_schema()["properties"]["status"])


def test_all_of_a_coordinators_report_may_have_unknown_fields() -> None:
    """So a newer coordinator can report with an older CRD, without a comparison."""

    def closed(node: Any, path: str) -> Iterator[str]:
        if node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
            yield path
        for name, field in node.get("properties", {}).items():
            yield from closed(field, f"{path}.{name}")
        if "items" in node:
            yield from closed(node["items"], f"{path}[]")

    report = resource_schema()["properties"]["status"]["properties"]["dataPlane"]
    assert list(closed(report, "dataPlane")) == []


@given(st.lists(st.sampled_from(STATUS_PATHS), unique=True, max_size=6))
def test_any_older_crd_declares_what_is_written(lacks: list[str]) -> None:
    served = older(lacks)
    missing = missing_fields(resource_schema(), served)
    written = without_missing(SAMPLE, missing)
    kept = set(required_missing_fields(missing))
    undeclared = undeclared_in(written, served["properties"]["status"])
    assert all(any(path.startswith(k) for k in kept) for path in undeclared)


SAMPLE: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True", "reason": "R", "message": "m"}],
    "queries": [{"name": "q", "priority": 1, "state": "Live", "lag": "1s", "stableEpoch": 1}],
    "queriesLive": "1/1",
    "redundancy": "2/2",
    "operators": [{"name": "o", "partitions": 1, "replicasReady": 1}],
    "recovery": {
        "mode": "Progressive",
        "history": [{"mode": "Progressive", "queries": [{"name": "q"}]}],
    },
    "slots": [{"slot": "a/0/0", "incarnation": 1}],
    "generations": [{"generation": 1, "digest": "d"}],
    "checkpoint": {"epoch": 1, "time": "t", "bytes": 1},
}


LACKS = ("spec.suspend", "status.conditions[].observedGeneration", "status.redundancy")


def test_a_topology_recovers_with_an_older_crd(running: ModelCluster) -> None:
    running.missing_fields = LACKS
    running.settle()
    running.kill_node_until_not_ready("a")
    running.settle()
    assert running.status()["phase"] == "Running"
    assert "redundancy" not in running.status()
    assert "observedGeneration" not in running.condition("Ready")
    assert not [a for a in reconcile(running.snapshot(), running.now) if isinstance(a, WriteStatus)]


OWN_PATHS = [p for p in STATUS_PATHS if not p.startswith("status.dataPlane")]
"""What the operator writes. The coordinator's report may have fields that are not declared."""
OWN_FIELDS = [p for p in OWN_PATHS if p.count(".") == 1]
BELOW = [tuple(p for p in OWN_PATHS if p.startswith((f"{f}.", f"{f}["))) for f in OWN_FIELDS]
MISSING = [*((f,) for f in OWN_FIELDS), *filter(None, BELOW), tuple(OWN_PATHS)]
"""A field of the status, all that is below one, and everything."""


@pytest.mark.parametrize("missing", MISSING, ids=",".join)
def test_no_missing_field_stops_a_recovery(running: ModelCluster, missing: tuple[str, ...]) -> None:
    running.missing_fields = missing
    running.settle()
    lost = {p.uid for p in running.tasks().values() if p.node == "a"}
    assert lost
    running.kill_node_until_not_ready("a")
    running.settle()
    tasks = running.tasks().values()
    assert len(tasks) == 8
    assert not lost & {p.uid for p in tasks}
    assert all(p.node in ("b", "c") for p in tasks)
    declared = without_missing(running.status(), missing)
    assert declared == running.status()


def test_the_condition_valid_says_what_is_missing(running: ModelCluster) -> None:
    running.missing_fields = LACKS
    running.settle()
    valid = running.condition("Valid")
    assert valid["status"] == "True"
    assert ", ".join(LACKS) in valid["message"]
    assert running.condition("Degraded")["status"] == "False"
    assert running.status()["phase"] == "Running"
    running.missing_fields = ()
    running.settle()
    assert "CRD" not in running.condition("Valid")["message"]
    assert running.status()["redundancy"] == "8/8"


def test_an_invalid_spec_names_fields_that_may_have_been_dropped(running: ModelCluster) -> None:
    running.missing_fields = LACKS
    running.edit("flights", sources=[])
    running.settle()
    valid = running.condition("Valid")
    assert valid["status"] == "False"
    assert ", ".join(LACKS) in valid["message"]


def test_a_failed_reconcile_writes_no_missing_field(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an internal error")

    monkeypatch.setattr("rekindle_operator.reconcile.core.replace_coordinator", broken)
    running.missing_fields = LACKS
    running.settle()
    assert running.condition("Degraded")["reason"] == "ReconcileFailed"
    assert "redundancy" not in running.status()
    assert "observedGeneration" not in running.condition("Ready")
