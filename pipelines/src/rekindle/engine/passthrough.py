"""The chain without operators: a source that several segments read. Needs no JVM.

Design: docs/design/engine.md#calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.streams.epochs import EpochInput


@dataclass(frozen=True, slots=True)
class PassThroughChain:
    """Implements `rekindle.engine.model.Chain`: outputs its input rows."""

    output_schema: pa.Schema

    @property
    def dropped(self) -> Mapping[str, DroppedRows]:
        return {}

    def match_columns(self, state: State) -> State:
        return state

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        return state

    def join_deltas(self, state: State) -> State:
        return state

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        outputs = tuple(
            EpochOutput(e.epoch, e.watermark, pa.concat_tables(e.inputs), e.idle) for e in epochs
        )
        return ChainResult(outputs, state)
