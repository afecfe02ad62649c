"""The oracle of every failure test: the output of a run without failures."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rekindle.connectors.compare import Difference, compare_sinks
from rekindle.connectors.registry import open_source
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology
from rekindle.topology.spec import SourceSpec
from rekindle_testing.embedded.priority import BACKGROUND_NICE, lower_priority
from rekindle_testing.embedded.processes import ChildProcesses
from rekindle_testing.harness.any_cluster import SHARED_MOUNT_PATH

_REFERENCE_TIMEOUT_S = 600  # at the lowest priority, beside whatever else runs


class Reference:
    """The reference execution of a resource: executed once, and compared with any number of times.
    It may have more queries than the resources that are compared with it."""

    def __init__(self, resource: dict[str, Any], shared: Path, directory: Path) -> None:
        """`shared`: what the cluster mounts; `directory`: where the reference may write."""
        self._resource = resource
        self._shared = shared
        self._directory = directory
        self._output = directory / "reference"

    def execute(self, children: ChildProcesses | None = None) -> None:
        """See `run_reference`."""
        run_reference(self._resource, self._shared, self._output, children)

    def compare(
        self,
        resource: dict[str, Any],
        until_epoch: int | None = None,
        since: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, Difference]:
        """Every sink of files on the cluster against the reference's, row by row; `since` names
        the first epochs of queries that were added later."""
        differences = {}
        for query in resource["spec"]["queries"]:
            files = query["sink"].get("files")
            if files is None:
                continue
            actual = files["url"].replace(f"file://{SHARED_MOUNT_PATH}", f"file://{self._shared}")
            expected = f"file://{self._output / query['name']}"
            differences[query["name"]] = compare_sinks(
                expected,
                actual,
                files.get("format", "parquet"),
                since_epoch=since.get(query["name"], 0),
                until_epoch=until_epoch,
            )
        return differences

    def check(
        self,
        resource: dict[str, Any],
        until_epoch: int,
        since: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Compare through `until_epoch`; returns the rows that were compared.

        Raises AssertionError with every difference; a query that wrote nothing at all is one.
        """
        differences = self.compare(resource, until_epoch, since)
        wrong = [f"{name}: {difference}" for name, difference in differences.items() if difference]
        wrong += [f"{n}: no rows to compare" for n, d in differences.items() if not d.expected_rows]
        assert not wrong, "\n".join(wrong)
        return sum(d.expected_rows for d in differences.values())

    @cached_property
    def last_epoch(self) -> int:
        """The epoch in which the longest source has END_OF_INPUT: all windows close in it."""
        name, spec = load_topology(self._resource)
        topology = compile_topology(spec, name)
        lasts = []
        for segment in topology.segments:
            node = topology.nodes[segment.nodes[0]]
            if isinstance(node.spec, SourceSpec):
                local = self._local(node.spec)
                directory = self._directory / "sources" / node.name
                directory.mkdir(parents=True)
                source = open_source(local, node, topology.spec.epoch_interval, directory)
                lasts.append(source.last_epoch)
                source.close()
        return 1 + max(last for last in lasts if last is not None)

    def _local(self, source: SourceSpec) -> SourceSpec:
        """The source with a url for this process, which has the shared mount at another path."""
        if source.files is None:
            return source
        url = source.files.url.replace(f"file://{SHARED_MOUNT_PATH}", f"file://{self._shared}")
        return source.model_copy(update={"files": source.files.model_copy(update={"url": url})})


def run_reference(
    resource: dict[str, Any], shared: Path, output: Path, children: ChildProcesses | None = None
) -> None:
    """`rekindle run`: the oracle. Sinks go to `output`/<query>. If the caller passes
    `children`, closing them ends a run that is in progress."""
    mounted, here = f"file://{SHARED_MOUNT_PATH}", f"file://{shared}"
    local = json.loads(json.dumps(resource).replace(mounted, here))
    path = output.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(local))
    rekindle = str(Path(sys.executable).parent / "rekindle")
    command = [rekindle, "run", str(path)]
    command += ["--output", str(output), "--spark-log", str(output.with_suffix(".spark.log"))]
    with contextlib.ExitStack() as stack:
        # Its JVM must not outlive this process, however that ends.
        owner = children or stack.enter_context(ChildProcesses(path.parent / "logs"))
        process = owner.start(f"reference-{resource['metadata']['name']}", command)
        lower_priority(BACKGROUND_NICE, process.pid)
        if not process.wait(_REFERENCE_TIMEOUT_S):
            raise RuntimeError(f"the reference execution took over {_REFERENCE_TIMEOUT_S} s")
        if process.exit_code:
            raise RuntimeError(f"the reference execution failed:\n{process.log_tail()}")
