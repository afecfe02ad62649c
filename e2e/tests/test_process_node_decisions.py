"""Decisions of a process node, without a node: probes, restarts, status."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_testing.embedded.process_node import status
from rekindle_testing.embedded.process_node.node_object import node_labels, node_status
from rekindle_testing.embedded.process_node.probes import (
    ContainerProbe,
    ProbeKind,
    ProbeSpec,
    is_ready,
    must_restart,
)
from rekindle_testing.embedded.process_node.restarts import (
    ConsecutiveExits,
    Exit,
    RestartBackoff,
    should_restart,
)
from rekindle_testing.embedded.process_node.settings import (
    ImageReplacement,
    NodeSettings,
    NodeTiming,
)
from rekindle_testing.embedded.process_node.status import ContainerView, ObservedPod

ALLOCATABLE = {"cpu": "2", "memory": "1Gi", "pods": "3"}


# --- probes -----------------------------------------------------------------

SPEC = ProbeSpec.parse({"failureThreshold": 3, "successThreshold": 2})


def test_a_probe_needs_as_many_results_in_a_row_as_its_threshold() -> None:
    state = ContainerProbe(SPEC)
    for success, passed in [
        (True, None),
        (True, True),
        (False, True),
        (False, True),
        (True, True),
        (False, True),
        (False, True),
        (False, False),
    ]:
        state = state.record(success)
        assert state.passed is passed


@given(st.lists(st.booleans(), max_size=50))
def test_a_probe_never_contradicts_the_newest_run_of_results(results: list[bool]) -> None:
    state = ContainerProbe(SPEC)
    for result in results:
        state = state.record(result)
    if results[-3:] == [False] * 3:
        assert state.passed is False
    if results[-2:] == [True] * 2:
        assert state.passed is True


def test_defaults_of_a_probe_are_kubernetes_own() -> None:
    assert ProbeSpec.parse({}) == ProbeSpec(0, 10, 1, 1, 3)


def test_readiness_waits_for_the_startup_probe() -> None:
    passed, failed = (replace(ContainerProbe(SPEC), passed=v) for v in (True, False))
    assert is_ready(True, None, None)
    assert is_ready(True, passed, passed)
    assert not is_ready(True, ContainerProbe(SPEC), passed)
    assert not is_ready(True, passed, ContainerProbe(SPEC))
    assert not is_ready(True, passed, failed)
    assert not is_ready(False, passed, passed)


def test_only_startup_and_liveness_restart_a_container() -> None:
    failed = replace(ContainerProbe(SPEC), passed=False)
    assert must_restart(failed, None) is ProbeKind.STARTUP
    assert must_restart(None, failed) is ProbeKind.LIVENESS
    assert must_restart(ContainerProbe(SPEC), ContainerProbe(SPEC)) is None


# --- restarts ---------------------------------------------------------------


def ended(code: int = 1, ran_s: float = 1.0) -> Exit:
    return Exit(code, 0, "Error" if code else "Completed", "", 1000.0, 1000.0 + ran_s)


def test_the_first_restart_is_immediate_and_back_off_grows() -> None:
    policy, exits = RestartBackoff(), ConsecutiveExits()
    delays = []
    for _ in range(9):
        exits = exits.after(ended(), policy)
        delays.append(exits.delay_s(policy))
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_long_run_resets_the_back_off() -> None:
    policy = RestartBackoff()
    exits = ConsecutiveExits(6).after(ended(ran_s=600), policy)
    assert exits.delay_s(policy) == 0


def test_the_delay_of_a_container_that_crashed_for_days_is_finite() -> None:
    assert ConsecutiveExits(1_000_000).delay_s(RestartBackoff()) == 300


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 1, False),
    ],
)
def test_the_restart_policy_decides(policy: str, code: int, again: bool) -> None:
    assert should_restart(policy, ended(code)) is again


# --- status -----------------------------------------------------------------

RUNNING = ContainerView("a", "i", running_since=1.0, started=True, ready=True)
DONE = ContainerView("a", "i", ended=ended(0))
FAILED = ContainerView("a", "i", ended=ended(1))
CREATING = ContainerView("a", "i", waiting=("ContainerCreating", ""))
UNPREPARED = ContainerView("a", "i")  # its volumes are not mounted yet
BACKING_OFF = ContainerView(
    "a", "i", waiting=("CrashLoopBackOff", "x"), last_exit=ended(1), restarts=2
)


def view(*main: ContainerView, init: tuple[ContainerView, ...] = (), **more: Any) -> ObservedPod:
    return ObservedPod(init, main, "127.1.1.1", "127.1.0.1", 5.0, **more)


@pytest.mark.parametrize(
    ("policy", "seen", "phase"),
    [
        ("Always", view(CREATING), "Pending"),
        ("Always", view(UNPREPARED), "Pending"),
        ("Never", view(UNPREPARED), "Pending"),
        ("Always", view(RUNNING, UNPREPARED), "Pending"),
        ("Always", view(UNPREPARED, init=(DONE,)), "Pending"),
        ("Always", view(RUNNING), "Running"),
        ("Always", view(RUNNING, CREATING), "Pending"),
        ("Always", view(BACKING_OFF), "Running"),
        ("Always", view(FAILED), "Running"),
        ("Never", view(DONE), "Succeeded"),
        ("Never", view(DONE, FAILED), "Failed"),
        ("Never", view(DONE, RUNNING), "Running"),
        ("OnFailure", view(DONE), "Succeeded"),
        ("OnFailure", view(FAILED), "Running"),
        ("Always", view(CREATING, init=(RUNNING,)), "Pending"),
        ("Always", view(RUNNING, init=(DONE,)), "Running"),
        ("Never", view(CREATING, init=(FAILED,)), "Failed"),
        ("Always", view(CREATING, init=(FAILED,)), "Pending"),
        ("Always", view(RUNNING, failure=("Evicted", "full")), "Failed"),
    ],
)
def test_the_phase_follows_the_containers(policy: str, seen: ObservedPod, phase: str) -> None:
    assert status.phase(policy, seen) == phase


def pod(**spec: Any) -> dict[str, Any]:
    containers = [{"name": "c", "image": "i"}]
    return {"metadata": {"generation": 3}, "spec": {"containers": containers, **spec}}


def conditions(seen: ObservedPod, **spec: Any) -> dict[str, tuple[str, str]]:
    found = status.conditions(pod(**spec), seen, 10.0)
    return {c["type"]: (c["status"], c["reason"]) for c in found}


def test_conditions_of_a_pod_that_serves() -> None:
    assert {value for value, _ in conditions(view(RUNNING)).values()} == {"True"}


def test_conditions_name_what_is_missing() -> None:
    found = conditions(view(CREATING, init=(RUNNING,)))
    assert found["Initialized"] == ("False", "ContainersNotInitialized")
    assert found["Ready"] == ("False", "ContainersNotReady")


def test_a_readiness_gate_that_is_closed_keeps_a_pod_unready() -> None:
    found = conditions(view(RUNNING), readinessGates=[{"conditionType": "example.com/open"}])
    assert found["ContainersReady"][0] == "True"
    assert found["Ready"] == ("False", "ReadinessGatesNotReady")


def test_conditions_of_a_pod_that_ended() -> None:
    found = conditions(view(DONE), restartPolicy="Never")
    assert found["Ready"] == ("False", "PodCompleted")


def test_a_condition_keeps_its_time_until_it_changes() -> None:
    first = status.conditions(pod(), view(CREATING), 10.0)
    second = status.conditions(pod(), view(CREATING, conditions=first), 20.0)
    third = status.conditions(pod(), view(RUNNING, conditions=second), 30.0)
    times = [
        next(c["lastTransitionTime"] for c in found if c["type"] == "Ready")
        for found in (first, second, third)
    ]
    assert times == [status.rfc3339(10), status.rfc3339(10), status.rfc3339(30)]


def test_a_condition_changed_by_another_client_is_detected() -> None:
    written = {"conditions": [{"type": "Ready", "status": "True"}]}
    in_api = {"conditions": [{"type": "Ready", "status": "False"}]}
    additional = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert status.is_contradicted(written, in_api)
    assert not status.is_contradicted(written, written)
    assert not status.is_contradicted(written, additional)


def test_a_crash_loop_shows_how_the_last_attempt_ended() -> None:
    shown = status.container_status(BACKING_OFF)
    assert shown["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert shown["lastState"]["terminated"]["exitCode"] == 1
    assert shown["restartCount"] == 2


def test_the_status_has_addresses_and_generation() -> None:
    shown = status.build(pod(), view(RUNNING), 10.0)
    assert shown["podIPs"] == [{"ip": "127.1.1.1"}]
    assert shown["hostIP"] == "127.1.0.1"
    assert shown["observedGeneration"] == 3


# --- the node ---------------------------------------------------------------


def settings(**more: Any) -> NodeSettings:
    strings = dict.fromkeys(("kubeconfig", "ca_file", "serving_certificate", "serving_key"), "f")
    fields: dict[str, Any] = {
        "name": "n1",
        "zone": "z1",
        "address": "127.9.0.1",
        "address_prefix": "127.9",
        "kubelet_port": 10250,
        "capacity": ALLOCATABLE,
        "labels": {"disk": "fast"},
        "images": {"i": ImageReplacement(path=("/x",), env={"A": "1"}, command=("run",))},
        "timing": NodeTiming(backoff=RestartBackoff(base_s=0.5)),
        "directory": "/d",
        "apiserver_client_name": "server",
        **strings,
        **more,
    }
    return NodeSettings(**fields)


def test_settings_are_read_as_they_were_written(tmp_path: Any) -> None:
    settings().write(tmp_path / "s.json")
    assert NodeSettings.read(tmp_path / "s.json") == settings()


def test_a_node_has_the_labels_for_the_scheduler() -> None:
    labels = node_labels(settings())
    assert labels["kubernetes.io/hostname"] == "n1"
    assert labels["topology.kubernetes.io/zone"] == "z1"
    assert labels["kubernetes.io/os"] == "linux"
    assert {"kubernetes.io/arch", "disk"} <= set(labels)


def test_a_node_s_status_has_its_four_conditions() -> None:
    shown = node_status(settings(), 1.0, 2.0)
    assert {c["type"]: c["status"] for c in shown["conditions"]} == {
        "Ready": "True",
        "MemoryPressure": "False",
        "DiskPressure": "False",
        "PIDPressure": "False",
    }
