"""The demo, end to end: a topology loses most of its nodes, and its queries recover in order.

Each step is what a user would do or see; the result is checked by `rekindle_testing.demo.checks`.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rekindle import names
from rekindle.connectors.compare import Difference
from rekindle.timeline.picture import draw
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Topology
from rekindle_testing.demo.checks import failures, result
from rekindle_testing.demo.screen import Screen
from rekindle_testing.harness import flights
from rekindle_testing.harness.cluster import EmbeddedCluster
from rekindle_testing.harness.observe import Observer
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.harness.sinks import file_write_times, longest_pause
from rekindle_testing.waiting import wait_for

NAME = "flights"
SPEEDUP = 108_000  # a year in five minutes, of which a slow start may take half
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """The nodes to kill, and the queries that are lost with them."""

    nodes: tuple[str, ...]
    lost_queries: tuple[str, ...]
    survivors: tuple[str, ...]
    lost_partitions: frozenset[tuple[str, int]]  # (segment id, partition): no replica is left


def choose_loss(
    topology: Topology,
    placed: dict[tuple[str, int], set[str]],
    nodes: Sequence[str],
    operators: set[str],
    size: int,
) -> NodeLoss:
    """The `size` nodes whose death stops the most queries while the most valuable one survives.

    `placed`: (segment id, partition) -> nodes that run a replica of it; `operators`: nodes that
    run a replica of the operator, of which one survives.
    """
    queries = sorted(topology.spec.queries, key=lambda q: -q.priority)
    best: NodeLoss | None = None
    for victims in itertools.combinations(nodes, size):
        lost = tuple(
            q.name
            for q in queries
            if any(
                placed[s.id, p] <= set(victims)
                for s in topology.needed_segments(q)
                for p in range(s.partitions)
            )
        )
        if operators <= set(victims):
            continue
        survivors = tuple(q.name for q in queries if q.name not in lost)
        lost_partitions = frozenset(p for p, where in placed.items() if where <= set(victims))
        loss = NodeLoss(victims, lost, survivors, lost_partitions)
        if queries[0].name in survivors and (best is None or len(lost) > len(best.lost_queries)):
            best = loss
    if best is None or not best.lost_queries:
        raise RuntimeError(f"no {size} nodes whose loss leaves {queries[0].name} alive: {placed}")
    return best


class Scenario:
    """The demo; `run` returns what failed, as sentences. `build`: the directory for its results.
    `loses_again`: in the middle of the recovery the first nodes that joined are lost, and
    coordinator and leading operator are killed with them."""

    def __init__(
        self, cluster: EmbeddedCluster, screen: Screen, build: Path, *, loses_again: bool = False
    ) -> None:
        self.cluster = cluster
        self.screen = screen
        self.build = build
        self._loses_again = loses_again
        self._last_loss_s = 0.0
        self._resource = flights.topology_resource(NAME, SPEEDUP)
        self._reference = Reference(self._resource, cluster.shared, build)
        name, spec = load_topology(self._resource)
        self.topology = compile_topology(spec, name)

    def execute_reference(self) -> None:
        """Needs only the input, and no cluster."""
        flights.prepare_input(self.cluster.shared / "input")
        self.screen.print("reference execution of the same input, in one process")
        self._reference.execute()

    def run(self, reference: Future[None]) -> list[str]:
        """On a running cluster. The topology is applied after `reference` has ended, so that they
        do not compete for the cores."""
        self.cluster.create_claim("rekindle")
        self.screen.print("helm install rekindle")
        self.cluster.install()
        reference.result()
        self.screen.print(f"kubectl apply: examples/flights/topology.yaml, at speedup {SPEEDUP}")
        self.cluster.apply(self._resource)
        with Observer(lambda: self.cluster.status(NAME)) as observer:
            self.screen.begin_table()
            try:
                lost_at_s, loss = self._lose_nodes(observer)
                restored_from = self._recover(observer, loss)
                last = self._finish(observer)
            finally:
                self.screen.end_table()
        return self._check(observer, lost_at_s, loss, restored_from, last)

    # -- steps --------------------------------------------------------------------------------

    def _lose_nodes(self, observer: Observer) -> tuple[float, NodeLoss]:
        self._wait_for(observer, "all queries to be Live", observer.all_live, 180)
        # Before that, not every replica of a survivor can take over.
        self._wait_for(
            observer,
            "every replica to be Live",
            lambda: observer.condition_status("Redundant") == "True",
            60,
        )
        # An earlier checkpoint may lack the state of partitions that were not Live then.
        head = int(observer.status["dataPlane"]["headEpoch"])
        self._wait_for(
            observer,
            f"a checkpoint of epoch {head} or later",
            lambda: observer.checkpoint_epoch() >= head,
            60,
        )
        loss = choose_loss(
            self.topology,
            self._placed(),
            sorted(self.cluster.nodes),
            {p.spec.node_name for p in self.cluster.operator_pods()},
            len(self.cluster.nodes) * 2 // 3,
        )
        at_s = observer.add_event(
            "lost", f"{len(loss.nodes)} of {len(self.cluster.nodes)} nodes die"
        )
        self.screen.print(f"[red]SIGKILL[/] of {', '.join(loss.nodes)}")
        self.cluster.kill_nodes(list(loss.nodes))
        self._last_loss_s = at_s
        return at_s, loss

    def _recover(self, observer: Observer, loss: NodeLoss) -> dict[str, int]:
        """Add nodes, one at a time until everything is Live, then the rest; returns the epochs that
        the lost queries were restored from."""
        self._wait_for(
            observer,
            "a recovery plan in the status",
            lambda: (
                set(loss.lost_queries)
                <= set((observer.status.get("recovery") or {}).get("plan", []))
            ),
            60,
        )
        if self._loses_again:
            self._lose_again(observer, loss)
        for left in range(len(loss.lost_queries) - 1, -1, -1):
            self._add_node(observer)
            self._wait_for(
                observer,
                f"all queries but {left} to be Live",
                lambda left=left: self._not_live(observer) <= left,  # type: ignore[misc]
                120,
            )
        for _ in loss.nodes[len(loss.lost_queries) :]:
            self._add_node(observer)
        return self._restored_from(observer.status, loss)

    def _lose_again(self, observer: Observer, loss: NodeLoss) -> None:
        """One query is Live again, and the task of another has a node."""
        first = self._add_node(observer)
        self._wait_for(
            observer,
            "one query to be Live again",
            lambda: self._not_live(observer) < len(loss.lost_queries),
            120,
        )
        second = self._add_node(observer)
        self._wait_for(
            observer,
            f"a task on {second}",
            lambda: any(second in nodes for nodes in self._placed().values()),
            120,
        )
        selector = f"{names.LABEL_TOPOLOGY}={NAME},{names.LABEL_ROLE}={names.ROLE_COORDINATOR}"
        killed = [*self.cluster.pods(selector), self.cluster.leading_operator_pod()]
        text = f"{first} and {second} die, and {', '.join(p.metadata.name for p in killed)}"
        self._last_loss_s = observer.add_event("lost", text)
        self.screen.print(f"[red]SIGKILL[/] again: {text}")
        self.cluster.kill_nodes([first, second])
        for pod in killed:
            self.cluster.kill_processes(pod)

    def _restored_from(self, status: dict[str, Any], loss: NodeLoss) -> dict[str, int]:
        """The oldest epoch that a lost partition of each lost query was restored from; -1: none."""
        newest: dict[tuple[str, int], int] = {}
        for task in (status.get("dataPlane") or {}).get("tasks", []):
            segment, index, _ = task["slot"].rsplit("/", 2)
            partition = segment, int(index)
            newest[partition] = max(newest.get(partition, -1), task.get("restoredFrom", -1))
        return {
            q.name: min(
                newest.get((s.id, p), -1)
                for s in self.topology.needed_segments(q)
                for p in range(s.partitions)
                if (s.id, p) in loss.lost_partitions
            )
            for q in self.topology.spec.queries
            if q.name in loss.lost_queries
        }

    def _finish(self, observer: Observer) -> int:
        """Wait until every query has processed the whole input; returns its last epoch."""
        last = self._reference.last_epoch
        self._wait_for(
            observer,
            f"epoch {last} in every sink",
            lambda: min(observer.stable_epochs().values(), default=-1) >= last,
            240,
        )
        return last

    def _check(
        self,
        observer: Observer,
        lost_at_s: float,
        loss: NodeLoss,
        restored_from: dict[str, int],
        last: int,
    ) -> list[str]:
        pauses = self._pauses(observer, lost_at_s, loss)
        differences = self._reference.compare(self._resource)
        plan = observer.history.plan_of_recovery(self._last_loss_s, loss.lost_queries)
        wrong = failures(
            observer.history,
            lost_at_s=lost_at_s,
            last_loss_s=self._last_loss_s,
            plan=plan,
            expected_lost=loss.lost_queries,
            survivors=loss.survivors,
            differences=differences,
            last_epoch=last,
            restored_from=restored_from,
            pauses=pauses,
        )
        document = result(
            observer.history,
            lost_at_s=lost_at_s,
            last_loss_s=self._last_loss_s,
            plan=plan,
            differences=differences,
            restored_from=restored_from,
            pauses=pauses,
            failed=wrong,
        )
        (self.build / "result.json").write_text(json.dumps(document, indent=2) + "\n")
        title = f"Rekindle: flights loses {len(loss.nodes)} nodes at once"
        draw(observer.history, self.build / "timeline.svg", title)
        events = self.cluster.control_plane.kubectl(
            "get", "events", "--sort-by=.metadata.creationTimestamp"
        )
        (self.build / "events.txt").write_text(events)
        self._summary(differences)
        return wrong

    def _pauses(self, observer: Observer, lost_at_s: float, loss: NodeLoss) -> dict[str, float]:
        """The survivors' longest pauses between the first loss and the last recovery."""
        history = observer.history
        outages = [history.outage(query, self._last_loss_s) for query in loss.lost_queries]
        returns = [o.live_s for o in outages if o is not None and o.live_s is not None]
        began = time.time() - observer.now()
        since_s, until_s = began + lost_at_s, began + max(returns, default=history.ended_s)
        output = self.cluster.shared / NAME / "output"
        epoch_s = self.topology.spec.epoch_interval / 1e6
        return {
            q: longest_pause(file_write_times(output / q), since_s, until_s, epoch_s)
            for q in loss.survivors
        }

    # -- helpers ------------------------------------------------------------------------------

    def _summary(self, differences: dict[str, Difference]) -> None:
        for query, difference in differences.items():
            self.screen.print(f"{query}: {difference}")
        self.screen.print(f"timeline and figures are in {self.build}")

    def _not_live(self, observer: Observer) -> int:
        return sum(state != "Live" for state in observer.states().values())

    def _add_node(self, observer: Observer) -> str:
        name = self._background(observer, self.cluster.add_node)
        observer.add_event("joined", name)
        self.screen.print(f"[blue]{name}[/] joins")
        return name

    def _placed(self) -> dict[tuple[str, int], set[str]]:
        placed: dict[tuple[str, int], set[str]] = {}
        for pod in self.cluster.tasks(NAME):
            labels = pod.metadata.labels
            key = labels[names.LABEL_SEGMENT], int(labels[names.LABEL_PARTITION])
            placed.setdefault(key, set()).add(pod.spec.node_name)
        return placed

    def _wait_for(
        self, observer: Observer, what: str, condition: Callable[[], T | None], timeout_s: float
    ) -> T:
        def show_and_check() -> T | None:
            self.screen.update(observer.now(), observer.status, list(self.cluster.nodes))
            return condition()

        return wait_for(what, show_and_check, timeout_s, every_s=0.25)

    def _background(self, observer: Observer, work: Callable[[], T]) -> T:
        """Run `work` while the table keeps updating."""
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            self._wait_for(observer, "a node to join", done.done, 60)
            return done.result()
