"""The lag of queries: the age of their newest complete result, whatever runs."""

from __future__ import annotations

from typing import Any

import pytest
from model_cluster import ModelCluster

from rekindle_operator.cluster.convert import parse_time
from rekindle_operator.reconcile import core
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.core import reconcile

QUERY = "route-report"


def lag_s(cluster: ModelCluster) -> float:
    (query,) = (q for q in cluster.status()["queries"] if q["name"] == QUERY)
    assert query["lag"] == cluster.status()["lag"]
    return float(query["lag"].removesuffix("s"))


@pytest.fixture
def reporting(running: ModelCluster) -> ModelCluster:
    """The last epoch has ended a second ago, and is in the sink."""
    origin = parse_time(running.topologies["flights"].creation_timestamp)
    report(running, {"stableEpoch": int(running.now - origin) - 2}, lag=0.4)
    assert lag_s(running) == 0.4
    return running


def report(cluster: ModelCluster, query: dict[str, Any], lag: float) -> None:
    cluster.query_reports, cluster.lags_s = {QUERY: query}, {QUERY: lag}
    cluster.pass_time(0.0)
    cluster.settle()


def lose_all_nodes(cluster: ModelCluster) -> None:
    for name in list(cluster.nodes):
        cluster.kill_node_until_not_ready(name)
    cluster.settle()


def test_the_lag_grows_while_neither_tasks_nor_coordinator_run(reporting: ModelCluster) -> None:
    lose_all_nodes(reporting)
    for seconds in (10.0, 60.0):
        before = lag_s(reporting)
        reporting.pass_time(seconds)
        reporting.settle()
        assert lag_s(reporting) == before + seconds
    assert lag_s(reporting) == 71.0
    assert "Live" not in reporting.query_states().values()


def test_a_coordinator_without_tasks_knows_no_better(reporting: ModelCluster) -> None:
    """A new one: it knows the newest checkpoint, and no source that runs."""
    epoch = reporting.query_reports[QUERY]["stableEpoch"]
    lose_all_nodes(reporting)
    reporting.add_node("d", cpu_m=200)  # only for a coordinator
    reporting.settle()
    reporting.pass_time(30.0)
    report(reporting, {"stableEpoch": epoch - 20}, lag=0.0)
    assert reporting.coordinator().node == "d"
    assert reporting.condition("Available")["reason"] == "QueriesDown"
    assert lag_s(reporting) == 31.0


def test_a_query_without_any_result_lags_since_its_acceptance(running: ModelCluster) -> None:
    accepted_at = parse_time(running.condition("Valid")["lastTransitionTime"])
    lose_all_nodes(running)
    running.add_node("d", cpu_m=200)
    running.settle()
    running.pass_time(30.0)
    report(running, {"stableEpoch": -1}, lag=0.0)
    assert lag_s(running) == running.now - accepted_at


def test_what_is_finished_does_not_lag(reporting: ModelCluster) -> None:
    epoch = reporting.query_reports[QUERY]["stableEpoch"]
    report(reporting, {"stableEpoch": epoch, "finished": True}, lag=0.4)
    reporting.query_reports = {}
    lose_all_nodes(reporting)
    reporting.pass_time(60.0)
    reporting.settle()
    assert lag_s(reporting) == 0.0
    spec = reporting.topologies["flights"].spec
    queries = [{**q, "priority": 7} for q in spec["queries"]]
    reporting.edit("flights", queries=queries)
    reporting.settle()
    assert lag_s(reporting) > 60.0, "another generation is not known to be finished"


def test_the_lag_grows_while_passes_fail(
    reporting: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(core, "_decide", fail)
    reporting.settle()
    for seconds in (10.0, 60.0):
        reporting.pass_time(seconds)
        (write,) = reconcile(reporting.snapshot(), reporting.now)
        assert isinstance(write, WriteStatus)
        assert not write.urgent, "only numbers have changed"
        reporting.apply([write])
    assert reporting.condition("Available")["reason"] == "ReconcileFailed"
    assert lag_s(reporting) == 71.0


def test_the_age_of_a_late_report_adds_to_the_lag(reporting: ModelCluster) -> None:
    reporting.reports_lost = True
    reporting.now += 4.0
    reporting.settle()
    assert reporting.query_states()[QUERY] == "Live"
    assert lag_s(reporting) == 4.4
