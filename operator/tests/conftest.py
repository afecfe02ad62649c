"""A topology on a model cluster, for tests of reconcile."""

from __future__ import annotations

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster


@pytest.fixture
def cluster() -> ModelCluster:
    made = ModelCluster()
    made.add_topology("flights", flights_spec())
    return made


@pytest.fixture
def running(cluster: ModelCluster) -> ModelCluster:
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    return cluster
