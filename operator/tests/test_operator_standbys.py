"""Standbys: when they are made, which slots they take, and when they give their capacity back.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from flights_example import flights_spec
from model_cluster import ModelCluster
from model_objects import rfc3339

from rekindle import names
from rekindle_operator.cluster.containers import failing_since
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import CreatePod, DeletePod, GiveSlot
from rekindle_operator.reconcile.core import reconcile
from rekindle_testing.fixtures.copy_of_one_build import copy_of_one_build

LARGE = 8000, 32 << 30


@copy_of_one_build
def running(standby: int | None = 1) -> ModelCluster:
    """Three nodes with room, on which the topology runs with its standbys."""
    made = ModelCluster()
    for name in "abc":
        made.add_node(name, *LARGE)
    spec = flights_spec()
    spec["recovery"] = {"standby": standby} if standby is not None else {}
    made.add_topology("flights", spec)
    made.settle()
    made.pass_time(1.0)
    made.settle()
    return made


def standbys(cluster: ModelCluster) -> list[PodView]:
    return cluster.pods_of("flights", names.ROLE_STANDBY)


def lose_a_task(cluster: ModelCluster) -> PodView:
    """One pod is deleted by force; returns it."""
    pod = sorted(cluster.tasks().values(), key=lambda p: p.name)[0]
    del cluster.raw_pods[pod.name]
    return pod


def tasks_of(cluster: ModelCluster, slot: Any) -> list[PodView]:
    return [p for p in cluster.tasks().values() if p.slot == slot]


def test_a_topology_that_runs_has_its_standbys_and_says_so() -> None:
    cluster = running(2)
    assert len(standbys(cluster)) == 2
    assert len({p.node for p in standbys(cluster)}) == 2
    assert cluster.status()["standby"] == "2/2"
    assert cluster.status()["phase"] == "Running"
    live, slots = cluster.status()["redundancy"].split("/")
    assert int(live) == int(slots) == len(cluster.tasks())


def test_without_the_field_there_are_none() -> None:
    cluster = running(None)
    assert not standbys(cluster)
    assert "standby" not in cluster.status()


def test_a_lost_task_continues_in_the_standby_in_one_pass() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    lost = lose_a_task(cluster)
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    assert [a.name for a in actions if isinstance(a, GiveSlot)] == [standby.name]
    assert not [a for a in actions if isinstance(a, CreatePod)]
    cluster.apply(actions)
    (task,) = tasks_of(cluster, lost.slot)
    assert (task.name, task.node, task.incarnation) == (standby.name, standby.node, 2)
    given = json.loads(task.given_slot)
    assert (given["segment"], given["incarnation"]) == (lost.slot.segment, 2)  # type: ignore[union-attr]
    cluster.pass_time(1.0)
    cluster.settle()
    assert cluster.status()["phase"] == "Running"
    assert [p.name for p in tasks_of(cluster, lost.slot)] == [standby.name]
    assert len(standbys(cluster)) == 1, "another one is made"


def test_a_standby_that_is_not_warm_is_not_given_a_slot() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    cluster.raw_pods[standby.name]["status"]["containerStatuses"][0]["started"] = False
    lose_a_task(cluster)
    assert not given_slots(cluster)


def given_slots(cluster: ModelCluster) -> list[GiveSlot]:
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    return [a for a in actions if isinstance(a, GiveSlot)]


def test_a_request_without_a_result_is_not_repeated_under_its_incarnation() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    lost = lose_a_task(cluster)
    actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
    (give,) = [a for a in actions if isinstance(a, GiveSlot)]
    cluster.apply(a for a in actions if a is not give)  # the operator dies before it
    cluster.pass_time(1.0)
    (again,) = given_slots(cluster)
    assert again.ref.incarnation == give.ref.incarnation + 1
    cluster.patch_pod(standby.name, give.patch)  # it arrives after all
    with pytest.raises(AssertionError):
        cluster.patch_pod(standby.name, again.patch)  # as the API server would refuse it
    cluster.settle()
    assert len(tasks_of(cluster, lost.slot)) == 1


def test_two_lost_tasks_and_one_standby() -> None:
    cluster = running()
    first, second = lose_a_task(cluster), lose_a_task(cluster)
    assert len(given_slots(cluster)) == 1
    cluster.settle()
    assert len(tasks_of(cluster, first.slot)) == len(tasks_of(cluster, second.slot)) == 1


def test_an_edit_of_the_spec_replaces_standbys() -> None:
    cluster = running()
    (before,) = standbys(cluster)
    cluster.edit("flights", epochInterval="2s")
    cluster.settle()
    cluster.pass_time(1.0)
    cluster.settle()
    (after,) = standbys(cluster)
    assert after.generation == 2 > before.generation


def test_a_suspended_topology_has_none() -> None:
    cluster = running()
    cluster.edit("flights", suspend=True)
    cluster.settle()
    assert not standbys(cluster)


def test_a_lower_number_ends_those_that_are_too_many() -> None:
    cluster = running(2)
    cluster.edit("flights", recovery={"standby": 1})
    cluster.settle()
    cluster.pass_time(1.0)
    cluster.settle()
    assert len(standbys(cluster)) == 1


def test_standbys_give_their_capacity_to_tasks_of_lost_nodes() -> None:
    cluster = running(2)
    needed = sum(p.requests.cpu_m for p in cluster.pods() if p.role != names.ROLE_STANDBY)
    (node, *others) = cluster.nodes
    for name in others:
        cluster.remove_node(name)
    kept = cluster.nodes[node]
    room = replace(kept.allocatable, cpu_m=needed)
    cluster.nodes[node] = replace(kept, allocatable=room, version=cluster.next_version())
    for _ in range(4):
        cluster.settle()
        cluster.pass_time(10.0)
    assert set(cluster.query_states().values()) == {"Live"}


def test_a_new_topology_takes_the_capacity_of_standbys() -> None:
    cluster = running(1)
    (standby,) = standbys(cluster)
    for name in list(cluster.nodes):
        here = [p for p in cluster.pods_on(name) if p.name != standby.name]
        size = sum(p.requests.cpu_m for p in here)
        if name != standby.node:
            cluster.add_node(name, size, LARGE[1])
        else:
            cluster.add_node(name, size + standby.requests.cpu_m, LARGE[1])
    cluster.add_topology("second", flights_spec())
    ended = []
    for _ in range(20):
        actions = reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        ended += [a.name for a in actions if isinstance(a, DeletePod)]
        cluster.apply(actions)
        cluster.kubelets_and_scheduler()
    assert ended == [standby.name]


def test_a_container_that_restarts_gives_way_to_a_warm_standby() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    task = next(p for p in cluster.tasks().values())
    ended = {"exitCode": 137, "finishedAt": rfc3339(cluster.now - 1)}
    cluster.raw_pods[task.name]["status"] |= {
        "startTime": rfc3339(cluster.now - 100),
        "conditions": [
            {"type": "Ready", "status": "False", "lastTransitionTime": rfc3339(cluster.now)}
        ],
        "containerStatuses": [
            {"name": "task", "ready": False, "state": {"terminated": ended}, "restartCount": 0}
        ],
    }
    cluster.task_reports[task.name] = {"phase": "Restoring", "suspected": True}
    cluster.pass_time(0.1)
    (give,) = given_slots(cluster)
    assert (give.name, give.ref.slot) == (standby.name, task.slot and task.slot.key)


def test_a_full_quota_ends_standbys_before_it_keeps_a_task_waiting() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    cluster.raw_pods[standby.name]["status"]["containerStatuses"][0]["started"] = False
    lost = lose_a_task(cluster)
    cluster.quota = len(cluster.raw_pods)
    for _ in range(4):
        cluster.settle()
        cluster.pass_time(2.0)
    assert len(tasks_of(cluster, lost.slot)) == 1
    assert cluster.status()["phase"] == "Running"


def test_a_task_that_is_refused_a_standby_gets_a_new_pod() -> None:
    cluster = running()
    (standby,) = standbys(cluster)
    lost = lose_a_task(cluster)
    (give,) = given_slots(cluster)
    refused = cluster.uncreated_pods.with_create_attempt(give.standby, cluster.now, None)
    cluster.uncreated_pods = refused.with_failed_create(
        give.standby, "no", cluster.now, None, may_exist=True
    )
    cluster.settle()
    assert [p.name for p in tasks_of(cluster, lost.slot)] != [standby.name]
    assert len(tasks_of(cluster, lost.slot)) == 1


def test_a_standby_serves_the_most_tasks_without_a_replica() -> None:
    spec = flights_spec()
    spec["operators"][0]["resources"] = {"requests": {"cpu": "1"}}
    made = ModelCluster()
    for name in "abc":
        made.add_node(name, *LARGE)
    made.add_topology("flights", spec | {"recovery": {"standby": 1}})
    made.settle()
    made.pass_time(1.0)
    made.settle()
    (standby,) = standbys(made)
    by_cpu = Counter(p.requests.cpu_m for p in made.tasks().values())
    assert standby.requests.cpu_m == by_cpu.most_common(1)[0][0]
    other = next(p for p in made.tasks().values() if p.requests.cpu_m != standby.requests.cpu_m)
    del made.raw_pods[other.name]
    assert not given_slots(made), "it has another template"


def test_errors_of_a_standby_are_not_those_of_its_task() -> None:
    (pod,) = standbys(running())
    failing = replace(pod, container_error="container task: Error, exit code 1")
    assert failing_since({}, [failing], 1.0) == {}
    assert failing_since({}, [replace(failing, role=names.ROLE_TASK)], 1.0) == {pod.uid: 1.0}
