"""The spec of examples/flights, and edits of it, for the operator's tests."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

_EXAMPLE = Path(__file__).parents[2] / "examples/flights/topology.yaml"
_SPEEDUP = 216_000
"""Fixed: it is part of operator ids, by which tasks with the same requests are ordered when they
are placed."""


@functools.cache
def _example_spec() -> dict[str, Any]:
    spec = dict(yaml.safe_load(_EXAMPLE.read_text())["spec"])
    for source in spec["sources"]:
        source["files"]["speedup"] = _SPEEDUP
    return spec


def flights_spec() -> dict[str, Any]:
    return copy.deepcopy(_example_spec())


def with_replicas(number: int) -> dict[str, Any]:
    """The fields of an edit that gives every node of the example so many."""
    spec = flights_spec()
    for node in [*spec["sources"], *spec["operators"]]:
        node["replicas"] = number
    return {"sources": spec["sources"], "operators": spec["operators"]}
