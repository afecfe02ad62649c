"""One simulation: a topology, its faults, and whether all is done once nothing fails.

Design: docs/simulation.md.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from rekindle import names
from rekindle.protocol import ConsistencyState
from rekindle.topology.model import Partition, Slot
from rekindle_testing.simulation.checks import Violation
from rekindle_testing.simulation.cluster import SimulatedCluster
from rekindle_testing.simulation.coverage import Cell, counted
from rekindle_testing.simulation.faults import (
    SimulatedFault,
    draw_faults,
    draw_input_faults,
    draw_wrong_results,
)
from rekindle_testing.simulation.injector import SimulatedInjector
from rekindle_testing.simulation.kube.objects import (
    ADDED,
    DELETED,
    PODS,
    TOPOLOGIES,
    ApiEvent,
    Json,
)
from rekindle_testing.simulation.late_requests import MAX_REQUEST_DELAY_S
from rekindle_testing.simulation.operator_checks import OperatorErrors
from rekindle_testing.simulation.pod import TaskPod
from rekindle_testing.simulation.replay_checks import ReplayChecks, max_left_out_epochs
from rekindle_testing.simulation.scheduler import Scheduler
from rekindle_testing.simulation.topologies import (
    CHECKPOINT_INTERVAL_EPOCHS,
    EPOCH_S,
    WITH_STATE,
    Variant,
    draw_operators,
    draw_replay_targets,
    draw_variant,
)
from rekindle_testing.simulation.topologies import TOPOLOGIES as SPECS

_WRONG_CLOCKS, _WRONG_CLOCK_S = 0.2, 70.0
"""The share of seeds in which the operators' clocks are off, and how far."""
_REBALANCED = 0.3
"""The share of the other seeds in which tasks move to emptier nodes."""
_WRONG_RESULTS = 0.15
"""The share of seeds in which replicas compute wrong results."""
_DONE_WITHIN_S, _DONE_WITH_MOVES_WITHIN_S = 90.0, 240.0
"""Within so many seconds after the last fault all has to be done."""
_FILES_DELETED_AFTER_S = 10.0
"""So long after the last fault a person deletes the wrong sink files that the status names. (Not of
a lost task: only the task that has named a file writes it again.)"""
_BEHIND_EPOCHS = 4
"""In the end, sinks may be so many epochs behind the clock."""
_WRONG_RESULTS_BEGIN_S = 5.0
"""A wrong result that has not begun so long after the last fault does not come any more."""
_MOVES = "a move to an emptier node is in progress, or has failed lately"
_UNCHANGED_S = 10.0
"""For so long nothing may change any more."""


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """`failure`: the violated invariant, or what is not done; None if all is well. `seconds`: from
    the end of the last fault until all was done. `appended`, `written`, `tentative`: epochs;
    `moved`: states that were lent. `cells`: how often each event happened in each state of the
    transition tables."""

    seed: int
    faults: Sequence[SimulatedFault]
    variant: Variant
    failure: str | None
    seconds: float
    appended: int
    written: int
    moved: int
    tentative: int
    cells: Mapping[Cell, int]
    lines: Sequence[str]


def wrong_results(seed: int) -> Sequence[SimulatedFault]:
    """The wrong results of a seed; most have none."""
    random = Random(f"wrong results {seed}")
    return draw_wrong_results(random) if random.random() < _WRONG_RESULTS else ()


def has_state(seed: int) -> bool:
    """Whether the topology of a seed has operators with state."""
    return draw_operators(Random(f"operators {seed}"), Variant(SPECS[0])).topology in WITH_STATE


def has_replay_targets(seed: int) -> bool:
    """Whether the topology of a seed has them."""
    variant = draw_replay_targets(Random(f"replay targets {seed}"), Variant(SPECS[0]))
    return variant.replay_targets_s is not None


class Simulation:
    """`lines`: what happened. `faults`, `variant`: those of the seed if None."""

    def __init__(
        self,
        seed: int,
        faults: Sequence[SimulatedFault] | None = None,
        variant: Variant | None = None,
    ) -> None:
        random = Random(f"plan {seed}")
        # One generator for each subject: a new draw for one does not change the others.
        more = Random(f"tentative {seed}")
        drawn_variant = draw_variant(more, random.choice(SPECS))
        drawn_variant = draw_operators(Random(f"operators {seed}"), drawn_variant)
        drawn_variant = draw_replay_targets(Random(f"replay targets {seed}"), drawn_variant)
        variant = variant or drawn_variant
        nodes = random.randint(3, 7)
        drawn = draw_faults(random)
        if variant.max_delay_s is not None:
            drawn = sorted([*drawn, *draw_input_faults(more)], key=lambda fault: fault.at)
        if wrong := wrong_results(seed):
            drawn = sorted([*drawn, *wrong], key=lambda fault: fault.at)
        self.seed = seed
        self.faults = drawn if faults is None else faults
        self.variant = variant
        self.lines: list[str] = []
        self._added_pods: list[Json] = []
        # Slots whose output was STABLE once since the last fault. With a `maxDelay` of one epoch,
        # an epoch that is merely late is tentative, so output need not be STABLE at the end.
        self._was_stable: set[Slot] = set()
        self.scheduler = Scheduler(seed)
        has_wrong_clocks = Random(f"skew {seed}").random() < _WRONG_CLOCKS
        # With wrong clocks, tasks would not settle within the time of a simulation.
        self._rebalances = not has_wrong_clocks and Random(f"moves {seed}").random() < _REBALANCED
        # An epoch that is merely late is tentative; and corrections wait for one another.
        self._is_often_tentative = variant.max_delay_s == EPOCH_S
        spec = variant.spec | ({"recovery": {"rebalance": True}} if self._rebalances else {})
        self.cluster = SimulatedCluster(
            self.scheduler,
            spec,
            nodes,
            variant.buffered_epochs,
            _WRONG_CLOCK_S if has_wrong_clocks else 0.0,
            replays_take_time=variant.replay_targets_s is not None,
        )
        self.cluster.server.observers.append(self._log_pods)
        self._injector = SimulatedInjector(self.cluster, self._log)
        self._injector.plan(self.faults)

    def _log_pods(self, plural: str, event: ApiEvent) -> None:
        if plural == PODS and event.type == ADDED:
            self._added_pods.append(event.raw)
        if plural == PODS and event.type in (ADDED, DELETED):
            self._log(f"pod {event.raw['metadata']['name']} {event.type.lower()}")

    def _log(self, text: str) -> None:
        self.lines.append(f"{self.scheduler.now:7.2f}  {text}")

    def run(self) -> SimulationOutcome:
        failure, done_after = None, 0.0
        logger = logging.getLogger("rekindle_operator")
        errors, level = OperatorErrors(self.cluster.fail), logger.level
        logger.addHandler(errors)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            with counted() as cells:
                failure, done_after = self._run()
            if wrong := self.cluster.checks.expected.wrong_rows():
                failure = f"I1: {wrong}"
        except Violation as violation:
            failure = str(violation)
        except Exception as error:  # of a core: an event that it does not expect
            failure = f"{type(error).__name__}: {error}"
            self._log(traceback.format_exc())
        finally:
            logger.removeHandler(errors)
            logger.setLevel(level)
            logger.propagate = True
            self.cluster.end()
        if failure is not None:
            self._log(failure)
        checks = self.cluster.checks
        return SimulationOutcome(
            self.seed,
            self.faults,
            self.variant,
            failure,
            done_after,
            checks.appended_epochs,
            checks.written_epochs,
            checks.borrowed_states,
            checks.tentative_epochs,
            cells,
            self.lines,
        )

    def _run(self) -> tuple[str | None, float]:
        """What fails in the end, and how long it took until all was done."""
        self.scheduler.run_until(SimulatedInjector.ends_at(self.faults))
        self._log("nothing fails any more")
        self.scheduler.after(_WRONG_RESULTS_BEGIN_S, self.cluster.end_wrong_results)
        healed_at = self.scheduler.now
        self._was_stable.clear()
        end_at = healed_at + (_DONE_WITH_MOVES_WITHIN_S if self._rebalances else _DONE_WITHIN_S)
        while True:
            missing, done_at = self._run_until_done(healed_at, end_at)
            done_after = done_at - healed_at
            if missing:
                after_s = self.scheduler.now - healed_at
                return f"not done {after_s:g} s after the last fault: {missing}", done_after
            self._log("all is done")
            self._added_pods.clear()
            self.scheduler.run_until(self.scheduler.now + _UNCHANGED_S)
            undone = self.not_done()
            if not self._added_pods and not undone:
                if self.variant.replay_targets_s is not None:
                    ReplayChecks(self.cluster, self.seed).run()
                return None, done_after
            # A node that is avoided for a while may get tasks again: so a move may begin although
            # nothing has happened.
            if not all(self._rebalances and _is_successor(pod) for pod in self._added_pods):
                return "pods are replaced although all was done", done_after
            if not (self._added_pods or all(map(self._may_recur, undone))):
                return f"not done any more: {'; '.join(undone)}", done_after
            if self.scheduler.now >= end_at:
                return f"this does not end: {'; '.join(undone) or 'moves'}", done_after

    def _run_until_done(self, healed_at: float, end_at: float) -> tuple[str, float]:
        """What is missing at the end; and when all was done."""
        missing, done_at = self.not_done(), self.scheduler.now
        while self.scheduler.now < (
            end_at if missing else max(healed_at + MAX_REQUEST_DELAY_S, done_at)
        ):
            self.scheduler.run_until(self.scheduler.now + 0.5)
            is_seen = self.scheduler.now - healed_at > _FILES_DELETED_AFTER_S
            if is_seen and self.cluster.checks.wrong_result_checks is not None:
                self.cluster.checks.wrong_result_checks.files.delete_wrong_ones()
            missing = self.not_done()
            if missing:
                done_at = self.scheduler.now
        return "; ".join(missing), done_at

    def not_done(self) -> list[str]:
        """What is missing until all is as if nothing had failed."""
        return [*self._missing_in_data_plane(), *self._missing_in_control_plane()]

    def _may_recur(self, missing: str) -> bool:
        """Whether it may be missing for a while after all was done, although nothing fails."""
        if missing == _MOVES:
            return self._rebalances
        is_late = " has written " in missing or missing.startswith("the output of ")
        return self._is_often_tentative and is_late

    def _missing_in_data_plane(self) -> list[str]:
        cluster = self.cluster
        head = (
            int(self.scheduler.now / (cluster.topology.spec.epoch_interval / 1e6)) - _BEHIND_EPOCHS
        )
        missing = []
        for segment in cluster.topology.segments:
            for index in range(segment.partitions):
                for query in segment.queries:
                    durable = cluster.sinks.durable(query, Partition(segment.id, index))
                    if durable < head:
                        missing.append(f"query {query}/{index} has written {durable} of {head}")
        for slot in cluster.topology.slots():
            pod = cluster.pods.get(slot) or cluster.pods.get(slot.alternate)
            phase = pod.boot.core.status.phase if pod is not None and pod.boot is not None else None
            if phase != "Live":
                missing.append(f"{slot.key} is {phase}")
            streams = pod.boot.tentative.streams if pod is not None and pod.boot else None
            if streams is None or streams.state is ConsistencyState.STABLE:
                self._was_stable.add(slot)
            elif slot not in self._was_stable:
                missing.append(f"the output of {slot.key} is in {streams.state}")
        if cluster.checks.wrong_result_checks is not None:
            missing += cluster.checks.wrong_result_checks.not_done()
        newest = cluster.store.newest
        committed = newest.epoch if newest is not None else -1
        left_out = max_left_out_epochs(cluster.topology)
        if committed < head - 3 * CHECKPOINT_INTERVAL_EPOCHS - left_out:
            missing.append(f"committed is {committed} of {head}")
        return missing

    def _missing_in_control_plane(self) -> list[str]:
        """Of nodes that stay silent nothing is required: their pods cannot end."""
        cluster, missing = self.cluster, []
        slots = len(cluster.topology.slots())
        silent = self._injector.silent
        pods = cluster.server.objects.all(PODS)
        raws = [raw for raw in pods if raw["spec"].get("nodeName") not in silent]
        ending = [r["metadata"]["name"] for r in raws if "deletionTimestamp" in r["metadata"]]
        if ending:
            missing.append(f"Terminating: {ending}")
        nodes = [node for node in cluster.nodes.values() if node.name not in silent]
        running = [pod for node in nodes for pod in node.pods.values()]
        tasks = sum(isinstance(pod, TaskPod) for pod in running)
        if len(raws) != slots + 1 or (tasks, len(running)) != (slots, slots + 1):
            missing.append(f"{len(raws)} pods, {tasks} tasks, {len(running) - tasks} coordinators")
        if cluster.leader is None:
            missing.append("no operator leads")
        (topology,) = cluster.server.objects.all(TOPOLOGIES)
        status = topology.get("status") or {}
        if status.get("observedGeneration") != topology["metadata"]["generation"]:
            missing.append("the newest generation is not accepted")
        states = {q["name"]: q["state"] for q in status.get("queries") or ()}
        # With a `maxDelay` of one epoch, an epoch that is merely late is tentative.
        was_stable = self._was_stable >= set(cluster.topology.slots())
        done = {"Live", "Tentative"} if was_stable else {"Live"}
        missing += [
            f"query {name} is {state}" for name, state in states.items() if state not in done
        ]
        phases = {"Running"} if set(states.values()) == {"Live"} else {"Running", "Degraded"}
        if status.get("phase") not in phases:
            missing.append(f"the topology is {status.get('phase')}")
        if "rebalancing" in status:
            missing.append(_MOVES)
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        wanted = {"Redundant": "True", "Recovering": "False"}
        missing += [
            f"{name} is {conditions.get(name)}"
            for name, value in wanted.items()
            if conditions.get(name) != value
        ]
        return missing


def _is_successor(pod: Json) -> bool:
    """In a move to an emptier node."""
    return names.ANNOTATION_REPLACES in pod["metadata"].get("annotations", {})


def simulate(
    seed: int, faults: Sequence[SimulatedFault] | None = None, variant: Variant | None = None
) -> SimulationOutcome:
    """`faults`, `variant`: those of the seed if None."""
    return Simulation(seed, faults, variant).run()


def shrink(outcome: SimulationOutcome) -> SimulationOutcome:
    """The same failure with fewer faults: each is left out as long as it still fails."""
    best, index = outcome, 0
    while index < len(best.faults):
        without = [*best.faults[:index], *best.faults[index + 1 :]]
        tried = simulate(outcome.seed, without, outcome.variant)
        if tried.failure is not None:
            best = tried
        else:
            index += 1
    return best
