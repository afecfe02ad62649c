"""What the tasks of a topology report of their results: reads the metrics of each pod."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rekindle import names
from rekindle.exchange.routing import partitions_read
from rekindle.protocol import CONTROL_PORT
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle_testing.chaos.freshness import Partition, TaskSample

_TIMEOUT_S = 0.5
_STABLE, _TENTATIVE = "rekindle_task_stable_epoch", "rekindle_task_tentative_epoch"
_P99, _PHASE = "rekindle_task_epoch_p99_seconds", "rekindle_task_phase"


def upstream_of(resource: Mapping[str, Any]) -> dict[Partition, frozenset[Partition]]:
    """The partitions that each partition of a topology reads; those of sources read none."""
    spec, name = load_spec(resource["spec"]), resource["metadata"]["name"]
    topology = compile_topology(spec, name, skip_cluster_checks=True)
    return {
        (segment.name, index): frozenset(
            (topology.producer(entry.stream).name, read)
            for entry in segment.inputs
            for read in partitions_read(entry, index)
        )
        for segment in topology.segments
        if segment.inputs
        for index in range(segment.partitions)
    }


def sample_tasks(pods: Iterable[Mapping[str, Any]], topology: str) -> list[TaskSample]:
    """A sample of each task that responds."""
    found = []
    for pod in pods:
        labels, address = pod["metadata"].get("labels") or {}, pod["status"].get("podIP")
        wanted = {names.LABEL_TOPOLOGY: topology, names.LABEL_ROLE: names.ROLE_TASK}
        if not address or any(labels.get(key) != value for key, value in wanted.items()):
            continue
        try:
            url = f"http://{address}:{CONTROL_PORT}/metrics"
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                text = response.read().decode()
        except OSError:
            continue
        if (sample := sample_of(pod["metadata"]["uid"], text)) is not None:
            found.append(sample)
    return found


def sample_of(task: str, text: str) -> TaskSample | None:
    """A sample from the text of a task's metrics; `task`: the uid of its pod. None if another
    program has the address by now."""
    values, labels, phase = dict[str, float](), dict[str, str](), ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _PHASE and sample.value:
                phase = sample.labels["phase"]
            elif sample.name in (_STABLE, _TENTATIVE, _P99):
                values[sample.name], labels = sample.value, sample.labels
    if not labels:
        return None
    return TaskSample(
        task,
        (labels["segment"], int(labels["partition"])),
        phase == "Live",
        int(values[_STABLE]),
        int(values[_TENTATIVE]),
        values[_P99],
    )
