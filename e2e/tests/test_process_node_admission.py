"""Which pods a process node admits: by free capacity, and by their fields."""

from typing import Any

import pytest

from rekindle_operator.resources.common import container_security_context, pod_security_context
from rekindle_testing.embedded.process_node import admission, supported_fields

ALLOCATABLE = {"cpu": "2", "memory": "1Gi", "pods": "3"}


def pod(cpu: str = "", **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": cpu}} if cpu else {}
    container = {"name": "c", "image": "i", "resources": resources}
    return {
        "metadata": {"name": "p", "namespace": "d", "uid": "u", "generation": 3},
        "spec": {"containers": [container], **spec},
    }


# --- capacity ---------------------------------------------------------------


def test_a_pod_that_fits_exactly_is_admitted() -> None:
    assert admission.admit(pod("1500m"), [pod("500m")], ALLOCATABLE) is None


def test_a_pod_above_free_capacity_is_refused_with_numbers() -> None:
    refusal = admission.admit(pod("1501m"), [pod("500m")], ALLOCATABLE)
    assert refusal is not None
    assert refusal.reason == "OutOfcpu"
    assert "requested: 1.501" in refusal.message
    assert "free: 1.5" in refusal.message


def test_pods_are_counted_too() -> None:
    refusal = admission.admit(pod(), [pod()] * 3, ALLOCATABLE)
    assert refusal is not None
    assert refusal.reason == "OutOfpods"


def test_a_resource_that_the_node_lacks_is_refused() -> None:
    greedy = pod()
    greedy["spec"]["containers"][0]["resources"] = {"limits": {"example.com/gpu": "1"}}
    refusal = admission.admit(greedy, [], ALLOCATABLE)
    assert refusal is not None
    assert refusal.reason == "OutOfexample.com/gpu"


def test_an_init_container_counts_only_as_far_as_it_is_larger() -> None:
    big = {"name": "i", "image": "i", "resources": {"requests": {"cpu": "2"}}}
    assert admission.requests(pod("1", initContainers=[big]))["cpu"] == 2
    assert admission.requests(pod("3", initContainers=[big]))["cpu"] == 3


# --- supported fields -------------------------------------------------------


def of_container(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "c", "image": "i", **fields}]}


def secured(**fields: Any) -> dict[str, Any]:
    return of_container(securityContext=fields)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"hostPID": True}, "spec.hostPID"),
        ({"hostIPC": True}, "spec.hostIPC"),
        ({"hostUsers": False}, "spec.hostUsers"),
        ({"shareProcessNamespace": True}, "spec.shareProcessNamespace"),
        ({"runtimeClassName": "gvisor"}, "spec.runtimeClassName"),
        ({"dnsPolicy": "None"}, "spec.dnsPolicy"),
        ({"dnsConfig": {"searches": ["here"]}}, "spec.dnsConfig"),
        ({"setHostnameAsFQDN": True}, "spec.setHostnameAsFQDN"),
        ({"resources": {"limits": {"memory": "1Gi"}}}, "spec.resources"),
        ({"os": {"name": "windows"}}, "spec.os.name"),
        ({"ofAnotherVersion": 1}, "spec.ofAnotherVersion"),
        ({"securityContext": {"runAsUser": 1000}}, "spec.securityContext.runAsUser"),
        ({"securityContext": {"fsGroup": 1000}}, "spec.securityContext.fsGroup"),
        ({"securityContext": {"supplementalGroups": [1]}}, "securityContext.supplementalGroups"),
        ({"securityContext": {"sysctls": [{"name": "a"}]}}, "spec.securityContext.sysctls"),
        (secured(runAsUser=1000), "spec.containers[c].securityContext.runAsUser"),
        (secured(runAsGroup=1000), "spec.containers[c].securityContext.runAsGroup"),
        (secured(privileged=True), "spec.containers[c].securityContext.privileged"),
        (secured(capabilities={"add": ["A"]}), "securityContext.capabilities.add"),
        (secured(seLinuxOptions={"level": "s0"}), "securityContext.seLinuxOptions"),
        (secured(seccompProfile={"type": "Localhost"}), "securityContext.seccompProfile"),
        (secured(appArmorProfile={"type": "RuntimeDefault"}), "securityContext.appArmorProfile"),
        (secured(procMount="Unmasked"), "securityContext.procMount"),
        ({"volumes": [{"name": "v", "nfs": {}}]}, "spec.volumes[v].nfs"),
        (
            {"volumes": [{"name": "v", "emptyDir": {"medium": "HugePages"}}]},
            "spec.volumes[v].emptyDir.medium",
        ),
        (
            {"volumes": [{"name": "v", "hostPath": {"path": "/x", "type": "Socket"}}]},
            "spec.volumes[v].hostPath.type",
        ),
        (
            {"volumes": [{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {}}]}}]},
            "spec.volumes[v].projected.sources.clusterTrustBundle",
        ),
        (
            {"initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always"}]},
            "spec.initContainers[s].restartPolicy",
        ),
        (of_container(restartPolicy="Never"), "spec.containers[c].restartPolicy"),
        (
            of_container(livenessProbe={"grpc": {"port": 1}}),
            "spec.containers[c].livenessProbe.grpc",
        ),
        (
            of_container(ports=[{"containerPort": 1, "hostPort": 1}]),
            "spec.containers[c].ports.hostPort",
        ),
        (of_container(stdin=True), "spec.containers[c].stdin"),
        (of_container(tty=True), "spec.containers[c].tty"),
        (of_container(volumeDevices=[{"name": "v"}]), "spec.containers[c].volumeDevices"),
        (
            of_container(volumeMounts=[{"name": "v", "mountPropagation": "Bidirectional"}]),
            "spec.containers[c].volumeMounts[v].mountPropagation",
        ),
        (
            of_container(terminationMessagePolicy="FallbackToLogsOnError"),
            "spec.containers[c].terminationMessagePolicy",
        ),
        (of_container(lifecycle={"stopSignal": "SIGINT"}), "spec.containers[c].lifecycle"),
        (
            of_container(lifecycle={"preStop": {"sleep": {"seconds": 1}}}),
            "spec.containers[c].lifecycle.preStop",
        ),
        (
            of_container(livenessProbe={"tcpSocket": {"port": 80}}),
            "spec.containers[c].livenessProbe.tcpSocket",
        ),
        (
            of_container(resources={"limits": {"ephemeral-storage": "1Gi"}}),
            "spec.containers[c].resources.limits.ephemeral-storage",
        ),
    ],
)
def test_unsupported_fields_are_refused_by_path(spec: dict[str, Any], path: str) -> None:
    refusal = admission.admit(pod(**spec), [], ALLOCATABLE)
    assert refusal is not None
    assert refusal.reason == admission.UNSUPPORTED
    assert path in refusal.message


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (
            {"securityContext": pod_security_context()},
            ["spec.securityContext.runAsNonRoot", "spec.securityContext.seccompProfile"],
        ),
        (
            secured(**container_security_context()),
            [
                "spec.containers[c].securityContext.allowPrivilegeEscalation",
                "spec.containers[c].securityContext.capabilities.drop",
            ],
        ),
        # As the chart's operator has it.
        (
            secured(readOnlyRootFilesystem=True),
            ["spec.containers[c].securityContext.readOnlyRootFilesystem"],
        ),
        (of_container(resources={"limits": {"cpu": "1"}}), ["spec.containers[c].resources"]),
        ({"subdomain": "peers"}, ["spec.subdomain"]),
    ],
)
def test_ignorable_fields_are_admitted_and_named(spec: dict[str, Any], paths: list[str]) -> None:
    assert admission.admit(pod(**spec), [], ALLOCATABLE) is None
    ignored = supported_fields.ignored(pod(**spec))
    assert len(ignored) == len(paths)
    for text, path in zip(ignored, paths, strict=True):
        assert text.startswith(path)


@pytest.mark.parametrize(
    "spec",
    [
        # What the API server adds to every pod.
        {
            "dnsPolicy": "ClusterFirst",
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
            "priority": 0,
            "restartPolicy": "Always",
            "schedulerName": "default-scheduler",
            "securityContext": {},
            "serviceAccount": "default",
            "serviceAccountName": "default",
            "terminationGracePeriodSeconds": 30,
            "tolerations": [{"operator": "Exists"}],
            **of_container(
                imagePullPolicy="Always",
                terminationMessagePath="/dev/termination-log",
                terminationMessagePolicy="File",
                volumeMounts=[{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Disabled"}],
            ),
        },
        {"hostPID": False, "hostNetwork": False, "shareProcessNamespace": False, "dnsConfig": {}},
        {"hostUsers": True, "os": {"name": "linux"}, "imagePullSecrets": [{"name": "s"}]},
        {"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["me"]}]},
        {"volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "hostPath": {"path": "/x"}}]},
        of_container(stdin=False, tty=False, securityContext={"privileged": False}),
        of_container(lifecycle={"stopSignal": "SIGTERM"}),
        secured(runAsUser=0, runAsGroup=0, runAsNonRoot=False, allowPrivilegeEscalation=True),
        secured(seccompProfile={"type": "Unconfined"}, capabilities={"add": [], "drop": []}),
    ],
)
def test_fields_without_effect_are_admitted(spec: dict[str, Any]) -> None:
    assert admission.admit(pod(**spec), [], ALLOCATABLE) is None
    assert supported_fields.ignored(pod(**spec)) == []


def test_changes_of_an_admitted_pod_are_reported_as_ignored() -> None:
    before = pod("1", hostname="a")
    debugged = pod("1", ephemeralContainers=[{"name": "d", "image": "i"}])
    assert list(supported_fields.changes(before, pod("1", hostname="b"))) == []
    [resize] = supported_fields.changes(before, pod("2"))
    [debugger] = supported_fields.changes(before, debugged)
    assert resize.startswith("spec.containers[c].resources")
    assert debugger.startswith("spec.ephemeralContainers[d]")
    assert list(supported_fields.changes(debugged, debugged)) == []
