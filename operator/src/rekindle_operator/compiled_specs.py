"""Compiled specs, with a cache: each spec is validated and compiled once.

The JSON of the spec is the cache's key, so the same spec of another generation costs nothing. A
pass compiles the specs of all topologies, so the cache grows with them: with a fixed limit below
their number each pass would compile them all.

A large spec takes seconds, up to minutes (hundreds of kilobytes of SQL), and its author may edit it
at any time. So large ones are compiled by threads while passes go on without them: no
topology waits for another one's validation. The largest have a thread of their own.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import InvalidTopology, Problem, RekindleError
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


class StillCompiling(RekindleError):
    """A large spec is being compiled; a later pass has the result."""


_Key = tuple[str, str, bool]  # name of the topology, JSON of its spec, whether it is accepted
_KEPT_RESULTS = 1024  # results, or twice as many as a pass uses
_LARGE_CHARS = 8192  # of JSON; smaller ones take milliseconds, a second at the very most
_HUGE_CHARS = 65536  # more than a few seconds
_WAIT_S = 0.2  # for a large one that takes no longer than most


class _Job:
    """Compiles one spec in a thread."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.result: SpecResult | Exception | None = None
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.result = _compile(*self.key)
        except Exception as error:
            self.result = error


class _CompiledSpecs:
    """Results by key. For the thread that reconciles."""

    def __init__(self) -> None:
        self._results: dict[_Key, SpecResult | Exception] = {}
        self._used: set[_Key] = set()  # in this pass
        self._jobs: dict[bool, _Job] = {}  # whether it is huge -> the one that runs
        self._waiting: list[_Key] = []  # large specs, in the order in which they were first seen

    def __len__(self) -> int:
        return len(self._results)

    def start_pass(self) -> None:
        """If there are too many results, keep only those that the last pass used."""
        # A pass without topologies, since their list failed, must not empty the cache.
        if self._used and len(self) > max(_KEPT_RESULTS, 2 * len(self._used)):
            self._results = {k: r for k, r in self._results.items() if k in self._used}
        if self._used:
            self._waiting = [key for key in self._waiting if key in self._used]
        self._used = set()
        self._next_jobs()

    def compiled(self, key: _Key) -> SpecResult:
        """Raises StillCompiling."""
        self._used.add(key)
        if key not in self._results:
            if len(key[1]) < _LARGE_CHARS:
                self._results[key] = _compile(*key)
            else:
                self._compile_large(key)
        result = self._results.get(key)
        if result is None:
            raise StillCompiling(f"the spec is being compiled ({len(key[1]):,} characters)")
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result

    def _compile_large(self, key: _Key) -> None:
        if key in self._waiting or any(job.key == key for job in self._jobs.values()):
            return
        self._waiting.append(key)
        self._next_jobs()
        job = self._jobs.get(_is_huge(key))
        if job is not None and job.key == key:
            job.wait(_WAIT_S)
            self._next_jobs()

    def _next_jobs(self) -> None:
        """Take the results of the jobs that have ended, and start the next."""
        for is_huge, job in list(self._jobs.items()):
            if job.result is not None:
                self._results[job.key] = job.result
                del self._jobs[is_huge]
        for key in list(self._waiting):
            if _is_huge(key) not in self._jobs:
                self._jobs[_is_huge(key)] = _Job(key)
                self._waiting.remove(key)


def _is_huge(key: _Key) -> bool:
    return len(key[1]) >= _HUGE_CHARS


_COMPILED_SPECS = _CompiledSpecs()


def start_pass() -> None:
    """Bound the cache: beyond its limit, what the last pass has not used is dropped."""
    _COMPILED_SPECS.start_pass()


def compile_spec(name: str, spec: Mapping[str, Any], *, accepted: bool = False) -> SpecResult:
    """Parse, validate, compile. Reports all problems, not only the first. Raises StillCompiling.
    `accepted`: see `compile_topology`. The image plays no part: generation records have one where a
    spec has the default."""
    if isinstance(spec.get("image"), str):
        spec = {field: value for field, value in spec.items() if field != "image"}
    return _COMPILED_SPECS.compiled((name, json.dumps(spec, sort_keys=True), accepted))


def _compile(name: str, text: str, accepted: bool) -> SpecResult:
    spec = json.loads(text)
    if is_too_deep(spec):
        what = f"is nested more than {MAX_SPEC_DEPTH} levels deep"
        return Rejected((Problem("spec", TOO_DEEP, what, "remove what is nested"),))
    try:
        return Compiled(compile_topology(load_spec(spec), name, accepted=accepted))
    except InvalidTopology as error:
        return Rejected(tuple(error.problems))
