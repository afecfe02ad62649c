"""The executor on the model cluster: API errors by verb, late binding, stalled watches."""

from __future__ import annotations

import pytest
from flights_example import flights_spec
from model_api import ApiError, ModelOperator
from test_operator_model_cluster import ModelCluster


@pytest.fixture
def operator(cluster: ModelCluster) -> ModelOperator:
    for name in "abc":
        cluster.add_node(name)
    return ModelOperator(cluster)


def test_a_topology_starts_through_the_api(operator: ModelOperator) -> None:
    operator.run(10.0)
    assert operator.model.status()["phase"] == "Running"
    assert operator.api.made("PATCH", "/pods/"), "gates were opened by patches"


def test_pods_that_bind_late_are_not_made_anew(operator: ModelOperator) -> None:
    operator.model.binding_delay_s = 3.0
    operator.run(12.0)
    assert operator.model.status()["phase"] == "Running"
    assert {p.incarnation for p in operator.model.tasks().values()} == {1}


def test_a_topology_starts_when_creating_pods_is_allowed_again(operator: ModelOperator) -> None:
    operator.api.errors = [ApiError("POST", "/pods", 500)]
    operator.run(5.0)
    assert not operator.model.raw_pods
    operator.api.errors.clear()
    operator.run(60.0)
    assert operator.model.status()["phase"] == "Running"


def test_one_topology_that_is_refused_holds_up_no_other(operator: ModelOperator) -> None:
    operator.model.add_topology("second", flights_spec())
    operator.api.errors = [ApiError("PATCH", "/flights/status", 403)]
    for name in "def":
        operator.model.add_node(name)
    operator.run(12.0)
    assert operator.model.status("second")["phase"] == "Running"
    assert not operator.model.tasks("flights")
