"""The task's metrics, read from its status when they are scraped.

Design: docs/operations.md#metrics-and-logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.protocol import ConsistencyState, TaskPhase
from rekindle.task.core.task import TaskCore


class TaskCollector(Collector):
    """Each metric has the labels of the task's slot."""

    def __init__(
        self, core: TaskCore, topology: str, segment: str, lock: AbstractContextManager[object]
    ) -> None:
        """`lock`: held while the core is read."""
        self._core = core
        self._lock = lock
        self._labels = {
            "topology": topology,
            "segment": segment,
            "partition": str(core.ref.partition),
            "replica": str(core.ref.replica),
        }

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            response, status = self._core.response(), self._core.status
            missing_state_bytes = status.missing_state_bytes()
            snapshot_bytes = status.snapshot_bytes()
            hot_keys = status.hot_key_shares()
        for name, text, value in (
            (
                "rekindle_task_stable_epoch",
                "Newest stable epoch: the end of the output log",
                response.stable_epoch,
            ),
            ("rekindle_task_head_epoch", "Newest epoch released to the task", response.head_epoch),
            (
                "rekindle_task_lag_seconds",
                "Age of the oldest epoch that is not in the log",
                response.lag_s,
            ),
            ("rekindle_task_epoch_p99_seconds", "Processing time, p99", response.epoch_p99_s),
            (
                "rekindle_task_epoch_mean_seconds",
                "Processing time of an epoch, mean of the newest calls",
                response.epoch_mean_s,
            ),
            (
                "rekindle_task_state_bytes",
                "State of its operators, which a restart loads",
                response.state_bytes,
            ),
            ("rekindle_task_log_bytes", "Output log on local disk", response.log_bytes),
            ("rekindle_task_log_base_epoch", "Lowest epoch in the output log", response.log_base),
            (
                "rekindle_task_missing_state_bytes",
                "Restored state that is still fetched from the checkpoint store",
                missing_state_bytes,
            ),
            (
                "rekindle_task_snapshot_bytes",
                "State beyond the newest that is kept for checkpoints and partners",
                snapshot_bytes,
            ),
            (
                "rekindle_task_unreadable_peers",
                "Upstream replicas that cannot be read",
                len(response.unreadable),
            ),
            (
                "rekindle_task_tentative_epoch",
                "Newest tentative epoch that is not corrected, or -1",
                response.tentative_epoch,
            ),
            (
                "rekindle_task_problem",
                "1 while the task has a problem",
                int(bool(response.problem)),
            ),
            (
                "rekindle_task_uncommitted_checkpoints",
                "Saved checkpoints that are not yet committed",
                len(response.checkpoints),
            ),
        ):
            yield self._gauge(name, text, value)
        state_text = "1 for the current state of the output"
        for state in ConsistencyState:
            is_in = int(state == response.consistency)
            yield self._gauge("rekindle_task_output_state", state_text, is_in, state=state)
        for phase in TaskPhase:
            is_in = int(phase == response.phase)
            yield self._gauge("rekindle_task_phase", "1 for the current phase", is_in, phase=phase)
        for sink in response.sinks:
            text, query = "Newest durable epoch of a sink", sink.assigned.query
            yield self._gauge("rekindle_task_sink_epoch", text, sink.durable, query=query)
        text = "Share of the rows of an input that have one key, if it is more than half; else 0"
        for name, share in hot_keys.items():
            yield self._gauge("rekindle_task_hot_key_share", text, share, input=name)
        yield self._dropped_rows()
        yield from self._behind()

    def _dropped_rows(self) -> Metric:
        labels = [*self._labels, "operator", "reason"]
        text = "Rows that windows or sources dropped since the task was restored"
        counter = CounterMetricFamily("rekindle_task_dropped_rows", text, labels=labels)
        for operator, rows in self._core.status.dropped.items():
            # The label `untimed`: rows whose event time is NULL.
            for reason, count in (("late", rows.late), ("untimed", rows.null_event_time)):
                counter.add_metric([*self._labels.values(), operator, reason], count)
        if (source := self._core.status.source) is not None:
            counter.add_metric([*self._labels.values(), source.name, "bad"], source.bad_records)
        return counter

    def _behind(self) -> Iterator[Metric]:
        if (source := self._core.status.source) is None:
            return
        text = "Positions of a live source that are there, and not read"
        for split, behind in sorted(source.behind.items()):
            name = "rekindle_task_source_behind"
            yield self._gauge(name, text, behind, source=source.name, split=split)

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        every = {**self._labels, **labels}
        gauge = GaugeMetricFamily(name, text, labels=list(every))
        gauge.add_metric(list(every.values()), value)
        return gauge


def make_registry(
    core: TaskCore,
    topology: str,
    segment: str,
    lock: AbstractContextManager[object] | None = None,
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(TaskCollector(core, topology, segment, lock or nullcontext()))
    return registry
