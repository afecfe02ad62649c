"""Nodes that refused a pod are avoided; a pod that cannot start is replaced elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.containers import container_error, is_creating_containers
from rekindle_operator.cluster.model import PodView
from rekindle_operator.cluster.unsuitable import Cause, UnsuitableNodes

pytestmark = pytest.mark.simulated

# Of nodes, by name. Calls of `with_refusal` below give a shape, the name and uid of a node, the uid
# of a pod, and the time.
_UIDS = {"a": "node"}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}


class RefusingCluster(ModelCluster):
    """`ports_taken`: nodes that the scheduler refuses; `broken`: nodes where nothing starts;
    `full`: nodes whose kubelets refuse tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.ports_taken: set[str] = set()
        self.scheduler_message = "node(s) didn't have free ports for the requested pod ports"
        self.broken: dict[str, dict[str, Any]] = {}  # node -> state of the container there
        self.full: set[str] = set()

    def _bind(self, raw: dict[str, Any], pod: PodView) -> bool:
        if pod.role == "task" and pod.required_node in self.ports_taken:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            condition["message"] = f"0/9 nodes are available: 1 {self.scheduler_message}"
            raw["status"] = {"phase": "Pending", "conditions": [condition]}
            return False
        bound = super()._bind(raw, pod)
        node = raw["spec"].get("nodeName")
        if bound and node in self.broken and pod.role == "task":
            container = {"name": "task", "ready": False, "state": self.broken[node]}
            raw["status"] = {"phase": "Pending", "containerStatuses": [container]}
            self.stuck.add(pod.name)
        if bound and node in self.full and pod.role == "task":
            raw["status"] = {"phase": "Failed", "reason": "OutOfcpu", "message": "not enough cpu"}
        return bound

    def run_for(self, seconds: float, step_s: float = 5.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.pass_time(step_s)
            self.settle()

    def places(self) -> Counter[str | None]:
        return Counter(p.node for p in self.tasks().values())


@pytest.fixture
def cluster() -> RefusingCluster:
    made = RefusingCluster()
    made.add_topology("flights", flights_spec())
    return made


def test_a_node_that_the_scheduler_refused_is_not_chosen_again(cluster: RefusingCluster) -> None:
    for name in "abc":
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    cluster.ports_taken = {"a"}
    cluster.settle()
    cluster.run_for(30.0)
    assert cluster.status()["phase"] == "Running"
    assert "a" not in cluster.places()
    highest = max(s["incarnation"] for s in cluster.status()["slots"])
    assert highest <= 3


def test_a_replica_with_wrong_results_is_replaced_on_another_node(
    cluster: RefusingCluster,
) -> None:
    """It may be the node that computes wrongly."""
    for name in "abcd":
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    cluster.settle()
    victim = cluster.tasks()["flights-alarms-0-1-1"]
    assert victim.slot is not None
    for other in sorted("abcd"):  # its own is the emptiest
        if other != victim.node:
            cluster.nodes[other] = replace(
                cluster.nodes[other],
                allocatable=ResourceAmounts(cpu_m=16000, memory=48 << 30, pods=50),
            )
    view = cluster.topologies["flights"]
    report = {**view.data_plane, "diverged": [victim.slot.key]}
    cluster.topologies["flights"] = replace(view, status={**view.status, "dataPlane": report})
    cluster.settle()
    replacement = cluster.tasks()["flights-alarms-0-1-2"]
    assert replacement.node not in (None, victim.node)


@pytest.mark.parametrize(
    "message", ["Insufficient cpu.", "Too many pods.", "node(s) had untolerated taint {x: }"]
)
def test_a_node_without_capacity_is_not_unsuitable(cluster: RefusingCluster, message: str) -> None:
    """The plan computes capacity itself, and used capacity may be free in a moment."""
    for name in "ab":
        cluster.add_node(name)
    cluster.ports_taken, cluster.scheduler_message = {"a"}, message
    cluster.settle()
    cluster.run_for(6.0)
    cluster.ports_taken = set()
    cluster.run_for(30.0)
    assert cluster.status()["phase"] == "Running"


@pytest.mark.parametrize(
    "message",
    [
        'persistentvolumeclaim "rekindle" not found',
        "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
        "a message of a scheduler to come",
    ],
)
def test_a_node_is_not_unsuitable_for_what_it_does_not_lack(
    cluster: RefusingCluster, message: str
) -> None:
    for name in "ab":
        cluster.add_node(name)
    cluster.ports_taken, cluster.scheduler_message = {"a"}, message
    cluster.settle()
    cluster.run_for(30.0)
    assert not cluster.unsuitable.refusals


@pytest.mark.parametrize(
    "message",
    [
        "node(s) didn't satisfy existing pods anti-affinity rules",
        "node(s) didn't match pod anti-affinity rules",
        "node(s) didn't match pod topology spread constraints",
    ],
)
def test_a_node_is_avoided_for_seconds_because_of_other_pods_there(
    cluster: RefusingCluster, message: str
) -> None:
    for name in "abc":
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    cluster.ports_taken, cluster.scheduler_message = {"a"}, message
    cluster.settle()
    cluster.run_for(15.0)
    assert cluster.status()["phase"] == "Running"
    assert "a" not in cluster.places()
    assert all(r.until <= cluster.now for r in cluster.unsuitable.refusals.values())


def test_a_pod_whose_secret_is_missing_stays_on_its_node(cluster: RefusingCluster) -> None:
    """The kubelet starts it once the Secret is there; no other node could."""
    for name in "abc":
        cluster.add_node(name)
    missing = {"reason": "CreateContainerConfigError", "message": 'secret "key" not found'}
    cluster.broken = {name: {"waiting": missing} for name in "abc"}
    cluster.settle()
    before = set(cluster.tasks())
    cluster.run_for(400.0, step_s=20.0)
    assert set(cluster.tasks()) == before
    assert not cluster.unsuitable.refusals
    waiting = [q["waitingFor"] for q in cluster.status()["queries"]]
    assert all('secret "key" not found' in w for w in waiting)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("CreateContainerConfigError", "failed to sync secret cache: timed out"),
        ("ImageInspectError", "content digest sha256:01: not found"),
        ("PostStartHookError", ""),
    ],
)
def test_a_pod_moves_after_an_error_that_may_be_its_nodes(
    cluster: RefusingCluster, reason: str, message: str
) -> None:
    for name in "abc":
        cluster.add_node(name)
    cluster.broken = {"a": {"waiting": {"reason": reason, "message": message}}}
    cluster.settle()
    cluster.run_for(400.0, step_s=20.0)
    assert "a" not in cluster.places()
    assert cluster.status()["phase"] == "Running"


def test_a_replica_is_not_kept_for_a_node_that_has_its_partner(cluster: RefusingCluster) -> None:
    for name in "ab":
        cluster.add_node(name)
    cluster.settle()
    lost = next(p for p in cluster.tasks().values() if p.node == "b")
    cluster.unsuitable = cluster.unsuitable.with_refusal(
        lost.shape, "b", cluster.nodes["b"].uid, "some-pod", cluster.now
    )
    cluster.delete_pod(lost.name, lost.uid, 0)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"


def test_a_replica_is_not_kept_for_a_node_that_others_fill(cluster: RefusingCluster) -> None:
    """The operator cannot move pods of other owners."""
    for name in "ab":
        cluster.add_node(name)
    cluster.settle()
    lost = next(p for p in cluster.tasks().values() if p.node == "b")
    cluster.add_node("c")
    meta = {"name": "foreign", "namespace": "other", "uid": "f", "resourceVersion": "1"}
    cluster.raw_pods["foreign"] = {
        "metadata": {**meta, "labels": {}},
        "spec": {
            "nodeName": "c",
            "containers": [{"name": "x", "resources": {"requests": {"cpu": "3900m"}}}],
        },
        "status": {"phase": "Running"},
    }
    cluster.unsuitable = cluster.unsuitable.with_refusal(
        lost.shape, "b", cluster.nodes["b"].uid, "some-pod", cluster.now
    )
    cluster.delete_pod(lost.name, lost.uid, 0)
    cluster.settle()
    assert cluster.places()[None] == 0


def test_an_edit_replaces_all_pods_that_cannot_start(cluster: RefusingCluster) -> None:
    """Partners, too: none of them has anything to lose."""
    for name in "abc":
        cluster.add_node(name)
    cluster.broken = {"a": PULL, "b": PULL, "c": PULL}
    cluster.settle()
    cluster.run_for(70.0)
    cluster.edit("flights", image="another")
    cluster.settle()
    assert {p.generation for p in cluster.tasks().values()} == {2}


def _lose_a_task_on_a_full_node(cluster: RefusingCluster, nodes: str) -> str:
    """Its node runs something that has no object any more."""
    for name in nodes:
        cluster.add_node(name)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    lost = next(p for p in cluster.tasks().values() if p.node == "b")
    cluster.full = {"b"}
    del cluster.raw_pods[lost.name]
    cluster.settle()
    return lost.name


def test_a_pod_that_a_full_kubelet_refuses_goes_elsewhere_at_once(cluster: RefusingCluster) -> None:
    lost = _lose_a_task_on_a_full_node(cluster, "abc")
    assert cluster.status()["phase"] == "Running"
    assert f"{lost[:-2]}-3" in cluster.tasks()


def test_a_full_node_is_tried_again_soon(cluster: RefusingCluster) -> None:
    _lose_a_task_on_a_full_node(cluster, "ab")
    assert cluster.status()["phase"] != "Running", "the other node has its partner"
    cluster.full = set()
    cluster.pass_time(10.0)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"


def test_a_refused_node_is_tried_again_after_a_while(cluster: RefusingCluster) -> None:
    for name in "ab":
        cluster.add_node(name)
    cluster.ports_taken = {"a"}
    cluster.settle()
    cluster.run_for(60.0)
    assert set(cluster.places()) <= {"b", None}, "replicas wait for another node"
    cluster.ports_taken = set()
    cluster.run_for(400.0, step_s=20.0)
    assert cluster.status()["phase"] == "Running"


def test_a_pod_that_cannot_pull_its_image_is_replaced_elsewhere(cluster: RefusingCluster) -> None:
    for name in "abc":
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    cluster.broken["a"] = PULL
    cluster.settle()
    waiting = [q.get("waitingFor", "") for q in cluster.status()["queries"]]
    assert any("on a: container task: ImagePullBackOff: manifest unknown" in w for w in waiting)
    cluster.run_for(55.0)
    assert cluster.places()["a"] > 0, "not before the kubelet has tried a few times"
    cluster.run_for(60.0)
    assert "a" not in cluster.places()
    assert cluster.status()["phase"] == "Running"


def test_the_reason_of_a_container_becomes_an_event_once(cluster: RefusingCluster) -> None:
    for name in "ab":
        cluster.add_node(name)
    cluster.broken = {"a": PULL, "b": PULL}
    cluster.settle()
    cluster.run_for(20.0)
    notes = [e.note for e in cluster.events if e.reason == "TaskCannotStart"]
    assert notes
    assert all("ImagePullBackOff: manifest unknown" in note for note in notes)
    assert len(notes) == len(set(notes)) <= 3, "one for each query at most"


def test_a_bad_image_is_not_tried_on_every_node(cluster: RefusingCluster) -> None:
    nodes = [f"n{n}" for n in range(8)]
    for name in nodes:
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
        cluster.broken[name] = PULL
    cluster.settle()
    before = len(cluster.tasks())
    cluster.run_for(290.0, step_s=10.0)
    assert len(cluster.tasks()) == before
    highest = max(s["incarnation"] for s in cluster.status()["slots"])
    assert highest <= 4
    assert cluster.condition("Ready")["status"] == "False"


CREATING = {"waiting": {"reason": "ContainerCreating"}}


def test_a_pod_without_any_container_is_replaced_elsewhere(cluster: RefusingCluster) -> None:
    """A volume that cannot be mounted, a Secret that is not there, no network: no container says
    so."""
    for name in "abc":
        cluster.add_node(name, cpu_m=16000, memory=64 << 30)
    cluster.broken["a"] = CREATING
    cluster.settle()
    cluster.run_for(295.0, step_s=29.5)
    assert cluster.places()["a"] > 0, "a large image takes its time"
    cluster.run_for(300.0, step_s=20.0)
    assert "a" not in cluster.places()
    assert cluster.status()["phase"] == "Running"


def test_a_query_reports_that_it_waits_for_containers(cluster: RefusingCluster) -> None:
    cluster.add_node("a", cpu_m=16000, memory=64 << 30)
    cluster.broken["a"] = CREATING
    cluster.settle()
    cluster.run_for(55.0)
    assert not [q for q in cluster.status()["queries"] if "not created" in q["waitingFor"]]
    cluster.run_for(10.0)
    waiting = [q["waitingFor"] for q in cluster.status()["queries"]]
    assert all("on a: containers: not created after 60 s: its volumes" in w for w in waiting)
    assert "TaskCannotStart" in cluster.event_reasons()


@pytest.mark.parametrize(
    ("spec", "status", "creating_containers"),
    [
        ({}, {}, False),
        ({"nodeName": "a"}, {}, True),
        ({"nodeName": "a"}, {"containerStatuses": [{"name": "task", "state": CREATING}]}, True),
        ({"nodeName": "a"}, {"containerStatuses": [{"name": "task", "state": PULL}]}, False),
        ({"nodeName": "a"}, {"phase": "Running"}, False),
        ({"nodeName": "a"}, {"phase": "Failed"}, False),
        (
            {"nodeName": "a", "initContainers": [{"name": "i"}]},
            {"initContainerStatuses": [{"name": "i", "state": {"running": {}}}]},
            False,
        ),
        (
            {"nodeName": "a", "initContainers": [{"name": "i", "restartPolicy": "Always"}]},
            {"initContainerStatuses": [{"name": "i", "state": {"running": {}}}]},
            True,
        ),
    ],
)
def test_a_node_prepares_a_pod_until_a_container_runs(
    spec: Any, status: Any, creating_containers: bool
) -> None:
    assert is_creating_containers(spec, status, "task") == creating_containers


def test_a_task_that_keeps_crashing_is_replaced_elsewhere(cluster: RefusingCluster) -> None:
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    victim = cluster.tasks()["flights-storms-0-0-1"]
    killed = {"reason": "OOMKilled", "exitCode": 137}
    status = cluster.raw_pods[victim.name]["status"]
    status.pop("conditions")
    crashed = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    running: dict[str, Any] = {"running": {}}
    cluster.stuck.add(victim.name)
    for state in itertools.islice(itertools.cycle((crashed, running)), 15):
        container = {"name": "task", "state": state, "lastState": {"terminated": killed}}
        status["containerStatuses"] = [{**container, "restartCount": 2, "ready": False}]
        cluster.pass_time(5.0)
        cluster.settle()
    assert victim.name not in cluster.tasks()
    assert cluster.tasks()["flights-storms-0-0-2"].node != victim.node
    assert cluster.status()["phase"] == "Running"


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"state": {"waiting": {"reason": "ContainerCreating"}}}, ""),
        ({"state": {"running": {}}, "restartCount": 3}, ""),
        ({"state": PULL}, "container task: ImagePullBackOff: manifest unknown"),
        (
            {"state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "restartCount": 1},
            "container task: OOMKilled, exit code 137, 1 restarts",
        ),
        ({"state": {"terminated": {"exitCode": 0}}}, ""),
    ],
)
def test_a_containers_error_has_the_kubelets_message(container: Any, message: str) -> None:
    status = {"containerStatuses": [{"name": "task", **container}]}
    assert container_error(status, "task") == message


def test_memory_of_refusals_decays_and_doubles() -> None:
    memory = UnsuitableNodes({}).with_refusal("s", "a", "node", "pod1", 0.0)
    assert memory.by_shape(_UIDS, 299.0) == {"s": frozenset("a")}
    assert memory.by_shape(_UIDS, 301.0) == {}
    assert memory.with_refusal("s", "a", "node", "pod1", 10.0) is memory, "one pod counts once"
    again = memory.with_refusal("s", "a", "node", "pod2", 400.0)
    assert again.by_shape(_UIDS, 900.0) == {"s": frozenset("a")}
    assert again.by_shape(_UIDS, 1001.0) == {}


def test_a_temporary_refusal_neither_shortens_nor_doubles_another_one() -> None:
    memory = UnsuitableNodes({}).with_refusal("s", "a", "node", "pod1", 0.0, Cause.FULL)
    assert memory.by_shape(_UIDS, 4.0) == {"s": frozenset("a")}
    assert memory.by_shape(_UIDS, 6.0) == {}
    memory = memory.with_refusal("s", "a", "node", "pod2", 10.0)
    memory = memory.with_refusal("s", "a", "node", "pod3", 20.0, Cause.FULL)
    assert memory.by_shape(_UIDS, 309.0) == {"s": frozenset("a")}
    assert memory.by_shape(_UIDS, 311.0) == {}


def test_silence_is_forgotten_sooner_than_a_refusal() -> None:
    memory = UnsuitableNodes({}).with_refusal("s", "a", "node", "pod1", 0.0, Cause.SILENT)
    assert memory.by_shape(_UIDS, 29.0) == {"s": frozenset("a")}
    assert memory.by_shape(_UIDS, 31.0) == {}
    memory = memory.with_refusal("s", "a", "node", "pod2", 40.0, Cause.SILENT)
    assert memory.by_shape(_UIDS, 99.0) == {"s": frozenset("a")}
    assert memory.by_shape(_UIDS, 101.0) == {}


def test_a_node_made_anew_under_the_same_name_is_another_node() -> None:
    memory = UnsuitableNodes({}).with_refusal("s", "a", "node", "pod1", 0.0)
    assert memory.by_shape({"a": "another"}, 10.0) == {}
    assert memory.by_shape({}, 10.0) == {}
    again = memory.with_refusal("s", "a", "another", "pod2", 10.0)
    assert again.by_shape({"a": "another"}, 309.0) == {"s": frozenset("a")}
    assert again.by_shape({"a": "another"}, 311.0) == {}, "its first refusal"


def test_memory_of_refusals_is_bounded() -> None:
    full = UnsuitableNodes({("s", f"n{n}"): _refusals(n) for n in range(10_000)})
    assert len(full.with_refusal("s", "new", "node", "pod", 0.0).refusals) == 10_000


def _refusals(number: int) -> Any:
    (refusals,) = (
        UnsuitableNodes({})
        .with_refusal("s", "a", "node", f"pod{number}", float(number))
        .refusals.values()
    )
    return refusals


def shared_shapes(**fields: Any) -> set[str]:
    """The shapes that pods had before an edit and still have after it."""
    cluster = ModelCluster()
    cluster.add_topology("flights", flights_spec())
    cluster.settle()
    before = {p.shape for p in cluster.tasks().values()}
    cluster.edit("flights", **fields)
    cluster.settle()
    after = {p.shape for p in cluster.tasks().values()}
    assert len(before) == len(after)
    return before & after


def in_pod(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": fields}}


def in_container(**fields: Any) -> dict[str, Any]:
    return in_pod(containers=[{"name": "task", **fields}])


@pytest.mark.parametrize(
    "edit",
    [
        {"image": "two"},
        {"sparkConf": {"spark.driver.extraJavaOptions": "-XX:+UseZGC"}},
        {"resources": {"requests": {"cpu": "700m"}}},
        {"checkpoint": {**flights_spec()["checkpoint"], "secretRef": "store-rekindle"}},
        in_pod(volumes=[{"name": "extra", "configMap": {"name": "settings"}}]),
        in_pod(volumes=[{"name": "extra", "secret": {"secretName": "key-rekindle"}}]),
        in_pod(dnsPolicy="Default"),
        in_container(env=[{"name": "X", "value": "1"}]),
        in_container(envFrom=[{"configMapRef": {"name": "settings"}}]),
        in_container(ports=[{"containerPort": 1}]),
        in_container(startupProbe={"failureThreshold": 900}),
        in_container(command=["sleep"]),
    ],
    ids=lambda edit: str(edit)[:60],
)
def test_an_edit_that_may_correct_a_pod_resets_what_nodes_refused(edit: dict[str, Any]) -> None:
    assert not shared_shapes(**edit)


def test_an_edit_that_changes_no_pod_keeps_what_nodes_refused() -> None:
    queries = flights_spec()["queries"]
    for query in queries:
        query["priority"] += 1
    assert shared_shapes(queries=queries)


def test_tasks_of_two_topologies_that_are_alike_have_one_shape() -> None:
    cluster = ModelCluster()
    for name in ("flights", "second"):
        cluster.add_topology(name, flights_spec())
    cluster.settle()
    first, second = ({p.shape for p in cluster.tasks(n).values()} for n in cluster.topologies)
    assert first == second
    assert cluster.coordinator("flights").shape == cluster.coordinator("second").shape
