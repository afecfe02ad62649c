"""From the state of the cluster to actions: `reconcile(snapshot, now) -> [Action]`. Pure.

Level-triggered: whatever happened, and however often, the actions follow from the snapshot alone;
executing them and reconciling again converges. Kubernetes, Kopf and clocks are elsewhere
(`execute`, `handlers`, `loop`).

Design: docs/design/recovery.md, docs/design/kubernetes.md#watching.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rekindle.names import COORDINATOR_KEY
from rekindle_operator import compiled_specs
from rekindle_operator.cluster.model import IncarnationRef, Snapshot, TopologyView, without_forged
from rekindle_operator.compiled_specs import StillCompiling
from rekindle_operator.reconcile.actions import (
    FIRST,
    Action,
    CreatePod,
    DeletePod,
    GiveSlot,
    QuarantineNode,
    TopologyActions,
    WriteStatus,
)
from rekindle_operator.reconcile.avoid import nodes_to_avoid
from rekindle_operator.reconcile.capacity import capacity_left_by, measure_capacity
from rekindle_operator.reconcile.conditions import OperatorProblem
from rekindle_operator.reconcile.context import (
    PassInputs,
    ReconcileContext,
    build_context,
    reserved_incarnations,
)
from rekindle_operator.reconcile.coordinator import (
    CoordinatorReplacement,
    replace_coordinator,
    with_late_report,
)
from rekindle_operator.reconcile.events import PassResult, build_events
from rekindle_operator.reconcile.health import health_of, still_needed
from rekindle_operator.reconcile.isolation import IsolatedTopologies
from rekindle_operator.reconcile.moves import with_moves
from rekindle_operator.reconcile.operator_replicas import delete_lost_operator_replicas
from rekindle_operator.reconcile.owned import ensure_objects
from rekindle_operator.reconcile.partners import keep_partners
from rekindle_operator.reconcile.placeholders import (
    PlaceholderInputs,
    placeholder_actions,
    without_placeholders,
)
from rekindle_operator.reconcile.planning import (
    PlanInput,
    open_gates,
    ranks,
    with_pods_to_place,
    with_reasons,
)
from rekindle_operator.reconcile.preemption import deletions, ending_tasks, preempt
from rekindle_operator.reconcile.rebalancing import (
    GivenUp,
    any_pod_waits,
    begin_move,
    may_begin,
    moves_in_progress,
    node_loads,
    update_rebalancing,
)
from rekindle_operator.reconcile.records import has_new_digest
from rekindle_operator.reconcile.recovery_status import update_recovery
from rekindle_operator.reconcile.replacements import (
    end_mislabelled_pods,
    incarnations_to_reserve,
    replacements,
    surplus_replicas,
    suspend_pods,
    terminating_on_lost_nodes,
    unneeded_pods,
)
from rekindle_operator.reconcile.roll import roll_next
from rekindle_operator.reconcile.schedule import schedule
from rekindle_operator.reconcile.slots import SlotPair, SlotState, observe_slots
from rekindle_operator.reconcile.standby_plan import StandbyPlan, give_slots, plan_with_standbys
from rekindle_operator.reconcile.standbys import (
    end_standbys,
    give_way_to_standbys,
    make_standbys,
    standby_status,
)
from rekindle_operator.reconcile.status import (
    build_status,
    failed_status,
    operator_fields,
    without_per_epoch_fields,
)
from rekindle_operator.recovery.balance import NodeLoads
from rekindle_operator.recovery.losses import assess_nodes
from rekindle_operator.recovery.misfits import NodeCapacity
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.recovery.preemption import Preemption, without_pods
from rekindle_operator.settings import OperatorSettings


@dataclass(frozen=True, slots=True)
class ObservedTopology:
    """A topology, the actions on its generation records (accept the newest generation, delete
    unused ones), and the state of its slots.
    `superseded`: states of lost tasks that their successors in planned moves replace. `replicas`:
    each under both of its numbers. `given_up`: moves to emptier nodes that end now."""

    context: ReconcileContext
    record_actions: tuple[Action, ...]
    states: tuple[SlotState, ...]
    superseded: tuple[SlotState, ...]
    replicas: tuple[SlotPair, ...]
    given_up: tuple[GivenUp, ...]


@dataclass(frozen=True, slots=True)
class TopologyNeeds:
    """A topology's input to the plan, and what it needs independently of the plan."""

    observed: ObservedTopology
    plan_input: PlanInput
    coordinator: CoordinatorReplacement


def reconcile(
    snapshot: Snapshot, now: float, settings: OperatorSettings | None = None
) -> list[Action]:
    """`now`: seconds since 1970, by the clock of the times in the snapshot."""
    return [scheduled.action for scheduled in schedule(reconcile_all(snapshot, now, settings))]


def reconcile_all(
    snapshot: Snapshot, now: float, settings: OperatorSettings | None = None
) -> list[TopologyActions]:
    """The same, by topology. An error of one does not affect the others."""
    # 1. Assess which nodes are lost, without pods that only claim to belong to a topology.
    settings = settings or OperatorSettings()
    compiled_specs.start_pass()
    snapshot, placeholders = without_placeholders(snapshot)
    snapshot = without_forged(snapshot)
    losses = assess_nodes(snapshot, now, settings.timing)
    pass_inputs = PassInputs(snapshot, losses, now, settings)
    topologies = IsolatedTopologies()

    # 2. Open the context of each topology, and observe its slots.
    views = {view.uid: view for view in snapshot.topologies}
    observed = topologies.run(lambda view: _observe(view, pass_inputs), views)

    # 3. Find what each topology needs: pods, a coordinator.
    find_needs = partial(_find_needs, _without_topologies(pass_inputs))
    needs = topologies.run(find_needs, observed)

    # 4. Where nothing waits, begin a move to an emptier node.
    measure = partial(_measure_capacity, pass_inputs)
    capacity = topologies.run_together(lambda n: measure(list(n.values())), needs)
    needs = topologies.without_failed(needs)
    needs = _begin_rebalancing(pass_inputs, needs, capacity, topologies, find_needs)

    # 5. Make one plan over all topologies: which queries come back, on which nodes.
    ending = ending_tasks(pass_inputs, late=False)
    soon = without_pods(ending, capacity) if ending else None
    inputs = {uid: n.plan_input for uid, n in needs.items()}
    standbys = topologies.run_together(
        lambda i: plan_with_standbys(list(i.values()), capacity, soon), inputs
    )
    plan = standbys.plan
    asked = {i.context.view.uid: i for i in standbys.needs}
    needs = {uid: replace(needs[uid], plan_input=i) for uid, i in asked.items()}
    inputs = {i.context.view.uid: i for i in standbys.inputs}
    made = topologies.run_together(
        lambda n: _standbys_to_make(list(n.values()), standbys, capacity), needs
    )

    # 6. Decide what it takes away from what is down, and the actions of each topology: status,
    # Events, pods, gates; and what an autoscaler is to see.
    late = ending_tasks(pass_inputs, late=True)
    preemption = topologies.run_together(
        lambda i: preempt(list(i.values()), plan, standbys.soon or capacity, late), inputs
    )
    needs = topologies.without_failed(needs)
    decide = partial(_decide, standbys=standbys, made=made, preemption=preemption)
    decisions = topologies.run(decide, needs)

    given = PlaceholderInputs.of(pass_inputs, placeholders, decisions.values())
    decided = {uid: inputs[uid] for uid in decisions}
    autoscaling = topologies.run_together(lambda i: placeholder_actions(i, plan, given), decided)
    decisions = topologies.without_failed(decisions)

    # 7. Report topologies for which that failed. Accepting a newer generation may correct it.
    failed = [
        _report_failure(view, error, observed.get(uid), pass_inputs)
        for uid, view in views.items()
        if (error := topologies.errors.get(uid)) is not None
    ]

    # 8. Add what belongs to no topology: quarantine, the operator's replicas, pods on lost nodes.
    uids = {node.name: node.uid for node in snapshot.nodes}
    quarantined = tuple(
        QuarantineNode(name, uids[name], now) for name in sorted(losses.newly_silent & uids.keys())
    )
    deletions = tuple(delete_lost_operator_replicas(snapshot, losses, now, settings))
    return [
        TopologyActions("", quarantined),
        TopologyActions("replicas of the operator", deletions),
        *_by_namespace(terminating_on_lost_nodes(snapshot, losses)),
        *decisions.values(),
        *autoscaling,
        *failed,
    ]


def report_undecided(
    view: TopologyView,
    problem: OperatorProblem,
    now: float,
    missing: Collection[str],
    generations: Mapping[int, str] | None = None,
) -> TopologyActions:
    """Of a topology for which nothing can be decided: only its status. `missing`: fields that the
    CRD lacks. `generations`: digests of accepted generation records, if they differ from those of
    the last status."""
    if generations is None:
        generations = view.operator_status.generations
    status = failed_status(view, problem, now, generations, missing)
    if status == operator_fields(view.status):
        return TopologyActions(view.key, (), topology_uid=view.uid)
    accepts_generation = has_new_digest(view, generations or {})
    urgent = without_per_epoch_fields(status) != without_per_epoch_fields(view.status)
    write = WriteStatus(
        view.namespace,
        view.name,
        view.uid,
        view.version,
        view.status,
        status,
        urgent=urgent,
        accepts_generation=accepts_generation,
    )
    return TopologyActions(view.key, (write,), topology_uid=view.uid)


def _observe(view: TopologyView, pass_inputs: PassInputs) -> ObservedTopology:
    context, record_actions = build_context(view, pass_inputs)
    moves = moves_in_progress(context, observe_slots(context))
    moved = with_moves(context, moves.replicas, moves.leaving)
    rolled = moved.states if view.deleting else roll_next(context, moved.states)
    states = give_way_to_standbys(context, keep_partners(context, rolled))
    return ObservedTopology(
        context, tuple(record_actions), states, moved.superseded, moves.replicas, moves.given_up
    )


class RecordMissing(Exception):
    """Of the generation that runs: nothing can be decided."""


def _without_topologies(pass_inputs: PassInputs) -> dict[str, NodeCapacity]:
    """See `with_pods_to_place`; empty if no node is unsuitable for any pod, since nothing asks."""
    snapshot = pass_inputs.snapshot
    foreign = (p for p in snapshot.pods if p.topology is None)
    return capacity_left_by(pass_inputs, foreign) if snapshot.unsuitable else {}


def _find_needs(
    without_topologies: Mapping[str, NodeCapacity], observed: ObservedTopology
) -> TopologyNeeds:
    context, states = observed.context, observed.states
    if context.missing_record:
        raise RecordMissing(context.missing_record)
    coordinator = replace_coordinator(context)
    plan_input = PlanInput(
        context,
        () if context.view.deleting else states,
        replacements(context, states, coordinator.refused),
        surplus_replicas(context, states),
    )
    return TopologyNeeds(observed, with_pods_to_place(plan_input, without_topologies), coordinator)


def _begin_rebalancing(
    pass_inputs: PassInputs,
    needs: Mapping[str, TopologyNeeds],
    capacity: Capacity,
    topologies: IsolatedTopologies,
    find_needs: Callable[[ObservedTopology], TopologyNeeds],
) -> dict[str, TopologyNeeds]:
    """The needs, of which one may have the successor of a task that moves to an emptier node: one
    in a pass, since it changes how full nodes are."""
    found = dict(needs)
    ready = topologies.run(lambda n: may_begin(n.plan_input.context, n.plan_input.states), needs)
    waits = topologies.run(lambda n: any_pod_waits(n.plan_input, capacity), needs)
    if any(ready.values()) and not any(waits.values()):
        loads = node_loads(pass_inputs, capacity)
        may_move = {uid: needs[uid].observed for uid, is_ready in ready.items() if is_ready}
        for uid in sorted(may_move, key=lambda uid: may_move[uid].context.view.key):
            moving = topologies.run(lambda o: _with_move(o, loads), {uid: may_move[uid]})
            if uid in moving and moving[uid] is not may_move[uid]:
                found |= topologies.run(find_needs, moving)
                break
    return topologies.without_failed(found)


def _with_move(observed: ObservedTopology, loads: NodeLoads) -> ObservedTopology:
    """With the successor of a task that is to move; unchanged if none is."""
    context, states = observed.context, observed.states
    successor = begin_move(context, states, observed.replicas, loads)
    return replace(observed, states=(*states, successor)) if successor is not None else observed


def _measure_capacity(pass_inputs: PassInputs, needs: Sequence[TopologyNeeds]) -> Capacity:
    states = [s for n in needs for s in n.plan_input.states]
    # Replaced before they ran, in a roll or in a planned move: this pass deletes them.
    deleted = {s.pod.uid for s in states if s.pod and s.loss and not s.loss.counts_as_failure}
    coordinators = [n.coordinator.pod for n in needs if n.coordinator.pod is not None]
    return measure_capacity(pass_inputs, deleted, coordinators)


def _standbys_to_make(
    needs: Iterable[TopologyNeeds], standbys: StandbyPlan, capacity: Capacity
) -> dict[str, CreatePod]:
    """None while the plan opens gates, since a start takes a core, ends standbys, or keeps what is
    free for a query until more is; and none in a namespace where a quota keeps a task waiting."""
    plan = standbys.plan
    if plan.nodes or standbys.ending or (standbys.soon is not None and plan.waiting):
        return {}
    contexts = (n.plan_input.context for n in needs)
    may_have = [c for c in contexts if c.view.namespace not in standbys.full]
    return make_standbys(may_have, capacity)


def _decide(
    needs: TopologyNeeds,
    standbys: StandbyPlan,
    made: Mapping[str, CreatePod],
    preemption: Preemption | None,
) -> TopologyActions:
    """One topology's actions; `schedule` gives them their order."""
    plan = standbys.plan
    needs = replace(needs, plan_input=with_reasons(needs.plan_input, plan))
    plan_input, coordinator = needs.plan_input, needs.coordinator
    context, states = plan_input.context, plan_input.states
    key = context.view.key
    if context.view.deleting:
        report = (*_report(needs, plan, ()), *needs.observed.record_actions)
        return TopologyActions(key, report, topology_uid=context.view.uid)

    # 1. What pods need, and the coordinator, which does not wait for the plan.
    actions: list[Action] = [*ensure_objects(context)]
    actions += [*coordinator.prepare, *coordinator.create, *coordinator.remove]

    # 2. Status and Events; then the record of a new generation, which waits for the status.
    given = give_slots(plan_input, standbys)
    actions += [*_report(needs, plan, given), *needs.observed.record_actions]

    # 3. Pods that replace lost ones, standbys that do, and gates that the plan opens.
    replaced = plan_input.replacements
    # Their nodes did not run them, or gave wrong results.
    leaving = [*(r.state for r in replaced), *(g.state for g in needs.observed.given_up)]
    actions += nodes_to_avoid(leaving, context.pass_inputs.losses)
    slots = {action.ref.slot for action in given}
    actions += [*given, *(r.create for r in replaced if r.due and r.state.slot.key not in slots)]
    actions += open_gates(plan_input, plan)

    # 4. Pods that are no longer needed.
    # What gives its slot to a standby ends once that has it: until then the request may fail.
    actions += [r.delete for r in replaced if r.delete and r.state.slot.key not in slots]
    actions += deletions(plan_input, preemption)
    actions += end_standbys(context, standbys.taken, standbys.ending)
    actions += [made[context.view.uid]] if context.view.uid in made else []
    actions += end_mislabelled_pods(context)
    if context.suspended:
        actions += suspend_pods(context)
    else:
        serving = still_needed(context, states, plan_input.surplus)
        actions += unneeded_pods(context, states, serving)

    plan_order = {ranked.key: n for n, ranked in enumerate((*plan.starting_now, *plan.waiting))}
    order = ranks(plan_input, plan_order) | dict.fromkeys(
        [*(a.name for a in coordinator.create), *(a.name for a in given)], FIRST
    )
    return TopologyActions(key, tuple(actions), ranks=order, topology_uid=context.view.uid)


def _report(needs: TopologyNeeds, plan: Plan, given: Sequence[GiveSlot]) -> list[Action]:
    """Status, if it differs, and Events: none while the topology is being deleted, since nothing
    that ends then is a loss."""
    plan_input, coordinator = needs.plan_input, needs.coordinator
    context = with_late_report(plan_input.context)
    view = context.view
    states = needs.observed.states if view.deleting else plan_input.states
    taken = dict(incarnations_to_reserve(plan_input.replacements))
    taken |= {action.ref.slot: action.ref.incarnation for action in given}
    if coordinator.incarnation is not None:
        taken[COORDINATOR_KEY] = coordinator.incarnation
    health = health_of(
        context, states, plan_input.surplus, plan.queries_over_namespace_limit(view.key)
    )
    # The recovery status of a generation that only another version can compile is kept.
    running = context.running is not None
    with_lost = (*states, *needs.observed.superseded)
    recovery = update_recovery(context, with_lost, health, plan) if running else None
    incarnations = reserved_incarnations(context, taken)
    rebalancing = update_rebalancing(plan_input.context, states, needs.observed.given_up)
    problem = _operator_problem(context)
    standby = standby_status(context)
    built = build_status(
        context, states, health, recovery, rebalancing, incarnations, problem, standby
    )
    actions: list[Action] = []
    if built.written != operator_fields(view.status):
        urgent = without_per_epoch_fields(built.written) != without_per_epoch_fields(view.status)
        new_incarnations = frozenset(
            IncarnationRef(view.uid, slot, incarnation)
            for slot, incarnation in taken.items()
            if incarnation > context.reserved.get(slot, 0)
        )
        accepts_generation = has_new_digest(view, context.generations)
        actions.append(
            WriteStatus(
                view.namespace,
                view.name,
                view.uid,
                view.version,
                view.status,
                built.written,
                urgent=urgent,
                new_incarnations=new_incarnations,
                accepts_generation=accepts_generation,
            )
        )
    if view.deleting:
        return actions
    result = PassResult(context, states, plan, built.status, coordinator, needs.observed.superseded)
    return [*actions, *build_events(result)]


def _operator_problem(context: ReconcileContext) -> OperatorProblem | None:
    snapshot, losses = context.pass_inputs.snapshot, context.pass_inputs.losses
    if losses.why_not_lost:
        return OperatorProblem("NodesNotReady", losses.why_not_lost)
    if snapshot.stalled_watches:
        kinds = ", ".join(snapshot.stalled_watches)
        message = f"no watch events or bookmarks from the API server for {kinds}"
        return OperatorProblem("WatchStalled", message)
    failure = snapshot.failures.get(context.view.uid)
    return OperatorProblem("ActionFailed", failure) if failure else None


def _report_failure(
    view: TopologyView, error: Exception, observed: ObservedTopology | None, pass_inputs: PassInputs
) -> TopologyActions:
    now, missing = pass_inputs.now, pass_inputs.snapshot.crd_missing_fields
    if isinstance(error, StillCompiling):
        return report_undecided(view, OperatorProblem("Compiling", str(error)), now, missing)
    problem = OperatorProblem("ReconcileFailed", f"reconcile failed, no actions taken: {error!r}")
    if is_missing := isinstance(error, RecordMissing):
        problem = OperatorProblem("RecordMissing", str(error))
    record_actions = observed.record_actions if observed is not None else ()
    generations = observed.context.generations if observed is not None else None
    report = report_undecided(view, problem, now, missing, generations).actions
    failure = None if is_missing else error
    return TopologyActions(view.key, (*report, *record_actions), failure, topology_uid=view.uid)


def _by_namespace(pods: Sequence[DeletePod]) -> list[TopologyActions]:
    """So that one pod that cannot be read or deleted delays few others."""
    found: dict[str, list[DeletePod]] = defaultdict(list)
    for pod in pods:
        found[pod.namespace].append(pod)
    return [TopologyActions(f"pods of {name}", tuple(found[name])) for name in sorted(found)]
