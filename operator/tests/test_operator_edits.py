"""Reconcile: topologies that are invalid, refused, edited, or suspended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec, with_replicas
from model_api import ModelOperator
from model_cluster import ModelCluster

from rekindle import names
from rekindle.errors import Problem
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import DryRunResult, record_digest
from rekindle_operator.cluster.quota import PodExchange
from rekindle_operator.reconcile.actions import DryRun
from rekindle_operator.reconcile.core import reconcile


def test_an_invalid_spec_creates_nothing_and_names_the_field(cluster: ModelCluster) -> None:
    spec = flights_spec()
    spec["queries"] = [{**spec["queries"][0], "from": "nowhere"}]
    cluster.add_topology("flights", spec)
    cluster.settle()
    assert not cluster.raw_pods
    assert not cluster.generation_records
    valid = cluster.condition("Valid")
    assert valid["status"] == "False"
    assert "spec.queries[0]" in valid["message"]
    assert cluster.status()["phase"] == "Invalid"
    assert "Invalid" in cluster.event_reasons()


@pytest.mark.parametrize(
    "template",
    [
        {"spec": None},
        {"spec": "x"},
        {"metadata": "x"},
        {"metadata": {"labels": "x"}},
        {"metadata": {"annotations": ["a"]}},
    ],
)
def test_a_malformed_pod_template_delays_no_other_topology(
    cluster: ModelCluster, template: Any
) -> None:
    cluster.add_topology("bad", flights_spec() | {"podTemplate": template})
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    assert cluster.condition("Valid", "bad")["reason"] == "InvalidValue"
    assert "spec.podTemplate" in cluster.condition("Valid", "bad")["message"]
    assert cluster.status()["phase"] == "Running"


def test_an_edit_refused_by_dry_run_keeps_the_old_generation(
    running: ModelCluster,
) -> None:
    before = running.tasks()
    refusal = Problem("spec.podTemplate", "PodRefused", "unknown field", "correct it")
    running.refused_dry_runs["uid-flights", 2] = DryRunResult((refusal,))
    running.edit("flights", podTemplate={"spec": {"x": 1}})
    running.settle()
    assert running.condition("Valid")["reason"] == "PodRefused"
    assert running.status()["observedGeneration"] == 2
    assert set(running.generation_records) == {"flights-g1"}
    assert running.tasks() == before


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"containers": [{"name": "task", "resources": {"limits": {"memory": "2GB"}}}]}, "2GB"),
        ({"containers": [{"name": {}}]}, "unhashable"),
        ({"containers": None}, "containers"),
        ({"volumes": "x"}, "cannot be merged"),
    ],
)
def test_recovery_goes_on_after_an_edit_that_cannot_be_rendered(
    running: ModelCluster, template: dict[str, Any], message: str
) -> None:
    running.edit("flights", podTemplate={"spec": template})
    running.settle()
    valid = running.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", "PodRefused")
    assert valid["message"].startswith("spec.podTemplate")
    assert message in valid["message"]
    assert running.status()["phase"] == "Running"
    running.kill_node_until_not_ready("a")
    running.settle()
    assert not [p.name for p in running.tasks().values() if p.node == "a"]
    assert set(running.query_states().values()) == {"Live"}


def test_a_refused_generation_is_validated_again_later(cluster: ModelCluster) -> None:
    transient = Problem("spec.podTemplate", "PodRefused", "webhook does not respond", "correct it")
    cluster.refused_dry_runs["uid-flights", 1] = DryRunResult((transient,))
    cluster.settle()
    assert cluster.condition("Valid")["reason"] == "PodRefused"
    cluster.refused_dry_runs.clear()
    cluster.pass_time(29.0)
    cluster.settle()
    assert cluster.condition("Valid")["reason"] == "PodRefused"
    cluster.pass_time(1.0)
    cluster.settle()
    assert cluster.condition("Valid")["status"] == "True"


def dry_run_of(cluster: ModelCluster) -> DryRun:
    """The next one, of what the pass before has not validated."""
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    return next(a for a in actions if isinstance(a, DryRun))


def test_all_that_a_generation_creates_is_validated_in_the_order_of_creation(
    cluster: ModelCluster,
) -> None:
    dry_run = dry_run_of(cluster)
    assert [m["kind"] for m in dry_run.objects] == [
        "ConfigMap",
        "Secret",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "Lease",
        "PodDisruptionBudget",
    ]
    coordinator, *tasks = (pod for _, pod in dry_run.pods)
    assert coordinator["metadata"]["labels"][names.LABEL_ROLE] == names.ROLE_COORDINATOR
    assert "serviceAccountName" not in coordinator["spec"], "it need not exist yet"
    assert len(tasks) == len({pod["metadata"]["name"] for pod in tasks}) == 4
    assert dry_run.exchange is None


def test_what_exists_is_not_validated_again(running: ModelCluster) -> None:
    running.edit("flights", suspend=True)
    assert [m["kind"] for m in dry_run_of(running).objects] == ["ConfigMap"]


_HIGHER = {"queries": [{**q, "priority": 1000} for q in flights_spec()["queries"]]}
_OTHER_SQL = {
    "operators": [
        {**o, "sql": f"{o['sql']} -- another"} if "sql" in o else o
        for o in flights_spec()["operators"]
    ]
}
_LARGER = {"resources": {"requests": {"cpu": "900m", "memory": "2Gi"}}}


_LARGER_TASKS = {"operators": [{**o, **_LARGER} for o in flights_spec()["operators"]]}
_LARGER_COORDINATOR = {"coordinator": {"resources": {"requests": {"cpu": "1"}}}}
_LIMITS = {
    "podTemplate": {
        "spec": {"containers": [{"name": "task", "resources": {"limits": {"cpu": "3"}}}]}
    }
}
_PODS, _CPU, _LIMIT = "pods=1", "requests.cpu=500m", "limits.cpu=1"


def full_quota(cluster: ModelCluster, requested: str, room: int = 0) -> str:
    """The API server's words about a quota that is used but for `room` cores, or pods, of each
    resource; negative: it was lowered."""
    name = requested.partition("=")[0]
    cpu_m = sum(p.requests.cpu_m for p in cluster.pods())
    used = {_PODS: f"{len(cluster.raw_pods)}000m", _CPU: f"{cpu_m}m", _LIMIT: "9000m"}[requested]
    limited = int(used[:-1]) + 1000 * room
    return (
        f"exceeded quota: few, requested: {requested}, used: {name}={used}, "
        f"limited: {name}={limited}m"
    )


@pytest.mark.parametrize(
    ("edit", "requested", "room", "fits"),
    [
        (_HIGHER, _PODS, -5, True),  # it creates no pod
        (_HIGHER, _LIMIT, -5, True),
        (with_replicas(1), _PODS, -5, True),
        ({"suspend": True}, _PODS, -5, True),
        (_OTHER_SQL, _PODS, 0, True),
        (_OTHER_SQL, _CPU, 0, True),
        (_OTHER_SQL, _PODS, -1, False),
        (_OTHER_SQL, _LIMIT, 0, False),
        (with_replicas(3), _PODS, 0, False),
        (with_replicas(3), _PODS, 1, False),
        (with_replicas(3), _PODS, 9, True),
        ({**_OTHER_SQL, **_LARGER}, _CPU, 0, False),
        (_LARGER_TASKS, _PODS, 0, True),
        (_LARGER_TASKS, _CPU, 0, False),  # a roll replaces them
        (_LARGER_TASKS, _CPU, 4, True),
        (_LARGER_COORDINATOR, _CPU, 0, False),
        (_LIMITS, _LIMIT, 0, False),
        (_LIMITS, _PODS, 0, True),
    ],
)
def test_an_edit_fits_into_a_full_quota_by_the_numbers_of_all_pods_that_it_replaces(
    running: ModelCluster, edit: dict[str, Any], requested: str, room: int, fits: bool
) -> None:
    refusal = full_quota(running, requested, room)
    running.edit("flights", **edit)
    exchange = dry_run_of(running).exchange
    assert exchange is not None
    refused = ResourceAmounts(cpu_m=500, memory=1 << 30, pods=1)
    assert exchange.fits(refusal, refused) is fits


@pytest.mark.parametrize(
    ("message", "fits"),
    [
        ("requested: cpu=1,pods=1, used: cpu=4,pods=2, limited: cpu=4,pods=2", True),
        ("requested: cpu=1,pods=1, used: cpu=4,pods=2, limited: cpu=3,pods=2", False),
        ("requested: cpu=1,limits.cpu=1, used: cpu=4,limits.cpu=1, limited: cpu=4,limits.cpu=9", 0),
        ("requested: memory=2Gi, used: memory=4Gi, limited: memory=4Gi", True),
        ("requested: memory=3Gi, used: memory=4Gi, limited: memory=4Gi", False),  # a sidecar
        ("requested: requests.example.com/gpu=0, used: requests.example.com/gpu=1, limited: x", 0),
        ("requested: count/pods=1, used: count/pods=2, limited: count/pods=9", False),
        ("requested: pods=1, used: pods=2", False),
        ("pods", False),
    ],
)
def test_each_resource_of_a_full_quota_counts(message: str, fits: bool) -> None:
    both = ResourceAmounts(cpu_m=2000, memory=4 << 30, pods=2)
    refused = ResourceAmounts(cpu_m=1000, memory=2 << 30, pods=1)
    refusal = f'pods "t" is forbidden: exceeded quota: a.b-c, {message}'
    assert PodExchange(freed=both, needed=both).fits(refusal, refused) is bool(fits)


def test_what_has_moved_is_freed_too(running: ModelCluster) -> None:
    """Its pod is the one of its slot's other number."""
    refusal = full_quota(running, _PODS)
    for name, task in running.tasks().items():
        assert task.slot is not None
        labels = running.raw_pods[name]["metadata"]["labels"]
        labels[names.LABEL_REPLICA] = str(task.slot.alternate.replica)
    running.edit("flights", **_OTHER_SQL)
    exchange = dry_run_of(running).exchange
    assert exchange is not None
    assert exchange.fits(refusal, ResourceAmounts(pods=1))


def test_an_edit_in_a_quota_that_was_lowered_ends_nothing(running: ModelCluster) -> None:
    operator = ModelOperator(running)
    before = running.tasks().keys()
    running.quota = len(running.raw_pods) - 4
    running.edit("flights", **_OTHER_SQL)
    operator.run(30)
    assert running.condition("Valid")["reason"] == "QuotaFull"
    assert running.tasks().keys() == before
    running.quota += 4
    operator.run(30)
    assert running.condition("Valid")["status"] == "True"
    assert running.condition("Available")["status"] == "True"


def test_an_edit_waits_for_room_in_a_quota_and_nothing_changes(running: ModelCluster) -> None:
    before = running.tasks()
    full = DryRunResult(waits_for="exceeded quota: few, requested: pods=1")
    running.refused_dry_runs["uid-flights", 2] = full
    running.edit("flights", **with_replicas(3))
    running.settle()
    valid = running.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("Unknown", "QuotaFull")
    assert "requested: pods=1" in valid["message"]
    assert "generation 1 keeps running" in valid["message"]
    assert running.event_reasons().count("QuotaFull") == 1
    assert running.condition("Available")["status"] == "True"
    assert running.tasks() == before
    running.refused_dry_runs.clear()
    running.pass_time(10.0)
    running.settle()
    assert running.condition("Valid")["status"] == "True"


def test_the_coordinator_has_the_resources_of_its_field(cluster: ModelCluster) -> None:
    resources = {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}
    cluster.edit("flights", coordinator={"resources": resources})
    _, pod = dry_run_of(cluster).pods[0]
    assert pod["spec"]["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": "160Mi"},
        "limits": {"cpu": "2", "memory": "1Gi"},
    }


def test_a_problem_found_by_a_task_stays_until_all_is_live(running: ModelCluster) -> None:
    refusal = {"refused": "alarms", "problem": "alarms: operator alarms: no such function"}
    running.task_reports["flights-alarms-0-0-1"] = {"phase": "Failed", **refusal}
    running.task_reports["flights-alarms-0-1-1"] = {"phase": "Failed", **refusal}
    running.settle()
    valid, alarms = running.condition("Valid"), _position(running, "alarms")
    assert (valid["status"], valid["reason"]) == ("False", "RefusedByTask")
    assert valid["message"] == f"spec.operators[{alarms}]: {refusal['problem']}"
    assert running.condition("Ready")["reason"] == "RefusedByTask"
    assert running.event_reasons().count("Invalid") == 1

    for name in running.task_reports:  # their containers are started again
        running.task_reports[name] = {"phase": "Restoring"}
    running.settle()
    assert running.condition("Valid") == valid
    running.task_reports.clear()
    running.settle()
    assert running.condition("Valid")["status"] == "True"


def test_a_problem_found_by_a_task_ends_with_its_generation(
    running: ModelCluster,
) -> None:
    for name in ("flights-alarms-0-0-1", "flights-alarms-0-1-1"):
        running.task_reports[name] = {
            "phase": "Failed",
            "refused": "alarms",
            "problem": "alarms: no",
        }
    running.settle()
    assert running.condition("Valid")["status"] == "False"
    for name in running.task_reports:
        running.task_reports[name] = {"phase": "Restoring"}
    running.edit("flights", suspend=False)
    running.settle()
    assert running.condition("Valid")["status"] == "True"


def _position(cluster: ModelCluster, operator: str) -> int:
    operators = cluster.topologies["flights"].spec["operators"]
    return [o["name"] for o in operators].index(operator)


def test_priorities_and_queries_change_in_place(running: ModelCluster) -> None:
    before = running.tasks()
    queries = [dict(q) for q in flights_spec()["queries"]]
    queries[0]["priority"] = 1
    sink = {"files": {"url": "file:///var/lib/rekindle/output/again", "format": "json"}}
    queries.append({**queries[0], "name": "again", "sink": sink})
    running.edit("flights", queries=queries)
    running.settle()
    assert running.tasks() == before
    assert running.query_states()["again"] == "Live"
    assert "flights-g2" in running.generation_records


def test_a_template_with_a_data_volume_keeps_the_other_volumes(
    cluster: ModelCluster,
) -> None:
    larger = {"volumes": [{"name": "data", "emptyDir": {"sizeLimit": "20Gi"}}]}
    cluster.edit("flights", podTemplate={"spec": larger})
    cluster.settle()
    pods = [cluster.raw_pods[name] for name in cluster.tasks()]
    assert pods
    for pod in pods:
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        assert volumes["data"] == larger["volumes"][0]
        assert "topology" in volumes


def test_the_plan_counts_devices_that_a_template_requests(
    cluster: ModelCluster,
) -> None:
    requested = {"requests": {"cpu": "3"}, "limits": {"example.com/gpu": 1, "memory": "2Gi"}}
    template = {"spec": {"containers": [{"name": "task", "resources": requested}]}}
    cluster.edit("flights", podTemplate=template)
    cluster.settle()
    assert cluster.tasks()
    for name, pod in cluster.tasks().items():
        resources = cluster.raw_pods[name]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == requested["limits"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert (pod.requests.cpu_m, pod.requests.memory) == (3000, 1024**3)
        assert pod.requests.others == (("example.com/gpu", 1),)


def test_a_fused_tasks_limits_are_the_highest_of_its_nodes(cluster: ModelCluster) -> None:
    spec = flights_spec()
    limits: Any = [{"cpu": 2, "memory": "1500Mi"}, {"cpu": "1500m", "memory": "1Gi"}]
    for nodes in (spec["sources"], spec["operators"]):
        for at, node in enumerate(nodes):
            node["resources"] = {"limits": limits[at % 2]}
    cluster.edit("flights", sources=spec["sources"], operators=spec["operators"])
    cluster.settle()
    fused = 0
    for name in cluster.tasks():
        resources = cluster.raw_pods[name]["spec"]["containers"][0]["resources"]
        assert resources["limits"] in limits
        requested = ResourceAmounts.parse(resources["requests"])
        assert requested == ResourceAmounts.parse(resources["limits"])
        fused += resources["limits"] == limits[0]
    assert fused


_EDIT: dict[str, Any] = {"podTemplate": {"spec": {"nodeSelector": {"disk": "fast"}}}}


def test_an_edit_reaches_pods_that_wait_for_a_node(cluster: ModelCluster) -> None:
    cluster.add_node("a", labels={"disk": "slow"})
    cluster.edit("flights", podTemplate={"spec": {"nodeSelector": {"disk": "none"}}})
    cluster.settle()
    assert all(p.gates for p in cluster.tasks().values())
    cluster.edit("flights", podTemplate={"spec": {"nodeSelector": {"disk": "slow"}}})
    cluster.settle()
    assert any(p.node == "a" for p in cluster.tasks().values())
    assert all(name.endswith("-2") for name in cluster.tasks())
    assert "recovery" not in cluster.status()


def test_an_edit_replaces_a_bound_pod_that_does_not_start(running: ModelCluster) -> None:
    running.stuck.add("flights-storms-0-0-1")
    running.raw_pods["flights-storms-0-0-1"]["status"].pop("conditions")
    running.settle()
    before = set(running.tasks())
    running.edit("flights", image="rekindle/pipelines:repaired")
    running.settle()
    assert set(running.tasks()) - before == {"flights-storms-0-0-2"}
    assert running.status()["phase"] == "Running"
    assert "recovery" not in running.status()


def test_an_edit_does_not_replace_a_task_that_crashed(running: ModelCluster) -> None:
    """Its output log is on its node's disk, so it restarts sooner than a new pod."""
    name = "flights-storms-0-0-1"
    down = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:02:00Z"}
    status = {"startTime": "2026-01-01T00:00:00Z", "conditions": [down]}
    running.raw_pods[name]["status"] |= status
    running.stuck.add(name)
    running.settle()
    running.edit("flights", image="rekindle/pipelines:repaired")
    running.settle()
    assert name in running.tasks()


def test_an_edit_without_effect_on_tasks_keeps_gated_pods(cluster: ModelCluster) -> None:
    cluster.settle()
    before = set(cluster.tasks())
    queries = [{**q, "priority": 7} for q in flights_spec()["queries"]]
    cluster.edit("flights", queries=queries)
    cluster.settle()
    assert set(cluster.tasks()) == before


def test_outdated_pods_are_counted_in_the_status(running: ModelCluster) -> None:
    running.edit("flights", image="other")
    running.settle()
    assert "8 of 8 pods are outdated" in running.condition("Valid")["message"]
    running.raw_pods.pop(sorted(running.tasks())[0])
    running.settle()
    assert "7 of 8 pods are outdated" in running.condition("Valid")["message"]
    running.edit("flights", queries=flights_spec()["queries"])
    running.settle()
    assert "7 of 8 pods are outdated" in running.condition("Valid")["message"]


@pytest.mark.parametrize(
    ("edit", "outdated"),
    [
        ({"maxDelay": "3s"}, True),
        ({"maxDelay": "Infinite", "availability": {"delayFraction": 0.5}}, False),
    ],
)
def test_pods_with_another_max_delay_are_outdated(
    running: ModelCluster, edit: dict[str, object], outdated: bool
) -> None:
    running.edit("flights", **edit)
    running.settle()
    assert ("8 of 8 pods are outdated" in running.condition("Valid")["message"]) is outdated


def test_pods_that_read_a_topic_by_other_brokers_are_outdated(running: ModelCluster) -> None:
    def edit(brokers: str) -> bool:
        kafka = {"bootstrapServers": brokers, "topic": "t", "format": "json"}
        sources = [{**s, "files": None, "kafka": kafka} for s in flights_spec()["sources"]]
        sources = [{k: v for k, v in s.items() if v is not None} for s in sources]
        running.edit("flights", sources=sources)
        running.settle()
        return "pods are outdated" in running.condition("Valid")["message"]

    assert not edit("b:9092")
    before = set(running.tasks())
    assert edit("c:9092")
    assert set(running.tasks()) == before


def test_an_edit_does_not_affect_running_pods(running: ModelCluster) -> None:
    before = running.tasks()
    running.edit("flights", **_EDIT)
    running.settle()
    assert running.tasks() == before


def test_replicas_are_added_and_removed_in_place(running: ModelCluster) -> None:
    before = set(running.tasks())
    sources = [dict(s) for s in flights_spec()["sources"]]
    operators = [dict(o) for o in flights_spec()["operators"]]
    for node in [*sources, *operators]:
        if node["name"] in ("weather", "storms"):
            node["replicas"] = 2
    running.edit("flights", sources=sources, operators=operators)
    running.settle()
    assert set(running.tasks()) == before | {"flights-storms-0-1-1"}
    running.edit(
        "flights", sources=flights_spec()["sources"], operators=flights_spec()["operators"]
    )
    running.settle()
    assert set(running.tasks()) == before


def test_a_replica_removed_and_added_again_is_no_loss(cluster: ModelCluster) -> None:
    cluster.edit("flights", **with_replicas(3))
    for name in "abcd":
        cluster.add_node(name, cpu_m=16_000, memory=64 << 30)
    cluster.settle()
    for replicas in (2, 3):
        cluster.edit("flights", **with_replicas(replicas))
        cluster.settle()
    assert cluster.status()["phase"] == "Running"
    assert "recovery" not in cluster.status()


def test_a_surplus_replica_stays_until_one_that_stays_is_live(running: ModelCluster) -> None:
    kept, surplus = "flights-alarms-0-0-1", "flights-alarms-0-1-1"
    running.stuck.add(kept)
    running.settle()
    running.edit("flights", **with_replicas(1))
    running.settle()
    assert surplus in running.tasks()
    running.stuck.clear()
    running.settle()
    assert surplus not in running.tasks()
    assert kept in running.tasks()


def test_a_changed_segment_is_replaced_and_the_others_stay(running: ModelCluster) -> None:
    before = set(running.tasks())
    operators = [dict(o) for o in flights_spec()["operators"]]
    changed = next(o for o in operators if o["name"] == "routes")
    changed["window"] = {**changed["window"], "size": "14d"}
    running.edit("flights", operators=operators)
    running.settle()
    after = running.tasks()
    assert before - set(after) == set() or {"flights-routes-0-0-1"} >= before - set(after)
    generations = {p.segment_name: p.generation for p in after.values()}
    assert generations["routes"] == 2
    assert generations["alarms"] == 1


def test_suspension_stops_all_pods_and_is_no_recovery(
    running: ModelCluster,
) -> None:
    slots = running.status()["slots"]
    running.edit("flights", suspend=True)
    running.settle()
    assert not running.raw_pods
    assert running.status()["phase"] == "Suspended"
    assert running.status()["slots"] == slots
    running.edit("flights", suspend=False)
    running.settle()
    assert running.status()["phase"] == "Running"
    assert all(name.endswith("-2") for name in running.tasks())
    assert "recovery" not in running.status()
    assert {"Suspended", "Resumed"} <= set(running.event_reasons())


def _lose_replicas_that_an_edit_keeps(cluster: ModelCluster) -> None:
    """A node with replicas 0 is lost; an edit then removes the replicas 1, which still run."""
    cluster.edit("flights", **with_replicas(2))
    for name in "ab":
        cluster.add_node(name, cpu_m=16_000, memory=64 << 30)
    cluster.settle()
    victim = next(p.node for p in cluster.tasks().values() if p.slot and p.slot.replica == 0)
    cluster.kill_node_until_not_ready(victim or "")
    cluster.settle()
    cluster.edit("flights", **with_replicas(1))


def test_the_last_surplus_replica_serves_without_capacity(
    cluster: ModelCluster,
) -> None:
    """The replica that stays may not be on the same node, and there is no other node."""
    _lose_replicas_that_an_edit_keeps(cluster)
    for _ in range(5):
        cluster.settle()
        cluster.pass_time(70.0)
    assert set(cluster.query_states().values()) == {"Live"}
    assert any(p.slot.replica == 1 for p in cluster.tasks().values() if p.slot)
    cluster.add_node("c", cpu_m=16_000, memory=64 << 30)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    assert all(p.slot.replica == 0 for p in cluster.tasks().values() if p.slot)


def test_a_silent_surplus_replica_is_replaced(cluster: ModelCluster) -> None:
    """Then the replica that stays may use its node, and starts from the checkpoint."""
    _lose_replicas_that_an_edit_keeps(cluster)
    cluster.settle()
    pod = next(p for p in cluster.tasks().values() if p.slot and p.slot.replica == 1)
    cluster.stuck.add(pod.name)
    cluster.suspects_silent_since[pod.ref] = cluster.now
    for _ in range(30):
        cluster.pass_time(1.0)
        cluster.settle()
    assert pod.name not in cluster.tasks()
    assert set(cluster.query_states().values()) == {"Live"}


def test_slots_of_removed_segments_do_not_accumulate(running: ModelCluster) -> None:
    """`status.slots` has a limit, and a refused write would make all later writes fail."""
    operators = [dict(o) for o in flights_spec()["operators"]]
    changed = next(o for o in operators if o["name"] == "routes")
    sizes = []
    for days in range(2, 6):
        changed["window"] = {**changed["window"], "size": f"{days * 7}d"}
        running.edit("flights", operators=operators)
        running.settle()
        sizes.append(len(running.status()["slots"]))
    assert sizes[-1] == sizes[0]
    assert running.status()["phase"] == "Running"
    running.edit("flights", operators=flights_spec()["operators"])
    running.settle()
    assert running.status()["phase"] == "Running"


def test_an_invalid_generation_record_keeps_the_recovery_status(
    running: ModelCluster,
) -> None:
    for name in "abc":
        running.remove_node(name)
    running.settle()
    record = running.generation_records["flights-g1"]
    document = json.loads(record["data"]["topology.json"])
    document["spec"]["queries"][0]["from"] = "nowhere"
    record["data"]["topology.json"] = json.dumps(document)
    view = running.topologies["flights"]
    listed = [{"generation": 1, "digest": record_digest(json.dumps(document))}]
    running.topologies["flights"] = replace(view, status={**view.status, "generations": listed})
    before = running.status()["recovery"]
    assert "finishedAt" not in before["history"][0]
    running.settle()
    assert running.status()["recovery"] == before
    running.edit("flights", image="rekindle/pipelines:another")
    for name in "xyz":
        running.add_node(name, cpu_m=16_000, memory=64 << 30)
    running.settle()
    assert running.status()["phase"] == "Running"


def accepted(cluster: ModelCluster) -> tuple[bool, str]:
    """The newest Event of an acceptance."""
    event = next(e for e in reversed(cluster.events) if e.reason == "Accepted")
    return event.warning, event.note


def test_the_event_of_an_edit_says_what_begins_anew(running: ModelCluster) -> None:
    assert accepted(running) == (False, "generation 1 is accepted")
    operators = [dict(o) for o in flights_spec()["operators"]]
    next(o for o in operators if o["name"] == "delays")["partitions"] = 1
    running.edit("flights", operators=operators)
    running.settle()
    warning, note = accepted(running)
    assert warning
    assert note == (
        "generation 2 is accepted; begin anew: delays (partitions 2 -> 1), alarms (reads delays, "
        "which begins anew); keep their state: departures, weather, flown, storms, routes; will "
        "lack results: delay-alarms (reads alarms, which begins anew)"
    )


def test_the_event_of_an_edit_that_loses_nothing_is_normal(running: ModelCluster) -> None:
    running.edit("flights", replicas=2)
    running.settle()
    assert accepted(running) == (
        False,
        "generation 2 is accepted; all operators keep their state",
    )


def test_an_edit_back_is_compared_with_what_ran_before(running: ModelCluster) -> None:
    operators = [dict(o) for o in flights_spec()["operators"]]
    next(o for o in operators if o["name"] == "delays")["partitions"] = 1
    running.edit("flights", operators=operators)
    running.settle()
    running.edit("flights", operators=flights_spec()["operators"])
    running.settle()
    assert "begin anew: delays (partitions 1 -> 2)" in accepted(running)[1]


def test_bad_records_of_a_source_are_an_event_with_an_example(running: ModelCluster) -> None:
    for name in running.tasks("flights"):
        running.task_reports[name] = {"badRecords": 2, "badRecord": "offset 7 is no number"}
    for _ in range(2):
        running.settle()
    sources = [source["name"] for source in flights_spec()["sources"]]
    assert sorted(running.status()["badRecords"]) == sorted(sources)
    events = [e for e in running.events if e.reason == "BadRecords"]
    assert sorted(e.note for e in events) == sorted(
        f"source {name}: records that are no rows are left out, such as offset 7 is no number"
        for name in sources
    )
    assert all(event.warning for event in events)


def test_a_hot_key_is_one_event_for_all_replicas_and_goes_away(running: ModelCluster) -> None:
    text = "operator delays, partition 1: about 60 % of its rows of flights have one key"
    replicas = [name for name in running.tasks("flights") if "-alarms-1-" in name]
    assert len(replicas) == 2
    running.task_reports = {name: {"hotKey": text} for name in replicas}
    for _ in range(2):
        running.settle()
    assert running.status()["hotKeys"] == ["delays/1"]
    (event,) = [e for e in running.events if e.reason == "HotKey"]
    assert (event.warning, event.note) == (True, text)
    running.task_reports = {}
    running.settle()
    assert "hotKeys" not in running.status()


def test_results_that_an_edit_loses_are_in_the_status_and_an_event(running: ModelCluster) -> None:
    missing = {"fromEpoch": 40, "toEpoch": 43, "sinceGeneration": 2, "to": "2013-01-02T00:00:00Z"}
    running.query_reports = {"storm-watch": {"missing": [missing]}}
    running.settle()
    queries = {q["name"]: q for q in running.status()["queries"]}
    assert queries["storm-watch"]["missing"] == [missing]
    assert "missing" not in queries["delay-alarms"]
    (event,) = [e for e in running.events if e.reason == "ResultsMissing"]
    assert event.warning
    assert event.note == (
        "query storm-watch: its results before 2013-01-02T00:00:00Z are missing (epochs 40 to 43), "
        "because generation 2 began anew"
    )
