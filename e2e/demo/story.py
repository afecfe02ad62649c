"""The main job, end to end: a topology loses most of its nodes, and its queries come back in order.

Each step is what a user would do or see; the verdict is `demo.verdict`'s.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from demo.screen import Screen
from demo.timeline import draw
from demo.verdict import failures, result
from harness import flights
from harness.cluster import EmbeddedCluster, wait_for
from harness.observe import Observer
from harness.oracle import compare, last_epoch
from rekindle.connectors.compare import Difference
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.model import Topology

NAME = "flights"
SPEEDUP = 194_400  # 2.25 days of flights each second: 163 epochs
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loss:
    """Which nodes die, and what that means for the queries."""

    nodes: tuple[str, ...]
    lost: tuple[str, ...]
    survivors: tuple[str, ...]


def choose_loss(
    topology: Topology,
    placed: dict[tuple[str, int], set[str]],
    nodes: Sequence[str],
    operators: set[str],
    size: int,
) -> Loss:
    """The `size` nodes whose death stops the most queries while the most valuable one survives.

    `placed`: (segment id, partition) -> nodes that run a replica of it; `operators`: nodes that
    run a replica of the operator, of which one survives.
    """
    queries = sorted(topology.spec.queries, key=lambda q: -q.priority)
    best: Loss | None = None
    for victims in itertools.combinations(nodes, size):
        lost = tuple(
            q.name
            for q in queries
            if any(
                placed[s.id, p] <= set(victims)
                for s in topology.ancestry(q)
                for p in range(s.partitions)
            )
        )
        if operators <= set(victims):
            continue
        survivors = tuple(q.name for q in queries if q.name not in lost)
        loss = Loss(victims, lost, survivors)
        if queries[0].name in survivors and (best is None or len(lost) > len(best.lost)):
            best = loss
    if best is None or not best.lost:
        raise RuntimeError(f"no {size} nodes whose loss leaves {queries[0].name} alive: {placed}")
    return best


class Story:
    """Runs the demo on a cluster; `run` returns what failed, as sentences."""

    def __init__(self, cluster: EmbeddedCluster, screen: Screen, build: Path) -> None:
        self.cluster = cluster
        self.screen = screen
        self.build = build
        self._reference = build / "reference"
        self.document = flights.manifest(NAME, speedup=SPEEDUP)
        name, spec = load_topology(self.document)
        self.topology = compile_topology(spec, name)

    def run(self) -> list[str]:
        flights.prepare_input(self.cluster.shared / "input")
        self.cluster.make_volume("rekindle")
        self.screen.say("helm install rekindle")
        self.cluster.install()
        self.screen.say("kubectl apply -f examples/flights/topology.yaml")
        self.cluster.apply(self.document)
        with Observer(lambda: self.cluster.status(NAME)) as observer:
            self.screen.begin_table()
            try:
                lost_at_s, loss = self._lose_nodes(observer)
                restored_from = self._recover(observer, loss)
                self.screen.say("reference execution of the same input, in one process, beside it")
                with ThreadPoolExecutor(1) as pool:
                    reference = pool.submit(
                        flights.run_reference, self.document, self.cluster.shared, self._reference
                    )
                    self._finish(observer)
                    self._watch(observer, "the reference execution", reference.done, 240)
                    reference.result()
            finally:
                self.screen.end_table()
        return self._judge(observer, lost_at_s, loss, restored_from)

    # -- steps --------------------------------------------------------------------------------

    def _lose_nodes(self, observer: Observer) -> tuple[float, Loss]:
        self._watch(observer, "all queries to be Live", observer.all_live, 180)
        self._watch(
            observer,
            "a first checkpoint",
            lambda: (observer.status.get("checkpoint") or {}).get("epoch", -1) > 0,
            60,
        )
        loss = choose_loss(
            self.topology,
            self._placed(),
            sorted(self.cluster.nodes),
            {p.spec.node_name for p in self.cluster.operator_pods()},
            len(self.cluster.nodes) * 2 // 3,
        )
        at_s = observer.mark("lost", f"{len(loss.nodes)} of {len(self.cluster.nodes)} nodes die")
        self.screen.say(f"[red]SIGKILL[/] of {', '.join(loss.nodes)}")
        self.cluster.kill_nodes(list(loss.nodes))
        return at_s, loss

    def _recover(self, observer: Observer, loss: Loss) -> dict[str, int]:
        """Nodes come back one at a time until everything is Live and redundant again."""
        self._watch(
            observer,
            "a recovery plan in the status",
            lambda: set(loss.lost) <= set((observer.status.get("recovery") or {}).get("plan", [])),
            60,
        )
        for left in range(len(loss.lost) - 1, -1, -1):
            self._add_node(observer)
            self._watch(
                observer,
                f"all queries but {left} to be Live",
                lambda left=left: self._not_live(observer) <= left,  # type: ignore[misc]
                120,
            )
        for _ in loss.nodes[len(loss.lost) :]:
            self._add_node(observer)
        tasks = (observer.status.get("dataPlane") or {}).get("tasks", [])
        restored = {t["slot"]: t.get("restoredFrom", -1) for t in tasks}
        return {
            q.name: max(restored.get(f"{self._segment_of(q.name)}/0/{r}", -1) for r in range(2))
            for q in self.topology.spec.queries
        }

    def _finish(self, observer: Observer) -> None:
        """Wait until the whole input has gone through every query."""
        last = last_epoch(self.topology, self.cluster.shared, self.build / "oracle")
        self._watch(
            observer,
            f"epoch {last} in every sink",
            lambda: min(observer.stable_epochs().values(), default=-1) >= last,
            240,
        )

    def _judge(
        self,
        observer: Observer,
        lost_at_s: float,
        loss: Loss,
        restored_from: dict[str, int],
    ) -> list[str]:
        comparisons = compare(self.document, self.cluster.shared, self._reference)
        plan = observer.history.plan_before_return(lost_at_s, loss.lost)
        wrong = failures(
            observer.history,
            lost_at_s=lost_at_s,
            plan=plan,
            expected_lost=loss.lost,
            survivors=loss.survivors,
            comparisons=comparisons,
        )
        said = result(
            observer.history,
            lost_at_s=lost_at_s,
            plan=plan,
            comparisons=comparisons,
            restored_from={q: restored_from[q] for q in loss.lost},
            failed=wrong,
        )
        (self.build / "result.json").write_text(json.dumps(said, indent=2) + "\n")
        title = f"Rekindle: flights loses {len(loss.nodes)} nodes at once"
        draw(observer.history, self.build / "timeline.svg", title)
        events = self.cluster.control_plane.kubectl(
            "get", "events", "--sort-by=.metadata.creationTimestamp"
        )
        (self.build / "events.txt").write_text(events)
        self._summary(comparisons)
        return wrong

    # -- helpers ------------------------------------------------------------------------------

    def _summary(self, comparisons: dict[str, Difference]) -> None:
        for query, comparison in comparisons.items():
            self.screen.say(f"{query}: {comparison}")
        self.screen.say(f"timeline and figures are in {self.build}")

    def _not_live(self, observer: Observer) -> int:
        return sum(state != "Live" for state in observer.states().values())

    def _add_node(self, observer: Observer) -> None:
        name = self._background(observer, self.cluster.add_node)
        observer.mark("joined", name)
        self.screen.say(f"[blue]{name}[/] joins")

    def _segment_of(self, query: str) -> str:
        return next(s.id for s in self.topology.segments if query in s.queries)

    def _placed(self) -> dict[tuple[str, int], set[str]]:
        placed: dict[tuple[str, int], set[str]] = {}
        for pod in self.cluster.tasks(NAME):
            labels = pod.metadata.labels
            key = labels["rekindle.dev/segment"], int(labels["rekindle.dev/partition"])
            placed.setdefault(key, set()).add(pod.spec.node_name)
        return placed

    def _watch(
        self, observer: Observer, what: str, probe: Callable[[], T | None], timeout_s: float
    ) -> T:
        def probe_and_show() -> T | None:
            self.screen.update(observer.now(), observer.status, list(self.cluster.nodes))
            return probe()

        return wait_for(what, probe_and_show, timeout_s, every_s=0.25)

    def _background(self, observer: Observer, work: Callable[[], T]) -> T:
        """Run `work` while the table goes on updating."""
        done: list[T] = []
        thread = threading.Thread(target=lambda: done.append(work()))
        thread.start()
        self._watch(observer, "a node to join", lambda: not thread.is_alive(), 60)
        return done[0]
