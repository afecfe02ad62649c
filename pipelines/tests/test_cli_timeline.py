"""`rekindle timeline`: a history from status and Events, and its drawing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster_documents import FakeApiServer, Observed, served

from rekindle.cli import main
from rekindle.timeline.api_objects import Timeline, event_time, read_timeline
from rekindle.timeline.picture import label_positions


def timeline_of(observed: Observed, since: datetime | None = None) -> Timeline:
    return read_timeline(observed.topology, observed.events, observed.nodes, observed.now, since)


def changes_of(timeline: Timeline, query: str) -> list[tuple[str, int]]:
    return [(c.state, round(c.at_s)) for c in timeline.history.changes if c.query == query]


def test_a_query_has_the_states_of_its_events() -> None:
    timeline = timeline_of(Observed("running"))
    assert changes_of(timeline, "storm-watch") == [
        ("Waiting", 0),
        ("Restoring", 2),
        ("Live", 77),
        ("Waiting", 126),
        ("Restoring", 137),
        ("Live", 168),
    ]
    assert changes_of(timeline, "delay-alarms")[-1] == ("Live", 96)


def test_the_first_start_of_a_query_is_no_restore() -> None:
    observed = Observed("running")
    of_query = (e for e in observed.events if e["message"].startswith("storm-watch is coming up;"))
    first = min(of_query, key=lambda e: str(event_time(e)))
    first["message"] = first["message"].replace("is coming up;", "is starting;")
    changes = changes_of(timeline_of(observed), "storm-watch")
    assert changes[1] == ("Starting", 2)
    assert ("Restoring", 137) in changes


def test_queries_are_drawn_by_priority() -> None:
    history = timeline_of(Observed("running")).history
    assert history.queries() == ["delay-alarms", "storm-watch", "route-report"]


def test_nodes_that_are_lost_together_share_a_mark() -> None:
    events = timeline_of(Observed("running")).history.events
    assert [e.text for e in events if e.kind == "lost"] == ["5 nodes lost"]
    assert [e.text for e in events if e.kind == "joined"][:2] == [
        "node-10 joined",
        "node-11 joined",
    ]


def test_seconds_count_from_creation_while_events_reach_back_to_it() -> None:
    timeline = timeline_of(Observed("running"))
    assert timeline.time_axis == "seconds since the topology was created"
    assert timeline.began.isoformat() == "2026-11-22T12:25:13+00:00"


def test_the_last_state_is_the_current_status() -> None:
    observed = Observed("running")
    observed.status["queries"][0]["state"] = "Unknown"
    query = observed.status["queries"][0]["name"]
    assert changes_of(timeline_of(observed), query)[-1][0] == "Unknown"


def test_an_outage_without_events_is_drawn_from_its_beginning() -> None:
    observed = Observed("running")
    query = observed.status["queries"][0]
    query |= {"state": "Waiting", "since": "2026-11-22T12:29:00Z"}
    timeline = timeline_of(observed)
    lost_s = (datetime(2026, 11, 22, 12, 29, tzinfo=UTC) - timeline.began).total_seconds()
    assert changes_of(timeline, query["name"])[-1] == ("Waiting", round(lost_s))


def test_catching_up_is_drawn_as_restoring() -> None:
    observed = Observed("recovering")
    assert observed.status["queries"][1]["state"] == "CatchingUp"
    assert changes_of(timeline_of(observed), "storm-watch")[-1][0] == "Restoring"


def test_a_drawing_since_a_time_begins_with_the_states_at_that_time() -> None:
    observed = Observed("running")
    lost = datetime(2026, 11, 22, 12, 27, 25, tzinfo=UTC)
    timeline = timeline_of(observed, since=lost)
    assert changes_of(timeline, "storm-watch")[0] == ("Waiting", 0)
    assert changes_of(timeline, "delay-alarms") == [("Live", 0)]
    assert timeline.time_axis == "seconds since 2026-11-22 12:27:25 UTC"


def test_without_events_the_recovery_history_is_drawn() -> None:
    observed = Observed("running")
    observed.events = []
    entry = observed.status["recovery"]["history"][0]
    timeline = timeline_of(observed)
    assert [m.text for m in timeline.history.events][:1] == ["5 nodes lost"]
    states = [state for state, _ in changes_of(timeline, "storm-watch")]
    assert states == ["Live", "Waiting", "Live"]
    took = next(q["liveAfter"] for q in entry["queries"] if q["name"] == "storm-watch")
    lost, live = (at_s for _, at_s in changes_of(timeline, "storm-watch")[1:])
    assert live - lost == round(float(took.removesuffix("s")))


def test_events_of_another_release_are_left_out() -> None:
    observed = Observed("running")
    before = changes_of(timeline_of(observed), "storm-watch")
    strange: list[dict[str, Any]] = [
        {},
        {"reason": "QueryLost", "message": "", "eventTime": "2026-11-22T12:26:00Z"},
        {"reason": "QueryLost", "message": "storm-watch is down", "eventTime": "noon"},
        {"reason": "QueryLost", "message": "nothing is down", "eventTime": "2026-11-22T12:26:00Z"},
        {"reason": "NodeLost", "message": "node", "eventTime": "2026-11-22T12:26:00Z"},
    ]
    observed.events += strange
    assert changes_of(timeline_of(observed), "storm-watch") == before


@pytest.mark.process
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_command_writes_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    observed = Observed("running")
    out = tmp_path / f"pictures/flights.{ending}"
    with served(FakeApiServer(observed), tmp_path) as config:
        where = ["--kubeconfig", str(config), "--context", "test"]
        assert main(["timeline", "flights", *where, "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 3 queries, seconds since the topology")
    assert out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_labels_of_marks_at_one_time_are_side_by_side() -> None:
    assert label_positions([10, 10, 11, 50], 100) == [10, 11.5, 13, 50]
    assert label_positions([], 100) == []


@pytest.mark.process
def test_since_is_a_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observed = Observed("running")
    out = str(tmp_path / "t.svg")
    with served(FakeApiServer(observed), tmp_path) as config:
        where = ["--kubeconfig", str(config), "--context", "test", "-o", out]
        assert main(["timeline", "flights", *where, "--since", "15m"]) == 0
        with pytest.raises(SystemExit):
            main(["timeline", "flights", *where, "--since", "soon"])
    began = datetime.now(UTC) - timedelta(minutes=15)
    assert f"{began:%Y-%m-%d}" in capsys.readouterr().out


def test_without_queries_there_is_nothing_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observed = Observed("starting")
    observed.topology["status"], observed.events = {}, []
    with served(FakeApiServer(observed), tmp_path) as config:
        where = ["--kubeconfig", str(config), "--context", "test"]
        assert main(["timeline", "flights", *where]) == 1
    assert "flights has no queries in its status yet" in capsys.readouterr().err
