"""Compiled specs, with a cache: each spec is validated and compiled once.

The JSON of the spec is the cache's key, so the same spec of another generation costs nothing. A
pass compiles the specs of all topologies, so what a whole pass has not used is of no topology any
more and is dropped: with a limit below the number of topologies each pass would compile them all.

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


class _Cache:
    """Results of this pass and of the one before. For the thread that reconciles."""

    def __init__(self) -> None:
        self._before: dict[_Key, SpecResult] = {}
        self._used: dict[_Key, SpecResult] = {}

    def start_pass(self) -> None:
        self._before, self._used = self._used, {}

    def compiled(self, key: _Key) -> SpecResult:
        found = self._used.get(key) or self._before.get(key) or _compile(*key)
        self._used[key] = found
        return found


_CACHE = _Cache()


def start_pass() -> None:
    """Drop what the last pass has not used. Each pass calls it first."""
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
