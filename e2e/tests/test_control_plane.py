"""The embedded control plane works like a real one: scheduling, permissions, outages."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rekindle_testing.embedded.components import ComponentSettings
from rekindle_testing.embedded.control_plane import ControlPlane, ControlPlaneError, KubectlError
from rekindle_testing.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.platform("embedded")]


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), on_progress=print) as running:
        yield running


def node(name: str) -> str:
    """Registers a node with its status, like a kubelet."""
    allocatable = {"cpu": "1", "memory": "1Gi", "pods": "10"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name},
            "status": {"capacity": allocatable, "allocatable": allocatable},
        }
    )


def test_kubectl_reaches_a_server_of_the_pinned_version(control_plane: ControlPlane) -> None:
    version = json.loads(control_plane.kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"].startswith("v1.34.")


def test_pods_find_their_service_account_and_root_certificate(control_plane: ControlPlane) -> None:
    control_plane.kubectl("get", "serviceaccount/default")
    control_plane.kubectl("get", "configmap/kube-root-ca.crt")


def test_a_service_accounts_token_identifies_it(control_plane: ControlPlane) -> None:
    token = control_plane.kubectl("create", "token", "default").strip()
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    answer = control_plane.kubectl(
        "create", "-f", "-", "-o", "jsonpath={.status.user.username}", stdin=json.dumps(review)
    )
    assert answer == "system:serviceaccount:default:default"


def test_a_node_may_register_itself_and_no_other(control_plane: ControlPlane) -> None:
    identity = control_plane.node_kubeconfig("mine")
    control_plane.kubectl("create", "-f", "-", stdin=node("mine"), kubeconfig=identity)
    with pytest.raises(KubectlError, match='node "mine" is not allowed'):
        control_plane.kubectl("create", "-f", "-", stdin=node("other"), kubeconfig=identity)
    with pytest.raises(KubectlError, match="Forbidden"):
        control_plane.kubectl("get", "secrets", "-A", kubeconfig=identity)


def test_a_user_needs_rbac_permissions(control_plane: ControlPlane) -> None:
    identity = control_plane.user_kubeconfig("somebody", group="reviewers")
    with pytest.raises(KubectlError, match=r'User "somebody" cannot list resource "pods"'):
        control_plane.kubectl("get", "pods", kubeconfig=identity)
    control_plane.kubectl("create", "rolebinding", "r", "--clusterrole=view", "--group=reviewers")

    def may_list() -> bool:
        try:
            control_plane.kubectl("get", "pods", kubeconfig=identity)
        except KubectlError:
            return False
        return True

    eventually(may_list)


def test_the_scheduler_binds_a_pod_to_a_node(control_plane: ControlPlane) -> None:
    identity = control_plane.node_kubeconfig("worker")
    control_plane.kubectl("create", "-f", "-", stdin=node("worker"), kubeconfig=identity)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "bound"},
        "spec": {
            "nodeSelector": {"for": "bound"},
            "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1"}}}],
            "tolerations": [{"operator": "Exists"}],
        },
    }
    control_plane.kubectl("label", "node/worker", "for=bound")
    control_plane.kubectl("create", "-f", "-", stdin=json.dumps(pod))

    def node_of_pod() -> str:
        return control_plane.kubectl("get", "pod/bound", "-o", "jsonpath={.spec.nodeName}")

    eventually(lambda: node_of_pod() == "worker")


def test_everything_listens_on_loopback_only(control_plane: ControlPlane) -> None:
    for name, pid in control_plane.pids.items():
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(pid).net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening, name
        assert set(listening) == {"127.0.0.1"}, name


def test_a_frozen_api_server_responds_after_resume(control_plane: ControlPlane) -> None:
    control_plane.pause_api_server()
    try:
        with pytest.raises(KubectlError, match=r"(?i)timeout|deadline"):
            control_plane.kubectl("get", "namespaces", "--request-timeout=1s")
    finally:
        control_plane.resume_api_server()
    assert "default" in control_plane.kubectl("get", "namespaces")


def test_a_restarted_api_server_keeps_its_objects(
    control_plane: ControlPlane,
) -> None:
    control_plane.kubectl("create", "namespace", "kept")
    url = control_plane.api_url
    control_plane.stop_api_server()
    with pytest.raises(KubectlError, match="refused"):
        control_plane.kubectl("get", "namespaces")
    control_plane.start_api_server()
    assert control_plane.api_url == url
    control_plane.kubectl("get", "namespace/kept")


def test_a_second_control_plane_leaves_no_processes(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with ControlPlane(tmp_path / "second") as second:
        pids = second.pids
        assert len(pids) == 4
        second.kubectl("create", "namespace", "of-the-second")
        assert "of-the-second" not in control_plane.kubectl("get", "namespaces")
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    control_plane.kubectl("get", "namespaces")
    with pytest.raises(ControlPlaneError, match="earlier control plane"):
        second.start()


def test_a_control_plane_not_started_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ControlPlaneError, match="was not started"):
        ControlPlane(tmp_path).node_kubeconfig("n")


def test_a_failed_start_names_the_component_and_its_log(tmp_path: Path) -> None:
    settings = ComponentSettings(extra_arguments={"kube-apiserver": ["--no-such-flag"]})
    broken = ControlPlane(tmp_path / "broken", settings)
    with pytest.raises(
        ControlPlaneError, match=r"(?s)kube-apiserver exited with code 1.*no-such-flag"
    ):
        broken.start()
    assert broken.pids == {}
