"""Which objects of a checkpoint store are garbage. Pure.

Design: docs/design/checkpoints.md#what-is-deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rekindle.checkpoints.codec import (
    manifest_name,
    manifest_seq,
    parse_cut_name,
    parse_entry_name,
    parse_log_name,
    parse_state_name,
)
from rekindle.checkpoints.manifest import Manifest
from rekindle.checkpoints.shipped import parse_piece_name
from rekindle.objects import ObjectInfo
from rekindle.topology.model import Slot, partition_of

CUT_AGE_S = 900.0
"""Cut records that are deleted are older by so much than the retained manifests. A multiple of
`connectors.planned_cuts.RECHECK_S`."""


def find_garbage(
    objects: Sequence[ObjectInfo],
    manifests: Sequence[Manifest],
    references: Mapping[str, frozenset[str]],
) -> list[ObjectInfo]:
    """The objects to delete: manifests first, then entries, then state, so that an interruption
    leaves no reference to a missing object. Last the spilled log files of replicas whose partition
    is not in the newest manifest, or of which a later incarnation has spilled as well, pieces of
    shipped logs up to the oldest entry from which their partition may be restored, and cut records
    that nobody who restores needs, in the order of their epochs.

    `manifests` are the retained ones; `references` gives, for each of their entries and for each
    entry that is pending (saved, newer than its partition's committed one), the state objects it
    names. An object is kept if it is one of these, if it is not older than the oldest retained
    manifest, or if it belongs to an epoch after its partition's committed one: a save in progress.
    Objects with unknown names are kept.
    """
    if not manifests:
        return []
    kept = {manifest_name(m.seq) for m in manifests}
    oldest_modified = min((o.modified for o in objects if o.name in kept), default=float("-inf"))
    lowest_seq = min(m.seq for m in manifests)
    needed = kept | references.keys() | frozenset().union(*references.values())
    newest = max(manifests, key=lambda m: m.seq)
    committed = _committed_epochs(newest)
    logs = {o.name: log for o in objects if (log := parse_log_name(o.name)) is not None}
    newest_spilled_incarnation: dict[Slot, int] = {}
    for log in logs.values():
        newest_spilled_incarnation[log.slot] = max(
            log.incarnation, newest_spilled_incarnation.get(log.slot, 0)
        )

    first_cuts = _first_needed_cuts(objects, manifests, references)
    oldest_entries = _oldest_entries(manifests)

    def is_garbage(info: ObjectInfo) -> bool:
        if info.name in needed or info.modified >= oldest_modified:
            return False
        if cut := parse_cut_name(info.name):
            chain, first = cut
            return first < first_cuts[chain] and info.modified < oldest_modified - CUT_AGE_S
        seq = manifest_seq(info.name)
        if seq is not None:
            return seq < lowest_seq
        if shipped := parse_piece_name(info.name):
            key, piece = shipped
            return key not in newest.entries or piece.last <= oldest_entries[key]
        if log := logs.get(info.name):
            old = log.incarnation < newest_spilled_incarnation[log.slot]
            return old or partition_of(log.slot).key not in newest.entries
        parsed = parse_entry_name(info.name) or parse_state_name(info.name)
        if parsed is None:
            return False
        return parsed.epoch <= committed[parsed.key]

    order = {"manifests": 0, "entries": 1, "state": 2, "logs": 3, "cuts": 4}
    return sorted(
        filter(is_garbage, objects), key=lambda o: (order[o.name.partition("/")[0]], o.name)
    )


def _first_needed_cuts(
    objects: Iterable[ObjectInfo],
    manifests: Iterable[Manifest],
    references: Iterable[str],
) -> Mapping[str, int]:
    """By prefix, the first epoch of the oldest cut record that is kept: the one that defines the
    oldest epoch after which anybody may restore. The next one begins at its end."""
    refs = (ref for m in manifests for refs in m.entries.values() for ref in refs)
    entries = filter(None, map(parse_entry_name, references))
    oldest = min([ref.epoch for ref in refs] + [entry.epoch for entry in entries], default=-1)
    needed: dict[str, int] = defaultdict(lambda: -1)
    for chain, first in filter(None, (parse_cut_name(info.name) for info in objects)):
        if first <= oldest:
            needed[chain] = max(first, needed[chain])
    return needed


def _oldest_entries(manifests: Iterable[Manifest]) -> Mapping[str, int]:
    """Partition -> epoch of the oldest entry that a retained manifest has."""
    found: dict[str, int] = {}
    for manifest in manifests:
        for key, refs in manifest.entries.items():
            epochs = [ref.epoch for ref in refs]
            found[key] = min([*epochs, found[key]]) if key in found else min(epochs, default=-1)
    return found


def _committed_epochs(newest: Manifest) -> Mapping[str, int]:
    """Partition -> epoch of its newest committed entry; for a partition that is not in the manifest
    (of an earlier or a later generation) the lowest of these epochs."""
    known = {key: max(ref.epoch for ref in refs) for key, refs in newest.entries.items() if refs}
    lowest = min(known.values(), default=-1)
    return defaultdict(lambda: lowest, known)


def needed_entries(objects: Iterable[ObjectInfo], manifests: Sequence[Manifest]) -> set[str]:
    """Entries that have to stay usable: those of the retained manifests, and pending ones."""
    refs = (ref for m in manifests for refs in m.entries.values() for ref in refs)
    entries = {ref.object for ref in refs if ref.object is not None}
    if manifests:
        committed = _committed_epochs(max(manifests, key=lambda m: m.seq))
        for info in objects:
            parsed = parse_entry_name(info.name)
            if parsed is not None and parsed.epoch > committed[parsed.key]:
                entries.add(info.name)
    return entries
