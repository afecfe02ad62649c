"""The containers that `make images` runs of each image, and their expected results. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle_testing.images.engines import ImageConfig

FINDINGS_PREFIX = "FINDINGS "
"""What the line of `image_checks` with its findings begins with."""

Findings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ContainerRun:
    """One run of a container. Without `command` it is the image's own; `runs_checks`: the script
    `image_checks` is its input."""

    name: str
    command: tuple[str, ...] = ()
    exit_code: int = 0
    expected_output: str = ""  # a part of its output
    runs_checks: bool = False


@dataclass(frozen=True, slots=True)
class Image:
    """`writable`: the directories that a pod mounts; all else is read-only. `target_mb` (decision
    0036) is only printed."""

    name: str
    target_mb: int
    max_mb: int
    """Beyond it `make images` fails: what it has today, and some room."""
    writable: tuple[str, ...]
    runs: tuple[ContainerRun, ...]


def _checks_of(name: str) -> ContainerRun:
    command = ("python", "-", name)
    return ContainerRun(
        f"checks of {name}", command, expected_output=FINDINGS_PREFIX, runs_checks=True
    )


OPERATOR = Image(
    "operator",
    target_mb=250,
    max_mb=240,
    writable=("/tmp",),
    runs=(
        ContainerRun(
            "operator without a cluster", exit_code=1, expected_output="No configuration found"
        ),
        _checks_of("operator"),
    ),
)
PIPELINES = Image(
    "pipelines",
    target_mb=920,
    max_mb=930,
    writable=("/tmp", "/var/lib/rekindle-task"),
    runs=(
        ContainerRun(
            "task without a topology",
            exit_code=2,
            expected_output="REKINDLE_TOPOLOGY_FILE is not set",
        ),
        ContainerRun(
            "coordinator without a topology",
            ("python", "-m", "rekindle.coordinator"),
            exit_code=2,
            expected_output="the environment has no REKINDLE_",
        ),
        _checks_of("pipelines"),
    ),
)
IMAGES = (OPERATOR, PIPELINES)


def config_problems(config: ImageConfig) -> list[str]:
    """What would keep a pod from running the image."""
    wrong = []
    user = config.user.partition(":")[0]
    if not user.isdecimal() or int(user) == 0:
        wrong.append(f"USER is {config.user!r}, not the number of a user without privileges")
    if config.entry_point[:1] != ("tini",):
        wrong.append(f"ENTRYPOINT is {list(config.entry_point)}, not tini")
    return wrong


def run_problems(run: ContainerRun, exit_code: int, output: str) -> list[str]:
    if exit_code == run.exit_code and run.expected_output in output:
        return []
    last = "\n".join(output.strip().splitlines()[-12:])
    wanted = f"exit code {run.exit_code} and {run.expected_output.strip()!r}"
    return [f"{run.name}: expected {wanted}, got exit code {exit_code} and:\n{last}"]


def read_findings(output: str) -> Findings:
    """The findings of `image_checks`; empty if it did not get that far."""
    lines = [line for line in output.splitlines() if line.startswith(FINDINGS_PREFIX)]
    return json.loads(lines[-1].removeprefix(FINDINGS_PREFIX)) if lines else {}


def finding_problems(image: Image, findings: Findings) -> list[str]:
    expected: dict[str, Any] = {
        "user": 10001,
        "read_only": True,
        "writable": list(image.writable),
        "process_1": "tini",
    }
    if image is OPERATOR:
        expected |= {"java": None, "pyspark": None}
    if image is PIPELINES:
        expected |= {"archive_mapped": True, "rows": [["a", 3.0], ["b", 7.0]]}
    wrong = [
        f"{image.name}: {name} is {findings.get(name)!r}, expected {value!r}"
        for name, value in expected.items()
        if findings.get(name, ...) != value
    ]
    if (size_mb := findings["bytes"] / 1e6) > image.max_mb:
        wrong.append(f"{image.name}: {size_mb:.0f} MB, more than {image.max_mb} MB")
    return wrong


def summary(image: Image, tag: str, findings: Findings) -> str:
    size_mb = findings["bytes"] / 1e6
    target = f"the target of {image.target_mb} MB"
    compared = f"within {target}" if size_mb <= image.target_mb else f"above {target}"
    line = f"{tag}: {size_mb:.0f} MB unpacked ({compared}); version {findings['version']}, "
    line += f"user {findings['user']}, read-only root; "
    if image is PIPELINES:
        archive = f"archive of {findings['archive_bytes'] / 1e6:.0f} MB"
        return line + (
            f"Spark ready after {findings['session_s']:.1f} s, first epoch after "
            f"{findings['epoch_s']:.1f} s, from the {archive}"
        )
    return line + f"imports in {findings['import_s']:.1f} s; no java, no pyspark"
