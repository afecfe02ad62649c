"""The root file system of a container: an overlay of the machine's own.

Runs in the forked child of a shim, in its own mount and UTS namespaces, and ends with
chroot.  Writes go to the attempt's directory and are deleted with it.  Knows only
paths.  Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node import syscalls

Spec = dict[str, Any]
"""Made by `containers.shim_spec`."""

# File systems with files of users: an overlay shows one file system and none of those
# mounted below it.
_STORAGE = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
_WITHOUT_OVERLAY = ("/dev", "/proc", "/sys", "/run", "/boot", "/snap")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def enter_root(spec: Spec) -> list[str]:
    """Enter the container's root; returns notes about what is not supported here."""
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS)
    syscalls.make_mounts_private()
    Path("/proc/sys/kernel/hostname").write_text(spec["hostname"])
    root, notes = _overlay(spec)
    syscalls.mount("proc", f"{root}/proc", "proc")
    if root:
        syscalls.bind("/sys", f"{root}/sys")
        make_devices(f"{root}/dev")
    # Sources are opened before the chroot and mounted after it: a target like
    # /var/run/secrets may lead through absolute links, which before the chroot would lead
    # out of the new root.
    sources = [os.open(item["source"], os.O_PATH) for item in spec["mounts"]]
    if root:
        os.chroot(root)
    for item, source in zip(spec["mounts"], sources, strict=True):
        _bind(f"/proc/self/fd/{source}", item["target"], item["read_only"])
        os.close(source)
    _enter_directory(spec["workdir"])
    return notes


def _overlay(spec: Spec) -> tuple[str, list[str]]:
    """The path of the new root, or an empty string if overlays are not permitted."""
    root: str = spec["root"]
    overlays = Path(spec["overlays"])
    mountinfo = Path("/proc/self/mountinfo").read_text()
    below_root = storage_below_root(mountinfo, spec["data_directory"])
    for number, mount_point in enumerate(("/", *below_root)):
        upper, work = overlays / str(number) / "upper", overlays / str(number) / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        target = root if mount_point == "/" else root + mount_point
        data = f"lowerdir={mount_point},upperdir={upper},workdir={work}"
        try:
            syscalls.mount("overlay", target, "overlay", data=data)
        except OSError as error:
            if mount_point == "/":
                return "", [f"no overlay, the container writes to the machine's files: {error}"]
    return root, []


def storage_below_root(mountinfo: str, data_directory: str) -> list[str]:
    """The mount points of disks that the container sees through overlays of their own."""
    without_overlay = (*_WITHOUT_OVERLAY, data_directory)
    mount_points = []
    for line in mountinfo.splitlines():
        before, after = line.split(" - ", 1)
        mount_point = before.split()[4].replace("\\040", " ")
        kind = after.split()[0]
        read_only = "ro" in before.split()[5].split(",")
        hidden = any(f"{mount_point}/".startswith(f"{folder}/") for folder in without_overlay)
        skipped = read_only or hidden or mount_point == "/"
        # The options of an overlay cannot name a path with a comma or a colon.
        if kind in _STORAGE and not skipped and "," not in mount_point and ":" not in mount_point:
            mount_points.append(mount_point)
    return sorted(set(mount_points))


def make_devices(directory: str) -> None:
    syscalls.mount("tmpfs", directory, "tmpfs", syscalls.MS_NOSUID, "mode=755")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{directory}/{name}", read_only=False)
    for name in ("shm", "pts"):
        Path(directory, name).mkdir()
    syscalls.mount("tmpfs", f"{directory}/shm", "tmpfs", syscalls.MS_NOSUID, "mode=1777")
    if Path("/dev/pts").is_dir():
        syscalls.bind("/dev/pts", f"{directory}/pts")
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in {**links, "ptmx": "pts/ptmx"}.items():
        Path(directory, name).symlink_to(target)


def _bind(source: str, target: str, read_only: bool) -> None:
    mount_point = Path(target)
    if Path(source).is_dir():
        mount_point.mkdir(parents=True, exist_ok=True)
    else:
        mount_point.parent.mkdir(parents=True, exist_ok=True)
        mount_point.touch()
    syscalls.bind(source, target, read_only=read_only)


def _enter_directory(directory: str) -> None:
    # A container's working directory is created if the image does not have it.
    Path(directory).mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
