"""A topology on a model cluster, for tests of reconcile."""

from __future__ import annotations

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build


@pytest.fixture
def cluster() -> ModelCluster:
    made = ModelCluster()
    made.add_topology("flights", flights_spec())
    return made


@copy_of_one_build
def settled() -> ModelCluster:
    made = ModelCluster()
    made.add_topology("flights", flights_spec())
    for name in "abc":
        made.add_node(name)
    made.settle()
    assert made.status()["phase"] == "Running"
    return made


@pytest.fixture
def running() -> ModelCluster:
    """A copy of its own: the test may change it."""
    return settled()
