"""Generation records: the ConfigMaps by which generations are accepted. Pure.

Anyone who may create ConfigMaps in the namespace can write one that looks like a record, before or
instead of the operator. So a record counts only if `status.generations` has its digest. The status
is written first, the record is created after it.

Design: docs/design/fencing.md#records, docs/decisions/0037.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle import names
from rekindle.errors import Problem
from rekindle_operator.cluster.model import GenerationRecordView, Snapshot, TopologyView

KEPT_GENERATIONS = 10  # the coordinator maps old segments to new ones by their records


@dataclass(frozen=True, slots=True)
class GenerationRecords:
    """The ConfigMaps under the names of a topology's records, by generation. `digests`: of the
    accepted ones, by generation."""

    found: tuple[GenerationRecordView, ...]
    digests: Mapping[int, str]

    @property
    def accepted(self) -> tuple[GenerationRecordView, ...]:
        """In the order of generations."""
        return tuple(c for c in self.found if self.digests.get(c.generation) == c.digest)

    def of_generation(self, generation: int) -> GenerationRecordView | None:
        """Accepted or not."""
        return next((c for c in self.found if c.generation == generation), None)


def find_generation_records(view: TopologyView, snapshot: Snapshot) -> GenerationRecords:
    named = (
        c
        for c in snapshot.generation_records
        if c.owner_uid == view.uid
        and c.name == names.generation_record_name(view.name, c.generation)
    )
    found = tuple(sorted(named, key=lambda c: c.generation))
    digests = view.operator_status.generations
    if digests is None:  # a version of the operator without this list accepted what is there
        digests = {c.generation: c.digest for c in found if c.generation <= view.generation}
    return GenerationRecords(found, digests)


def listed_generations(records: GenerationRecords, generation: int, digest: str) -> dict[int, str]:
    """What `status.generations` is to have: the digests of accepted records that exist, those of
    the newest few in any case, and the newest generation even if it has no digest yet. So the list
    is never empty, and a status without it was written by an older version.

    `digest`: of the record that this pass accepts for `generation`; empty if there is none."""
    digests = {g: d for g, d in records.digests.items() if d}
    if digest:
        digests[generation] = digest
    existing = {c.generation for c in records.accepted}
    kept = existing.union(sorted(digests)[-KEPT_GENERATIONS:])
    return with_generation({g: d for g, d in digests.items() if g in kept}, generation)


def with_generation(digests: Mapping[int, str], generation: int) -> dict[int, str]:
    """In order, and with the newest generation: without a digest while it is not accepted."""
    return dict(sorted({generation: "", **digests}.items()))


def generation_entries(digests: Mapping[int, str]) -> list[dict[str, Any]]:
    """As JSON of `status.generations`."""
    return [{"generation": g} | ({"digest": d} if d else {}) for g, d in digests.items()]


def has_new_digest(view: TopologyView, digests: Mapping[int, str]) -> bool:
    """Whether a record has to wait for the status that has its digest."""
    known = view.operator_status.generations or {}
    return any(digest and known.get(g) != digest for g, digest in digests.items())


def foreign_record_problem(record: GenerationRecordView) -> Problem:
    where = f"{record.namespace}/{record.name}"
    what = f"the ConfigMap {where} exists, and is not the record that the operator has accepted"
    hint = f"delete it: kubectl delete configmap {record.name} -n {record.namespace}"
    return Problem("", "ForeignRecord", what, hint)
