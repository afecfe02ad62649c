"""Pods that belong to a topology by their owner, and whose labels somebody has changed."""

from __future__ import annotations

import pytest
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.reconcile.actions import DeletePod
from rekindle_operator.reconcile.core import reconcile

TASK = "flights-alarms-0-1-1"


def relabel(cluster: ModelCluster, name: str, label: str, value: str | None) -> str:
    """Returns the pod's uid."""
    meta = cluster.raw_pods[name]["metadata"]
    meta["resourceVersion"] = str(cluster.next_version())
    if value is None:
        del meta["labels"][label]
    else:
        meta["labels"][label] = value
    return str(meta["uid"])


@pytest.mark.parametrize("value", [None, "2", "x"])
@pytest.mark.parametrize(
    "label",
    [
        names.LABEL_TOPOLOGY,
        names.LABEL_ROLE,
        names.LABEL_SEGMENT,
        names.LABEL_PARTITION,
        names.LABEL_REPLICA,
        names.LABEL_INCARNATION,
        names.LABEL_GENERATION,
    ],
)
def test_a_task_that_its_labels_do_not_place_is_replaced(
    running: ModelCluster, label: str, value: str | None
) -> None:
    uid = relabel(running, TASK, label, value)
    first = reconcile(running.snapshot(), running.now, running.settings)
    assert [a.uid for a in first if isinstance(a, DeletePod)] == [uid]
    running.settle()
    assert TASK not in running.raw_pods
    assert running.status()["redundancy"] == "8/8"
    (event,) = (e for e in running.events if e.reason == "PodMislabelled")
    assert TASK in event.note


@pytest.mark.parametrize("label", [names.LABEL_ROLE, names.LABEL_INCARNATION, names.LABEL_TOPOLOGY])
def test_a_coordinator_without_a_label_is_ended_and_replaced(
    running: ModelCluster, label: str
) -> None:
    relabel(running, "flights-coordinator-1", label, None)
    running.settle()
    assert "flights-coordinator-1" not in running.raw_pods
    assert "flights-coordinator-2" in running.raw_pods


def test_a_mislabelled_pod_of_a_suspended_topology_is_ended(running: ModelCluster) -> None:
    relabel(running, TASK, names.LABEL_ROLE, None)
    running.edit("flights", suspend=True)
    running.settle()
    assert not running.raw_pods
