"""A control plane with the operator as a process, and batches of manifests for them."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rekindle import names
from rekindle_testing.embedded.control_plane import ControlPlane
from rekindle_testing.fuzz.api import NAMESPACE, PODS, TOPOLOGIES, Api, WatchedTopology, Watcher
from rekindle_testing.fuzz.generator import Case, edit, is_edited
from rekindle_testing.fuzz.verdict import Verdict, verdict, violations
from rekindle_testing.harness.operator_process import (
    OperatorProcess,
    install_crds,
    operator_kubeconfig,
)
from rekindle_testing.waiting import DeadlineError, wait_for

_START_TIMEOUT_S = 60.0
_VALIDATION_TIMEOUT_S = 60.0
_SETTLING_TIMEOUT_S = 60.0
# Without changes, before a topology counts as settled: longer than delayed writes.
_QUIET_PERIOD_S = 5.0
_OBSERVATION_S = 2.0  # during which a settled topology must not change
_DELETION_TIMEOUT_S = 90.0
_SENDERS = 4
# A sample in the text format of Prometheus: name, labels, value.
_SAMPLE = re.compile(r"^(\w+?)(?:_total)?(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    index: int | None  # None: of the whole batch
    message: str


@dataclass(slots=True)
class SentResource:
    """A case, and its verdicts. `sent_at`: when its newest version was sent (monotonic)."""

    case: Case
    uid: str = ""
    sent_at: float = 0.0
    verdicts: list[tuple[Verdict, str]] = field(default_factory=list)  # with the message


@dataclass(slots=True)
class RunStatistics:
    """What the summary of a run reports; `reasons`: of the condition Valid."""

    created: Counter[Verdict] = field(default_factory=Counter)
    edited: Counter[Verdict] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    validated_s: list[float] = field(default_factory=list)
    pods: int = 0
    rss_mib: list[float] = field(default_factory=list)


class FuzzSession:
    def __init__(self, control_plane: ControlPlane, operator: OperatorProcess) -> None:
        self.control_plane = control_plane
        self.operator = operator
        self.statistics = RunStatistics()
        self._api = Api(control_plane.kubeconfig)
        self._watcher = Watcher(self._api)
        self._process = psutil.Process(operator.process.pid)

    def close(self) -> None:
        self._watcher.close()

    def run(self, cases: Sequence[Case]) -> list[Failure]:
        """Sends a batch, edits a part of it, deletes it. Returns what went wrong."""
        batch = [SentResource(c) for c in cases]
        failures: list[Failure] = []
        with ThreadPoolExecutor(_SENDERS) as senders:
            list(senders.map(self._create, batch))
            created = [sent for sent in batch if sent.uid]
            failures += self._await_validation(created)
            edited = [s for s in created if is_edited(s.case.seed, s.case.index)]
            failures += filter(None, senders.map(self._edit, edited))
            failures += self._await_validation(edited)
        if not failures:
            failures += self._check_settled(created)
        failures += self._check_operator()
        self._delete(created)
        if not self.operator_exited():  # else there is a failure that says so
            self.statistics.rss_mib.append(self._process.memory_info().rss / 2**20)
        return failures

    def soak(self, cases: Sequence[Case], duration_s: float) -> tuple[dict[str, int], Counter[str]]:
        """What the operator does without edits: updates by topology, and actions by kind."""
        batch = [SentResource(c) for c in cases]
        for sent in batch:
            self._create(sent)
        created = [sent for sent in batch if sent.uid]
        self._await_validation(created)
        self._await_quiet(created)
        before = {s.case.name: self._changes(s) for s in created}
        actions = self.actions()
        time.sleep(duration_s)
        changes = {s.case.name: self._changes(s) - before[s.case.name] for s in created}
        done = self.actions() - actions
        self._delete(created)
        return {name: n for name, n in changes.items() if n}, done

    # --- steps ----------------------------------------------------------------

    def _create(self, sent: SentResource) -> None:
        case = sent.case
        status, response = self._api.send("POST", TOPOLOGIES, case.body, strict=case.strict)
        if status != 201:
            self._reject(sent, response, self.statistics.created)
            return
        sent.uid, sent.sent_at = response["metadata"]["uid"], time.monotonic()

    def _edit(self, sent: SentResource) -> Failure | None:
        """Replace the spec alone, and keep what the operator may have changed meanwhile."""
        seen = self._watcher.seen(sent.uid)
        if seen is None:
            return Failure(sent.case.index, "the topology has disappeared")
        spec, _ = edit(sent.case.seed, sent.case.index, seen.topology["spec"])
        name = seen.topology["metadata"]["name"]
        body: dict[str, Any] = {"apiVersion": names.API_VERSION, "kind": names.KIND, "spec": spec}
        while True:
            current = self._api.get(f"{TOPOLOGIES}/{name}")
            body["metadata"] = current["metadata"]
            status, response = self._api.send(
                "PUT", f"{TOPOLOGIES}/{name}", json.dumps(body), strict=sent.case.strict
            )
            if status != 409:
                break
        if status != 200:
            self._reject(sent, response, self.statistics.edited)
        sent.sent_at = time.monotonic()
        return None

    def _reject(self, sent: SentResource, response: Any, counter: Counter[Verdict]) -> None:
        message = str(response.get("message"))
        sent.verdicts.append((Verdict.REJECTED, message))
        counter[Verdict.REJECTED] += 1
        self.statistics.rejections[str(response.get("reason"))] += 1

    def _await_validation(self, batch: Sequence[SentResource]) -> list[Failure]:
        """Until each has a condition of its newest generation."""

        def not_validated() -> list[SentResource]:
            return [
                s
                for s in batch
                if (seen := self._watcher.seen(s.uid)) is None or not _is_validated(seen)
            ]

        with contextlib.suppress(DeadlineError):
            wait_for(
                "validation",
                lambda: not not_validated() or self.operator_exited(),
                _VALIDATION_TIMEOUT_S,
            )
        message = f"the operator has not validated it within {_VALIDATION_TIMEOUT_S:g} s"
        failures = [Failure(s.case.index, message) for s in not_validated()]
        for sent in batch:
            self._count(sent)
        return failures

    def _count(self, sent: SentResource) -> None:
        seen = self._watcher.seen(sent.uid)
        outcome = verdict(seen.topology) if seen is not None else None
        if seen is None or outcome is None:
            return
        generation = seen.topology["metadata"]["generation"]
        is_first = not any(v is not Verdict.REJECTED for v, _ in sent.verdicts)
        if not is_first and sent.verdicts[-1][0] is Verdict.REJECTED:
            return  # the edit was rejected: this is the verdict of before
        counter = self.statistics.created if is_first else self.statistics.edited
        counter[outcome] += 1
        valid = next(c for c in seen.topology["status"]["conditions"] if c["type"] == "Valid")
        self.statistics.reasons[valid["reason"]] += 1
        sent.verdicts.append((outcome, valid["message"]))
        took_s = seen.validated_at[generation] - sent.sent_at
        if took_s > 0:  # else an edit changed nothing: its generation was validated before
            self.statistics.validated_s.append(took_s)

    def _check_settled(self, batch: Sequence[SentResource]) -> list[Failure]:
        failures = self._await_quiet(batch)
        before = {s.uid: self._changes(s) for s in batch}
        actions = self.actions()
        time.sleep(_OBSERVATION_S)
        for sent in batch:
            if (count := self._changes(sent) - before[sent.uid]) > 0:
                failures.append(
                    Failure(sent.case.index, f"changed {count} times after it had settled")
                )
        if done := self.actions() - actions:
            failures.append(Failure(None, f"actions after all had settled: {dict(done)}"))
        pods = Counter(
            owner["uid"]
            for pod in self._api.get(PODS)["items"]
            if not pod["metadata"].get("deletionTimestamp")
            for owner in pod["metadata"].get("ownerReferences") or ()
        )
        self.statistics.pods += pods.total()
        for sent in batch:
            if (seen := self._watcher.seen(sent.uid)) is not None:
                found = violations(seen.topology, pods[sent.uid])
                failures += [Failure(sent.case.index, message) for message in found]
        return failures

    def _await_quiet(self, batch: Sequence[SentResource]) -> list[Failure]:
        """Until nothing has changed, and nothing was done, for a while."""
        deadline = time.monotonic() + _SETTLING_TIMEOUT_S
        while True:
            before, actions = {s.uid: self._changes(s) for s in batch}, self.actions()
            time.sleep(_QUIET_PERIOD_S)
            changing = [s for s in batch if self._changes(s) > before[s.uid]]
            done = self.actions() - actions
            if not changing and not done:
                return []
            if time.monotonic() > deadline or self.operator_exited():
                break
        message = f"still changes after {_SETTLING_TIMEOUT_S:g} s"
        found = [Failure(s.case.index, f"{message}: {self._changes(s)} times") for s in changing]
        return found or [Failure(None, f"actions after {_SETTLING_TIMEOUT_S:g} s: {dict(done)}")]

    def _check_operator(self) -> list[Failure]:
        failures = []
        if self.operator_exited():
            failures.append(
                Failure(None, f"the operator exited with code {self.operator.process.returncode}")
            )
        elif failed := self.metric_sum("rekindle_operator_reconcile_errors"):
            failures.append(Failure(None, f"{failed:g} reconcile passes failed"))
        if self._watcher.error:
            failures.append(Failure(None, f"the watch failed: {self._watcher.error}"))
        if lines := self.operator.unexpected_lines():
            failures.append(Failure(None, "\n".join(lines[-5:])))
        return failures

    def _delete(self, batch: Sequence[SentResource]) -> None:
        uids = {s.uid for s in batch}
        for uid, seen in self._watcher.all().items():
            meta = seen.topology["metadata"]
            path = f"{TOPOLOGIES}/{meta['name']}"
            if uid in uids:
                if meta.get("finalizers"):
                    self._api.send("PATCH", path, json.dumps({"metadata": {"finalizers": None}}))
                self._api.send("DELETE", path, json.dumps({"propagationPolicy": "Background"}))
        wait_for(
            "the topologies to be deleted",
            lambda: not uids & self._watcher.all().keys(),
            _DELETION_TIMEOUT_S,
        )

    # --- metrics and observed objects -----------------------------------------

    def actions(self) -> Counter[str]:
        """Executed actions by kind."""
        text = self.operator.get("/metrics")
        found = {
            label: int(float(value))
            for name, label, value in _SAMPLE.findall(text)
            if name == "rekindle_operator_actions"
        }
        return Counter(found)

    def metric_sum(self, name: str) -> float:
        """Of all samples of a metric, whatever their labels."""
        found = _SAMPLE.findall(self.operator.get("/metrics"))
        return sum(float(value) for sample, _, value in found if sample == name)

    def reconcile_duration_buckets(self) -> dict[float, int]:
        """Reconcile passes by the upper limit of their duration, cumulative."""
        found = _SAMPLE.findall(self.operator.get("/metrics"))
        return {
            float(label.removeprefix('le="').rstrip('"')): int(float(value))
            for name, label, value in found
            if name == "rekindle_operator_reconcile_seconds_bucket"
        }

    def _changes(self, sent: SentResource) -> int:
        seen = self._watcher.seen(sent.uid)
        return seen.changes if seen is not None else 0

    def operator_exited(self) -> bool:
        return self.operator.process.poll() is not None


def _is_validated(seen: WatchedTopology) -> bool:
    return verdict(seen.topology) is not None


@contextlib.contextmanager
def session(control_plane: ControlPlane, directory: Path) -> Iterator[FuzzSession]:
    """On a control plane without nodes, so that all pods stay pending."""
    install_crds(control_plane)
    control_plane.kubectl("create", "namespace", NAMESPACE)
    operator = OperatorProcess(operator_kubeconfig(control_plane), directory, "operator")
    try:
        wait_for("the operator to lead", operator.leads, _START_TIMEOUT_S)
        running = FuzzSession(control_plane, operator)
        try:
            yield running
        finally:
            running.close()
    finally:
        operator.stop()
        control_plane.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
