"""The slots of one topology: the phase of each one, and which ones are lost. Pure.

Design: docs/design/recovery.md#loss, docs/design/fencing.md#incarnations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from rekindle import names
from rekindle.protocol import TaskPhase
from rekindle.topology.model import Segment, Slot
from rekindle_operator.cluster.model import IncarnationRef, PodView, UncreatedPod
from rekindle_operator.reconcile.context import (
    CompiledGeneration,
    ReconcileContext,
    coordinator_pods,
    owned_pods,
    partition_and_replica,
)
from rekindle_operator.reconcile.owned import has_other_token
from rekindle_operator.reconcile.phases import BEFORE_RUNNING, SlotEvent, SlotPhase, next_slot_phase
from rekindle_operator.recovery.losses import Loss, loss_of_pod
from rekindle_operator.recovery.start_failures import StartFailures
from rekindle_operator.resources.standby import slot_text
from rekindle_operator.resources.task import task_template_digest
from rekindle_operator.settings import OperatorSettings
from rekindle_operator.topology_status import QueryState, TopologyPhase

MAX_FAILED_CREATES = 2  # attempts; a quota may refuse the first until this pass has deleted pods


@dataclass(frozen=True, slots=True)
class RebalancingMove:
    """To an emptier node: the pod that is to be replaced, its node, and that of its successor."""

    pod: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SlotState:
    slot: Slot
    segment: Segment
    reserved: int  # the highest incarnation in the status
    used_by_removed_slot: int = 0  # highest incarnation of one whose pods have the same names
    pod: PodView | None = None  # of the highest incarnation
    loss: Loss | None = None
    start_problem: str = ""  # why the containers of its pod do not run
    no_node: str = ""  # why no node takes its gated pod, if it has waited for a while
    uncreated_pod: UncreatedPod | None = None  # of the reserved incarnation
    outdated: bool = False  # it would be made differently now
    is_successor: bool = False  # in a planned move: the slot that it will replace still runs
    rebalancing: RebalancingMove | None = None  # of a successor that is one for that reason

    @property
    def phase(self) -> SlotPhase:
        return SlotPhase.LOST if self.loss is not None else self.phase_without_loss

    @property
    def phase_without_loss(self) -> SlotPhase:
        """The same, without regard to losses."""
        if self.pod is None:
            return SlotPhase.NO_POD
        if self.pod.node is not None:
            return SlotPhase.BOUND
        return SlotPhase.GATED if names.GATE in self.pod.gates else SlotPhase.OPEN

    @property
    def name(self) -> str:
        """For users: segment name, partition, replica."""
        return f"{self.segment.name}/{self.slot.partition}/{self.slot.replica}"

    @property
    def details(self) -> str:
        """What it has, which explains its phase; for errors."""
        pod = self.pod
        parts = [f"slot {self.name}: incarnation {self.reserved} is reserved"]
        if pod is not None:
            node = f"on node {pod.node}" if pod.node else "without a node"
            parts.append(f"pod {pod.name} (incarnation {pod.incarnation}) is {pod.phase} {node}")
        if self.uncreated_pod is not None:
            uncreated = self.uncreated_pod
            parts.append(
                f"its pod is not created, {uncreated.failures} requests failed: {uncreated.message}"
            )
        if self.loss is not None:
            parts.append(f"lost: {self.loss.value}")
        return "; ".join(parts)

    @property
    def holds_capacity(self) -> bool:
        """It runs, or capacity is reserved for it: the plan leaves it out."""
        runs = self.pod is not None and not self.pod.ended
        return runs and self.phase in (SlotPhase.OPEN, SlotPhase.BOUND)

    @property
    def refusal(self) -> str:
        """What refuses its pod or cannot run it, and why."""
        if self.uncreated_pod is not None and self.uncreated_pod.failures:
            return f"API server: {self.uncreated_pod.message}"
        if self.pod is not None and self.pod.node is not None and self.start_problem:
            return f"{self.pod.name} on {self.pod.node}: {self.start_problem}"
        if self.pod is None or self.pod.was_ready or not self.pod.placement_failure:
            return ""
        if self.phase_without_loss is SlotPhase.OPEN:
            return f"scheduler: {self.pod.placement_failure}"
        return f"kubelet of {self.pod.node}: {self.pod.placement_failure}" if self.pod.ended else ""

    @property
    def next_incarnation(self) -> int:
        """Of the pod that is created."""
        return self.reserved if self.uncreated_pod is not None else self.fresh_incarnation

    @property
    def fresh_incarnation(self) -> int:
        """One that no pod has or may get by a request whose result is not known."""
        of_pod = self.pod.incarnation if self.pod else 0
        return max(self.reserved, of_pod, self.used_by_removed_slot) + 1

    def check_event(self, event: SlotEvent) -> None:
        """Raises InvalidTransition if the event cannot happen in this phase."""
        next_slot_phase(self.phase, event, self.details)

    def lost(self, loss: Loss) -> SlotState:
        self.check_event(SlotEvent.LOSS_FOUND)
        return replace(self, loss=loss)


def task_pods(context: ReconcileContext) -> list[PodView]:
    segments = context.running.topology.segments if context.running is not None else ()
    names_by_id = {s.id: s.name for s in segments}
    tasks = (p for p in owned_pods(context) if p.role == names.ROLE_TASK)
    return [p for p in tasks if _is_placed(context, p, names_by_id)]


def _is_placed(context: ReconcileContext, pod: PodView, segments: Mapping[str, str]) -> bool:
    """Whether its labels agree with its name and with the topology. `segments`: names by id."""
    running, slot = context.running, pod.slot
    if slot is None or not 0 < pod.generation <= context.view.generation:
        return False
    if slot.segment not in segments:  # of another generation
        return running is None or pod.generation != running.generation
    numbers = slot.partition, slot.replica, pod.incarnation
    if pod.given_slot and pod.given_slot == slot_text(slot, pod.incarnation):
        return True  # it was a standby, and keeps its name
    return pod.name == names.task_pod_name(context.view.name, segments[slot.segment], *numbers)


def mislabelled_pods(context: ReconcileContext) -> list[PodView]:
    """Of the topology, by their owner, and with labels that somebody has changed: nobody knows what
    they are for, and the coordinator does not know that they exist."""
    placed = {p.uid for p in (*task_pods(context), *coordinator_pods(context))}
    return [
        p
        for p in owned_pods(context)
        if p.uid not in placed and not (p.role == names.ROLE_STANDBY and p.slot is None)
    ]


class SlotPair(NamedTuple):
    """One replica under its two numbers; usually the second one has no pod."""

    first: SlotState
    second: SlotState


def observe_slots(context: ReconcileContext) -> tuple[SlotPair, ...]:
    """Empty while the topology has none."""
    if context.running is None or not context.has_slots:
        return ()
    pass_inputs = context.pass_inputs
    start_failures = StartFailures(
        pass_inputs.snapshot, pass_inputs.losses, pass_inputs.now, pass_inputs.timing
    )
    pods: dict[Slot, list[PodView]] = defaultdict(list)
    for pod in task_pods(context):
        if pod.slot is not None:
            pods[pod.slot].append(pod)
    topology = context.running.topology
    segments = {s.id: s for s in topology.segments}
    used_by_removed = _used_by_removed_slots(context, topology.slots())
    template_digest = _template_digests(context.running, segments, pass_inputs.settings)

    def observe(slot: Slot) -> SlotState:
        reserved = context.reserved.get(slot.key, 0)
        state = SlotState(
            slot,
            segments[slot.segment],
            reserved,
            used_by_removed.get(partition_and_replica(slot.key), 0),
            uncreated_pod=pass_inputs.snapshot.uncreated_pods.get(
                IncarnationRef(context.view.uid, slot.key, reserved)
            ),
        )
        if slot in pods:
            pod = max(pods[slot], key=lambda p: p.incarnation)
            return _with_pod(context, state, pod, start_failures, template_digest)
        return state.lost(Loss.GONE) if _had_pod(context, state) else state

    return tuple(SlotPair(observe(s), observe(s.alternate)) for s in topology.slots())


def _with_pod(
    context: ReconcileContext,
    state: SlotState,
    pod: PodView,
    start_failures: StartFailures,
    template_digest: Callable[[str], str],  # of a segment
) -> SlotState:
    assert context.running is not None
    pass_inputs = context.pass_inputs
    is_old = pod.generation != context.running.generation
    outdated = is_old and pod.template_digest != template_digest(state.slot.segment)
    outdated = outdated or has_other_token(context, pod)
    state = replace(state, pod=pod, start_problem=start_failures.problem_of(pod), outdated=outdated)
    loss = loss_of_pod(
        pod, pass_inputs.losses, pass_inputs.snapshot, pass_inputs.now, pass_inputs.timing
    )
    if loss is None and has_diverged(context, state.slot, pod):
        loss = Loss.DIVERGED
    if loss is None and outdated and not _has_started(context, pod):
        loss = Loss.OUTDATED  # the edit may correct what keeps it from starting
    if loss is None:
        loss = start_failures.loss_of(pod)
    return state if loss is None else state.lost(loss)


def _had_pod(context: ReconcileContext, state: SlotState) -> bool:
    """False for a slot whose pod was refused, after a suspension, and while the topology starts:
    then its pod may never have been created."""
    may_be_missing = state.uncreated_pod is not None or was_suspended(context)
    return bool(state.reserved) and not may_be_missing and _has_run(context, state)


def _has_run(context: ReconcileContext, state: SlotState) -> bool:
    """Whether a pod of the slot has run, according to the status: until all queries have been Live
    once, only slots of queries count that have started: all of their partitions have had a pod."""
    assert context.running is not None
    if context.last_status.phase not in BEFORE_RUNNING:
        return True
    not_started = (None, QueryState.WAITING, QueryState.UNKNOWN)
    started = {q.name for q in context.last_status.queries.values() if q.state not in not_started}
    queries = (q for q in context.running.topology.spec.queries if q.name in started)
    return any(state.segment in context.running.topology.needed_segments(q) for q in queries)


def _used_by_removed_slots(context: ReconcileContext, slots: Iterable[Slot]) -> Mapping[str, int]:
    """Partition and replica -> highest incarnation of slots that an edit has removed.

    A changed segment is another segment of the same name, and its pods would have the same names:
    incarnations of new slots continue those of removed ones.
    """
    current = {slot.key for slot in slots}
    highest: dict[str, int] = {}
    for key, incarnation in context.reserved.items():
        if key not in current and key.count("/") == 2:
            suffix = partition_and_replica(key)
            highest[suffix] = max(incarnation, highest.get(suffix, 0))
    return highest


def _template_digests(
    running: CompiledGeneration, segments: Mapping[str, Segment], settings: OperatorSettings
) -> Callable[[str], str]:
    """The template digest of pods of a segment that would be created now; computed on demand."""

    @cache
    def template_digest(segment: str) -> str:
        return task_template_digest(
            running.view, running.topology, segments[segment], settings.pods
        )

    return template_digest


def _has_started(context: ReconcileContext, pod: PodView) -> bool:
    """It serves, has served, or works on its state, as the coordinator reports."""
    if pod.node is None or pod.slot is None:
        return False
    report = context.report.task(pod.slot.key, pod.incarnation)
    idle = (TaskPhase.WAITING, TaskPhase.FAILED)
    return pod.was_ready or (report is not None and report.phase not in idle)


def has_diverged(context: ReconcileContext, slot: Slot, pod: PodView) -> bool:
    """Only of the incarnation that the coordinator reports, not of the next one."""
    if context.report_stale_since is not None:
        return False
    reported = context.report.task(slot.key, pod.incarnation)
    return slot.key in context.report.diverged and reported is not None


def was_suspended(context: ReconcileContext) -> bool:
    return context.last_status.phase is TopologyPhase.SUSPENDED
