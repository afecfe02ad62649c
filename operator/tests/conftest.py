"""A topology on a model cluster, for tests of reconcile."""

from __future__ import annotations

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_testing.fixtures.built_once import built_once


@pytest.fixture
def cluster() -> ModelCluster:
    made = ModelCluster()
    made.add_topology("flights", flights_spec())
    return made


@built_once
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
