"""The images of nodes: unpacked once on this machine, and read by every node.

A template is the root directory of a containerd that has imported the archives and has ended. A
node's containerd starts with copies of its databases, and with links to its blobs and snapshots:
nothing is copied, and what nodes run from one image is in the page cache once. Layers of containers
and later imports are the node's own. What containerd deletes is a link. Templates are in the user's
cache, named by what is in them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.directories import cache_root
from rekindle_testing.embedded.cache import AcquiredEntry, acquire, content_key, prune
from rekindle_testing.embedded.kubelet_node import commands, files, mounts
from rekindle_testing.embedded.kubelet_node.errors import KubeletNodeError
from rekindle_testing.embedded.kubelet_node.image_archive import fingerprint
from rekindle_testing.embedded.kubelet_node.images import pause_archive
from rekindle_testing.embedded.kubelet_node.network import child_of, wait_until
from rekindle_testing.embedded.processes import ChildProcess, ChildProcesses
from rekindle_testing.progress import OnProgress, no_progress

MAX_UNUSED_TEMPLATES = 3
"""Templates in the cache, besides those in use. One has every image twice: in the layers of its
archive and unpacked."""

_ROOT = "containerd"
_METADATA = "io.containerd.metadata.v1.bolt/meta.db"
_BLOBS = "io.containerd.content.v1.content/blobs/sha256"
_IMPORT_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_UNSHARE_COMMAND = (
    *("unshare", "--pid", "--mount", "--ipc", "--propagation", "private", "--mount-proc"),
    *("--fork", "--kill-child=KILL", "--"),
)
_RUN_CONTAINERD = 'mount -t tmpfs -o mode=755 tmpfs /run && exec containerd --config "$1"'


@dataclass(frozen=True, slots=True)
class ImageStoreTemplate:
    """It stays in the cache until `release`, or until this process ends."""

    snapshotter: str
    entry: AcquiredEntry

    @property
    def root(self) -> Path:
        return self.entry.path / _ROOT

    def release(self) -> None:
        self.entry.release()


def acquire_template(
    archives: Sequence[Path], pause: Path, data: Path, on_progress: OnProgress = no_progress
) -> ImageStoreTemplate:
    """A template with the images of the archives and that of every pod's sandbox, whose program is
    `pause`, for a node with the directory `data`; made if the cache has none."""
    directory = cache_root(os.environ) / "image-templates"
    snapshotter = _snapshotter(directory, data)
    sandbox = pause_archive(pause)
    fingerprints = _fingerprints(archives)
    key = content_key(
        [
            ("containerd", commands.run(["containerd", "--version"]).encode()),
            ("configuration", files.containerd_config_without_cri(Path("/"), snapshotter).encode()),
            ("sandbox", sandbox),
            *((f"archive {number}", content) for number, content in enumerate(fingerprints)),
        ]
    )

    def make(scratch: Path) -> None:
        prune(directory, MAX_UNUSED_TEMPLATES - 1)
        names = ", ".join(archive.name for archive in archives) or "no archives"
        on_progress(f"unpacking the images of kubelet nodes, once: {names}")
        pause_tar = scratch / "pause.tar"
        pause_tar.write_bytes(sandbox)
        _unpack([pause_tar, *archives], scratch, snapshotter)
        if _fingerprints(archives) != fingerprints:
            raise KubeletNodeError(f"image archives were replaced while they were read: {names}")

    return ImageStoreTemplate(snapshotter, acquire(directory / key, make, on_progress))


def link_images(template: ImageStoreTemplate, root: Path) -> None:
    """Make the root directory of a node's containerd, for a node that has the template's root at
    `files.IMAGE_TEMPLATE_DIRECTORY`."""
    plugin = f"io.containerd.snapshotter.v1.{template.snapshotter}"
    for database in (_METADATA, f"{plugin}/metadata.db"):
        (root / database).parent.mkdir(parents=True, mode=0o711)
        shutil.copyfile(template.root / database, root / database)
    for shared in (_BLOBS, f"{plugin}/snapshots"):
        (root / shared).mkdir(parents=True, mode=0o711)
        for entry in (template.root / shared).iterdir():
            (root / shared / entry.name).symlink_to(
                f"{files.IMAGE_TEMPLATE_DIRECTORY}/{shared}/{entry.name}"
            )


def import_archive(archive: Path, snapshotter: str, init_pid: int) -> None:
    """Import the images into the containerd that runs in the namespaces of this process."""
    command = [*commands.enter_namespaces(init_pid), *files.import_command(snapshotter), "-"]
    try:
        # Opened here and passed as standard input: a path below /run is another file in the
        # namespaces, which have a /run of their own.
        with archive.open("rb") as file:
            commands.run(command, file, timeout_s=_IMPORT_TIMEOUT_S)
    except OSError as error:
        raise _unreadable(archive, error) from error


def images_unknown_to_cri(init_pid: int) -> list[str]:
    """Images that containerd has and its CRI plugin (which serves the kubelet) does not know."""
    command = [*commands.enter_namespaces(init_pid), *files.IMAGES_UNKNOWN_TO_CRI]
    return commands.run(command).split()


def _fingerprints(archives: Sequence[Path]) -> list[bytes]:
    """What identifies the images of each archive, without reading their layers."""

    def read() -> Iterator[bytes]:
        for archive in archives:
            try:
                with archive.open("rb") as file:
                    yield fingerprint(file)
            except (OSError, ValueError) as error:
                raise _unreadable(archive, error) from error

    return list(read())


def _unreadable(archive: Path, error: Exception) -> KubeletNodeError:
    return KubeletNodeError(f"image archive {archive} cannot be read: {error}")


def _snapshotter(cache: Path, data: Path) -> str:
    table = mounts.read()
    return files.snapshotter(mounts.file_system_of(table, p.resolve()) for p in (cache, data))


def _unpack(archives: Sequence[Path], directory: Path, snapshotter: str) -> None:
    """Import the archives with a containerd of its own. It is ended with SIGTERM, so that its
    databases are complete."""
    config = directory / "containerd.toml"
    config.write_text(files.containerd_config_without_cri(directory / _ROOT, snapshotter))
    with ChildProcesses(directory / "logs") as children:
        command = [*_UNSHARE_COMMAND, "sh", "-c", _RUN_CONTAINERD, "sh", str(config)]
        wrapper = children.start("containerd", command, commands.environment())
        wait_until(wrapper, "serves", lambda: _serves(wrapper))
        pid = child_of(wrapper)
        if pid is not None:
            for archive in archives:
                import_archive(archive, snapshotter, pid)
            os.kill(pid, signal.SIGTERM)
        if not wrapper.wait(_STOP_TIMEOUT_S) or wrapper.exit_code != 0:
            raise KubeletNodeError(
                f"containerd did not end in order after it has imported images (exit code "
                f"{wrapper.exit_code}):\n{wrapper.log_tail()}"
            )


def _serves(wrapper: ChildProcess) -> bool:
    pid = child_of(wrapper)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"/proc/{pid}/root{files.CONTAINERD_SOCKET}")
        except OSError:
            return False
    return True
