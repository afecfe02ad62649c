"""Global checkpoints: reading and committing manifests, deleting what is no longer needed (I9).

A manifest is committed by creating `manifests/<seq>.json`. Of two coordinators that try the same
number one fails, and one that was suspended finds a newer number. `checkpoints.garbage` decides
what is deleted. Garbage collection also detects objects that something else has deleted, such as an
expiry rule of an S3 bucket, or a user.

Design: docs/design/checkpoints.md#who-commits, docs/design/checkpoints.md#what-is-deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

from rekindle.checkpoints.codec import (
    decode_entry,
    decode_manifest,
    digest_of,
    encode_manifest,
    manifest_name,
    manifest_seq,
    parse_entry_name,
    parse_state_name,
)
from rekindle.checkpoints.garbage import find_garbage, needed_entries
from rekindle.checkpoints.manifest import Entry, Manifest
from rekindle.checkpoints.store import Store, UnreadableObject
from rekindle.errors import ObjectMissing, StoreError
from rekindle.objects import ObjectInfo

FULL_SCAN_S = 900.0
"""Seconds between listings of the whole store."""
MAX_PARALLEL_REQUESTS = 8
_MAX_LOOK_UPS = 256
_MAX_READS = 16
"""If more objects are damaged, they are read again only together with a listing of the whole
store."""
_LISTED_PER_LOOK_UP = 100
"""Estimate: so many objects are listed in the time of one look-up."""


class ManifestStore:
    """The manifests of one topology. Used by one coordinator: by one thread that commits, and one
    that collects garbage."""

    def __init__(self, store: Store, uid: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._uid = uid
        self._clock = clock
        # Written by the thread that commits. State objects by entry, if all of them existed:
        self._complete: dict[str, frozenset[str]] = {}
        # Number of calls of `not_committable` that found something; the other thread reads it.
        self._refusals = 0
        # Of the thread that collects garbage. State objects by entry that was kept:
        self._references: dict[str, frozenset[str]] = {}
        self._manifests: dict[int, Manifest] = {}
        self._full_scan_at: float | None = None
        self._known_refusals = 0  # at the last collection
        self._reported_lost: frozenset[str] = frozenset()  # not checked yet
        # Written by that thread, read by both. What is being deleted: an entry that needs any of
        # it must not be committed now.
        self._deleting: frozenset[str] = frozenset()
        # Needed state objects that were missing, or damaged, at the last collection.
        self._missing: frozenset[str] = frozenset()
        self._damaged: frozenset[str] = frozenset()
        self.unrestorable: Mapping[str, str] = {}
        """Needed entries that could not be restored at the last collection; each with the
        reason."""

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
                continue  # deleted since it was listed: there are newer ones
        return None

    def write(self, manifest: Manifest) -> bool:
        """Commit. False if another coordinator has committed this number or a higher one: the
        caller has been replaced. Raises StoreError; the same manifest may then be written again,
        even if the first attempt reached the store."""
        name = f"{self._uid}/{manifest_name(manifest.seq)}"
        data = encode_manifest(manifest, self._uid)
        if not self._store.put(name, data) and self._read_or_none(name) != data:
            return False
        if self.seqs()[-1:] != [manifest.seq]:
            return False
        committed = {ref.object for refs in manifest.entries.values() for ref in refs}
        self._complete = {n: refs for n, refs in self._complete.items() if n in committed}
        return True

    def entry(self, object_name: str) -> Entry:
        """The entry of this name. Raises ObjectMissing, UnreadableObject, StoreError."""
        data = self._store.get(f"{self._uid}/{object_name}")
        try:
            return decode_entry(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise UnreadableObject(f"{self._store.url}: {object_name}: {e}") from e

    def not_committable(self, object_names: Iterable[str]) -> dict[str, str]:
        """Those of these entries that must not be committed, and why: they cannot be read, or state
        objects that they need are missing or known to be damaged. Requests to the store are made
        only for objects that no entry of the last written manifest needs, or that were missing at
        the last garbage collection."""
        problems: dict[str, str] = {}
        references: dict[str, frozenset[str]] = {}
        deleting = self._deleting  # a later collection spares what these entries need
        damaged = self._damaged
        for name in object_names:
            try:
                references[name] = self._read_references(name)
            except (ObjectMissing, UnreadableObject) as error:
                problems[name] = str(error)
        known = _union(refs for name, refs in self._complete.items() if name not in references)
        known -= self._missing
        present = known | self._present(_union(references.values()) - known, len(known))
        present -= deleting
        for name, needed in references.items():
            if message := _lost_object(needed, needed - present, damaged):
                problems[name] = message
            else:
                self._complete[name] = needed
        self._refusals += bool(problems)
        return problems

    def _present(self, wanted: AbstractSet[str], other_objects: int) -> AbstractSet[str]:
        """Those of these state objects that exist. Few are looked up one by one, many with one
        listing, which is the slower the more `other_objects` it contains."""
        if len(wanted) > max(_MAX_LOOK_UPS, other_objects // _LISTED_PER_LOOK_UP):
            return wanted & {info.name for info in self._list("state/")}
        with ThreadPoolExecutor(MAX_PARALLEL_REQUESTS) as pool:
            found = pool.map(lambda n: self._store.exists(f"{self._uid}/{n}"), sorted(wanted))
            return {name for name, exists in zip(sorted(wanted), found, strict=True) if exists}

    def collect_garbage(
        self,
        retain: int,
        full_scan: bool = False,
        in_use: AbstractSet[str] = frozenset(),
        reported_lost: AbstractSet[str] = frozenset(),
    ) -> int:
        """Delete what is needed neither by the newest `retain` manifests, nor by a pending entry,
        nor by an entry `in_use`, which a task still reads. Returns the number of objects. If an
        entry cannot be read, no state is deleted, and UnreadableObject is raised in the end.
        `reported_lost`: state objects that tasks found damaged or missing. Those that are needed
        are read, and read again by each call while they are damaged; if they are many, only by
        calls that list the whole store.

        Lists manifests and entries, of which there are few, and deletes with an entry the state
        that it alone needed. The whole store is listed, to find state without an entry, spilled
        logs and missing objects: by the first call, by the first one after a failure or after an
        entry was refused, every FULL_SCAN_S, with `full_scan`, and if an object of `reported_lost`
        is missing. Sets `unrestorable`.
        """
        self._reported_lost |= reported_lost  # kept until a call has checked them
        began, full_scan_at = self._clock(), self._full_scan_at
        due = full_scan_at is None or began - full_scan_at >= FULL_SCAN_S
        refusals = self._refusals  # read once: a refusal during this call is for the next one
        more_may_be_missing = not self._reported_lost <= self._present(
            self._reported_lost, other_objects=0
        )
        full_scan = full_scan or due or refusals != self._known_refusals or more_may_be_missing
        self._known_refusals = refusals
        self._full_scan_at = None  # a failure may leave state whose entry is deleted
        deleted = self._collect(retain, full_scan, in_use)
        self._full_scan_at = began if full_scan else full_scan_at
        return deleted

    def _collect(self, retain: int, full_scan: bool, in_use: AbstractSet[str]) -> int:
        prefixes = ("",) if full_scan else ("manifests/", "entries/")
        objects = [info for prefix in prefixes for info in self._list(prefix)]
        manifests = self._retained(objects, retain)
        before = self._references
        names = {info.name for info in objects}
        entries = needed_entries(objects, manifests) | (in_use & names)
        unusable = self._update_references(entries, names)
        self._find_unrestorable(names if full_scan else None, unusable)
        unreadable = next((e for e in unusable.values() if isinstance(e, UnreadableObject)), None)
        references = {name: self._references.get(name, frozenset()) for name in entries}
        garbage = find_garbage(objects, manifests, references)
        if not full_scan:
            needed_by_garbage = self._needed_by(garbage, before)
            objects += [info for info in needed_by_garbage if info.name not in names]
            garbage = find_garbage(objects, manifests, references)
        if unreadable is not None:
            garbage = [info for info in garbage if not info.name.startswith("state/")]
        self._deleting = frozenset(info.name for info in garbage)
        try:
            spared = self._needed_by_entries_since(entries, manifests) if garbage else frozenset()
            garbage = [info for info in garbage if info.name not in spared]
            for info in garbage:
                self._store.delete(f"{self._uid}/{info.name}")
        finally:
            self._deleting = frozenset()
        self._store.remove_stale_temps(self._uid)
        if unreadable is not None:
            raise unreadable
        return len(garbage)

    def _needed_by_entries_since(
        self, known: AbstractSet[str], manifests: Sequence[Manifest]
    ) -> frozenset[str]:
        """What the entries need that were saved since `known` was listed: a save that began long
        ago may refer to objects that no retained manifest needs any more."""
        new = needed_entries(self._list("entries/"), manifests) - known
        return _union(self._read_references(name) for name in new)

    def _retained(self, objects: Iterable[ObjectInfo], retain: int) -> list[Manifest]:
        seqs = sorted(seq for o in objects if (seq := manifest_seq(o.name)) is not None)
        kept = {seq: self._manifests.get(seq) or self.read(seq) for seq in seqs[-retain:]}
        self._manifests = kept
        return list(kept.values())

    def _needed_by(
        self, garbage: Iterable[ObjectInfo], known: Mapping[str, frozenset[str]]
    ) -> list[ObjectInfo]:
        """The state objects of the entries among `garbage`. They are not listed, so they get the
        times of their entries, which are newer."""
        newest: dict[str, float] = {}
        for info in garbage:
            if parse_entry_name(info.name) is None:
                continue
            try:
                needed = known.get(info.name)
                needed = self._read_references(info.name) if needed is None else needed
            except (ObjectMissing, UnreadableObject):
                continue  # the next full scan finds its state
            for name in needed:
                newest[name] = max(info.modified, newest.get(name, info.modified))
        return [ObjectInfo(name, bytes=0, modified=modified) for name, modified in newest.items()]

    def _update_references(
        self, entry_names: Iterable[str], listed: AbstractSet[str]
    ) -> dict[str, StoreError]:
        """Set the references to those of these entries; entries never change, so each is read once.
        Returns the errors of entries that are missing or cannot be read."""
        references: dict[str, frozenset[str]] = {}
        unusable: dict[str, StoreError] = {}
        for name in entry_names:
            try:
                known = self._references.get(name) if name in listed else None
                references[name] = self._read_references(name) if known is None else known
            except (ObjectMissing, UnreadableObject) as error:
                unusable[name] = error
        self._references = references
        return unusable

    def _find_unrestorable(
        self, listed: AbstractSet[str] | None, unusable: Mapping[str, StoreError]
    ) -> None:
        """`listed`: all names in the store; None: it was not listed. A listing may lack an object
        that was written meanwhile, so objects that are not in it are looked up, too. Without a
        listing, only objects that were missing before are looked up."""
        needed = _union(self._references.values())
        missing = needed & self._missing if listed is None else needed - listed
        if missing and (listed is not None or len(missing) <= _MAX_LOOK_UPS):
            missing -= self._present(missing, other_objects=0)
        self._missing = missing
        known, to_read = self._damaged & needed, (self._reported_lost & needed) - missing
        if listed is not None or len(known) <= _MAX_READS:
            known, to_read = frozenset(), (known | to_read) - missing
        self._damaged = known | frozenset(name for name in to_read if self._is_damaged(name))
        self._reported_lost = frozenset()
        lost = {
            name: _lost_object(refs, missing, self._damaged)
            for name, refs in self._references.items()
        }
        self.unrestorable = {name: str(error) for name, error in unusable.items()} | {
            name: message for name, message in lost.items() if message is not None
        }

    def _is_damaged(self, name: str) -> bool:
        """Whether a state object is damaged; the last result, if it cannot be read now."""
        saved = parse_state_name(name)
        try:
            data = self._store.get(f"{self._uid}/{name}")
        except StoreError:
            return name in self._damaged
        return saved is not None and digest_of(data) != saved.digest

    def _read_references(self, entry_name: str) -> frozenset[str]:
        entry = self.entry(entry_name)
        return frozenset(name for names in entry.objects.values() for name in names)

    def _read_or_none(self, name: str) -> bytes | None:
        try:
            return self._store.get(name)
        except ObjectMissing:
            return None

    def _list(self, prefix: str) -> list[ObjectInfo]:
        """Names relative to the topology's prefix."""
        begin = len(self._uid) + 1
        found = self._store.list(f"{self._uid}/{prefix}")
        return [ObjectInfo(info.name[begin:], info.bytes, info.modified) for info in found]


def _lost_object(
    needed: AbstractSet[str], missing: AbstractSet[str], damaged: AbstractSet[str]
) -> str | None:
    """A message that names an object that an entry needs and that is lost; None if none is."""
    if found := needed & missing:
        return f"state object {min(found)} is missing"
    if found := needed & damaged:
        return f"state object {min(found)} is damaged: its digest does not match"
    return None


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
