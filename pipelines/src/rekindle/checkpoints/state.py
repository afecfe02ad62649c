"""Saving and loading the state of one segment partition.

A checkpoint only writes the runs that are new since an earlier entry of the partition, packed into
few objects; runs that are in that entry's objects are referred to. The caller chooses an entry that
garbage collection keeps.

Design: docs/design/checkpoints.md#what-a-checkpoint-is, docs/design/checkpoints.md#what-is-reused.
"""

from __future__ import annotations

import hashlib
import io
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

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
from rekindle.checkpoints.store import Store, UnreadableObject
from rekindle.engine.model import State
from rekindle.engine.state import layout
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import Run, RunId
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.version import STATE_FORMAT, engine_version
from rekindle.errors import StateMismatch, StoreError
from rekindle.objects import to_json

PARALLEL = 4
OBJECT_BYTES = 8 << 20
"""Size of an object's runs in memory; PARALLEL of them are in memory at a time."""
LIVE_SHARE = 0.1
"""If a smaller share of an object's rows is live, its runs are written again."""
REMEMBERED = 64
"""Entries whose objects can be referred to."""
_TOPOLOGY, _STATE_FORMAT = b"rekindle.topology", b"rekindle.stateFormat"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")

_Place = tuple[str, int]
"""The name of an object, and the number of a batch."""


class StateStore:
    """The saved states of one topology. One instance saves for one task; `save` is called by one
    thread at a time, `load` by any."""

    def __init__(self, store: Store, uid: str, files: RunFiles | None = None) -> None:
        """`files`: for loaded state; without it, loaded state is in memory."""
        self._store = store
        self._uid = uid
        self._files = files
        self._token = uuid.uuid4().hex[:12]
        self._places: WeakKeyDictionary[RunId, dict[str, int]] = WeakKeyDictionary()
        self._rows: dict[str, int] = {}  # of the objects in _places
        self._entries: list[tuple[int, frozenset[str]]] = []

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
        """Save the state after `epoch`; `previous` is this partition's entry whose objects may be
        referred to: the newest committed one, or one that may yet be committed. `bytes` of the
        result is what was written. Raises StoreError; then earlier checkpoints are unchanged, and
        the call may be repeated."""
        saved = CheckpointName(segment_id, partition, epoch, "")
        places, written = self._upload(saved, state, previous)
        names: dict[str, tuple[str, ...]] = {}
        layouts: dict[str, Mapping[str, Any]] = {}
        for operator, states in sorted(state.operators.items()):
            if states.digest or any(True for _ in states.runs()):
                names[operator], layouts[operator] = _describe(states, places)
        self._remember(epoch, names)
        self._forget_before(previous.epoch if previous is not None else -1)
        entry = Entry(
            segment_id,
            partition,
            epoch,
            watermark,
            tuple(operator_ids),
            names,
            chained_digest,
            engine_version(),
            STATE_FORMAT,
            layouts,
        )
        digest = entry_digest(entry)
        name = entry_name(segment_id, partition, epoch, digest, uuid.uuid4().hex[:12])
        data = encode_entry(entry, self._uid)
        self._store.put(self._path(name), data)
        return EntryRef(epoch, name, digest, written + len(data))

    def load_entry(self, object_name: str) -> Entry:
        """The entry that an EntryRef names, compared with the digest in its name. Raises
        ObjectMissing, UnreadableObject, StoreError."""
        path = self._path(object_name)
        data = self._store.get(path)
        try:
            entry = decode_entry(data, self._uid)
        except (ValueError, TypeError, KeyError) as e:
            raise UnreadableObject(f"{self._store.url}: {path}: {e}") from e
        saved = parse_entry_name(object_name)
        known = entry.state_format == STATE_FORMAT  # the digests of others covered something else
        if saved is not None and known and entry_digest(entry) != saved.digest:
            raise UnreadableObject(
                f"{self._store.url}: {path} is damaged: its digest does not match"
            )
        return entry

    def load(self, object_name: str) -> tuple[Entry, State]:
        """An entry and its state, all digests checked. Raises StoreError, StateMismatch,
        DiskFull."""
        entry = self.load_entry(object_name)
        if any(entry.objects.values()) and entry.state_format != STATE_FORMAT:
            raise StateMismatch(
                f"{object_name} has state of format {entry.state_format}, saved by engine "
                f"{entry.engine or 'unknown'}; this engine, {engine_version()}, reads format "
                f"{STATE_FORMAT}: run the image that saved it"
            )
        return entry, self.load_state(entry)

    def load_state(self, entry: Entry) -> State:
        """The state of an entry, which may come from `merge_entries`. Raises StoreError,
        DiskFull."""
        wanted: dict[str, set[int]] = {}
        for operator, names in entry.objects.items():
            with self._describing(entry, operator):
                for at, batch in layout.places(entry.layouts[operator]):
                    wanted.setdefault(names[at], set()).add(batch)
        with ThreadPoolExecutor(PARALLEL) as pool:
            loaded = dict(
                zip(wanted, pool.map(self._load_runs, wanted, wanted.values()), strict=True)
            )
        states: dict[str, OperatorState] = {}
        for operator, names in entry.objects.items():
            objects = ((at, loaded[name][0]) for at, name in enumerate(names) if name in loaded)
            runs = {(at, batch): run for at, found in objects for batch, run in found.items()}
            with self._describing(entry, operator):
                states[operator] = layout.decode(entry.layouts[operator], runs)
        for name, (found, rows) in loaded.items():
            self._place(name, found, rows)
        self._remember(entry.epoch, entry.objects)
        return State(states)

    @contextmanager
    def _describing(self, entry: Entry, operator: str) -> Iterator[None]:
        try:
            yield
        except (LookupError, TypeError, ValueError) as e:
            at = f"epoch {entry.epoch} of {entry.segment}/{entry.partition}"
            raise StoreError(
                f"{self._store.url}: the entry of {at} does not describe the state of operator "
                f"{operator}: {e!r}"
            ) from e

    def _upload(
        self, saved: CheckpointName, state: State, previous: Entry | None
    ) -> tuple[dict[RunId, _Place], int]:
        """Write all runs that cannot be referred to. Returns where all runs are, and the bytes."""
        places: dict[RunId, _Place] = {}
        packs: list[tuple[str, list[Run]]] = []
        for operator, states in sorted(state.operators.items()):
            usable = self._usable(states, previous.objects.get(operator, ()) if previous else ())
            size = OBJECT_BYTES
            for run in states.runs():
                if run.id in usable:
                    places[run.id] = usable[run.id]
                    continue
                if size >= OBJECT_BYTES or packs[-1][1][0].table.schema != run.table.schema:
                    packs.append((operator, []))
                    size = 0
                packs[-1][1].append(run)
                size += run.nbytes
        with ThreadPoolExecutor(PARALLEL) as pool:
            done = list(pool.map(lambda p: self._write(saved, *p), packs))
        for (_, runs), (name, _) in zip(packs, done, strict=True):
            self._place(name, dict(enumerate(runs)), sum(run.rows for run in runs))
            places.update((run.id, (name, batch)) for batch, run in enumerate(runs))
        return places, sum(size for _, size in done)

    def _usable(self, states: OperatorState, previous: Sequence[str]) -> dict[RunId, _Place]:
        """Runs in these objects that may be referred to: enough of their rows are live."""
        names = frozenset(previous)
        found: dict[RunId, _Place] = {}
        live: dict[str, int] = {}
        for run in states.runs():
            places = self._places.get(run.id, {})
            for name in names.intersection(places):  # one, or none
                found[run.id] = (name, places[name])
                live[name] = live.get(name, 0) + run.rows
        kept = {name for name, rows in live.items() if rows >= LIVE_SHARE * self._rows[name]}
        return {run: place for run, place in found.items() if place[0] in kept}

    def _write(self, saved: CheckpointName, operator: str, runs: list[Run]) -> tuple[str, int]:
        data = encode_runs([run.table for run in runs], self._uid)
        named = CheckpointName(saved.segment, saved.partition, saved.epoch, _digest(data))
        # Unique for each attempt to save, even with equal content.
        name = state_name(operator, named, f"{self._token}{uuid.uuid4().hex[:10]}")
        self._store.put(self._path(name), data)
        return name, len(data)

    def _place(self, name: str, runs: Mapping[int, Run], rows: int) -> None:
        """`rows`: of all runs in the object."""
        self._rows[name] = rows
        for batch, run in runs.items():
            self._places.setdefault(run.id, {})[name] = batch

    def _remember(self, epoch: int, objects: Mapping[str, Iterable[str]]) -> None:
        if len(self._entries) == REMEMBERED:
            self._entries.pop()  # not the oldest, which slow sinks will reach first
        self._entries.append((epoch, frozenset(n for names in objects.values() for n in names)))

    def _forget_before(self, epoch: int) -> None:
        """Forget the objects that only entries before `epoch` have: nothing of these is referred to
        again. Entries after it may be committed later, for instance when a slow sink has reached
        them."""
        self._entries = [known for known in self._entries if known[0] >= epoch]
        kept = frozenset[str]().union(*(names for _, names in self._entries))
        self._rows = {name: rows for name, rows in self._rows.items() if name in kept}
        for run, places in list(self._places.items()):
            if not kept.issuperset(places):
                self._places[run] = {name: at for name, at in places.items() if name in kept}

    def _load_runs(self, name: str, batches: Set[int]) -> tuple[dict[int, Run], int]:
        """The runs of some batches of an object, and the number of all its rows."""
        path = self._path(name)
        data = self._store.get(path)
        if _digest(data) != _digest_of(name):
            raise StoreError(f"{self._store.url}: {path} is damaged: its digest does not match")
        try:
            tables = decode_runs(data, self._uid)
        except (pa.ArrowInvalid, OSError, ValueError) as e:
            raise StoreError(f"{self._store.url}: {path} is damaged: {e}") from e
        runs = {batch: Run(table) for batch, table in enumerate(tables) if batch in batches}
        if self._files is not None and runs:
            moved = self._files.write(tables[0].schema, list(runs.values()))
            runs = dict(zip(runs, moved, strict=True))
        return runs, sum(table.num_rows for table in tables)

    def _path(self, name: str) -> str:
        return f"{self._uid}/{name}"


def _describe(
    states: OperatorState, places: Mapping[RunId, _Place]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The objects that have the runs of a state, and its layout."""
    names = list(dict.fromkeys(places[run.id][0] for run in states.runs()))
    numbers = {name: number for number, name in enumerate(names)}

    def place(run: Run) -> layout.Place:
        name, batch = places[run.id]
        return numbers[name], batch

    return tuple(names), layout.encode(states, place)


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
        layouts={o: e.layouts[o] for o, e in zip(found, sources, strict=True) if o in e.layouts},
    )


def encode_runs(tables: Sequence[pa.Table], topology: str = "") -> bytes:
    """Runs of one schema as an Arrow IPC file, a batch each; its metadata has the topology and the
    state format."""
    metadata = {_TOPOLOGY: topology, _STATE_FORMAT: str(STATE_FORMAT)}
    schema = tables[0].schema.with_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=_OPTIONS) as writer:
        for table in tables:
            (batch,) = table.replace_schema_metadata(metadata).combine_chunks().to_batches()
            writer.write_batch(batch)
    return sink.getvalue()


def decode_runs(data: bytes, topology: str = "") -> list[pa.Table]:
    """Raises ArrowInvalid, OSError, or ValueError if it belongs to another topology."""
    reader = pa.ipc.open_file(pa.BufferReader(data))
    owner = (reader.schema.metadata or {}).get(_TOPOLOGY, b"").decode()
    if topology and owner and owner != topology:
        raise ValueError(f"it belongs to topology {owner}, not to {topology}")
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return [pa.Table.from_batches([b]).replace_schema_metadata(None) for b in batches]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_of(name: str) -> str:
    saved = parse_state_name(name)
    if saved is None:
        raise StoreError(f"{name} is not the name of a state object")
    return saved.digest


def entry_digest(entry: Entry) -> str:
    """The digest in an entry's name: of the state, however it is laid out, because replicas that
    save the same epoch are compared by it."""
    content: Any = [
        [entry.segment, entry.partition, entry.epoch, entry.watermark, list(entry.operators)],
        {o: of["digest"] for o, of in entry.layouts.items() if of.get("digest")},
    ]
    return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()
