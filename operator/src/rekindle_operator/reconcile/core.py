"""From what is to what to do: `reconcile(snapshot, now) -> [Action]`. Pure and level-triggered.

Whatever happened, and however often, the answer follows from the snapshot alone: applying the
actions and reconciling again converges. Kubernetes, Kopf and clocks are elsewhere (`execute`,
`handlers`, `loop`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle_operator.cluster.model import Snapshot
from rekindle_operator.events import Change, tell
from rekindle_operator.names import COORDINATOR_SLOT
from rekindle_operator.reconcile.actions import Action, ShunNode, Turn, WriteStatus
from rekindle_operator.reconcile.capacity import (
    Work,
    measure,
    opened_gates,
    plan_all,
    with_candidates,
)
from rekindle_operator.reconcile.case import Case, open_case, reservation
from rekindle_operator.reconcile.coordinator import Succession, keep_coordinator
from rekindle_operator.reconcile.health import examine
from rekindle_operator.reconcile.progress import follow
from rekindle_operator.reconcile.slots import (
    SlotState,
    census,
    has_new_loss,
    incarnations,
    leftovers,
    replacements,
    suspension,
    withdraw_open,
    zombies,
)
from rekindle_operator.recovery.judge import Judgement, Loss, judge_nodes
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.settings import Settings
from rekindle_operator.status import build_status, owned, without_figures


def reconcile(snapshot: Snapshot, now: float, settings: Settings | None = None) -> list[Action]:
    """`now`: seconds since 1970, by the clock that stamped the snapshot."""
    return [action for turn in take_turns(snapshot, now, settings) for action in turn.actions]


def take_turns(snapshot: Snapshot, now: float, settings: Settings | None = None) -> list[Turn]:
    """The same, by topology: one that cannot be served holds up no other."""
    settings = settings or Settings()
    judgement = judge_nodes(snapshot, now, settings.timing)
    opened = [open_case(view, snapshot, settings.pods) for view in snapshot.topologies]
    states = _all_states([case for case, _ in opened], snapshot, judgement, now, settings)
    successions = [keep_coordinator(case, snapshot, judgement, now, settings) for case, _ in opened]
    works = [
        with_candidates(Work(case, own, tuple(replacements(case, own, judgement, now, settings))))
        for (case, _), own in zip(opened, states, strict=True)
    ]
    withdrawn = [s.pod.uid for own in states for s in own if s.pod and s.loss is Loss.UNBOUND]
    new_coordinators = sum(s.incarnation is not None for s in successions)
    room = measure(snapshot, judgement, withdrawn, new_coordinators)
    plan = plan_all(works, room, now, settings.timing)
    common = [ShunNode(n, now) for n in sorted(judgement.newly_silent)]
    turns = [Turn("", (*common, *zombies(snapshot, judgement)))]
    for (case, accepting), work, succession in zip(opened, works, successions, strict=True):
        own = _turn(work, succession, snapshot, judgement, plan, now)
        turns.append(Turn(case.view.key, (*accepting, *own)))
    return turns


def _all_states(
    cases: Sequence[Case],
    snapshot: Snapshot,
    judgement: Judgement,
    now: float,
    settings: Settings,
) -> list[tuple[SlotState, ...]]:
    states = [
        census(case, snapshot, judgement, now, settings) if case.wants_pods else ()
        for case in cases
    ]
    if any(has_new_loss(own) for own in states):
        states = [withdraw_open(own) for own in states]
    return states


def _turn(
    work: Work,
    succession: Succession,
    snapshot: Snapshot,
    judgement: Judgement,
    plan: Plan,
    now: float,
) -> list[Action]:
    """One topology's actions, in the order in which they must be done."""
    case = work.case
    if case.view.deleting:
        return []
    taken = dict(incarnations(work.made))
    if succession.incarnation is not None:
        taken[COORDINATOR_SLOT] = succession.incarnation
    health = examine(case, work.states)
    recovery = follow(case, work.states, health, judgement, plan, now)
    status = build_status(case, work.states, health, recovery, reservation(case, taken), now)
    actions: list[Action] = [*succession.prepare]
    if owned(status) != owned(case.view.status):
        slow = without_figures(status) != without_figures(case.view.status)
        view = case.view
        actions.append(WriteStatus(view.namespace, view.name, view.uid, owned(status), slow))
    change = Change(
        case, work.states, judgement, plan, status, succession.why, succession.incarnation
    )
    actions += tell(change)
    actions += succession.create
    actions += succession.remove
    actions += [m.create for m in work.made]
    actions += opened_gates(work, plan, now)
    actions += [m.delete for m in work.made if m.delete is not None]
    if case.suspended:
        actions += suspension(case, snapshot, judgement)
    else:
        actions += leftovers(case, work.states, snapshot, judgement)
    return actions
