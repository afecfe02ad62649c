"""Global checkpoints: reading, committing and clearing them away (I9).

A manifest is committed by creating `manifests/<seq>.json`; of two coordinators that try the same
number one loses, and one that was asleep finds a newer number. What to delete is decided by the
pure function `garbage`.

Design: docs/design/checkpoints.md#who-commits, docs/design/checkpoints.md#what-is-deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rekindle.checkpoints.codec import (
    decode_entry,
    decode_manifest,
    encode_manifest,
    manifest_name,
    manifest_seq,
    parse_entry_name,
    parse_log_name,
    parse_state_name,
)
from rekindle.checkpoints.manifest import Entry, Manifest
from rekindle.checkpoints.store import ObjectMissing, Store
from rekindle.errors import StoreError
from rekindle.objects import ObjectInfo


class Unreadable(StoreError):
    """An object that is damaged, or of another version's format."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a garbage collection deleted."""

    objects: int
    bytes: int


class ManifestStore:
    """The manifests of one topology. Used by one coordinator, in one thread, and one that cleans
    up."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._needed: dict[str, frozenset[str]] = {}  # by entries that the last clean-up kept

    def seqs(self) -> list[int]:
        """The numbers of all manifests, ascending."""
        found = (manifest_seq(info.name) for info in self._list("manifests/"))
        return sorted(seq for seq in found if seq is not None)

    def read(self, seq: int) -> Manifest:
        """Raises ObjectMissing, StoreError."""
        name = f"{self._uid}/{manifest_name(seq)}"
        data = self._store.get(name)
        try:
            return decode_manifest(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise StoreError(f"{self._store.url}: {name}: {e}") from e

    def newest(self) -> Manifest | None:
        """The global checkpoint to restore from; None if there is none."""
        while seqs := self.seqs():
            try:
                return self.read(seqs[-1])
            except ObjectMissing:
                continue  # cleared away since it was listed: there are newer ones
        return None

    def write(self, manifest: Manifest) -> bool:
        """Commit. False if another coordinator has committed this number or a higher one; the
        caller is then no longer the one who decides. Raises StoreError; the same manifest may then
        be written again, also if the first attempt did reach the store."""
        name = f"{self._uid}/{manifest_name(manifest.seq)}"
        data = encode_manifest(manifest, self._uid)
        if not self._store.put(name, data) and self._read_or_none(name) != data:
            return False
        return self.seqs()[-1:] == [manifest.seq]

    def entry(self, object_name: str) -> Entry:
        """The entry of this name. Raises ObjectMissing, Unreadable, StoreError."""
        data = self._store.get(f"{self._uid}/{object_name}")
        try:
            return decode_entry(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise Unreadable(f"{self._store.url}: {object_name}: {e}") from e

    def unusable(self, object_names: Iterable[str]) -> dict[str, str]:
        """Of these entries those that must not be committed, and why: they cannot be read, or the
        store does not hold what they need."""
        held = {info.name for info in self._list("state/")}
        found: dict[str, str] = {}
        for name in object_names:
            try:
                lost = sorted(self._references(name) - held)
            except (ObjectMissing, Unreadable) as error:
                found[name] = str(error)
                continue
            if lost:
                found[name] = f"it needs {lost[0]}, which is gone"
        return found

    def collect_garbage(self, retain: int) -> Cleared:
        """Delete what neither the newest `retain` manifests nor a pending entry need. Raises
        Unreadable in the end if what some entry needs cannot be known: then all states stay."""
        objects = self._list("")
        manifests = [self.read(seq) for seq in self.seqs()[-retain:]]
        roots = _roots(objects, manifests)
        unreadable = self._learn_needs(roots)
        doomed = garbage(objects, manifests, {n: self._needed.get(n, frozenset()) for n in roots})
        if unreadable is not None:
            doomed = [info for info in doomed if not info.name.startswith("state/")]
        for info in doomed:
            self._store.delete(f"{self._uid}/{info.name}")
        self._store.remove_stale_temps(self._uid)
        if unreadable is not None:
            raise unreadable
        return Cleared(len(doomed), sum(info.bytes for info in doomed))

    def _learn_needs(self, entry_names: Iterable[str]) -> Unreadable | None:
        """Of these entries and no others; they never change, so each is read once. Returns why one
        cannot be known."""
        needed: dict[str, frozenset[str]] = {}
        unreadable: Unreadable | None = None
        for name in entry_names:
            try:
                known = self._needed.get(name)
                needed[name] = self._references(name) if known is None else known
            except Unreadable as error:
                unreadable = error
        self._needed = needed
        return unreadable

    def _references(self, entry_name: str) -> frozenset[str]:
        entry = self.entry(entry_name)
        return frozenset(name for buckets in entry.objects.values() for name in buckets.values())

    def _read_or_none(self, name: str) -> bytes | None:
        try:
            return self._store.get(name)
        except ObjectMissing:
            return None

    def _list(self, prefix: str) -> list[ObjectInfo]:
        """Names below the topology's own prefix."""
        cut = len(self._uid) + 1
        found = self._store.list(f"{self._uid}/{prefix}")
        return [ObjectInfo(info.name[cut:], info.bytes, info.modified) for info in found]


def garbage(
    objects: Sequence[ObjectInfo],
    manifests: Sequence[Manifest],
    references: Mapping[str, frozenset[str]],
) -> list[ObjectInfo]:
    """The objects to delete; manifests come first, then entries, then state, so that an
    interruption leaves nothing that refers to nothing. Then what output logs have spilled, of
    replicas that the newest manifest has no partition for, or whose next incarnation spills too.

    `manifests` are the retained ones; `references` gives, for each of their entries and for each
    entry that is pending (saved, newer than its partition's committed one), the state objects it
    names. An object stays if it is one of these; if it is newer than any retained manifest; or if
    it belongs to an epoch after its partition's committed one: a save in progress. Names that are
    not understood stay.
    """
    if not manifests:
        return []
    kept = {manifest_name(m.seq) for m in manifests}
    oldest = min((o.modified for o in objects if o.name in kept), default=float("-inf"))
    lowest_seq = min(m.seq for m in manifests)
    needed = kept | references.keys() | frozenset().union(*references.values())
    newest = max(manifests, key=lambda m: m.seq)
    committed = _committed(newest)
    logs = {o.name: log for o in objects if (log := parse_log_name(o.name)) is not None}
    spilling: dict[tuple[str, int], int] = {}
    for log in logs.values():
        slot = (log.key, log.replica)
        spilling[slot] = max(log.incarnation, spilling.get(slot, 0))

    def is_garbage(info: ObjectInfo) -> bool:
        if info.name in needed or info.modified >= oldest:
            return False
        seq = manifest_seq(info.name)
        if seq is not None:
            return seq < lowest_seq
        if log := logs.get(info.name):
            old = log.incarnation < spilling[log.key, log.replica]
            return old or log.key not in newest.entries
        saved = parse_entry_name(info.name) or parse_state_name(info.name)
        if saved is None:
            return False
        return saved.epoch <= committed[saved.key]

    order = {"manifests": 0, "entries": 1, "state": 2, "logs": 3}
    return sorted(
        filter(is_garbage, objects), key=lambda o: (order[o.name.partition("/")[0]], o.name)
    )


def _committed(newest: Manifest) -> Mapping[str, int]:
    """Partition -> epoch of its newest committed entry; for one that the manifest does not know
    (of an earlier generation, or of one that is coming) the lowest of all."""
    known = {key: max(ref.epoch for ref in refs) for key, refs in newest.entries.items() if refs}
    lowest = min(known.values(), default=-1)
    return defaultdict(lambda: lowest, known)


def _roots(objects: Iterable[ObjectInfo], manifests: Sequence[Manifest]) -> set[str]:
    """Entries that must stay usable: those of the retained manifests, and pending ones."""
    refs = (ref for m in manifests for refs in m.entries.values() for ref in refs)
    roots = {ref.object for ref in refs if ref.object is not None}
    if manifests:
        committed = _committed(max(manifests, key=lambda m: m.seq))
        for info in objects:
            saved = parse_entry_name(info.name)
            if saved is not None and saved.epoch > committed[saved.key]:
                roots.add(info.name)
    return roots
