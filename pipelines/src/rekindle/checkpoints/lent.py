"""A state that a task lends: the entry and the objects that a checkpoint of it would have.

Objects are encoded when they are read, without compression, so that a state costs nothing that
nobody reads. Their names have no digest; who sends them adds it.

Design: docs/design/lent-state.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from rekindle.checkpoints.codec import CheckpointName, encode_entry
from rekindle.checkpoints.run_objects import encode_runs
from rekindle.checkpoints.state import Place, describe, facts_of, packed
from rekindle.engine.model import State
from rekindle.engine.state.runs import Run, RunId
from rekindle.errors import ObjectMissing

_OPTIONS = pa.ipc.IpcWriteOptions()


class LentState:
    """The state after an epoch. `name`: of its entry; those of its objects begin with it."""

    def __init__(
        self,
        name: str,
        uid: str,
        at: CheckpointName,
        watermark: int,
        operator_ids: Iterable[str],
        state: State,
        chained_digest: str,
    ) -> None:
        self.name = name
        self._uid = uid
        self._objects: dict[str, list[Run]] = {}
        places: dict[RunId, Place] = {}
        for number, (_, runs) in enumerate(packed(state)):
            object_name = f"{name}/{number}"
            self._objects[object_name] = runs
            places.update((run.id, (object_name, batch)) for batch, run in enumerate(runs))
        facts = {object_name: facts_of(runs) for object_name, runs in self._objects.items()}
        entry = describe(at, watermark, operator_ids, state, places, facts, chained_digest)
        self._entry = encode_entry(entry, uid)

    def read(self, name: str) -> bytes:
        """The entry, or an object. Raises ObjectMissing."""
        if name == self.name:
            return self._entry
        if (runs := self._objects.get(name)) is None:
            raise ObjectMissing(f"{name} is not lent")
        return encode_runs([run.table for run in runs], self._uid, _OPTIONS)
