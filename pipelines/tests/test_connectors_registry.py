"""Kinds of sources, operators, windows and sinks: each source and sink that is supported
has its connector, and the CRD has them all."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.connectors.registry import connector
from rekindle.topology.kinds.base import SinkOptions, SourceOptions
from rekindle.topology.spec import OperatorSpec, SinkSpec, SourceSpec, kinds_of
from rekindle.topology.windows import registry as windows

CRD = Path(__file__).parents[2] / "crds" / "rekindle.dev_streamtopologies.yaml"


@pytest.mark.parametrize("options", [*kinds_of(SourceSpec).values(), *kinds_of(SinkSpec).values()])
def test_a_kind_has_a_connector_unless_it_is_not_supported_yet(
    options: type[SourceOptions | SinkOptions],
) -> None:
    opened = connector(options)
    assert (opened is None) == (options.connector is None)
    if opened is not None:
        assert list(inspect.signature(opened).parameters) == ["options", "context"]


def test_the_crd_has_the_same_kinds() -> None:
    spec = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    fields: dict[str, Any] = spec["properties"]["spec"]["properties"]
    source, operator = fields["sources"]["items"], fields["operators"]["items"]
    sink = fields["queries"]["items"]["properties"]["sink"]
    for schema, kinds in (
        (source, [*kinds_of(SourceSpec)]),
        (sink, [*kinds_of(SinkSpec)]),
        (operator, OperatorSpec.KINDS),
        (operator["properties"]["window"], windows.KINDS),
    ):
        assert set(kinds) <= set(schema["properties"])
        rule = schema["x-kubernetes-validations"][0]
        assert rule["message"].endswith(f"exactly one of {', '.join(kinds)}")
        assert all(f"has(self.{kind})" in rule["rule"] for kind in kinds)
