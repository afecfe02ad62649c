"""Global checkpoints: reading and committing manifests, deleting what is no longer needed (I9).

A manifest is committed by creating `manifests/<seq>.json`. Of two coordinators that try the same
number one fails, and one that was suspended finds a newer number. `checkpoints.garbage` decides
what is deleted.

Design: docs/design/checkpoints.md#who-commits, docs/design/checkpoints.md#what-is-deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.checkpoints.codec import (
    decode_entry,
    decode_manifest,
    encode_manifest,
    manifest_name,
    manifest_seq,
)
from rekindle.checkpoints.garbage import find_garbage, needed_entries
from rekindle.checkpoints.manifest import Entry, Manifest
from rekindle.checkpoints.store import ObjectMissing, Store
from rekindle.errors import StoreError
from rekindle.objects import ObjectInfo


class UnreadableObject(StoreError):
    """An object is damaged, or of another version's format."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Result of a garbage collection."""

    objects: int
    bytes: int


class ManifestStore:
    """The manifests of one topology. Used by one coordinator: by one thread that commits, and one
    that collects garbage."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._references: dict[str, frozenset[str]] = {}  # state objects, by entry that was kept

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
        return self.seqs()[-1:] == [manifest.seq]

    def entry(self, object_name: str) -> Entry:
        """The entry of this name. Raises ObjectMissing, UnreadableObject, StoreError."""
        data = self._store.get(f"{self._uid}/{object_name}")
        try:
            return decode_entry(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise UnreadableObject(f"{self._store.url}: {object_name}: {e}") from e

    def unusable(self, object_names: Iterable[str]) -> dict[str, str]:
        """Those of these entries that must not be committed, and why: they cannot be read, or state
        objects that they need are missing."""
        present = {info.name for info in self._list("state/")}
        problems: dict[str, str] = {}
        for name in object_names:
            try:
                missing = sorted(self._read_references(name) - present)
            except (ObjectMissing, UnreadableObject) as error:
                problems[name] = str(error)
                continue
            if missing:
                problems[name] = f"state object {missing[0]} is missing"
        return problems

    def collect_garbage(self, retain: int) -> Deleted:
        """Delete what neither the newest `retain` manifests nor a pending entry need. If an entry
        cannot be read, no state is deleted, and UnreadableObject is raised in the end."""
        objects = self._list("")
        manifests = [self.read(seq) for seq in self.seqs()[-retain:]]
        entries = needed_entries(objects, manifests)
        unreadable = self._update_references(entries)
        references = {name: self._references.get(name, frozenset()) for name in entries}
        garbage = find_garbage(objects, manifests, references)
        if unreadable is not None:
            garbage = [info for info in garbage if not info.name.startswith("state/")]
        for info in garbage:
            self._store.delete(f"{self._uid}/{info.name}")
        self._store.remove_stale_temps(self._uid)
        if unreadable is not None:
            raise unreadable
        return Deleted(len(garbage), sum(info.bytes for info in garbage))

    def _update_references(self, entry_names: Iterable[str]) -> UnreadableObject | None:
        """Keep the references of these entries and no others; entries never change, so each is read
        once. Returns the error of one that cannot be read."""
        references: dict[str, frozenset[str]] = {}
        unreadable: UnreadableObject | None = None
        for name in entry_names:
            try:
                known = self._references.get(name)
                references[name] = self._read_references(name) if known is None else known
            except UnreadableObject as error:
                unreadable = error
        self._references = references
        return unreadable

    def _read_references(self, entry_name: str) -> frozenset[str]:
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
