"""Who leads, with a real API server that is frozen, and processes that are killed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from operator_world import START_S

from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.harness.operator_process import OperatorProcess, install_crds
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.api

_FROZEN_S = 6.0
_REPLACED_S = 5.0  # 2.5 s, with a margin for a busy machine


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Its own: the tests freeze it."""
    with ControlPlane(tmp_path_factory.mktemp("leadership-plane")) as running:
        install_crds(running)
        yield running


@pytest.fixture(scope="module")
def operators(
    plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[OperatorProcess]]:
    directory = tmp_path_factory.mktemp("operators")
    running = [OperatorProcess(plane.kubeconfig, directory, name) for name in ("first", "second")]
    try:
        for operator in running:
            wait_for("it is ready", lambda o=operator: o.get("/readyz"), START_S)  # type: ignore[misc]
        yield running
    finally:
        for operator in running:
            operator.stop()


def _leaders(operators: list[OperatorProcess]) -> list[OperatorProcess]:
    leading = [o for o in operators if o.leads()]
    assert len(leading) <= 1
    return leading


def test_a_frozen_api_server_ends_no_replica(
    plane: ControlPlane, operators: list[OperatorProcess]
) -> None:
    wait_for("one leads", lambda: _leaders(operators), START_S)
    plane.pause_api_server()
    try:
        wait_for("no replica to act", lambda: not _leaders(operators), _FROZEN_S)
        end = time.monotonic() + _FROZEN_S
        wait_for(
            "the API server to be unavailable for longer than a Lease lasts",
            lambda: not _leaders(operators) and time.monotonic() > end,
            2 * _FROZEN_S,
        )
    finally:
        plane.resume_api_server()
    wait_for("one leads again", lambda: _leaders(operators), START_S)
    assert [o.process.poll() for o in operators] == [None, None]
    assert [o.unexpected_lines() for o in operators] == [[], []]


def test_a_killed_leader_is_soon_replaced(operators: list[OperatorProcess]) -> None:
    (leader,) = wait_for("one leads", lambda: _leaders(operators), START_S)
    (other,) = (o for o in operators if o is not leader)
    began = time.monotonic()
    leader.kill()
    wait_for("the other leads", other.leads, START_S)
    assert time.monotonic() - began < _REPLACED_S


def test_a_leader_that_is_ended_gives_the_leadership_back(
    plane: ControlPlane, operators: list[OperatorProcess]
) -> None:
    """The only one that is left: nobody takes the Lease meanwhile."""
    (leader,) = wait_for("one leads", lambda: _leaders(operators), START_S)
    for other in operators:
        if other is not leader:
            other.kill()
    leader.process.terminate()
    assert leader.process.wait(10) == 0
    holder = ("get", "lease", "rekindle-operator", "-o", "jsonpath={.spec.holderIdentity}")
    assert plane.kubectl(*holder) == ""
    assert leader.unexpected_lines() == []
