"""A run of a topology: what fails in a test is reported, whatever fails after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.harness.run import TopologyRun

_RESOURCE = {"metadata": {"name": "t"}, "spec": {"queries": []}}


class _Cluster:
    """Its API server responds to nothing but `kubectl apply`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []

    def apply(self, resource: dict[str, Any]) -> None:
        pass

    def status(self, name: str) -> dict[str, Any]:
        return {}

    def describe_system(self) -> str:
        return "the system"

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any) -> Any:
            self.calls.append(name)
            raise ConnectionError("the API server does not respond")

        return refuse


def test_an_error_of_the_test_outlives_the_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = _Cluster(tmp_path)
    with (
        pytest.raises(AssertionError, match="what the test found"),
        TopologyRun(cluster, _RESOURCE),  # type: ignore[arg-type]
    ):
        raise AssertionError("what the test found")
    assert "delete_topology" in cluster.calls
    assert "the API server does not respond" in capsys.readouterr().out
    assert "the system" in (tmp_path / "evidence-t.txt").read_text()


def test_a_topology_that_cannot_be_deleted_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), TopologyRun(_Cluster(tmp_path), _RESOURCE):  # type: ignore[arg-type]
        pass
