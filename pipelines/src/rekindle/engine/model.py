"""Input and output of an engine. Pure data, no Spark.

A chain is a function: (state, input epochs) -> (state', output epochs), with bit-identical results
on every machine, in every repetition, and for any number of epochs in one call (invariant I1).

Design: docs/design/determinism.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rekindle.engine.state.operator import OperatorState
from rekindle.streams.epochs import EpochInput


def table_id(operator: str, name: str) -> str:
    """The name of a table in a chain's state, in checkpoints and between replicas. `operator`: its
    id, which has no dot."""
    return f"{operator}.{name}" if name else operator


def operator_of(table: str) -> str:
    """The id of the operator that has this table."""
    return table.partition(".")[0]


@dataclass(frozen=True, slots=True)
class State:
    """State of all operators of a chain, by `table_id`. Immutable: a copy is another reference,
    and a checkpoint saves only the runs that the last one did not have."""

    operators: Mapping[str, OperatorState] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.operators.values())


@dataclass(frozen=True, slots=True)
class EpochOutput:
    """The chain's output for one epoch; `watermark` is the one passed downstream. `idle`: as of
    the epoch's input."""

    epoch: int
    watermark: int
    rows: pa.Table
    idle: bool = False


@dataclass(frozen=True, slots=True)
class ChainResult:
    outputs: tuple[EpochOutput, ...]
    state: State


@dataclass(slots=True)
class DroppedRows:
    """Rows that an operator with state dropped since its chain was created: late ones, and ones
    without event time."""

    late: int = 0
    null_event_time: int = 0


class Chain(Protocol):
    """The fused operators of one segment."""

    @property
    def output_schema(self) -> pa.Schema: ...

    @property
    def dropped(self) -> Mapping[str, DroppedRows]:
        """By operator with state; updated in place."""
        ...

    def match_columns(self, state: State) -> State:
        """Saved state with this chain's columns, matched by name. Raises StateMismatch."""
        ...

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        """With operators that begin later than the topology. `bounds`: by operator id, the event
        time through which each may lack rows."""
        ...

    def join_deltas(self, state: State) -> State:
        """The same state in a form that is cheaper to save
        (`engine.state.compaction.join_single_deltas`)."""
        ...

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        """Run epochs in order; those without rows that do not advance a watermark may be left out.
        Raises OperatorFailed with operator name and epoch range."""
        ...
