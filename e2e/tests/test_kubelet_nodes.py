"""Real kubelets: pods on them, their network, their loss, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import command_lines_naming

from rekindle_testing.embedded.components import ComponentSettings
from rekindle_testing.embedded.control_plane import ControlPlane, KubectlError
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.kubelet_node import cgroups, commands, removal
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError, KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.files import IMAGE_TEMPLATE_DIRECTORY
from rekindle_testing.embedded.kubelet_node.image_archive import archive
from rekindle_testing.embedded.kubelet_node.image_store import ImageStoreTemplate, acquire_template
from rekindle_testing.embedded.kubelet_node.images import BUSYBOX_IMAGE, ensure_busybox
from rekindle_testing.embedded.kubelet_node.network import NodeNetwork
from rekindle_testing.embedded.kubelet_node.node import KubeletNode
from rekindle_testing.embedded.kubelet_node.packages import ensure_host_prerequisites
from rekindle_testing.embedded.kubelet_node.state_file import parse
from rekindle_testing.embedded.pods import Pods
from rekindle_testing.embedded.toolchain import ensure_kubelet_binaries
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.kubelet

SERVES = "mkdir -p /tmp/www && hostname > /tmp/www/index.html && exec httpd -f -p 8080 -h /tmp/www"
COUNTS = "n=0; while true; do n=$((n+1)); echo $n > /tmp/www/count; sleep 0.2; done"
COUNTS_AND_SERVES = f"mkdir -p /tmp/www; ({COUNTS}) & {SERVES}"
TIMEOUT_S = 2
"""Of a connection that a pod makes."""
GRACE_S = 30.0
"""Of a node that is silent: the control plane's grace period and the time to notice."""

LATER = "docker.io/rekindle/later:dev"
"""An image that a node gets while it runs."""
CTR = ("ctr", "--namespace", "k8s.io")

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def machine() -> None:
    try:
        ensure_host_prerequisites(print)
    except KubeletNodesUnsupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def network(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeNetwork]:
    with NodeNetwork(tmp_path_factory.mktemp("network"), on_progress=print) as network:
        yield network


@pytest.fixture(scope="module")
def control_plane(
    network: NodeNetwork, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    settings = ComponentSettings(api_address=network.host_address)
    with ControlPlane(tmp_path_factory.mktemp("control"), settings, on_progress=print) as running:
        yield running


@pytest.fixture(scope="module")
def make_node(
    network: NodeNetwork, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], KubeletNode]]:
    ends = contextlib.ExitStack()
    directory = tmp_path_factory.mktemp("nodes")

    def make() -> KubeletNode:
        name = f"node-{next(_numbers)}"
        node = KubeletNode(
            name,
            control_plane,
            directory / name,
            network=network,
            archives=[ensure_busybox(print)],
        )
        ends.callback(node.stop)
        node.start()
        return node

    with ends:
        yield make


@pytest.fixture(scope="module")
def nodes(make_node: Callable[[], KubeletNode]) -> tuple[KubeletNode, KubeletNode]:
    """Two that are Ready; a test leaves them so."""
    first, second = make_node(), make_node()
    first.wait_ready()
    second.wait_ready()
    return first, second


@pytest.fixture
def pods(control_plane: ControlPlane) -> Iterator[Pods]:
    handle = Pods(control_plane.kubeconfig)
    yield handle
    handle.clear()


def on(node: KubeletNode, script: str, **more: Any) -> dict[str, Any]:
    """The spec of a pod on this node. `more`: fields of its container."""
    container = {"name": "c", "image": BUSYBOX_IMAGE, "command": ["/bin/sh", "-c", script], **more}
    return {
        "nodeName": node.name,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "tolerations": [{"operator": "Exists"}],
    }


def serve(pods: Pods, node: KubeletNode, name: str, script: str = SERVES, **metadata: Any) -> str:
    """A pod that serves its name on port 8080; its address."""
    probe = {"httpGet": {"port": 8080, "path": "/"}, "periodSeconds": 1}
    pods.create(name, on(node, script, readinessProbe=probe), **metadata)
    return str(pods.wait_ready(name, 60)["status"]["podIP"])


def get(
    control_plane: ControlPlane, pod: str, address: str, path: str = "", *, port: int = 8080
) -> str:
    """What the pod reads there; KubectlError if it gets no answer."""
    request = rf"printf 'GET /{path} HTTP/1.0\r\n\r\n' | timeout {TIMEOUT_S} nc {address} {port}"
    answer = control_plane.kubectl("exec", pod, "--", "sh", "-c", request)
    head, _, body = answer.partition("\n\n")
    assert head.startswith("HTTP/1.0 200") or head.startswith("HTTP/1.1 200"), answer
    return body


def ready(node: KubeletNode) -> str:
    return node.api.conditions().get("Ready", "")


def await_silent(node: KubeletNode) -> None:
    wait_for(f"{node.name} is Unknown", lambda: ready(node) == "Unknown", GRACE_S)


# --- pods -------------------------------------------------------------------


def test_a_pod_runs_logs_and_is_deleted(nodes: tuple[KubeletNode, KubeletNode], pods: Pods) -> None:
    pods.create("speaks", on(nodes[0], "echo here; exec sleep 600"))
    pods.wait_ready("speaks", 60)
    wait_for("its log", lambda: pods.logs("speaks") == "here\n", 10)
    pods.delete("speaks")
    pods.wait_gone("speaks", 30)


def test_a_command_runs_in_a_container(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    serve(pods, nodes[0], "entered")
    assert control_plane.kubectl("exec", "entered", "--", "hostname") == "entered\n"


# --- images -----------------------------------------------------------------


@pytest.fixture
def template(machine: None, tmp_path: Path) -> Iterator[ImageStoreTemplate]:
    """What all nodes here have their images from."""
    acquired = acquire_template([ensure_busybox()], ensure_kubelet_binaries().pause, tmp_path)
    yield acquired
    acquired.release()


def contents(directory: Path) -> dict[str, tuple[int, int, int, int, str]]:
    """Everything about every file but the time of the last access."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        has_content = path.is_file() and not path.is_symlink()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if has_content else ""
        facts = (status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, digest)
        found[str(path.relative_to(directory))] = facts
    return found


def in_node(node: KubeletNode, *command: str) -> str:
    return commands.run([*commands.enter_namespaces(node.init_pid), *command])


def test_what_a_container_writes_is_its_own(
    nodes: tuple[KubeletNode, KubeletNode],
    pods: Pods,
    control_plane: ControlPlane,
    template: ImageStoreTemplate,
) -> None:
    before = contents(template.root)
    writes = "rm /bin/true && echo mine > /bin/true && echo more >> /bin/busybox; exec sleep 600"
    pods.create("writes", on(nodes[0], writes))
    pods.wait_ready("writes", 60)

    def is_written() -> bool:
        return control_plane.kubectl("exec", "writes", "--", "cat", "/bin/true") == "mine\n"

    wait_for("it has written", is_written, 10)
    for number, node in enumerate(nodes):
        serve(pods, node, f"reads-{number}")
        control_plane.kubectl("exec", f"reads-{number}", "--", "/bin/true")
    assert contents(template.root) == before


def test_what_a_node_deletes_stays_for_the_others(
    make_node: Callable[[], KubeletNode], template: ImageStoreTemplate
) -> None:
    before = contents(template.root)
    node = make_node()
    node.wait_ready()
    plugin = f"io.containerd.snapshotter.v1.{template.snapshotter}"
    snapshots = node.data / "containerd" / plugin / "snapshots"
    assert len(list(snapshots.iterdir())) == 2
    images = in_node(node, *CTR, "images", "list", "--quiet").split()
    in_node(node, *CTR, "images", "remove", "--sync", *images)
    assert list(snapshots.iterdir()) == []
    with pytest.raises(KubeletNodeError, match="Read-only file system"):
        in_node(node, "touch", f"{IMAGE_TEMPLATE_DIRECTORY}/new")
    node.stop()
    assert contents(template.root) == before


def test_an_image_is_added_to_a_running_node(
    make_node: Callable[[], KubeletNode], pods: Pods, control_plane: ControlPlane, tmp_path: Path
) -> None:
    node = make_node()
    node.wait_ready()
    for version in ("1", "2"):
        node.import_archive(later_image(tmp_path, version))
        name = f"later-{version}"
        pods.create(name, on(node, "exec sleep 600", image=LATER))
        pods.wait_ready(name, 60)
        assert control_plane.kubectl("exec", name, "--", "cat", "/version") == version
        pods.delete(name)
    bad = tmp_path / "bad.tar"
    bad.write_bytes(b"x" * 10240)
    with pytest.raises(KubeletNodeError, match=f"{node.name} cannot import .*/bad.tar"):
        node.import_archive(bad)
    with pytest.raises(KubeletNodeError, match=r"/missing.tar cannot be read: .*No such file"):
        node.import_archive(tmp_path / "missing.tar")
    node.stop()
    with pytest.raises(KubeletNodeError, match="does not run"):
        node.import_archive(bad)


def later_image(directory: Path, version: str) -> Path:
    busybox = (ensure_busybox().parent / "files/bin/busybox").read_bytes()
    contents = {"bin/busybox": busybox, "version": version.encode()}
    links = {f"bin/{name}": "busybox" for name in ("cat", "sh", "sleep")}
    path = directory / f"later-{version}.tar"
    path.write_bytes(archive(LATER, contents, ["/bin/sh"], links=links))
    return path


# --- network ----------------------------------------------------------------


def test_pods_reach_each_other_across_nodes(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    one, two = (serve(pods, node, f"across-{n}") for n, node in enumerate(nodes))
    assert get(control_plane, "across-0", two) == "across-1\n"
    assert get(control_plane, "across-1", one) == "across-0\n"


def test_a_service_reaches_its_pods_on_both_nodes(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    for number, node in enumerate(nodes):
        serve(pods, node, f"behind-{number}", labels={"app": "behind"})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "behind"},
        "spec": {"selector": {"app": "behind"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    control_plane.kubectl("create", "-f", "-", stdin=json.dumps(service))
    address = control_plane.kubectl("get", "svc/behind", "-o", "jsonpath={.spec.clusterIP}")
    seen: set[str] = set()

    def both() -> bool:
        # Also the pod on the node of the client, to which packets do not leave the node.
        with contextlib.suppress(KubectlError):
            seen.add(get(control_plane, "behind-0", address, port=80).strip())
        return seen == {"behind-0", "behind-1"}

    try:
        wait_for("answers of both pods", both, 30)
    finally:
        control_plane.kubectl("delete", "svc/behind")


def test_a_pod_reaches_the_api_server(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    serve(pods, nodes[1], "asks")
    control_plane.kubectl(
        "exec", "asks", "--", "sh", "-c", "nc -w 3 $KUBERNETES_SERVICE_HOST 443 < /dev/null"
    )


# --- failures ---------------------------------------------------------------


def test_pods_of_a_killed_node_fall_silent(
    make_node: Callable[[], KubeletNode],
    nodes: tuple[KubeletNode, KubeletNode],
    pods: Pods,
    control_plane: ControlPlane,
) -> None:
    lost = make_node()
    lost.wait_ready()
    address = serve(pods, lost, "lost")
    serve(pods, nodes[0], "sees-the-loss")
    pids = lost.pids
    lost.kill()
    assert not [pid for pid in pids if runs(pid)]
    assert not lost.data.exists()
    with pytest.raises(KubectlError, match="exit code"):
        get(control_plane, "sees-the-loss", address)
    await_silent(lost)


def test_pods_of_a_partitioned_node_go_on(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    partitioned, other = nodes
    address = serve(pods, partitioned, "partitioned", COUNTS_AND_SERVES)
    serve(pods, other, "hears")

    def count() -> int:
        return int(get(control_plane, "hears", address, "count"))

    before = count()
    partitioned.partition_network()
    try:
        since = time.monotonic()
        with pytest.raises(KubectlError, match="exit code"):
            count()
        await_silent(partitioned)
        silent_s = time.monotonic() - since
    finally:
        partitioned.heal_network()
    wait_for("it is heard again", lambda: ready(partitioned) == "True", GRACE_S)
    # Five a second, with room for a slow machine.
    assert count() > before + silent_s
    assert pods.get("partitioned")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_frozen_node_resumes(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    frozen, other = nodes
    address = serve(pods, frozen, "frozen")
    serve(pods, other, "waits")
    frozen.freeze()
    try:
        with pytest.raises(KubectlError, match="exit code"):
            get(control_plane, "waits", address)
        await_silent(frozen)
    finally:
        frozen.thaw()
    wait_for("it is Ready again", lambda: ready(frozen) == "True", GRACE_S)
    assert get(control_plane, "waits", address) == "frozen\n"


def test_containers_outlive_their_kubelet(
    nodes: tuple[KubeletNode, KubeletNode], pods: Pods, control_plane: ControlPlane
) -> None:
    address = serve(pods, nodes[0], "outlives")
    serve(pods, nodes[1], "checks")
    before = pods.get("outlives")["status"]["containerStatuses"][0]["containerID"]
    nodes[0].stop_agent()
    assert get(control_plane, "checks", address) == "outlives\n"
    nodes[0].start_agent()
    wait_for("the kubelet serves its log", lambda: has_log(pods, "outlives"), 30)
    after = pods.wait_ready("outlives", 30)["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


def has_log(pods: Pods, name: str) -> bool:
    with contextlib.suppress(EmbeddedError, OSError):
        pods.logs(name)
        return True
    return False


# --- what is left -----------------------------------------------------------

ANOTHER_CLUSTER = """
    import json, os, sys, time
    from pathlib import Path
    from rekindle_testing.embedded.components import ComponentSettings
    from rekindle_testing.embedded.control_plane import ControlPlane
    from rekindle_testing.embedded.kubelet_node.node import KubeletNode
    from rekindle_testing.embedded.kubelet_node.images import BUSYBOX_IMAGE, ensure_busybox
    from rekindle_testing.embedded.kubelet_node.network import NodeNetwork
    from rekindle_testing.embedded.pods import Pods
    directory = Path(sys.argv[1])
    with NodeNetwork(directory / "network") as network:
        settings = ComponentSettings(api_address=network.host_address)
        with ControlPlane(directory / "control", settings) as control:
            node = KubeletNode("brief", control, directory / "brief", network=network,
                               archives=[ensure_busybox()])
            node.start(); node.wait_ready()
            pods = Pods(control.kubeconfig)
            pods.create("p", {"nodeName": "brief", "containers": [
                {"name": "c", "image": BUSYBOX_IMAGE, "command": ["sleep", "600"]}]})
            pods.wait_ready("p", 60)
            if sys.argv[2] == "frozen":
                node.freeze()
            print(json.dumps({
                "pids": [*node.pids, *control.pids.values()],
                "namespaces": [os.readlink(f"/proc/{pid}/ns/{kind}")
                               for pid in node.pids for kind in ("net", "mnt", "pid")],
                "state": str(network.state.path),
                "resources": network.state.path.read_text(),
            }), flush=True)
            sys.stdin.readline()
"""


@contextlib.contextmanager
def another_cluster(directory: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """In a process of its own, which ends it in order after a line."""
    script = [sys.executable, "-c", textwrap.dedent(ANOTHER_CLUSTER), str(directory), mode]
    process = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def left_of(facts: Any) -> list[str]:
    """What is still there of a cluster, by its state file and by what the kernel lists."""
    own = {Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "mnt", "pid")}
    namespaces = set(facts["namespaces"]) - set(map(str, own))
    found = removal.leftovers(parse(facts["resources"]))
    running = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if runs(entry.name)]
    found += [f"process {pid}" for pid in facts["pids"] if pid in running]
    for pid in running:
        with contextlib.suppress(OSError):
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/ns").iterdir()]
            found += [f"{link} of {pid}" for link in links if link in namespaces]
    mounts = Path("/proc/self/mountinfo").read_text()
    found += [name for name in namespaces if name in mounts]
    found += ["firewall rules"] if "KUBE-" in host_rules() else []
    return found


def runs(pid: int | str) -> bool:
    """A process that has ended may still wait to be reaped, by the machine's own init."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def host_rules() -> str:
    return subprocess.run(["iptables-save"], capture_output=True, text=True).stdout


def test_a_stopped_cluster_leaves_no_resources_on_the_host(machine: None, tmp_path: Path) -> None:
    before = set(Path("/sys/class/net").iterdir())
    with another_cluster(tmp_path, "running") as (process, facts):
        assert left_of(facts)
        assert process.stdin is not None
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert left_of(facts) == []
    assert Path(facts["state"]).read_text() == ""
    assert set(Path("/sys/class/net").iterdir()) <= before


@pytest.mark.parametrize("mode", ["running", "frozen"])
def test_a_killed_test_leaves_nothing_after_the_next_start(
    machine: None, template: ImageStoreTemplate, tmp_path: Path, mode: str
) -> None:
    before = contents(template.root)
    with another_cluster(tmp_path, mode) as (process, facts):
        process.kill()
        process.wait()
    with NodeNetwork(tmp_path / "next", on_progress=print):
        resources = [r for r in parse(facts["resources"]) if "brief" in str(r)]
        assert removal.leftovers(resources) == []
    assert left_of(facts) == []
    assert contents(template.root) == before


def test_all_is_removed_though_the_reaper_died(machine: None, tmp_path: Path) -> None:
    """As above, but what ends the nodes' processes with the test is killed before it."""
    with another_cluster(tmp_path, "running") as (process, facts):
        # The first one is the network's, the second one the control plane's.
        os.kill(min(reapers_of(process.pid))[1], signal.SIGKILL)
        process.kill()
        process.wait()
        assert [line for line in left_of(facts) if line.startswith("process")]
    removal.remove_leftovers()
    removal.remove_leftovers()
    wait_for("the control plane has ended", lambda: left_of(facts) == [], 10)


def reapers_of(parent: int) -> list[tuple[int, int]]:
    """When they were started, and their ids."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and b"reaper.py" in (entry / "cmdline").read_bytes():
                found.append((int(fields[19]), int(entry.name)))
    return found


STARTS_A_NODE = """
    import sys
    from pathlib import Path
    from rekindle_testing.embedded.kubelet_node.node import KubeletNode
    from rekindle_testing.embedded.kubelet_node.network import NodeNetwork
    directory = Path(sys.argv[1])
    file = directory / "empty"
    file.touch()
    class Cluster:
        kubeconfig = ca_file = file
        def node_kubeconfig(self, name): return file
        def user_kubeconfig(self, user, group=""): return file
        def issue_server_certificate(self, name, hosts): return file, file
    print("begins", flush=True)
    network = NodeNetwork(directory / "network", state_directory=directory / "state")
    network.start()
    KubeletNode("brief", Cluster(), directory / "brief", network=network).start()
    sys.stdin.readline()
"""


@pytest.mark.parametrize("after_s", [0, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 1])
def test_whenever_a_start_is_killed_all_is_removed(
    machine: None, tmp_path: Path, after_s: float
) -> None:
    """Because each resource is recorded in the state file before it is made."""
    before = machine_wide()
    script = [sys.executable, "-c", textwrap.dedent(STARTS_A_NODE), str(tmp_path)]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        # A moment of the start, not something to wait for.
        time.sleep(after_s)
        process.kill()

    def is_swept() -> bool:
        # A child between fork and exec has the lock of the state file for a moment longer.
        removal.remove_leftovers(tmp_path / "state")
        return not command_lines_naming(tmp_path)

    wait_for("all processes to be removed", is_swept, 10)
    assert machine_wide() <= before
    assert not (tmp_path / "brief" / "data").exists()


def machine_wide() -> set[Path]:
    """Links and cgroups of kubelet nodes, whoever has made them."""
    found = set(Path("/sys/class/net").iterdir())
    for hierarchy in cgroups.mounted():
        found |= set(hierarchy.root.glob("rekindle-kubelet-*"))
    return found
