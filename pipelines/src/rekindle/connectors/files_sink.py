"""The sink `files`: one file for each (query, partition, epoch), created if absent, never replaced.

The file name contains the epoch, a search among the newest names gives the last one, and
put-if-absent makes replicas, replays and zombies harmless: the file that they would write exists
already, with the same rows. This holds for tasks of one definition of the query;
`rekindle.connectors.epoch_ranges` decides which definition may write an epoch. An epoch without
rows has no file.

Design: docs/design/exactly-once.md#sinks.
Paper: FlameStream (Trofimov et al. 2019), section V-A2.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.connectors.epoch_ranges import EPOCH_RANGES_FOLDER, Definition, EpochRanges
from rekindle.connectors.json_lines import same_lines
from rekindle.connectors.json_writer import UnencodableValue, encode_lines
from rekindle.connectors.sink import EpochSink, SinkContext
from rekindle.errors import SinkRefused
from rekindle.objects import (
    TEMP_DIRECTORY,
    ConditionIgnored,
    LocalObjects,
    Objects,
    Retry,
    StoreRootMissing,
    numbered_name,
    open_objects,
    to_json,
)
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.topology.kinds.files import FilesSinkSpec

_log = logging.getLogger(__name__)

MARKER = "_rekindle.json"
KEPT_BYTES = 16 << 20
"""Limit on encoded rows that are kept for files in conflict; if such a file is deleted, its rows
are written."""
KEPT_FILES = 100
"""Limit on files in conflict whose rows are kept, because each is read again every few seconds.
Further conflicts are only counted."""
SUFFIX = {"parquet": "parquet", "json": "jsonl"}
_NAME = re.compile(r"(?P<query>.+)-p(?P<partition>\d{3,})-e(?P<epoch>\d{12})\.(parquet|jsonl)")


def file_name(query: str, partition: int, epoch: int, format: str) -> str:
    """The name of one epoch's file, below the sink's URL."""
    return numbered_name(_stem(query, partition), epoch, f".{SUFFIX[format]}")


def _stem(query: str, partition: int) -> str:
    return f"{query}-p{partition:03d}-e"


class SinkFileName(NamedTuple):
    query: str
    partition: int
    epoch: int


def parse_name(name: str) -> SinkFileName | None:
    """None if it is not the name of a sink's file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return SinkFileName(match["query"], int(match["partition"]), int(match["epoch"]))


def is_of_sink(path: PurePath, query: str) -> bool:
    """Whether a file, by its path relative to the sink's URL, is one that a sink of the query has
    written, or has left unfinished."""
    if len(path.parts) > 1:
        return path.parts[0] in (EPOCH_RANGES_FOLDER, TEMP_DIRECTORY)
    found = parse_name(path.name)
    return path.name == MARKER or (found is not None and found.query == query)


def owner_of(directory: Path) -> str | None:
    """The uid of the topology that a directory of a sink belongs to; None if it says none."""
    try:
        owner = json.loads((directory / MARKER).read_bytes())["topologyUid"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(owner)


def open_sink(options: FilesSinkSpec, context: SinkContext) -> FilesSink:
    """See `rekindle.connectors.sink.OpenSink`."""
    return FilesSink(
        context.query,
        options,
        context.partition,
        context.topology_uid,
        context.schema,
        definition=context.definition,
    )


@dataclass(frozen=True, slots=True)
class _Conflict:
    """A file that exists with different rows; `data` is what was to be written."""

    name: str
    data: bytes


class FilesSink(EpochSink):
    """One partition of one query (see the module's docstring); not shared between threads."""

    def __init__(
        self,
        query: str,
        spec: FilesSinkSpec,
        partition: int,
        topology_uid: str,
        schema: pa.Schema,
        retry: Retry | None = None,
        definition: Definition | None = None,
    ) -> None:
        """Without a `definition`, nothing else may write to the URL (`rekindle run`)."""
        self._query = query
        self._format = spec.format
        self._partition = partition
        self._schema = schema
        self._retry = retry or Retry()
        self._conflicts: dict[int, _Conflict] = {}  # by epoch
        self._first_unkept_conflict = ""  # the name of a file
        self._unkept_conflicts = 0
        self._objects = claim(f"query {query}: the sink", spec.url, topology_uid, self._retry)
        self._ranges: EpochRanges | None = None
        if definition is not None:
            self._ranges = EpochRanges(self._objects, self._retry, query, definition)

    def first_epoch(self) -> int:
        try:
            return self._ranges.first_epoch() if self._ranges is not None else 0
        except OSError as e:
            raise self._refused("cannot be listed", e) from e

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        done = max(after, self.first_epoch() - 1)
        try:
            through = self._ranges.last_possible_epoch() if self._ranges is not None else None
            if through is None:
                return max(done, *self._listed())
            newest = self._retry.run(lambda: self._newest(done, through))
        except OSError as e:
            raise self._refused("cannot be listed", e) from e
        return done if newest is None else newest

    def _newest(self, after: int, through: int) -> int | None:
        stem, suffix = _stem(self._query, self._partition), f".{SUFFIX[self._format]}"
        return self._objects.newest_number(stem, suffix, after, through)

    def _listed(self) -> list[int]:
        """All epochs that have a file, and NO_EPOCH."""
        stem = _stem(self._query, self._partition)
        infos = self._retry.run(lambda: self._objects.list(stem))
        parsed = (parse_name(info.name) for info in infos)
        return [NO_EPOCH, *(p.epoch for p in parsed if p and p.query == self._query)]

    @property
    def conflict(self) -> str | None:
        count = len(self._conflicts) + self._unkept_conflicts
        if count == 0:
            return None
        if self._conflicts:
            name = self._conflicts[min(self._conflicts)].name
            then = "if it is wrong, delete it while this task runs, and the task writes its rows"
        else:
            name = self._first_unkept_conflict
            then = "this task does not keep its rows any more, so the file cannot be replaced"
        more = f" (and {count - 1} more)" if count > 1 else ""
        url = f"{self._objects.url}/{name}"
        return f"{url}{more} exists with rows that differ from those of this replica; {then}"

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        for epoch, found in list(self._conflicts.items()):
            if not may_write(epoch):
                continue
            try:
                if self._put_or_compare(found.name, epoch, found.data) is not None:
                    del self._conflicts[epoch]
                    _log.warning("query %s: %s no longer conflicts", self._query, found.name)
            except OSError as e:
                raise self._refused(f"cannot write epoch {epoch}", e) from e

    def write(self, batch: EpochBatch) -> bool:
        if batch.kind is not BatchKind.STABLE:
            raise ValueError(f"a sink takes stable epochs only, not {batch.kind} {batch.epoch}")
        if not batch.rows.num_rows:
            return False
        name = file_name(self._query, self._partition, batch.epoch, self._format)
        try:
            data = encode(batch.rows.cast(self._schema), self._format)
            created = self._put_or_compare(name, batch.epoch, data)
        except OSError as e:
            raise self._refused(f"cannot write epoch {batch.epoch}", e) from e
        except (UnencodableValue, pa.ArrowException) as e:
            raise self._refused(f"cannot store the rows of epoch {batch.epoch}", e) from e
        if created is None:
            self._remember_conflict(batch.epoch, name, data)
        return created is True

    def _put_or_compare(self, name: str, epoch: int, data: bytes) -> bool | None:
        """True if the file was created, False if it exists with these rows (written by another
        replica or an earlier boot), None if with different ones. Raises OSError, SinkRefused."""
        if self._ranges is not None:
            self._ranges.acquire(epoch)
        exists = self._retry.run(lambda: self._objects.exists(name))
        if not exists and self._retry.run(lambda: self._objects.put(name, data)):
            return True
        found = self._retry.run(lambda: self._objects.get(name))
        return False if found == data or _same_rows(found, data, self._format) else None

    def _remember_conflict(self, epoch: int, name: str, data: bytes) -> None:
        kept_bytes = sum(len(c.data) for c in self._conflicts.values())
        if kept_bytes + len(data) <= KEPT_BYTES and len(self._conflicts) < KEPT_FILES:
            self._conflicts[epoch] = _Conflict(name, data)
        else:
            self._first_unkept_conflict = self._first_unkept_conflict or name
            self._unkept_conflicts += 1
        _log.error("query %s: %s", self._query, self.conflict)

    def _refused(self, what: str, error: Exception) -> SinkRefused:
        url = self._objects.url
        hint = "; restore it, or restart the topology's tasks" if _is_root_missing(error) else ""
        return SinkRefused(f"query {self._query}: the sink {url} {what}: {error}{hint}")


def _same_rows(found: bytes, data: bytes, format: str) -> bool:
    """Whether two files have the same rows although their bytes differ, because of another version
    of pyarrow or the sign of a zero: rows are equal if their digests are."""
    try:
        if format == "json":
            return same_lines(found, data)
        tables = [pq.read_table(io.BytesIO(content)) for content in (found, data)]
    except (pa.ArrowException, OSError, ValueError):
        return False
    return digest_table(tables[0]) == digest_table(tables[1])


def _is_root_missing(error: Exception) -> bool:
    return isinstance(error, StoreRootMissing)


def claim(what: str, url: str, topology_uid: str, retry: Retry) -> Objects:
    """Open the directory of a topology's output; `what`: for messages. Raises SinkRefused if it
    belongs to another topology."""
    try:
        objects = open_objects(url)
        marker = retry.run(
            lambda: objects.open_root(MARKER, to_json({"topologyUid": topology_uid}))
        )
    except ConditionIgnored as e:
        raise SinkRefused(f"{what} {e}") from e
    except (OSError, ValueError, ImportError) as e:
        reason = getattr(e, "strerror", None) or e  # without the number of the error
        raise SinkRefused(
            f"{what} {url} cannot be opened: {reason}; check the URL, and that "
            "its directory can be created and written"
        ) from e
    try:
        owner = json.loads(marker)["topologyUid"]
    except (ValueError, KeyError, TypeError) as e:
        raise SinkRefused(
            f"{what}: {url}/{MARKER} was not written by Rekindle; use another url"
        ) from e
    if owner != topology_uid:
        raise SinkRefused(
            f"{what}: {url} belongs to the topology with uid {owner}, not {topology_uid}; "
            "use another url, or remove the old output if nobody needs it"
        )
    if isinstance(objects, LocalObjects):
        for directory in ("", EPOCH_RANGES_FOLDER):
            objects.remove_stale_temps(directory)
    return objects


def encode(rows: pa.Table, format: str) -> bytes:
    """The content of a file: equal rows give equal bytes with the same version of pyarrow. Raises
    UnencodableValue, ArrowException."""
    if format == "json":
        return encode_lines(rows)
    sink = io.BytesIO()
    pq.write_table(rows.combine_chunks(), sink, compression="zstd", version="2.6")
    return sink.getvalue()
