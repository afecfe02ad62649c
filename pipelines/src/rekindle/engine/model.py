"""What goes into an engine and comes out of it. Pure data, no Spark.

A chain is a function: (state, input epochs) -> (state', output epochs), identical to the bit
wherever and however often it is computed, and however many epochs one call takes (invariant I1).

Design: docs/design/determinism.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rekindle.streams.epochs import EpochInput

BUCKETS = 64
"""Buckets of an operator's state; a constant, because state objects are addressed by it."""


@dataclass(frozen=True, slots=True)
class State:
    """State of all operators of a chain: operator id -> bucket -> Arrow table. Never mutated.

    A fork is another reference; a checkpoint saves the tables that differ from the last one.
    """

    buckets: Mapping[str, Mapping[int, pa.Table]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpochOutput:
    """The chain's output for one epoch; `watermark` is the one passed downstream."""

    epoch: int
    watermark: int
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class ChainResult:
    outputs: tuple[EpochOutput, ...]
    state: State


@dataclass(slots=True)
class DroppedRows:
    """Rows a window did not take, since its chain was made: too late, or without event time."""

    late: int = 0
    untimed: int = 0


class Chain(Protocol):
    """The fused operators of one segment."""

    @property
    def output_schema(self) -> pa.Schema: ...

    @property
    def dropped(self) -> Mapping[str, DroppedRows]:
        """By window operator, whether it has dropped any or not; the chain counts on in it."""
        ...

    def adopt(self, state: State) -> State:
        """Saved state as this chain keeps it, columns matched by name. Raises StateMismatch."""
        ...

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        """Run epochs in their order; those that have no rows and move no watermark may be left
        out. Raises OperatorFailed with operator name and epoch range."""
        ...
