"""Samples a chaos run from outside: the sinks' files, objects of the API, and metrics of tasks.

A thread for each, since the API server may not respond while the sinks continue. `pods`, `leader`
and `statuses` are of the last sample; `stalls_while_live` has all that was found in any sample.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rekindle import names
from rekindle.connectors.files_sink import parse_name
from rekindle_testing.chaos.freshness import Freshness
from rekindle_testing.chaos.progress import SinkPace, StallWhileLive
from rekindle_testing.chaos.task_samples import sample_tasks
from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.process_node.node_admin import JsonApi
from rekindle_testing.harness.any_cluster import OPERATOR_LEASE
from rekindle_testing.harness.cluster import NAMESPACE, OPERATOR_NAMESPACE
from rekindle_testing.harness.pod_log_archive import PodLogArchive

Json = dict[str, Any]

_FILES_EVERY_S = 0.25
_API_EVERY_S = 0.5
_TASKS_EVERY_S = 0.5
_TOPOLOGIES = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
_LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/{OPERATOR_LEASE}"


class Sampler:
    """`progress`: of each topology, continued here; `sinks`: topology -> query -> the directory of
    its sink; `log_archive`: gets the logs of pods before they are deleted with their nodes;
    `history`: the file to which each change of the API's objects is appended, one JSON object a
    line; `freshness`: of topologies whose results may be tentative, continued here. `silent_nodes`:
    those that are frozen or cut off, set by the run."""

    def __init__(
        self,
        kubeconfig: Path,
        progress: Mapping[str, SinkPace],
        sinks: Mapping[str, Mapping[str, Path]],
        log_archive: PodLogArchive,
        history: Path,
        freshness: Mapping[str, Freshness],
    ) -> None:
        self.pods: list[Json] = []
        self.leader = ""
        self.silent_nodes: frozenset[str] = frozenset()
        self.statuses: dict[str, Json] = {}
        self.stalls_while_live: list[StallWhileLive] = []
        self._api = JsonApi(kubeconfig)
        self._progress = progress
        self._sinks = sinks
        self._log_archive = log_archive
        self._history = history
        self._freshness = freshness
        self._last: Json = {}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(sample,), name=sample.__name__, daemon=True)
            for sample in (self._sample_files, self._sample_api, self._sample_tasks)
        ]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=15)

    def now(self) -> float:
        """Seconds since the sampler was made."""
        return time.monotonic() - self._began

    def states(self, topology: str) -> dict[str, str]:
        queries = self.statuses.get(topology, {}).get("queries", [])
        return {q["name"]: q.get("state", "") for q in queries}

    def not_live(self) -> dict[str, str]:
        """Queries of all topologies that are not reported as Live."""
        return {
            query: self.states(name).get(query, "")
            for name, progress in self._progress.items()
            for query in progress.queries
            if self.states(name).get(query) != "Live"
        }

    def check(self) -> None:
        """Raise the error that ended one of the threads, whose samples are then outdated."""
        if self._error is not None:
            raise self._error

    def note(self, text: str) -> None:
        """Add an action of the run to the history."""
        self._append({"note": text})

    def _run(self, sample: Callable[[], None]) -> None:
        try:
            sample()
        except BaseException as error:
            self._error = error

    def _sample_files(self) -> None:
        while not self._stop.wait(_FILES_EVERY_S):
            self._log_archive.preserve_new()
            for name, progress in self._progress.items():
                newest = {query: _newest(path) for query, path in self._sinks[name].items()}
                progress.observe(self.now(), newest)

    def _sample_api(self) -> None:
        while not self._stop.wait(_API_EVERY_S):
            try:
                self._read_api()
            except (EmbeddedError, OSError, ValueError):  # unavailable; read again later
                continue

    def _sample_tasks(self) -> None:
        while self._freshness and not self._stop.wait(_TASKS_EVERY_S):
            for name, freshness in self._freshness.items():
                found = sample_tasks(self.pods, name)
                freshness.observe(self.now(), found, silent=bool(self.silent_nodes))

    def _read_api(self) -> None:
        found = self._api.call("GET", _TOPOLOGIES)["items"]
        at_s = self.now()
        self.statuses = {t["metadata"]["name"]: t.get("status") or {} for t in found}
        for name, progress in self._progress.items():
            self.stalls_while_live += progress.find_stalls_while_live(at_s, self.states(name))
        self.pods = self._api.call("GET", "/api/v1/pods")["items"]
        lease = self._api.call("GET", _LEASE).get("spec") or {}
        self.leader = lease.get("holderIdentity") or ""
        seen = {
            "leader": self.leader,
            "pods": [_summary(pod) for pod in self.pods],
            "statuses": self.statuses,
        }
        changed = {key: value for key, value in seen.items() if self._last.get(key) != value}
        self._last = seen
        if changed:
            self._append(changed)

    def _append(self, entry: Json) -> None:
        with self._history.open("a") as file:
            file.write(json.dumps({"at": round(self.now(), 2), **entry}) + "\n")


def _newest(directory: Path) -> dict[int, int]:
    newest: dict[int, int] = {}
    file_names = [path.name for path in directory.glob("*")] if directory.exists() else []
    for parsed in map(parse_name, file_names):
        if parsed is not None:
            _, partition, epoch = parsed
            newest[partition] = max(newest.get(partition, -1), epoch)
    return newest


def _summary(pod: Json) -> str:
    status, spec = pod.get("status", {}), pod["spec"]
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    parts = [
        pod["metadata"]["name"],
        f"on {spec.get('nodeName', '-')}",
        status.get("phase", "-"),
        "ready" if conditions.get("Ready") == "True" else "not ready",
        "gated" if spec.get("schedulingGates") else "",
        "terminating" if pod["metadata"].get("deletionTimestamp") else "",
    ]
    return " ".join(part for part in parts if part)
