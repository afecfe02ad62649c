"""What tests on the embedded cluster share: one control plane, and nodes for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from embedded.control_plane import ControlPlane
from embedded.process_node.host import Image, ProcessNode, Timing
from embedded.process_node.restarts import BackoffPolicy

# Fast enough for tests; everything else is as on a real node.
QUICK = Timing(
    lease_renew_s=1.0,
    lease_duration_s=4,
    memory_sample_s=0.3,
    volume_refresh_s=0.5,
    backoff=BackoffPolicy(base_s=0.5),
)


class NodeFactory(Protocol):
    def __call__(self, name: str = "", **options: Any) -> ProcessNode:
        """A node that is Ready; options are those of `ProcessNode`."""


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without nodes, for the whole run.

    A test that takes parts of it away makes one of its own.
    """
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), report=print) as running:
        yield running


_numbers = itertools.count(1)


@pytest.fixture
def node_factory(control_plane: ControlPlane, tmp_path: Path) -> Iterator[NodeFactory]:
    """Makes nodes that end with the test, and take their Nodes with them."""
    nodes: list[ProcessNode] = []

    def make(name: str = "", **options: Any) -> ProcessNode:
        name = name or f"node-{next(_numbers)}"
        options = {"images": {"machine": Image()}, "timing": QUICK, **options}
        node = ProcessNode(name, control_plane, tmp_path / name, **options)
        nodes.append(node)
        node.start()
        node.wait_ready()
        return node

    yield make
    for node in nodes:
        node.stop()
