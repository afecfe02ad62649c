"""From what is to what to do: `reconcile(snapshot, now) -> [Action]`. Pure and level-triggered.

Whatever happened, and however often, the answer follows from the snapshot alone: applying the
actions and reconciling again converges. Kubernetes, Kopf and clocks are elsewhere (`execute`,
`handlers`, `loop`).

Design: docs/design/recovery.md, docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rekindle.names import COORDINATOR_SLOT
from rekindle_operator.cluster.model import SlotRef, Snapshot, TopologyView, without_forged
from rekindle_operator.reconcile.actions import (
    Action,
    CreateToken,
    DeletePod,
    QuarantineNode,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.reconcile.avoid import nodes_to_avoid
from rekindle_operator.reconcile.capacity import (
    PlanInput,
    measure_capacity,
    open_gates,
    plan_all,
    ranks,
    with_candidates,
)
from rekindle_operator.reconcile.conditions import OperatorProblem
from rekindle_operator.reconcile.context import ReconcileContext, open_context, reservation
from rekindle_operator.reconcile.coordinator import CoordinatorReplacement, keep_coordinator
from rekindle_operator.reconcile.events import Change, tell
from rekindle_operator.reconcile.health import examine, still_needed
from rekindle_operator.reconcile.peers import lost_peers
from rekindle_operator.reconcile.progress import follow
from rekindle_operator.reconcile.roll import roll_next
from rekindle_operator.reconcile.schedule import schedule
from rekindle_operator.reconcile.slots import (
    SlotState,
    incarnations,
    leftovers,
    observe_slots,
    replacements,
    surplus,
    suspension,
    zombies,
)
from rekindle_operator.reconcile.status import build_status, failed_status, owned, without_figures
from rekindle_operator.recovery.losses import LossAssessment, assess_nodes
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.resources.access import token_secret
from rekindle_operator.settings import Settings

T = TypeVar("T")
R = TypeVar("R")


def reconcile(snapshot: Snapshot, now: float, settings: Settings | None = None) -> list[Action]:
    """`now`: seconds since 1970, by the clock that stamped the snapshot."""
    return [step.action for step in schedule(reconcile_all(snapshot, now, settings))]


def reconcile_all(
    snapshot: Snapshot, now: float, settings: Settings | None = None
) -> list[TopologyActions]:
    """The same, by topology: one that cannot be served, or that trips a fault of ours, holds up no
    other."""
    settings = settings or Settings()
    snapshot = without_forged(snapshot)
    assessment = assess_nodes(snapshot, now, settings.timing)
    faults = Faults()

    def survey(view: TopologyView) -> ObservedTopology:
        context, accepting = open_context(
            view, snapshot, settings, view.uid in assessment.fresh, now
        )
        counted = context.wants_pods
        states = observe_slots(context, snapshot, assessment, now, settings) if counted else ()
        states = roll_next(context, states)
        return ObservedTopology(context, tuple(accepting), states)

    def prepare(observed: ObservedTopology) -> Prepared:
        context, states = observed.context, observed.states
        made = replacements(context, states, assessment, now, settings)
        replacement = keep_coordinator(context, snapshot, assessment, now, settings)
        serving = surplus(context, states, snapshot, assessment, now, settings.timing)
        plan_input = with_candidates(
            PlanInput(context, states, tuple(made), serving), snapshot, assessment
        )
        return Prepared(observed.accepting, plan_input, replacement)

    def act(prepared: Prepared) -> TopologyActions:
        plan_input, replacement = prepared.plan_input, prepared.replacement
        own = _turn(plan_input, replacement, snapshot, assessment, plan, now)
        order = ranks(plan_input, places) | {a.name: (-1, 0) for a in replacement.create}
        return TopologyActions(
            plan_input.context.view.key, (*prepared.accepting, *own), ranks=order
        )

    observed = faults.without(survey, {view.uid: view for view in snapshot.topologies})
    prepared = faults.without(prepare, observed)
    plan = _plan(list(prepared.values()), snapshot, assessment, now, settings)
    places = {ranked.key: n for n, ranked in enumerate((*plan.order, *plan.waiting))}
    decisions = faults.without(act, prepared)
    quarantines = TopologyActions(
        "", tuple(QuarantineNode(n, now) for n in sorted(assessment.newly_silent))
    )
    # What accepts a newer generation is done all the same: that may be the way out.
    faulty = [
        TopologyActions(
            view.key,
            (
                *(observed[view.uid].accepting if view.uid in observed else ()),
                *_say(fault, view, now),
            ),
            fault,
        )
        for view in snapshot.topologies
        if (fault := faults.found.get(view.uid)) is not None
    ]
    peers = TopologyActions(
        "replicas of the operator", tuple(lost_peers(snapshot, assessment, now, settings))
    )
    return [
        quarantines,
        peers,
        *_removed(zombies(snapshot, assessment)),
        *decisions.values(),
        *faulty,
    ]


def _removed(pods: Sequence[DeletePod]) -> list[TopologyActions]:
    """By namespace, so that one pod that cannot be read or deleted holds up few others."""
    by_namespace: dict[str, list[DeletePod]] = defaultdict(list)
    for pod in pods:
        by_namespace[pod.namespace].append(pod)
    return [
        TopologyActions(f"pods of {name}", tuple(found))
        for name, found in sorted(by_namespace.items())
    ]


@dataclass(frozen=True, slots=True)
class ObservedTopology:
    """A topology, what accepting its newest generation takes, and how its slots are."""

    context: ReconcileContext
    accepting: tuple[Action, ...]
    states: tuple[SlotState, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What it brings to the plan, and what it needs whatever the plan says."""

    accepting: tuple[Action, ...]
    plan_input: PlanInput
    replacement: CoordinatorReplacement


class Faults:
    """Steps that are taken for each topology apart from the others; `found`: by uid."""

    def __init__(self) -> None:
        self.found: dict[str, Exception] = {}

    def without(self, step: Callable[[T], R], inputs: Mapping[str, T]) -> dict[str, R]:
        """The results of those that trip no fault."""
        done = {}
        for uid, value in inputs.items():
            try:
                done[uid] = step(value)
            except Exception as fault:
                self.found[uid] = fault
        return done


def report_undecided(view: TopologyView, trouble: OperatorProblem, now: float) -> TopologyActions:
    """Of a topology that nothing can be done for: say so."""
    status = failed_status(view, trouble, now)
    if view.deleting or status == owned(view.status):
        return TopologyActions(view.key, ())
    return TopologyActions(
        view.key, (WriteStatus(view.namespace, view.name, view.uid, status, urgent=True),)
    )


def _say(fault: Exception, view: TopologyView, now: float) -> tuple[Action, ...]:
    why = f"the operator failed to decide what to do: {fault!r}"
    return report_undecided(view, OperatorProblem("ReconcileFailed", why), now).actions


def _trouble(
    context: ReconcileContext, snapshot: Snapshot, assessment: LossAssessment
) -> OperatorProblem | None:
    if assessment.trouble:
        return OperatorProblem("NodesNotReady", assessment.trouble)
    if snapshot.stalled:
        kinds = ", ".join(snapshot.stalled)
        return OperatorProblem(
            "WatchStalled", f"the API server is not heard on the watches of {kinds}"
        )
    failure = snapshot.failures.get(context.view.key)
    return OperatorProblem("ActionFailed", failure) if failure else None


def _plan(
    prepared: Sequence[Prepared],
    snapshot: Snapshot,
    assessment: LossAssessment,
    now: float,
    settings: Settings,
) -> Plan:
    """One plan over all topologies."""
    inputs = [p.plan_input for p in prepared]
    states = [s for plan_input in inputs for s in plan_input.states]
    withdrawn = [s.pod.uid for s in states if s.pod and s.loss and not s.loss.of_what_ran]
    coordinators = [p.replacement.pod for p in prepared if p.replacement.pod is not None]
    capacity = measure_capacity(snapshot, assessment, withdrawn, coordinators, settings.limits)
    return plan_all(inputs, capacity, now, settings)


def _turn(
    plan_input: PlanInput,
    replacement: CoordinatorReplacement,
    snapshot: Snapshot,
    assessment: LossAssessment,
    plan: Plan,
    now: float,
) -> list[Action]:
    """One topology's actions; `schedule` says in which order they are done."""
    context = plan_input.context
    if context.view.deleting:
        return []
    taken = dict(incarnations(plan_input.made))
    if replacement.incarnation is not None:
        taken[COORDINATOR_SLOT] = replacement.incarnation
    over_share = plan.over_share_of(context.view.key)
    health = examine(context, plan_input.states, plan_input.surplus, over_share)
    recovery = follow(context, plan_input.states, health, assessment, plan, now)
    status = build_status(
        context,
        plan_input.states,
        health,
        recovery,
        reservation(context, taken, snapshot),
        _trouble(context, snapshot, assessment),
        now,
    )
    actions: list[Action] = [*replacement.prepare, *replacement.create, *replacement.remove]
    if owned(status) != owned(context.view.status):
        slow = without_figures(status) != without_figures(context.view.status)
        view = context.view
        fresh = frozenset(
            SlotRef(view.uid, slot, n)
            for slot, n in taken.items()
            if n > context.reserved.get(slot, 0)
        )
        actions.append(WriteStatus(view.namespace, view.name, view.uid, owned(status), slow, fresh))
    change = Change(
        context,
        plan_input.states,
        assessment,
        plan,
        status,
        replacement.why,
        replacement.incarnation,
    )
    actions += tell(change)
    if replacement.create or any(m.due for m in plan_input.made):
        actions.append(CreateToken(context.view.namespace, token_secret(context.view)))
    actions += nodes_to_avoid((m.state for m in plan_input.made), assessment)
    actions += [m.create for m in plan_input.made if m.due]
    actions += open_gates(plan_input, plan, now)
    actions += [m.delete for m in plan_input.made if m.delete is not None]
    if context.suspended:
        actions += suspension(context, snapshot, assessment)
    else:
        serving = still_needed(context, plan_input.states, plan_input.surplus)
        actions += leftovers(context, plan_input.states, snapshot, assessment, serving)
    return actions
