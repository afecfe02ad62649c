"""Manifests and entries as JSON, and the names of objects (see `rekindle.checkpoints.manifest`).

Pure. Names contain all that garbage collection needs to know of an object without reading it:

  manifests/<seq>.json
  entries/<segment id>/<partition>/<epoch>-<digest>-<token>.json
  state/<operator id>/<digest>-<segment id>-<partition>-<epoch>-<token>.arrow
  logs/<segment id>/<partition>/<replica>-<incarnation>/<file of an output log>
  logs/<segment id>/<partition>/shipped/<piece of an output log>  (`rekindle.checkpoints.shipped`)
  sources/<operator id of the source>.json
      the files that a source was first read from; never deleted
  cuts/<operator id of the source>/<partition>/<first epoch>.json
      what epochs of a live source contain

The digest of an entry is of its state, however that is laid out; of a state object, of its bytes.
The token is unique for each writer: equal content that is saved twice has two objects, so that a
new entry never refers to an old object that garbage collection is about to delete.

Design: docs/design/checkpoints.md#formats.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rekindle.checkpoints.manifest import (
    Entry,
    Gap,
    Manifest,
    QueryStart,
)
from rekindle.objects import to_json
from rekindle.protocol import EntryRef, TaskRef
from rekindle.topology.model import Slot, partition_of

FORMAT = 3
"""Of manifests and entries. Incremented when older releases would misread them, but not for an
additional field. Format 1 has neither topology, definitions nor the engine's version; up to format
2, entries have an object for each bucket, and no layouts, which say where in its objects an
operator's runs are."""
OLDEST_FORMAT = 1
CHECKSUM_FORMAT = 3
"""Since this format, entries have a checksum, and manifests may."""

LENT = "lent/"
"""Begin of the names of what a task lends (`checkpoints.lent`). Nothing in the store has it."""

T = TypeVar("T")

_MANIFEST = re.compile(r"manifests/(?P<seq>\d{12})\.json")
_ENTRY = re.compile(
    r"entries/(?P<segment>[^/]+)/(?P<partition>\d+)/(?P<epoch>\d{12})"
    r"-(?P<digest>[0-9a-f]+)-[0-9a-f]+\.json"
)
_STATE = re.compile(
    r"state/[^/]+/(?P<digest>[0-9a-f]+)-(?P<segment>[^/]+)-(?P<partition>\d+)"
    r"-(?P<epoch>\d{12})-[0-9a-f]+\.arrow"
)
_LOG = re.compile(
    r"logs/(?P<segment>[^/]+)/(?P<partition>\d+)/(?P<replica>\d+)-(?P<incarnation>\d+)/[^/]+"
)
_CUT = re.compile(r"(?P<chain>cuts/[^/]+/\d+/)(?P<first>\d{12})\.json")


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """The parts of the name of an entry or a state object."""

    segment: str
    partition: int
    epoch: int
    digest: str

    @property
    def key(self) -> str:
        """The key in Manifest.entries."""
        return f"{self.segment}/{self.partition}"


def manifest_name(seq: int) -> str:
    return f"manifests/{seq:012d}.json"


def manifest_seq(name: str) -> int | None:
    match = _MANIFEST.fullmatch(name)
    return int(match["seq"]) if match else None


def input_identity_name(source: str) -> str:
    """The object with the files that a source was first read from
    (`rekindle.connectors.input_identity`). `source`: its operator id."""
    return f"sources/{source}.json"


def cuts_prefix(source: str, partition: int) -> str:
    """Of the cut records of a partition of a live source; `source`: its operator id."""
    return f"cuts/{source}/{partition}/"


def cut_name(source: str, partition: int, first: int) -> str:
    """`first`: the first epoch that the record defines (`rekindle.connectors.cut_records`)."""
    return f"{cuts_prefix(source, partition)}{first:012d}.json"


def parse_cut_name(name: str) -> tuple[str, int] | None:
    """The prefix of a cut record, and the first epoch that it defines."""
    match = _CUT.fullmatch(name)
    return (match["chain"], int(match["first"])) if match else None


def entry_name(segment: str, partition: int, epoch: int, digest: str, token: str) -> str:
    return f"entries/{segment}/{partition}/{epoch:012d}-{digest}-{token}.json"


def state_name(operator: str, saved: CheckpointName, token: str) -> str:
    tail = f"{saved.segment}-{saved.partition}-{saved.epoch:012d}-{token}"
    return f"state/{operator}/{saved.digest}-{tail}.arrow"


def parse_entry_name(name: str) -> CheckpointName | None:
    return _checkpoint_name(_ENTRY.fullmatch(name))


def parse_state_name(name: str) -> CheckpointName | None:
    return _checkpoint_name(_STATE.fullmatch(name))


def digest_of(data: bytes) -> str:
    """The digest of a state object, in its name."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def log_prefix(task: TaskRef) -> str:
    """Begin of the names of spilled files of its output log."""
    return f"logs/{partition_of(task.slot).key}/{task.replica}-{task.incarnation}/"


def parse_log_name(name: str) -> TaskRef | None:
    """The task whose log a spilled file is of."""
    match = _LOG.fullmatch(name)
    if match is None:
        return None
    partition, replica, incarnation = map(int, match.group("partition", "replica", "incarnation"))
    return TaskRef.of(Slot(match["segment"], partition, replica), incarnation)


def _checkpoint_name(match: re.Match[str] | None) -> CheckpointName | None:
    if match is None:
        return None
    return CheckpointName(
        match["segment"], int(match["partition"]), int(match["epoch"]), match["digest"]
    )


def encode_manifest(manifest: Manifest, topology: str = "") -> bytes:
    """`topology` is the UID, here and below."""
    fields = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    entries = {key: [asdict(ref) for ref in refs] for key, refs in manifest.entries.items()}
    queries = {name: asdict(start) for name, start in manifest.queries.items()}
    content = {**_format_and_topology(topology), **fields, "entries": entries, "queries": queries}
    return to_json({**content, "checksum": checksum(content)})


def decode_manifest(data: bytes, topology: str = "") -> Manifest:
    """Raises ValueError if it is not a manifest, is damaged, has a format that this version cannot
    read, or belongs to another topology. Unknown fields are ignored."""
    fields = _fields(data, "manifest", topology)
    found = fields.pop("checksum", None)
    if fields["format"] >= CHECKSUM_FORMAT and found not in (None, checksum(fields)):
        raise ValueError("the manifest is damaged: its checksum does not match")
    entries = {
        key: tuple(_make(EntryRef, ref) for ref in refs) for key, refs in fields["entries"].items()
    }
    queries = {name: _query_start(start) for name, start in fields["queries"].items()}
    return _make(Manifest, {**fields, "entries": entries, "queries": queries})


def _query_start(fields: Mapping[str, Any]) -> QueryStart:
    gaps = tuple(_make(Gap, gap) for gap in fields.get("gaps", ()))
    return _make(QueryStart, {**fields, "gaps": gaps})


def encode_entry(entry: Entry, topology: str = "") -> bytes:
    fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
    content = {**_format_and_topology(topology), **fields}
    return to_json({**content, "checksum": checksum(content)})


def decode_entry(data: bytes, topology: str = "") -> Entry:
    """Raises ValueError like decode_manifest, or if the entry is damaged."""
    fields = _fields(data, "entry", topology)
    found = fields.pop("checksum", "")
    if fields["format"] >= CHECKSUM_FORMAT and found != checksum(fields):
        raise ValueError("the entry is damaged: its checksum does not match")
    objects = {  # up to format 2: by bucket
        operator: tuple(names.values() if isinstance(names, dict) else names)
        for operator, names in fields["objects"].items()
    }
    return _make(Entry, {**fields, "operators": tuple(fields["operators"]), "objects": objects})


def checksum(fields: Mapping[str, Any]) -> str:
    """Of all fields of an entry or a manifest, except the checksum."""
    return hashlib.blake2b(to_json(fields), digest_size=16).hexdigest()


def _format_and_topology(topology: str) -> dict[str, Any]:
    return {"format": FORMAT, "topology": topology}


def _fields(data: bytes, what: str, topology: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(data)
        found = int(fields["format"])
        owner = str(fields.get("topology") or topology)  # format 1 lacks it
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"this is not a checkpoint {what}: {data[:80]!r}") from e
    if not OLDEST_FORMAT <= found <= FORMAT:
        reads = f"{OLDEST_FORMAT} to {FORMAT}"
        raise ValueError(f"checkpoint {what} has format {found}; this version reads {reads}")
    if topology and owner != topology:
        raise ValueError(f"checkpoint {what} belongs to topology {owner}, not to {topology}")
    return fields


def _make(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of a dataclass. Unknown fields are ignored: a newer release may write more."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in known})
