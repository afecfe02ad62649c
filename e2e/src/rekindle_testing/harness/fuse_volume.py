"""A slow or hanging directory, like a network file system with a slow or dead server.

A FUSE file system (bindfs) that passes everything through to another directory. While its process
is stopped, every access to it hangs, as with an NFS mount whose server is gone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rekindle_testing.embedded.processes import ChildProcess, ChildProcesses
from rekindle_testing.images import programs
from rekindle_testing.waiting import wait_for

_PACKAGES = ("bindfs", "fuse3")


class FuseVolume:
    """`directory` shows what is in `backing_directory`; both are created. `write_bytes_per_s`: how
    fast writes are, all together; None: as fast as the disk. Needs root and /dev/fuse."""

    def __init__(
        self,
        directory: Path,
        backing_directory: Path,
        logs: Path,
        *,
        write_bytes_per_s: int | None = None,
    ) -> None:
        self.directory, self.backing_directory = directory, backing_directory
        self._options = [] if write_bytes_per_s is None else [f"--write-rate={write_bytes_per_s}"]
        self._logs = logs
        self._children = ChildProcesses(logs)
        self._process: ChildProcess | None = None

    def __enter__(self) -> FuseVolume:
        if shutil.which("bindfs") is None:
            programs.install(_PACKAGES, print, self._logs / "install.log")
        self.backing_directory.mkdir(parents=True, exist_ok=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        # Unmounted by its own helper when the process ends, however it ends.
        command = ["bindfs", "-f", "-o", "allow_other,auto_unmount", *self._options]
        self._process = self._children.start(
            "bindfs", [*command, str(self.backing_directory), str(self.directory)]
        )
        wait_for(f"{self.directory} to be mounted", self.directory.is_mount, 10)
        return self

    def __exit__(self, *error: object) -> None:
        self.resume()
        subprocess.run(["umount", "--lazy", str(self.directory)], check=False)
        self._children.close(grace_s=5)

    def hang(self) -> None:
        """Every access waits until `resume`."""
        assert self._process is not None, "it is mounted"
        self._process.pause()

    def resume(self) -> None:
        if self._process is not None:
            self._process.resume()
