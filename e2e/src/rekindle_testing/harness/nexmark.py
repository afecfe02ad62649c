"""The Nexmark example on a cluster: its input, and resources with some of its queries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.paths import ROOT

EXAMPLE = ROOT / "examples" / "nexmark"
EVENTS, EVENTS_PER_S = 30_000, 100
"""Five minutes of event time."""


def prepare_input(directory: Path) -> None:
    """Write persons, auctions and bids, once."""
    if (directory / "persons.parquet").exists():
        return
    generate = [sys.executable, str(EXAMPLE / "generate.py"), str(directory)]
    arguments = ["--events", str(EVENTS), "--rate", str(EVENTS_PER_S)]
    subprocess.run([*generate, *arguments], check=True, stdout=subprocess.DEVNULL)


def topology_resource(name: str, queries: Collection[str]) -> dict[str, Any]:
    """The example with these queries, in real time; what they read has two replicas, but for
    sources."""
    text = (EXAMPLE / "topology.yaml").read_text()
    text = text.replace(f"{SHARED_MOUNT_PATH}/nexmark/", f"{SHARED_MOUNT_PATH}/{name}/")
    resource: dict[str, Any] = yaml.safe_load(text)
    resource["metadata"]["name"] = name
    spec = resource["spec"]
    inputs = {o["name"]: o["inputs"] for o in spec["operators"]}
    spec["queries"] = [q for q in spec["queries"] if q["name"] in queries]
    read, found = {q["from"] for q in spec["queries"]}, set[str]()
    while read:
        found |= read
        read = {i for name in read for i in inputs.get(name, ())} - found
    spec["operators"] = [o | {"replicas": 2} for o in spec["operators"] if o["name"] in found]
    spec["sources"] = [s for s in spec["sources"] if s["name"] in found]
    for source in spec["sources"]:
        source["files"]["speedup"] = 1
    return resource
