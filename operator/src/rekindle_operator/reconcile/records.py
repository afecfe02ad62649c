"""Generation records: the ConfigMaps by which generations are accepted. Pure.

Anyone who may create ConfigMaps in the namespace can write one that looks like a record, before or
instead of the operator. So a record counts only if `status.generations` has its digest. The status
is written first, the record is created after it. A record that somebody has deleted counts while
its data is known, and is created again. If it is not known, no older generation runs instead.

Design: docs/design/fencing.md#records, docs/decisions/0037.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rekindle import names
from rekindle.errors import Problem
from rekindle_operator.cluster.model import (
    GenerationRecordView,
    Snapshot,
    TopologyView,
    record_digest,
)
from rekindle_operator.resources.common import generation_record

KEPT_GENERATIONS = 10  # the coordinator maps old segments to new ones by their records


@dataclass(frozen=True, slots=True)
class GenerationRecords:
    """The ConfigMaps under the names of a topology's records, by generation. `digests`: of the
    accepted ones, by generation. `deleted`: accepted ones of the newest few that somebody has
    deleted, and whose data is known. `has_run`: the newest accepted generation that ran, as far as
    pods and the coordinator's report show."""

    found: tuple[GenerationRecordView, ...]
    digests: Mapping[int, str]
    deleted: tuple[GenerationRecordView, ...] = ()
    has_run: int = 0

    @property
    def accepted(self) -> tuple[GenerationRecordView, ...]:
        """In the order of generations."""
        existing = (c for c in self.found if self.digests.get(c.generation) == c.digest)
        return tuple(sorted((*existing, *self.deleted), key=lambda c: c.generation))

    @property
    def missing(self) -> int:
        """The generation that ran, if nobody knows what it is; 0: it is known. No older one may run
        instead: that would delete its pods."""
        return self.has_run if all(c.generation < self.has_run for c in self.accepted) else 0

    def of_generation(self, generation: int) -> GenerationRecordView | None:
        """Accepted or not."""
        return next((c for c in self.found if c.generation == generation), None)


def find_generation_records(
    view: TopologyView, snapshot: Snapshot, default_image: str
) -> GenerationRecords:
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
    records = GenerationRecords(found, digests, has_run=_has_run(view, snapshot, digests))
    return replace(records, deleted=_deleted(view, snapshot, records, default_image))


def _has_run(view: TopologyView, snapshot: Snapshot, digests: Mapping[int, str]) -> int:
    """A digest alone does not show it: the record may never have been created."""
    seen = {p.generation for p in snapshot.pods if p.owner_uid == view.uid}
    return max((g for g in {*seen, view.report.generation or 0} if digests.get(g)), default=0)


def _deleted(
    view: TopologyView, snapshot: Snapshot, records: GenerationRecords, default_image: str
) -> tuple[GenerationRecordView, ...]:
    """By their digests: as this process saw them, or as the spec makes that of the generation that
    runs."""
    existing = {c.generation for c in records.accepted}
    digests = {g: d for g, d in records.digests.items() if d}
    lost = [g for g in sorted(digests)[-KEPT_GENERATIONS:] if g not in existing]
    known = dict(snapshot.record_data)
    if records.has_run == view.generation and view.generation in lost:
        text = generation_record(view, default_image)["data"][names.TOPOLOGY_KEY]
        known[record_digest(text)] = text
    return tuple(
        GenerationRecordView(
            namespace=view.namespace,
            name=names.generation_record_name(view.name, generation),
            uid="",
            version=0,
            owner_uid=view.uid,
            topology=view.name,
            generation=generation,
            text=known[digests[generation]],
        )
        for generation in lost
        if digests[generation] in known
    )


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


def missing_record_message(view: TopologyView, records: GenerationRecords, waits_for: str) -> str:
    """`waits_for`: why the newest generation does not run instead."""
    name = names.generation_record_name(view.name, records.missing)
    return (
        f"the ConfigMap {view.namespace}/{name} is gone, the only record of generation "
        f"{records.missing}, which runs: its pods stay as they are, and lost ones are not "
        f"replaced. Restore it from a backup, or edit the spec so that it is accepted; generation "
        f"{view.generation}: {waits_for}"
    )


def foreign_record_problem(record: GenerationRecordView) -> Problem:
    where = f"{record.namespace}/{record.name}"
    what = f"the ConfigMap {where} exists, and is not the record that the operator has accepted"
    hint = f"delete it: kubectl delete configmap {record.name} -n {record.namespace}"
    return Problem("", "ForeignRecord", what, hint)
