"""One topology in a reconcile pass: which generation runs, what is wrong with the newest. Pure.

A generation is accepted by its ConfigMap. An edit that is refused changes nothing that runs: the
newest accepted generation's record goes on.

Design: docs/design/compilation.md#validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle import names
from rekindle.errors import Problem
from rekindle.topology.model import Slot, Topology
from rekindle_operator.catalog import Compiled, Rejected, compile_spec
from rekindle_operator.cluster.convert import as_of_generation
from rekindle_operator.cluster.model import ConfigView, Snapshot, TopologyView
from rekindle_operator.dataplane import DataPlane, read_data_plane
from rekindle_operator.pod_policy import refused_by_policy, refused_by_size
from rekindle_operator.reconcile.actions import Action, CreateConfig, DeleteConfig, DryRunPods
from rekindle_operator.resources.common import generation_record
from rekindle_operator.resources.task import task_pod
from rekindle_operator.settings import PodDefaults, Settings

BEFORE_RUNNING = (None, "", "Pending", "Invalid", "Suspended", "Starting")  # phases

_KEPT_GENERATIONS = 10  # the coordinator maps old segments to new ones by their records
_NO_MORE = "-"  # in place of a segment's id
_DRY_RUN_AGAIN_S = (
    30.0  # what the API server refused may be due to a quota or a webhook that passes
)


@dataclass(frozen=True, slots=True)
class Running:
    """The accepted generation: its view (spec as recorded), compiled."""

    view: TopologyView
    topology: Topology

    @property
    def generation(self) -> int:
        return self.view.generation


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    view: TopologyView
    running: Running | None
    problems: tuple[Problem, ...]  # of the newest generation
    is_validated: bool  # False while the dry run of its pods is pending
    data: DataPlane
    reserved: Mapping[str, int]  # slot -> incarnation
    before: frozenset[str] = frozenset()  # slots of the newest generation that was accepted before
    # When `data` was last known to be true, if that is too long ago: it proves nothing any more.
    stale_since: float | None = None
    max_priority: int | None = None  # that the administrator grants the namespace
    newer_image: str = ""  # what an edit would make of the image; empty: it would stay

    @property
    def suspended(self) -> bool:
        return self.running is not None and self.running.topology.spec.suspend

    @property
    def wants_pods(self) -> bool:
        return self.running is not None and not self.suspended and not self.view.deleting


def open_context(
    view: TopologyView, snapshot: Snapshot, settings: Settings, reported: bool, now: float
) -> tuple[ReconcileContext, list[Action]]:
    """The context, and what accepting its newest generation takes. `reported`: lately, by a
    coordinator."""
    configs = sorted(
        (c for c in snapshot.configs if c.owner_uid == view.uid), key=lambda c: c.generation
    )
    defaults = settings.pods
    actions: list[Action] = []
    problems: tuple[Problem, ...] = ()
    is_validated, running = True, _newest_running(view, configs)
    before = frozenset(s.key for s in running.topology.slots()) if running else frozenset()
    if not view.deleting and (running is None or running.generation != view.generation):
        match compile_spec(view.name, view.spec):
            case Rejected(found):
                problems = found
            case Compiled(_) if refused := refused_by_policy(view.spec, defaults.policy):
                problems = tuple(refused)
            case Compiled(topology) if refused := refused_by_size(
                len(tuple(topology.slots())), defaults.policy
            ):
                problems = tuple(refused)
            case Compiled(topology):
                fresh = Running(view, topology)
                dry_run = snapshot.dry_runs.get((view.uid, view.generation))
                if dry_run is None:
                    is_validated = False
                    actions.append(_trial(fresh, defaults))
                elif dry_run.problems:
                    problems = dry_run.problems
                    if now - dry_run.at >= _DRY_RUN_AGAIN_S:
                        actions.append(_trial(fresh, defaults))
                else:
                    running = fresh
                    actions.append(
                        CreateConfig(view.namespace, generation_record(view, defaults.image))
                    )
    context = ReconcileContext(
        view=view,
        running=running,
        problems=problems,
        is_validated=is_validated,
        data=read_data_plane(view.data_plane),
        reserved={str(s["slot"]): int(s["incarnation"]) for s in view.status.get("slots") or ()},
        before=before,
        newer_image=_newer_image(view, running, defaults),
        stale_since=None if reported else snapshot.reports.get(view.uid),
        max_priority=settings.limits.max_priority(view.namespace),
    )
    return context, actions + _forgotten(context, configs, snapshot)


def _newer_image(view: TopologyView, running: Running | None, defaults: PodDefaults) -> str:
    """The operator's default, where the generation that runs has recorded another one."""
    if running is None or running.generation != view.generation:
        return ""
    wanted = str(view.spec.get("image") or defaults.image)
    return "" if running.view.spec.get("image", wanted) == wanted else wanted


def _newest_running(view: TopologyView, configs: list[ConfigView]) -> Running | None:
    """None, too, where another version of the operator accepted what this one cannot compile: its
    pods stay as they are. An older record would have them deleted."""
    if not configs:
        return None
    accepted = as_of_generation(view, configs[-1])
    match compile_spec(view.name, accepted.spec):
        case Compiled(topology):
            return Running(accepted, topology)
        case Rejected():
            return None


def _trial(fresh: Running, defaults: PodDefaults) -> DryRunPods:
    view = fresh.view
    pods = tuple(
        (
            f"spec.podTemplate (as merged for {segment.name})",
            task_pod(view, fresh.topology, fresh.generation, Slot(segment.id, 0, 0), 0, defaults),
        )
        for segment in fresh.topology.segments
    )
    return DryRunPods(view.namespace, view.uid, view.generation, pods)


def _forgotten(
    context: ReconcileContext, configs: list[ConfigView], snapshot: Snapshot
) -> list[Action]:
    """Records that no pod mounts and that are older than the newest few."""
    mounted = {p.generation for p in snapshot.pods if p.owner_uid == context.view.uid}
    return [
        DeleteConfig(c.namespace, c.name)
        for c in configs[:-_KEPT_GENERATIONS]
        if c.generation not in mounted
    ]


def reservation(
    context: ReconcileContext, taken: Mapping[str, int], snapshot: Snapshot
) -> list[dict[str, object]]:
    """`status.slots` with the incarnations that this pass takes: counters never go back.

    Slots that edits have left behind, and that have no pod any more, are folded into one for each
    partition and replica, with the highest of their incarnations.
    """
    highest = dict(context.reserved)
    for slot, incarnation in taken.items():
        highest[slot] = max(incarnation, highest.get(slot, 0))
    if context.running is not None:
        pods = (p for p in snapshot.pods if p.owner_uid == context.view.uid)
        kept = {names.COORDINATOR_SLOT, *(p.slot.key for p in pods if p.slot is not None)}
        kept |= {slot.key for slot in context.running.topology.slots()}
        for slot in highest.keys() - kept:
            incarnation, folded = highest.pop(slot), f"{_NO_MORE}/{place_of(slot)}"
            highest[folded] = max(incarnation, highest.get(folded, 0))
    return [{"slot": slot, "incarnation": highest[slot]} for slot in sorted(highest)]


def place_of(slot: str) -> str:
    """Partition and replica of a slot's key."""
    return slot.partition("/")[2]


def coordinator_incarnation(context: ReconcileContext) -> int:
    return context.reserved.get(names.COORDINATOR_SLOT, 0)
