"""The slots of one topology: who stands in each, who is lost, and what replaces it. Pure.

A lost pod is replaced under a new incarnation and a new name at once; what becomes of the old one
is never waited for (I7). Its successor is born gated.

Design: docs/design/recovery.md#replacement, docs/design/fencing.md#incarnations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache

from rekindle import names
from rekindle.topology.model import Segment, Slot
from rekindle_operator.cluster.model import PodView, Refusal, SlotRef, Snapshot
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod
from rekindle_operator.reconcile.context import BEFORE_RUNNING, ReconcileContext, Running, place_of
from rekindle_operator.recovery.losses import Loss, LossAssessment, loss_of_pod
from rekindle_operator.recovery.start import StartFailures
from rekindle_operator.resources.task import task_pod, task_template
from rekindle_operator.settings import Settings, Timing

_SHORT_GRACE_S = 5  # for a task that is replaced: it is fenced, and its room is wanted


_TRIED_IN_VAIN = (Loss.UNBOUND, Loss.REFUSED, Loss.CANNOT_START, Loss.CRASHING)


class Stand(Enum):
    VACANT = auto()
    GATED = auto()
    OPEN = auto()  # its gate is open, the scheduler has not bound it
    BOUND = auto()


@dataclass(frozen=True, slots=True)
class SlotState:
    slot: Slot
    segment: Segment
    reserved: int
    taken: int = 0  # the highest incarnation in a pod name that could be the same
    pod: PodView | None = None  # of the highest incarnation
    loss: Loss | None = None
    trouble: str = ""  # why the containers of its pod do not run
    refused: Refusal | None = None  # of the reserved incarnation, which was never made
    outdated: bool = False  # it would be made differently today

    @property
    def stand(self) -> Stand:
        if self.pod is None:
            return Stand.VACANT
        if self.pod.node is not None:
            return Stand.BOUND
        return Stand.GATED if names.GATE in self.pod.gates else Stand.OPEN

    @property
    def holds(self) -> bool:
        """It runs, or room is reserved for it: the plan need not think of it."""
        runs = self.pod is not None and not self.pod.ended
        return runs and self.loss is None and self.stand in (Stand.OPEN, Stand.BOUND)

    @property
    def refusal(self) -> str:
        """Who will not have its pod or cannot run it, and why."""
        if self.refused is not None:
            return f"API server: {self.refused.message}"
        if self.pod is not None and self.pod.node is not None and self.trouble:
            return f"{self.pod.name} on {self.pod.node}: {self.trouble}"
        if self.pod is None or self.pod.was_ready or not self.pod.refusal:
            return ""
        if self.stand is Stand.OPEN:
            return f"scheduler: {self.pod.refusal}"
        return f"kubelet of {self.pod.node}: {self.pod.refusal}" if self.pod.ended else ""

    @property
    def next_incarnation(self) -> int:
        if self.refused is not None:
            return self.reserved
        return max(self.reserved, self.pod.incarnation if self.pod else 0, self.taken) + 1


def task_pods(context: ReconcileContext, snapshot: Snapshot) -> list[PodView]:
    return [
        p
        for p in snapshot.pods
        if p.owner_uid == context.view.uid and p.role == names.ROLE_TASK and p.slot is not None
    ]


def observe_slots(
    context: ReconcileContext,
    snapshot: Snapshot,
    assessment: LossAssessment,
    now: float,
    settings: Settings,
) -> tuple[SlotState, ...]:
    if context.running is None:
        return ()
    start_failures = StartFailures(snapshot, assessment, now, settings.timing)
    by_slot: dict[Slot, list[PodView]] = defaultdict(list)
    for pod in task_pods(context, snapshot):
        if pod.slot is not None:
            by_slot[pod.slot].append(pod)
    topology, states = context.running.topology, []
    segments = {s.id: s for s in topology.segments}
    namesakes = _namesakes(context, topology.slots())
    template = _templates(context.running, segments, settings)
    for slot in topology.slots():
        reserved = context.reserved.get(slot.key, 0)
        taken = namesakes.get(place_of(slot.key), 0)
        refused = snapshot.refusals.get(SlotRef(context.view.uid, slot.key, reserved))
        state = SlotState(slot, segments[slot.segment], reserved, taken, refused=refused)
        if pods := by_slot.get(slot):
            pod = max(pods, key=lambda p: p.incarnation)
            loss = loss_of_pod(pod, assessment, snapshot, now, settings.timing)
            if loss is None and _diverged(context, slot, pod):
                loss = Loss.DIVERGED
            if loss is None:
                loss = start_failures.loss_of(pod)
            outdated = pod.generation != context.running.generation and (
                pod.template != template(slot.segment)
            )
            if loss is None and outdated and not _has_started(context, pod):
                loss = Loss.OUTDATED  # what the edit mends may be why it does not start
            trouble = start_failures.trouble(pod)
            state = replace(state, pod=pod, loss=loss, trouble=trouble, outdated=outdated)
        elif _had_pod(context, state):
            state = replace(state, loss=Loss.GONE)
        states.append(state)
    return tuple(states)


def _had_pod(context: ReconcileContext, state: SlotState) -> bool:
    """Not a slot that an edit brings (back), nor one whose pod was refused, nor after a pause, nor
    while the topology starts: then its pod may never have been created."""
    fresh = state.slot.key not in context.before
    unmade = fresh or state.refused is not None or was_suspended(context)
    return bool(state.reserved) and not unmade and _has_run(context, state)


def _has_run(context: ReconcileContext, state: SlotState) -> bool:
    """As the status says: before every query was live once, only those that were."""
    assert context.running is not None
    if context.view.status.get("phase") not in BEFORE_RUNNING:
        return True
    said = context.view.status.get("queries") or ()
    live = {str(q["name"]) for q in said if q.get("state") not in (None, "Waiting", "Unknown")}
    queries = (q for q in context.running.topology.spec.queries if q.name in live)
    return any(state.segment in context.running.topology.ancestry(q) for q in queries)


def _namesakes(context: ReconcileContext, slots: Iterable[Slot]) -> Mapping[str, int]:
    """A changed segment is another segment of the same name, and so would its pods be: new slots
    count on from those that are no more. By partition and replica."""
    current = {slot.key for slot in slots}
    highest: dict[str, int] = {}
    for key, incarnation in context.reserved.items():
        if key not in current and key.count("/") == 2:
            place = place_of(key)
            highest[place] = max(incarnation, highest.get(place, 0))
    return highest


def _templates(
    running: Running, segments: Mapping[str, Segment], settings: Settings
) -> Callable[[str], str]:
    """The digest of what a segment's pods are made from today, computed where it is asked for."""

    @cache
    def template(segment: str) -> str:
        return task_template(running.view, running.topology, segments[segment], settings.pods)

    return template


def _has_started(context: ReconcileContext, pod: PodView) -> bool:
    """It serves, or has served, or works on its state, as the coordinator says."""
    if pod.node is None or pod.slot is None:
        return False
    report = context.data.task(pod.slot.key, pod.incarnation)
    return pod.was_ready or (report is not None and report.phase not in ("Waiting", "Failed"))


def _diverged(context: ReconcileContext, slot: Slot, pod: PodView) -> bool:
    """The verdict is about the incarnation that the coordinator reports, not its successor."""
    if context.stale_since is not None:
        return False
    return slot.key in context.data.diverged and bool(context.data.task(slot.key, pod.incarnation))


def was_suspended(context: ReconcileContext) -> bool:
    return bool(context.view.status.get("phase") == "Suspended")


@dataclass(frozen=True, slots=True)
class Replacement:
    """Not `due`: it was refused a moment ago. It has its part in the plan all the same."""

    state: SlotState
    incarnation: int
    create: CreatePod
    delete: DeletePod | None
    due: bool = True


def replacements(
    context: ReconcileContext,
    states: Iterable[SlotState],
    assessment: LossAssessment,
    now: float,
    settings: Settings,
) -> list[Replacement]:
    """For every slot that is vacant or whose pod is lost."""
    if context.running is None or not context.wants_pods:
        return []
    made = []
    for state in states:
        if state.loss is None and state.stand is not Stand.VACANT:
            continue
        incarnation = state.next_incarnation
        lost_at = _lost_at(state, now)
        manifest = task_pod(
            context.running.view,
            context.running.topology,
            context.running.generation,
            state.slot,
            incarnation,
            settings.pods,
            lost_at=lost_at,
            attempt=_attempt(state),
        )
        ref = SlotRef(context.view.uid, state.slot.key, incarnation)
        create = CreatePod(context.view.namespace, manifest, ref, lost_at)
        due = state.refused is None or now >= state.refused.again_at
        made.append(Replacement(state, incarnation, create, _removal(state, assessment), due))
    return made


def _lost_at(state: SlotState, now: float) -> float | None:
    """When the partition's replica was lost: a replacement that found no node passes it on."""
    if state.refused is not None:
        return state.refused.lost_at
    if state.loss is None:
        return None
    if not state.loss.of_what_ran and state.pod is not None:
        return state.pod.lost_at
    return now


def _attempt(state: SlotState) -> int:
    if state.loss in _TRIED_IN_VAIN and state.pod is not None:
        return state.pod.attempt + 1
    return 0


def _removal(state: SlotState, assessment: LossAssessment) -> DeletePod | None:
    pod, loss = state.pod, state.loss
    if pod is None or loss is None or pod.terminating:
        return None  # Terminating on a lost node: see `zombies`
    grace = 0 if assessment.loss_of_node(pod) else _SHORT_GRACE_S
    frees = loss is Loss.UNBOUND and pod.pinned in assessment.usable
    return DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace, loss.value, frees)


def surplus(
    context: ReconcileContext,
    states: Iterable[SlotState],
    snapshot: Snapshot,
    assessment: LossAssessment,
    now: float,
    timing: Timing,
) -> tuple[PodView, ...]:
    """Replicas that an edit has taken away from partitions that it left, and that are not lost:
    they serve on until one that stays is live, since they may be the only ones with the state."""
    current = {s.slot for s in states}
    partitions = {(slot.segment, slot.partition) for slot in current}
    return tuple(
        p
        for p in task_pods(context, snapshot)
        if p.slot is not None
        and p.slot not in current
        and (p.slot.segment, p.slot.partition) in partitions
        and (p.node is not None and not p.ended)
        and loss_of_pod(p, assessment, snapshot, now, timing) is None
        and not _diverged(context, p.slot, p)
    )


def leftovers(
    context: ReconcileContext,
    states: Iterable[SlotState],
    snapshot: Snapshot,
    assessment: LossAssessment,
    serving: Collection[PodView],
) -> list[Action]:
    """Fenced incarnations, and pods of slots that the topology has no more but those that are
    still `serving`."""
    current = {s.slot: s.pod for s in states}
    found: list[Action] = []
    for pod in task_pods(context, snapshot):
        if pod.terminating or pod.slot is None or context.running is None or pod in serving:
            continue
        if pod.slot not in current:
            found.append(_delete(pod, assessment, None, "its slot is no more in the topology"))
        elif (newest := current[pod.slot]) is not None and pod.name != newest.name:
            found.append(_delete(pod, assessment, _SHORT_GRACE_S, "a newer incarnation stands"))
    return found


def suspension(
    context: ReconcileContext, snapshot: Snapshot, assessment: LossAssessment
) -> list[Action]:
    """Tasks first, the coordinator after the last of them: it commits what they saved."""
    pods = [p for p in snapshot.pods if p.owner_uid == context.view.uid]
    tasks = [p for p in pods if p.role == names.ROLE_TASK]
    chosen = tasks or [p for p in pods if p.role == names.ROLE_COORDINATOR]
    return [_delete(p, assessment, None, "suspended") for p in chosen if not p.terminating]


def zombies(snapshot: Snapshot, assessment: LossAssessment) -> list[DeletePod]:
    """Nobody will ever confirm the end of a Terminating pod on a lost node; nor is there anyone to
    end the pods of a topology that is being deleted."""
    going = {t.uid for t in snapshot.topologies if t.deleting}
    return [
        DeletePod(p.namespace, p.name, p.uid, p.version, 0, "its node is lost")
        for p in snapshot.pods
        if p.topology is not None
        and assessment.loss_of_node(p)
        and (p.terminating or p.owner_uid in going)
    ]


def _delete(pod: PodView, assessment: LossAssessment, grace_s: int | None, why: str) -> DeletePod:
    grace = 0 if assessment.loss_of_node(pod) else grace_s
    return DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace, why)


def incarnations(made: Iterable[Replacement]) -> Mapping[str, int]:
    return {m.state.slot.key: m.incarnation for m in made}
