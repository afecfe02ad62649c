"""Manifests of a fuzz run: nearly valid ones, and random ones by the CRD's schema. Pure.

A manifest depends on its seed and its index alone, so each can be made again without the others.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from rekindle import names
from rekindle_testing.fixtures.bad_manifests import bad_manifests, good_manifest
from rekindle_testing.fixtures.crd import resource_schema
from rekindle_testing.fuzz import graphs, values
from rekindle_testing.fuzz.mutations import Mutation, mutate
from rekindle_testing.fuzz.schema import value
from rekindle_testing.paths import ROOT

_RANDOM = 0.1  # share of manifests that only follow the schema
_GRAPHS = 0.35  # share of random valid graphs, before they are changed
_HOSTILE_NAMES = 0.03
_LENIENT = 0.3  # share that is sent without strict validation of fields, as by most programs
_REPEATED_KEY = 0.01
_SUSPENDED = 0.08
_TEMPLATES = 0.12  # share with a podTemplate of the table, which the schema does not check
_CHANGES = (0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 5)


@dataclass(frozen=True, slots=True)
class Case:
    """A manifest as it is sent. `origin`: what it was made of."""

    seed: int
    index: int
    origin: str
    name: str
    body: str
    strict: bool


def case(seed: int, index: int) -> Case:
    draw = _draw(seed, index, "create")
    manifest, origin = _manifest(draw)
    name = f"f{index}"
    if draw.random() < _HOSTILE_NAMES:
        name = draw.choice((*values.BAD_NAMES, *values.NAMES, *values.TEXTS))
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"]["name"] = name
    body = json.dumps(manifest)
    if draw.random() < _REPEATED_KEY:
        body = body.replace('"spec": {', '"spec": {"replicas": 1, "replicas": 2, ', 1)
        origin += ", a key twice"
    return Case(seed, index, origin, name, body, draw.random() >= _LENIENT)


def is_edited(seed: int, index: int) -> bool:
    """A third of the manifests that are accepted are edited."""
    return _draw(seed, index, "is edited").random() < 1 / 3


def edit(seed: int, index: int, spec: Any) -> tuple[Any, str]:
    """(a second spec over the first, which the API server accepted; what was changed)."""
    draw = _draw(seed, index, "edit")
    changed = copy.deepcopy(spec)
    match draw.randrange(6):
        case 0:
            changed["suspend"] = not changed.get("suspend", False)
            return changed, "suspend toggled"
        case 1:
            manifest, origin = _manifest(draw)
            other = manifest.get("spec")
            if isinstance(other, dict):
                for field in ("checkpoint", "epochInterval"):
                    if field in changed and draw.random() < 0.9:
                        other[field] = changed[field]
                return other, f"replaced by {origin}"
        case 2:
            for query in changed["queries"]:
                query["priority"] = draw.randrange(1000)
            return changed, "priorities"
        case 3:
            changed["replicas"] = draw.randint(1, 3)
            return changed, "replicas"
    whole = {"spec": changed}
    made = _change(whole, draw, draw.choice((1, 1, 2)))
    return whole.get("spec"), "; ".join(map(str, made))


def _draw(seed: int, index: int, what: str) -> random.Random:
    return random.Random(f"{seed}/{index}/{what}")


def _manifest(draw: random.Random) -> tuple[dict[str, Any], str]:
    sort = draw.random()
    if sort < _RANDOM:
        spec = value(("spec",), resource_schema()["properties"]["spec"], draw)
        return _resource(spec), "the schema"
    if sort < _RANDOM + _GRAPHS:
        manifest, origin = _resource(graphs.spec(draw)), "a graph"
    else:
        origin, manifest = draw.choice(_bases())
        manifest = copy.deepcopy(manifest)
    made = _change(manifest, draw, draw.choice(_CHANGES))
    parts = [origin, *map(str, made)]
    spec = manifest.get("spec")
    if isinstance(spec, dict) and draw.random() < _SUSPENDED:
        spec["suspend"] = True
    if isinstance(spec, dict) and draw.random() < _TEMPLATES:
        spec["podTemplate"] = draw.choice(values.POD_TEMPLATES)
        parts.append(f"podTemplate {str(spec['podTemplate'])[:80]}")
    return manifest, "; ".join(parts)


def _change(manifest: dict[str, Any], draw: random.Random, times: int) -> list[Mutation]:
    return [mutate(manifest, draw) for _ in range(times)]


def _resource(spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "made"},
        "spec": spec,
    }


@cache
def _bases() -> list[tuple[str, dict[str, Any]]]:
    """Every example and every manifest of the table; the good ones as often as the bad ones."""
    examples = [
        (path.parent.name, yaml.safe_load(path.read_text()))
        for path in sorted((ROOT / "examples").glob("*/topology.yaml"))
    ]
    good = [*examples, ("good", good_manifest())]
    bad = [(f"bad manifest {b.name}", b.manifest) for b in bad_manifests()]
    return good * (len(bad) // len(good)) + bad
