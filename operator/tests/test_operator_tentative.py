"""Queries that go on without an input: their state, their Event, and what they wait for."""

from __future__ import annotations

from model_cluster import ModelCluster

from rekindle.protocol import ConsistencyState
from rekindle.report import read_report
from rekindle_operator.reconcile.phases import QUERY_TRANSITIONS, QueryChange
from rekindle_operator.topology_status import QueryState

TENTATIVE = {"outputState": "UP_FAILURE", "missingInputs": ["left"]}


def report(cluster: ModelCluster, **task: object) -> None:
    """The coordinator reports these fields of each task."""
    name = next(iter(cluster.topologies))
    cluster.task_reports = {pod.name: task for pod in cluster.tasks(name).values()}
    cluster.pass_time(1.0)
    cluster.settle()


def waiting_for(cluster: ModelCluster) -> dict[str, str]:
    return {q["name"]: q.get("waitingFor", "") for q in cluster.status()["queries"]}


def test_a_query_whose_tasks_lack_an_input_is_tentative(running: ModelCluster) -> None:
    report(running, **TENTATIVE)
    assert set(running.query_states().values()) == {"Tentative"}
    assert all("input left of " in text for text in waiting_for(running).values())
    assert "QueryTentative" in running.event_reasons()
    available = next(c for c in running.status()["conditions"] if c["type"] == "Available")
    assert available["status"] == "False"
    report(running)
    assert set(running.query_states().values()) == {"Live"}


def test_a_correction_is_waited_for(running: ModelCluster) -> None:
    report(running, outputState="STABILIZATION")
    assert all("the correction of " in text for text in waiting_for(running).values())


def test_a_status_with_many_missing_inputs_is_not_refused(running: ModelCluster) -> None:
    """Otherwise no lost task could be replaced: its incarnation is reserved in the status."""
    names = [f"{n:0>40}" for n in range(16)]
    report(running, outputState="UP_FAILURE", missingInputs=names)
    assert set(running.query_states().values()) == {"Tentative"}
    assert max(map(len, waiting_for(running).values())) == 1024


def test_a_report_of_an_older_coordinator_is_stable() -> None:
    entry = {"slot": "seg/0/0", "incarnation": 1, "phase": "Live"}
    stable = read_report({"tasks": [entry]}).tasks["seg/0/0"].output_state
    assert stable == ConsistencyState.STABLE
    newer = {**entry, "outputState": "UP_FAILURE", "missingInputs": "left"}
    task = read_report({"tasks": [newer]}).tasks["seg/0/0"]
    assert (task.output_state, task.missing_inputs) == ("UP_FAILURE", ())


def test_a_tentative_query_can_become_anything() -> None:
    row = QUERY_TRANSITIONS[QueryState.TENTATIVE]
    assert set(row) == set(QueryState)
    assert row[QueryState.LIVE] == (QueryChange.LIVE,)
