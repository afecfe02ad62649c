"""The status of a topology whose deletion waits: for somebody's finalizer, or for its pods."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_cluster import ModelCluster

from rekindle_operator.reconcile import core
from rekindle_operator.reconcile.actions import CreatePod, DeletePod, WriteStatus
from rekindle_operator.reconcile.core import reconcile

BACKUP = "example.com/backup"


def delete(cluster: ModelCluster, *finalizers: str) -> None:
    view = replace(cluster.topologies["flights"], finalizers=finalizers)
    cluster.topologies["flights"] = replace(view, deleting=True, generation=view.generation + 1)
    cluster.settle()


def test_a_deletion_names_what_it_waits_for(running: ModelCluster) -> None:
    delete(running, BACKUP, "foregroundDeletion")
    assert running.status()["phase"] == "Deleting"
    ready = running.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Deleting")
    assert f"waits for finalizer {BACKUP}, its pods" in ready["message"]
    assert running.condition("Valid")["message"] == "generation 1 is accepted"
    assert set(running.query_states().values()) == {"Live"}, "they still run"


def test_what_ends_in_a_deletion_is_not_said_to_be_live(running: ModelCluster) -> None:
    delete(running, BACKUP)
    running.raw_pods.clear()
    running.pass_time(5.0)
    running.settle()
    assert set(running.query_states().values()) == {"Waiting"}
    assert running.status()["queriesLive"] == "0/3"
    assert running.status()["redundancy"] == "0/8"
    waiting = running.status()["queries"][0]["waitingFor"]
    assert waiting == "nothing: the topology is being deleted"
    assert not running.raw_pods
    assert "QueryLost" not in running.event_reasons()


def test_a_deletion_ends_a_recovery(running: ModelCluster) -> None:
    running.kill_node_until_not_ready("a")
    running.apply(reconcile(running.snapshot(), running.now))
    assert running.condition("Recovering")["status"] == "True"
    delete(running, BACKUP)
    assert running.condition("Recovering")["status"] == "False"
    assert running.status()["recovery"]["history"][0]["finishedAt"]


def test_the_phase_is_kept_while_passes_fail(
    running: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(core, "_decide", fail)
        delete(running, BACKUP)
        assert running.status()["phase"] == "Deleting"
        assert BACKUP in running.condition("Available")["message"]
        assert running.condition("Degraded")["reason"] == "ReconcileFailed"
        assert set(running.query_states().values()) == {"Unknown"}
    running.settle()
    assert running.status()["phase"] == "Deleting"
    assert running.condition("Degraded")["status"] == "False"


def test_a_deleted_topology_is_neither_rolled_nor_planned(running: ModelCluster) -> None:
    for name in running.topologies:
        running.topologies[name] = replace(running.topologies[name], roll=True)
    running.edit("flights", image="another")
    delete(running, BACKUP)
    running.kill_node_until_not_ready("a")
    actions = reconcile(running.snapshot(), running.now)
    assert not [a for a in actions if isinstance(a, CreatePod)]
    assert all(a.grace_s == 0 for a in actions if isinstance(a, DeletePod))
    assert all(isinstance(a, DeletePod | WriteStatus) for a in actions)
