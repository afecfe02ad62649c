"""One seed: a cluster, two topologies, and rounds of faults; after each one the sinks are compared.

A round fails if not all queries advance and are reported as Live within a time limit, or if any
sink differs from the reference execution.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rekindle_testing.chaos import topologies
from rekindle_testing.chaos.freshness import Freshness
from rekindle_testing.chaos.injector import Injector
from rekindle_testing.chaos.plan import (
    ChaosPlan,
    Fault,
    FaultAction,
    Freeze,
    HealNetwork,
    KillNodes,
    PartitionNetwork,
    Round,
    Thaw,
    make_plan,
)
from rekindle_testing.chaos.progress import SinkPace, StallWhileLive
from rekindle_testing.chaos.sampler import Sampler
from rekindle_testing.chaos.task_samples import upstream_of
from rekindle_testing.embedded.processes import ChildProcesses
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.evidence import keep_evidence
from rekindle_testing.harness.nodes import NodeResources
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.pod_log_archive import PodLogArchive
from rekindle_testing.paths import ROOT
from rekindle_testing.progress import OnProgress
from rekindle_testing.waiting import DeadlineError, wait_for

BUILD = ROOT / "build" / "chaos"
NODES = 5
ADVANCE_TIMEOUT_S = 120.0
START_TIMEOUT_S = 180.0
_INPUT_BEFORE_ROUNDS_S = 90
_INPUT_PER_ROUND_S = 60 + int(ADVANCE_TIMEOUT_S)
_NO_STALLED_LIVE = StallWhileLive("", 0.0, 0.0)
_DELAY_MARGIN_S = 5.0
"""How much later than `maxDelay` a result may be seen: results are sampled, and tasks that start
compete for the cores."""
_SPARE_INPUT_S = 20  # of input after the epoch that a query has to reach


class RoundFailure(AssertionError):
    """A failed round; the message is for users."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Times are seconds since the end of the round's last fault. `longest_stall_while_live_s`: the
    longest time that a query, `stalled_query`, was reported as Live while its sink wrote nothing.
    `tentative`, `longest_delay_s`: `Freshness.tentative` and `longest_s` (from an epoch's arrival
    to its first result) of a topology with a finite `maxDelay`."""

    number: int
    advanced_s: float
    live_s: float
    rows: int
    longest_stall_while_live_s: float
    stalled_query: str = ""
    tentative: int = 0
    longest_delay_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"all queries advance after {self.advanced_s:.1f} s and are Live after "
            f"{self.live_s:.1f} s; {self.rows:,} rows equal; "
            f"longest stall while Live {self.longest_stall_while_live_s:.1f} s "
            f"{self.stalled_query}; "
            f"{self.tentative} tentative epochs, "
            f"new results after {self.longest_delay_s:.1f} s at most"
        )


@dataclass(frozen=True, slots=True)
class SeedResult:
    """`failure` is empty if all rounds passed; otherwise `evidence` is its directory."""

    seed: int
    rounds: tuple[RoundResult, ...]
    failure: str = ""
    evidence: Path | None = None


def run_seed(
    seed: int,
    rounds: int,
    on_progress: OnProgress,
    *,
    faults: Sequence[Fault] = tuple(Fault),
    standbys: int = 0,
    build: Path = BUILD,
) -> SeedResult:
    """Run it on its own cluster, which is deleted afterwards except for the evidence."""
    plan = make_plan(seed, rounds, nodes=NODES, topologies=topologies.NAMES, faults=faults)
    evidence = build / str(seed)
    shutil.rmtree(evidence, ignore_errors=True)
    evidence.mkdir(parents=True)
    on_progress(str(plan))
    with tempfile.TemporaryDirectory(prefix="rekindle-chaos-") as directory:
        run = _Run(plan, Path(directory), on_progress, standbys)
        with run.started():
            failure = run.run_rounds()
            if failure:
                on_progress(f"seed {seed}: FAILED: {failure}")
                texts = {"plan.txt": str(plan), "failure.txt": failure, "steps.txt": run.steps}
                keep_evidence(evidence, run.cluster, texts, run.log_archive)
                shutil.copytree(run.expected, evidence / "expected", dirs_exist_ok=True)
        shutil.copyfile(run.history, evidence / "history.jsonl")
    result = SeedResult(seed, tuple(run.results), failure, evidence if failure else None)
    (evidence / "result.json").write_text(json.dumps(asdict(result), indent=2, default=str) + "\n")
    return result


class _Run:
    """Everything of one seed while it runs. `history`: the file of all changes of objects in the
    API, as sampled; `expected`: what the reference execution writes."""

    def __init__(
        self, plan: ChaosPlan, directory: Path, on_progress: OnProgress, standbys: int
    ) -> None:
        self.plan = plan
        self.results: list[RoundResult] = []
        self.history = directory / "history.jsonl"
        self.expected = directory / "expected"
        self._on_progress = on_progress
        self._log: list[str] = []
        self._input_s = _INPUT_BEFORE_ROUNDS_S + _INPUT_PER_ROUND_S * len(plan.rounds)
        self._resources = topologies.topology_resources(self._input_s, plan.seed, standbys)
        # Room for two tasks on each, and for a coordinator and an operator.
        resources = NodeResources(cpu="1300m", memory="4Gi")
        self.cluster = EmbeddedCluster(
            directory, nodes=NODES, resources=resources, on_progress=on_progress
        )
        self.log_archive = PodLogArchive(
            self.cluster.node_kind, self.cluster.node_directory, directory / "kept"
        )
        self._references = {
            name: Reference(resource, self.cluster.shared, self.expected / name)
            for name, resource in self._resources.items()
        }
        self._progress = {
            name: SinkPace(
                topologies.partitions(resource), file_interval_s=topologies.WINDOW_SLIDE_S
            )
            for name, resource in self._resources.items()
        }
        self._freshness = {
            name: Freshness(upstream_of(resource), topologies.MAX_DELAY_S)
            for name, resource in self._resources.items()
            if topologies.may_be_tentative(resource)
        }
        self._compared = dict.fromkeys(self._resources, -1)

    @property
    def steps(self) -> str:
        return "\n".join(self._log)

    @contextmanager
    def started(self) -> Iterator[None]:
        """The cluster with both topologies applied; it is stopped afterwards."""
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            # Left before the pool, which would wait for the end of the reference execution.
            children = stack.enter_context(ChildProcesses(self.expected / "logs"))
            topologies.write_input(self.cluster.shared, self._input_s, self.plan.seed)
            reference = pool.submit(self._execute_references, children)
            stack.enter_context(self.cluster)
            self.cluster.create_claim("rekindle")
            self.cluster.install()
            reference.result()  # so that it does not compete for the cores
            self._sampler = stack.enter_context(self._make_sampler())
            # A Node object that stays keeps its address.
            self._injector = stack.enter_context(
                Injector(
                    self.cluster, self._sampler, never_reuse_addresses=self.plan.node_objects_stay
                )
            )
            self.cluster.apply(*self._resources.values())
            yield

    def _execute_references(self, children: ChildProcesses) -> None:
        for reference in self._references.values():
            reference.execute(children)

    def _make_sampler(self) -> Sampler:
        sinks = {
            name: {q["name"]: self._sink(q) for q in resource["spec"]["queries"]}
            for name, resource in self._resources.items()
        }
        kubeconfig = self.cluster.control_plane.kubeconfig
        return Sampler(
            kubeconfig, self._progress, sinks, self.log_archive, self.history, self._freshness
        )

    def _sink(self, query: dict[str, Any]) -> Path:
        url: str = query["sink"]["files"]["url"]
        return Path(url.replace(f"file://{SHARED_MOUNT_PATH}", str(self.cluster.shared)))

    # -- rounds -------------------------------------------------------------------------------

    def run_rounds(self) -> str:
        """Returns the first failure, or an empty string."""
        try:
            began = time.monotonic()
            wait_for(
                "all queries to be Live before the first round",
                self._all_live,
                START_TIMEOUT_S,
                every_s=0.25,
            )
            wait_for("checkpoints of both", self._all_checkpointed, 60, every_s=0.25)
            self._print(f"all queries are Live after {time.monotonic() - began:.1f} s")
            for round in self.plan.rounds:
                self._print(f"round {round.number}")
                result = self._run_round(round)
                self.results.append(result)
                self._print(f"round {round.number}: {result}")
            self._compare_all()
        except (RoundFailure, DeadlineError) as error:
            return str(error)
        except Exception as error:  # of the harness or the cluster: its evidence is kept too
            return f"{type(error).__name__}: {error}"
        return ""

    def _run_round(self, round: Round) -> RoundResult:
        seen = len(self._sampler.stalls_while_live)
        began = time.monotonic()
        for step in round.steps:
            time.sleep(max(0.0, began + step.at_s - time.monotonic()))
            self._note_silent(step.action, ends=False)
            self._print(f"  {time.monotonic() - began:5.1f} s  {self._injector.apply(step.action)}")
            self._note_silent(step.action, ends=True)
        self._injector.wait_nodes_replaced()
        faults_ended = time.monotonic()
        self._wait_advanced(round, faults_ended + ADVANCE_TIMEOUT_S)
        advanced_s = time.monotonic() - faults_ended
        self._wait(
            round, "reported as Live", self._sampler.not_live, faults_ended + ADVANCE_TIMEOUT_S
        )
        live_s = time.monotonic() - faults_ended
        rows = self._compare_new(round)
        stalled = max(
            self._sampler.stalls_while_live[seen:],
            key=lambda s: s.overdue_s,
            default=_NO_STALLED_LIVE,
        )
        tentative, longest_delay_s = self._check_tentative(round.number)
        return RoundResult(
            number=round.number,
            tentative=tentative,
            longest_delay_s=_rounded(longest_delay_s),
            advanced_s=_rounded(advanced_s),
            live_s=_rounded(live_s),
            rows=rows,
            longest_stall_while_live_s=_rounded(stalled.overdue_s),
            stalled_query=stalled.query,
        )

    def _note_silent(self, action: FaultAction, *, ends: bool) -> None:
        """Nodes are silent from before a fault until after its end."""
        silent = self._sampler.silent_nodes
        if isinstance(action, Freeze | PartitionNetwork) and not ends:
            silent |= {action.node}
        elif isinstance(action, Thaw | HealNetwork) and ends:
            silent -= {action.node}
        elif isinstance(action, KillNodes) and ends:
            silent -= set(action.nodes)
        self._sampler.silent_nodes = silent

    def _check_tentative(self, number: int) -> tuple[int, float]:
        """How many tentative epochs there were, and the longest time until an epoch had a
        result."""
        tentative, longest_delay_s = 0, 0.0
        for name, freshness in self._freshness.items():
            tentative += freshness.tentative
            longest_delay_s = max(longest_delay_s, freshness.longest_s)
            if freshness.longest_s > topologies.MAX_DELAY_S + _DELAY_MARGIN_S:
                raise RoundFailure(
                    f"round {number}: an epoch that had arrived at a Live task of {name} had a "
                    f"result only after {freshness.longest_s:.1f} s; maxDelay is "
                    f"{topologies.MAX_DELAY_S} s"
                )
            freshness.tentative, freshness.longest_s = 0, 0.0
        return tentative, longest_delay_s

    def _wait_advanced(self, round: Round, deadline: float) -> None:
        """Until every query has passed the newest epoch that any query of its topology has written
        now."""
        # An epoch of both topologies is one second, so epochs and seconds of input compare.
        goals = {name: progress.newest_written + 1 for name, progress in self._progress.items()}
        lacking_s = max(goals.values()) + _SPARE_INPUT_S - self._input_s
        if lacking_s > 0:
            raise RoundFailure(f"round {round.number}: the input ends {lacking_s} s too early")

        def missing() -> dict[str, int]:
            behind: dict[str, int] = {}
            for name, progress in self._progress.items():
                behind |= progress.behind(goals[name])
            return behind

        self._wait(round, f"beyond epochs {goals}", missing, deadline)

    def _wait(
        self, round: Round, what: str, missing: Callable[[], dict[str, Any]], deadline: float
    ) -> None:
        while left := missing():
            self._sampler.check()
            if time.monotonic() > deadline:
                raise RoundFailure(
                    f"round {round.number}: {ADVANCE_TIMEOUT_S:g} s after the end of its faults "
                    f"not all queries are {what}: {left}"
                )
            time.sleep(0.1)

    def _compare_new(self, round: Round) -> int:
        """Compare what was written since the last comparison; returns the number of rows."""
        total = 0
        for name, progress in self._progress.items():
            through = progress.written_through
            total += self._compare(name, self._compared[name] + 1, through, round.number)
            self._compared[name] = through
        return total

    def _compare_all(self) -> None:
        """Compare everything once more: what was compared must not have changed since."""
        for name, through in self._compared.items():
            self._compare(name, 0, through, len(self.plan.rounds))

    def _compare(self, name: str, since: int, through: int, number: int) -> int:
        resource = self._resources[name]
        first = {query["name"]: since for query in resource["spec"]["queries"]}
        found = self._references[name].compare(resource, through, first)
        wrong = [f"{query}: {difference}" for query, difference in found.items() if difference]
        wrong += [f"{query}: no rows" for query, d in found.items() if not d.expected_rows]
        if wrong:
            epochs = f"epochs {since} to {through}"
            raise RoundFailure("\n".join([f"round {number}: {epochs} differ:", *wrong]))
        return sum(difference.actual_rows for difference in found.values())

    def _all_live(self) -> bool:
        self._sampler.check()
        return not self._sampler.not_live() and all(
            p.newest_written >= 0 for p in self._progress.values()
        )

    def _all_checkpointed(self) -> bool:
        statuses = self._sampler.statuses
        return all((statuses[n].get("checkpoint") or {}).get("epoch", 0) for n in self._resources)

    def _print(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')}  {text}"
        self._log.append(line)
        self._sampler.note(text)
        self._on_progress(line)


def _rounded(seconds: float) -> float:
    return round(seconds, 2)
