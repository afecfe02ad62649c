"""The checkpoint store of the coordinator: one thread, and a deadline for each call.

One thread keeps the order of calls: a read after a write that timed out sees the write's result.
Garbage collection, which may take long, has another thread.

Design: docs/design/checkpoints.md#the-store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from rekindle.checkpoints import (
    Manifest,
    ManifestStore,
    Store,
    merge_entries,
)
from rekindle.checkpoints.codec import encode_entry, entry_name
from rekindle.checkpoints.state import entry_digest
from rekindle.coordinator.model import CollectGarbage, StateMigration, WriteManifest
from rekindle.errors import StoreError
from rekindle.protocol import EntryRef

T = TypeVar("T")

# Instead of a unique token: coordinators that migrate the same entry create the same object.
_MIGRATED = "a55e3b1ed000"


class CheckpointStore:
    """`Store` and `ManifestStore` of `rekindle.checkpoints`, called in threads, each call with a
    timeout. Raises StoreError for each failure, even if the store does not respond."""

    def __init__(self, uid: str, timeout_s: float) -> None:
        self._uid = uid
        self._timeout_s = timeout_s
        self._url: str | None = None
        self._required_id: str | None = None
        self._opened: tuple[str, Store, ManifestStore] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._garbage_thread = ThreadPoolExecutor(1, thread_name_prefix="garbage")

    def use(self, url: str) -> None:
        self._url = url

    def require_store_id(self, store_id: str | None) -> None:
        """Only use the store with this id, and do not create one. None: the topology has not run
        yet, so a store may be created."""
        self._required_id = store_id

    @property
    def id(self) -> str | None:
        """The id of the open store."""
        return self._opened[1].id if self._opened is not None else None

    def close(self) -> None:
        for thread in (self._thread, self._garbage_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def newest(self) -> Manifest | None:
        return await self._run("reading the newest manifest", lambda m, _: m.newest())

    async def not_committable(self, entries: list[str]) -> dict[str, str]:
        """Those of these entries that must not be committed, each with the reason."""
        return await self._run(
            "checking the new checkpoint entries", lambda m, _: m.not_committable(entries)
        )

    async def write(self, effect: WriteManifest) -> Manifest | None:
        """The manifest that was written; None if its number was taken."""

        def commit(manifests: ManifestStore, store: Store) -> Manifest | None:
            migrated = [(a, self._save_migrated(a, manifests, store)) for a in effect.migrations]
            manifest = _with_migrated(effect.manifest, migrated)
            return manifest if manifests.write(manifest) else None

        return await self._run(f"writing manifest {effect.manifest.seq}", commit)

    @property
    def unrestorable(self) -> Mapping[str, str]:
        """The entries that could not be restored at the last garbage collection, each with the
        reason."""
        return self._opened[2].unrestorable if self._opened is not None else {}

    async def collect_garbage(self, what: CollectGarbage) -> None:
        manifests = await self._run("opening it", lambda m, _: m)
        await asyncio.wrap_future(
            self._garbage_thread.submit(
                manifests.collect_garbage,
                what.retain,
                what.full_scan,
                what.in_use,
                what.reported_lost,
            )
        )

    def _save_migrated(
        self, migration: StateMigration, manifests: ManifestStore, store: Store
    ) -> EntryRef:
        sources = [manifests.entry(name) for name in migration.sources]
        try:
            merged = merge_entries(sources, migration.operators)
        except ValueError as error:
            raise StoreError(f"{migration.partition.key}: {error}") from error
        if merged is None:
            return EntryRef(migration.epoch, None, "")
        where = migration.partition
        entry = replace(merged, segment=where.segment, partition=where.index)
        data = encode_entry(entry, self._uid)
        digest = entry_digest(entry)
        name = entry_name(where.segment, where.index, migration.epoch, digest, _MIGRATED)
        store.put(f"{self._uid}/{name}", data)
        return EntryRef(migration.epoch, name, digest, len(data))

    def _open(self) -> tuple[Store, ManifestStore]:
        if self._url is None:
            raise StoreError("no checkpoint store is known yet")
        if self._opened is None or self._opened[0] != self._url:
            store = Store(self._url, create=self._required_id is None)
            if self._required_id not in (None, store.id):
                raise StoreError(
                    f"{self._url}: this is store {store.id}, but the topology has used store "
                    f"{self._required_id}; mount or move that one back"
                )
            self._opened = (self._url, store, ManifestStore(store, self._uid))
        return self._opened[1], self._opened[2]

    async def _run(self, what: str, action: Callable[[ManifestStore, Store], T]) -> T:
        def call() -> T:
            store, manifests = self._open()
            return action(manifests, store)

        future = asyncio.wrap_future(self._thread.submit(call))
        try:
            return await asyncio.wait_for(asyncio.shield(future), self._timeout_s)
        except TimeoutError as error:
            late = (
                f"{self._url}: {what} did not end within {self._timeout_s:g} s: the storage does "
                "not respond"
            )
            raise StoreError(late) from error


def _with_migrated(manifest: Manifest, migrated: list[tuple[StateMigration, EntryRef]]) -> Manifest:
    entries = dict(manifest.entries)
    for migration, ref in migrated:
        key = migration.partition.key
        entries[key] = tuple(ref if r.epoch == ref.epoch else r for r in entries[key])
    return replace(manifest, entries=entries)
