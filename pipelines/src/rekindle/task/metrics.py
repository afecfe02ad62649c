"""The task's metrics, read from its status when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.protocol import TaskPhase, TaskRef
from rekindle.task.status import TaskStatus


class TaskCollector(Collector):
    """Names begin with `rekindle_task_`; labels say which slot."""

    def __init__(self, status: TaskStatus, topology: str, segment: str, ref: TaskRef) -> None:
        self._status = status
        self._labels = {
            "topology": topology,
            "segment": segment,
            "partition": str(ref.partition),
            "replica": str(ref.replica),
        }

    def collect(self) -> Iterator[Metric]:
        answer = self._status.response(0)
        yield self._gauge("stable_epoch", "Newest epoch in the output log", answer.stable_epoch)
        yield self._gauge("head_epoch", "Newest epoch released to the task", answer.head_epoch)
        yield self._gauge("lag_seconds", "Age of the oldest epoch not yet out", answer.lag_s)
        yield self._gauge("epoch_p99_seconds", "Processing time, p99", answer.epoch_p99_s)
        yield self._gauge("log_bytes", "Output log on local disk", answer.log_bytes)
        yield self._gauge("log_base_epoch", "Lowest epoch in the output log", answer.log_base)
        yield self._gauge("unreadable_peers", "Replicas out of reach", len(answer.unreadable))
        yield self._gauge("problem", "1 while the task has a problem", int(bool(answer.problem)))
        checkpoints = len(answer.checkpoints)
        yield self._gauge("uncommitted_checkpoints", "Saved, not yet committed", checkpoints)
        for phase in TaskPhase:
            yield self._gauge("phase", "1 for the phase", int(phase == answer.phase), phase=phase)
        for sink in answer.sinks:
            query = sink.assigned.query
            yield self._gauge(
                "sink_epoch", "Newest durable epoch of a sink", sink.durable, query=query
            )

        yield self._dropped_rows()

    def _dropped_rows(self) -> Metric:
        labels = [*self._labels, "operator", "reason"]
        text = "Rows that windows did not take since the task was restored"
        counter = CounterMetricFamily("rekindle_task_dropped_rows", text, labels=labels)
        for operator, rows in self._status.dropped.items():
            for reason, count in (("late", rows.late), ("untimed", rows.untimed)):
                counter.add_metric([*self._labels.values(), operator, reason], count)
        return counter

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        every = {**self._labels, **labels}
        gauge = GaugeMetricFamily(f"rekindle_task_{name}", text, labels=list(every))
        gauge.add_metric(list(every.values()), value)
        return gauge


def make_registry(
    status: TaskStatus, topology: str, segment: str, ref: TaskRef
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(TaskCollector(status, topology, segment, ref))
    return registry
