"""Saving and loading the state of one segment partition.

A checkpoint only writes what changed since the newest committed one: state is immutable Arrow
tables by bucket; an unchanged bucket, or a changed one with the same digest, keeps its object. Only
objects of the newest *committed* manifest are reused: those of an entry that was never committed
may be deleted at any time.

Design: docs/design/checkpoints.md#what-a-checkpoint-is.
"""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from rekindle.checkpoints.codec import (
    CheckpointName,
    decode_entry,
    encode_entry,
    entry_name,
    parse_entry_name,
    parse_state_name,
    state_name,
)
from rekindle.checkpoints.manifest import Entry, EntryRef
from rekindle.checkpoints.store import Store
from rekindle.engine.model import State
from rekindle.engine.version import STATE_FORMAT, engine_version
from rekindle.errors import StateMismatch, StoreError
from rekindle.objects import to_json
from rekindle.streams.digest import digest_table

PARALLEL = 8
_TOPOLOGY, _STATE_FORMAT = b"rekindle.topology", b"rekindle.stateFormat"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


class StateStore:
    """The saved states of one topology. One instance saves for one task; `save` is called by one
    thread at a time, `load` by any."""

    def __init__(self, store: Store, uid: str) -> None:
        self._store = store
        self._uid = uid
        self._token = uuid.uuid4().hex[:12]
        self._digests: dict[tuple[str, int], tuple[pa.Table, str]] = {}

    def save(
        self,
        segment_id: str,
        partition: int,
        epoch: int,
        watermark: int,
        operator_ids: Iterable[str],
        state: State,
        previous: Entry | None,
        chained_digest: str = "",
    ) -> EntryRef:
        """Save the state after `epoch`; `previous` is this partition's entry in the newest
        committed manifest. `bytes` of the result is what was written. Raises StoreError; then
        earlier checkpoints are unchanged, and the call may be repeated."""
        operators = tuple(operator_ids)
        digests = self._digest(state)
        objects: dict[str, dict[int, str]] = {}
        uploads: list[tuple[str, pa.Table]] = []
        for (operator, bucket), digest in digests.items():
            name = _reusable(previous, operator, bucket, digest)
            if name is None:
                saved = CheckpointName(segment_id, partition, epoch, digest)
                name = state_name(operator, saved, self._new_token(bucket))
                uploads.append((name, state.buckets[operator][bucket]))
            objects.setdefault(operator, {})[bucket] = name
        written = self._upload(uploads)
        entry = Entry(
            segment_id,
            partition,
            epoch,
            watermark,
            operators,
            objects,
            chained_digest,
            engine_version(),
            STATE_FORMAT,
        )
        digest = _state_digest(entry, digests)
        name = entry_name(segment_id, partition, epoch, digest, uuid.uuid4().hex[:12])
        data = encode_entry(entry, self._uid)
        self._store.put(self._path(name), data)
        return EntryRef(epoch, name, digest, written + len(data))

    def load_entry(self, object_name: str) -> Entry:
        """The entry that an EntryRef names, compared with the digest in its name. Raises
        StoreError."""
        path = self._path(object_name)
        data = self._store.get(path)
        try:
            entry = decode_entry(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise StoreError(f"{self._store.url}: {path}: {e}") from e
        saved = parse_entry_name(object_name)
        if saved is not None and entry_digest(entry) != saved.digest:
            raise StoreError(f"{self._store.url}: {path} is damaged: its digest does not match")
        return entry

    def load(self, object_name: str) -> tuple[Entry, State]:
        """An entry and its state, all digests checked. Raises StoreError, StateMismatch."""
        entry = self.load_entry(object_name)
        if any(entry.objects.values()) and entry.state_format != STATE_FORMAT:
            raise StateMismatch(
                f"{object_name} has state of format {entry.state_format}, saved by engine "
                f"{entry.engine or 'unknown'}; this engine, {engine_version()}, reads format "
                f"{STATE_FORMAT}: run the image that saved it"
            )
        return entry, self.load_state(entry)

    def load_state(self, entry: Entry) -> State:
        """The state of an entry, which may come from `merge_entries`."""
        wanted = [
            (operator, bucket, name)
            for operator, buckets in entry.objects.items()
            for bucket, name in buckets.items()
        ]
        with ThreadPoolExecutor(PARALLEL) as pool:
            tables = list(pool.map(lambda w: self._load_bucket(w[2]), wanted))
        buckets: dict[str, dict[int, pa.Table]] = {}
        for (operator, bucket, name), table in zip(wanted, tables, strict=True):
            buckets.setdefault(operator, {})[bucket] = table
            self._digests[operator, bucket] = (table, _digest_of(name))
        return State(buckets)

    def _digest(self, state: State) -> dict[tuple[str, int], str]:
        """The digest of every bucket; tables that are identical to the last ones are not read."""
        known: dict[tuple[str, int], tuple[pa.Table, str]] = {}
        for operator in sorted(state.buckets):
            for bucket, table in sorted(state.buckets[operator].items()):
                before = self._digests.get((operator, bucket))
                same = before is not None and before[0] is table
                known[operator, bucket] = (
                    before if same and before is not None else (table, digest_table(table))
                )
        self._digests = known
        return {key: digest for key, (_, digest) in known.items()}

    def _new_token(self, bucket: int) -> str:
        """Unique for each bucket and each attempt to save, even with equal content."""
        return f"{self._token}{bucket:02x}{uuid.uuid4().hex[:8]}"

    def _upload(self, uploads: list[tuple[str, pa.Table]]) -> int:
        def upload(item: tuple[str, pa.Table]) -> int:
            name, table = item
            data = encode_table(table, self._uid)
            self._store.put(self._path(name), data)
            return len(data)

        if not uploads:
            return 0
        with ThreadPoolExecutor(PARALLEL) as pool:
            return sum(pool.map(upload, uploads))

    def _load_bucket(self, name: str) -> pa.Table:
        path = self._path(name)
        data = self._store.get(path)
        try:
            table = decode_table(data, self._uid)
        except (pa.ArrowInvalid, OSError, ValueError) as e:
            raise StoreError(f"{self._store.url}: {path} is damaged: {e}") from e
        if digest_table(table) != _digest_of(name):
            raise StoreError(f"{self._store.url}: {path} is damaged: its digest does not match")
        return table

    def _path(self, name: str) -> str:
        return f"{self._uid}/{name}"


def merge_entries(entries: Iterable[Entry], operator_ids: Iterable[str]) -> Entry | None:
    """Builds the entry of these operators from entries of other segments.

    The entries are of one partition number. Operators that none of them contains start empty and
    are not in the result's `operators`; None if that is all of them. Raises ValueError if the
    entries that are needed are of different epochs: together they are not a consistent state.
    """
    by_operator = {operator: e for e in entries for operator in e.operators}
    found = [operator for operator in operator_ids if operator in by_operator]
    sources = [by_operator[operator] for operator in found]
    if not sources:
        return None
    formats = {e.state_format for e in sources if any(e.objects.values())} or {STATE_FORMAT}
    if len(formats) > 1:
        raise ValueError(f"entries with different state formats: {sorted(formats)}")
    epochs = {(e.epoch, e.partition) for e in sources}
    if len(epochs) > 1:
        raise ValueError(f"entries of different epochs or partitions: {sorted(epochs)}")
    return Entry(
        segment="+".join(dict.fromkeys(e.segment for e in sources)),
        partition=sources[0].partition,
        epoch=sources[0].epoch,
        watermark=min(e.watermark for e in sources),
        operators=tuple(found),
        objects={o: e.objects[o] for o, e in zip(found, sources, strict=True) if o in e.objects},
        engine=", ".join(sorted({e.engine for e in sources})),
        state_format=formats.pop(),
    )


def encode_table(table: pa.Table, topology: str = "") -> bytes:
    """One bucket as an Arrow IPC file; its metadata has the topology and the state format."""
    metadata = {_TOPOLOGY: topology, _STATE_FORMAT: str(STATE_FORMAT)}
    table = table.combine_chunks().replace_schema_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_table(data: bytes, topology: str = "") -> pa.Table:
    """Raises ArrowInvalid, OSError, or ValueError if it belongs to another topology."""
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    owner = (table.schema.metadata or {}).get(_TOPOLOGY, b"").decode()
    if topology and owner and owner != topology:
        raise ValueError(f"it belongs to topology {owner}, not to {topology}")
    return table.replace_schema_metadata(None)


def _reusable(previous: Entry | None, operator: str, bucket: int, digest: str) -> str | None:
    if previous is None:
        return None
    buckets: Mapping[int, str] = previous.objects.get(operator, {})
    name = buckets.get(bucket)
    return name if name is not None and _digest_of(name) == digest else None


def _digest_of(name: str) -> str:
    saved = parse_state_name(name)
    if saved is None:
        raise StoreError(f"{name} is not the name of a state object")
    return saved.digest


def entry_digest(entry: Entry) -> str:
    """The digest in an entry's name, computed from the digests in the names of its objects."""
    return _state_digest(entry, _digests_of(entry))


def _digests_of(entry: Entry) -> dict[tuple[str, int], str]:
    """The digest of each bucket, from the name of its object."""
    return {
        (operator, bucket): _digest_of(name)
        for operator, buckets in entry.objects.items()
        for bucket, name in buckets.items()
    }


def _state_digest(entry: Entry, digests: Mapping[tuple[str, int], str]) -> str:
    """Equal for equal states at an epoch, for any replica and any object names."""
    content: Any = [
        [entry.segment, entry.partition, entry.epoch, entry.watermark, list(entry.operators)],
        [[operator, bucket, digest] for (operator, bucket), digest in sorted(digests.items())],
    ]
    return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()
