"""What the cache derives from reports: since when a task is silent."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client
from test_operator_late_reports import pod

from rekindle.names import GATE, LABEL_ROLE, LABEL_TOPOLOGY, ROLE_TASK
from rekindle.report import CheckpointProblemKind, read_report
from rekindle_operator.cluster.cache import ClusterCache
from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.probe import start_due_probes
from rekindle_operator.settings import Timing

SILENT = IncarnationRef("uid", "seg/0/0", 2)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster(clock: Clock) -> ClusterCache:
    return ClusterCache(client.ApiClient(), None, clock)


def report(version: int, **task: Any) -> dict[str, Any]:
    """A topology whose coordinator reports one task with these fields."""
    entry = {"slot": SILENT.slot, "incarnation": SILENT.incarnation, "phase": "Live", **task}
    return {
        "metadata": {
            "name": "t",
            "namespace": "default",
            "uid": "uid",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": str(version),
            "generation": 1,
        },
        "spec": {},
        "status": {"dataPlane": {"fence": 1, "tasks": [entry]}},
    }


def test_silence_began_before_the_suspicion_was_read(cluster: ClusterCache, clock: Clock) -> None:
    cluster.topologies.put(report(1, suspected=True, silentSeconds=1.6))
    clock.now += 2
    cluster.topologies.put(report(2, suspected=True, silentSeconds=1.6))
    assert cluster.snapshot().suspects_silent_since == {SILENT: pytest.approx(998.4)}
    cluster.topologies.put(report(3, suspected=False))
    assert cluster.snapshot().suspects_silent_since == {}


def test_silence_does_not_count_while_the_operator_was_down(
    cluster: ClusterCache, clock: Clock
) -> None:
    cluster.reset_timers()
    clock.now += 1
    cluster.topologies.put(report(1, suspected=True, silentSeconds=60))
    assert cluster.snapshot().suspects_silent_since == {SILENT: 1000.0}


def test_a_pause_of_the_operator_does_not_change_when_a_silence_was_reported_first(
    cluster: ClusterCache, clock: Clock
) -> None:
    one = {"suspected": True, "silentSeconds": 1.5, "suspectedSince": "2026-01-01T00:00:00Z"}
    cluster.topologies.put(report(1, **one))
    clock.now += 20
    cluster.reset_timers()
    cluster.topologies.put(report(2, **one))
    found = cluster.snapshot()
    assert found.suspects_silent_since == {SILENT: 1020.0}
    assert found.silence_began_at == {SILENT: 998.5}
    cluster.topologies.put(report(3, **one | {"suspectedSince": "2026-01-01T00:00:19Z"}))
    assert cluster.snapshot().silence_began_at == {SILENT: 1018.5}, "another silence"
    cluster.topologies.replace([], 9)
    assert cluster.snapshot().silence_began_at == {}


def test_another_silence_counts_from_its_own_begin(cluster: ClusterCache, clock: Clock) -> None:
    """The report between the two, in which the task responds, was never seen."""
    silent = {"suspected": True, "silentSeconds": 1.5}
    cluster.topologies.put(report(1, **silent, suspectedSince="2026-01-01T00:00:00.000Z"))
    clock.now += 9
    cluster.topologies.put(report(3, **silent, suspectedSince="2026-01-01T00:00:09.000Z"))
    found = cluster.snapshot()
    assert found.suspects_silent_since == found.silence_began_at == {SILENT: 1007.5}


def test_another_topology_of_a_name_starts_without_memory(cluster: ClusterCache) -> None:
    cluster.topologies.put(report(1))
    cluster.topologies.put(report(2, suspected=True, silentSeconds=1.5))
    found = cluster.snapshot()
    assert (set(found.suspects_silent_since), set(found.report_times)) == ({SILENT}, {"uid"})
    other = report(3)
    other["metadata"]["uid"] = "other"
    cluster.topologies.put(other)
    found = cluster.snapshot()
    assert (set(found.suspects_silent_since), set(found.report_times)) == (set(), {"other"})


def test_silence_is_observed_since_the_start_or_the_last_pause(
    cluster: ClusterCache, clock: Clock
) -> None:
    assert cluster.snapshot().observing_since == 1000.0
    clock.now += 5
    assert cluster.snapshot().observing_since == 1000.0
    cluster.reset_timers()
    assert cluster.snapshot().observing_since == 1005.0


@pytest.mark.parametrize(("pause_s", "since"), [(1.0, 1000.0), (2.5, 1002.5), (-5.0, 995.0)])
def test_a_long_pause_of_the_probes_begins_the_observation_anew(
    cluster: ClusterCache, clock: Clock, pause_s: float, since: float
) -> None:
    """Or a clock that was set back."""
    start_due_probes(cluster, clock.now, Timing())
    clock.now += pause_s
    start_due_probes(cluster, clock.now, Timing())
    assert cluster.snapshot().observing_since == since


@pytest.mark.parametrize(("namespace", "is_probed"), [("default", True), ("evil", False)])
def test_pods_with_a_forged_owner_are_not_probed(
    cluster: ClusterCache, clock: Clock, namespace: str, is_probed: bool
) -> None:
    """Their responses would not count, and the pods that count would not be probed."""
    cluster.topologies.put(report(1))
    found = replace(pod("p", "a"), namespace=namespace, owner_uid="uid")
    cluster.pods._views = {(namespace, "p"): found}
    pods, _ = start_due_probes(cluster, clock.now, Timing())
    assert [p.name for p in pods] == (["p"] if is_probed else [])


def test_after_a_cut_silence_of_pods_counts_anew(cluster: ClusterCache) -> None:
    """Probes of kubelets show that this process was cut off."""
    kubelets, pods = cluster.kubelet_probes, cluster.pod_probes
    pods.sent("pod", 1000.0)
    kubelets.sent("node", 1000.0)
    kubelets.sent("node", 1002.0)
    kubelets.responded("node", 1002.0)
    results = cluster.snapshot().pod_probes["pod"]
    assert results.unanswered_since == 1002.0
    assert results.unanswered_probe_since is None


def test_a_time_of_silence_that_cannot_be_parsed_is_zero(cluster: ClusterCache) -> None:
    cluster.topologies.put(report(1, suspected=True, silentSeconds="long"))
    assert cluster.snapshot().suspects_silent_since == {SILENT: 1000.0}


@pytest.mark.parametrize(
    "values",
    [
        {"tasks": 1},
        {"inconsistent": 5},
        {"headEpoch": "nan"},
        {"checkpoint": 3},
        {"checkpointProblems": 1},
        {"checkpointProblems": ["x", None, {}, {"kind": 1, "message": 2}, {"kind": []}]},
        {"fence": "1e999"},
    ],
)
def test_a_report_with_wrong_types_is_no_error(
    cluster: ClusterCache, values: dict[str, Any]
) -> None:
    raw = report(1)
    raw["status"]["dataPlane"] |= values
    cluster.topologies.replace([raw, report(2)], 2)
    assert read_report(raw["status"]["dataPlane"]).head_epoch is None


def test_problems_of_checkpoints_have_kinds() -> None:
    problems = [
        {"kind": "Unrestorable", "message": "x"},
        {"kind": "OfANewerCoordinator", "message": "y"},
    ]
    found = read_report({"checkpointProblems": problems}).checkpoint_problems
    unrestorable = CheckpointProblemKind.UNRESTORABLE
    assert [(p.kind, p.message) for p in found] == [(unrestorable, "x"), (None, "y")]
    assert read_report({"problems": ["x"]}).checkpoint_problems == ()


@pytest.mark.parametrize("value", [None, False, "true", 1, []])
def test_only_true_says_that_a_task_cannot_save(value: Any) -> None:
    task = {"slot": SILENT.slot, "savingFails": value}
    assert not read_report({"tasks": [task]}).tasks[SILENT.slot].saving_fails


def test_silence_of_a_kubelet_does_not_count_while_the_operator_was_down(
    cluster: ClusterCache, clock: Clock
) -> None:
    cluster.kubelet_probes.sent("uid-a", clock.now)
    clock.now += 5
    cluster.reset_timers()
    assert cluster.snapshot().kubelet_probes["uid-a"].unanswered_since == clock.now


def test_ages_count_from_when_this_process_saw_a_change(
    cluster: ClusterCache, clock: Clock
) -> None:
    """The API server's clock, and the kubelet's, are years behind."""
    stamp = "2001-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp}
    node_meta = {"name": "a", "uid": "a"}
    meta: dict[str, Any] = {
        "name": "t-0",
        "namespace": "default",
        "uid": "p",
        "creationTimestamp": stamp,
    }
    meta |= {"labels": {LABEL_TOPOLOGY: "t", LABEL_ROLE: ROLE_TASK}}

    def put(version: int, gates: list[dict[str, str]], status: str) -> None:
        versioned = {"resourceVersion": str(version)}
        ready["status"] = status
        node = {"metadata": node_meta | versioned, "status": {"conditions": [ready]}}
        cluster.nodes.put(copy.deepcopy(node))
        cluster.pods.put({"metadata": meta | versioned, "spec": {"schedulingGates": gates}})
        cluster.snapshot()
        clock.now += 5

    put(1, [{"name": GATE}], "True")
    put(2, [], "True")
    meta["deletionTimestamp"] = stamp
    put(3, [], "False")
    found = cluster.snapshot()
    assert (found.pods_seen_at, found.pods_ungated_at) == ({"p": 1000.0}, {"p": 1005.0})
    assert found.pods_ending_since == {"p": 1010.0}
    assert found.readiness_seen_at == {"a": 1010.0}
    cluster.reset_timers()
    found = cluster.snapshot()
    assert found.pods_seen_at == found.pods_ungated_at == {"p": 1015.0}, "it was not watched"
    assert found.readiness_seen_at == {"a": 1010.0}, "a quarantine would end if it were newer"


def test_tasks_of_other_namespaces_only_use_capacity(clock: Clock) -> None:
    cluster = ClusterCache(client.ApiClient(), "watched", clock)
    for namespace in ("watched", "other"):
        cluster.pods.put(
            {
                "metadata": {
                    "name": "t-0",
                    "namespace": namespace,
                    "uid": f"uid-{namespace}",
                    "resourceVersion": "1",
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                    "labels": {LABEL_TOPOLOGY: "t", LABEL_ROLE: ROLE_TASK},
                },
                "spec": {
                    "nodeName": "a",
                    "containers": [{"resources": {"requests": {"cpu": "1"}}}],
                },
            }
        )
    pods = {p.namespace: p for p in cluster.snapshot().pods}
    assert {n: p.topology for n, p in pods.items()} == {"watched": "t", "other": None}
    assert {p.requests.cpu_m for p in pods.values()} == {1000}


def test_with_a_namespace_only_nodes_and_pods_are_listed_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Requested(BaseException):
        """No Exception: after those a mirror waits."""

    called: list[str] = []

    def call(api: client.ApiClient, method: str, url: str, *_: Any, **__: Any) -> Any:
        called.append(url.removeprefix(api.configuration.host).partition("?")[0])
        raise Requested

    monkeypatch.setattr(client.ApiClient, "call_api", call)
    for namespace, places in (
        (
            None,
            [
                "/api/v1/configmaps",
                "/apis/coordination.k8s.io/v1/leases",
                "/apis/rekindle.dev/v1alpha1/streamtopologies",
            ],
        ),
        (
            "a",
            [
                "/api/v1/namespaces/a/configmaps",
                "/apis/coordination.k8s.io/v1/namespaces/a/leases",
                "/apis/rekindle.dev/v1alpha1/namespaces/a/streamtopologies",
            ],
        ),
    ):
        called.clear()
        cluster = ClusterCache(client.ApiClient(), namespace, lambda: 0.0)
        first = (cluster.nodes, cluster.pods, cluster.generation_records, cluster.leases)
        for mirror in (*first, cluster.topologies):
            with pytest.raises(Requested):
                mirror._request()
        assert called == ["/api/v1/nodes", "/api/v1/pods", *places]
