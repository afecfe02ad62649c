"""Topologies in isolation: what fails for one of them does not stop the others. Pure.

Design: docs/design/recovery.md#one-topology-does-not-stop-the-others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class IsolatedTopologies:
    """Calls functions for topologies. `errors`: by uid."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}

    def run(self, function: Callable[[T], R], inputs: Mapping[str, T]) -> dict[str, R]:
        """For each one alone: the results of those for which it did not fail."""
        results = {}
        for uid, value in inputs.items():
            try:
                results[uid] = function(value)
            except Exception as error:
                self.errors[uid] = error
        return results

    def run_together(self, function: Callable[[Mapping[str, T]], R], inputs: Mapping[str, T]) -> R:
        """For all of them at once, but for those with which it fails: if it does, they are added
        part by part, and a part with which it fails in halves, so that one bad topology of n costs
        about 2 log n calls. Raises what fails without any topology, before it blames one."""
        accepted: dict[str, T] = {}
        results: list[R] = []
        parts = [dict(inputs)] if inputs else []
        while parts:
            part = parts.pop()
            try:
                results.append(function(accepted | part))
            except Exception as error:
                if not accepted and len(part) == len(inputs):
                    function({})
                if len(part) == 1:
                    self.errors |= dict.fromkeys(part, error)
                    continue
                items, half = list(part.items()), len(part) // 2
                parts += [dict(items[half:]), dict(items[:half])]
            else:
                accepted |= part
        return results[-1] if results else function({})

    def without_failed(self, inputs: Mapping[str, T]) -> dict[str, T]:
        return {uid: value for uid, value in inputs.items() if uid not in self.errors}
