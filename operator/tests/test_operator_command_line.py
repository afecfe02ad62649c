"""The command line understands the operator's status and the messages of its Events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from model_cluster import ModelCluster
from model_objects import topology_json

from rekindle.cli.status_view import StatusView, read_status
from rekindle.timeline.api_objects import Timeline, read_timeline
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec


def events_of(cluster: ModelCluster) -> list[dict[str, Any]]:
    """As the API server shows them, a second apart."""
    began = datetime.fromtimestamp(cluster.now, UTC)
    return [
        {
            "reason": event.reason,
            "message": event.note,
            "eventTime": (began + timedelta(seconds=n)).isoformat(),
        }
        for n, event in enumerate(cluster.events)
    ]


def view_of(cluster: ModelCluster) -> StatusView:
    document = topology_json(cluster.topologies["flights"])
    topology = compile_topology(load_spec(document["spec"]), "flights")
    return read_status(document, topology, cluster.raw_pods.values(), events_of(cluster))


def timeline_of(cluster: ModelCluster) -> Timeline:
    document = topology_json(cluster.topologies["flights"])
    now = datetime.fromtimestamp(cluster.now, UTC) + timedelta(minutes=1)
    return read_timeline(document, events_of(cluster), [], now)


def test_a_running_topology_has_all_tasks_on_nodes(running: ModelCluster) -> None:
    view = view_of(running)
    tasks = [t for q in view.queries for s in q.segments for t in s.tasks]
    assert {t.phase for t in tasks} == {"Live"}
    assert {t.node for t in tasks} == {"a", "b", "c"}
    assert view.unqueried_segments == ()


def test_a_loss_shows_the_plan_and_the_operators_reason(running: ModelCluster) -> None:
    running.binding = False
    for node in "ab":
        running.kill_node_until_not_ready(node)
    running.settle()
    view = view_of(running)
    assert view.phase == "Recovering"
    assert view.recovery is not None
    assert view.recovery.lost_nodes == ("a", "b")
    assert view.recovery.plan == ("delay-alarms", "storm-watch", "route-report")
    assert "delay-alarms starts now (profit density" in view.recovery.plan_message


def test_a_silent_coordinator_is_shown(running: ModelCluster) -> None:
    running.reports_lost = True
    running.pass_time(60)
    running.settle()
    view = view_of(running)
    assert view.phase == "Unknown"
    assert {q.state for q in view.queries} == {"Unknown"}
    assert "NoReport" in {c.reason for c in view.conditions}


def test_the_timeline_has_each_loss_and_return(running: ModelCluster) -> None:
    for node in "ab":
        running.kill_node_until_not_ready(node)
    running.settle()
    history = timeline_of(running).history
    states = [c.state for c in history.changes if c.query == "storm-watch"]
    assert states == ["Waiting", "Live", "Waiting", "Live"]
    lost = [m.text for m in history.events if m.kind == "lost"]
    assert lost == ["a and b lost"]
    assert "coordinator replaced" in [m.text for m in history.events]
