"""The operator with a real API server: objects are accepted, lost pods replaced, all deleted.

Nodes, kubelets and the data plane are fakes (`operator_world`); the rest is real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from operator_world import START_S, World

from rekindle import names
from rekindle.identity import Identity
from rekindle_operator import tokens
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.fixtures.api_fields import name_of, required
from rekindle_testing.fixtures.bad_manifests import bad_manifests
from rekindle_testing.harness.operator_process import (
    OperatorProcess,
    operator_kubeconfig,
)
from rekindle_testing.paths import ROOT
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.api

_GATE = names.GATE
_OTHERS_LOST_S = 2.0  # nodes that are silent at the same time are lost in the same pass
_HINTS = {  # by name in the table of bad manifests
    "cycle": "remove one of these inputs",
    "duplicate-of-a-source": "see spec.sources[0].name",
    "sql-does-not-parse": "at line 1, column 21, near 'trips'",
    "sql-unknown-column": "did you mean city?",
    "order-by-unknown-column-with-emoji": "known are",
    "sql-random": "use the event-time column or a hash of the row's columns",
}


@pytest.fixture(scope="module")
def kubeconfig(api_server: ControlPlane) -> Path:
    """The operator's, with only the permissions that the chart grants."""
    return operator_kubeconfig(api_server)


@pytest.fixture(scope="module")
def world(api_server: ControlPlane, tmp_path_factory: Any) -> Iterator[World]:
    made = World(api_server.kubeconfig, tmp_path_factory.mktemp("world"), "operator")
    made.add_volume("rekindle", tmp_path_factory.mktemp("volume"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def operators(
    kubeconfig: Path, world: World, tmp_path_factory: Any
) -> Iterator[list[OperatorProcess]]:
    """Two replicas, as the chart has them; one leads."""
    directory = tmp_path_factory.mktemp("operators")
    running = [OperatorProcess(kubeconfig, directory, name) for name in ("first", "second")]
    try:
        wait_for("both are ready", lambda: all(o.get("/readyz") for o in running), START_S)
        wait_for("one leads", lambda: any(o.leads() for o in running), START_S)
        yield running
    finally:
        for operator in running:
            operator.stop()
    for operator in running:
        assert operator.unexpected_lines() == [], operator.log.read_text()


@pytest.fixture
def nodes(world: World) -> Iterator[list[str]]:
    names = [f"node-{letter}" for letter in "abc"]
    for name in names:
        world.add_node(name)
    yield names
    for node in world.core.list_node().items:
        world.remove_node(name_of(node))


@pytest.fixture
def flights(world: World, operators: list[OperatorProcess]) -> Iterator[dict[str, Any]]:
    world.silent.clear()
    manifest = yaml.safe_load((ROOT / "examples/flights/topology.yaml").read_text())
    yield world.create(manifest)
    if world.custom_or_none("flights") is not None:
        world.delete("flights", "Background")
    # The garbage collector discovers new kinds every 30 s: it is late the first time.
    wait_for("nothing is left", lambda: not world.remaining_objects("flights"), 75)


def _is_running(world: World) -> bool:
    return world.status("flights").get("phase") == "Running"


def _without_coordinator(world: World, nodes: list[str]) -> str:
    """A node with tasks. The topology starts before all nodes are there, so one may stay empty."""
    (coordinator,) = world.pods("flights", "coordinator").values()
    return next(n for n in nodes if n != coordinator.spec.node_name and _on(world, n))


def _records(world: World) -> set[str]:
    """Names of ConfigMaps, which generation records are."""
    return {name_of(c) for c in world.core.list_namespaced_config_map("operator").items}


def _on(world: World, node: str) -> set[str]:
    """Names of the tasks' pods on the node."""
    return {n for n, p in world.pods("flights").items() if p.spec.node_name == node}


def _wait_for_nodes(status: Any) -> bool:
    queries = status["queries"]
    is_waiting = {q["state"] for q in queries} == {"Waiting"}
    return is_waiting and all(q["waitingFor"].startswith("a node for") for q in queries)


def test_a_topology_starts_as_soon_as_there_are_nodes(world: World, flights: Any) -> None:
    pods = wait_for("eight gated pods", lambda: _if_count(world.pods("flights"), 8))
    assert all([g.name for g in p.spec.scheduling_gates] == [_GATE] for p in pods.values())
    assert all(not p.spec.automount_service_account_token for p in pods.values())
    assert all(p.spec.preemption_policy == "Never" for p in pods.values())
    wait_for("queries that wait for a node", lambda: _wait_for_nodes(world.status("flights")))
    assert world.status("flights")["slots"]
    record = world.core.read_namespaced_config_map("flights-g1", "operator")
    assert record.immutable
    assert json.loads(required(record.data)["topology.json"])["uid"] == flights["metadata"]["uid"]
    assert world.condition("flights", "Valid")["reason"] == "Accepted"

    for name in ("node-a", "node-b"):
        world.add_node(name)
    try:
        wait_for("it runs", lambda: _is_running(world))
        by_partition: dict[tuple[str, str], list[str]] = {}
        for pod in world.pods("flights").values():
            label = pod.metadata.labels
            key = label[names.LABEL_SEGMENT], label[names.LABEL_PARTITION]
            by_partition.setdefault(key, []).append(pod.spec.node_name)
        assert all(len(set(nodes)) == len(nodes) for nodes in by_partition.values())
        assert set(world.pods("flights")) == set(pods), "no pod was made twice"
        assert world.status("flights")["queriesLive"] == "3/3"
        assert world.condition("flights", "Redundant")["status"] == "True"
        assert {"Accepted", "QueryLive"} <= set(world.event_reasons("flights"))
    finally:
        for name in ("node-a", "node-b"):
            world.remove_node(name)


def test_an_autoscaler_adds_nodes_for_waiting_queries(world: World, flights: Any) -> None:
    """One that knows Unschedulable pods alone. It adds no more nodes than they fill: gated pods,
    spare replicas among them, are not for it."""
    wait_for("eight gated pods", lambda: _if_count(world.pods("flights"), 8))
    added: list[str] = []
    wait_for("it adds a node for the coordinator", lambda: _add_nodes(world, added))
    time.sleep(2 * _SCAN_S)
    assert not _add_nodes(world, added), "nothing else is Unschedulable"
    world.edit("flights", lambda spec: spec.setdefault("recovery", {}).update(autoscale=True))
    try:
        wait_for("three live queries", lambda: _live_after_scan(world, added))
        wait_for("no placeholder is left", lambda: not _placeholders(world))
        assert len(added) <= 1 + -(-5 // _TASKS_OF_A_NODE), added
        planned = [p for p in world.pods("flights").values() if p.spec.node_name is not None]
        assert len({p.metadata.labels[names.LABEL_SEGMENT] for p in planned}) > 1
    finally:
        for name in added:
            world.remove_node(name)


_SCAN_S = 2.0
_TASKS_OF_A_NODE = 2


def _live_after_scan(world: World, added: list[str]) -> bool:
    _add_nodes(world, added)
    return bool(world.status("flights").get("queriesLive") == "3/3")


def _placeholders(world: World) -> list[Any]:
    selector = f"{names.LABEL_ROLE}={names.ROLE_PLACEHOLDER}"
    return list(world.core.list_namespaced_pod("operator", label_selector=selector).items)


def _add_nodes(world: World, added: list[str]) -> bool:
    """What a cluster autoscaler does in a scan: nodes for pods that the scheduler finds no node
    for, but for those that fit on nodes that it has added, or on none that it could add (they
    require another one). Whether it added any."""
    pods: list[Any] = world.core.list_namespaced_pod("operator").items
    lacking = [
        pod
        for pod in pods
        if any(
            c.type == "PodScheduled" and c.reason == "Unschedulable"
            for c in pod.status.conditions or ()
        )
        and not (pod.spec.affinity and pod.spec.affinity.node_affinity)
    ]
    if any(pod.metadata.labels[names.LABEL_ROLE] == "coordinator" for pod in lacking):
        if added:
            return False
        added.append("added-0")
        world.add_node(added[0], cpu="400m", memory="4Gi")  # no task fits beside it
        return True
    bound = sum(pod.spec.node_name in added[1:] for pod in pods)
    short = len(lacking) - (_TASKS_OF_A_NODE * len(added[1:]) - bound)
    for _ in range(-(-short // _TASKS_OF_A_NODE)):
        added.append(f"added-{len(added)}")
        world.add_node(added[-1], cpu="1100m", memory="4Gi")
    return short > 0


def test_tasks_of_a_lost_node_get_new_incarnations(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    lost = _on(world, nodes[0])
    world.kill_node_until_not_ready(nodes[0])
    wait_for("it runs again", lambda: _is_running(world) and not _on(world, nodes[0]))
    left = set(world.pods("flights"))
    assert not lost & left, "pods of the lost node are force-deleted"
    assert {name[:-2] + "-2" for name in lost} <= left
    history = world.status("flights")["recovery"]["history"]
    assert history[0]["lostNodes"] == [nodes[0]]
    assert history[0]["finishedAt"]
    assert "NodeLost" in world.event_reasons("flights")


def test_a_silent_node_is_lost_before_it_is_not_ready(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    silent_node = _without_coordinator(world, nodes)
    lost = _on(world, silent_node)
    world.silent |= lost
    wait_for("its tasks on other nodes", lambda: not lost & set(world.pods("flights")))
    wait_for("it runs again", lambda: _is_running(world))
    assert not _on(world, silent_node), "a quarantined node gets nothing"


def test_only_nodes_with_silent_kubelets_are_lost(
    world: World, nodes: list[str], flights: Any
) -> None:
    """A coordinator that gets no responses suspects all tasks; it is believed only about tasks on
    nodes whose kubelets are silent too."""
    wait_for("it runs", lambda: _is_running(world))
    silent_node = _without_coordinator(world, nodes)
    lost, all_of_them = _on(world, silent_node), set(world.pods("flights"))
    world.kubelets[silent_node].hangs = world.coordinator_isolated = True
    try:
        wait_for("its tasks on other nodes", lambda: not lost & set(world.pods("flights")))
        time.sleep(_OTHERS_LOST_S)  # they would be, without responses of their kubelets
    finally:
        world.coordinator_isolated = False
    wait_for("it runs again", lambda: _is_running(world))
    history = world.status("flights")["recovery"]["history"]
    assert history[0]["lostNodes"] == [silent_node]
    assert all_of_them - lost <= set(world.pods("flights"))


def test_not_ready_nodes_with_responding_tasks_keep_pods(
    world: World, nodes: list[str], flights: Any
) -> None:
    def reason() -> str:
        return str(world.condition("flights", "Degraded").get("reason"))

    wait_for("it runs", lambda: _is_running(world))
    before = world.uids("flights")
    world.set_not_ready(*nodes)
    wait_for("the reason", lambda: reason() == "NodesNotReady")
    world.set_ready(*nodes)
    wait_for("the condition to end", lambda: reason() == "AsExpected")
    assert world.uids("flights") == before


def test_a_silent_coordinator_is_replaced(world: World, nodes: list[str], flights: Any) -> None:
    wait_for("it runs", lambda: _is_running(world))
    assert set(world.pods("flights", "coordinator")) == {"flights-coordinator-1"}
    tasks = set(world.pods("flights"))
    world.coordinators_run = False
    try:
        wait_for("the phase Unknown", lambda: world.status("flights")["phase"] == "Unknown")
        assert world.condition("flights", "Ready")["status"] == "Unknown"
        wait_for(
            "another coordinator",
            lambda: "flights-coordinator-2" in world.pods("flights", "coordinator"),
        )
    finally:
        world.coordinators_run = True
    wait_for("it reports", lambda: world.status("flights")["dataPlane"]["fence"] >= 2)
    assert set(world.pods("flights")) == tasks, "no task is touched"
    assert "CoordinatorReplaced" in world.event_reasons("flights")


def test_a_refused_edit_keeps_the_accepted_generation(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    pods = set(world.pods("flights"))

    def break_input(spec: dict[str, Any]) -> None:
        spec["operators"][0]["inputs"] = ["nowhere"]

    world.edit("flights", break_input)
    refused = wait_for("Valid=False", lambda: _if_false(world.condition("flights", "Valid")))
    assert "spec.operators[0]" in refused["message"]

    def break_pods(spec: dict[str, Any]) -> None:
        spec["operators"][0]["inputs"] = ["departures"]
        spec["podTemplate"] = {"spec": {"restartPolicy": "Sometimes"}}

    world.edit("flights", break_pods)
    wait_for(
        "the API server's message in Valid",
        lambda: "restartPolicy" in world.condition("flights", "Valid").get("message", ""),
    )

    def misspell_pods(spec: dict[str, Any]) -> None:
        spec["podTemplate"] = {"spec": {"nodeSelectr": {"disk": "fast"}}}

    world.edit("flights", misspell_pods)
    wait_for(
        "the API server's message about the unknown field",
        lambda: (
            'unknown field "spec.nodeSelectr"'
            in world.condition("flights", "Valid").get("message", "")
        ),
    )
    assert world.condition("flights", "Valid")["reason"] == "PodRefused"
    assert set(world.pods("flights")) == pods

    def drop_query(spec: dict[str, Any]) -> None:
        spec.pop("podTemplate")
        spec["operators"] = [o for o in spec["operators"] if o["name"] != "routes"]
        spec["queries"] = [q for q in spec["queries"] if q["name"] != "route-report"]
        spec["queries"][0]["priority"] = 7

    generation = world.edit("flights", drop_query)
    wait_for("it is accepted", lambda: world.condition("flights", "Valid")["status"] == "True")
    # The record is created after the status that has its digest.
    wait_for("its record", lambda: f"flights-g{generation}" in _records(world))
    assert world.status("flights")["queriesLive"].endswith("/2")
    kept = pods - {"flights-routes-0-0-1"}
    wait_for("only unneeded pods to end", lambda: set(world.pods("flights")) == kept)


def test_a_deleted_secret_comes_back_and_a_replaced_token_reaches_all_pods(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    core = world.core
    (secret,) = core.list_namespaced_secret("operator", label_selector=names.LABEL_TOPOLOGY).items
    name = name_of(secret)
    core.delete_namespaced_secret(name, "operator")

    def values() -> dict[str, str]:
        found = core.list_namespaced_secret("operator", field_selector=f"metadata.name={name}")
        return next((tokens.decoded(s.data) for s in found.items), {})

    assert wait_for("it is back", values) == tokens.decoded(secret.data)
    core.patch_namespaced_secret(name, "operator", {"stringData": {"token": "chosen"}})

    def pods_have_it() -> bool:
        pods = [*world.pods("flights").values(), *world.pods("flights", "coordinator").values()]
        found = {p.metadata.annotations[names.ANNOTATION_TOKEN] for p in pods}
        return found == {tokens.token_digest("chosen")}

    wait_for("all pods have it", pods_have_it, 120)
    wait_for("the one before is gone", lambda: values().get("running") == "chosen")
    assert values()["reader"] == Identity(token="chosen").reader_token


def test_resume_uses_new_incarnations_and_is_no_recovery(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    world.edit("flights", lambda spec: spec.update(suspend=True))
    wait_for(
        "no pod is left",
        lambda: not world.pods("flights") and not world.pods("flights", "coordinator"),
    )
    assert world.status("flights")["phase"] == "Suspended"
    world.edit("flights", lambda spec: spec.update(suspend=False))
    wait_for("it runs", lambda: _is_running(world))
    assert all(name.endswith("-2") for name in world.pods("flights"))
    assert not world.status("flights").get("recovery"), "a resumption is no recovery"


def test_deletion_leaves_no_objects_even_of_dead_nodes(
    world: World, nodes: list[str], flights: Any
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    busy = next(n for n in nodes if _on(world, n))
    world.kill_node_until_not_ready(busy)
    world.delete("flights", "Foreground")
    wait_for("the topology is gone", lambda: world.custom_or_none("flights") is None)
    wait_for("nothing is left", lambda: not world.remaining_objects("flights"))


def test_an_invalid_topology_only_gets_a_status_and_event(
    world: World, operators: list[OperatorProcess]
) -> None:
    manifest = yaml.safe_load((ROOT / "examples/flights/topology.yaml").read_text())
    manifest["metadata"]["name"] = "broken"
    manifest["spec"]["queries"][0]["from"] = "nowhere"
    world.create(manifest)
    try:
        refused = wait_for("Valid=False", lambda: _if_false(world.condition("broken", "Valid")))
        assert "spec.queries[0]" in refused["message"]
        assert world.remaining_objects("broken") == []
        wait_for("the Event", lambda: "Invalid" in world.event_reasons("broken"))
    finally:
        world.delete("broken", "Background")


def test_validation_problems_are_in_valid_and_in_an_event(
    world: World, operators: list[OperatorProcess]
) -> None:
    bad = [b for b in bad_manifests() if b.name in _HINTS]
    assert {b.name for b in bad} == set(_HINTS)
    for one in bad:
        world.create(one.manifest)
    try:
        for one in bad:
            refused = wait_for(
                f"Valid=False of {one.name}",
                partial(_refusal, world, one.name),
            )
            assert refused["reason"] == one.reason
            assert f"{one.path}: " in refused["message"]
            assert one.message in refused["message"]
            assert _HINTS[one.name] in refused["message"]
            expected = ("Warning", "Invalid", refused["message"])
            wait_for(
                f"the Event about {one.name}",
                partial(_has_event, world, one.name, expected),
            )
            assert world.remaining_objects(one.name) == []
    finally:
        for one in bad:
            world.delete(one.name, "Background")


def _refusal(world: World, name: str) -> dict[str, Any] | None:
    return _if_false(world.condition(name, "Valid"))


def _has_event(world: World, name: str, event: tuple[str, str, str]) -> bool:
    return event in _events_of(world, name)


def _events_of(world: World, name: str) -> list[tuple[str, str, str]]:
    return [(e["type"], e["reason"], e["message"]) for e in world.events(name)]


def test_another_replica_takes_over_and_restarts_no_pod(
    world: World, nodes: list[str], flights: Any, operators: list[OperatorProcess]
) -> None:
    wait_for("it runs", lambda: _is_running(world))
    first, second = sorted(operators, key=lambda o: not o.leads())
    assert first.leads()
    assert not second.leads()
    before = {n: p.metadata.uid for n, p in world.pods("flights").items()}
    slots = world.status("flights")["slots"]
    first.kill()
    wait_for("the second leads", second.leads)
    lost = _on(world, nodes[0])
    world.kill_node_until_not_ready(nodes[0])
    wait_for("it runs again", lambda: _is_running(world) and not _on(world, nodes[0]))
    after = {n: p.metadata.uid for n, p in world.pods("flights").items()}
    assert {n: u for n, u in before.items() if n not in lost}.items() <= after.items()
    taken = {s["slot"]: s["incarnation"] for s in world.status("flights")["slots"]}
    assert all(taken[s["slot"]] >= s["incarnation"] for s in slots)


def _if_count(found: dict[str, Any], count: int) -> dict[str, Any] | None:
    return found if len(found) == count else None


def _if_false(condition: dict[str, Any]) -> dict[str, Any] | None:
    return condition if condition.get("status") == "False" else None


def test_an_incarnation_cannot_be_decreased(world: World, flights: Any) -> None:
    """The API server refuses it: a stale operator cannot undo a reservation (I9)."""
    reserved = wait_for("reservations", lambda: world.status("flights").get("slots"))
    slots = [s | {"incarnation": 0} for s in reserved]
    body = {"status": {"slots": slots}}
    with pytest.raises(ApiException, match="cannot decrease"):
        world.custom.patch_namespaced_custom_object_status(
            names.GROUP, names.VERSION, "operator", names.PLURAL, "flights", body
        )
