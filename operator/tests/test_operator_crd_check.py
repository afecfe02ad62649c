"""The comparison with the API server's CRD: what is said, and what its failure does."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from prometheus_client import REGISTRY
from urllib3.exceptions import HTTPError

import rekindle_operator
from rekindle_operator.crd_check import CrdCheck, packaged_schema, served_schema
from rekindle_testing.fixtures.crd import resource_schema
from rekindle_testing.paths import ROOT

OURS = [{"group": "rekindle.dev", "kind": "StreamTopology", "version": "v1alpha1"}]
ANOTHER = [{"group": "rekindle.dev", "kind": "StreamTopologyList", "version": "v1alpha1"}]


class Serving(client.ApiClient):
    """An API server with this CRD, or which answers otherwise."""

    def __init__(self, schema: Any) -> None:
        super().__init__()
        self.schema = schema
        self.status = 200
        self.text: str | None = None
        self.error: Exception | None = None

    def call_api(self, method: str, url: str, *_: Any, **__: Any) -> Any:
        assert method == "GET"
        assert url.endswith("/openapi/v3/apis/rekindle.dev/v1alpha1")
        if self.error is not None:
            raise self.error
        return self

    def read(self) -> bytes:
        schemas = {
            "io.k8s.Status": {},
            "dev.rekindle.List": {"x-kubernetes-group-version-kind": ANOTHER},
            "dev.rekindle": {**self.schema, "x-kubernetes-group-version-kind": OURS},
        }
        text = json.dumps({"components": {"schemas": schemas}}) if self.text is None else self.text
        return text.encode()

    reason = "the reason"


@pytest.fixture
def api() -> Serving:
    return Serving(without("redundancy"))


@pytest.fixture
def results() -> list[tuple[str, ...]]:
    return []


@pytest.fixture
def check(api: Serving, results: list[tuple[str, ...]]) -> CrdCheck:
    return CrdCheck(api, results.append, 30.0)


def without(*fields: str) -> Any:
    """The schema without these fields of the status."""
    schema = copy.deepcopy(resource_schema())
    for field in fields:
        del schema["properties"]["status"]["properties"][field]
    return schema


def test_the_package_has_the_crd_of_the_chart() -> None:
    (crd,) = (ROOT / "charts/rekindle/crds").glob("*.yaml")
    packaged = Path(rekindle_operator.__file__).with_name("crd.yaml")
    assert packaged.read_bytes() == crd.read_bytes()
    assert packaged_schema() == resource_schema()
    assert len(yaml.safe_load(crd.read_text())["spec"]["versions"]) == 1


def test_an_older_crd_is_an_error_with_the_command(
    check: CrdCheck, results: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        check.compare()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "it lacks status.redundancy;" in record.message
    assert "no pod created" not in record.message
    command = record.message.partition("Upgrade the CRD: ")[2]
    for page in ("docs/operations.md", "charts/rekindle/templates/NOTES.txt"):
        assert command in (ROOT / page).read_text()
    assert results == [("status.redundancy",)]
    assert _missing_fields() == 1


def test_an_upgrade_of_the_crd_clears_it(
    api: Serving,
    check: CrdCheck,
    results: list[tuple[str, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    check.compare()
    api.schema = resource_schema()
    for _ in range(2):
        check.compare()
    assert results == [("status.redundancy",), ()]
    assert [r.levelname for r in caplog.records] == ["ERROR", "INFO"]
    assert _missing_fields() == 0


def test_without_a_required_field_in_the_crd_no_pod_is_created(
    api: Serving, check: CrdCheck, caplog: pytest.LogCaptureFixture
) -> None:
    api.schema = without("slots", "lag")
    check.compare()
    (record,) = caplog.records
    assert "without status.slots no status is written and no pod created" in record.message


@pytest.mark.parametrize("failure", ["unreachable", "403", "no JSON", "no kind", "no object"])
def test_a_failed_comparison_changes_nothing(
    api: Serving,
    check: CrdCheck,
    results: list[tuple[str, ...]],
    caplog: pytest.LogCaptureFixture,
    failure: str,
) -> None:
    check.compare()
    caplog.clear()
    match failure:
        case "unreachable":
            api.error = HTTPError("no route")
        case "403":
            api.status = 403
        case "no JSON":  # just after the CRD was deleted
            api.text = ""
        case "no kind":
            api.text = '{"components": {"schemas": {}}}'
        case "no object":
            api.text = '{"components": []}'
    for _ in range(3):
        check.compare()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert results == [("status.redundancy",)]


def test_the_schema_is_found_by_its_kind() -> None:
    schemas = {"a": {"x-kubernetes-group-version-kind": ANOTHER}}
    with pytest.raises(LookupError, match="StreamTopology"):
        served_schema({"components": {"schemas": schemas}})


def _missing_fields() -> float | None:
    return REGISTRY.get_sample_value("rekindle_operator_crd_missing_fields")
