"""What a task reports of keys that more than half of its rows have. Pure.

Design: docs/decisions/0070-keys-that-most-rows-have.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.exchange.hot_keys import BLOCK_EPOCHS, HotKey, KeyShares
from rekindle.streams.epochs import EpochInput
from rekindle.topology.model import Input, Segment, Topology
from rekindle.topology.operators.kind import OperatorKind
from rekindle.topology.operators.registry import kind_of

_STEP_PERCENT = 5
"""Shares are told in such steps, so that what is reported changes rarely."""


class HotKeys:
    """Of one partition of a segment."""

    def __init__(self, topology: Topology, segment: Segment, partition: int) -> None:
        self._operator = segment.nodes[0]
        kind = kind_of(topology.nodes[self._operator].spec)
        self._partition = partition
        self._inputs: list[tuple[int, Input, OperatorKind, KeyShares]] = []
        if kind is not None:
            self._inputs = [
                # A join may have two equalities with one column.
                (at, entry, kind, KeyShares(tuple(dict.fromkeys(entry.key_by)), kind.many_rows))
                for at, entry in enumerate(segment.inputs)
                if entry.key_by
            ]

    def add(self, epochs: Sequence[EpochInput]) -> None:
        """Epochs that are processed, and not tentative."""
        for at, _, _, shares in self._inputs:
            for epoch in epochs:
                shares.add(epoch.epoch, epoch.inputs[at])

    def text(self, epoch: int) -> str:
        """What is hot and what to do; empty if nothing is. `epoch`: the newest that is processed.
        Replicas that have read the same blocks have the same text."""
        found = (
            _text(entry.name, shares.key_by, kind, hot)
            for _, entry, kind, shares in self._inputs
            if (hot := shares.hot(epoch)) is not None
        )
        if not (texts := "; ".join(found)):
            return ""
        return f"operator {self._operator}, partition {self._partition}: {texts}"

    def shares(self, epoch: int) -> dict[str, float]:
        """By input: the share of the key that is hot; 0 if none is."""
        found = ((entry.name, shares.hot(epoch)) for _, entry, _, shares in self._inputs)
        return {name: hot.share if hot is not None else 0.0 for name, hot in found}


def _text(name: str, key_by: Sequence[str], kind: OperatorKind, hot: HotKey) -> str:
    percent = _STEP_PERCENT * round(100 * hot.share / _STEP_PERCENT)
    key = ", ".join(f"{c} = {v}" for c, v in zip(key_by, hot.values, strict=True))
    return (
        f"about {percent} % of its rows of {name} in {BLOCK_EPOCHS} epochs have one key, "
        f"{key}; more partitions do not divide them: {kind.hint_for_hot_key()}"
    )
