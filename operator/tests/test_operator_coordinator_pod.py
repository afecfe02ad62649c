"""What the coordinator's pod takes from `podTemplate`, and what only tasks have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_cluster import ModelCluster

from rekindle_operator.pod_policy import Feature, PodPolicy
from rekindle_operator.reconcile.core import reconcile

ROOT = Path(__file__).parents[2]
BULK = {"key": "bulk", "operator": "Exists"}
FAST = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["fast"]}]}


def coordinator_with(cluster: ModelCluster, template: dict[str, Any]) -> dict[str, Any]:
    """Where the administrator allows everything."""
    policy = PodPolicy(allow=frozenset(Feature), service_accounts=("*",))
    pods = replace(cluster.settings.pods, policy=policy)
    cluster.settings = replace(cluster.settings, pods=pods)
    cluster.edit("flights", podTemplate=template)
    cluster.settle()
    return cluster.raw_pods[cluster.coordinator().name]


def task(**fields: Any) -> dict[str, Any]:
    """A `podTemplate` with these fields of the container of a task."""
    return {"spec": {"containers": [{"name": "task", **fields}]}}


def test_the_coordinator_runs_where_tasks_may_run(cluster: ModelCluster) -> None:
    where = {"tolerations": [BULK], "nodeSelector": {"disk": "fast"}, "priorityClassName": "p"}
    spec = coordinator_with(cluster, {"spec": where})["spec"]
    assert BULK in spec["tolerations"]
    assert len(spec["tolerations"]) == 3, "with those of nodes that are not ready or unreachable"
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert spec["priorityClassName"] == "p"


def test_required_node_affinity_is_kept_with_lost_nodes(running: ModelCluster) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [FAST]}}
    affinity = {"nodeAffinity": required}
    running.edit("flights", podTemplate={"spec": {"affinity": affinity}})
    running.settle()
    node = running.coordinator().node or ""
    running.kill_node_until_not_ready(node)
    running.apply(reconcile(running.snapshot(), running.now))
    spec = running.raw_pods["flights-coordinator-2"]["spec"]
    ((term,),) = (spec["affinity"]["nodeAffinity"][kind]["nodeSelectorTerms"] for kind in required)
    assert term["matchExpressions"] == FAST["matchExpressions"]
    assert {v for f in term["matchFields"] for v in f["values"]} == {node}


@pytest.mark.parametrize("of_pod", [True, False])
def test_the_coordinator_has_the_security_context_of_tasks(
    cluster: ModelCluster, of_pod: bool
) -> None:
    context = {"runAsUser": 1234}
    given = {"spec": {"securityContext": context}} if of_pod else task(securityContext=context)
    spec = coordinator_with(cluster, given)["spec"]
    found = spec if of_pod else spec["containers"][0]
    assert found["securityContext"]["runAsUser"] == 1234
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_coordinator_reads_the_store_as_tasks_do(cluster: ModelCluster) -> None:
    env = [{"name": "HTTPS_PROXY", "value": "http://proxy"}]
    mounts = [{"name": n, "mountPath": f"/{n}"} for n in ("ca", "scratch")]
    template = task(env=env, envFrom=[{"configMapRef": {"name": "more"}}], volumeMounts=mounts)
    template["spec"]["volumes"] = [
        {"name": "ca", "configMap": {"name": "ca"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    spec = coordinator_with(cluster, template)["spec"]
    container = spec["containers"][0]
    values = {e["name"]: e for e in container["env"]}
    assert values["HTTPS_PROXY"]["value"] == "http://proxy"
    assert "valueFrom" in values["REKINDLE_BIND"], "its identity is its own"
    assert {"configMapRef": {"name": "more"}} in container["envFrom"]
    assert [m["name"] for m in container["volumeMounts"] if m["name"] in ("ca", "scratch")] == [
        "ca"
    ]
    assert "scratch" not in {v["name"] for v in spec["volumes"]}


def test_a_template_makes_the_root_read_only(cluster: ModelCluster) -> None:
    """The template of docs/operations.md#a-read-only-root, by the default policy."""
    text = (ROOT / "docs/operations.md").read_text().partition("### A read-only root")[2]
    template = yaml.safe_load(text.partition("```yaml")[2].partition("```")[0])["podTemplate"]
    cluster.edit("flights", podTemplate=template)
    cluster.settle()
    coordinator = cluster.raw_pods[cluster.coordinator().name]
    tasks = [cluster.raw_pods[name] for name in cluster.tasks()]
    assert tasks
    for pod in (coordinator, *tasks):
        security = pod["spec"]["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
    for pod in tasks:
        paths = {m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
        assert {"/tmp", "/var/lib/rekindle-task"} <= paths


def test_labels_and_annotations_are_shared_except_identity(cluster: ModelCluster) -> None:
    labels = {"cost-centre": "7"}
    template = {"metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}}}
    meta = coordinator_with(cluster, template)["metadata"]
    assert meta["labels"]["cost-centre"] == "7"
    assert meta["labels"]["app.kubernetes.io/part-of"] == "rekindle"
    assert meta["annotations"]["sidecar.istio.io/inject"] == "false"
    assert meta["annotations"]["prometheus.io/port"] == "8080"


def test_resources_account_and_sidecars_are_not_shared(cluster: ModelCluster) -> None:
    requested = {"limits": {"nvidia.com/gpu": 1}}
    template = task(resources=requested, command=["x"], image="tasks-only")
    template["spec"]["containers"].append({"name": "sidecar", "image": "s"})
    template["spec"]["initContainers"] = [{"name": "init", "image": "i"}]
    template["spec"]["serviceAccountName"] = "tasks"
    spec = coordinator_with(cluster, template)["spec"]
    (container,) = spec["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["args"] == ["python", "-m", "rekindle.coordinator"]
    assert "command" not in container
    assert container["image"] != "tasks-only"
    assert spec["serviceAccountName"] == "flights-coordinator"
    assert "initContainers" not in spec


def test_nodes_where_a_coordinator_failed_are_used_last(cluster: ModelCluster) -> None:
    """Otherwise it would alternate between two bad nodes."""
    for name in "abc":
        cluster.add_node(name)
    cluster.settle()
    bad = []
    for incarnation in (1, 2):
        pod = cluster.coordinator()
        assert pod.incarnation == incarnation
        bad.append(pod.node)
        cluster.raw_pods[pod.name]["status"] = {"phase": "Failed", "reason": "NodeAffinity"}
        cluster.apply(reconcile(cluster.snapshot(), cluster.now, cluster.settings))
        affinity = cluster.raw_pods[cluster.coordinator().name]["spec"]["affinity"]
        (term,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        avoided = {v for f in term["preference"]["matchFields"] for v in f["values"]}
        assert avoided == set(bad)
        cluster.kubelets_and_scheduler()
        if incarnation == 1:  # the model's scheduler knows no preferences
            spec = cluster.raw_pods[cluster.coordinator().name]["spec"]
            spec["nodeName"] = next(n for n in cluster.nodes if n not in bad)
