"""Finds declared fields that no object of a JSON-lines file has, and raises an error for them.

A misspelt name would be NULL in every row. A field whose parent is always NULL is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rekindle.errors import SchemaMismatch
from rekindle.topology.problems import did_you_mean

Path = tuple[str, ...]
"""Names from a column down through structs and arrays of structs."""


@dataclass(slots=True)
class DeclaredFields:
    """Tracks which declared fields have had a value; the file is searched for the others at the
    end."""

    schema: pa.Schema
    _unseen: set[Path] = field(default_factory=set)
    _rows: int = 0

    def __post_init__(self) -> None:
        self._unseen = {path for f in self.schema for path in _paths(f, ())}

    def observe(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        if not self._unseen:
            return
        for at, f in enumerate(self.schema):
            self._observe(batch.column(at), (f.name,))

    def _observe(self, column: pa.Array, path: Path) -> None:
        if column.null_count < len(column):
            self._unseen.discard(path)
        if not any(unseen[: len(path)] == path for unseen in self._unseen):
            return
        if pa.types.is_list(column.type):
            column = _items(column)
        if pa.types.is_struct(column.type):
            for f, child in zip(column.type, column.flatten(), strict=True):
                self._observe(child, (*path, f.name))

    def never_seen(self) -> set[Path]:
        """Fields that never had a value although their parent had one."""
        if not self._rows:
            return set()
        return {p for p in self._unseen if len(p) == 1 or p[:-1] not in self._unseen}


def _items(column: pa.Array) -> pa.Array:
    while pa.types.is_list(column.type):
        column = column.flatten()
    return column


def _paths(f: pa.Field, above: Path) -> Iterator[Path]:
    path = (*above, f.name)
    yield path
    data_type = f.type
    while pa.types.is_list(data_type):
        data_type = data_type.value_type
    if pa.types.is_struct(data_type):
        for inner in data_type:
            yield from _paths(inner, path)


def require_in_some_object(
    rows: Iterable[Mapping[str, Any]], absent: set[Path], where: str
) -> None:
    """Check that each field is in at least one object (null counts): otherwise its name is wrong.
    Raises SchemaMismatch."""
    missing = set(absent)
    others: dict[Path, set[str]] = {}
    for row in rows:
        for path in list(missing):
            for parent in _parents(row, path[:-1]):
                others.setdefault(path[:-1], set()).update(parent)
                if path[-1] in parent:
                    missing.discard(path)
        if not missing:
            return
    missing = {path for path in missing if path[:-1] in others}
    if not missing:
        return
    above = min(path[:-1] for path in missing)
    names = sorted(path[-1] for path in missing if path[:-1] == above)
    dotted = ", ".join(".".join((*above, name)) for name in names)
    found = ", ".join(".".join((*above, name)) for name in sorted(others[above])) or "nothing"
    hint = did_you_mean(names[0], others[above])
    raise SchemaMismatch(
        f"{where}: no row has a field {dotted}; the file has {found}: name its fields in the "
        f"source's schema{f' ({hint})' if hint else ''}"
    )


def _parents(value: Any, path: Path) -> Iterator[dict[str, Any]]:
    """The objects that a path leads to, through arrays."""
    if isinstance(value, list):
        for item in value:
            yield from _parents(item, path)
    elif isinstance(value, dict):
        if path:
            yield from _parents(value.get(path[0]), path[1:])
        else:
            yield value
