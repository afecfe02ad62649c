"""Saving and loading the state of one segment partition.

A checkpoint only writes the runs that are new since an earlier entry of the partition, packed into
few objects; runs that are in that entry's objects are referred to. The caller chooses an entry that
garbage collection keeps.

Design: docs/design/checkpoints.md#what-a-checkpoint-is, docs/design/checkpoints.md#what-is-reused.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa

from rekindle.checkpoints.codec import (
    CheckpointName,
    decode_entry,
    encode_entry,
    entry_name,
    parse_entry_name,
)
from rekindle.checkpoints.fetching import PARALLEL, PARALLEL_BYTES, Fetch
from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.run_objects import RunObjects
from rekindle.checkpoints.store import StateObjects, UnreadableObject
from rekindle.engine.model import State, operator_of
from rekindle.engine.state import layout
from rekindle.engine.state.operator import END_OF_PANES, OperatorState
from rekindle.engine.state.remote import AwaitedRun, RemoteRun, prioritize
from rekindle.engine.state.runs import Run, RunId
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.version import READABLE_STATE_FORMATS, STATE_FORMAT, engine_version
from rekindle.errors import StateMismatch, StoreError
from rekindle.objects import to_json
from rekindle.protocol import EntryRef

OBJECT_BYTES = 8 << 20
"""Size of an object's runs in memory; PARALLEL of them are in memory at a time."""
LIVE_SHARE = 0.1
"""If a smaller share of an object's rows is in runs that the state still has, these are written
again."""
MAX_REMEMBERED_ENTRIES = 64
"""Entries whose objects can be referred to."""

T = TypeVar("T")
Place = tuple[str, int]
"""Where a run is: the name of an object, and the number of the batch in it. (A `layout.Place` has
the object's number instead of its name.)"""


@dataclass(slots=True)
class _RemoteObject:
    """An object whose runs are fetched. Objects are fetched in the order of `first_pane`, the
    earliest live pane of their runs: its windows close first."""

    nbytes: int
    awaited: dict[int, AwaitedRun] = field(default_factory=dict)
    first_pane: int = END_OF_PANES


class StateStore:
    """The saved states of one topology. One instance saves for one task; `save` is called by one
    thread at a time, `load` by any."""

    def __init__(
        self,
        store: StateObjects,
        uid: str,
        files: RunFiles | None = None,
        fetch_bytes: int = PARALLEL_BYTES,
    ) -> None:
        """`files`: where restored state is written; None: it is in memory. `fetch_bytes`: total
        size of the objects that are fetched at a time."""
        self._store = store
        self._uid = uid
        self._fetch_bytes = fetch_bytes
        self._objects = RunObjects(store, uid, files)
        # By run: the names of the objects that contain it, each with the number of its batch.
        self._places: WeakKeyDictionary[RunId, dict[str, int]] = WeakKeyDictionary()
        self._object_facts: dict[str, layout.ObjectFacts] = {}  # of the objects in _places
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
        checkpoint = CheckpointName(segment_id, partition, epoch, "")
        places, written = self._upload(checkpoint, state, previous)
        entry = describe(
            checkpoint, watermark, operator_ids, state, places, self._object_facts, chained_digest
        )
        self._remember(epoch, entry.objects)
        self._forget_before(previous.epoch if previous is not None else -1)
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
        # In other formats, digests were computed from other contents.
        comparable = entry.state_format in READABLE_STATE_FORMATS
        if saved is not None and comparable and entry_digest(entry) != saved.digest:
            raise UnreadableObject(
                f"{self._store.url}: {path} is damaged: its digest does not match"
            )
        return entry

    def load(self, object_name: str) -> tuple[Entry, State]:
        """An entry and all of its state, all digests checked. Raises what `open` does, and
        StateLost, DiskFull."""
        entry, state, fetch = self.open(object_name)
        fetch.finish()
        return entry, state

    def open(self, object_name: str) -> tuple[Entry, State, Fetch]:
        """An entry and its state, whose runs are fetched when they are read, or by `Fetch`. Raises
        StoreError, StateMismatch; for an entry of an earlier release, all of which is read at once,
        also DiskFull."""
        entry = self.load_entry(object_name)
        if any(entry.objects.values()) and entry.state_format not in READABLE_STATE_FORMATS:
            formats = " and ".join(map(str, READABLE_STATE_FORMATS))
            raise StateMismatch(
                f"{object_name} has state of format {entry.state_format}, saved by engine "
                f"{entry.engine or 'unknown'}; this engine, {engine_version()}, reads formats "
                f"{formats}: run the image that saved it"
            )
        return entry, *self.open_state(entry)

    def open_state(self, entry: Entry) -> tuple[State, Fetch]:
        """As `open`, of an entry that may come from `merge_entries`."""
        fetch = Fetch(self._objects.fill, self._fetch_bytes)
        states: dict[str, OperatorState] = {}
        expected: dict[str, _RemoteObject] = {}
        for operator, names in entry.objects.items():
            with self._layout_errors(entry, operator):
                operator_layout = entry.layouts[operator]
                objects = layout.objects(operator_layout)
                if objects is None:
                    runs = self._read_at_once(operator_layout, names)
                else:
                    runs = self._remote_runs(operator_layout, names, objects, fetch, expected)
                states[operator] = layout.decode(operator_layout, runs)
        closing = sorted(expected.items(), key=lambda item: item[1].first_pane)
        fetch.expect({name: (remote.awaited, remote.nbytes) for name, remote in closing})
        self._remember(entry.epoch, entry.objects)
        return State(states), fetch

    def _remote_runs(
        self,
        operator_layout: Mapping[str, Any],
        names: Sequence[str],
        objects: Sequence[layout.ObjectFacts],
        fetch: Fetch,
        expected: dict[str, _RemoteObject],
    ) -> dict[layout.Place, Run]:
        runs: dict[layout.Place, Run] = {}
        self._object_facts.update(zip(names, objects, strict=True))
        for (number, batch), facts in layout.facts(operator_layout, objects):
            name = names[number]
            awaited = AwaitedRun(facts, fetch.fetcher(name))
            run = runs[number, batch] = RemoteRun(awaited)
            remote = expected.setdefault(name, _RemoteObject(objects[number].nbytes))
            remote.awaited[batch] = awaited
            remote.first_pane = min(remote.first_pane, facts.pane_range[0])
            self._record_places(name, {batch: run})
        return runs

    def _read_at_once(
        self, operator_layout: Mapping[str, Any], names: Sequence[str]
    ) -> dict[layout.Place, Run]:
        """The runs of an entry of an earlier release, which does not contain their sizes."""
        wanted: dict[int, set[int]] = {}
        for number, batch in layout.places(operator_layout):
            wanted.setdefault(number, set()).add(batch)
        with ThreadPoolExecutor(PARALLEL) as pool:
            read = list(pool.map(lambda n: self._objects.read(names[n], wanted[n]), wanted))
        runs: dict[layout.Place, Run] = {}
        for number, (facts, found) in zip(wanted, read, strict=True):
            self._object_facts[names[number]] = facts
            self._record_places(names[number], found)
            runs.update(((number, batch), run) for batch, run in found.items())
        return runs

    @contextmanager
    def _layout_errors(self, entry: Entry, operator: str) -> Iterator[None]:
        """Raises errors of decoding as StoreError."""
        try:
            yield
        except (LookupError, TypeError, ValueError, pa.ArrowInvalid) as e:
            at = f"epoch {entry.epoch} of {entry.segment}/{entry.partition}"
            raise StoreError(
                f"{self._store.url}: the entry of {at} does not describe the state of operator "
                f"{operator}: {e!r}"
            ) from e

    def _upload(
        self, checkpoint: CheckpointName, state: State, previous: Entry | None
    ) -> tuple[dict[RunId, Place], int]:
        """Write the runs that are not in objects of `previous`. Returns the places of all runs, and
        the number of bytes written."""
        places: dict[RunId, Place] = {}
        for operator, operator_state in state.operators.items():
            saved = previous.objects.get(operator, ()) if previous else ()
            places |= self._reusable_runs(operator_state, saved)
        packs = packed(state, places)
        prioritize(run for _, runs in packs for run in runs)
        with ThreadPoolExecutor(PARALLEL) as pool:
            done = list(pool.map(lambda p: self._objects.write(checkpoint, *p), packs))
        for (_, runs), (name, _) in zip(packs, done, strict=True):
            self._object_facts[name] = facts_of(runs)
            self._record_places(name, dict(enumerate(runs)))
            places.update((run.id, (name, batch)) for batch, run in enumerate(runs))
        return places, sum(size for _, size in done)

    def _reusable_runs(
        self, operator_state: OperatorState, previous: Sequence[str]
    ) -> dict[RunId, Place]:
        """Runs in these objects that may be referred to: enough rows of the object are in runs that
        the state still has."""
        names = frozenset(previous)
        found: dict[RunId, Place] = {}
        live: dict[str, int] = {}  # rows by object
        for run in operator_state.runs():
            places = self._places.get(run.id, {})
            for name in names.intersection(places):  # one, or none
                found[run.id] = (name, places[name])
                live[name] = live.get(name, 0) + run.rows
        kept = {
            name
            for name, rows in live.items()
            if rows >= LIVE_SHARE * self._object_facts[name].rows
        }
        return {run: place for run, place in found.items() if place[0] in kept}

    def _record_places(self, name: str, runs: Mapping[int, Run]) -> None:
        for batch, run in runs.items():
            self._places.setdefault(run.id, {})[name] = batch

    def _remember(self, epoch: int, objects: Mapping[str, Iterable[str]]) -> None:
        if len(self._entries) == MAX_REMEMBERED_ENTRIES:
            # Drop the newest before this one. The oldest is committed first, once sinks have its
            # epochs.
            self._entries.pop()
        self._entries.append((epoch, frozenset(n for names in objects.values() for n in names)))

    def _forget_before(self, epoch: int) -> None:
        """Forget the objects that only entries before `epoch` have, which no entry will refer to
        again. Later entries may yet be committed, for instance when a slow sink has reached
        them."""
        self._entries = [known for known in self._entries if known[0] >= epoch]
        kept = frozenset[str]().union(*(names for _, names in self._entries))
        self._object_facts = {
            name: facts for name, facts in self._object_facts.items() if name in kept
        }
        for run, places in list(self._places.items()):
            if not kept.issuperset(places):
                self._places[run] = {name: batch for name, batch in places.items() if name in kept}

    def _path(self, name: str) -> str:
        return f"{self._uid}/{name}"


def packed(state: State, places: Collection[RunId] = ()) -> list[tuple[str, list[Run]]]:
    """The runs that each object gets, with its operator; without those that have a place."""
    packs: list[tuple[str, list[Run]]] = []
    for operator, operator_state in sorted(state.operators.items()):
        size = OBJECT_BYTES
        for run in operator_state.runs():
            if run.id in places:
                continue
            if size >= OBJECT_BYTES or packs[-1][1][0].schema != run.schema:
                packs.append((operator, []))
                size = 0
            packs[-1][1].append(run)
            size += run.nbytes
    return packs


def facts_of(runs: Sequence[Run]) -> layout.ObjectFacts:
    """Of the object with these runs."""
    rows, nbytes = (sum(run.rows for run in runs), sum(run.nbytes for run in runs))
    return layout.ObjectFacts(rows, nbytes, runs[0].schema)


def describe(
    at: CheckpointName,
    watermark: int,
    operator_ids: Iterable[str],
    state: State,
    places: Mapping[RunId, Place],
    facts: Mapping[str, layout.ObjectFacts],
    chained_digest: str,
) -> Entry:
    """The entry of a state after an epoch. `facts`: of the objects with its runs, by name."""
    objects: dict[str, tuple[str, ...]] = {}
    layouts: dict[str, Mapping[str, Any]] = {}
    for operator, operator_state in sorted(state.operators.items()):
        if operator_state.is_new:
            continue
        names = list(dict.fromkeys(places[run.id][0] for run in operator_state.runs()))
        numbers = {name: number for number, name in enumerate(names)}

        def place(run: Run, numbers: Mapping[str, int] = numbers) -> layout.Place:
            name, batch = places[run.id]
            return numbers[name], batch

        objects[operator] = tuple(names)
        layouts[operator] = layout.encode(operator_state, place, [facts[name] for name in names])
    return Entry(
        at.segment,
        at.partition,
        at.epoch,
        watermark,
        tuple(operator_ids),
        objects,
        chained_digest,
        engine_version(),
        STATE_FORMAT,
        layouts,
    )


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
    if len(formats) > 1 and not formats.issubset(READABLE_STATE_FORMATS):
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
        objects=_of_tables({o: by_operator[o].objects for o in found}),
        engine=", ".join(sorted({e.engine for e in sources})),
        state_format=max(formats),
        layouts=_of_tables({o: by_operator[o].layouts for o in found}),
    )


def _of_tables(by_operator: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """What entries have of the tables of operators; by operator, that of its entry."""
    return {
        table: found
        for operator, of_entry in by_operator.items()
        for table, found in of_entry.items()
        if operator_of(table) == operator
    }


def entry_digest(entry: Entry) -> str:
    """The digest in an entry's name: of the state, however it is laid out, because replicas that
    save the same epoch are compared by it."""
    content: Any = [
        [entry.segment, entry.partition, entry.epoch, entry.watermark, list(entry.operators)],
        {o: each["digest"] for o, each in entry.layouts.items() if each.get("digest")},
    ]
    return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()
