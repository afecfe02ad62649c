"""What the pod policy refuses, and which setting allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_cluster import ModelCluster

from rekindle import names
from rekindle_operator.pod_policy import (
    REASON,
    Feature,
    PodPolicy,
    parse_policy,
    policy_problems,
)
from rekindle_operator.settings import read_settings

TASK = "spec.podTemplate.spec.containers[0]"
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/task"


def template(**fields: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": fields}}


def container(**fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": "task", **fields}])


def secured(**fields: Any) -> dict[str, Any]:
    return container(securityContext=fields)


REFUSED: list[tuple[Feature, dict[str, Any], str]] = [
    (Feature.HOST_NETWORK, template(hostNetwork=True), "spec.podTemplate.spec.hostNetwork"),
    (Feature.HOST_PID, template(hostPID=True), "spec.podTemplate.spec.hostPID"),
    (Feature.HOST_IPC, template(hostIPC=True), "spec.podTemplate.spec.hostIPC"),
    (
        Feature.HOST_PATH,
        template(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "hostPath": {}}]),
        "spec.podTemplate.spec.volumes[1].hostPath",
    ),
    (
        Feature.VOLUMES,
        template(volumes=[{"name": "a", "csi": {"driver": "secrets"}}]),
        "spec.podTemplate.spec.volumes[0].csi",
    ),
    (
        Feature.HOST_PORTS,
        container(ports=[{"containerPort": 1}, {"containerPort": 2, "hostPort": 2}]),
        f"{TASK}.ports[1].hostPort",
    ),
    (Feature.PRIVILEGED, secured(privileged=True), f"{TASK}.securityContext.privileged"),
    (
        Feature.PRIVILEGED,
        template(initContainers=[{"name": "i", "securityContext": {"privileged": True}}]),
        "spec.podTemplate.spec.initContainers[0].securityContext.privileged",
    ),
    (
        Feature.CAPABILITIES,
        secured(capabilities={"add": ["CHOWN", "SYS_ADMIN"]}),
        f"{TASK}.securityContext.capabilities.add",
    ),
    (
        Feature.UNCONFINED,
        secured(seccompProfile={"type": "Unconfined"}),
        f"{TASK}.securityContext.seccompProfile",
    ),
    (
        Feature.UNCONFINED,
        template(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
        "spec.podTemplate.spec.securityContext.appArmorProfile",
    ),
    (
        Feature.UNCONFINED,
        {"podTemplate": {"metadata": {"annotations": {APP_ARMOR: "unconfined", "team": "a"}}}},
        f"spec.podTemplate.metadata.annotations[{APP_ARMOR}]",
    ),
    (Feature.UNCONFINED, secured(procMount="Unmasked"), f"{TASK}.securityContext.procMount"),
    (
        Feature.UNCONFINED,
        secured(seLinuxOptions={"type": "spc_t"}),
        f"{TASK}.securityContext.seLinuxOptions",
    ),
    (
        Feature.SYSCTLS,
        template(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}),
        "spec.podTemplate.spec.securityContext.sysctls",
    ),
    (
        Feature.PRIORITY_CLASSES,
        template(priorityClassName="system-node-critical"),
        "spec.podTemplate.spec.priorityClassName",
    ),
]


@pytest.mark.parametrize(("feature", "spec", "path"), REFUSED)
def test_a_feature_is_refused_until_it_is_allowed(
    feature: Feature, spec: dict[str, Any], path: str
) -> None:
    (problem,) = policy_problems(spec, PodPolicy())
    assert (problem.path, problem.reason) == (path, REASON)
    assert f"add {feature} to podPolicy.allow in the chart" in problem.hint
    others = frozenset(Feature) - {feature}
    assert policy_problems(spec, PodPolicy(allow=others)) == [problem]
    assert policy_problems(spec, PodPolicy(allow=frozenset({feature}))) == []


def test_every_feature_has_a_case() -> None:
    assert {feature for feature, _, _ in REFUSED} == set(Feature)


SECRETS: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": {"secretRef": "NAME"}}, "spec.checkpoint.secretRef"),
    (
        {"sources": [{}, {"kafka": {"security": {"sasl": {"secretRef": "NAME"}}}}]},
        "spec.sources[1].kafka.security.sasl.secretRef",
    ),
    (
        {"sources": [{"kafka": {"schemaRegistry": {"secretRef": "NAME"}}}]},
        "spec.sources[0].kafka.schemaRegistry.secretRef",
    ),
    (
        {"queries": [{"sink": {"kafka": {"security": {"tls": {"secretRef": "NAME"}}}}}]},
        "spec.queries[0].sink.kafka.security.tls.secretRef",
    ),
    (container(envFrom=[{"secretRef": {"name": "NAME"}}]), f"{TASK}.envFrom[0].secretRef"),
    (
        container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "NAME", "key": "k"}}}]),
        f"{TASK}.env[0].valueFrom.secretKeyRef",
    ),
    (
        template(volumes=[{"name": "a", "secret": {"secretName": "NAME"}}]),
        "spec.podTemplate.spec.volumes[0].secret",
    ),
    (
        template(volumes=[{"name": "a", "projected": {"sources": [{"secret": {"name": "NAME"}}]}}]),
        "spec.podTemplate.spec.volumes[0].projected.sources[0].secret",
    ),
]


def named(value: Any, name: str) -> Any:
    """With this name instead of "NAME"."""
    match value:
        case dict():
            return {k: named(v, name) for k, v in value.items()}
        case list():
            return [named(v, name) for v in value]
        case _:
            return name if value == "NAME" else value


@pytest.mark.parametrize(("spec", "path"), SECRETS)
def test_a_secret_is_refused_unless_it_matches_the_policy(spec: dict[str, Any], path: str) -> None:
    (problem,) = policy_problems(named(spec, "database"), PodPolicy())
    assert problem.path == path
    assert "does not allow the Secret database" in problem.message
    assert policy_problems(named(spec, "database"), PodPolicy(secrets=("data*",))) == []
    assert policy_problems(named(spec, "s3-rekindle"), PodPolicy()) == []  # by default *-rekindle
    assert policy_problems(named(spec, "s3-rekindle"), PodPolicy(secrets=()))


@pytest.mark.parametrize("topology", ["rekindle", "x-rekindle"])
def test_the_token_secret_of_another_topology_is_refused(topology: str) -> None:
    name = names.token_secret_name(topology, "0a1b2c3d")
    assert policy_problems({"checkpoint": {"secretRef": name}}, PodPolicy())


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"serviceAccountName": "deployer"}, "spec.serviceAccountName"),
        (template(serviceAccountName="deployer"), "spec.podTemplate.spec.serviceAccountName"),
        (template(serviceAccount="deployer"), "spec.podTemplate.spec.serviceAccount"),
    ],
)
def test_a_service_account_is_refused_unless_listed(spec: dict[str, Any], path: str) -> None:
    (problem,) = policy_problems(spec, PodPolicy())
    assert problem.path == path
    assert "add deployer to podPolicy.serviceAccounts" in problem.hint
    assert policy_problems(spec, PodPolicy(service_accounts=("deploy*",))) == []


@pytest.mark.parametrize(
    ("image", "fits"),
    [
        ("registry.example/rekindle/pipelines:1", True),
        ("registry.example/rekindle", True),
        ("registry.example/rekindle@sha256:00", True),
        ("registry.example/rekindle-evil:1", False),
        ("evil/registry.example/rekindle", False),
        ("other/team:1", True),
        ("other/team2:1", True),
    ],
)
def test_images_are_limited_by_prefix(image: str, fits: bool) -> None:
    policy = PodPolicy(images=("registry.example/rekindle", "other/"))
    for spec in ({"image": image}, container(image=image)):
        assert (policy_problems(spec, policy) == []) is fits
        assert policy_problems(spec, PodPolicy()) == []


def test_ordinary_templates_pass() -> None:
    spec = {
        "image": "any/image:1",
        "checkpoint": {"store": "s3://b/c", "secretRef": "s3-rekindle", "volume": "claim"},
        "sources": [
            {"kafka": {"security": {"sasl": {"secretRef": "user-rekindle"}}}},
            {"generator": {"columns": {"secretRef": "random()"}}},
        ],
        "podTemplate": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "tolerations": [{"operator": "Exists"}],
                "securityContext": {"fsGroup": 7, "seccompProfile": {"type": "RuntimeDefault"}},
                "volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {}}],
                "containers": [
                    {
                        "name": "task",
                        "env": [{"name": "A", "value": "b"}],
                        "ports": [{"containerPort": 9}],
                        "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["CHOWN"]}},
                    }
                ],
            },
        },
    }
    assert policy_problems(spec, PodPolicy()) == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["spec", "containers", "volumes", "env", "secret", "securityContext"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(anything)
def test_values_of_any_type_can_be_checked(value: Any) -> None:
    policy_problems({"podTemplate": value, "checkpoint": value}, PodPolicy())
    policy_problems({"podTemplate": {"spec": value}}, PodPolicy())


def test_the_policy_is_read_from_the_environment() -> None:
    text = '{"allow": ["HostPath"], "secrets": [], "images": ["r/"], "serviceAccounts": ["a"]}'
    policy = read_settings({"REKINDLE_POD_POLICY": text}).pods.policy
    assert policy == PodPolicy(
        frozenset({Feature.HOST_PATH}), service_accounts=("a",), secrets=(), images=("r/",)
    )
    assert read_settings({}).pods.policy == PodPolicy()


@pytest.mark.parametrize("raw", [{"alow": []}, {"allow": ["HostRoot"]}])
def test_a_policy_with_a_mistake_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"alow|HostRoot"):
        parse_policy(raw)


def test_an_edit_that_the_policy_refuses_leaves_the_old_generation(running: ModelCluster) -> None:
    before = running.tasks()
    running.edit("flights", podTemplate={"spec": {"hostNetwork": True}})
    running.settle()
    valid = running.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", "NotAllowed")
    assert valid["message"].startswith("spec.podTemplate.spec.hostNetwork: the pod policy")
    assert set(running.generation_records) == {"flights-g1"}
    assert running.tasks() == before


def test_a_topology_with_too_many_tasks_is_invalid(cluster: ModelCluster) -> None:
    pods = replace(cluster.settings.pods, policy=parse_policy({"maxTasks": 7}))
    cluster.settings = replace(cluster.settings, pods=pods)
    cluster.settle()
    assert not cluster.tasks()
    valid = cluster.condition("Valid")
    assert (valid["status"], valid["reason"]) == ("False", REASON)
    assert "needs 8 tasks; the limit for a topology is 7" in valid["message"]


@pytest.mark.parametrize("name", ["", None])
def test_the_priority_class_cannot_be_removed(name: str | None) -> None:
    (problem,) = policy_problems(template(priorityClassName=name), PodPolicy())
    assert problem.path == "spec.podTemplate.spec.priorityClassName"
