"""The cut records of one partition of a live source, as objects of the checkpoint store.

What is in them is in `rekindle.connectors.cut_records`.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

from rekindle.checkpoints.codec import cut_name, cuts_prefix, parse_cut_name
from rekindle.checkpoints.store import Store
from rekindle.errors import ObjectMissing


class CutObjects:
    """All methods raise StoreError."""

    def __init__(self, store: Store, uid: str, source: str, partition: int) -> None:
        """`source`: its operator id."""
        self._store = store
        self._uid, self._source, self._partition = uid, source, partition

    def list(self) -> list[int]:
        """The first epoch of each record, ascending."""
        begin = len(self._uid) + 1
        prefix = f"{self._uid}/{cuts_prefix(self._source, self._partition)}"
        names = (parse_cut_name(info.name[begin:]) for info in self._store.list(prefix))
        return [name[1] for name in names if name is not None]

    def read(self, first: int) -> bytes | None:
        """None if it does not exist."""
        try:
            return self._store.read(self._name(first))
        except ObjectMissing:
            return None

    def create(self, first: int, data: bytes) -> bool:
        """False if it exists."""
        return self._store.put(self._name(first), data)

    def _name(self, first: int) -> str:
        return f"{self._uid}/{cut_name(self._source, self._partition, first)}"
