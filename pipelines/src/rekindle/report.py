"""The report in `status.dataPlane`: the coordinator writes it, operator and command line read it.
Pure.

In the JSON a field without a default is always there; any other one is left out while it has its
default, and so is None. What is missing there, or cannot be parsed, is the default, or else the
empty value of the type: a coordinator of another version must not stop recovery.

Design: docs/design/coordinator.md#report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from rekindle.identity import UNREPORTED_STREAM_PROTOCOL
from rekindle.protocol import ConsistencyState, TaskPhase

_JSON_NAME = "json name"  # of a field whose name in the JSON is another one


@dataclass(frozen=True, slots=True)
class TaskReport:
    slot: str  # its key
    incarnation: int
    phase: TaskPhase | None  # None: one of another version
    suspected: bool
    pod: str = ""  # its name
    # By the coordinator's clock, RFC 3339: it tells one silence from the next.
    suspected_since: str = ""
    # How long it had been silent when the coordinator noticed it.
    silent_s: float = field(default=0.0, metadata={_JSON_NAME: "silentSeconds"})
    stable_epoch: int | None = None  # None: it has not responded to this coordinator
    restored_from: int | None = None  # epoch of its restore point
    # If it restarted now: the epoch after which it would replay, for how long at most, and what
    # state it would load.
    replay_from: int | None = None
    replay_s: float | None = field(default=None, metadata={_JSON_NAME: "replaySeconds"})
    state_bytes: int | None = None
    problem: str = ""
    # The source or operator whose definition is at fault.
    wrong_definition: str = field(default="", metadata={_JSON_NAME: "refused"})
    saving_fails: bool = False  # `problem` says why it saves no checkpoints
    output_state: str = ConsistencyState.STABLE  # or one of a newer release: it is not stable
    tentative_epoch: int | None = None  # the newest one that is not corrected
    missing_inputs: tuple[str, ...] = ()  # streams without which its output is tentative
    durable_epoch: int | None = None  # that all its sinks have; None: it has no sinks
    untrusted: bool = False  # nobody may read it
    # Of a live source: the positions (offsets) that are there, and not read; None: not known.
    source_behind: int | None = None
    bad_records: int = 0  # of its source, since it was restored
    bad_record: str = ""  # one of them, and why
    hot_key: str = ""  # which key most of its rows have, and what to do; in words


@dataclass(frozen=True, slots=True)
class MissingResults:
    """Results of a query that no definition of it has written since a generation."""

    from_epoch: int
    to_epoch: int  # inclusive
    since_generation: int
    # RFC 3339; of windows, the starts of the first one that is missing and of the first one that is
    # not; else the event times of rows. Empty: not known.
    from_time: str = field(default="", metadata={_JSON_NAME: "from"})
    to_time: str = field(default="", metadata={_JSON_NAME: "to"})


@dataclass(frozen=True, slots=True)
class QueryReport:
    name: str
    # Written by every partition's sink.
    durable_epoch: int | None = field(metadata={_JSON_NAME: "stableEpoch"})
    # None: no source has released an epoch to this coordinator.
    lag_s: float | None = field(default=None, metadata={_JSON_NAME: "lagSeconds"})
    finished: bool = False  # its input has ended, and its sink has all results
    missing: tuple[MissingResults, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The newest manifest."""

    epoch: int
    seq: int
    time: str  # RFC 3339
    bytes: int
    next_epoch: int | None = None  # at which the next one is due


class CheckpointProblemKind(StrEnum):
    """What is wrong with checkpoints (`status.dataPlane.checkpointProblems`). A reader may find
    other kinds, from a newer release; each means that something fails."""

    STORE_UNAVAILABLE = "StoreUnavailable"  # cannot be read or written, or is another topology's
    ENTRIES_REFUSED = "EntriesRefused"  # entries that tasks saved lack objects: not committed
    UNRESTORABLE = "Unrestorable"  # committed entries whose objects are missing or damaged
    GARBAGE_COLLECTION_FAILED = "CleanUpFailed"  # objects that nothing needs are not deleted
    STALLED = "Stalled"  # no commit for a long time, because partitions do not save


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    kind: CheckpointProblemKind | None  # None: one of another version
    message: str  # is in `Report.problems` too


@dataclass(frozen=True, slots=True)
class Report:
    fence: int
    tasks: Mapping[str, TaskReport]  # by slot
    queries: Mapping[str, QueryReport]  # by name
    diverged: tuple[str, ...]  # keys of slots that computed wrongly
    inconsistent: tuple[str, ...]  # a text for each
    problems: tuple[str, ...]
    checkpoint_problems: tuple[CheckpointProblem, ...]
    stream_protocol: int = UNREPORTED_STREAM_PROTOCOL  # of the coordinator's image
    stream_conflict: tuple[int, ...] = ()  # stream protocols that cannot read from each other
    generation: int | None = None  # that it runs
    head_epoch: int | None = None  # the newest epoch that any source has released
    store: str | None = None  # id of the checkpoint store
    checkpoint: CheckpointReport | None = None
    # Of this write of the status. Older coordinators do not number them.
    number: int | None = field(default=None, metadata={_JSON_NAME: "report"})

    def task(self, slot: str, incarnation: int) -> TaskReport | None:
        """The report of exactly this incarnation, not of an older one."""
        report = self.tasks.get(slot)
        return report if report is not None and report.incarnation == incarnation else None


def read_report(raw: Any) -> Report:
    report: Report = _read(Report, raw if isinstance(raw, Mapping) else {})
    return report


def read_missing(query: Mapping[str, Any]) -> tuple[MissingResults, ...]:
    """Of a query in the status, which the operator copies from the report."""
    report: QueryReport = _read(QueryReport, query)
    return report.missing


def report_json(value: Any) -> Any:
    """Of a report, or a part of it."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return [report_json(entry) for entry in value.values()]
    if isinstance(value, tuple):
        return [report_json(entry) for entry in value]
    kind: Any = type(value)
    found = ((f, getattr(value, f.attribute)) for f in _fields_of(kind))
    return {f.name: report_json(v) for f, v in found if v is not None and v != f.default}


@dataclass(frozen=True, slots=True)
class _Field:
    attribute: str
    name: str  # in the JSON
    parse: Callable[[Any], Any]  # raises one of _INVALID
    default: Any  # MISSING: it has none
    empty: Any  # what it is if it is missing


_INVALID = (TypeError, ValueError, OverflowError)


@cache
def _fields_of(kind: Any) -> tuple[_Field, ...]:
    found = []
    for f, hint in zip(fields(kind), get_type_hints(kind).values(), strict=True):
        first, *others = f.name.split("_")
        name = f.metadata.get(_JSON_NAME) or first + "".join(word.capitalize() for word in others)
        empty = None if get_origin(hint) is UnionType else _EMPTY.get(get_origin(hint) or hint)
        default = empty if f.default is MISSING else f.default
        found.append(_Field(f.name, name, _parser(hint), f.default, default))
    return tuple(found)


_EMPTY = {int: 0, str: "", bool: False, float: 0.0, tuple: (), Mapping: {}}


def _parser(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:  # with None
        return _parser(arguments[0])
    if origin is tuple:
        return partial(_read_entries, _parser(arguments[0]))
    if origin is Mapping:
        return partial(_read_by_key, arguments[1])
    if is_dataclass(hint):
        return partial(_read, hint)
    parse: Callable[[Any], Any] = {bool: _is_true, float: _finite}.get(hint, hint)
    return parse


def _read(kind: Any, raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        raise TypeError(raw)
    values = {}
    for f in _fields_of(kind):
        value = raw.get(f.name)
        try:
            values[f.attribute] = f.empty if value is None else f.parse(value)
        except _INVALID:
            values[f.attribute] = f.empty
    return kind(**values)


def _read_entries(parse: Callable[[Any], Any], raw: Any) -> tuple[Any, ...]:
    """Without those that cannot be parsed."""
    if not isinstance(raw, list | tuple):
        raise TypeError(raw)
    found = []
    for entry in raw:
        with suppress(*_INVALID):
            found.append(parse(entry))
    return tuple(found)


def _read_by_key(kind: Any, raw: Any) -> Mapping[str, Any]:
    """By the first field."""
    key = _fields_of(kind)[0].attribute
    return {getattr(entry, key): entry for entry in _read_entries(partial(_read, kind), raw)}


def _is_true(value: Any) -> bool:
    return value is True


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number
