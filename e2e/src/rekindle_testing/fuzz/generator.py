"""Kubernetes manifests of a fuzz run: nearly valid ones, and random ones by the CRD's schema. Pure.

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
from rekindle_testing.fuzz import topologies, values
from rekindle_testing.fuzz.mutations import Mutation, mutate
from rekindle_testing.fuzz.schema import random_value
from rekindle_testing.paths import ROOT

_RANDOM = 0.1  # fraction of manifests that only follow the schema
_GRAPHS = 0.35  # fraction of random valid graphs, before they are changed
_HOSTILE_NAMES = 0.03  # fraction with a name of `values`, valid or not
_LENIENT = 0.3  # fraction that is sent without strict validation of fields, as by most programs
_REPEATED_KEY = 0.01  # fraction with a key of the spec twice in the JSON text
_SUSPENDED = 0.08
_TEMPLATES = 0.12  # fraction with a podTemplate of `values`, which the schema does not check
_MUTATION_COUNTS = (0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 3, 5)


@dataclass(frozen=True, slots=True)
class Case:
    """A manifest as it is sent. `derived_from`: what it was made of; `strict`: with strict
    validation of fields by the API server."""

    seed: int
    index: int
    derived_from: str
    name: str
    body: str
    strict: bool


def case(seed: int, index: int) -> Case:
    rng = _rng(seed, index, "create")
    manifest, derived_from = _manifest(rng)
    name = f"f{index}"
    if rng.random() < _HOSTILE_NAMES:
        name = rng.choice((*values.BAD_NAMES, *values.NAMES, *values.TEXTS))
    if isinstance(manifest.get("metadata"), dict):
        manifest["metadata"]["name"] = name
    body = json.dumps(manifest)
    if rng.random() < _REPEATED_KEY:
        body = body.replace('"spec": {', '"spec": {"replicas": 1, "replicas": 2, ', 1)
        derived_from += ", a key twice"
    return Case(seed, index, derived_from, name, body, rng.random() >= _LENIENT)


def is_edited(seed: int, index: int) -> bool:
    """A third of the manifests that are accepted are edited."""
    return _rng(seed, index, "is edited").random() < 1 / 3


def edit(seed: int, index: int, spec: Any) -> tuple[Any, str]:
    """An edit of `spec`, which the API server has accepted: the new spec, and what was changed."""
    rng = _rng(seed, index, "edit")
    changed = copy.deepcopy(spec)
    match rng.randrange(6):
        case 0:
            changed["suspend"] = not changed.get("suspend", False)
            return changed, "suspend toggled"
        case 1:
            manifest, derived_from = _manifest(rng)
            other = manifest.get("spec")
            if isinstance(other, dict):
                for field in ("checkpoint", "epochInterval"):
                    if field in changed and rng.random() < 0.9:
                        other[field] = changed[field]
                return other, f"replaced by {derived_from}"
        case 2:
            for query in changed["queries"]:
                query["priority"] = rng.randrange(1000)
            return changed, "priorities"
        case 3:
            changed["replicas"] = rng.randint(1, 3)
            return changed, "replicas"
    whole = {"spec": changed}
    mutations = _mutate_times(whole, rng, rng.choice((1, 1, 2)))
    return whole.get("spec"), "; ".join(map(str, mutations))


def _rng(seed: int, index: int, what: str) -> random.Random:
    return random.Random(f"{seed}/{index}/{what}")


def _manifest(rng: random.Random) -> tuple[dict[str, Any], str]:
    choice = rng.random()
    if choice < _RANDOM:
        spec = random_value(("spec",), resource_schema()["properties"]["spec"], rng)
        return _resource(spec), "the schema"
    if choice < _RANDOM + _GRAPHS:
        manifest, derived_from = _resource(topologies.spec(rng)), "a graph"
    else:
        derived_from, manifest = rng.choice(_corpus())
        manifest = copy.deepcopy(manifest)
    mutations = _mutate_times(manifest, rng, rng.choice(_MUTATION_COUNTS))
    parts = [derived_from, *map(str, mutations)]
    spec = manifest.get("spec")
    if isinstance(spec, dict) and rng.random() < _SUSPENDED:
        spec["suspend"] = True
    if isinstance(spec, dict) and rng.random() < _TEMPLATES:
        spec["podTemplate"] = rng.choice(values.POD_TEMPLATES)
        parts.append(f"podTemplate {str(spec['podTemplate'])[:80]}")
    return manifest, "; ".join(parts)


def _mutate_times(manifest: dict[str, Any], rng: random.Random, times: int) -> list[Mutation]:
    return [mutate(manifest, rng) for _ in range(times)]


def _resource(spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "made"},
        "spec": spec,
    }


@cache
def _corpus() -> list[tuple[str, dict[str, Any]]]:
    """Every example and every one of bad_manifests.yaml; the good ones as often as the bad ones."""
    examples = [
        (path.parent.name, yaml.safe_load(path.read_text()))
        for path in sorted((ROOT / "examples").glob("*/topology.yaml"))
    ]
    good = [*examples, ("good", good_manifest())]
    bad = [(f"bad manifest {b.name}", b.manifest) for b in bad_manifests()]
    return good * (len(bad) // len(good)) + bad
