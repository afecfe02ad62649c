"""Repeated failures of actions are reported in the condition Degraded."""

from __future__ import annotations

import pytest
from model_api import ApiError, ModelOperator
from model_cluster import ModelCluster

from rekindle_operator.cluster.failures import ActionFailures


@pytest.fixture
def operator(cluster: ModelCluster) -> ModelOperator:
    for name in "abc":
        cluster.add_node(name)
    made = ModelOperator(cluster)
    made.run(6.0)
    assert cluster.status()["phase"] == "Running"
    return made


def test_a_repeatedly_refused_deletion_is_reported(operator: ModelOperator) -> None:
    operator.api.errors = [ApiError("DELETE", "/pods/", 403, "deletion is forbidden here")]
    operator.model.kill_node_until_not_ready("b")
    operator.run(8.0)
    degraded = operator.model.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ActionFailed")
    assert "DeletePod" in degraded["message"]
    assert "403 deletion is forbidden here" in degraded["message"]
    operator.api.errors.clear()
    operator.run(60.0)
    assert operator.model.condition("Degraded")["status"] == "False"


def test_single_and_old_failures_are_not_reported() -> None:
    failures = ActionFailures()
    failures.failed("default/t", "DeletePod u", "409 conflict", now=0.0)
    assert failures.by_topology(1.0) == {}
    failures.failed("default/t", "DeletePod u", "409 conflict", now=2.0)
    assert failures.by_topology(3.0) == {"default/t": "DeletePod u fails: 409 conflict"}
    failures.failed("default/t", "OpenGate v", "500", now=60.0)
    failures.succeeded("OpenGate v")
    assert failures.by_topology(93.0) == {}
