"""The cache of compiled specs."""

from __future__ import annotations

from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator import catalog
from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.reconcile.core import reconcile

_TOPOLOGIES = 1100


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of topologies, in the order in which they are compiled."""
    names: list[str] = []

    def compile_one(name: str, _: str) -> catalog.SpecResult:
        names.append(name)
        return catalog.Rejected(())

    monkeypatch.setattr(catalog, "_compile", compile_one)
    monkeypatch.setattr(catalog, "_CACHE", catalog._Cache())
    return names


def run_pass(specs: dict[str, Any]) -> None:
    catalog.start_pass()
    for name, spec in specs.items():
        catalog.compile_spec(name, spec)


def test_each_of_many_specs_is_compiled_once(compiled: list[str]) -> None:
    specs = {f"t{n}": {"n": n} for n in range(_TOPOLOGIES)}
    for _ in range(3):
        run_pass(specs)
    assert len(compiled) == _TOPOLOGIES


def test_a_spec_that_changed_is_compiled_again(compiled: list[str]) -> None:
    run_pass({"a": {"n": 1}, "b": {"n": 1}})
    run_pass({"a": {"n": 2}, "b": {"n": 1}})
    assert compiled == ["a", "b", "a"]


def test_the_cache_is_bounded(compiled: list[str]) -> None:
    for n in range(10 * _TOPOLOGIES):
        run_pass({"edited": {"n": n}, "kept": {}})
    assert len(catalog._CACHE) <= 1026
    assert compiled.count("kept") == 1


def test_a_pass_without_topologies_drops_none(compiled: list[str]) -> None:
    specs = {f"t{n}": {"n": n} for n in range(3 * _TOPOLOGIES)}
    for passed in (specs, {}, {}, specs):
        run_pass(passed)
    assert len(compiled) == len(specs)


def test_each_pass_begins_with_the_cache(cluster: ModelCluster) -> None:
    cluster.settle()
    assert any(name == "flights" for name, _ in catalog._CACHE._used)
    reconcile(Snapshot(), cluster.now)
    assert not catalog._CACHE._used


def test_a_spec_is_still_compiled_before_any_pass() -> None:
    assert isinstance(catalog.compile_spec("flights", flights_spec()), catalog.Compiled)
