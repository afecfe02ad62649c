"""A status replaces only the one from which it was decided."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_api import ModelOperator
from model_cluster import ModelCluster

from rekindle_operator.loop import decide
from rekindle_operator.reconcile.actions import TopologyActions, WriteStatus
from rekindle_testing.waiting import wait_for


@pytest.fixture
def operator(cluster: ModelCluster) -> ModelOperator:
    for name in "abc":
        cluster.add_node(name)
    made = ModelOperator(cluster)
    made.run(6.0)
    assert cluster.status()["phase"] == "Running"
    return made


def reserved(cluster: ModelCluster) -> dict[str, int]:
    return {s["slot"]: s["incarnation"] for s in cluster.status()["slots"]}


def decided(operator: ModelOperator) -> list[TopologyActions]:
    model = operator.model
    operator.deliver()
    return decide(operator.snapshot, operator.uncached, lambda: model.now, model.settings)[1]


def test_a_late_status_of_an_earlier_leader_removes_no_reservation(
    operator: ModelOperator,
) -> None:
    model, earlier = operator.model, ModelOperator(operator.model)
    model.edit("flights", suspend=True)
    late = decided(earlier)
    assert any(isinstance(a, WriteStatus) for d in late for a in d.actions)
    model.edit("flights", suspend=False, operators=_with_more_partitions())
    operator.run(6.0)
    before = reserved(model)
    assert len(before) > 8
    earlier.executor.run(late)
    assert reserved(model) == before


def test_a_report_does_not_delay_the_status(operator: ModelOperator) -> None:
    model = operator.model
    model.edit("flights", suspend=True)
    actions = decided(operator)
    view = model.topologies["flights"]
    model.topologies["flights"] = replace(view, version=model.next_version())
    operator.executor.run(actions)
    assert model.status()["observedGeneration"] == model.topologies["flights"].generation


def report_after_each_read(
    operator: ModelOperator, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The coordinator reports so often that the version that was just read is old at once."""
    model, call_api = operator.model, operator.api.call_api
    left = [times]

    def call(method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        response = call_api(method, url, *args, **kwargs)
        if method == "GET" and url.endswith("/flights") and left[0]:
            left[0] -= 1
            view = model.topologies["flights"]
            model.topologies["flights"] = replace(view, version=model.next_version())
        return response

    monkeypatch.setattr(operator.api, "call_api", call)


@pytest.mark.parametrize(("reports", "written"), [(6, True), (1000, False)])
def test_many_reports_delay_the_status_within_limits(
    operator: ModelOperator, monkeypatch: pytest.MonkeyPatch, reports: int, written: bool
) -> None:
    model = operator.model
    model.edit("flights", suspend=True)
    actions = decided(operator)
    view = model.topologies["flights"]
    model.topologies["flights"] = replace(view, version=model.next_version())
    report_after_each_read(operator, monkeypatch, reports)
    before = len(operator.api.calls_of("PATCH", "/status"))
    operator.executor.run(actions)
    generation = model.topologies["flights"].generation
    assert (model.status()["observedGeneration"] == generation) is written
    assert len(operator.api.calls_of("PATCH", "/status")) - before <= 8


def test_a_slow_status_costs_no_incarnation(
    operator: ModelOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass ends before the write does, so the pod waits for the next one."""
    model, call_api, written = operator.model, operator.api.call_api, threading.Event()

    def call(method: str, url: str, *args: Any, **kwargs: Any) -> Any:
        if method == "PATCH" and "/status" in url:
            written.wait(10.0)
        return call_api(method, url, *args, **kwargs)

    monkeypatch.setattr(operator.api, "call_api", call)
    lost = min(model.tasks())
    del model.raw_pods[lost]
    before = reserved(model)
    operator.run_pass()
    assert reserved(model) == before
    written.set()
    wait_for("the status", lambda: reserved(model) != before, 10.0)
    operator.run(1.0)
    assert sum(reserved(model).values()) == sum(before.values()) + 1
    assert len(model.tasks()) == 8


def _with_more_partitions() -> list[dict[str, object]]:
    return [
        {**o, **({"partitions": 4} if "keyBy" in o else {})} for o in flights_spec()["operators"]
    ]
