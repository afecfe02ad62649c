"""`make images`: builds the images with whichever engine works here, and starts each of them.

ENGINE=docker, podman or buildah instead of the first that works; BASE=... another base image;
ARCHIVES=1 writes each image to build/images/NAME.tar, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import yaml

from rekindle_testing.embedded.cache import cache_root
from rekindle_testing.images import base, programs
from rekindle_testing.images.engines import (
    IN_NAMESPACES,
    Engine,
    EngineKind,
    ImageConfig,
    choose,
)
from rekindle_testing.images.errors import ImageError
from rekindle_testing.images.starts import (
    IMAGES,
    Facts,
    Image,
    Start,
    read_facts,
    summary,
    wrong_config,
    wrong_facts,
    wrong_start,
)
from rekindle_testing.paths import ROOT

WORK = ROOT / "build" / "images"
_INSIDE = Path(__file__).with_name("inside.py")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BUILD_S = 3600.0
_START_S = 300.0
_COMMAND_S = 600.0
_STORAGE_BYTES = 12_000_000_000
"""Buildah keeps the layers of old builds, for its cache."""


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    began = time.monotonic()
    try:
        with _exclusive_lock():
            wrong = _build_and_start()
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for problem in wrong:
        _say(f"failed: {problem}")
    _say(f"{'failed' if wrong else 'succeeded'} after {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def _build_and_start() -> list[str]:
    engine = _engine()
    _say(f"building with {engine.kind}")
    _clear(engine)
    version = _version()
    made = base.choose(
        os.environ,
        (ROOT / "images" / IMAGES[0].name / "Dockerfile").read_text(),
        base.is_registry_reached,
        lambda: _base(engine),
    )
    wrong = []
    for image in IMAGES:
        tag = engine.tag(image.name, version)
        _build(engine, image, tag, made)
        config = engine.parse_config(_engine_says(engine, engine.inspect(tag)))
        problems, facts = _start(engine, image, tag, config)
        wrong += problems
        if not problems:
            _say(summary(image, tag, facts))
        if os.environ.get("ARCHIVES"):
            _save(engine, image, tag)
    return wrong


def _engine() -> Engine:
    def works(kind: EngineKind) -> bool:
        usable = kind is not EngineKind.BUILDAH or os.geteuid() == 0
        return usable and programs.works(kind.health_check)

    kind = choose(os.environ, works)
    if kind is None and programs.can_install():
        programs.install(["buildah"], _say, WORK / "install.log")
        kind = choose(os.environ, works)
    if kind is None:
        raise ImageError(
            "neither Docker nor podman works here, nor buildah as root. Start or install one of "
            "them; as root on Debian or Ubuntu, `make images` installs buildah itself"
        )
    return Engine(kind, WORK)


def _clear(engine: Engine) -> None:
    """Remove what an interrupted run has left, and layers that have become too many."""
    if engine.kind is not EngineKind.BUILDAH:
        return
    shutil.rmtree(WORK / "tmp", ignore_errors=True)
    (WORK / "tmp").mkdir(parents=True)
    if _size(engine.storage) > _STORAGE_BYTES:
        _say(f"emptying {engine.storage.relative_to(ROOT)}: it has more than 12 GB of old layers")
        shutil.rmtree(engine.storage)
    _engine_says(engine, engine.buildah("rm", "--all"))


def _size(directory: Path) -> int:
    done = programs.run(["du", "--summarize", "--bytes", str(directory)], timeout_s=_COMMAND_S)
    return int(done.output.split()[0]) if done.exit_code == 0 else 0


def _base(engine: Engine) -> str:
    """The base for machines without a registry, in the engine's storage."""
    tag = engine.tag("base", base.version())
    if programs.run(_prepared(engine, engine.inspect(tag)), timeout_s=_COMMAND_S).exit_code == 0:
        return tag
    context = base.make_root(cache_root(os.environ), _say, WORK / "base.log")
    command = _prepared(engine, engine.build(tag, base.DIRECTORY / "Dockerfile", context))
    programs.run_or_fail("the base image", command, WORK / "base-image.log", timeout_s=_BUILD_S)
    return tag


def _build(engine: Engine, image: Image, tag: str, made: str | None) -> None:
    log = WORK / f"{image.name}.log"
    _say(f"{tag}: building (the first time takes minutes), log in {log.relative_to(ROOT)}")
    command = engine.build(
        tag,
        ROOT / "images" / image.name / "Dockerfile",
        ROOT,
        base=made,
        certificates=_CERTIFICATES if _CERTIFICATES.exists() else None,
    )
    done = programs.run_or_fail(
        f"building {tag}",
        _prepared(engine, command),
        log,
        timeout_s=_BUILD_S,
        environment={"TMPDIR": str(WORK / "tmp")} if engine.kind is EngineKind.BUILDAH else None,
    )
    _say(f"{tag}: built in {done.seconds:.0f} s")


def _start(engine: Engine, image: Image, tag: str, config: ImageConfig) -> tuple[list[str], Facts]:
    wrong = wrong_config(config)
    facts: Facts = {}
    for start in image.starts:
        with _command(engine, image, tag, config, start) as command:
            done = programs.run(
                command, timeout_s=_START_S, stdin=_INSIDE.read_text() if start.inside else ""
            )
        wrong += wrong_start(start, done.exit_code, done.output)
        facts = {**facts, **read_facts(done.output)}
    return wrong or wrong_facts(image, facts), facts


@contextlib.contextmanager
def _command(
    engine: Engine, image: Image, tag: str, config: ImageConfig, start: Start
) -> Iterator[Sequence[str]]:
    """What starts the image once; afterwards nothing is left of its container."""
    name = f"rekindle-start-{os.getpid()}"
    if engine.kind is not EngineKind.BUILDAH:
        try:
            yield engine.run(tag, name, image.writable, start.command)
        finally:
            programs.run([str(engine.kind), "rm", "--force", name], timeout_s=_COMMAND_S)
        return
    _engine_says(engine, engine.buildah("from", "--name", name, tag))
    try:
        own = start.command or config.command
        spec = {
            "mount": engine.buildah("mount", name)[len(IN_NAMESPACES) :],
            "user": config.user,
            "environment": config.environment,
            "command": [*config.entry_point, *own],
            "directory": config.directory,
            "writable": image.writable,
        }
        module = [sys.executable, "-m", "rekindle_testing.images.enter", json.dumps(spec)]
        yield _prepared(engine, [*IN_NAMESPACES, *module])
    finally:
        _engine_says(engine, engine.buildah("rm", name))


def _save(engine: Engine, image: Image, tag: str) -> None:
    archive = WORK / f"{image.name}.tar"
    archive.unlink(missing_ok=True)
    _engine_says(engine, engine.save(tag, archive))
    _say(f"{tag}: written to {archive.relative_to(ROOT)}")


def _engine_says(engine: Engine, command: Sequence[str]) -> str:
    done = programs.run(_prepared(engine, command), timeout_s=_COMMAND_S)
    if done.exit_code:
        raise ImageError(f"{' '.join(command)} failed:\n{done.output}")
    return done.output


def _prepared(engine: Engine, command: Sequence[str]) -> Sequence[str]:
    """The command, after buildah's record of mounts is deleted: it runs in new namespaces, in which
    nothing is mounted."""
    if engine.kind is EngineKind.BUILDAH:
        shutil.rmtree(engine.run_directory, ignore_errors=True)
    return command


def _version() -> str:
    chart = yaml.safe_load((ROOT / "charts/rekindle/Chart.yaml").read_text())
    return str(chart["appVersion"])


@contextlib.contextmanager
def _exclusive_lock() -> Iterator[None]:
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ImageError("another `make images` runs in this checkout") from None
        yield


def _say(text: str) -> None:
    print(text, flush=True)


def _exit(number: int, frame: object) -> NoReturn:
    """A signal ends the program like Ctrl-C: context managers clean up."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
