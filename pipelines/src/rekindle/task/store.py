"""The checkpoint store for one task: its restore point, its entries, spilled log files.

The store is opened when it is first needed and never created: the coordinator has written the first
manifest before any task starts, so a store that is missing is an outage.

Design: docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging

from rekindle.checkpoints.codec import CheckpointName, input_identity_name, log_prefix
from rekindle.checkpoints.cuts import CutObjects
from rekindle.checkpoints.fetching import Fetch
from rekindle.checkpoints.lent import LentState
from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.shipped import (
    Piece,
    is_content_of,
    parse_piece_name,
    piece_name,
    pieces_prefix,
)
from rekindle.checkpoints.state import StateStore
from rekindle.checkpoints.store import StateObjects, Store
from rekindle.connectors.input_identity import (
    InputFile,
    decode_input_files,
    difference,
    encode_input_files,
)
from rekindle.engine.model import State, operator_of
from rekindle.engine.version import engine_version
from rekindle.errors import ObjectMissing, SchemaMismatch, StoreError
from rekindle.protocol import Endpoint, EntryRef, RestorePoint
from rekindle.streams.digest import chained_digest_from
from rekindle.streams.epochs import NO_WATERMARK
from rekindle.task.config import TaskConfig
from rekindle.task.lending import LenderStore
from rekindle.task.state import TaskState
from rekindle.topology.model import Node, partition_of

_log = logging.getLogger(__name__)


class TaskStore:
    """Implements `task.saver.EntryStore`, `streams.log.Spill` and `task.log_shipper.PieceStore`.
    Raises StoreError while the store is missing."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._operators = config.operator_ids
        self._store: Store | None = None
        self._states: StateStore | None = None
        self._lender: StateStore | None = None
        self._key = partition_of(config.ref.slot).key
        self.spill_prefix = f"{config.uid}/{log_prefix(config.ref)}"

    def restore(self, point: RestorePoint) -> tuple[TaskState, Fetch | None]:
        """State and watermark at a restore point; empty if it has no object. The state's runs are
        fetched in the background, from the checkpoint store or from the partner that lends them.
        Raises StoreError, StateMismatch, DiskFull."""
        if point.object is None:
            chained_digest = chained_digest_from(point.epoch)
            return TaskState(point.epoch, NO_WATERMARK, State(), chained_digest), None
        lender = point.lender
        states = self._open_states() if lender is None else self._states_of(lender)
        entry, saved, fetch = states.open(point.object)
        if entry.engine != engine_version():
            _log.warning(
                "state saved by engine %s is restored by engine %s",
                entry.engine,
                engine_version(),
            )
        own = {t: s for t, s in saved.operators.items() if operator_of(t) in self._operators}
        chained_digest = entry.chain or chained_digest_from(point.epoch)
        fetch.start()
        return TaskState(point.epoch, entry.watermark, State(own), chained_digest), fetch

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef:
        return self._open_states().save(
            self._config.segment.id,
            self._config.ref.partition,
            state.epoch,
            state.watermark,
            self._operators,
            state.operators,
            previous,
            state.chained_digest,
        )

    def lent_state(self, name: str, state: TaskState) -> LentState:
        """The objects of a state that partners may read, instead of from the store."""
        at = CheckpointName(self._config.segment.id, self._config.ref.partition, state.epoch, "")
        return LentState(
            name,
            self._config.uid,
            at,
            state.watermark,
            self._operators,
            state.operators,
            state.chained_digest,
        )

    def load_entry(self, name: str) -> Entry:
        return self._open_states().load_entry(name)

    def require_same_input(self, source: Node, found: tuple[InputFile, ...]) -> None:
        """Record the input of a source, or compare it with the recorded one. Raises SchemaMismatch,
        StoreError."""
        if not found:
            return
        name = f"{self._config.uid}/{input_identity_name(source.id)}"
        if self._open_store().put(name, encode_input_files(found)):
            return
        try:
            recorded = decode_input_files(self._open_store().get(name))
        except ValueError as error:
            raise StoreError(f"{self._open_store().url}: {name}: {error}") from error
        if (changed := difference(recorded, found)) is not None:
            raise SchemaMismatch(
                f"source {source.name}: {changed} since the topology first read its input, so "
                "earlier epochs could not be computed again. Restore the original files, or read "
                "the new ones with a source of another name"
            )

    def cuts(self, source: Node, partition: int) -> CutObjects:
        """The cut records of a partition of a live source. Raises StoreError."""
        return CutObjects(self._open_store(), self._config.uid, source.id, partition)

    def put(self, name: str, data: bytes) -> None:
        self._open_store().put(name, data)

    def get(self, name: str) -> bytes:
        """The content of a spilled or shipped log file. Raises ObjectMissing if it does not exist
        any more, StoreError. A shipped one that is not what its name says is deleted, if that is
        possible, so that no other task counts on it."""
        store = self._open_store()
        data = store.read(name)
        if parse_piece_name(name) is None or is_content_of(name, data):
            return data
        if is_content_of(name, again := store.read(name)):
            return again
        try:
            store.delete(name)
        except StoreError as error:
            raise ObjectMissing(f"{store.url}: {name} is damaged ({error})") from error
        raise ObjectMissing(f"{store.url}: {name} was damaged, and is deleted")

    def pieces(self) -> list[Piece]:
        """Of the partition's output log, in the store."""
        listed = self._open_store().list(f"{self._config.uid}/{pieces_prefix(self._key)}")
        found = ((parse_piece_name(info.name), info.bytes) for info in listed)
        return [parsed[1] for parsed, size in found if parsed and parsed[1].bytes == size]

    def put_piece(self, piece: Piece, data: bytes) -> None:
        name = self.piece_object(piece)
        if not self._open_store().put(name, data):
            self.get(name)  # what is damaged is deleted, and put by the next attempt

    def piece_object(self, piece: Piece) -> str:
        return f"{self._config.uid}/{piece_name(self._key, piece)}"

    def delete(self, name: str) -> None:
        self._open_store().delete(name)

    def _open_store(self) -> Store:
        if self._store is None:
            self._store = Store(self._config.topology.spec.checkpoint.store, create=False)
        return self._store

    def _open_states(self) -> StateStore:
        if self._states is None:
            self._states = self._states_in(self._open_store())
        return self._states

    def _states_of(self, lender: Endpoint) -> StateStore:
        if self._lender is None:  # kept over attempts: it knows since when the lender is silent
            self._lender = self._states_in(LenderStore(lender, self._config.identity))
        return self._lender

    def _states_in(self, store: StateObjects) -> StateStore:
        config = self._config
        return StateStore(store, config.uid, config.run_files, config.memory.fetch_bytes)
