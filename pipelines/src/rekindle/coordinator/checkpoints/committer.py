"""Decides when a global checkpoint is complete, and who may write the next manifest.

Pure. One manifest is written at a time, put-if-absent with the next number (`phases`). The first
manifest of each coordinator contains its fence: from then on a fenced coordinator loses the race
for the next number, reads the higher fence and exits (I9).

A checkpoint is complete at epoch c when every running partition has an entry at c or newer. For
partitions that do not run, are catching up, or have saved nothing for three intervals while others
did, the manifest keeps their old entries: a waiting query never stops checkpoints. The set of
partitions comes from the spec.

Design: docs/design/checkpoints.md#who-commits, docs/design/coordinator.md#checkpoints.
Paper: Progressive recovery (Su and Zhou 2017), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.checkpoints.new_generation import Written, start_generation
from rekindle.coordinator.checkpoints.phases import CommitEvent, CommitPhase, commit_machine
from rekindle.coordinator.checkpoints.retention import Progress, Refs, keep_entries
from rekindle.coordinator.model import (
    CollectGarbage,
    Effect,
    Generation,
    ReadNewestManifest,
    StepDown,
    WriteManifest,
)
from rekindle.coordinator.tasks.graph import Graph
from rekindle.protocol import EntryRef
from rekindle.report import CheckpointProblem, CheckpointProblemKind
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.model import Partition, Slot, partition_of

_BACKOFF = BackoffPolicy(first_s=0.5, longest_s=8.0)
_STALLED_S = 30.0
_GARBAGE_INTERVAL_S = 10.0  # it lists manifests and entries
_MAX_GARBAGE_INTERVAL_S = 60.0  # tasks save entries even while none can be committed
_WAIT_INTERVALS = 3  # checkpoint intervals for which a checkpoint waits for a partition
_ALL_SAVE_INTERVALS = 2  # ... after which all replicas save, because the chosen one seems not to
_PROBLEM_KINDS = {
    CommitEvent.STORE_FAILED: CheckpointProblemKind.STORE_UNAVAILABLE,
    CommitEvent.MANIFEST_MISSING: CheckpointProblemKind.STORE_UNAVAILABLE,
    CommitEvent.ENTRIES_REFUSED: CheckpointProblemKind.ENTRIES_REFUSED,
}

_NO_MANIFEST = (
    "it has no manifest, but task {task} has started from one: this is not the store of the "
    "topology, or it was emptied; nothing is written until that store is back"
)


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """Inputs of a proposal. `running`: partitions that a checkpoint waits for; `started`: tasks
    that were given a restore point; `head_epoch`: the newest epoch that any task knows;
    `next_checkpoint`: the epoch at which one is due (`policy`); `written`: what sinks were seen to
    have."""

    generation: Generation
    graph: Graph
    progress: Progress
    running: frozenset[Partition]
    head_epoch: int
    next_checkpoint: int = NO_EPOCH
    started: tuple[str, ...] = ()
    written: Written = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """An entry that is saved but not committed, and the replica that reported it."""

    slot: Slot
    ref: EntryRef


class Committer:
    def __init__(self, fence: int) -> None:
        self._fence = fence
        self._machine = commit_machine()
        self._retry_at = 0.0
        self._backoff = Backoff(_BACKOFF)
        self._saved: dict[Partition, dict[int, SavedEntry]] = {}
        self._agreed_through: dict[Partition, int] = {}
        self._refused: set[str] = set()
        self._unrestorable: Mapping[str, str] = {}
        self._last_progress_at: float | None = None
        self._write_began = 0.0
        self._garbage_collected_at = float("-inf")
        self._store_problem: CheckpointProblem | None = None
        self._garbage_problem: CheckpointProblem | None = None
        self._restore_failed = False
        self._reported_lost: frozenset[str] = frozenset()  # objects that no collection has checked
        self._checked: frozenset[str] = frozenset()  # such objects, by the last collection
        self.generation_problems: tuple[str, ...] = ()
        self.newest: Manifest | None = None
        self.store_id: str | None = None
        self.duration_s: float | None = None

    # --- queries ---

    @property
    def phase(self) -> CommitPhase:
        return self._machine.state

    @property
    def own_manifest(self) -> Manifest | None:
        """The newest known manifest, if it has this coordinator's fence."""
        newest = self.newest
        return newest if newest is not None and newest.fence == self._fence else None

    @property
    def settled_manifest(self) -> Manifest | None:
        """The manifest to restore from; None while a newer one may be in flight."""
        return self.own_manifest if self.phase is CommitPhase.READY else None

    def is_refused(self, entry: str | None) -> bool:
        """Whether this entry must not be committed, referred to or restored. An empty state has no
        object (None), and never is refused."""
        return entry in self._refused or entry in self._unrestorable

    def restorable(self, refs: Refs) -> Refs:
        return tuple(ref for ref in refs if not self.is_refused(ref.object))

    def problems(self, inputs: CommitInputs | None, now: float) -> list[CheckpointProblem]:
        """At most one of each kind."""
        found = [problem for problem in (self._store_problem, self._garbage_problem) if problem]
        found += self._lost_entries(inputs)
        if (
            inputs is not None
            and self._last_progress_at is not None
            and self.own_manifest is not None
        ):
            max_wait_s = max(_STALLED_S, 3 * inputs.generation.checkpoint_interval_s)
            every = self.own_manifest.epoch + inputs.generation.checkpoint_interval_epochs
            left_out = max(0, inputs.next_checkpoint - every)
            max_wait_s += left_out * inputs.generation.interval_s
            if inputs.running and now - self._last_progress_at > max_wait_s:
                names = {s.id: s.name for s in inputs.generation.topology.segments}
                late = ", ".join(
                    f"{names.get(p.segment, p.segment)}/{p.index}" for p in self._behind(inputs)
                )
                since = self.own_manifest.epoch
                begun = "no checkpoint yet" if since < 0 else f"no checkpoint since epoch {since}"
                text = f"{begun}: waiting for {late}"
                found.append(CheckpointProblem(CheckpointProblemKind.STALLED, text))
        return found

    def _lost_entries(self, inputs: CommitInputs | None) -> list[CheckpointProblem]:
        """One message for all: if a store has lost many objects, there may be an entry for each
        partition."""
        entries = self.own_manifest.entries if self.own_manifest is not None else {}
        lost = [
            (key, ref.epoch, self._unrestorable[ref.object])
            for key, refs in sorted(entries.items())
            for ref in refs
            if ref.object is not None and ref.object in self._unrestorable
        ]
        if not lost:
            return []
        key, epoch, why = lost[0]
        text = f"checkpoint store: cannot be restored: the entry of {key} at epoch {epoch}: {why}"
        if more := len(lost) - 1:
            text += f"; {more} more entries"
        runs = {p.key for p in inputs.running} if inputs is not None else set()
        if stuck := sorted({key for key, _, _ in lost} - runs):
            text += f"; no live replica can save {', '.join(stuck[:3])} again"
        return [CheckpointProblem(CheckpointProblemKind.UNRESTORABLE, text)]

    # --- events ---

    def manifest_read(
        self, manifest: Manifest | None, now: float, store_id: str | None = None
    ) -> list[Effect]:
        self.store_id = store_id or self.store_id
        self._machine.step(CommitEvent.READ_ENDED)
        self._recovered()
        if manifest is None:
            return []
        if manifest.fence > self._fence:
            return [
                StepDown(f"manifest {manifest.seq} was written by coordinator {manifest.fence}")
            ]
        self._set_newest(manifest, now)
        return []

    def manifest_written(self, manifest: Manifest, retain: int, now: float) -> list[Effect]:
        self._machine.step(CommitEvent.COMMITTED)
        self._recovered()
        self._set_newest(manifest, now)
        self.duration_s = now - self._write_began
        if now - self._garbage_collected_at < _GARBAGE_INTERVAL_S:
            return []
        return self._collect_garbage(retain, now)

    def race_lost(self) -> list[Effect]:
        self._machine.step(CommitEvent.RACE_LOST)
        return [ReadNewestManifest()]

    def entries_refused(self, objects: Sequence[str], message: str, now: float) -> list[Effect]:
        """These entries cannot be read, or lack objects: no manifest was written. Their replicas
        have to save again; until then, the partitions keep their old entries."""
        self._refused |= set(objects)
        self._drop_unusable()
        return self._retry_later(CommitEvent.ENTRIES_REFUSED, message, now)

    def keep_refusals_of(self, reported: AbstractSet[str]) -> None:
        """Keep only the refusals of entries that tasks report, or that are in the newest manifest.
        Other entries are not reported again: a task reports its entry until it is refused or
        superseded, and no name is used twice."""
        entries = self.newest.entries.values() if self.newest else ()
        self._refused &= reported | {ref.object for refs in entries for ref in refs if ref.object}

    def _drop_unusable(self) -> None:
        for partition, known in self._saved.items():
            self._saved[partition] = {e: r for e, r in known.items() if self.restorable((r.ref,))}

    def store_failed(self, message: str, now: float) -> list[Effect]:
        return self._retry_later(CommitEvent.STORE_FAILED, message, now)

    def _retry_later(self, event: CommitEvent, message: str, now: float) -> list[Effect]:
        self._machine.step(event)
        self._retry_at = now + self._backoff.failed()
        kind = _PROBLEM_KINDS[event]
        self._store_problem = CheckpointProblem(kind, f"checkpoint store: {message}")
        return []

    def restore_failed(self) -> None:
        """A task could not start from its restore point: the next garbage collection looks for the
        cause."""
        self._restore_failed = True

    def object_lost(self, name: str) -> None:
        """A task found a state object of its restore point damaged or missing: a garbage collection
        checks it soon."""
        if name not in self._checked:
            self._reported_lost |= {name}

    def garbage_collected(self, problem: str | None, unrestorable: Mapping[str, str]) -> bool:
        """Returns whether the set of entries that cannot be restored has changed."""
        self._garbage_problem = None
        if problem:
            text = f"checkpoint store: garbage collection: {problem}"
            self._garbage_problem = CheckpointProblem(
                CheckpointProblemKind.GARBAGE_COLLECTION_FAILED, text
            )
        changed = self._unrestorable.keys() != unrestorable.keys()
        self._unrestorable = unrestorable
        self._drop_unusable()
        return changed

    def entries_saved(self, slot: Slot, done: Sequence[EntryRef], agreed_through: int) -> None:
        """Entries that a replica has saved, with which its partners agree, and of which sinks have
        the output. They are kept when that replica dies. `agreed_through`: the newest epoch on
        which they agree, saved or not."""
        partition = partition_of(slot)
        committed_epoch = self._newest_committed(partition)
        known = self._saved.setdefault(partition, {})
        self._agreed_through[partition] = max(agreed_through, self._agreed(partition))
        for ref in done:
            if ref.epoch > committed_epoch and not self.is_refused(ref.object):
                known.setdefault(ref.epoch, SavedEntry(slot, ref))

    def distrust(self, slot: Slot) -> None:
        """Do not commit entries of a diverged replica."""
        known = self._saved.get(partition_of(slot), {})
        self._saved[partition_of(slot)] = {e: r for e, r in known.items() if r.slot != slot}

    def withhold(self, partition: Partition, after: int) -> None:
        """Drop saved entries after `after`, the last epoch on which replicas agree."""
        known = self._saved.get(partition, {})
        self._saved[partition] = {e: r for e, r in known.items() if e <= after}
        self._agreed_through[partition] = min(after, self._agreed(partition))

    def contradicts(self, slot: Slot, done: EntryRef) -> bool:
        """Whether a replica saved a state that differs from the committed one of that epoch."""
        refs = self.newest.entries.get(partition_of(slot).key, ()) if self.newest else ()
        committed = next((r for r in refs if r.epoch == done.epoch and r.object), None)
        return committed is not None and committed.digest != done.digest

    def has_committed(self, slot: Slot, done: EntryRef) -> bool:
        """Whether the newest restore point of a replica's partition is what it saved."""
        manifest = self.own_manifest
        refs = manifest.entries.get(partition_of(slot).key, ()) if manifest is not None else ()
        return bool(refs) and refs[0].object == done.object

    # --- proposals ---

    def step(self, inputs: CommitInputs | None, now: float) -> list[Effect]:
        """Start a read or write that is due. `inputs` is None while tasks and graph are not known,
        so that nothing can be written."""
        if self.phase is CommitPhase.UNREAD and now >= self._retry_at:
            self._machine.step(CommitEvent.READ_STARTED)
            return [ReadNewestManifest()]
        if self.phase is not CommitPhase.READY or inputs is None:
            return []
        if self.newest is None and inputs.started:
            message = _NO_MANIFEST.format(task=inputs.started[0])
            return self._retry_later(CommitEvent.MANIFEST_MISSING, message, now)
        proposal = self._propose(inputs, now)
        if proposal is None:
            return self._collect_garbage_when_due(
                inputs.generation.topology.spec.checkpoint.retain, now
            )
        self._machine.step(CommitEvent.PROPOSED)
        self._write_began = now
        return [proposal]

    def _collect_garbage_when_due(self, retain: int, now: float) -> list[Effect]:
        interval_s = _GARBAGE_INTERVAL_S if self._reported_lost else _MAX_GARBAGE_INTERVAL_S
        if self.own_manifest is None or now - self._garbage_collected_at < interval_s:
            return []
        return self._collect_garbage(retain, now)

    def _collect_garbage(self, retain: int, now: float) -> list[Effect]:
        full_scan, self._restore_failed = self._restore_failed, False
        self._checked, self._reported_lost = self._reported_lost, frozenset()
        self._garbage_collected_at = now
        return [CollectGarbage(retain, full_scan, reported_lost=self._checked)]

    def covers(self, generation: Generation) -> bool:
        """Whether the start of this generation is committed, so that its tasks may begin."""
        return self.own_manifest is not None and self.own_manifest.generation == generation.number

    def _propose(self, inputs: CommitInputs, now: float) -> WriteManifest | None:
        if not self.covers(inputs.generation):
            return self._first_manifest(inputs)
        assert self.newest is not None
        committable = self._committable(inputs.graph)
        awaited = self._awaited(inputs, committable)
        epoch = max(self.newest.epoch, min(awaited.values(), default=NO_EPOCH))
        waited = now - (self._last_progress_at or 0.0)
        is_due = waited >= inputs.generation.checkpoint_interval_s
        if epoch == self.newest.epoch and not is_due:
            return None
        available = self._available(committable, epoch)
        progressed = any(
            refs[0].epoch > self.newest.entries[p.key][0].epoch for p, refs in available.items()
        )
        if epoch == self.newest.epoch and not progressed:
            return None
        kept = keep_entries(inputs.graph, available, self.newest.entries, inputs.progress)
        if any(self._saves_again(kept[p.key], p) for p in awaited):
            return None
        new = {r.object for refs in kept.values() for r in refs if r.object is not None}
        new -= {r.object for refs in self.newest.entries.values() for r in refs}
        manifest = replace(self._next(inputs), epoch=epoch, entries=kept)
        return WriteManifest(manifest, new_entries=tuple(sorted(new)))

    def _saves_again(self, kept: Refs, partition: Partition) -> bool:
        """Whether a partition has yet to save an entry that replaces one that cannot be
        restored."""
        return not self.restorable(kept) or kept[0].epoch < self._newest_committed(partition)

    def _first_manifest(self, inputs: CommitInputs) -> WriteManifest:
        started = start_generation(
            self.newest, inputs.generation, inputs.graph, inputs.head_epoch, inputs.written
        )
        self.generation_problems = started.problems
        manifest = replace(
            self._next(inputs),
            entries=started.entries,
            queries=started.queries,
            begun=started.begun,
        )
        return WriteManifest(manifest, migrations=started.migrations)

    def _next(self, inputs: CommitInputs) -> Manifest:
        newest = self.newest
        return Manifest(
            seq=newest.seq + 1 if newest else 0,
            epoch=newest.epoch if newest else NO_EPOCH,
            generation=inputs.generation.number,
            fence=self._fence,
            time="",
            entries=newest.entries if newest else {},
            queries=newest.queries if newest else {},
            begun=newest.begun if newest else {},
        )

    def _awaited(
        self, inputs: CommitInputs, committable: Mapping[Partition, Refs]
    ) -> dict[Partition, int]:
        """The partitions for which a checkpoint waits, each with the epoch of its newest entry that
        is committed, or may be. One that gets no input, or whose sink fails, reports Live, because
        it does not know of newer epochs, so it is not waited for beyond `max_wait_epochs`; nor is
        one whose newer entries may not be committed yet."""
        best = {
            p: max([self._newest_committed(p), *(ref.epoch for ref in committable[p])])
            for p in inputs.running
        }
        interval_epochs = inputs.generation.checkpoint_interval_epochs
        max_wait_epochs = _WAIT_INTERVALS * interval_epochs
        newest_epoch = max(best.values(), default=NO_EPOCH)
        # Whoever has saved all that was due before is not behind, however long ago that was.
        due = inputs.next_checkpoint - interval_epochs
        oldest_epoch = newest_epoch - max_wait_epochs
        return {p: epoch for p, epoch in best.items() if max(epoch, due) >= oldest_epoch}

    def lacks_entries(
        self, partition: Partition, epoch: int, interval_epochs: int, next_checkpoint: int
    ) -> bool:
        """Whether a partition that has reached `epoch` has not saved an entry for too long."""
        max_wait_epochs = _ALL_SAVE_INTERVALS * interval_epochs
        expected = max(self.newest_entry(partition), next_checkpoint - interval_epochs)
        return expected < epoch - max_wait_epochs

    def _behind(self, inputs: CommitInputs) -> list[Partition]:
        awaited = self._awaited(inputs, self._committable(inputs.graph))
        epoch = min(awaited.values(), default=NO_EPOCH)
        return sorted(p for p, newest in awaited.items() if newest == epoch)

    def newest_entry(self, partition: Partition) -> int:
        """The epoch of the newest entry that is saved, or committed."""
        saved: Mapping[int, SavedEntry] = self._saved.get(partition, {})
        return max((self._newest_committed(partition), *saved))

    def _newest_committed(self, partition: Partition) -> int:
        refs = self.newest.entries.get(partition.key) if self.newest else None
        return refs[0].epoch if refs else NO_EPOCH

    def _agreed(self, partition: Partition) -> int:
        """The newest epoch on which replicas of a partition are known to agree."""
        return self._agreed_through.get(partition, self._newest_committed(partition))

    def _committable(self, graph: Graph) -> dict[Partition, Refs]:
        """The saved entries that may be committed. A partition has none at an epoch on which the
        replicas of what it reads do not agree yet: its own have all read the same."""
        if not any(self._saved.values()):  # most of the time; a partition may have many inputs
            return dict.fromkeys(graph.partitions, ())
        found: dict[Partition, Refs] = {}
        through: dict[Partition, int] = {}
        for partition in graph.partitions:
            read = [through[upstream] for upstream in graph.inputs[partition]]
            through[partition] = min([self._agreed(partition), *read])
            saved = self._saved.get(partition, {}).values()
            found[partition] = tuple(r.ref for r in saved if r.ref.epoch <= through[partition])
        return found

    def _available(
        self, committable: Mapping[Partition, Refs], epoch: int
    ) -> dict[Partition, Refs]:
        """The entries that a manifest may refer to."""
        assert self.newest is not None
        found: dict[Partition, Refs] = {}
        for partition, saved in committable.items():
            newer = [ref for ref in saved if ref.epoch <= epoch]
            refs = [*newer, *self.newest.entries[partition.key]]
            known = tuple(sorted(refs, key=lambda r: -r.epoch))
            found[partition] = self.restorable(known) or known
        return found

    def _set_newest(self, manifest: Manifest, now: float) -> None:
        advanced = self.newest is None or manifest.epoch > self.newest.epoch
        if advanced or self._last_progress_at is None or self._progressed(manifest):
            self._last_progress_at = now
        if self.newest is not None and manifest.generation != self.newest.generation:
            # The sinks of a new generation may lack epochs of these entries.
            self._saved, self._agreed_through = {}, {}
        self.newest = manifest
        for partition, known in self._saved.items():
            committed_epoch = self._newest_committed(partition)
            self._saved[partition] = {e: r for e, r in known.items() if e > committed_epoch}

    def _progressed(self, manifest: Manifest) -> bool:
        old: Mapping[str, Refs] = self.newest.entries if self.newest else {}
        return any(key in old and refs[0] != old[key][0] for key, refs in manifest.entries.items())

    def _recovered(self) -> None:
        self._backoff.succeeded()
        self._store_problem = None
