"""Events about queries and nodes: each loss has its own."""

from __future__ import annotations

from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator.reconcile.actions import EmitEvent
from rekindle_operator.reconcile.core import reconcile

QUERY = "delay-alarms"


def pass_by(cluster: ModelCluster, seconds: float, step_s: float = 0.5) -> None:
    for _ in range(round(seconds / step_s)):
        cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
        cluster.kubelets_and_scheduler()
        cluster.pass_time(step_s)


def events_of(cluster: ModelCluster, reason: str, about: str = QUERY) -> list[EmitEvent]:
    return [e for e in cluster.events if e.reason == reason and about in e.note]


def nodes_of_alarms(cluster: ModelCluster) -> set[str]:
    tasks = cluster.tasks().values()
    return {p.node for p in tasks if p.segment_name == "alarms" and p.node is not None}


def edit_alarms(cluster: ModelCluster) -> None:
    spec = flights_spec()
    operator = next(o for o in spec["operators"] if o["name"] == "alarms")
    operator["sql"] = operator["sql"].replace("delay > 30", "delay > 31")
    cluster.edit("flights", operators=spec["operators"])
    cluster.settle()
    assert cluster.status()["phase"] == "Running"


def test_a_loss_after_an_edit_has_its_own_event(running: ModelCluster) -> None:
    edit_alarms(running)
    before = len(events_of(running, "QueryLost"))
    running.pass_time(60.0)
    pass_by(running, 2.0)
    for node in nodes_of_alarms(running):
        running.kill_node_still_ready(node)
    pass_by(running, 10.0)
    assert len(events_of(running, "QueryLost")) == before + 1


def test_the_time_to_be_live_is_that_since_its_own_loss(running: ModelCluster) -> None:
    running.unbound_segments = {"alarms"}
    for pod in running.tasks().values():
        if pod.segment_name == "alarms":
            running.delete_pod(pod.name, pod.uid, 0)
    pass_by(running, 10.0)
    assert running.query_states()[QUERY] == "Restoring"
    since = next(q["since"] for q in running.status()["queries"] if q["name"] == QUERY)
    assert since.startswith("2027-01-15T08:00:00")
    assert f"{QUERY} is being restored;" in events_of(running, "QueryRestoring")[-1].note
    running.unbound_segments = set()
    pass_by(running, 40.0)
    event = events_of(running, "QueryLive")[-1]
    took_s = float(event.note.partition(" is live, ")[2].partition("s after the loss")[0])
    assert 10.0 <= took_s <= 50.0
    assert "since" not in next(q for q in running.status()["queries"] if q["name"] == QUERY)
    # Much later a hiccup, in which nothing is lost.
    running.pass_time(300.0)
    pass_by(running, 1.0)
    announced = list(running.events)
    running.reports_lost = True
    pass_by(running, 4.0)
    assert running.query_states()[QUERY] == "Unknown"
    running.reports_lost = False
    pass_by(running, 4.0)
    assert running.query_states()[QUERY] == "Live"
    assert running.events == announced


def test_a_query_that_was_never_live_is_starting(cluster: ModelCluster) -> None:
    cluster.unbound_segments = {"alarms"}
    for name in "abc":
        cluster.add_node(name)
    pass_by(cluster, 10.0)
    notes = {e.note.partition(";")[0] for e in events_of(cluster, "QueryRestoring")}
    assert notes == {f"{QUERY} is starting"}


def test_a_suspension_is_no_loss(running: ModelCluster) -> None:
    running.edit("flights", suspend=True)
    running.settle()
    pass_by(running, 60.0, step_s=10.0)
    running.edit("flights", suspend=False)
    running.settle()
    assert running.status()["phase"] == "Running"
    notes = [e.note for e in events_of(running, "QueryLive")]
    assert len(notes) == 2
    assert not [note for note in notes if "after the loss" in note]


def test_the_cause_of_an_outage_is_in_available_and_in_one_event(running: ModelCluster) -> None:
    """As of a missing input file: the task goes on trying, and numbers in its words change."""
    files = [p for p in running.tasks().values() if p.segment_name == "routes"]
    for attempt in range(1, 4):
        problem = f"departures: /data/flights.csv does not exist, attempt {attempt}"
        report = {"phase": "CatchingUp", "problem": problem}
        running.task_reports = {p.name: report for p in files}
        running.pass_time(2.0)
        running.settle()
        message = running.condition("Ready")["message"]
        assert message.startswith("not live: route-report (CatchingUp); route-report waits for ")
        assert problem in message
    (event,) = events_of(running, "QueryBlocked", "route-report")
    assert event.warning
    assert "flights.csv does not exist, attempt 1" in event.note
    report = {"phase": "CatchingUp", "problem": "the sink has another topology's files"}
    running.task_reports = {p.name: report for p in files}
    running.pass_time(2.0)
    running.settle()
    assert len(events_of(running, "QueryBlocked", "route-report")) == 2


def test_a_node_that_is_lost_twice_in_a_recovery_has_two_events(running: ModelCluster) -> None:
    running.unbound_segments = {"routes"}  # keeps the recovery open
    victims = [p for p in running.tasks().values() if p.segment_name == "routes"]
    for pod in victims:
        running.delete_pod(pod.name, pod.uid, 0)
    pass_by(running, 2.0)
    running.kill_node_until_not_ready("a")
    pass_by(running, 4.0)
    assert len(events_of(running, "NodeLost", "node a ")) == 1
    running.dead.discard("a")
    running.turn_ready("a")
    running.kill_node_until_not_ready("b")
    pass_by(running, 60.0)
    assert any(p.node == "a" for p in running.tasks().values())
    running.kill_node_until_not_ready("a")
    pass_by(running, 4.0)
    started = {e["startedAt"] for e in running.status()["recovery"]["history"]}
    assert len(started) == 1
    assert len(events_of(running, "NodeLost", "node a ")) == 2
