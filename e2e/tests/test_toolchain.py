"""How the toolchain finds and names what it builds; nothing is built here."""

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle_testing.embedded import go_modules, toolchain
from rekindle_testing.embedded.cache import (
    AcquiredEntry,
    acquire,
    content_key,
    make_once,
    prune,
)
from rekindle_testing.embedded.go_modules import (
    CONTROL_PLANE_MODULE,
    NODE_MODULE,
    Binary,
    GoError,
    cache_key,
    go_candidates,
    needed_go,
    parse_go_version,
    required_version,
)
from rekindle_testing.embedded.java import find_java, java_version
from rekindle_testing.embedded.toolchain import (
    ETCD,
    HELM,
    KUBERNETES,
    NODE,
    PAUSE,
    ToolchainError,
    ensure_control_plane_binaries,
    ensure_helm,
    ensure_kubelet_binaries,
    parse_minor,
)
from rekindle_testing.progress import no_progress

# Of a module with both, the line that replaces it is the last one.
_REQUIRED_OR_REPLACED = r"^(?:\t|replace )(\S+) (?:=> \S+ )?(v\S+)"


def program(path: Path, output: str = "") -> Path:
    """A program that prints the output, whatever its arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# --- the cache --------------------------------------------------------------


def test_a_key_depends_on_names_and_contents_but_not_on_order() -> None:
    key = content_key([("a", b"1"), ("b", b"2")])
    assert key == content_key([("b", b"2"), ("a", b"1")])
    assert key != content_key([("a", b"2"), ("b", b"1")])
    assert key != content_key([("a", b"1b"), ("", b"2")])


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    made = []

    def make(directory: Path) -> None:
        made.append(directory)
        (directory / "file").write_text("content")

    for _ in range(2):
        entry = make_once(tmp_path / "cache" / "entry", make, no_progress)
        assert (entry / "file").read_text() == "content"
    assert len(made) == 1


def test_an_entry_whose_build_failed_does_not_exist(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make_once(tmp_path / "entry", fail, no_progress)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_second_build_waits_for_the_first(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    begun, waited = threading.Event(), threading.Event()

    def make(directory: Path) -> None:
        begun.set()
        assert waited.wait(10)

    first = threading.Thread(target=make_once, args=(entry, make, no_progress))
    first.start()
    assert begun.wait(10)
    assert make_once(entry, lambda directory: pytest.fail("twice"), lambda line: waited.set())
    first.join(10)


def test_what_a_killed_build_has_left_is_deleted(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    script = f"""
import os, signal
from pathlib import Path
from rekindle_testing.embedded.cache import make_once
def make(directory):
    (directory / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
make_once(Path({str(entry)!r}), make, print)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode < 0
    assert not entry.exists()
    assert len(list(tmp_path.glob(".entry-*"))) == 1
    make_once(entry, lambda directory: (directory / "all").touch(), no_progress)
    assert [path.name for path in entry.iterdir()] == ["all"]
    assert not list(tmp_path.glob(".entry-*"))


def acquired(directory: Path, name: str, *, used_at_s: int) -> AcquiredEntry:
    entry = acquire(directory / name, lambda scratch: None, no_progress)
    os.utime(directory / f"{name}.use", (used_at_s, used_at_s))
    return entry


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir()}


def test_entries_that_were_used_last_are_kept(tmp_path: Path) -> None:
    for name, used_at_s in (("a", 3), ("b", 1), ("c", 2)):
        acquired(tmp_path, name, used_at_s=used_at_s).release()
    (tmp_path / ".b-half").mkdir()
    prune(tmp_path, 2)
    assert entries(tmp_path) == {"a", "c"}
    acquire(tmp_path / "c", lambda scratch: pytest.fail("twice"), no_progress).release()
    prune(tmp_path, 1)
    assert entries(tmp_path) == {"c"}


def test_an_entry_in_use_is_kept(tmp_path: Path) -> None:
    first, second = (acquired(tmp_path, "a", used_at_s=1) for _ in range(2))
    acquired(tmp_path, "b", used_at_s=2).release()
    first.release()
    prune(tmp_path, 0)
    assert entries(tmp_path) == {"a"}
    second.release()
    prune(tmp_path, 0)
    assert entries(tmp_path) == set()


def test_an_entry_that_is_being_made_is_kept(tmp_path: Path) -> None:
    def make(directory: Path) -> None:
        prune(tmp_path, 0)
        assert directory.is_dir()

    acquire(tmp_path / "a", make, no_progress).release()
    assert entries(tmp_path) == {"a"}


# --- Go ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.27 darwin/arm64", (1, 27, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_the_version_of_go_is_read(text: str, version: tuple[int, int, int]) -> None:
    assert parse_go_version(text) == version


def test_the_go_directive_sets_the_needed_version() -> None:
    assert needed_go("module a\n\ngo 1.26.0\nrequire x v1.0.0\n") == (1, 26, 0)


def test_go_is_searched_on_path_and_then_in_its_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = program(tmp_path / "usual" / "go")
    monkeypatch.setattr(go_modules, "_DEFAULT_GO", usual)
    first, second = (program(tmp_path / name / "go") for name in ("first", "second"))
    (tmp_path / "not-executable").mkdir()
    (tmp_path / "not-executable" / "go").write_text("")
    path = f"{tmp_path / 'not-executable'}:{first.parent}:{usual.parent}:{second.parent}"
    assert list(go_candidates(path)) == [first, usual, second]
    assert list(go_candidates("")) == [usual]


def test_a_go_that_is_too_old_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = program(tmp_path / "usual" / "go", "go version go1.99.0 linux/amd64")
    monkeypatch.setattr(go_modules, "_DEFAULT_GO", new)
    old = program(tmp_path / "old" / "go", "go version go1.20.1 linux/amd64")
    found = go_modules.find_go({"PATH": str(old.parent)}, tmp_path / "cache", no_progress)
    assert found.program == new


def test_without_go_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_index(directory: Path) -> None:
        raise GoError("no network")

    monkeypatch.setattr(go_modules, "_DEFAULT_GO", tmp_path / "none")
    monkeypatch.setattr(go_modules, "_install_wheel", no_index)
    old = program(tmp_path / "old" / "go", "go version go1.20.1 linux/amd64")
    with pytest.raises(GoError, match=r"go1\.20\.1.*no network.*KUBEBUILDER_ASSETS"):
        go_modules.find_go({"PATH": str(old.parent)}, tmp_path / "cache", no_progress)


def test_a_requirement_is_found_in_both_forms() -> None:
    assert required_version("require k8s.io/kubernetes v1.34.4\n", "k8s.io/kubernetes") == "v1.34.4"
    block = "require (\n\ta.b/c-d v1.0.0\n\ta.b/c v2.0.0 // indirect\n)\n"
    assert required_version(block, "a.b/c") == "v2.0.0"
    with pytest.raises(GoError, match=r"a\.b/x"):
        required_version(block, "a.b/x")


def test_binaries_have_their_pinned_versions() -> None:
    flags = KUBERNETES.link_flags()
    assert flags[0].endswith(f"gitVersion={KUBERNETES.version()}")
    assert flags[0].startswith("-X k8s.io/component-base/version.gitVersion=v1.34.")
    assert [flag.partition("=")[2] for flag in flags[1:]] == ["1", "34"]
    assert "version.version=v3." in HELM.link_flags()[0]
    assert ETCD.link_flags() == []


def test_cache_keys_depend_on_the_compiler_and_the_programs() -> None:
    assert (
        cache_key([ETCD], "go1.26.8")
        == cache_key([ETCD], "go1.26.8")
        != cache_key([ETCD], "go1.26.9")
    )
    sets = [[ETCD], [HELM], [KUBERNETES], [ETCD, HELM]]
    assert len({cache_key(binaries, "go1.26.8") for binaries in sets}) == 4


def test_a_node_has_the_control_planes_version_and_libraries() -> None:
    assert NODE.version() == KUBERNETES.version()
    nodes, others = (
        dict(re.findall(_REQUIRED_OR_REPLACED, (module / "go.mod").read_text(), re.MULTILINE))
        for module in (NODE_MODULE, CONTROL_PLANE_MODULE)
    )
    # Else these would be compiled twice.
    assert {name: others.get(name, version) for name, version in nodes.items()} == nodes


def test_an_entry_has_binaries_of_one_go_module() -> None:
    assert cache_key([NODE, PAUSE], "go1.26.8") != cache_key([NODE], "go1.26.8")
    with pytest.raises(ValueError, match="too many"):
        cache_key([NODE, KUBERNETES], "go1.26.8")


def test_programs_of_a_node_are_built_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(binaries: Sequence[Binary], go: object, cache: Path, on_progress: object) -> Path:
        built.append([binary.name for binary in binaries])
        return cache / "built"

    monkeypatch.setattr(toolchain, "build", build)
    monkeypatch.setattr(toolchain, "find_go", lambda *_: None)
    found = ensure_kubelet_binaries(no_progress, {"REKINDLE_CACHE": str(tmp_path)})
    assert built == [["node", "pause"]]
    assert found.kube_proxy == tmp_path / "built/kube-proxy"


# --- programs that are there ------------------------------------------------


def assets(directory: Path, *names: str, version: str = "v1.34.1") -> dict[str, str]:
    """An environment with these programs, and a helm, so that nothing need be built."""
    for name in names:
        program(directory / name, f"Kubernetes {version}")
    program(directory / "path" / "helm", "v3.19.0+g3d8990f")
    return {
        "KUBEBUILDER_ASSETS": str(directory),
        "REKINDLE_CACHE": str(directory / "cache"),
        "PATH": f"{directory / 'path'}:/bin",
    }


SERVERS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def test_complete_assets_are_used_unchanged(tmp_path: Path) -> None:
    environment = assets(tmp_path, *SERVERS, "kubectl")
    binaries = ensure_control_plane_binaries(no_progress, environment)
    assert binaries.kube_controller_manager == tmp_path / "kube-controller-manager"
    assert binaries.kubectl == tmp_path / "kubectl"


def test_a_kubectl_near_the_servers_version_is_used(tmp_path: Path) -> None:
    environment = assets(tmp_path / "assets", *SERVERS)
    kubectl = program(tmp_path / "assets/path/kubectl", "Client Version: v1.33.2-dispatcher")
    assert ensure_control_plane_binaries(no_progress, environment).kubectl == kubectl


def test_assets_too_old_for_the_controllers_built_here_are_refused(tmp_path: Path) -> None:
    environment = assets(tmp_path, "etcd", "kube-apiserver", version="v1.31.0")
    with pytest.raises(ToolchainError, match=r"kube-controller-manager, kube-scheduler.*1\.31"):
        ensure_control_plane_binaries(no_progress, environment)


def test_assets_that_are_no_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="KUBEBUILDER_ASSETS"):
        ensure_control_plane_binaries(no_progress, {"KUBEBUILDER_ASSETS": str(tmp_path / "none")})


def test_a_helm_3_on_path_is_used(tmp_path: Path) -> None:
    helm = program(tmp_path / "helm", "v3.19.0+g3d8990f")
    assert ensure_helm(no_progress, {"PATH": f"{tmp_path}:/bin"}) == helm


@pytest.mark.parametrize("version", ["v3.13.3+gc8b9489", "v4.0.1+g12500dd"])
def test_another_helm_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    program(tmp_path / "helm", version)
    monkeypatch.setattr(toolchain, "_ensure", lambda *_: {"helm": tmp_path / "pinned"})
    assert ensure_helm(no_progress, {"PATH": f"{tmp_path}:/bin"}) == tmp_path / "pinned"


def test_all_missing_programs_are_built_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(binaries: Sequence[Binary], go: object, cache: Path, on_progress: object) -> Path:
        built.append([binary.name for binary in binaries])
        return cache / "built"

    monkeypatch.setattr(toolchain, "build", build)
    monkeypatch.setattr(toolchain, "find_go", lambda *_: None)
    environment = assets(tmp_path, "kube-apiserver", version=KUBERNETES.version())
    binaries = ensure_control_plane_binaries(no_progress, environment)
    assert built == [["kubernetes", "etcd"]]
    assert binaries.kube_apiserver == tmp_path / "kube-apiserver"
    assert binaries.etcd == tmp_path / "cache/built/etcd"
    nothing = {"REKINDLE_CACHE": str(tmp_path / "cache"), "PATH": "/nowhere"}
    assert ensure_helm(no_progress, nothing) == tmp_path / "cache/built/helm"
    assert built[1:] == [["kubernetes", "etcd", "helm"]]


@pytest.mark.parametrize(
    ("text", "minor"), [("Kubernetes v1.34.4", 34), ("v1.9.0-rc.1", 9), ("unknown", None)]
)
def test_the_minor_version_is_read(text: str, minor: int | None) -> None:
    assert parse_minor(text) == minor


# --- Java -------------------------------------------------------------------


def java(home: Path, version: str) -> Path:
    program(home / "bin" / "java")
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


def test_the_version_of_a_java_is_read_without_starting_it(tmp_path: Path) -> None:
    assert java_version(java(tmp_path / "a", "17.0.15")) == 17
    assert java_version(java(tmp_path / "b", "21")) == 21
    assert java_version(tmp_path / "none") == 0


def test_java_home_comes_before_path_and_the_systems_directory(tmp_path: Path) -> None:
    jvms = tmp_path / "jvm"
    system = java(jvms / "java-17", "17.0.1")
    java(jvms / "java-11", "11.0.1")
    on_path = java(tmp_path / "jdk21", "21.0.1")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(on_path / "bin" / "java")
    own = java(tmp_path / "own", "17.0.2")
    path = {"PATH": str(tmp_path / "bin")}
    assert find_java({**path, "JAVA_HOME": str(own)}, jvms) == own
    assert find_java(path, jvms) == on_path
    assert find_java({}, jvms) == system


def test_a_java_of_another_version_is_skipped(tmp_path: Path) -> None:
    newest = java(tmp_path / "jdk25", "25")
    assert find_java({"JAVA_HOME": str(newest)}, tmp_path / "none") is None
