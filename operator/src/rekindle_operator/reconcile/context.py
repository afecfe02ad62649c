"""One topology in a reconcile pass: which generation runs, what is wrong with the newest. Pure.

A generation is accepted when the status has the digest of its generation record (a ConfigMap), and
the record exists (`reconcile.records`). Until then, and if it is refused, no pods change: the
newest accepted generation stays in force.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rekindle import names
from rekindle.errors import Problem
from rekindle.report import Report
from rekindle.topology.model import Slot, Topology
from rekindle_operator.cluster.amounts import total
from rekindle_operator.cluster.convert import as_of_generation, pod_requests
from rekindle_operator.cluster.model import (
    GenerationRecordView,
    PodView,
    Snapshot,
    TopologyView,
    record_digest,
)
from rekindle_operator.cluster.quota import PodExchange
from rekindle_operator.compiled_specs import Compiled, Rejected, StillCompiling, compile_spec
from rekindle_operator.pod_policy import policy_problems, task_limit_problems
from rekindle_operator.reconcile.actions import (
    Action,
    CreateGenerationRecord,
    DeleteGenerationRecord,
    DryRun,
)
from rekindle_operator.reconcile.records import (
    KEPT_GENERATIONS,
    GenerationRecords,
    find_generation_records,
    foreign_record_problem,
    listed_generations,
    missing_record_message,
)
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.resources.common import Manifest, generation_record, record_manifest
from rekindle_operator.resources.coordinator import coordinator_pod, coordinator_template_digest
from rekindle_operator.resources.owned import is_as_wanted, owned_objects, token_of
from rekindle_operator.resources.task import task_pod, task_template_digest
from rekindle_operator.settings import OperatorSettings, PodDefaults, Timing
from rekindle_operator.tokens import TokenDigests
from rekindle_operator.topology_status import TopologyStatus

_DRY_RUN_RETRY_S = 30.0  # a webhook may have been the reason for a refusal
_QUOTA_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What all topologies of a pass share. `now`: seconds since 1970, by the clock of the times in
    the snapshot."""

    snapshot: Snapshot
    losses: LossAssessment
    now: float
    settings: OperatorSettings

    @property
    def timing(self) -> Timing:
        return self.settings.timing


@dataclass(frozen=True, slots=True)
class CompiledGeneration:
    """A generation that runs, or may once it is accepted: its view (spec as recorded), compiled."""

    view: TopologyView
    topology: Topology

    @property
    def generation(self) -> int:
        return self.view.generation


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a generation is neither accepted nor refused yet; `reason`: of condition `Valid`."""

    reason: str
    what: str


_VALIDATION = Waiting("Checking", "validation of the spec and its pods")
_RECORD = Waiting("Checking", "its generation record to be created")


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    """One topology in one pass."""

    pass_inputs: PassInputs
    view: TopologyView  # with the newest spec, whether accepted or not
    # The newest accepted generation; None if there is none, or this version cannot compile it.
    running: CompiledGeneration | None
    problems: tuple[Problem, ...]  # of the newest generation
    acceptance_waits: Waiting | None  # None: it is accepted or refused
    generations: Mapping[int, str]  # digests of records, as the status is to list them
    # When the coordinator's report was last known to be true, if that is too long ago to prove
    # anything; None while the report is fresh.
    report_stale_since: float | None = None
    report_age_s: float = 0.0  # of a late one that counts in words: `with_late_report`
    max_priority: int | None = None  # that the administrator grants the namespace
    # The generation before `running`, while the status has not reported that that is accepted.
    previous: CompiledGeneration | None = None
    newer_image: str = ""  # which the next edit of the spec adopts; empty: it stays the same
    token: TokenDigests | None = None  # None: the topology's Secret does not exist
    missing_record: str = ""  # of the generation that runs: nothing else is decided

    @property
    def report(self) -> Report:
        """Of the coordinator."""
        return self.view.report

    @property
    def last_status(self) -> TopologyStatus:
        """What the operator wrote last."""
        return self.view.operator_status

    @property
    def reserved(self) -> Mapping[str, int]:
        """Slot key -> incarnation."""
        return self.last_status.incarnations

    @property
    def suspended(self) -> bool:
        return self.running is not None and self.running.topology.spec.suspend

    @property
    def has_slots(self) -> bool:
        """Also while it is being deleted: then they are observed, and nothing is replaced."""
        return self.running is not None and not self.suspended

    @property
    def needs_pods(self) -> bool:
        return self.has_slots and not self.view.deleting


def build_context(
    view: TopologyView, pass_inputs: PassInputs
) -> tuple[ReconcileContext, list[Action]]:
    """The context, and the actions that accept its newest generation."""
    snapshot, settings = pass_inputs.snapshot, pass_inputs.settings
    records = find_generation_records(view, snapshot, settings.pods.image)
    running = _newest_running(view, records)
    acceptance = _Acceptance(running)
    if not view.deleting and (running is None or running.generation != view.generation):
        acceptance = _accept(view, running, records, pass_inputs)
    is_reported = view.uid in pass_inputs.losses.freshly_reported
    context = ReconcileContext(
        pass_inputs=pass_inputs,
        view=view,
        running=acceptance.running,
        problems=acceptance.problems,
        acceptance_waits=acceptance.waits,
        generations=listed_generations(records, view.generation, acceptance.digest),
        previous=_previous(view, acceptance.running, records),
        newer_image=_newer_image(view, acceptance.running, settings.pods),
        report_stale_since=None if is_reported else snapshot.report_times.get(view.uid),
        max_priority=settings.limits.max_priority(view.namespace),
        token=token_of(view, snapshot),
        missing_record=_missing_record(view, acceptance, records),
    )
    restored = [] if view.deleting else _restored_records(view, records)
    return context, [*restored, *acceptance.actions, *_unused_records(context, records)]


@dataclass(frozen=True, slots=True)
class _Acceptance:
    """Whether the newest generation is accepted; `running`: the generation that runs now;
    `waits`: what the decision waits for; `digest`: of the record that this pass creates."""

    running: CompiledGeneration | None
    problems: tuple[Problem, ...] = ()
    waits: Waiting | None = None
    actions: tuple[Action, ...] = ()
    digest: str = ""


def _accept(
    view: TopologyView,
    running: CompiledGeneration | None,
    records: GenerationRecords,
    pass_inputs: PassInputs,
) -> _Acceptance:
    """Compile it, check it against the administrator's policy, check all that it needs by a dry run
    in the API server; then record it."""
    defaults = pass_inputs.settings.pods
    try:
        compiled = compile_spec(view.name, view.spec)
    except StillCompiling:
        return _Acceptance(running, waits=_VALIDATION)
    match compiled:
        case Rejected(problems):
            return _Acceptance(running, problems)
        case Compiled(topology):
            candidate = CompiledGeneration(view, topology)
    refused = policy_problems(view.spec, defaults.policy) or task_limit_problems(
        len(tuple(topology.slots())) + (topology.spec.recovery.standby or 0), defaults.policy
    )
    if refused:
        return _Acceptance(running, tuple(refused))
    result = pass_inputs.snapshot.dry_runs.get((view.uid, view.generation))
    if result is not None and not result.problems and not result.waits_for:
        return _record(candidate, running, records, defaults)
    decision = _Acceptance(running, waits=_VALIDATION)
    if result is not None:
        waits = (
            Waiting("QuotaFull", f"room in a quota: {result.waits_for}")
            if not result.problems
            else None
        )
        decision = _Acceptance(running, result.problems, waits)
        retry_s = _DRY_RUN_RETRY_S if result.problems else _QUOTA_RETRY_S
        if pass_inputs.now - result.at < retry_s:
            return decision
    dry_run = _dry_run(candidate, running, pass_inputs)
    if isinstance(dry_run, Problem):
        return _Acceptance(running, (dry_run,))
    return replace(decision, actions=(dry_run,))


def _record(
    candidate: CompiledGeneration,
    running: CompiledGeneration | None,
    records: GenerationRecords,
    defaults: PodDefaults,
) -> _Acceptance:
    """Accept a generation whose record exists, or create the record: it runs from the pass on that
    sees it. An existing record is never replaced."""
    manifest = generation_record(candidate.view, defaults.image)
    digest = record_digest(manifest["data"][names.TOPOLOGY_KEY])
    existing = records.of_generation(candidate.generation)
    if existing is None:
        create = CreateGenerationRecord(candidate.view.namespace, manifest)
        return _Acceptance(running, waits=_RECORD, actions=(create,), digest=digest)
    if existing.digest == digest:
        return _Acceptance(candidate, digest=digest)
    return _Acceptance(running, (foreign_record_problem(existing),))


def _newer_image(
    view: TopologyView, running: CompiledGeneration | None, defaults: PodDefaults
) -> str:
    """The operator's default, where the generation that runs has recorded another one."""
    if running is None or running.generation != view.generation:
        return ""
    wanted = str(view.spec.get("image") or defaults.image)
    return "" if running.view.spec.get("image", wanted) == wanted else wanted


def _newest_running(view: TopologyView, records: GenerationRecords) -> CompiledGeneration | None:
    """None also if another version of the operator accepted what this one cannot compile, or if its
    record is missing: its pods stay unchanged. If an older record were used instead, they would be
    deleted. Raises StillCompiling."""
    if not records.accepted or records.missing:
        return None
    return _as_recorded(view, records.accepted[-1])


def _missing_record(view: TopologyView, acceptance: _Acceptance, records: GenerationRecords) -> str:
    """What to do about it; empty if it is not missing, or a newer generation runs."""
    if not records.missing or acceptance.running is not None or view.deleting:
        return ""
    waits = acceptance.waits or _VALIDATION
    problems = "; ".join(map(str, acceptance.problems))
    return missing_record_message(view, records, problems or f"waiting for {waits.what}")


def _restored_records(view: TopologyView, records: GenerationRecords) -> list[Action]:
    return [
        CreateGenerationRecord(view.namespace, record_manifest(view, c.generation, c.text))
        for c in records.deleted
    ]


def _previous(
    view: TopologyView, running: CompiledGeneration | None, records: GenerationRecords
) -> CompiledGeneration | None:
    """What the Event of an acceptance compares with. None also if that cannot be compiled."""
    valid = view.operator_status.condition("Valid")
    is_reported = valid.status == "True" and valid.observed_generation == view.generation
    if running is None or running.generation != view.generation or is_reported:
        return None
    before = [record for record in records.accepted if record.generation < running.generation]
    try:
        return _as_recorded(view, before[-1]) if before else None
    except StillCompiling:
        return None


def _as_recorded(view: TopologyView, record: GenerationRecordView) -> CompiledGeneration | None:
    accepted = as_of_generation(view, record)
    match compile_spec(view.name, accepted.spec, accepted=True):
        case Compiled(topology):
            return CompiledGeneration(accepted, topology)
        case Rejected():
            return None


def _dry_run(
    candidate: CompiledGeneration, running: CompiledGeneration | None, pass_inputs: PassInputs
) -> DryRun | Problem:
    """Of all that the generation needs and that does not exist. A problem if a pod cannot be
    rendered: the fields of `podTemplate.spec` are not checked before, and may have any value."""
    view, defaults, snapshot = candidate.view, pass_inputs.settings.pods, pass_inputs.snapshot
    coordinator = "spec.podTemplate (as merged for the coordinator)"
    found: dict[str, Manifest] = {}
    try:
        path = coordinator
        found[path] = coordinator_pod(view, incarnation=0, excluded=(), defaults=defaults)
        # The account may not exist yet, for which the API server would refuse the pod.
        del found[path]["spec"]["serviceAccountName"]
        for segment in candidate.topology.segments:
            path = f"spec.podTemplate (as merged for {segment.name})"
            slot = Slot(segment.id, partition=0, replica=0)
            found[path] = task_pod(
                view,
                candidate.topology,
                candidate.generation,
                slot,
                incarnation=0,
                defaults=defaults,
            )
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"cannot be merged: {error!r}"
        return Problem(path, "PodRefused", what, "correct spec.podTemplate")
    record = generation_record(view, defaults.image)
    missing = (m for m in owned_objects(view) if not is_as_wanted(m, snapshot))
    exchange = None
    if running is not None:
        exchange = _pod_exchange(candidate, running, found.values(), pass_inputs)
    return DryRun(
        view.namespace,
        view.uid,
        view.generation,
        (record, *missing),
        tuple(found.items()),
        exchange=exchange,
    )


def _pod_exchange(
    candidate: CompiledGeneration,
    running: CompiledGeneration,
    pods: Iterable[Manifest],
    pass_inputs: PassInputs,
) -> PodExchange:
    """Of all pods that the edit or a roll replaces. `pods`: the coordinator's, and one of each
    segment of the candidate."""
    defaults, uid = pass_inputs.settings.pods, candidate.view.uid
    before, after = _template_digests(running, defaults), _template_digests(candidate, defaults)
    ended = {slot for slot, digest in before.items() if after.get(slot) != digest}
    created = [slot for slot, digest in after.items() if before.get(slot) != digest]
    specs = {pod["metadata"]["labels"].get(names.LABEL_SEGMENT): pod["spec"] for pod in pods}
    return PodExchange(
        freed=total(
            pod.requests
            for pod in pass_inputs.snapshot.pods
            if pod.owner_uid == uid and not pod.ended
            if pod.slot in ended or (pod.slot is not None and pod.slot.alternate in ended)
        ),
        needed=total(pod_requests(specs[slot.segment if slot else None]) for slot in created),
    )


def _template_digests(
    generation: CompiledGeneration, defaults: PodDefaults
) -> dict[Slot | None, str]:
    """Of the pods that it has, by slot; None: the coordinator."""
    view, topology = generation.view, generation.topology
    if topology.spec.suspend:
        return {}
    digests = {
        segment.id: task_template_digest(view, topology, segment, defaults)
        for segment in topology.segments
    }
    found: dict[Slot | None, str] = {slot: digests[slot.segment] for slot in topology.slots()}
    return {**found, None: coordinator_template_digest(view, (), defaults)}


def _unused_records(context: ReconcileContext, records: GenerationRecords) -> list[Action]:
    """Deletes accepted records that no pod mounts and that are older than the newest few."""
    pods = context.pass_inputs.snapshot.pods
    mounted = {p.generation for p in pods if p.owner_uid == context.view.uid}
    return [
        DeleteGenerationRecord(c.namespace, c.name, c.uid)
        for c in records.accepted[:-KEPT_GENERATIONS]
        if c.generation not in mounted
    ]


def reserved_incarnations(context: ReconcileContext, taken: Mapping[str, int]) -> dict[str, int]:
    """`status.slots` with the incarnations that this pass reserves: they never decrease.

    Slots that an edit has removed, or that a task has left in a planned move, and that have no pod
    any more, are merged into one for each partition and replica, with the highest of their
    incarnations.
    """
    highest = dict(context.reserved)
    for slot, incarnation in taken.items():
        highest[slot] = max(incarnation, highest.get(slot, 0))
    if context.running is not None:
        pods = (p for p in context.pass_inputs.snapshot.pods if p.owner_uid == context.view.uid)
        kept = {names.COORDINATOR_KEY, *taken, *(p.slot.key for p in pods if p.slot is not None)}
        kept |= {slot.key for slot in context.running.topology.slots()}
        for slot in highest.keys() - kept:
            merged = f"{names.ALL_REMOVED_SEGMENTS}/{partition_and_replica(slot)}"
            incarnation = highest.pop(slot)
            highest[merged] = max(incarnation, highest.get(merged, 0))
    return {slot: highest[slot] for slot in sorted(highest)}


def partition_and_replica(slot_key: str) -> str:
    return slot_key.partition("/")[2]


def draining_nodes(context: ReconcileContext) -> frozenset[str]:
    """Nodes that take no new pods, and that are not lost."""
    losses = context.pass_inputs.losses
    nodes = context.pass_inputs.snapshot.nodes
    return frozenset(n.name for n in nodes if n.cordoned and n.name not in losses.lost_nodes)


def reserved_coordinator_incarnation(context: ReconcileContext) -> int:
    return context.reserved.get(names.COORDINATOR_KEY, 0)


def owned_pods(context: ReconcileContext) -> list[PodView]:
    """Of tasks and coordinators, of all generations."""
    return [p for p in context.pass_inputs.snapshot.pods if p.owner_uid == context.view.uid]


def coordinator_pods(context: ReconcileContext) -> list[PodView]:
    """Of all incarnations."""
    name = context.view.name
    return [
        p
        for p in owned_pods(context)
        if p.role == names.ROLE_COORDINATOR
        and p.name == names.coordinator_pod_name(name, p.incarnation)
    ]
