"""Kubelet nodes: addresses, configuration files, images, the state file; nothing is started."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_testing.embedded.cache import acquire
from rekindle_testing.embedded.kubelet_node import files, mounts, removal
from rekindle_testing.embedded.kubelet_node.addresses import (
    ALL_CLUSTERS,
    MAX_CLUSTERS,
    MAX_NODES,
    ClusterAddresses,
    free_indexes,
    mac_of,
    neighbour_commands,
)
from rekindle_testing.embedded.kubelet_node.cgroups import hierarchies
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError
from rekindle_testing.embedded.kubelet_node.image_archive import archive, fingerprint
from rekindle_testing.embedded.kubelet_node.image_store import ImageStoreTemplate, link_images
from rekindle_testing.embedded.kubelet_node.network import NodeNetwork
from rekindle_testing.embedded.kubelet_node.node import KubeletNode
from rekindle_testing.embedded.kubelet_node.packages import PACKAGES, missing
from rekindle_testing.embedded.kubelet_node.state_file import (
    Cgroup,
    Directory,
    HostResource,
    Link,
    StateFile,
    parse,
    to_line,
)
from rekindle_testing.progress import no_progress

DATA = Path("/d")

# --- addresses --------------------------------------------------------------


def test_ranges_of_clusters_and_nodes_do_not_overlap() -> None:
    clusters = [ClusterAddresses(index) for index in range(MAX_CLUSTERS)]
    ranges = [cluster.range for cluster in clusters]
    assert all(network.subnet_of(ALL_CLUSTERS) for network in ranges)
    assert not any(a.overlaps(b) for a in ranges for b in ranges if a != b)
    for cluster in clusters:
        first = IPv4Network((cluster.range.network_address, 24))
        pods = [node.pod_cidr for node in cluster.nodes()]
        assert len(set(pods)) == MAX_NODES
        assert not any(network.overlaps(first) for network in pods)
        assert all(network.subnet_of(cluster.range) for network in pods)
        members = [cluster.host, *(node.address for node in cluster.nodes())]
        assert len(set(members)) == MAX_NODES + 1
        assert all(address in first for address in members)


def test_a_cluster_avoids_the_routes_of_the_machine() -> None:
    assert free_indexes(["default", "192.0.2.0/24", "127.0.0.1"]) == list(range(MAX_CLUSTERS))
    assert free_indexes(["198.18.0.0/24", "198.18.70.1"]) == [1, *range(3, MAX_CLUSTERS)]
    assert free_indexes(["198.16.0.0/14"]) == []


def test_a_node_knows_all_others_that_may_ever_exist() -> None:
    cluster = ClusterAddresses(1)
    own = cluster.node(2)
    lines = neighbour_commands(cluster, own.address, "eth0", cluster.host)
    text = "\n".join(lines)
    assert str(own.pod_cidr) not in text
    assert "route replace 198.18.33.0/24 via 198.18.32.2 dev eth0" in lines
    host = mac_of(cluster.host)
    assert f"neigh replace 198.18.32.1 lladdr {host} nud permanent dev eth0" in lines
    assert lines[-1] == "route replace default via 198.18.32.1 dev eth0"
    assert text.count("route replace 198") == text.count("neigh") - 1 == MAX_NODES - 1


def test_the_machine_gets_no_default_route() -> None:
    cluster = ClusterAddresses(0)
    assert "default" not in "\n".join(neighbour_commands(cluster, cluster.host, "rk0", None))


def test_a_hardware_address_follows_from_the_address() -> None:
    assert mac_of(IPv4Address("198.18.32.1")) == "02:00:c6:12:20:01"


# --- configuration files ----------------------------------------------------


def test_containerd_has_its_own_directories() -> None:
    config = tomllib.loads(files.containerd_config(DATA, "overlayfs"))
    assert config["root"] == "/d/containerd"
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is True
    assert cri["sandbox_image"] == files.PAUSE_IMAGE
    assert cri["cni"] == {"bin_dir": "/usr/lib/cni", "conf_dir": "/d/cni"}
    assert cri["containerd"]["snapshotter"] == "overlayfs"


def test_a_containerd_that_only_unpacks_serves_no_kubelet() -> None:
    config = tomllib.loads(files.containerd_config_without_cri(DATA, "native"))
    assert config["root"] == "/d"
    disabled = config["disabled_plugins"]
    assert "io.containerd.grpc.v1.cri" in disabled
    assert "io.containerd.snapshotter.v1.overlayfs" in disabled
    assert "io.containerd.snapshotter.v1.native" not in disabled


def test_pods_get_addresses_of_their_nodes_range() -> None:
    bridge, portmap = json.loads(files.cni_config(DATA, IPv4Network("198.18.1.0/24")))["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "198.18.1.0/24"}]]
    assert bridge["ipam"]["dataDir"] == "/d/cni-addresses"
    assert portmap["capabilities"] == {"portMappings": True}


def test_a_kubelet_stays_within_its_directory_and_cgroup() -> None:
    settings = files.KubeletSettings(
        DATA, "/c/n", Path("/c.crt"), Path("/c.key"), Path("/ca"), 20, 8, {"cpu": "700m"}
    )
    config = json.loads(files.kubelet_config(settings))
    assert config["cgroupRoot"] == "/c/n"
    assert config["podLogsDir"] == "/d/pod-logs"
    assert config["systemReserved"] == {"cpu": "700m"}
    assert (config["failCgroupV1"], config["failSwapOn"]) == (False, False)
    command = files.kubelet_command(
        Path("/k"), "n", IPv4Address("198.18.0.2"), DATA, {"zone": "a", "b": "c"}
    )
    assert "--root-dir=/d/kubelet" in command
    assert "--node-labels=zone=a,b=c" in command


def test_kube_proxy_leaves_the_machines_connection_table_alone() -> None:
    config = json.loads(files.kube_proxy_config("n", Path("/k"), IPv4Network("198.18.0.0/19")))
    assert config["conntrack"] == {"maxPerCore": 0}
    assert config["clusterCIDR"] == "198.18.0.0/19"


@pytest.mark.parametrize(
    ("cpu_m", "memory", "kept"),
    [
        (None, None, {}),
        (1300, None, {"cpu": "700m"}),
        (4000, 2**31, {"memory": str(2**33 - 2**31)}),
    ],
)
def test_what_a_node_is_smaller_by_is_reserved(
    cpu_m: int | None, memory: int | None, kept: dict[str, str]
) -> None:
    assert files.reserved(2000, 2**33, cpu_m, memory) == kept


# --- images -----------------------------------------------------------------


def test_an_archive_names_its_image_and_holds_its_program() -> None:
    content = archive(
        "docker.io/a/b:dev",
        {"bin/x": b"program"},
        ["/bin/x"],
        links={"bin/y": "x"},
        directories=["tmp"],
        machine="aarch64",
    )
    with tarfile.open(fileobj=io.BytesIO(content)) as outer:
        read = {m.name: outer.extractfile(m).read() for m in outer}  # type: ignore[union-attr]
    (manifest,) = json.loads(read["manifest.json"])
    assert manifest["RepoTags"] == ["docker.io/a/b:dev"]
    config = json.loads(read[manifest["Config"]])
    assert config["architecture"] == "arm64"
    assert config["config"]["Entrypoint"] == ["/bin/x"]
    with tarfile.open(fileobj=io.BytesIO(read["layer.tar"])) as layer:
        assert [(m.name, oct(m.mode)) for m in layer][:2] == [("tmp", "0o1777"), ("bin/x", "0o755")]
        assert layer.getmember("bin/y").linkname == "x"


def test_the_same_program_gives_the_same_archive() -> None:
    assert archive("t", {"x": b"1"}, ["/x"]) == archive("t", {"x": b"1"}, ["/x"])


def docker_archive(tag: str, program: bytes) -> bytes:
    return archive(tag, {"x": program}, ["/x"])


def packed(**members: bytes) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name.replace("_", "."))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return output.getvalue()


def test_archives_of_the_same_images_have_one_fingerprint() -> None:
    plain = docker_archive("t", b"1")
    assert fingerprint(io.BytesIO(plain)) == fingerprint(io.BytesIO(gzip.compress(plain)))


@pytest.mark.parametrize(("tag", "program"), [("u", b"1"), ("t", b"2")])
def test_another_name_or_program_is_another_fingerprint(tag: str, program: bytes) -> None:
    first, second = docker_archive("t", b"1"), docker_archive(tag, program)
    assert fingerprint(io.BytesIO(first)) != fingerprint(io.BytesIO(second))


def test_an_oci_layout_is_identified_by_its_index() -> None:
    first, second = (packed(index_json=b"{%d}" % number, layer=b"") for number in (1, 2))
    assert fingerprint(io.BytesIO(first)) != fingerprint(io.BytesIO(second))
    assert fingerprint(io.BytesIO(first)) == fingerprint(io.BytesIO(packed(index_json=b"{1}")))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tar" * 1000,
        packed(other=b""),
        packed(manifest_json=b"{"),
        packed(manifest_json=b'[{"Config": "missing"}]'),
        packed(manifest_json=b"[1]"),
        docker_archive("t", b"1" * 2000)[:700],
    ],
)
def test_what_is_no_archive_of_images_has_no_identity(content: bytes) -> None:
    with pytest.raises(ValueError, match="no archive of images"):
        fingerprint(io.BytesIO(content))


def test_a_node_has_copies_of_databases_and_links_to_the_rest(tmp_path: Path) -> None:
    entry, root = tmp_path / "template", tmp_path / "node"
    metadata = "io.containerd.metadata.v1.bolt/meta.db"
    snapshots = "io.containerd.snapshotter.v1.overlayfs"
    blobs = "io.containerd.content.v1.content/blobs/sha256"
    written = {metadata: "m", f"{snapshots}/metadata.db": "s", f"{blobs}/abc": "b"}
    for name, text in {**written, f"{snapshots}/snapshots/1/fs/file": "f"}.items():
        file = entry / "containerd" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    template = ImageStoreTemplate(
        "overlayfs", acquire(entry, lambda _: pytest.fail("made"), no_progress)
    )
    link_images(template, root)
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert found == {*written, f"{snapshots}/snapshots/1"}
    (root / metadata).write_text("changed")
    assert (template.root / metadata).read_text() == "m"
    for shared in (f"{blobs}/abc", f"{snapshots}/snapshots/1"):
        assert (root / shared).readlink() == Path(files.IMAGE_TEMPLATE_DIRECTORY) / shared


# --- packages, cgroups ------------------------------------------------------


def test_missing_programs_are_named_by_their_packages() -> None:
    assert missing(lambda program: True) == []
    assert missing(lambda program: program not in ("ip", "bridge", "runc")) == ["iproute2", "runc"]
    assert missing(lambda program: False) == sorted(set(PACKAGES.values()))


def test_hierarchies_are_found_in_the_mounts() -> None:
    text = """\
/dev/vda / ext4 rw 0 0
cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""
    cpuset, unified = hierarchies(text)
    assert (cpuset.is_cpuset, cpuset.is_v2) == (True, False)
    assert (unified.root, unified.is_v2) == (Path("/sys/fs/cgroup/unified"), True)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
overlay /a overlay rw 0 0
none /a/b\\040c tmpfs rw 0 0
none /ab tmpfs rw 0 0
"""


def test_mounts_below_a_path_are_found() -> None:
    assert mounts.points_below(MOUNTS, Path("/a")) == ["/a", "/a/b c"]
    assert mounts.points_below(MOUNTS, Path("/a/b c/d")) == []


@pytest.mark.parametrize(
    ("path", "file_system"),
    [("/x", "ext4"), ("/a/x", "overlay"), ("/a/b c/x", "tmpfs"), ("/abc", "ext4")],
)
def test_the_file_system_of_a_path_is_found(path: str, file_system: str) -> None:
    assert mounts.file_system_of(MOUNTS, Path(path)) == file_system


def test_the_last_mount_of_a_point_counts() -> None:
    text = "a /p ext4 rw 0 0\nb /p overlay rw 0 0\n"
    assert mounts.file_system_of(text, Path("/p/x")) == "overlay"


def test_an_overlay_is_not_laid_over_another() -> None:
    assert files.snapshotter(["ext4", "overlay"]) == "native"
    assert files.snapshotter(["ext4", "tmpfs"]) == "overlayfs"


# --- the state file ---------------------------------------------------------

NAMES = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,9}", fullmatch=True)
PARTS = st.text(st.characters(exclude_characters="/."), min_size=1)
RESOURCES = st.lists(
    st.one_of(
        st.builds(Cgroup, NAMES.map("rekindle-kubelet-3/{}".format)),
        st.builds(Link, st.integers(0, 15).map("rk{}".format)),
        st.builds(
            Directory,
            PARTS.map("/{}/data".format),
        ),
    ),
    max_size=6,
)


@given(RESOURCES, st.data())
def test_a_file_cut_anywhere_names_what_was_recorded_before(
    resources: list[HostResource], data: st.DataObject
) -> None:
    text = "".join(map(to_line, resources))
    length = data.draw(st.integers(0, len(text)))
    found = parse(text[:length])
    assert found == list(dict.fromkeys(resources))[: len(found)]
    if length == len(text):
        assert found == list(dict.fromkeys(resources))


def test_a_line_of_another_kind_is_refused() -> None:
    with pytest.raises(KubeletNodeError, match="no host resource"):
        parse('{"kind": "planet", "name": "x"}\n')


@pytest.mark.parametrize(
    "resource",
    [
        Cgroup(""),
        Cgroup("rekindle-kubelet-0/.."),
        Cgroup("system.slice"),
        Link("eth0"),
        Directory("/"),
        Directory("/data"),
        Directory("a/data"),
        Directory("/home/u"),
        Directory("/a/../data"),
    ],
)
def test_resources_of_other_programs_are_not_recorded_or_removed(
    resource: HostResource, tmp_path: Path
) -> None:
    state = StateFile.claim(tmp_path / "0.jsonl")
    assert state is not None
    with pytest.raises(KubeletNodeError, match="cannot belong"):
        state.record(resource)
    with pytest.raises(KubeletNodeError, match="no host resource"):
        parse(to_line(resource))


def test_a_state_file_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / "state" / "0.jsonl"
    first = StateFile.claim(path)
    assert first is not None
    assert StateFile.claim(path) is None
    first.record(Directory("/d/data"), Link("rk0"))
    assert first.resources() == [Directory("/d/data"), Link("rk0")]
    first.close()
    second = StateFile.claim(path)
    assert second is not None
    assert second.resources() == [Directory("/d/data"), Link("rk0")]
    second.clear()
    assert second.resources() == []


def test_what_a_killed_process_has_recorded_is_removed(tmp_path: Path) -> None:
    path, left = tmp_path / "state" / "0.jsonl", tmp_path / "node" / "data"
    script = f"""
import os, signal
from pathlib import Path
from rekindle_testing.embedded.kubelet_node.state_file import *
state = StateFile.claim(Path({str(path)!r}))
state.record(Directory({str(left)!r}), Directory({str(tmp_path / "never-made" / "data")!r}))
(Path({str(left)!r}) / "a").mkdir(parents=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], env=dict(os.environ))
    assert ended.returncode < 0
    progress: list[str] = []
    removal.remove_leftovers(path.parent, progress.append)
    assert not left.exists()
    assert path.read_text() == ""
    assert len(progress) == 1
    removal.remove_leftovers(path.parent, progress.append)
    assert len(progress) == 1


def test_what_belongs_to_a_running_process_stays(tmp_path: Path) -> None:
    state = StateFile.claim(tmp_path / "0.jsonl")
    assert state is not None
    kept = tmp_path / "data"
    state.record(Directory(str(kept)))
    kept.mkdir()
    removal.remove_leftovers(tmp_path)
    assert kept.exists()


class _Network(NodeNetwork):
    """Only hands out addresses."""

    @property
    def addresses(self) -> ClusterAddresses:
        return ClusterAddresses(0)


class _Cluster:
    kubeconfig = ca_file = Path("unused")

    def node_kubeconfig(self, name: str) -> Path:
        raise NotImplementedError

    def user_kubeconfig(self, user: str, group: str = "") -> Path:
        raise NotImplementedError

    def issue_server_certificate(self, name: str, hosts: Sequence[str]) -> tuple[Path, Path]:
        raise NotImplementedError


def test_a_node_that_is_killed_twice_releases_its_address_once(tmp_path: Path) -> None:
    """A node that was started in between has the address now."""
    network = _Network(tmp_path)

    def node(name: str) -> KubeletNode:
        return KubeletNode(name, _Cluster(), tmp_path / name, network=network)

    first = node("a")
    first.kill()
    second = node("b")
    assert second.address == first.address
    first.kill()
    assert node("c").address != second.address
