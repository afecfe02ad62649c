"""Compiled specs, with a cache: each spec is validated and compiled once.

The JSON of the spec is the cache's key, so the same spec of another generation costs nothing.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rekindle.errors import InvalidTopology, Problem
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology
from rekindle.topology.problems import TOO_DEEP
from rekindle_operator.nesting import MAX_SPEC_DEPTH, is_too_deep


@dataclass(frozen=True, slots=True)
class Compiled:
    topology: Topology


@dataclass(frozen=True, slots=True)
class Rejected:
    problems: tuple[Problem, ...]


SpecResult = Compiled | Rejected


def compile_spec(name: str, spec: Mapping[str, Any]) -> SpecResult:
    """Parse, validate, compile. Reports all problems, not only the first."""
    return _compile(name, json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=1024)
def _compile(name: str, text: str) -> SpecResult:
    spec = json.loads(text)
    if is_too_deep(spec):
        what = f"is nested more than {MAX_SPEC_DEPTH} levels deep"
        return Rejected((Problem("spec", TOO_DEEP, what, "remove what is nested"),))
    try:
        return Compiled(compile_topology(load_spec(spec), name))
    except InvalidTopology as error:
        return Rejected(tuple(error.problems))
