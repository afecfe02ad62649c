"""The coordinator as one pure state machine: what happened is a method, which returns effects;
`poll_for(slot)`.

Combines membership, routes, restore points, floors, checkpoint commit, digest comparison and
report. Nothing is stored: a new coordinator rebuilds its state from pods, poll responses and the
newest manifest. Until then, its polls contain no desired state, except to obsolete tasks, whose
sinks have to stop first.

Design: docs/design/coordinator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.agreement.containment import Containment
from rekindle.coordinator.checkpoints.beginnings import Beginnings, Unanswered
from rekindle.coordinator.checkpoints.committer import CommitInputs, Committer
from rekindle.coordinator.checkpoints.policy import (
    next_checkpoint,
    replays_of,
    wants_checkpoint,
    with_consumers,
)
from rekindle.coordinator.checkpoints.retention import (
    Progress,
    Refs,
    floors,
    oldest,
    restore_entry,
)
from rekindle.coordinator.checkpoints.sinks import assigned_sinks, written_entries
from rekindle.coordinator.core.desired_state import DesiredState, ask_only
from rekindle.coordinator.core.obsolete import STOP_TIMEOUT_S, is_obsolete, still_writing
from rekindle.coordinator.core.report import (
    ReportInputs,
    ReportPacer,
    SourceHeads,
    build_report,
    rfc3339,
)
from rekindle.coordinator.model import (
    CollectGarbage,
    Effect,
    Generation,
    Pod,
    PollNow,
    ReportRestorePoint,
    StepDown,
    WriteManifest,
)
from rekindle.coordinator.tasks.graph import Graph, build_graph
from rekindle.coordinator.tasks.input_gaps import InputGaps
from rekindle.coordinator.tasks.lending import Lending, may_be_live
from rekindle.coordinator.tasks.membership import Membership, Task, coordinator_is_isolated
from rekindle.coordinator.tasks.routes import (
    mixed_engines,
    readable_replicas,
    running,
    serving_replicas,
)
from rekindle.protocol import PollRequest, PollResponse, RestorePoint, TaskPhase
from rekindle.report import CheckpointProblem
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Segment, Slot, partition_of

DISCOVERY_TIMEOUT_S = 3.0
"""How long a new coordinator waits for tasks that may run but do not respond."""


class Coordinator:
    """One topology's coordinator. `fence` is its incarnation, `topology` the UID; `wall_s` the Unix
    time at now = 0; `started_ms` the Unix time at which the process began, in ms: the next process
    of its container has the same fence, and knows nothing of this one."""

    def __init__(self, fence: int, wall_s: float, topology: str = "", started_ms: int = 0) -> None:
        self.fence = fence
        self._boot = str(started_ms)
        self._topology = topology
        self.membership = Membership()
        self.committer = Committer(fence)
        self.containment = Containment()
        self.lending = Lending()
        self._input_gaps = InputGaps()
        self._wall_s = wall_s
        self._generation: Generation | None = None
        self._graph: Graph | None = None
        self._segments: dict[str, Segment] = {}  # of the generation, by id
        self._pods_are_known = False
        self._polling_since: float | None = None
        self._discovery_ended = False
        self._obsolete_since = 0.0  # since when polls can stop the sinks of obsolete tasks
        self._isolated = False
        self._fenced = False
        self._heads = SourceHeads()
        self._beginnings = Beginnings()
        self._unanswered: dict[Slot, str] = {}  # tasks that wait for event times of a source
        self._written: dict[tuple[str, str], dict[str, int]] = {}  # see `new_generation.Written`
        self._pacer = ReportPacer()
        self._problems: dict[str, str] = {}
        # Derived once for each tick, not for each poll.
        self._replicas: dict[Partition, list[Task]] = {}
        self._floors: dict[Partition, int] = {}
        self.next_checkpoint = NO_EPOCH  # the epoch at which one of all partitions is due
        self._own_checkpoints: dict[Partition, int] = {}  # ... if there was only that partition

    # --- read by the shell ---

    @property
    def generation(self) -> Generation | None:
        return self._generation

    @property
    def ready(self) -> bool:
        """Whether polls contain desired state."""
        generation = self._generation
        if generation is None or not self._discovery_ended:
            return False
        return self.committer.covers(generation)

    def is_suspected(self, task: Task) -> bool:
        """Whether a task is silent; of no task if the coordinator's own network seems faulty."""
        return task.suspected and not self._isolated

    def problems(self, now: float) -> tuple[str, ...]:
        found = [*self._problems.values(), *self.membership.refusals()]
        if (problem := self.membership.stream_problem()) is not None:
            found.append(problem)
        if self._isolated:
            silent = sum(t.suspected for t in self.membership)
            found.append(
                f"{silent} of {len(list(self.membership))} tasks do not respond to the coordinator "
                "though their peers read them: its own network seems to be faulty"
            )
        if (problem := self._start_problem()) is not None:
            found.append(problem)
        found += self.committer.generation_problems
        found += (problem.message for problem in self.checkpoint_problems(now))
        found += self.containment.problems(self._generation)
        found += mixed_engines(self._replicas).values()
        return tuple(found)

    def _start_problem(self) -> str | None:
        """Why new tasks do not start although they are polled: a source does not run."""
        serving = {t.slot.segment for t in self.membership if t.phase.serves}
        running = {s.nodes[0] for s in self._segments.values() if s.id in serving}
        waiting = {s: n for s, n in self._unanswered.items() if n not in running}
        if not waiting:
            return None
        names = sorted({self._segments[s.segment].name for s in waiting})
        return (
            f"{', '.join(names)} started anew with an edit: their tasks wait for source "
            f"{' and '.join(sorted(set(waiting.values())))} to run, whose event times say which "
            "windows have all rows"
        )

    def checkpoint_problems(self, now: float) -> tuple[CheckpointProblem, ...]:
        return tuple(self.committer.problems(self._commit_inputs(), now))

    # --- events ---

    def generation_seen(self, generation: Generation, now: float) -> list[Effect]:
        """The newest generation's ConfigMap was read."""
        if self._generation is None or generation.number > self._generation.number:
            self._generation = generation
            self.containment.configured(generation, before=self._graph)
            self._graph = build_graph(generation.topology)
            self._segments = {s.id: s for s in generation.topology.segments}
            self._unanswered = {}
            self._heads.keep(self._graph.inputs)
            self._obsolete_since = now
            self._pacer.mark_urgent()
            self._begin_polling(now)
            self._update_derived()
        return self._decide([], now)

    def pods_listed(self, pods: Sequence[Pod], now: float) -> list[Effect]:
        """All pods of the topology's tasks, after every change."""
        before = {(t.slot, t.pod.incarnation) for t in self.membership}
        self.membership.pods_listed(pods, now)
        after = {(t.slot, t.pod.incarnation) for t in self.membership}
        for slot, _ in before - after:
            self.containment.forget(slot)
            self.lending.forget(slot)
        if before != after:
            self._pacer.mark_urgent()
        self._pods_are_known = True
        self._begin_polling(now)
        self._update_derived()
        return self._decide([], now)

    def poll_answered(
        self, slot: Slot, incarnation: int, response: PollResponse, now: float
    ) -> list[Effect]:
        effects = self._answered(slot, incarnation, response, now)
        return self._decide(effects, now, polled=True)

    def poll_failed(
        self, slot: Slot, incarnation: int, message: str, now: float, *, refused: bool = False
    ) -> list[Effect]:
        """No response: timed out, or another incarnation is at that address (HTTP 410). `refused`:
        the token, the topology or the protocol version does not match; polling again does not
        help."""
        if refused and self.membership.poll_refused(slot, incarnation, message):
            self._pacer.mark_urgent()
        return self._decide([], now, polled=True)

    def fence_raised(self, by: str, now: float) -> list[Effect]:
        """A task, the store or the API server has seen a newer coordinator (I9). `by`: which of
        them, for the log."""
        return self._decide([StepDown(f"a newer coordinator has taken over: {by}")], now)

    def manifest_read(
        self, manifest: Manifest | None, now: float, store: str | None = None
    ) -> list[Effect]:
        """The store's newest manifest; None if there is none. `store`: the store's id."""
        self._pacer.mark_urgent()
        return self._decide(self.committer.manifest_read(manifest, now, store), now)

    def manifest_written(self, manifest: Manifest, now: float) -> list[Effect]:
        self._pacer.mark_urgent()
        effects = self.committer.manifest_written(manifest, self._retain(), now)
        self.committer.keep_refusals_of(self.membership.reported_entries())
        definitions = {start.definition for start in manifest.queries.values()}
        self._written = {k: w for k, w in self._written.items() if k[1] in definitions}
        self._update_derived()
        # At once, since the next manifest may be in flight before any task responds again.
        effects += [e for t in self.membership for e in self._assign_restore(t, now)]
        return self._decide(effects, now)

    def manifest_race_lost(self, now: float) -> list[Effect]:
        """Another manifest has this number already."""
        return self._decide(self.committer.race_lost(), now)

    def entries_refused(self, entries: Sequence[str], message: str, now: float) -> list[Effect]:
        """Nothing was written: states of these entries are missing in the store. `entries`: names
        of their objects."""
        return self._decide(self.committer.entries_refused(entries, message, now), now)

    def store_failed(self, message: str, now: float) -> list[Effect]:
        """Reading or writing failed; it is not known whether something was written."""
        return self._decide(self.committer.store_failed(message, now), now)

    def garbage_collected(
        self, problem: str | None, unrestorable: Mapping[str, str], now: float
    ) -> list[Effect]:
        """`unrestorable`: entries that were found to be damaged, or to lack objects, which
        something else has deleted, each with the reason."""
        if self.committer.garbage_collected(problem, unrestorable):
            self._pacer.mark_urgent()
        return self._decide([], now)

    def problem_changed(self, subject: str, message: str | None, now: float) -> list[Effect]:
        """A problem of the shell, by subject; None if it is solved."""
        if self._problems.get(subject) != message:
            self._pacer.mark_urgent()
        self._problems.pop(subject, None)
        if message is not None:
            self._problems[subject] = message
        return self._decide([], now)

    def woken(self, now: float) -> list[Effect]:
        """Time has passed."""
        silent = self.membership.woken(now) if self._polling_since is not None else []
        isolated = self._isolated
        self._isolated = self._find_isolation(now)
        if silent or isolated != self._isolated:
            self._pacer.mark_urgent()
        self._end_discovery_if_due(now)
        self.lending.woken(now)
        if self._discovery_ended:
            self.containment.request_recomputation(self.membership, self.is_suspected, now)
            self._restart_after_gaps(now)
            self._restart_alone(now)
        self._update_derived()
        effects: list[Effect] = [
            PollNow(slot) for task in silent for slot in self._consumer_slots(task)
        ]
        return self._decide(effects, now)

    def _decide(self, effects: list[Effect], now: float, *, polled: bool = False) -> list[Effect]:
        """These effects, and what follows from anything that happened."""
        if self._fenced:
            return []
        self._fenced = any(isinstance(effect, StepDown) for effect in effects)
        if self._fenced:
            return effects
        # Not after each poll, of which there may be thousands between two ticks.
        if self._generation is not None and not polled:
            inputs = None if self._waits_for_obsolete_tasks(now) else self._commit_inputs()
            effects += self.committer.step(inputs, now)
        effects = [self._completed(effect, now) for effect in effects]
        # Also reports what prevents discovery, such as a generation that cannot be read.
        if (self._discovery_ended or self._problems) and self._pacer.due(now):
            effects += self._pacer.offer(build_report(self._report_inputs(now), now), now)
        return effects

    def _restart_after_gaps(self, now: float) -> None:
        if self._graph is not None and self.ready:
            tasks = (task for task in self.membership if not self.is_suspected(task))
            found = self._input_gaps.find(tasks, self._graph.inputs, self._replicas, now)
            self.containment.restart(found)

    def _restart_alone(self, now: float) -> None:
        if self.ready and (manifest := self.committer.settled_manifest) is not None:
            tasks = list(self.membership)
            self.containment.restart(self.lending.alone(tasks, manifest, self.is_suspected, now))

    def _answered(
        self, slot: Slot, incarnation: int, response: PollResponse, now: float
    ) -> list[Effect]:
        task = self.membership.find(slot, incarnation)
        if task is None or not task.pod.may_be_running:
            return []
        if response.fence > self.fence:
            return [StepDown(f"task {slot.key} has a newer coordinator: {response.fence}")]
        before = task.response
        if response.phase is TaskPhase.FAILED and task.restores and task.lent_from is None:
            self.committer.restore_failed()
        if response.lost is not None:
            self.committer.object_lost(response.lost)
        is_urgent = self.membership.answered(task, response, now)
        if before is None:
            self.containment.first_response(task, self._graph)
        if is_urgent:
            self._pacer.mark_urgent()
            self._end_discovery_if_due(now)
            self._update_derived()
        if self._is_source(slot):
            partition = partition_of(slot)
            self._heads.advanced(partition, response.head_epoch, now, response.last_epoch)
            if (segment := self._segment(slot)) is not None and self.ready:
                self._beginnings.answered(segment, response.event_times)
        self._remember_written(slot, response)
        self._compare(slot, response)
        effects = self._assign_restore(task, now)
        # The partner gets both in its next poll.
        if before is not None and (before.asks, before.answer) != (response.asks, response.answer):
            effects = [*effects, *(PollNow(slot) for slot in self._partner_slots(slot))]
        return effects

    def _compare(self, slot: Slot, response: PollResponse) -> None:
        partition = partition_of(slot)
        mixed = bool(mixed_engines({partition: self._replicas.get(partition, ())}))
        context = (self.membership, self._graph, self.committer)
        if (
            self.containment.keep_contained(slot, response, *context)
            or self.containment.contradicted(slot, response, *context)
            # Results of mixed engines are not compared, but a task may be trusted again.
            or (mixed and self.containment.boot_observed(slot, response, self.membership))
            or (not mixed and self.containment.observed(slot, response, *context))
        ):
            self._pacer.mark_urgent()
            self._update_derived()
        # Only once a manifest names the sinks; until then the task reports its entries again.
        manifest, graph = self.committer.own_manifest, self._graph
        if self.ready and manifest is not None and graph is not None:
            others = {} if mixed else self._replicas
            agreed = self.containment.agreed_entries(
                slot, response.checkpoints, others, self.is_suspected
            )
            computed = self.containment.agreed_epoch(slot, response, others, self.is_suspected)
            sinks = assigned_sinks(graph, manifest, slot.segment)
            written = written_entries(agreed, response, sinks)
            through = max([computed, *(saved.epoch for saved in agreed)])
            self.committer.entries_saved(slot, written, through)

    def _assign_restore(self, task: Task, now: float) -> list[Effect]:
        """Assign a restore point to a task that has just reported that it has none, and only then.

        It is what a partner lends, or else the oldest entry kept for its partition, so that the
        task can compute all that its readers may need, or a newer one if its log has that. It does
        not change during this boot. While all its entries are known to be unrestorable it waits for
        a replica that saves one.
        """
        manifest = self.committer.settled_manifest  # None while a newer one may be in flight
        waits = task.response is not None and task.response.phase == TaskPhase.WAITING
        if not waits or task.assigned is not None or manifest is None or not self.ready:
            return []
        kept = manifest.entries.get(task.partition.key, ())
        if (lent := self._lent_point(task, kept, now)) is not None:
            task.lent_starts += 1
            return self._assigned(task, lent)
        if (lender := self.lending.lender_for(task.slot)) is not None:
            return [PollNow(lender)]
        refs = self.committer.restorable(kept)
        if not refs:
            return []
        entry, segment = restore_entry(refs, self._held_log(task)), self._segment(task.slot)
        try:
            begun = self._beginnings.begun_windows(segment, entry.epoch) if segment else ()
        except Unanswered as unanswered:
            self._unanswered[task.slot] = unanswered.source
            return []
        self._unanswered.pop(task.slot, None)
        return self._assigned(
            task,
            RestorePoint(
                epoch=entry.epoch,
                object=entry.object,
                begun=begun,
                log_from=None if entry == oldest(refs) else oldest(refs).epoch + 1,
            ),
        )

    def _held_log(self, task: Task) -> tuple[int, int] | None:
        """The log with which a task that waits will begin; None if it may be wrong."""
        if task.response is None or self._graph is None:
            return None
        if self.containment.discards_log(task.slot):
            return None
        if self.containment.may_have_wrong_files(task.partition, self._graph):
            return None
        return task.response.held_log

    def _lent_point(self, task: Task, kept: Refs, now: float) -> RestorePoint | None:
        if self._generation is None:
            return None
        replicas = self._replicas.get(task.partition, [])
        interval_s = self._generation.checkpoint_interval_s
        return self.lending.restore_point(task, replicas, kept, self.is_suspected, interval_s, now)

    def _assigned(self, task: Task, point: RestorePoint) -> list[Effect]:
        task.assigned, task.position = point, point.epoch
        self._update_derived()
        return [ReportRestorePoint(task.slot, task.pod.incarnation, point), PollNow(task.slot)]

    def _begin_polling(self, now: float) -> None:
        """No task can be polled, or is silent, before pods and a generation are known."""
        if self._polling_since is None and self._pods_are_known and self._generation is not None:
            self._polling_since = now
            self.membership.polling_started(now)

    # --- derived state ---

    def _end_discovery_if_due(self, now: float) -> None:
        """End discovery when all tasks that may run have responded, or at its timeout."""
        if self._discovery_ended or self._polling_since is None:
            return
        timed_out = now - self._polling_since >= DISCOVERY_TIMEOUT_S
        is_awaiting = any(t.unknown and t.pod.was_ready for t in self.membership)
        self._discovery_ended = timed_out or not is_awaiting
        self._obsolete_since = now

    def _update_derived(self) -> None:
        self.containment.update(self._graph)
        self._replicas = serving_replicas(self.membership, self.containment.comparison.is_untrusted)
        manifest, graph = self.committer.own_manifest, self._graph
        if not self.ready or manifest is None or graph is None:
            self._floors = {}
            return
        self._floors = floors(graph, manifest, self._progress())
        if self._generation is not None:
            self._beginnings.update(self._generation, manifest)
            self._find_next_checkpoints(self._generation, graph, manifest)

    def _find_next_checkpoints(
        self, generation: Generation, graph: Graph, manifest: Manifest
    ) -> None:
        entries = {p: self.committer.newest_entry(p) for p in graph.partitions}
        replays = replays_of(generation, self._replicas, entries)
        running, interval_epochs = self._running(graph), generation.checkpoint_interval_epochs
        tasks = [t for p in running for t in self._replicas[p]]
        self.next_checkpoint = next_checkpoint(
            with_consumers({p: replays[p] for p in running}, graph).values(),
            interval_epochs,
            wanted=wants_checkpoint(tasks, generation, manifest),
        )
        self._own_checkpoints = {
            p: next_checkpoint([replay], interval_epochs) for p, replay in replays.items()
        }

    def _next_checkpoint_of(self, partition: Partition) -> int:
        """One that catches up has saved less than the others."""
        return min(self.next_checkpoint, self._own_checkpoints.get(partition, NO_EPOCH))

    def _running(self, graph: Graph) -> frozenset[Partition]:
        return running(self._replicas, self.is_suspected) & set(graph.partitions)

    def _segment(self, slot: Slot) -> Segment | None:
        """Of the newest generation; None if it does not have it."""
        return self._segments.get(slot.segment)

    def _remember_written(self, slot: Slot, response: PollResponse) -> None:
        """What sinks have, also when the pods of their definition are gone."""
        key = partition_of(slot).key
        for sink in response.sinks:
            known = self._written.setdefault((sink.assigned.query, sink.assigned.definition), {})
            known[key] = max(sink.durable, known.get(key, NO_EPOCH))

    def _progress(self) -> Progress:
        """The positions of tasks, and the entries that they load."""
        return Progress.of(self.membership)

    def _commit_inputs(self) -> CommitInputs | None:
        if not self._discovery_ended or self._generation is None or self._graph is None:
            return None
        return CommitInputs(
            generation=self._generation,
            graph=self._graph,
            progress=self._progress(),
            running=self._running(self._graph),
            head_epoch=self.membership.newest_epoch(),
            next_checkpoint=self.next_checkpoint,
            started=self.membership.started(),
            written=self._written,
        )

    def _waits_for_obsolete_tasks(self, now: float) -> bool:
        """A generation's start is chosen after obsolete tasks have stopped writing."""
        generation, graph = self._generation, self._graph
        if generation is None or graph is None or self.committer.covers(generation):
            return False
        return now - self._obsolete_since < STOP_TIMEOUT_S and still_writing(self.membership, graph)

    def _find_isolation(self, now: float) -> bool:
        if not any(task.suspected for task in self.membership):
            return False
        interval_s = self._generation.interval_s if self._generation else 1.0
        readable = readable_replicas(self._graph, self._replicas)
        return coordinator_is_isolated(self.membership, readable, interval_s, now)

    def _consumer_slots(self, task: Task) -> list[Slot]:
        consumers = self._graph.consumers.get(task.partition, ()) if self._graph else ()
        return [t.slot for t in self.membership if t.partition in consumers]

    def _partner_slots(self, slot: Slot) -> tuple[Slot, Slot]:
        """The slots of the replica that stabilizes in turn with this one (`tasks.routes.partner`):
        two, because of planned moves."""
        other = replace(slot, replica=slot.replica_index ^ 1)
        return other, other.alternate

    def _is_source(self, slot: Slot) -> bool:
        return self._graph is not None and self._graph.inputs.get(partition_of(slot)) == ()

    def _retain(self) -> int:
        return self._generation.topology.spec.checkpoint.retain if self._generation else 3

    def _completed(self, effect: Effect, now: float) -> Effect:
        """An effect of the committer with what the committer does not know."""
        match effect:
            case WriteManifest(manifest=manifest):
                time = rfc3339(self._wall_s + now)
                return replace(effect, manifest=replace(manifest, time=time))
            case CollectGarbage():
                return replace(effect, in_use=self.membership.entries_in_use())
            case _:
                return effect

    def _report_inputs(self, now: float) -> ReportInputs:
        return ReportInputs(
            fence=self.fence,
            wall_s=self._wall_s,
            generation=self._generation,
            graph=self._graph,
            membership=self.membership,
            manifest=self.committer.own_manifest,
            heads=self._heads,
            missing=self._beginnings.missing,
            diverged=tuple(sorted(slot.key for slot in self.containment.comparison.diverged)),
            inconsistent=self.containment.inconsistent(self._generation, self.membership),
            problems=self.problems(now),
            checkpoint_problems=self.checkpoint_problems(now),
            store_id=self.committer.store_id,
            is_suspected=self.is_suspected,
            is_untrusted=lambda task: self.containment.comparison.is_untrusted(task.slot),
            next_checkpoint=self.next_checkpoint,
        )

    # --- desired state ---

    def poll_for(self, slot: Slot) -> PollRequest | None:
        """The next poll of a slot's task; None if there is no task to poll."""
        task, generation = self.membership.get(slot), self._generation
        if task is None or generation is None or not task.pod.may_be_running:
            return None
        poll = ask_only(self._topology, self.fence, self._boot, generation.number, task)
        # A task that has not responded yet may run with desired state of an older coordinator.
        if task.response is None or not self._discovery_ended:
            return poll
        manifest, graph = self.committer.own_manifest, self._graph
        if graph is not None and is_obsolete(task, graph):
            complete = manifest is not None and may_be_live(task, manifest)
            # no sinks; its routes stay
            return poll.model_copy(update={"ask_only": False, "may_be_live": complete})
        if not self.ready or manifest is None or graph is None:
            return poll
        desired = DesiredState(
            graph,
            manifest,
            self._replicas,
            self._floors,
            self.is_suspected,
            self._lacks_entries,
            self.containment,
            self.committer.is_refused,
            self._stabilizes_in_turn,
            generation.checkpoint_interval_epochs,
            self.committer.newest_entry(task.partition),
            self._next_checkpoint_of(task.partition),
        )
        segment = self._segment(slot)
        update = {
            **desired.fields_of(task),
            "lend": self.lending.is_lender(slot),
            "event_times_of": self._beginnings.epochs_to_ask(segment) if segment else (),
        }
        return poll.model_copy(update=update)

    @property
    def _stabilizes_in_turn(self) -> bool:
        generation = self._generation
        return generation is not None and generation.topology.spec.max_delay is not None

    def _lacks_entries(self, task: Task) -> bool:
        if self._generation is None:
            return False
        reached = task.response.stable_epoch if task.response else NO_EPOCH
        interval_epochs = self._generation.checkpoint_interval_epochs
        return self.committer.lacks_entries(
            task.partition,
            reached,
            interval_epochs,
            self._next_checkpoint_of(task.partition),
        )


Event = Callable[[Coordinator, float], list[Effect]]
"""What happened, as a call of its method at a time."""
