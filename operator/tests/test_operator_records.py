"""Reconcile: which generation records count, and the list of them in the status."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_api import ModelOperator
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.cluster.model import record_digest
from rekindle_operator.pod_policy import PodPolicy
from rekindle_operator.reconcile.actions import CreateGenerationRecord, CreatePod, WriteStatus
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.topology_status import read_topology_status

SPEC = flights_spec()
_PRIVILEGED = {
    "hostPID": True,
    "containers": [{"name": "task", "securityContext": {"privileged": True}}],
}


def forge(cluster: ModelCluster, generation: int, name: str = "") -> str:
    """Writes a record as the author of a topology could with the right to create ConfigMaps;
    returns its name."""
    raw = copy.deepcopy(cluster.generation_records["flights-g1"])
    record = json.loads(raw["data"][names.TOPOLOGY_KEY])
    record["generation"] = generation
    record["spec"]["podTemplate"] = {"spec": _PRIVILEGED}
    raw["data"][names.TOPOLOGY_KEY] = json.dumps(record)
    raw["metadata"]["labels"][names.LABEL_GENERATION] = str(generation)
    raw["metadata"]["name"] = name or f"flights-g{generation}"
    cluster.generation_records[raw["metadata"]["name"]] = raw
    return str(raw["metadata"]["name"])


def privileged(cluster: ModelCluster) -> list[str]:
    return [name for name, raw in cluster.raw_pods.items() if raw["spec"].get("hostPID")]


def listed(cluster: ModelCluster) -> dict[int, str]:
    entries = cluster.status()["generations"]
    return {e["generation"]: e.get("digest", "") for e in entries}


def set_status(cluster: ModelCluster, **fields: Any) -> None:
    view = cluster.topologies["flights"]
    status = {k: v for k, v in {**view.status, **fields}.items() if v is not None}
    cluster.topologies["flights"] = replace(view, status=status)


def lose_a_task(cluster: ModelCluster) -> None:
    cluster.raw_pods.pop(sorted(cluster.tasks())[0])


def test_a_record_written_before_the_edit_is_refused(running: ModelCluster) -> None:
    before = listed(running)
    name = forge(running, 2)
    running.edit("flights", image="another")
    lose_a_task(running)
    running.settle()
    assert privileged(running) == []
    valid = running.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", "ForeignRecord")
    assert f"default/{name}" in valid["message"]
    assert "kubectl delete configmap flights-g2 -n default" in valid["message"]
    assert "generation 1 keeps running" in valid["message"]
    assert listed(running) == before | {2: ""}
    assert running.status()["phase"] == "Running"


def test_a_generation_is_accepted_once_its_foreign_record_is_gone(running: ModelCluster) -> None:
    name = forge(running, 2)
    running.edit("flights", image="another")
    running.settle()
    del running.generation_records[name]
    running.settle()
    assert running.condition("Valid")["status"] == "True"
    assert (
        json.loads(running.generation_records[name]["data"][names.TOPOLOGY_KEY])["image"]
        == "another"
    )


@pytest.mark.parametrize("generation", [1, 3, 999])
def test_a_record_of_another_generation_or_name_has_no_effect(
    running: ModelCluster, generation: int
) -> None:
    forge(running, generation, "zz" if generation == 1 else "")
    lose_a_task(running)
    running.settle()
    assert privileged(running) == []
    assert running.condition("Valid")["status"] == "True"
    running.edit("flights", image="another")
    running.settle()
    assert running.condition("Valid")["message"].startswith("generation 2 is accepted")


def test_a_record_older_than_its_topology_is_refused_until_it_is_deleted(
    cluster: ModelCluster,
) -> None:
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    raw = copy.deepcopy(cluster.generation_records)
    again = ModelCluster()
    again.add_topology("flights", flights_spec())
    for name in "abc":
        again.add_node(name)
    again.generation_records = raw
    name = forge(again, 1)
    again.settle()
    assert not again.raw_pods
    assert again.condition("Valid")["reason"] == "ForeignRecord"
    del again.generation_records[name]
    again.settle()
    assert again.status()["phase"] == "Running"


def test_an_edit_that_is_refused_leaves_no_digest(cluster: ModelCluster) -> None:
    cluster.edit("flights", podTemplate={"spec": _PRIVILEGED})
    cluster.settle()
    assert cluster.condition("Valid")["reason"] == "NotAllowed"
    assert listed(cluster) == {2: ""}


def test_a_record_waits_for_the_status_with_its_digest_and_pods_for_the_record(
    cluster: ModelCluster,
) -> None:
    for name in "abc":
        cluster.add_node(name)
    cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    kinds = [type(a) for a in actions]
    assert kinds.index(WriteStatus) < kinds.index(CreateGenerationRecord)
    assert CreatePod not in kinds
    assert cluster.condition("Valid")["reason"] == "Checking"
    cluster.apply(actions)
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    assert CreatePod in [type(a) for a in actions]


def test_an_edit_whose_record_is_not_created_changes_nothing(running: ModelCluster) -> None:
    before = {p.uid for p in running.tasks().values()}
    operators = [o | ({"partitions": 4} if "keyBy" in o else {}) for o in SPEC["operators"]]
    running.edit("flights", operators=operators)
    for _ in range(20):
        actions = reconcile(running.snapshot(), running.now, running.settings)
        running.apply(a for a in actions if not isinstance(a, CreateGenerationRecord))
        running.pass_time(1.0)
    assert {p.uid for p in running.tasks().values()} == before
    assert running.condition("Available")["status"] == "True"
    assert running.condition("Valid")["reason"] == "Checking"
    assert "generation record" in running.condition("Valid")["message"]
    running.settle()
    assert running.condition("Valid")["status"] == "True"
    assert {p.uid for p in running.tasks().values()} != before


def test_a_record_is_created_after_the_operator_died(cluster: ModelCluster) -> None:
    """It had written the status, and not created the record yet."""
    for name in "abc":
        cluster.add_node(name)
    cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    cluster.apply(a for a in actions if isinstance(a, WriteStatus))
    assert not cluster.generation_records
    before = listed(cluster)
    cluster.settle()
    assert listed(cluster) == before
    assert cluster.status()["phase"] == "Running"


def test_another_version_replaces_the_digest_of_a_missing_record(
    cluster: ModelCluster,
) -> None:
    """Its default image differs, and so its record."""
    for name in "abc":
        cluster.add_node(name)
    cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    cluster.apply(a for a in actions if isinstance(a, WriteStatus))
    pods = replace(cluster.settings.pods, image="rekindle/pipelines:next")
    cluster.settings = replace(cluster.settings, pods=pods)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    text = cluster.generation_records["flights-g1"]["data"][names.TOPOLOGY_KEY]
    assert listed(cluster) == {1: record_digest(text)}


def test_existing_records_are_accepted_if_the_status_has_no_list(running: ModelCluster) -> None:
    set_status(running, generations=None)
    forge(running, 2)
    running.settle()
    assert set(listed(running)) == {1}
    running.edit("flights", image="another")
    lose_a_task(running)
    running.settle()
    assert privileged(running) == []
    assert running.condition("Valid")["reason"] == "ForeignRecord"


def test_a_version_without_the_list_may_lead_in_between(running: ModelCluster) -> None:
    before = listed(running)
    set_status(running, generations=None)
    running.settle()
    assert listed(running) == before
    assert running.status()["phase"] == "Running"


def test_a_stricter_policy_ends_nothing_that_runs(running: ModelCluster) -> None:
    pods = replace(running.settings.pods, policy=PodPolicy(images=("registry.example/",)))
    running.edit("flights", image="another")
    running.settle()
    running.settings = replace(running.settings, pods=pods)
    lose_a_task(running)
    running.settle()
    assert running.condition("Valid")["status"] == "True"
    assert running.status()["phase"] == "Running"


def test_a_record_that_was_deleted_is_created_again(running: ModelCluster) -> None:
    before, digests = dict(running.generation_records), listed(running)
    running.generation_records.clear()
    running.settle()
    assert running.generation_records == before
    assert listed(running) == digests


def test_a_status_that_was_wiped_takes_the_same_record(running: ModelCluster) -> None:
    digests = listed(running)
    view = running.topologies["flights"]
    slots = view.status["slots"]
    running.topologies["flights"] = replace(view, status={})
    set_status(running, slots=slots, generations=[{"generation": 1}])
    running.settle()
    assert listed(running) == digests
    assert running.status()["phase"] == "Running"


def test_digests_leave_the_list_with_their_records(running: ModelCluster) -> None:
    for number in range(2, 15):
        queries = [{**q, "priority": number} for q in flights_spec()["queries"]]
        running.edit("flights", queries=queries)
        running.settle()
    assert set(listed(running)) == {int(n.rpartition("g")[2]) for n in running.generation_records}
    assert len(listed(running)) <= 12
    assert 14 in listed(running)


def test_a_failed_reconcile_keeps_the_list(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    digests = listed(running)
    running.edit("flights", image="another")
    monkeypatch.setattr("rekindle_operator.reconcile.core._find_needs", fail)
    for _ in range(4):
        running.apply(reconcile(running.snapshot(), running.now, running.settings))
    assert running.condition("Degraded")["reason"] == "ReconcileFailed"
    assert listed(running).keys() == {1, 2}
    assert listed(running)[1] == digests[1]
    assert listed(running)[2]


def test_a_first_reconcile_that_fails_writes_the_list(
    cluster: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("rekindle_operator.reconcile.core._observe", fail)
    cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
    assert listed(cluster) == {1: ""}


@pytest.mark.parametrize(
    ("raw", "generations"),
    [
        ({}, {}),
        ({"phase": "Running"}, None),
        ({"generations": "x"}, {}),
        ({"generations": [{"generation": 1}, {"generation": "x"}, 3]}, {1: ""}),
        ({"generations": [{"generation": 2, "digest": "d"}]}, {2: "d"}),
    ],
)
def test_a_status_is_read_with_its_list(raw: Any, generations: Any) -> None:
    assert read_topology_status(raw).generations == generations


_OTHER_SQL = {
    "operators": [
        {**o, "sql": o["sql"].replace("delay > 30", "delay > 31")} if "sql" in o else o
        for o in SPEC["operators"]
    ]
}
_WRONG_SQL = {"operators": [{**o, "sql": "SELEC"} if "sql" in o else o for o in SPEC["operators"]]}


def delete_record_of_an_edit(cluster: ModelCluster) -> dict[str, Any]:
    """Generation 2 runs, generation 3 is refused, and the record of 2 is deleted; returns it."""
    cluster.edit("flights", **_OTHER_SQL)
    cluster.settle()
    cluster.edit("flights", **_WRONG_SQL)
    cluster.settle()
    return cluster.generation_records.pop("flights-g2")


def test_a_record_deleted_while_the_operator_runs_is_created_again(running: ModelCluster) -> None:
    operator = ModelOperator(running)
    running.edit("flights", **_OTHER_SQL)
    operator.run(10)
    running.edit("flights", **_WRONG_SQL)
    operator.run(2)
    before, tasks = copy.deepcopy(running.generation_records), running.tasks()
    running.generation_records.clear()
    operator.run(2)
    assert running.generation_records == before
    assert running.tasks().keys() == tasks.keys()
    assert running.condition("Degraded")["status"] == "False"
    assert "generation 2 keeps running" in running.condition("Valid")["message"]


def test_only_records_that_are_accepted_are_kept_for_the_case_that_they_are_deleted(
    running: ModelCluster,
) -> None:
    operator = ModelOperator(running)
    forge(running, 7)
    operator.run(2)
    assert set(operator.snapshot().record_data) == set(listed(running).values())


def test_no_older_generation_runs_while_the_record_of_the_newest_is_missing(
    running: ModelCluster,
) -> None:
    """The operator has restarted since: nobody knows what it was."""
    delete_record_of_an_edit(running)
    tasks, digests = running.tasks(), listed(running)
    running.settle()
    assert running.tasks().keys() == tasks.keys()
    degraded = running.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "RecordMissing")
    assert "ConfigMap default/flights-g2 is gone" in degraded["message"]
    assert "generation 3: spec.operators" in degraded["message"]
    assert running.condition("Available")["status"] == "Unknown"
    assert listed(running) == digests


def test_a_record_restored_from_a_backup_counts(running: ModelCluster) -> None:
    record = delete_record_of_an_edit(running)
    tasks = running.tasks()
    running.settle()
    running.generation_records["flights-g2"] = record
    running.settle()
    assert running.condition("Degraded")["status"] == "False"
    assert running.condition("Available")["status"] == "True"
    assert running.tasks().keys() == tasks.keys()


def test_a_newer_generation_runs_although_the_record_before_is_missing(
    running: ModelCluster,
) -> None:
    delete_record_of_an_edit(running)
    running.settle()
    running.edit("flights", **_OTHER_SQL)
    running.settle()
    assert running.condition("Valid")["message"].startswith("generation 4 is accepted")
    assert running.condition("Available")["status"] == "True"
    assert running.condition("Degraded")["status"] == "False"


def test_a_missing_record_is_made_from_the_spec_whatever_the_policy_says_now(
    running: ModelCluster,
) -> None:
    running.edit("flights", **_OTHER_SQL)
    running.settle()
    before, tasks = copy.deepcopy(running.generation_records), running.tasks()
    del running.generation_records["flights-g2"]
    pods = replace(running.settings.pods, policy=PodPolicy(images=("registry.example/",)))
    running.settings = replace(running.settings, pods=pods)
    running.settle()
    assert running.generation_records == before
    assert running.tasks().keys() == tasks.keys()
    assert running.condition("Valid")["status"] == "True"


def test_records_of_a_topology_that_is_being_deleted_stay_deleted(running: ModelCluster) -> None:
    running.delete("flights")
    running.generation_records.clear()
    running.settle()
    assert not running.generation_records
