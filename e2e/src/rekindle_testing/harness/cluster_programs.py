"""kubectl and helm for clusters that are not embedded, and programs of the user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rekindle_testing.embedded.control_plane import KubectlError
from rekindle_testing.embedded.toolchain import ensure_control_plane_binaries, ensure_helm


class ClusterNotUsable(Exception):
    """The tests do not run on this cluster; the message says why and what to do."""


class ProgramError(Exception):
    """A program failed; with its error output."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout_s: float = 60,
) -> str:
    """The output of a program."""
    done = subprocess.run(
        command,
        input=stdin or "",
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise ProgramError(f"{' '.join(command)[:500]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


class ClusterPrograms:
    """kubectl and helm with one kubeconfig. The user's kubectl comes first, since it has what the
    kubeconfig needs to log in."""

    def __init__(self, kubeconfig: Path) -> None:
        self._environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        command = (find_kubectl(), *arguments)
        try:
            return run(command, self._environment, stdin, timeout_s)
        except ProgramError as error:
            raise KubectlError(arguments, str(error)) from error

    def helm(self, *arguments: str, timeout_s: float = 60) -> str:
        return run((str(ensure_helm()), *arguments), self._environment, timeout_s=timeout_s)


def find_kubectl() -> str:
    return shutil.which("kubectl") or str(ensure_control_plane_binaries().kubectl)


def checked_image(environment: Mapping[str, str], variable: str) -> str:
    """The image in a variable of the environment. It needs a tag: the chart has repository and tag
    apart, and a digest only with a tag."""
    image = environment[variable]
    repository, _, tag = image.partition("@")[0].rpartition(":")
    if not repository or "/" in tag:
        raise ClusterNotUsable(
            f"{variable}={image} has no tag: REPOSITORY:TAG or REPOSITORY:TAG@sha256:DIGEST"
        )
    return image
