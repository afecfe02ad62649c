"""Fixtures of tests on the embedded cluster: one control plane, and nodes for each test; and one
cluster of process nodes and one of kubelets for all tests that need no other."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import passed_before
import pytest

from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.embedded.pods import Pods
from rekindle_testing.embedded.process_node.node import QUICK, ImageReplacement, ProcessNode
from rekindle_testing.harness.any_cluster import UnsupportedByCluster

if TYPE_CHECKING:
    from rekindle_testing.harness.any_cluster import Cluster
    from rekindle_testing.harness.cluster import EmbeddedCluster

_FAILED, _PASSED = pytest.StashKey[bool](), pytest.StashKey[bool]()
_PASSED_BEFORE = "passed with the same files of the test platform: `pytest --platform` runs it"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        action="store_true",
        help="run tests of the test platform that have passed with the same files, too",
    )


def pytest_sessionstart() -> None:
    passed_before.forget_old_versions(time.time())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on shared clusters come last, so that no other cluster is beside them."""
    items.sort(key=_shared_cluster)
    if not config.getoption("--platform"):
        for item in filter(passed_before.is_known, items):
            item.add_marker(pytest.mark.skip(reason=_PASSED_BEFORE))


def _shared_cluster(item: pytest.Item) -> int:
    """0: none, 1: process nodes, 2: kubelets."""
    if not isinstance(item, pytest.Function):
        return 0
    callspec = getattr(item, "callspec", None)
    on_kubelets = callspec is not None and callspec.params.get("cluster_type") == "kubelet"
    if on_kubelets or "kubelet_cluster" in item.fixturenames:
        return 2
    return int("shared_cluster" in item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    item.stash[_PASSED] = item.stash.get(_PASSED, False) or (call.when == "call" and report.passed)
    if call.when == "teardown" and item.stash[_PASSED] and not item.stash[_FAILED]:
        passed_before.remember(item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except UnsupportedByCluster as error:
        pytest.skip(str(error))


@pytest.fixture
def failed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Whether the test has failed, for fixtures that then keep evidence."""
    return lambda: bool(request.node.stash.get(_FAILED, False))


class NodeFactory(Protocol):
    def __call__(self, name: str = "", **options: Any) -> ProcessNode:
        """A node that is Ready; options are those of `ProcessNode`."""


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without nodes, for the whole run.

    A test that stops parts of it creates its own.
    """
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), on_progress=print) as running:
        yield running


@pytest.fixture(scope="module")
def api_server(control_plane: ControlPlane) -> ControlPlane:
    """The same, with the CRD. Modules use it one after the other, each in namespaces of its own;
    they leave no node and no topology."""
    from rekindle_testing.harness.operator_process import install_crds

    install_crds(control_plane)
    return control_plane


_numbers = itertools.count(1)


@pytest.fixture
def node_factory(control_plane: ControlPlane, tmp_path: Path) -> Iterator[NodeFactory]:
    """Creates nodes that are stopped, and their Nodes deleted, after the test."""
    ends = contextlib.ExitStack()

    def make(name: str = "", **options: Any) -> ProcessNode:
        name = name or f"node-{next(_numbers)}"
        # `machine`: the image of the tests' pods, which is this machine's files.
        options = {"images": {"machine": ImageReplacement()}, "timing": QUICK, **options}
        node = ProcessNode(name, control_plane, tmp_path / name, **options)
        ends.callback(node.stop)
        node.start()
        node.wait_ready()
        return node

    with ends:
        yield make


@pytest.fixture
def pods(control_plane: ControlPlane) -> Iterator[Pods]:
    """The default namespace; pods that the test creates are deleted after it."""
    handle = Pods(control_plane.kubeconfig)
    yield handle
    handle.clear()


@pytest.fixture(scope="session")
def process_clusters() -> Iterator[contextlib.ExitStack]:
    """Ends what `process_cluster` has started."""
    with contextlib.ExitStack() as running:
        yield running


@pytest.fixture(scope="session")
def process_cluster(
    process_clusters: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> EmbeddedCluster:
    """Five process nodes, with Rekindle and the input of the flights example."""
    from cluster_types import flights_cluster

    from rekindle_testing.harness.nodes import ProcessNodes

    directory = tmp_path_factory.mktemp("process-nodes")
    return process_clusters.enter_context(flights_cluster(directory, ProcessNodes(), nodes=5))


@pytest.fixture(scope="module")
def shared_cluster(cluster_type: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With Rekindle and the input of the flights example. All modules share one that is embedded,
    and each begins with all its nodes."""
    from cluster_types import cluster_of_type, prepare_flights

    if cluster_type in ("process", "kubelet"):
        embedded: EmbeddedCluster = request.getfixturevalue(f"{cluster_type}_cluster")
        embedded.restore()
        yield embedded
        return
    with cluster_of_type(cluster_type, request, prepare_flights) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubelet_cluster(
    process_clusters: contextlib.ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    """Five kubelets at Kubernetes' own timings, with Rekindle and the input of the flights example;
    no process nodes are beside them."""
    from cluster_types import DEFAULT_TIMINGS, LEASE_S, flights_cluster, kubelet_nodes

    from rekindle_testing.harness.nodes import NodeResources

    process_clusters.close()
    kind, directory = kubelet_nodes(LEASE_S), tmp_path_factory.mktemp("kubelets")
    resources = NodeResources(cpu="2", memory="8Gi")
    with flights_cluster(
        directory, kind, nodes=5, resources=resources, settings=DEFAULT_TIMINGS
    ) as cluster:
        yield cluster
