"""`make images`: builds the images with the container engine that works here, and starts each.

ENGINE=docker, podman or buildah instead of the first that works; BASE=... another base image;
ARCHIVES=1 writes each image to build/images/NAME.tar, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rekindle_testing.images import programs
from rekindle_testing.images.archives import write_source_hash_after_build
from rekindle_testing.images.build import Builder, exclusive_lock
from rekindle_testing.images.engines import UNSHARE_COMMAND, EngineKind, ImageConfig
from rekindle_testing.images.errors import ImageError
from rekindle_testing.images.image_runs import (
    IMAGES,
    ContainerRun,
    Findings,
    Image,
    config_problems,
    finding_problems,
    read_findings,
    run_problems,
    summary,
)

_IMAGE_CHECKS = Path(__file__).with_name("image_checks.py")
_START_TIMEOUT_S = 300.0
_COMMAND_TIMEOUT_S = 600.0


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    began = time.monotonic()
    try:
        with exclusive_lock():
            saves = bool(os.environ.get("ARCHIVES"))
            with write_source_hash_after_build() if saves else contextlib.nullcontext():
                wrong = _build_and_start(saves)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for problem in wrong:
        _print_line(f"failed: {problem}")
    _print_line(f"{'failed' if wrong else 'succeeded'} after {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def _build_and_start(saves: bool) -> list[str]:
    builder = Builder.for_this_machine(_print_line)
    wrong = []
    for image in IMAGES:
        tag = builder.build(image)
        config = builder.engine.parse_config(builder.run(builder.engine.inspect(tag)))
        problems, findings = _run_checks(builder, image, tag, config)
        wrong += problems
        if not problems:
            _print_line(summary(image, tag, findings))
        if saves:
            builder.save(image, tag)
    return wrong


def _run_checks(
    builder: Builder, image: Image, tag: str, config: ImageConfig
) -> tuple[list[str], Findings]:
    wrong = config_problems(config)
    findings: Findings = {}
    for run in image.runs:
        with _command(builder, image, tag, config, run) as command:
            script = _IMAGE_CHECKS.read_text() if run.runs_checks else ""
            done = programs.run(command, timeout_s=_START_TIMEOUT_S, stdin=script)
        wrong += run_problems(run, done.exit_code, done.output)
        findings = {**findings, **read_findings(done.output)}
    return wrong or finding_problems(image, findings), findings


@contextlib.contextmanager
def _command(
    builder: Builder, image: Image, tag: str, config: ImageConfig, run: ContainerRun
) -> Iterator[Sequence[str]]:
    """What starts the image once; afterwards nothing is left of its container. Buildah mounts the
    image's file system in namespaces of its own: `images.enter` runs the command there."""
    name, engine = f"rekindle-run-{os.getpid()}", builder.engine
    if engine.kind is not EngineKind.BUILDAH:
        try:
            yield engine.run(tag, name, image.writable, run.command)
        finally:
            programs.run([str(engine.kind), "rm", "--force", name], timeout_s=_COMMAND_TIMEOUT_S)
        return
    builder.run(engine.buildah("from", "--name", name, tag))
    try:
        own = run.command or config.command
        spec = {
            "mount": engine.buildah("mount", name)[len(UNSHARE_COMMAND) :],
            "user": config.user,
            "environment": config.environment,
            "command": [*config.entry_point, *own],
            "directory": config.directory,
            "writable": image.writable,
        }
        module = [sys.executable, "-m", "rekindle_testing.images.enter", json.dumps(spec)]
        builder.forget_mounts()  # of earlier commands: the next one has namespaces of its own
        yield [*UNSHARE_COMMAND, *module]
    finally:
        builder.run(engine.buildah("rm", name))


def _print_line(text: str) -> None:
    print(text, flush=True)


def _exit(number: int, frame: object) -> NoReturn:
    """A signal ends the program like Ctrl-C: context managers clean up."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
