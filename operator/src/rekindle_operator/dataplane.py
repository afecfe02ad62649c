"""`status.dataPlane`, the coordinator's report, as Python objects: read once, when a topology is
received. Pure.

A value that cannot be parsed counts as missing: a coordinator of another version must not stop
recovery.

Design: docs/design/coordinator.md#report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.identity import UNREPORTED_STREAM_PROTOCOL
from rekindle.protocol import CheckpointProblemKind, ConsistencyState, TaskPhase
from rekindle_operator.topology_status import MissingEntry, read_missing

_STABLE = ConsistencyState.STABLE.value


@dataclass(frozen=True, slots=True)
class TaskReport:
    slot: str
    incarnation: int
    phase: TaskPhase | None  # None: a value of another version
    suspected: bool = False
    silent_s: float = 0.0  # how long it had been silent when the coordinator noticed it
    suspected_since: str = ""  # by the coordinator's clock: it tells one silence from the next
    stable_epoch: int | None = None
    problem: str = ""
    wrong_definition: str = ""  # name of the source or operator whose definition is at fault
    saving_fails: bool = False  # `problem` says why it saves no checkpoints
    tentative: bool = False  # its output is not stable
    missing_inputs: tuple[str, ...] = ()  # streams without which it is tentative
    durable_epoch: int | None = None  # that all its sinks have; None: it has none
    untrusted: bool = False  # nobody may read it
    pod: str = ""  # its name

    @property
    def responds(self) -> bool:
        """Whether it responds to this coordinator, which then knows an epoch of it."""
        return self.stable_epoch is not None and not self.silent_s

    @property
    def is_inconclusive(self) -> bool:
        """Silent to a coordinator that suspects nobody, since its own network seems to be faulty:
        this proves neither that the task works nor that it does not."""
        return bool(self.silent_s) and not self.suspected


@dataclass(frozen=True, slots=True)
class QueryReport:
    """`durable_epoch`: the newest epoch that all partitions of its sink have (`stableEpoch` in the
    JSON). `finished`: its input has ended, and the sink has all its results."""

    durable_epoch: int | None = None
    lag_s: float | None = None
    finished: bool = False
    missing: tuple[MissingEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The newest manifest; empty: there is none yet."""

    epoch: int | None = None
    time: str = ""
    size: int | None = None  # bytes


@dataclass(frozen=True, slots=True)
class CheckpointProblem:
    kind: CheckpointProblemKind | None  # None: a kind of another version
    message: str


@dataclass(frozen=True, slots=True)
class CoordinatorReport:
    """`status.dataPlane`, as the coordinator writes it."""

    fence: int = 0
    generation: int | None = None  # that it runs
    tasks: Mapping[str, TaskReport] = field(default_factory=dict)
    queries: Mapping[str, QueryReport] = field(default_factory=dict)
    diverged: tuple[str, ...] = ()  # keys of slots
    inconsistent: tuple[str, ...] = ()  # a text for each
    checkpoint_problems: tuple[CheckpointProblem, ...] = ()
    checkpoint: CheckpointReport = field(default_factory=CheckpointReport)
    stream_protocol: int = UNREPORTED_STREAM_PROTOCOL  # of the coordinator's image
    stream_conflict: tuple[int, ...] = ()  # stream protocols that cannot read from each other
    head_epoch: int | None = None  # the newest epoch that any source has released

    def task(self, slot: str, incarnation: int) -> TaskReport | None:
        """The report of exactly this incarnation, not of an older one."""
        report = self.tasks.get(slot)
        return report if report is not None and report.incarnation == incarnation else None


def read_report(raw: Mapping[str, Any]) -> CoordinatorReport:
    tasks = [_task(t) for t in _entries(raw, "tasks") if isinstance(t, Mapping)]
    return CoordinatorReport(
        fence=_integer(raw.get("fence")) or 0,
        generation=_integer(raw.get("generation")),
        tasks={t.slot: t for t in tasks},
        queries={
            str(q.get("name")): QueryReport(
                durable_epoch=_integer(q.get("stableEpoch")),
                lag_s=_number(q.get("lagSeconds")),
                finished=q.get("finished") is True,
                missing=read_missing(q),
            )
            for q in _entries(raw, "queries")
            if isinstance(q, Mapping)
        },
        diverged=tuple(_diverged(d) for d in _entries(raw, "diverged")),
        inconsistent=tuple(str(i) for i in _entries(raw, "inconsistent")),
        checkpoint_problems=tuple(
            _checkpoint_problem(p)
            for p in _entries(raw, "checkpointProblems")
            if isinstance(p, Mapping)
        ),
        checkpoint=_checkpoint(_mapping(raw.get("checkpoint"))),
        stream_protocol=_integer(raw.get("streamProtocol")) or UNREPORTED_STREAM_PROTOCOL,
        stream_conflict=tuple(
            n for p in _entries(raw, "streamConflict") if (n := _integer(p)) is not None
        ),
        head_epoch=_integer(raw.get("headEpoch")),
    )


def report_number(raw: Mapping[str, Any]) -> tuple[int, int | None]:
    """(fence, number) that identify a report. Older coordinators do not number reports."""
    return _integer(raw.get("fence")) or 0, _integer(raw.get("report"))


def _task(raw: Mapping[str, Any]) -> TaskReport:
    problem = raw.get("problem") or ""
    return TaskReport(
        slot=str(raw.get("slot", "")),
        incarnation=_integer(raw.get("incarnation")) or 0,
        phase=_phase(raw.get("phase", TaskPhase.WAITING)),
        suspected=bool(raw.get("suspected", False)),
        silent_s=max(0.0, _number(raw.get("silentSeconds")) or 0.0),
        suspected_since=str(raw.get("suspectedSince") or ""),
        stable_epoch=_integer(raw.get("stableEpoch")),
        problem=problem if isinstance(problem, str) else str(problem),
        wrong_definition=str(raw.get("refused") or ""),
        saving_fails=raw.get("savingFails") is True,
        tentative=str(raw.get("outputState") or _STABLE) != _STABLE,
        missing_inputs=tuple(str(name) for name in _entries(raw, "missingInputs")),
        durable_epoch=_integer(raw.get("durableEpoch")),
        untrusted=raw.get("untrusted") is True,
        pod=str(raw.get("pod") or ""),
    )


def _phase(value: Any) -> TaskPhase | None:
    try:
        return TaskPhase(value)
    except ValueError:
        return None


def _checkpoint_problem(raw: Mapping[str, Any]) -> CheckpointProblem:
    message = str(raw.get("message") or "")
    try:
        return CheckpointProblem(CheckpointProblemKind(str(raw.get("kind"))), message)
    except ValueError:
        return CheckpointProblem(None, message)


def _checkpoint(raw: Mapping[str, Any]) -> CheckpointReport:
    time = str(raw.get("time") or "")
    return CheckpointReport(_integer(raw.get("epoch")), time, _integer(raw.get("bytes")))


def _diverged(raw: Any) -> str:
    return str(raw.get("slot", "")) if isinstance(raw, Mapping) else str(raw)


def _integer(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _number(value: Any) -> float | None:
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None


def _entries(raw: Mapping[str, Any], field: str) -> Sequence[Any]:
    value = raw.get(field)
    return value if isinstance(value, (list, tuple)) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
