"""One topology on a cluster, from `kubectl apply` to the comparisons of its sinks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from rekindle import names
from rekindle.connectors.files_sink import parse_name
from rekindle.topology.load import load_topology
from rekindle_testing.harness.any_cluster import Cluster
from rekindle_testing.harness.observe import Observer
from rekindle_testing.harness.oracle import Reference
from rekindle_testing.waiting import wait_for

# Eight Sparks that start together on two slow cores take two minutes.
START_S = 300


class TopologyRun:
    """Applies the resource, observes it, and deletes it at the end."""

    def __init__(self, cluster: Cluster, resource: dict[str, Any]) -> None:
        self.cluster = cluster
        self.resource = resource
        self.name: str = resource["metadata"]["name"]
        self.observer = Observer(lambda: cluster.status(self.name))

    def __enter__(self) -> TopologyRun:
        self.cluster.apply(self.resource)
        self.observer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.observer.__exit__(kind, error, trace)
        if error is None:
            self.cluster.delete_topology(self.name)
            return
        # The cluster may be what has failed: the error of the test must not be replaced.
        for clean_up in (self.keep_evidence, lambda: self.cluster.delete_topology(self.name)):
            try:
                clean_up()
            except Exception as later:
                print(f"after the failure of the test: {later!r}")

    # -- waiting ------------------------------------------------------------------------------

    def queries(self) -> list[str]:
        """Names of the queries of the resource as it is now."""
        return [query["name"] for query in self.resource["spec"]["queries"]]

    def wait_live(self, timeout_s: float = START_S) -> None:
        wait_for(f"{self.name}: all queries Live", self._all_live, timeout_s, every_s=0.25)

    def wait_sinks_advance(self, epochs: int = 3, timeout_s: float = START_S) -> None:
        """Until every sink is `epochs` further than now, and every query is Live."""
        now = self.observer.stable_epochs()
        goal = {q: now.get(q, -1) + epochs for q in self.queries()}
        self._wait_reached(goal, timeout_s)

    def wait_sinks_reach(self, epoch: int, timeout_s: float = START_S) -> None:
        """Until every sink has written all rows through `epoch`, and every query is Live."""
        self._wait_reached(dict.fromkeys(self.queries(), epoch), timeout_s)

    def _wait_reached(self, goal: Mapping[str, int], timeout_s: float) -> None:
        wait_for(
            f"{self.name}: sinks at {goal} or later, all Live",
            lambda: (
                all(self.observer.stable_epochs().get(q, -1) >= e for q, e in goal.items())
                and self.observer.all_live()
            ),
            timeout_s,
            every_s=0.25,
        )

    def wait_redundant(self, timeout_s: float = START_S) -> None:
        """Until no replica is missing."""
        wait_for(
            f"{self.name}: condition Redundant",
            lambda: self.observer.condition_status("Redundant") == "True",
            timeout_s,
            every_s=0.25,
        )

    def wait_checkpoint(self, after: int = 0, timeout_s: float = 60) -> int:
        """Until a checkpoint newer than `after` is committed; returns its epoch."""
        return wait_for(
            f"{self.name}: a checkpoint after epoch {after}",
            lambda: epoch if (epoch := self.observer.checkpoint_epoch()) > after else None,
            timeout_s,
            every_s=0.25,
        )

    def _all_live(self) -> bool:
        return self.observer.all_live()

    # -- pods and processes -------------------------------------------------------------------

    def task_pods(self, segment_name: str) -> list[Any]:
        """Pods of a segment that have a node and are not being deleted, lowest replica first."""
        pods = self.cluster.pods(
            f"{names.LABEL_TOPOLOGY}={self.name},{names.LABEL_SEGMENT_NAME}={segment_name}"
        )
        alive = [p for p in pods if p.metadata.deletion_timestamp is None and p.spec.node_name]
        return sorted(alive, key=lambda p: p.metadata.name)

    def coordinator_pods(self) -> list[Any]:
        return self.cluster.pods(
            f"{names.LABEL_TOPOLOGY}={self.name},{names.LABEL_ROLE}={names.ROLE_COORDINATOR}"
        )

    def coordinator_pod(self) -> Any:
        return self.coordinator_pods()[0]

    def container_starts(self) -> dict[str, str]:
        """Pod name -> start time of its container: equal maps mean that nothing was restarted."""
        return {
            p.metadata.name: str(p.status.container_statuses[0].state.running.started_at)
            for p in self.cluster.tasks(self.name)
            if p.status.container_statuses and p.status.container_statuses[0].state.running
        }

    def kill_pod_processes(self, pod: Any) -> None:
        self.observer.add_event("lost", f"processes of {pod.metadata.name}")
        self.cluster.kill_processes(pod)

    def delete_pod(self, pod: Any) -> None:
        self.observer.add_event("lost", pod.metadata.name)
        self.cluster.delete_pod(pod)

    # -- content of the sinks ------------------------------------------------------------------

    def verify(self, reference: Reference, since: Mapping[str, int] = MappingProxyType({})) -> int:
        """Compare the rows of the sinks with the reference execution; returns their number.
        `since`: the first epochs of queries that were added later."""
        self._require_losses_before_end(reference.last_epoch)
        stable = self.observer.stable_epochs()
        until = min(stable[query] for query in self.queries())
        self.cluster.download(f"{self.name}/output")
        return reference.check(self.resource, until, since)

    def _require_losses_before_end(self, last: int) -> None:
        """A loss after the end of the input would have no effect on the output."""
        lost = [event for event in self.observer.history.events if event.kind == "lost"]
        if lost:
            newest = self.observer.history.newest_epoch(lost[-1].at_s)
            assert newest < last, f"{lost[-1].text}: at epoch {newest}, input ends at {last}"

    def written_epochs(self, query: str) -> list[int]:
        """The epochs with rows in a query's sink, ascending."""
        self.cluster.download(f"{self.name}/output/{query}")
        files = (self.cluster.shared / self.name / "output" / query).glob("*")
        return sorted(parsed.epoch for f in files if (parsed := parse_name(f.name)))

    def longest_pause_s(self, query: str, last_s: float) -> float:
        """The longest time between two files of a partition that follow each other, of which the
        second was written in the last `last_s` seconds, minus the time of the epochs without rows
        between them. Without a pause it is one epoch."""
        _, spec = load_topology(self.resource)
        self.cluster.download(f"{self.name}/output/{query}")
        directory = self.cluster.shared / self.name / "output" / query
        files = [(f.stat().st_mtime, found) for f in directory.rglob("*") if (found := _parse(f))]
        newest = max(time for time, _ in files)
        longest = 0.0
        for partition in {found[0] for _, found in files}:
            written = sorted((e, time) for time, (p, e) in files if p == partition)
            for (before, earlier), (epoch, later) in itertools.pairwise(written):
                if later >= newest - last_s:
                    empty_s = (epoch - before - 1) * spec.epoch_interval / 1e6
                    longest = max(longest, later - earlier - empty_s)
        return longest

    def keep_evidence(self) -> None:
        """Objects, Events and the ends of logs, into a file whose name is printed."""
        evidence = self.cluster.directory / f"evidence-{self.name}.txt"
        kubectl = self.cluster.kubectl
        parts = [
            _or_error(lambda: kubectl("get", "topo", self.name, "-o", "yaml")),
            _or_error(self.cluster.describe_system),
        ]
        try:
            found = self.cluster.pods(f"{names.LABEL_TOPOLOGY}={self.name}")
            pods = [pod.metadata.name for pod in found]
        except Exception as error:
            parts.append(f"no pods: {error!r}")
            pods = []
        for pod in pods:
            parts.append(f"{pod}: " + _or_error(partial(kubectl, "logs", pod, "--tail=80")))
        evidence.write_text("\n---\n".join(parts))
        print(f"evidence of the failure: {evidence}", *_summary(self.observer.status), sep="\n")


def _or_error(read: Callable[[], str]) -> str:
    """What is read, or why it cannot be: the other parts of the evidence are still kept."""
    try:
        return read()
    except Exception as error:
        return f"cannot be read: {error!r}"


def _parse(file: Path) -> tuple[int, int] | None:
    """Partition and epoch of a sink's file."""
    parsed = parse_name(file.name)
    return None if parsed is None else (parsed.partition, parsed.epoch)


def _summary(status: dict[str, Any]) -> list[str]:
    """The queries and tasks of a status, a line for each."""
    data_plane = status.get("dataPlane") or {}
    rows = [("query", row, "name") for row in status.get("queries", [])]
    rows += [("task", row, "pod") for row in data_plane.get("tasks", [])]
    lines = [f"head epoch {data_plane.get('headEpoch')}, problems: {data_plane.get('problems')}"]
    for kind, row, name in rows:
        details = ", ".join(f"{k}: {v}" for k, v in row.items() if k not in (name, "slot"))
        lines.append(f"{kind} {row.get(name)}: {details}")
    return lines
