"""What must hold after every step, whatever fails (docs/invariants.md).

A violation ends the simulation with an error that names the invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rekindle.checkpoints.manifest import Manifest
from rekindle.coordinator.tasks.graph import Graph
from rekindle.protocol import EntryRef
from rekindle.streams.epochs import NO_EPOCH, EpochInput
from rekindle.task.state import TaskState
from rekindle.topology.model import Partition
from rekindle_testing.simulation.expected import Expected
from rekindle_testing.simulation.values import values_in
from rekindle_testing.simulation.witnesses import Witnesses
from rekindle_testing.simulation.wrong_results import WrongResults

if TYPE_CHECKING:
    from rekindle_testing.simulation.pod import TaskPod
    from rekindle_testing.simulation.store_and_sinks import SimulatedSinks, SimulatedStore
    from rekindle_testing.simulation.wrong_result_checks import WrongResultChecks


class Violation(AssertionError):
    """An invariant does not hold."""


class Checks:
    """`pods`: the newest incarnation of each slot."""

    def __init__(
        self,
        expected: Expected,
        graph: Graph,
        store: SimulatedStore,
        sinks: SimulatedSinks,
        pods: Callable[[], Iterable[TaskPod]],
        wrong_results: WrongResults,
    ) -> None:
        self.appended_epochs = 0
        self.adopted_logs = 0
        self.written_epochs = 0
        self.borrowed_states = 0
        self.tentative_epochs = 0
        self.expected = expected
        self.wrong_result_checks: WrongResultChecks | None = None  # none while no fault needs them
        # Output that a run without faults does not have: tentative values, and wrong ones.
        self._extra_output: dict[tuple[Partition, int], set[str]] = {}
        self._graph = graph
        self._store = store
        self._sinks = sinks
        self._pods = pods
        self._fences: dict[int, int] = {}  # manifest number -> fence
        self._witnesses = Witnesses(self._committed_through)
        self._wrong = wrong_results

    def failed(self, message: str) -> None:
        raise Violation(message)

    def appended(self, pod: TaskPod, epoch: int, value: str, in_log: str) -> None:
        """I1: an epoch is the same wherever and however often it is computed."""
        self.appended_epochs += 1
        copied = pod.boot.core.status.lent_from if pod.boot is not None else None
        if pod.is_live:
            self.takes_over(pod, "is Live")
        partition = _partition(pod)
        self._witnesses.computed(partition, pod.slot, pod.incarnation, epoch, value, copied)
        expected = self.expected.output(partition, epoch)
        if value != expected and self._wrong.is_wrong(value):
            self._extra_output.setdefault((partition, epoch), set()).add(value)
            self._of_wrong_results.guarantees.appended(pod, epoch)
            expected = value
        if not value == in_log == expected:
            raise Violation(
                f"I1: {pod.slot.key} incarnation {pod.incarnation} computed {value} for epoch "
                f"{epoch}, its log has {in_log}; a run without faults has {expected}"
            )

    def tentative(self, partition: Partition, epoch: int, value: str) -> None:
        """A tentative result is in the output."""
        self.tentative_epochs += 1
        self._extra_output.setdefault((partition, epoch), set()).add(value)

    def unknown_input(self, partition: Partition, epoch: EpochInput) -> str:
        """A value in the input of a tentative epoch that no upstream had in its output of this
        epoch; "" if there is none."""
        for sources, rows in zip(self.expected.inputs_of(partition), epoch.inputs, strict=True):
            known = {self.expected.output(p, epoch.epoch) for p in sources}
            known.update(*(self._extra_output.get((p, epoch.epoch), ()) for p in sources))
            for value in values_in(rows):
                if value not in known:
                    return value
        return ""

    def check_promises(self, pod: TaskPod) -> None:
        """I3: a replica does not suspend new input to stabilize while its partner relies on it,
        unless it has lost the connection to that partner."""
        own = pod.boot.tentative.checks if pod.boot is not None else None
        if own is None or not own.streams.is_served(own.now):
            return
        for other in self._pods():
            if other is pod or _partition(other) != _partition(pod) or other.boot is None:
                continue
            partner = other.boot.tentative.checks
            if partner is not None and partner.breaks_promise(own.asked_at):
                raise Violation(
                    f"I3: {other.slot.key} suspends new input, although {pod.slot.key} relies on it"
                )

    def witnessed(self, partition: Partition, epoch: int) -> None:
        """I1: an epoch that a coordinator counts as computed by two replicas was computed by two
        (see `witnesses`)."""
        if not self._witnesses.is_known(partition, epoch):
            raise Violation(
                f"I1: epoch {epoch} of {partition.key} counts as computed by two replicas, and one "
                "of them is a copy"
            )

    def _committed_through(self, partition: Partition) -> int:
        newest = self._store.newest
        return newest.entries[partition.key][0].epoch if newest is not None else NO_EPOCH

    def borrowed(self, pod: TaskPod, state: TaskState) -> None:
        """I1: a partner lends the state of a run without faults."""
        self.borrowed_states += 1
        if not self._is_explained(_partition(pod), state):
            raise Violation(
                f"I1: {pod.slot.key} incarnation {pod.incarnation} got another state after epoch "
                f"{state.epoch} from its partner than a run without faults has"
            )

    def takes_over(self, pod: TaskPod, what: str) -> None:
        """I2, I5: a replica whose log begins after a lent state takes over nothing while an older
        epoch may be needed."""
        lent_from = pod.boot.core.status.lent_from if pod.boot is not None else None
        newest = self._store.newest
        if lent_from is None or newest is None:
            return
        refs = newest.entries.get(_partition(pod).key, ())
        if refs and refs[-1].epoch < lent_from:
            raise Violation(
                f"I5: {pod.slot.key} incarnation {pod.incarnation} {what}, although its log begins "
                f"after epoch {lent_from}, and the manifest keeps an entry of {refs[-1].epoch}"
            )

    def written(
        self, query: str, partition: Partition, epoch: int, value: str, in_file: str
    ) -> None:
        """I2: no epoch is delivered changed, or before the ones ahead of it."""
        self.written_epochs += 1
        expected = self.expected.output(partition, epoch)
        if any(v != expected and not self._wrong.is_wrong(v) for v in (value, in_file)):
            raise Violation(
                f"I2: epoch {epoch} of query {query} {partition.key} is {in_file}, not {value}"
            )
        if (durable := self._sinks.durable(query, partition)) < epoch:
            raise Violation(
                f"I2: query {query} {partition.key} has epoch {epoch}, but not {durable + 1}"
            )

    def committed(self, manifest: Manifest) -> None:
        """I1, I2, I5, I9: entries have the states of a run without faults, the sinks have all
        epochs that the manifest counts as written, and fences never decrease."""
        for partition in self._graph.partitions:
            for ref in manifest.entries[partition.key]:
                self._saved(partition, ref)
        self._fences[manifest.seq] = manifest.fence
        before = self._fences.get(manifest.seq - 1, manifest.fence)
        if manifest.fence < before:
            raise Violation(
                f"I9: manifest {manifest.seq} has fence {manifest.fence}, after one of {before}"
            )
        for partition, entries in self._entries(manifest).items():
            for spec in self._graph.queries[partition.segment]:
                durable = self._sinks.durable(spec.name, partition)
                if durable < entries[0]:
                    raise Violation(
                        f"I2: {partition.key} is committed at {entries[0]}, and query {spec.name} "
                        f"has written only through {durable}"
                    )
        self.check_retention()

    def _saved(self, partition: Partition, ref: EntryRef) -> None:
        saved = self._store.load(ref.object) if ref.object is not None else None
        if saved is None:
            return  # `check_retention` looks for those that are gone
        checks = self.wrong_result_checks
        must_be_right = checks is None or checks.guarantees.must_be_right(partition)
        is_right = self._is_expected if must_be_right else self._is_explained
        if saved.epoch != ref.epoch or not is_right(partition, saved):
            raise Violation(f"I1: {ref.object} has another state than a run without faults has")

    def _is_expected(self, partition: Partition, state: TaskState) -> bool:
        """Whether a run without faults has the state after this epoch, which is the epoch's output
        (`values`), and its watermark."""
        return self.expected.has_state(partition, state.epoch, state.watermark, state.operators)

    def _is_explained(self, partition: Partition, state: TaskState) -> bool:
        """Whether a run without faults has it, or it follows from a wrong result."""
        fold = getattr(state.operators, "fold", "")
        if self._wrong.is_wrong(fold):
            return self.expected.has_watermark(partition, state.epoch, state.watermark)
        return self._is_expected(partition, state)

    # -- wrong results ---------------------------------------------------------------------------

    @property
    def _of_wrong_results(self) -> WrongResultChecks:
        assert self.wrong_result_checks is not None, "no fault makes a result wrong"
        return self.wrong_result_checks

    def is_wrong(self, value: str) -> bool:
        return self._wrong.is_wrong(value)

    def begin_wrong_result(self, pod: TaskPod, has_begun: bool) -> bool:
        """Whether a pod may compute a wrong result now; if so, it counts as faulty. `has_begun`: it
        has computed one before, and may go on."""
        guarantees = self._of_wrong_results.guarantees
        if not has_begun and not guarantees.may_begin(pod):
            return False
        guarantees.began(pod)
        return True

    def writes(self, pod: TaskPod, epoch: int, value: str, through: int | None) -> None:
        """I2: what replicas disagree about is not written, once the task has been told so."""
        self.takes_over(pod, "writes to a sink")
        if self.wrong_result_checks is not None:
            self.wrong_result_checks.writes(pod, epoch, value)
        if through is not None and epoch > through:
            raise Violation(
                f"I2: {pod.slot.key} writes epoch {epoch}, and may write only through {through}"
            )

    def ships(self, pod: TaskPod, through: int) -> None:
        """I5: only what is committed enters the log in the store: all else may still change."""
        newest = self._store.newest
        refs = newest.entries.get(_partition(pod).key, ()) if newest is not None else ()
        if through > max((ref.epoch for ref in refs), default=-1):
            raise Violation(f"I5: {pod.slot.key} ships epoch {through}, which is not committed")

    def check_shipped(self, deleted: Iterable[str]) -> None:
        """I5: what a log has only in the store stays for as long as a reader may need it."""
        newest = self._store.newest
        if newest is None:
            return
        entries, gone = self._entries(newest), set(deleted)
        for pod in self._pods():
            partition = _partition(pod)
            if pod.boot is None or pod.boot.core.parts is None or partition not in entries:
                continue
            readers = [entries[p][-1] for p, i in self._graph.inputs.items() if partition in i]
            for name, last in pod.disk.shipped.values():
                if name in gone and last > min(readers, default=last):
                    raise Violation(
                        f"I5: {name} is deleted, and {pod.slot.key} has it nowhere else"
                    )

    def check_retention(self) -> None:
        """I5: nothing is gone that a consumer may still need."""
        newest = self._store.newest
        if newest is None:
            return
        missing = self._store.missing(
            [r.object for refs in newest.entries.values() for r in refs if r.object is not None]
        )
        if missing:
            raise Violation(f"I5: manifest {newest.seq} needs {missing}, which are deleted")
        entries = self._entries(newest)
        bases, positions = self._logs(), self._positions()
        for partition in self._graph.partitions:
            for source in self._graph.inputs[partition]:
                if entries[source][-1] > entries[partition][-1]:
                    raise Violation(
                        f"I5: {partition.key} restores from epoch {entries[partition][-1]}, "
                        f"{source.key} only from {entries[source][-1]}"
                    )
                readable = min([entries[source][-1], *bases.get(source, ())])
                for slot, epoch in positions.get(partition, ()):
                    if readable > epoch:
                        raise Violation(
                            f"I5: {slot} is at epoch {epoch}; {source.key} can deliver only what "
                            f"follows {readable}"
                        )

    def _entries(self, manifest: Manifest) -> Mapping[Partition, list[int]]:
        """The epochs of the entries of each partition, newest first."""
        return {p: [r.epoch for r in manifest.entries[p.key]] for p in self._graph.partitions}

    def _logs(self) -> Mapping[Partition, list[int]]:
        """The epochs before the first in each log."""
        found: dict[Partition, list[int]] = {}
        for pod in self._pods():
            if pod.boot is not None and pod.boot.core.parts is not None:
                found.setdefault(_partition(pod), []).append(pod.disk.base - 1)
        return found

    def _positions(self) -> Mapping[Partition, list[tuple[str, int]]]:
        found: dict[Partition, list[tuple[str, int]]] = {}
        for pod in self._pods():
            if pod.boot is not None and (epoch := pod.boot.epoch) is not None:
                found.setdefault(_partition(pod), []).append((pod.slot.key, epoch))
        return found


def _partition(pod: TaskPod) -> Partition:
    return Partition(pod.slot.segment, pod.slot.partition)
