"""The report: what the coordinator writes to `status.dataPlane`, and when. Pure.

Written at once when a task is suspected, responds again, changes phase or diverges, or a checkpoint
is committed; otherwise at most every two seconds. The status is for users and the operator; values
that change fast are metrics.

Design: docs/design/coordinator.md#report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.checkpoints.retention import oldest
from rekindle.coordinator.model import ApplyStatus, Generation
from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Membership, Task, TaskPredicate
from rekindle.identity import STREAM_PROTOCOL
from rekindle.report import (
    CheckpointProblem,
    CheckpointReport,
    MissingResults,
    QueryReport,
    Report,
    TaskReport,
)
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Segment
from rekindle.topology.spec import QuerySpec

REPORT_INTERVAL_S = 2.0
_MAX_HEADS = 4096
_MAX_PARTITION_HEADS = 64  # of each of up to a thousand source partitions; older ones are estimated
# A source that has released nothing for this long, and for a few epochs, has stopped.
_STOPPED_S = 5.0
_STOPPED_EPOCHS = 3
_MAX_MESSAGES = 32
MAX_CHECKPOINT_PROBLEMS = 8
_MAX_MISSING = 16


class HeadHistory:
    """When sources released each epoch, to compute lags as times, not as numbers of epochs."""

    def __init__(self, max_epochs: int = _MAX_HEADS) -> None:
        self._released: deque[tuple[int, float]] = deque(maxlen=max_epochs)

    @property
    def head(self) -> int:
        return self._released[-1][0] if self._released else NO_EPOCH

    @property
    def advanced_at(self) -> float:
        return self._released[-1][1] if self._released else float("-inf")

    def advanced(self, epoch: int, now: float) -> None:
        if epoch > self.head:
            self._released.append((epoch, now))

    def age_s(self, durable_epoch: int, now: float, interval_s: float) -> float:
        """How long ago the first epoch after `durable_epoch` was released; 0 if none was. Estimated
        for epochs between two observations, such as before and after a network partition."""
        if not self._released or durable_epoch >= self.head:
            return 0.0
        wanted = durable_epoch + 1
        later_epoch, later_at = self._released[-1]
        for epoch, at in reversed(self._released):
            if epoch == wanted:
                return now - at
            estimate_s = now - later_at + (later_epoch - wanted) * interval_s
            if epoch < wanted:
                return min(now - at, estimate_s)
            later_epoch, later_at = epoch, at
        return now - later_at + (later_epoch - wanted) * interval_s


class SourceHeads:
    """Heads of all source partitions.

    The head of a source is the epoch that its node's clock has released, whether or not its tasks
    have computed it, and clocks differ. A query can have an epoch only when each source that it
    reads has released it, so its lag counts from the slowest clock among those. The head of a
    source that has stopped does not follow its clock, so it is ignored; if all have stopped, the
    lag counts from the newest head of any source, and grows: the next epoch is due all the same."""

    def __init__(self) -> None:
        self._newest = HeadHistory()
        self._partitions: dict[Partition, HeadHistory] = {}
        self._last: dict[Partition, int] = {}  # epochs that may have rows, of bounded sources

    @property
    def head(self) -> int:
        return self._newest.head

    def advanced(
        self, partition: Partition, epoch: int, now: float, last_epoch: int | None = None
    ) -> None:
        """A replica of the partition has released this epoch; `last_epoch`: no later one has
        rows."""
        if last_epoch is not None:
            self._last[partition] = last_epoch
        self._newest.advanced(epoch, now)
        known = self._partitions.setdefault(partition, HeadHistory(_MAX_PARTITION_HEADS))
        known.advanced(epoch, now)

    def keep(self, partitions: Collection[Partition]) -> None:
        """Forget partitions that a new generation does not have."""
        self._partitions = {p: h for p, h in self._partitions.items() if p in partitions}
        self._last = {p: epoch for p, epoch in self._last.items() if p in partitions}

    def is_finished(self, sources: Iterable[Partition], durable_epoch: int) -> bool:
        """Whether all input of these sources is known to have ended before this epoch, in which
        windows close."""
        last = [self._last.get(p) for p in sources]
        return all(epoch is not None and epoch < durable_epoch for epoch in last)

    def lag_s(
        self, sources: Iterable[Partition], durable_epoch: int, now: float, interval_s: float
    ) -> float:
        """The lag of a query that reads these sources; 0 before any source released an epoch."""
        stopped_s = max(_STOPPED_S, _STOPPED_EPOCHS * interval_s)
        known = (h for p in sources if (h := self._partitions.get(p)) is not None)
        ages = (
            h.age_s(durable_epoch, now, interval_s)
            for h in known
            if now - h.advanced_at < stopped_s
        )
        lag_s = min(ages, default=None)
        if lag_s is not None or self.head == NO_EPOCH:
            return lag_s or 0.0
        due_at = self._newest.advanced_at + (durable_epoch + 1 - self.head) * interval_s
        return max(self._newest.age_s(durable_epoch, now, interval_s), now - due_at, 0.0)


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Inputs of a report. `wall_s` is the Unix time when `now` was zero."""

    fence: int
    wall_s: float
    generation: Generation | None
    graph: Graph | None
    membership: Membership
    manifest: Manifest | None
    heads: SourceHeads
    missing: Callable[[QuerySpec], tuple[MissingResults, ...]]
    diverged: tuple[str, ...]
    inconsistent: tuple[str, ...]
    problems: tuple[str, ...]
    checkpoint_problems: tuple[CheckpointProblem, ...]
    store_id: str | None
    is_suspected: TaskPredicate
    is_untrusted: TaskPredicate
    next_checkpoint: int = NO_EPOCH  # at which one is due


def build_report(inputs: ReportInputs, now: float) -> Report:
    generation, head = inputs.generation, inputs.heads.head
    return Report(
        fence=inputs.fence,
        tasks={
            t.slot.key: _task(t, inputs) for t in sorted(inputs.membership, key=lambda t: t.slot)
        },
        queries={query.name: query for query in _queries(inputs, now)},
        diverged=inputs.diverged,
        inconsistent=tuple(_bounded(text) for text in inputs.inconsistent[:_MAX_MESSAGES]),
        problems=tuple(_bounded(text) for text in inputs.problems[:_MAX_MESSAGES]),
        checkpoint_problems=tuple(
            replace(problem, message=_bounded(problem.message))
            for problem in inputs.checkpoint_problems[:MAX_CHECKPOINT_PROBLEMS]
        ),
        stream_protocol=STREAM_PROTOCOL,
        stream_conflict=inputs.membership.stream_conflict(),
        generation=generation.number if generation is not None else None,
        head_epoch=head if head != NO_EPOCH else None,
        # The next coordinator expects this store, so it is reported once something was written
        # there.
        store=inputs.store_id if inputs.manifest is not None else None,
        checkpoint=_checkpoint(inputs.manifest, inputs.next_checkpoint),
    )


def _checkpoint(manifest: Manifest | None, following: int) -> CheckpointReport | None:
    if manifest is None or manifest.epoch == NO_EPOCH:
        return None
    size = sum(newest_first[0].bytes for newest_first in manifest.entries.values())
    following_epoch = following if following > manifest.epoch else None
    return CheckpointReport(manifest.epoch, manifest.seq, manifest.time, size, following_epoch)


def _task(task: Task, inputs: ReportInputs) -> TaskReport:
    suspected = inputs.is_suspected(task)
    report = TaskReport(
        slot=task.slot.key,
        incarnation=task.pod.incarnation,
        pod=task.pod.name,
        phase=task.phase,
        suspected=suspected,
        untrusted=inputs.is_untrusted(task),
    )
    if task.suspected_since is not None:
        since = rfc3339(inputs.wall_s + task.suspected_since) if suspected else ""
        report = replace(report, suspected_since=since, silent_s=round(task.silence_s, 1))
    response = task.response
    if response is None:
        return report
    problem, tentative = response.problem, response.tentative_epoch
    restart = restart_cost(task, inputs.manifest)
    source = response.source
    return replace(
        report,
        replay_from=restart.after if restart is not None else None,
        replay_s=round(restart.replay_s, 2) if restart is not None else None,
        state_bytes=restart.state_bytes if restart is not None else None,
        stable_epoch=response.stable_epoch,
        restored_from=response.restored_from,
        problem=_bounded(_problem_text(problem.where, problem.message)) if problem else "",
        wrong_definition=(problem.wrong_definition or "") if problem else "",
        saving_fails=problem is not None and problem.saving,
        output_state=response.consistency,
        tentative_epoch=None if tentative == NO_EPOCH else tentative,
        missing_inputs=response.missing[:_MAX_MISSING],
        durable_epoch=min((s.durable for s in response.sinks), default=None),
        source_behind=source.behind if source is not None else None,
        bad_records=source.bad_records if source is not None else 0,
        bad_record=_bounded(source.example) if source is not None else "",
        hot_key=_bounded(response.hot_key),
    )


@dataclass(frozen=True, slots=True)
class RestartCost:
    """What a task would do if it restarted now without a partner: load its state after the epoch
    `after`, and replay `epochs` epochs, in `replay_s` at most."""

    after: int
    epochs: int
    replay_s: float
    state_bytes: int


def restart_cost(task: Task, manifest: Manifest | None) -> RestartCost | None:
    """None if it is not known: there is no manifest, or the task has no state yet."""
    refs = manifest.entries.get(task.partition.key) if manifest is not None else None
    response = task.response
    if not refs or response is None or not response.phase.serves:
        return None
    after = oldest(refs).epoch
    epochs = max(0, response.stable_epoch - after)
    return RestartCost(after, epochs, epochs * response.epoch_mean_s, response.state_bytes)


def _problem_text(where: str | None, message: str) -> str:
    return f"{where}: {message}" if where else message


def _bounded(text: str) -> str:
    return text if len(text) <= 1024 else text[:1023] + "…"


def _queries(inputs: ReportInputs, now: float) -> Iterable[QueryReport]:
    if inputs.generation is None or inputs.graph is None:
        return ()
    reports: list[QueryReport] = []
    specs = {query.name: query for query in inputs.generation.topology.spec.queries}
    for segment in inputs.generation.topology.segments:
        for query in segment.queries:
            durable = _durable_epoch(query, segment, inputs)
            sources, interval_s = inputs.graph.sources[segment.id], inputs.generation.interval_s
            lag_s = inputs.heads.lag_s(sources, durable, now, interval_s)
            finished = inputs.heads.is_finished(sources, durable)
            known_lag_s = round(lag_s, 1) if inputs.heads.head != NO_EPOCH else None
            missing = inputs.missing(specs[query])
            reports.append(QueryReport(query, durable, known_lag_s, finished, missing))
    return sorted(reports, key=lambda report: report.name)


def _durable_epoch(query: str, segment: Segment, inputs: ReportInputs) -> int:
    """The newest epoch that is durable in every partition, written by any replica. Sinks have all
    epochs of a checkpoint (I2), so a partition without tasks counts with its newest entry."""
    best = [_checkpoint_epoch(segment.id, index, inputs) for index in range(segment.partitions)]
    for task in inputs.membership:
        partition = task.partition
        if (
            partition.segment == segment.id
            and partition.index < len(best)
            and task.response is not None
        ):
            durable = [s.durable for s in task.response.sinks if s.assigned.query == query]
            best[partition.index] = max([best[partition.index], *durable])
    return min(best, default=NO_EPOCH)


def _checkpoint_epoch(segment: str, index: int, inputs: ReportInputs) -> int:
    """The epoch of a partition's newest entry. Entries of another generation do not count: the
    query may not have existed, or had another input."""
    manifest, generation = inputs.manifest, inputs.generation
    if manifest is None or generation is None or manifest.generation != generation.number:
        return NO_EPOCH
    refs = manifest.entries.get(Partition(segment, index).key, ())
    return refs[0].epoch if refs else NO_EPOCH


class ReportPacer:
    """Decides when a report is written."""

    def __init__(self) -> None:
        self._reported: Report | None = None
        self._built_at = 0.0
        self._urgent = True

    def mark_urgent(self) -> None:
        self._urgent = True

    def due(self, now: float) -> bool:
        return self._urgent or now - self._built_at >= REPORT_INTERVAL_S

    def offer(self, report: Report, now: float) -> Iterable[ApplyStatus]:
        self._urgent, self._built_at = False, now
        if report == self._reported:
            return ()
        self._reported = report
        return (ApplyStatus(report),)


def rfc3339(wall_s: float) -> str:
    """Formats a time for the report: UTC, milliseconds."""
    text = datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
