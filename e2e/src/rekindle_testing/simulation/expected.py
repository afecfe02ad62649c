"""What tasks compute in a run without faults: one epoch after another, with one boot of each
partition. That operators compute the right rows is compared with `plain_results`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.engine.model import State
from rekindle.exchange.routing import partitions_read
from rekindle.streams.epochs import NO_EPOCH, EpochInput
from rekindle.topology.model import Partition, Topology
from rekindle_testing.simulation.chains import as_tuples, digests_of
from rekindle_testing.simulation.plain_results import Arrived, Mark, plain_results
from rekindle_testing.simulation.values import (
    FoldedState,
    TaskComputation,
    is_idle,
    rows_of,
    watermark_of,
)

_CONTRADICTED_WITHIN_EPOCHS = 30
"""A row that a run without faults writes because another one has not come is in one of so many
epochs, if a tentative result has it."""


@dataclass(frozen=True, slots=True)
class _After:
    """After an epoch. `watermark`: of the inputs."""

    value: str
    watermark: int
    digests: Mapping[str, str]


class Expected:
    def __init__(self, computation: TaskComputation) -> None:
        self._computation = computation
        self._topology = computation.topology
        self._reads = _reads(computation.topology)
        self._epochs: dict[Partition, list[_After]] = {p: [] for p in self._reads}
        self._states = dict.fromkeys(self._reads, State())
        self._inputs: dict[Partition, list[EpochInput]] = {p: [] for p in self._reads}

    def output(self, partition: Partition, epoch: int) -> str:
        """The state after an epoch, which is its output; "" before the first one."""
        return self._after(partition, epoch).value

    def has_state(self, partition: Partition, epoch: int, watermark: int, state: State) -> bool:
        """Whether a run without faults has this state after an epoch, with the watermark of the
        inputs."""
        after = self._after(partition, epoch)
        fold = state.fold if isinstance(state, FoldedState) else ""
        found = fold, watermark, digests_of(state)
        return found == (after.value, after.watermark, after.digests)

    def inputs(self, partition: Partition) -> Sequence[EpochInput]:
        """Of all epochs that were asked for."""
        return self._inputs[partition]

    def has_watermark(self, partition: Partition, epoch: int, watermark: int) -> bool:
        return watermark == self._after(partition, epoch).watermark

    def inputs_of(self, partition: Partition) -> list[list[Partition]]:
        """The partitions that it reads, of each input."""
        return self._reads[partition]

    def _after(self, partition: Partition, epoch: int) -> _After:
        if epoch <= NO_EPOCH:
            return _After("", 0, {})
        known = self._epochs[partition]
        while len(known) <= epoch:
            before = known[-1] if known else _After("", 0, {})
            found = self._input(partition, len(known), before.watermark)
            (output,), state = self._computation.process(
                partition, self._states[partition], [found]
            )
            self._states[partition] = state
            self._inputs[partition].append(found)
            value = self._computation.value(partition, before.value, found, output)
            known.append(_After(value, found.watermark, digests_of(state)))
        return known[epoch]

    def _input(self, partition: Partition, epoch: int, before: int) -> EpochInput:
        """The watermark is the lowest of the inputs that are not idle, the highest if all are; it
        never falls."""
        inputs = self._reads[partition]
        if not inputs:
            values = [[self._computation.source_value(partition, epoch)]]
            after = self._computation.source_watermark(partition, epoch)
            idle = self._computation.source_is_idle(partition, epoch)
        else:
            values = [[self.output(p, epoch) for p in partitions] for partitions in inputs]
            marks = [(is_idle(v), watermark_of(v)) for of_input in values for v in of_input]
            idle = all(of_input for of_input, _ in marks)
            if idle:
                after = max(watermark for _, watermark in marks)
            else:
                after = min(watermark for of_input, watermark in marks if not of_input)
        tables = tuple(rows_of(*of_input) for of_input in values)
        return EpochInput(epoch, before, max(before, after), tables, idle=idle)

    # -- what operators write ----------------------------------------------------------------------

    def contradicted(self, partition: Partition, epoch: int, rows: Any) -> str:
        """A row of a tentative epoch that says that another row has not come, although a run
        without faults does not say so; "" if there is none."""
        chain = self._computation.chain(partition)
        found = chain.absences(rows) if chain is not None else []
        if not found:
            return ""
        assert chain is not None
        right: set[tuple[Any, ...]] = set()
        for number in range(epoch + _CONTRADICTED_WITHIN_EPOCHS):
            table = self._computation.rows(self.output(partition, number))
            right.update(chain.absences(table))
        return next((str(row) for row in found if row not in right), "")

    def wrong_rows(self) -> str:
        """An epoch of a run without faults whose rows are not those that plain Python gives, or may
        be late for an operator behind; "" if there is none."""
        for partition in self._reads:
            has_operator = self._computation.chain(partition) is not None
            if has_operator and (problem := self._wrong_rows_of(partition)):
                return f"{partition.key}: {problem}"
        return ""

    def _wrong_rows_of(self, partition: Partition) -> str:
        (name,) = self._topology.segment(partition.segment).nodes
        node, inputs = self._topology.nodes[name], self._inputs[partition]
        marks: list[Mark] = [(e.epoch, e.watermark_before, e.watermark) for e in inputs]
        arrived = [
            self._arrived(partition, inputs, at) for at in range(len(self._reads[partition]))
        ]
        times = [self._topology.nodes[of_input].event_time or "" for of_input in node.inputs]
        written = plain_results(node, arrived, times, marks)
        before = 0
        for epoch, after in enumerate(self._epochs[partition]):
            table = self._computation.rows(after.value)
            rows = Counter(as_tuples(table))
            if rows != written[epoch]:
                more, missing = rows - written[epoch], written[epoch] - rows
                return f"epoch {epoch} has {dict(more)} more, and lacks {dict(missing)}"
            at = table.schema.get_field_index(node.event_time or "")
            if at >= 0 and (late := [row for row in rows if row[at] < before]):
                return f"epoch {epoch} has {late} below the watermark of its output, {before}"
            before = watermark_of(after.value)
        return ""

    def _arrived(
        self, partition: Partition, epochs: Sequence[EpochInput], at: int
    ) -> list[Arrived]:
        found = []
        for epoch in epochs:
            table = self._computation.rows_of_inputs(partition, epoch)[at]
            for place, row in enumerate(as_tuples(table)):
                fields = dict(zip(table.schema.names, row, strict=True))
                found.append(Arrived(epoch.epoch, place, fields))
        return found


def _reads(topology: Topology) -> Mapping[Partition, list[list[Partition]]]:
    """For each partition the partitions that it reads, of each input."""
    found = {}
    for segment in topology.segments:
        for index in range(segment.partitions):
            found[Partition(segment.id, index)] = [
                [
                    Partition(topology.producer(entry.stream).id, i)
                    for i in sorted(partitions_read(entry, index))
                ]
                for entry in segment.inputs
            ]
    return found
