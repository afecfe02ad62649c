"""`rekindle status`: from a topology's objects to the text in the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster_documents import TOPOLOGIES, FakeApiServer, Observed, kubeconfig, served
from rich.console import Console

from rekindle.cli import main
from rekindle.cli.status_tree import MAX_LIVE_TASKS, render_status
from rekindle.cli.status_view import StatusView, read_status

DOCS = Path(__file__).parents[2] / "docs/command-line.md"


def view_of(observed: Observed, *, compiled: bool = True) -> StatusView:
    topology = observed.compiled() if compiled else None
    return read_status(observed.topology, topology, observed.pods, observed.events)


def text_of(
    observed: Observed, *, compiled: bool = True, max_live_tasks: int = MAX_LIVE_TASKS
) -> str:
    console = Console(width=100, color_system=None, highlight=False)
    with console.capture() as capture:
        view = view_of(observed, compiled=compiled)
        console.print(render_status(view, observed.now, max_live_tasks=max_live_tasks))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


# --- the view ------------------------------------------------------------------


def test_queries_are_listed_by_priority_with_their_segments() -> None:
    view = view_of(Observed("lost"))
    assert [q.name for q in view.queries] == ["delay-alarms", "storm-watch", "route-report"]
    assert [s.name for s in view.queries[2].segments] == ["flown", "routes"]
    assert view.unqueried_segments == ()


def test_a_task_has_its_phase_pod_node_and_epoch() -> None:
    flown = view_of(Observed("lost")).queries[0].segments[0]
    replaced, survivor = flown.tasks
    assert (survivor.name, survivor.phase, survivor.node) == ("0/1", "Live", "node-9")
    assert survivor.epoch == 129
    assert (replaced.phase, replaced.pod, replaced.node) == ("Waiting", "flights-flown-0-0-2", "")
    assert replaced.remark == "its pod is not scheduled yet"


def test_the_recovery_has_its_plan_and_the_reason_for_it() -> None:
    recovery = view_of(Observed("lost")).recovery
    assert recovery is not None
    assert (recovery.mode, recovery.plan) == ("Progressive", ("storm-watch", "route-report"))
    assert recovery.plan_message.startswith("storm-watch waits for capacity (profit density 132)")


def test_what_a_query_lacks_since_an_edit_is_shown() -> None:
    observed = Observed("running")
    query = observed.status["queries"][0]
    epochs = {"fromEpoch": 40, "toEpoch": 43, "sinceGeneration": 2}
    times = {"from": "2010-02-13T00:00:00Z", "to": "2010-02-21T00:00:00Z"}
    query["missing"] = [epochs | times, epochs]
    view = next(q for q in view_of(observed).queries if q.name == query["name"])
    assert view.missing == (
        "lacks results from 2010-02-13T00:00:00Z to 2010-02-21T00:00:00Z (epochs 40 to 43), since "
        "generation 2 began anew",
        "lacks results of epochs 40 to 43, since generation 2 began anew",
    )
    assert "lacks results of epochs 40 to 43" in text_of(observed)


def test_a_plan_of_an_older_recovery_is_not_shown() -> None:
    observed = Observed("lost")
    for event in observed.events:
        event["eventTime"] = "2026-11-22T12:00:00.000000Z"
    recovery = view_of(observed).recovery
    assert recovery is not None
    assert (recovery.plan_message, recovery.planned_at) == ("", None)


def test_a_finished_recovery_is_not_shown() -> None:
    observed = Observed("running")
    assert observed.status["recovery"]["history"]
    assert view_of(observed).recovery is None


def test_healthy_conditions_are_not_shown() -> None:
    assert view_of(Observed("running")).conditions == ()
    assert [c.type for c in view_of(Observed("lost")).conditions] == ["Available", "Redundant"]


def test_reports_of_older_incarnations_are_ignored() -> None:
    observed = Observed("running")
    pod = next(p for p in observed.pods if p["metadata"]["name"] == "flights-storms-0-0-2")
    pod["metadata"]["labels"]["rekindle.dev/incarnation"] = "3"
    task = view_of(observed).queries[1].segments[0].tasks[0]
    assert (task.phase, task.epoch) == ("Starting", None)


def test_a_silent_task_shows_for_how_long() -> None:
    observed = Observed("running")
    report = observed.status["dataPlane"]["tasks"][0]
    report |= {"suspected": True, "silentSeconds": 1.6, "problem": "alarms: no room on the disk"}
    task = view_of(observed).queries[0].segments[1].tasks[0]
    assert task.remark == "no response for 1.6 s; alarms: no room on the disk"


def test_what_a_restart_would_cost_is_shown() -> None:
    observed = Observed("running")
    assert view_of(observed).restart is None, "an older coordinator does not report it"
    for report, size, after in zip(
        observed.status["dataPlane"]["tasks"], (14 << 20, 2048), (229, 236), strict=False
    ):
        report |= {"replayFrom": after, "replaySeconds": size / 2**20, "stateBytes": size}
    shown = text_of(observed)
    assert "a restart        loads 14.0 MiB, replays 8 epochs in 14 s, at most" in shown
    tasks = " ".join(word for word in shown.split() if word.isascii())
    assert "on node-12 a restart loads 14.0 MiB, replays 8 epochs 0/1" in tasks
    assert "on node-3 a restart loads 2.0 KiB, replays 1 epoch 1/0" in tasks


def test_a_task_shows_what_its_source_has_not_read_and_left_out() -> None:
    observed = Observed("running")
    report = observed.status["dataPlane"]["tasks"][0]
    report |= {"sourceBehind": 1200, "badRecords": 3, "badRecord": "offset 7: no number"}
    task = view_of(observed).queries[0].segments[1].tasks[0]
    assert task.remark == (
        "1,200 offsets behind the end of its topic; 3 bad records, such as offset 7: no number"
    )


def test_a_task_shows_the_key_that_most_of_its_rows_have() -> None:
    observed = Observed("running")
    observed.status["dataPlane"]["tasks"][0]["hotKey"] = "operator delays, partition 0: ..."
    task = view_of(observed).queries[0].segments[1].tasks[0]
    assert task.remark == "operator delays, partition 0: ..."


def test_a_task_shows_how_far_its_tentative_results_are() -> None:
    observed = Observed("running")
    report = observed.status["dataPlane"]["tasks"][0]
    report["tentativeEpoch"] = 256
    task = view_of(observed).queries[0].segments[1].tasks[0]
    assert (task.phase, task.remark) == ("Live", "tentative through epoch 256")
    assert "tentative" in text_of(observed, max_live_tasks=0)


def test_a_topology_without_a_status_shows_its_spec() -> None:
    observed = Observed("starting")
    observed.topology["status"] = {}
    observed.pods, observed.events = [], []
    view = view_of(observed)
    assert view.phase == "no status yet"
    assert [q.name for q in view.queries] == ["delay-alarms", "storm-watch", "route-report"]
    assert {t.phase for q in view.queries for s in q.segments for t in s.tasks} == {""}


def test_a_task_that_has_moved_is_shown_under_its_new_number_alone() -> None:
    observed = Observed("running")
    (storms,) = (p for p in observed.pods if p["metadata"]["name"].startswith("flights-storms-"))
    storms["metadata"]["labels"]["rekindle.dev/replica"] = "8"
    for task in observed.topology["status"]["dataPlane"]["tasks"]:
        if task["pod"] == storms["metadata"]["name"]:
            task["slot"] = f"{task['slot'].rpartition('/')[0]}/8"
    (line,) = (s for s in view_of(observed).queries[1].segments if s.name == "storms")
    assert [(t.name, t.phase) for t in line.tasks] == [("0/8", "Live")]


def test_tasks_are_shown_if_the_spec_does_not_compile() -> None:
    view = view_of(Observed("lost"), compiled=False)
    assert [q.segments for q in view.queries] == [(), (), ()]
    unqueried = sorted(s.name for s in view.unqueried_segments)
    assert unqueried == ["alarms", "flown", "routes", "storms"]
    assert sum(len(s.tasks) for s in view.unqueried_segments) == 8


def test_without_the_right_to_list_pods_the_report_is_shown() -> None:
    observed = Observed("running")
    observed.pods = []
    task = view_of(observed).queries[1].segments[0].tasks[0]
    assert (task.phase, task.pod, task.node) == ("Live", "flights-storms-0-0-2", "")


def older(status: dict[str, Any]) -> dict[str, Any]:
    """A status of an older release."""
    return {
        "phase": status["phase"],
        "queries": [{"name": q["name"]} for q in status["queries"]],
        "recovery": {"startedAt": "yesterday", "plan": "storm-watch"},
        "checkpoint": {"epoch": "seven"},
        "conditions": [{"type": "Ready"}, "nonsense"],
        "slots": None,
        "dataPlane": {"fence": 1, "tasks": [{"slot": "x/0/0"}, 7], "problems": "none"},
    }


def test_a_status_of_another_release_is_partly_read() -> None:
    observed = Observed("running")
    observed.topology["status"] = older(observed.status)
    observed.pods, observed.events = [], []
    view = view_of(observed)
    assert (view.phase, view.checkpoint, view.conditions) == ("Running", None, ())
    assert view.recovery is not None
    assert (view.recovery.since, view.recovery.plan) == (None, ())
    assert [s.name for s in view.unqueried_segments] == ["x"]
    assert "route-report" in text_of(observed)


# --- the text ------------------------------------------------------------------


def test_the_documentation_shows_what_is_printed() -> None:
    assert text_of(Observed("recovering")) in DOCS.read_text()


def test_a_running_topology_shows_no_problem() -> None:
    text = text_of(Observed("running"))
    assert text.startswith("flights  Running  namespace default, generation 1\n")
    assert "last checkpoint  epoch 229, 11 s ago, 1.5 KiB\n" in text
    assert "False" not in text
    assert "recovery" not in text


def test_a_segment_that_two_queries_need_is_drawn_once() -> None:
    text = text_of(Observed("running"))
    assert "flown                2/2 live  see delay-alarms\n" in text
    assert text.count("flights-flown-0-0-2") == 1


def test_many_live_tasks_are_only_counted() -> None:
    observed = Observed("running")
    observed.pods = []
    tasks = [
        {"slot": f"x/{n}/0", "phase": "Live" if n != 40 else "Failed", "stableEpoch": 9}
        for n in range(50)
    ]
    observed.status["dataPlane"]["tasks"] = tasks
    text = text_of(observed)
    assert "x                    49/50 live\n" in text
    assert "40/0    Failed " in text
    assert "41 more are Live (--all shows them)\n" in text
    assert "49/0    Live" in text_of(observed, max_live_tasks=100)


def test_tasks_that_are_not_live_are_always_shown() -> None:
    text = text_of(Observed("lost"), max_live_tasks=0)
    assert "Live         epoch" not in text
    assert text.count("its pod is not scheduled yet") == 5
    assert "more are Live" not in text


def test_a_clock_behind_the_clusters_shows_no_negative_age() -> None:
    observed = Observed("running")
    observed.now -= timedelta(hours=1)
    assert "epoch 229, 0.0 s ago" in text_of(observed)


def test_text_of_the_cluster_is_not_parsed_as_markup() -> None:
    observed = Observed("lost")
    problem = "source s: '[/tmp/a]' is not a DOUBLE, in s3://b/[a-z]*.csv :100:"
    observed.status["dataPlane"]["problems"] = [problem]
    assert problem in text_of(observed)


def test_an_edit_that_is_not_observed_yet_is_shown() -> None:
    observed = Observed("running")
    observed.topology["metadata"]["generation"] = 2
    assert "generation 2 (the operator has observed 1)" in text_of(observed)


# --- the command ----------------------------------------------------------------


@pytest.fixture
def api() -> FakeApiServer:
    return FakeApiServer(Observed("lost"))


@pytest.fixture
def config(api: FakeApiServer, tmp_path: Path) -> Iterator[list[str]]:
    with served(api, tmp_path) as file:
        yield ["--kubeconfig", str(file), "--context", "test"]


def test_the_command_reads_the_cluster_of_its_context(
    api: FakeApiServer, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "flights", *config]) == 0
    out = capsys.readouterr().out
    assert out.startswith("flights  Recovering")
    assert "storm-watch waits for capacity" in out
    assert api.tokens == {"Bearer secret"}


def test_the_namespace_is_the_contexts(
    api: FakeApiServer, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "flights", *config[:-1], "streams"]) == 1
    assert api.requested == [TOPOLOGIES.replace("default", "s") + "/flights"]
    err = capsys.readouterr().err
    assert err.startswith("rekindle status: there is no StreamTopology flights in namespace s (")


def test_a_forbidden_list_counts_as_empty(
    api: FakeApiServer, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for what in ("pods", "events"):
        api.refuses[f"/api/v1/namespaces/default/{what}"] = 403
    assert main(["status", "flights", *config]) == 0
    assert "profit density" not in capsys.readouterr().out


def test_an_api_error_has_the_servers_message(
    api: FakeApiServer, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    api.refuses[f"{TOPOLOGIES}/flights"] = 403
    assert main(["status", "flights", *config]) == 1
    assert (
        capsys.readouterr().err
        == "rekindle status: the API server returned an error: you may not read this\n"
    )


def test_an_unreachable_api_server_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(tmp_path, "http://127.0.0.1:1")
    assert main(["status", "flights", "--kubeconfig", str(file)]) == 1
    err = capsys.readouterr().err
    assert err == "rekindle status: http://127.0.0.1:1 does not respond: Connection refused\n"


def test_a_missing_kubeconfig_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "flights", "--kubeconfig", str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"rekindle status: no cluster: {tmp_path / 'none'}: ")
    assert "(give --kubeconfig, or set KUBECONFIG)" in err


def test_a_missing_kubeconfig_of_the_environment_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["status", "flights"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"rekindle status: no cluster: {tmp_path / 'none'}: ")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_watching_goes_on_after_an_error_that_passes(
    api: FakeApiServer, config: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A busy API server, one that restarts, or the load balancer before it."""
    pods = "/api/v1/namespaces/default/pods"

    def fail_once(number: int) -> None:
        api.refuses = {pods: code} if number == 2 else {}
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    api.on_topology_read = fail_once
    exit_code = main(["status", "flights", *config, "--watch", "--interval", "0.1"])
    assert exit_code == 128 + signal.SIGTERM, capsys.readouterr().err
    failed = "the API server returned an error: you may not read this; the status below is out of"
    assert capsys.readouterr().out.replace("\n", " ").count(failed) == 1


@pytest.mark.process
def test_watching_shows_each_change_until_ctrl_c(
    api: FakeApiServer, config: list[str], tmp_path: Path
) -> None:
    later = Observed("running")

    def change_at_third_read(number: int) -> None:
        if number == 3:
            api.observed = later

    api.on_topology_read = change_at_third_read
    command = [sys.executable, "-m", "rekindle.cli", "status", "flights", "--watch", *config]
    out = tmp_path / "out.txt"
    with out.open("w") as stream:
        watching = subprocess.Popen([*command, "--interval", "0.1"], stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + 60
        while "Running" not in out.read_text():
            assert watching.poll() is None, out.read_text()
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.05)
        os.kill(watching.pid, signal.SIGINT)
        assert watching.wait(30) == 0
    finally:
        watching.kill()
        watching.wait()
    shown = [line for line in out.read_text().splitlines() if line.startswith("flights  ")]
    assert [line.split()[1] for line in shown] == ["Recovering", "Running"]
