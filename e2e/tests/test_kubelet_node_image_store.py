"""Templates of nodes' image stores (containerd's root directory with imported images): made once,
whole, by whoever comes first, and replaced when there are too many. Without nodes and control
plane."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command_lines import command_lines_naming

from rekindle_testing.embedded.kubelet_node import image_store
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError, KubeletNodesUnsupported
from rekindle_testing.embedded.kubelet_node.image_archive import archive
from rekindle_testing.embedded.kubelet_node.image_store import (
    MAX_UNUSED_TEMPLATES,
    acquire_template,
)
from rekindle_testing.embedded.kubelet_node.packages import ensure_host_prerequisites
from rekindle_testing.waiting import wait_for

pytestmark = pytest.mark.kubelet

PAUSE = Path(sys.executable)
"""Any file: nothing is started from a template here."""
MAKE_TEMPLATE = """
    import os, signal, sys
    from pathlib import Path
    from rekindle_testing.embedded.kubelet_node import image_store
    archive, pause, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    imported = image_store.import_archive
    def import_archive(archive, snapshotter, pid):
        if mode == "killed" and archive.name != "pause.tar":
            os.kill(os.getpid(), signal.SIGKILL)
        imported(archive, snapshotter, pid)
    image_store.import_archive = import_archive
    print(image_store.acquire_template([archive], pause, archive.parent, print).root)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        ensure_host_prerequisites(print)
    except KubeletNodesUnsupported as error:
        pytest.skip(str(error))
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "image-templates"


def image(directory: Path, content: str = "1") -> Path:
    path = directory / f"{content}.tar"
    path.write_bytes(archive("docker.io/rekindle/x:dev", {"x": content.encode()}, ["/x"]))
    return path


def start_making(file: Path, mode: str = "") -> subprocess.Popen[str]:
    """A process that makes a template; with the mode "killed" it kills itself before it imports
    `file`."""
    command = [sys.executable, "-c", textwrap.dedent(MAKE_TEMPLATE), str(file), str(PAUSE), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def templates(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_two_processes_make_one_template(tmp_path: Path, cache: Path) -> None:
    file = image(tmp_path)
    both = [start_making(file) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {lines[-1] for lines in outputs} == {
        str(path / "containerd") for path in templates(cache)
    }
    assert sum(line.startswith("unpacking") for lines in outputs for line in lines) == 1


def test_what_a_killed_process_has_begun_is_not_used(tmp_path: Path, cache: Path) -> None:
    file = image(tmp_path)
    with start_making(file, "killed") as killed:
        killed.communicate(timeout=60)
    (begun,) = templates(cache)
    assert begun.name.startswith(".")
    wait_for("its containerd has ended", lambda: not command_lines_naming(cache), 10)
    made = acquire_template([file], PAUSE, tmp_path)
    assert [path / "containerd" for path in templates(cache)] == [made.root]
    assert not command_lines_naming(cache)
    made.release()


def test_templates_that_were_not_used_for_long_are_deleted(tmp_path: Path, cache: Path) -> None:
    first = acquire_template([image(tmp_path, "0")], PAUSE, tmp_path)
    for number in range(1, MAX_UNUSED_TEMPLATES + 2):
        acquire_template([image(tmp_path, str(number))], PAUSE, tmp_path).release()
    # One that is in use is kept too.
    assert len(templates(cache)) == MAX_UNUSED_TEMPLATES + 1
    assert first.entry.path in templates(cache)
    first.release()


def test_an_archive_replaced_while_it_is_read_makes_no_template(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = image(tmp_path)
    imported = image_store.import_archive

    def import_archive(archive: Path, snapshotter: str, init_pid: int) -> None:
        imported(archive, snapshotter, init_pid)
        if archive == file:
            image(tmp_path, "2").replace(file)

    monkeypatch.setattr(image_store, "import_archive", import_archive)
    with pytest.raises(KubeletNodeError, match=r"were replaced while they were read: 1.tar"):
        acquire_template([file], PAUSE, tmp_path)
    assert templates(cache) == []


@pytest.mark.parametrize("content", [None, b"", b"x" * 10240])
def test_an_archive_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "image.tar"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KubeletNodeError, match=r"image archive /.*/image.tar cannot be read"):
        acquire_template([file], PAUSE, tmp_path)
