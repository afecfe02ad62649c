"""Compiled specs, with a cache: each spec is validated and compiled once.

The JSON of the spec is the cache's key, so the same spec of another generation costs nothing. A
pass compiles the specs of all topologies, so the cache grows with them: with a fixed limit below
their number each pass would compile them all.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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

_Key = tuple[str, str]
_KEPT = 1024  # results, or twice as many as a pass uses


class _Cache:
    """Results by key. For the thread that reconciles."""

    def __init__(self) -> None:
        self._results: dict[_Key, SpecResult] = {}
        self._used: set[_Key] = set()  # in this pass

    def __len__(self) -> int:
        return len(self._results)

    def start_pass(self) -> None:
        # A pass that uses none, since no list of topologies succeeded, says nothing about the next.
        if self._used and len(self) > max(_KEPT, 2 * len(self._used)):
            self._results = {k: r for k, r in self._results.items() if k in self._used}
        self._used = set()

    def compiled(self, key: _Key) -> SpecResult:
        self._used.add(key)
        if key not in self._results:
            self._results[key] = _compile(*key)
        return self._results[key]


_CACHE = _Cache()


def start_pass() -> None:
    """Bound the cache: beyond its limit, what the last pass has not used is dropped."""
    _CACHE.start_pass()


def compile_spec(name: str, spec: Mapping[str, Any]) -> SpecResult:
    """Parse, validate, compile. Reports all problems, not only the first."""
    return _CACHE.compiled((name, json.dumps(spec, sort_keys=True)))


def _compile(name: str, text: str) -> SpecResult:
    spec = json.loads(text)
    if is_too_deep(spec):
        what = f"is nested more than {MAX_SPEC_DEPTH} levels deep"
        return Rejected((Problem("spec", TOO_DEEP, what, "remove what is nested"),))
    try:
        return Compiled(compile_topology(load_spec(spec), name))
    except InvalidTopology as error:
        return Rejected(tuple(error.problems))
