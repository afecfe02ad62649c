"""Objects with runs of an operator: an Arrow IPC file, a batch for each run, compressed.

Design: docs/design/checkpoints.md#formats.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence, Set
from dataclasses import replace

import pyarrow as pa

from rekindle.checkpoints.codec import (
    LENT,
    CheckpointName,
    digest_of,
    parse_state_name,
    state_name,
)
from rekindle.checkpoints.fetching import AwaitedRuns
from rekindle.checkpoints.store import StateObjects, UnreadableObject
from rekindle.engine.state.layout import ObjectFacts
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.version import STATE_FORMAT
from rekindle.errors import StoreError

_TOPOLOGY, _STATE_FORMAT = b"rekindle.topology", b"rekindle.stateFormat"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


class RunObjects:
    """Of one topology. Safe for many threads."""

    def __init__(self, store: StateObjects, uid: str, files: RunFiles | None) -> None:
        """`files`: for runs that are read; without it, they are in memory."""
        self._store = store
        self._uid = uid
        self._files = files
        self._token = uuid.uuid4().hex[:12]  # of this process, in the names of objects

    def write(self, saved: CheckpointName, operator: str, runs: Sequence[Run]) -> tuple[str, int]:
        """Runs of one schema, of the partition and epoch that `saved` names. Returns name and
        size of the object. Raises StoreError."""
        data = encode_runs([run.table for run in runs], self._uid)
        named = replace(saved, digest=digest_of(data))
        # Unique for each attempt to save, even with equal content.
        name = state_name(operator, named, f"{self._token}{uuid.uuid4().hex[:10]}")
        self._store.put(f"{self._uid}/{name}", data)
        return name, len(data)

    def read(self, name: str, batches: Set[int]) -> tuple[ObjectFacts, dict[int, Run]]:
        """The runs of these batches of the object. Raises ObjectMissing, UnreadableObject,
        StoreError, DiskFull."""
        path = f"{self._uid}/{name}"
        where = f"{self._store.url}: {path}"
        data = self._store.read(path)
        digest = _named_digest(name)
        if digest is not None and digest_of(data) != digest:
            raise UnreadableObject(f"{where} is damaged: its digest does not match")
        try:
            tables = decode_runs(data, self._uid)
        except (pa.ArrowInvalid, OSError, ValueError) as e:
            raise UnreadableObject(f"{where} is damaged: {e}") from e
        schema = tables[0].schema
        facts = ObjectFacts(
            sum(table.num_rows for table in tables), sum(t.nbytes for t in tables), schema
        )
        runs = {batch: Run(table) for batch, table in enumerate(tables) if batch in batches}
        if self._files is not None and runs:
            in_files = self._files.write(schema, list(runs.values()))
            runs = dict(zip(runs, in_files, strict=True))
        return facts, runs

    def fill(self, name: str, awaited: AwaitedRuns) -> None:
        """Read an object, and put its runs in the place of those of a lazy restore that are to be
        fetched. Raises as `read`."""
        _, runs = self.read(name, awaited.keys())
        for batch, awaited_run in awaited.items():
            run, expected = runs.get(batch), awaited_run.facts
            if run is None or (run.rows, run.schema) != (expected.rows, expected.schema):
                raise UnreadableObject(
                    f"{self._store.url}: {self._uid}/{name} is not what its entry describes: "
                    f"batch {batch} should have {expected.rows} rows"
                )
        for batch, awaited_run in awaited.items():
            awaited_run.arrive(runs[batch])


def encode_runs(
    tables: Sequence[pa.Table],
    topology_uid: str = "",
    options: pa.ipc.IpcWriteOptions = _OPTIONS,
) -> bytes:
    """Runs of one schema as an Arrow IPC file, a batch each; its metadata has the topology and the
    state format."""
    metadata = {_TOPOLOGY: topology_uid, _STATE_FORMAT: str(STATE_FORMAT)}
    schema = tables[0].schema.with_metadata(metadata)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for table in tables:
            (batch,) = table.replace_schema_metadata(metadata).combine_chunks().to_batches()
            writer.write_batch(batch)
    return sink.getvalue()


def decode_runs(data: bytes, topology_uid: str = "") -> list[pa.Table]:
    """Raises ArrowInvalid, OSError, or ValueError if it belongs to another topology."""
    reader = pa.ipc.open_file(pa.BufferReader(data))
    owner = (reader.schema.metadata or {}).get(_TOPOLOGY, b"").decode()
    if topology_uid and owner and owner != topology_uid:
        raise ValueError(f"it belongs to topology {owner}, not to {topology_uid}")
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    return [pa.Table.from_batches([b]).replace_schema_metadata(None) for b in batches]


def _named_digest(name: str) -> str | None:
    """None of an object that a task lends: the response has its digest."""
    if name.startswith(LENT):
        return None
    saved = parse_state_name(name)
    if saved is None:
        raise StoreError(f"{name} is not the name of a state object")
    return saved.digest
