"""Environment, fields, quantities and commands of a process node's containers, without a node."""

import base64
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rekindle_testing.embedded.process_node import containers, environment, quantities
from rekindle_testing.embedded.process_node.containers import ImageNotFound, PodContext
from rekindle_testing.embedded.process_node.environment import ConfigError, ObjectReference
from rekindle_testing.embedded.process_node.fields import (
    DownwardValues,
    FieldError,
    field_value,
    resource_value,
)
from rekindle_testing.embedded.process_node.settings import ImageReplacement

DOWNWARD_VALUES = DownwardValues(
    pod_ip="127.7.1.1", host_ip="127.7.0.1", allocatable={"cpu": "4", "memory": "8Gi"}
)
POD: dict[str, Any] = {
    "metadata": {
        "name": "task-0",
        "namespace": "flights",
        "uid": "u-1",
        "labels": {"app": "task", "tier": 'a"b'},
        "annotations": {"note": "first\nsecond"},
    },
    "spec": {
        "nodeName": "n1",
        "serviceAccountName": "runner",
        "containers": [
            {
                "name": "main",
                "image": "img",
                "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}},
            },
            {"name": "free", "image": "img"},
        ],
    },
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        ("1Ki", "1024"),
        ("1.5Gi", str(3 * 2**29)),
        ("1k", "1000"),
        ("1E", "1e18"),
        ("1e3", "1000"),
        ("100n", "1e-7"),
    ],
)
def test_a_quantity_is_exact(text: str, value: str) -> None:
    assert quantities.parse(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "1Gb", "m", "1 Gi", "--1"])
def test_an_invalid_quantity_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="resource quantity"):
        quantities.parse(text)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)-$(B)", "1-2"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
        ("$(A", "$(A"),
    ],
)
def test_references_expand_as_in_kubernetes(text: str, expanded: str) -> None:
    assert environment.expand(text, {"A": "1", "B": "2"}) == expanded


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "task-0"),
        ("metadata.namespace", "flights"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['app']", "task"),
        ("metadata.labels['absent']", ""),
        ("metadata.annotations['note']", "first\nsecond"),
        ("metadata.labels", 'app="task"\ntier="a\\"b"'),
        ("spec.nodeName", "n1"),
        ("spec.serviceAccountName", "runner"),
        ("status.podIP", "127.7.1.1"),
        ("status.hostIP", "127.7.0.1"),
    ],
)
def test_the_downward_api_has_fields_of_the_pod(path: str, value: str) -> None:
    assert field_value(POD, path, DOWNWARD_VALUES) == value


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(FieldError, match=r"status\.phase"):
        field_value(POD, "status.phase", DOWNWARD_VALUES)


@pytest.mark.parametrize(
    ("container", "resource", "divisor", "value"),
    [
        ("main", "limits.cpu", "0", "2"),
        ("main", "limits.cpu", "1m", "1500"),
        ("main", "limits.memory", "1Mi", "1024"),
        ("main", "requests.cpu", "1m", "1500"),
        ("free", "limits.cpu", "1", "4"),
        ("free", "requests.memory", "1", "0"),
    ],
)
def test_resources_are_rounded_up_with_the_node_as_default(
    container: str, resource: str, divisor: str, value: str
) -> None:
    reference = {"resource": resource, "divisor": divisor}
    assert resource_value(POD, reference, container, DOWNWARD_VALUES) == value


def objects() -> dict[ObjectReference, dict[str, Any] | None]:
    secret = {"data": {"password": base64.b64encode(b"s3cret").decode()}}
    return {
        ObjectReference("ConfigMap", "settings"): {"data": {"MODE": "fast", "LEVEL": "3"}},
        ObjectReference("Secret", "login"): secret,
        ObjectReference("ConfigMap", "gone"): None,
    }


def built(container: dict[str, Any]) -> dict[str, str]:
    return environment.build(
        POD, {"name": "main", **container}, objects(), {"BASE": "b"}, DOWNWARD_VALUES
    )


def test_env_overrides_env_from_and_uses_earlier_variables() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "CFG_"}],
        "env": [
            {"name": "CFG_LEVEL", "value": "4"},
            {"name": "URL", "value": "http://$(IP)/$(CFG_MODE)/$(CFG_LEVEL)/$(BASE)"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL2", "value": "http://$(IP)"},
        ],
    }
    variables = built(container)
    assert variables["CFG_LEVEL"] == "4"
    assert variables["URL"] == "http://$(IP)/fast/4/b"
    assert variables["URL2"] == "http://127.7.1.1"


def test_keys_of_config_maps_and_secrets_become_variables() -> None:
    secret = {"secretKeyRef": {"name": "login", "key": "password"}}
    absent = {"configMapKeyRef": {"name": "gone", "key": "x", "optional": True}}
    container = {"env": [{"name": "P", "valueFrom": secret}, {"name": "X", "valueFrom": absent}]}
    assert built(container) == {"BASE": "b", "P": "s3cret"}
    assert set(environment.references(container)) == {
        ObjectReference("Secret", "login"),
        ObjectReference("ConfigMap", "gone"),
    }


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"envFrom": [{"configMapRef": {"name": "gone"}}]}, "'gone' not found"),
        (
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "login", "key": "k"}}}]},
            "has no key 'k'",
        ),
    ],
)
def test_a_missing_reference_is_named(container: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(container)


def test_command_and_args_override_the_image() -> None:
    image = ImageReplacement(command=("run", "--fast"))
    variables = {"N": "1"}
    assert containers.command_line({"image": "i"}, image, {}) == ["run", "--fast"]
    assert containers.command_line({"image": "i", "args": ["$(N)"]}, image, variables) == [
        "run",
        "--fast",
        "1",
    ]
    assert containers.command_line({"image": "i", "command": ["x"]}, image, {}) == ["x"]
    with pytest.raises(ConfigError, match="no command"):
        containers.command_line({"image": "i"}, ImageReplacement(), {})


def test_an_unknown_image_names_the_known_ones() -> None:
    with pytest.raises(ImageNotFound, match=r'no image "other".*it has: a, b'):
        containers.find_image(
            {"image": "other"}, {"b": ImageReplacement(), "a": ImageReplacement()}
        )


def test_the_shim_gets_path_variables_and_mounts_in_order(tmp_path: Path) -> None:
    volumes = {"data": tmp_path / "data", "conf": tmp_path / "conf"}
    for path in volumes.values():
        path.mkdir()
    declared = [{"name": "data", "emptyDir": {}}, {"name": "conf", "configMap": {}}]
    pod = {**POD, "spec": {**POD["spec"], "volumes": declared}}
    container = {
        "name": "main",
        "image": "img",
        "command": ["run"],
        "volumeMounts": [
            {"name": "conf", "mountPath": "/data/conf"},
            {"name": "data", "mountPath": "/data", "subPath": "a/b"},
        ],
    }
    context = PodContext(
        pod=pod,
        downward_values=DOWNWARD_VALUES,
        images={"img": ImageReplacement(path=("/opt/x/bin",), env={"JAVA_HOME": "/opt/java"})},
        volumes=volumes,
        service_variables={"KUBERNETES_SERVICE_HOST": "127.0.0.1"},
        hosts_file=tmp_path / "hosts",
        data_directory=tmp_path,
        log_limit_bytes=1000,
    )
    spec = containers.shim_spec(context, container, {}, tmp_path / "0")
    assert spec["environment"]["PATH"].startswith("/opt/x/bin:/usr/local/sbin:")
    assert spec["environment"]["JAVA_HOME"] == "/opt/java"
    assert spec["environment"]["HOSTNAME"] == spec["hostname"] == "task-0"
    targets = [mount["target"] for mount in spec["mounts"]]
    assert targets.index("/data") < targets.index("/data/conf")
    by_target = {mount["target"]: mount for mount in spec["mounts"]}
    assert by_target["/data"]["source"] == str(tmp_path / "data/a/b")
    assert by_target["/data/conf"]["read_only"]
    assert {"/etc/hosts", "/dev/termination-log"} <= set(targets)
