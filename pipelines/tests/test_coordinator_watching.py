"""Reading generations: what is compiled, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from rekindle import names
from rekindle.coordinator.core.state_machine import Event
from rekindle.coordinator.model import Generation
from rekindle.coordinator.shell import watching
from rekindle.coordinator.shell.compiling import CompilationFailed
from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.objects import pod_from
from rekindle.coordinator.shell.settings import Settings
from rekindle.coordinator.shell.watching import GenerationReader
from rekindle.topology.model import Topology

SETTINGS = Settings("flights", "default", "uid", incarnation=1, bind="127.0.0.1")


@pytest.mark.parametrize(("spec", "node"), [({"nodeName": "node-1"}, "node-1"), ({}, None)])
def test_a_pod_has_the_node_to_which_it_is_bound(spec: dict[str, str], node: str | None) -> None:
    labels = {
        names.LABEL_SEGMENT: "left",
        names.LABEL_PARTITION: "0",
        names.LABEL_REPLICA: "1",
        names.LABEL_INCARNATION: "1",
    }
    metadata = {"name": "pod", "labels": labels, "ownerReferences": [{"uid": "uid"}]}
    pod = pod_from({"metadata": metadata, "spec": spec}, "uid")
    assert pod is not None
    assert pod.node == node


def test_a_task_has_started_beside_a_container_that_has_not() -> None:
    labels = {names.LABEL_SEGMENT: "left", names.LABEL_PARTITION: "0", names.LABEL_REPLICA: "1"}
    labels[names.LABEL_INCARNATION] = "1"
    metadata = {"name": "pod", "labels": labels, "ownerReferences": [{"uid": "uid"}]}
    containers = [{"name": "agent", "started": False}, {"name": "task", "started": True}]
    pod = pod_from({"metadata": metadata, "status": {"containerStatuses": containers}}, "uid")
    assert pod is not None
    assert pod.was_ready


class Api:
    """One ConfigMap, with the spec of a generation."""

    def __init__(self) -> None:
        self.version = "1"

    async def get(self, path: str, query: Any) -> dict[str, Any]:
        topology = {"uid": "uid", "generation": 1, "name": "flights", "spec": {}}
        metadata = {"name": "flights-1", "resourceVersion": self.version}
        data = {names.TOPOLOGY_KEY: json.dumps(topology)}
        return {"items": [{"metadata": metadata, "data": data}]}


def test_a_generation_that_does_not_compile_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilations: list[Sequence[tuple[str, Any]]] = []

    async def compile_specs(specs: Sequence[tuple[str, Any]]) -> list[Topology | str]:
        compilations.append(specs)
        return ["it has no sources"]

    monkeypatch.setattr(watching, "compile_specs", compile_specs)
    api, events, seen = Api(), list[Event](), list[Generation]()
    reader = GenerationReader(cast(KubeApi, api), SETTINGS, events.append, seen.append)

    def check() -> None:
        with pytest.raises(CompilationFailed, match="it has no sources"):
            asyncio.run(reader._check())

    check()
    check()
    assert len(compilations) == 1
    api.version = "2"
    check()
    assert len(compilations) == 2
    assert not events + seen
