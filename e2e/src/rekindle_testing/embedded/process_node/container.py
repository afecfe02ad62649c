"""One container of a pod with all its attempts: state, probes, graceful termination.

It executes what `pod_worker` decides; it does not decide about restarts. The process of an attempt
is a child of its shim, which outlives the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.process_node.attempts import Attempt
from rekindle_testing.embedded.process_node.fields import Json
from rekindle_testing.embedded.process_node.probe_executor import ProbeExecutor, ProbeFailed
from rekindle_testing.embedded.process_node.probes import (
    ContainerProbe,
    ProbeKind,
    ProbeSpec,
    is_ready,
    is_started,
    must_restart,
)
from rekindle_testing.embedded.process_node.restarts import ConsecutiveExits, Exit, RestartBackoff
from rekindle_testing.embedded.process_node.status import ContainerView

log = logging.getLogger(__name__)

RecordEvent = Callable[[str, str, str], None]


class Container:
    """`record_event(kind, reason, message)` records an Event; `changed` wakes the pod's worker."""

    def __init__(
        self,
        spec: Json,
        is_init: bool,
        directory: Path,
        probe_executor: ProbeExecutor,
        backoff: RestartBackoff,
        changed: Callable[[], None],
        record_event: RecordEvent,
    ) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.directory = directory
        self._is_init = is_init
        self.attempt: Attempt | None = None
        self.previous_exit: Exit | None = None  # of the attempt before the newest
        self.consecutive_exits = ConsecutiveExits()
        self.waiting: tuple[str, str] | None = None  # reason and message
        self._probe_executor = probe_executor
        self._backoff = backoff
        self._changed = changed
        self._record_event = record_event
        self._pod_ip = ""
        self._probe_states: dict[ProbeKind, ContainerProbe] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    # --- attempts ---------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.attempt is not None and self.attempt.running

    @property
    def exit(self) -> Exit | None:
        """Of the newest attempt."""
        return None if self.attempt is None else self.attempt.exit()

    @property
    def next_number(self) -> int:
        return 0 if self.attempt is None else self.attempt.number + 1

    def next_directory(self) -> Path:
        return self.directory / str(self.next_number)

    def start(self, shim_spec: dict[str, Any], pod_ip: str) -> None:
        if self.attempt is not None:
            self.previous_exit = self.attempt.exit()
            self._delete_older_attempts()
        self.waiting = None
        self._ended.clear()
        self.attempt = Attempt.start(self.next_directory(), shim_spec, self._on_exit)
        self._start_probes(pod_ip, None)
        self._record_event("Normal", "Started", f"Started container {self.name}")

    def adopt(self, pod_ip: str, status: Json | None) -> None:
        """Adopt the attempts of an earlier agent; `status` is the last one in the API."""
        numbers = sorted(int(d.name) for d in self.directory.glob("*") if d.name.isdigit())
        for number in numbers:
            if self.attempt is not None:
                self.previous_exit = self.attempt.exit()
            self.attempt = Attempt.adopt(self.directory / str(number), self._on_exit)
            if ended := self.attempt.exit():
                self.consecutive_exits = self.consecutive_exits.after(ended, self._backoff)
        if self.running:
            self._start_probes(pod_ip, status)

    def previous(self) -> Attempt | None:
        """The attempt before the newest, or the newest if it waits for the next."""
        if self.attempt is None or (self.waiting and not self.attempt.running):
            return self.attempt
        directory = self.directory / str(self.attempt.number - 1)
        return Attempt.adopt(directory, lambda: None) if directory.exists() else None

    def view(self) -> ContainerView:
        running = self.running
        kinds = (ProbeKind.STARTUP, ProbeKind.READINESS)
        startup, readiness = (self._probe_states.get(kind) for kind in kinds)
        attempt = self.attempt
        identity = "" if attempt is None else f"process://{self.directory.parent.parent.name}"
        return ContainerView(
            name=self.name,
            image=self.spec["image"],
            running_since=attempt.started_at if attempt is not None and running else None,
            ended=None if running or self.waiting else self.exit,
            waiting=None if running else self.waiting,
            last_exit=self.exit if self.waiting else self.previous_exit,
            restarts=0 if attempt is None else attempt.number,
            started=is_started(running, startup),
            ready=is_ready(running, startup, readiness) or self._has_initialized(),
            container_id=f"{identity}/{self.name}/{attempt.number}" if attempt else "",
        )

    def _has_initialized(self) -> bool:
        # An init container counts as ready once it is done.
        ended = self.exit if self._is_init else None
        return ended is not None and ended.exit_code == 0

    def failed_probe(self) -> ProbeKind | None:
        """The kind of the probe that requires a restart of the running container."""
        if not self.running or self._stopping is not None:
            return None
        states = self._probe_states
        return must_restart(states.get(ProbeKind.STARTUP), states.get(ProbeKind.LIVENESS))

    # --- end --------------------------------------------------------------

    def stop(self, deadline: Callable[[], float]) -> None:
        """Begin graceful termination: SIGTERM, and SIGKILL at the deadline.

        `deadline` is called repeatedly, since a second delete may shorten it.
        """
        if self.running and self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(deadline))

    def kill(self, reason: str = "") -> None:
        """`reason`: in the status of the container."""
        if self.attempt is not None:
            self.attempt.kill(reason)

    async def _stop(self, deadline: Callable[[], float]) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._record_event("Normal", "Killing", f"Stopping container {self.name}")
        attempt.send(signal.SIGTERM)
        while attempt.running:
            remaining_s = deadline() - time.time()
            if remaining_s <= 0:
                attempt.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), min(max(remaining_s, 0.05), 0.5))

    def _on_exit(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._probe_states.clear()
        self._stopping = None
        if ended := self.exit:
            self.consecutive_exits = self.consecutive_exits.after(ended, self._backoff)
            if ended.reason == "StartError":
                self._record_event("Warning", "Failed", f"Error: {ended.message}")
        self._ended.set()
        self._changed()

    def _delete_older_attempts(self) -> None:
        """Keep only the log of the ended attempt, and delete the one before it."""
        assert self.attempt is not None
        for name in ("overlays", "root"):
            shutil.rmtree(self.attempt.directory / name, ignore_errors=True)
        shutil.rmtree(self.directory / str(self.attempt.number - 1), ignore_errors=True)

    # --- probes -------------------------------------------------

    def _start_probes(self, pod_ip: str, status: Json | None) -> None:
        self._pod_ip = pod_ip
        known = status if status is not None and "running" in status.get("state", {}) else {}
        for kind in ProbeKind:
            if probe := self.spec.get(f"{kind}Probe"):
                field = {ProbeKind.STARTUP: "started", ProbeKind.READINESS: "ready"}.get(kind)
                # An adopted container keeps its state until its probes change it.
                passed = True if field and known.get(field) else None
                self._probe_states[kind] = ContainerProbe(ProbeSpec.parse(probe), passed=passed)
                self._spawn(self._probe(kind, probe))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, kind: ProbeKind, probe: Json) -> None:
        attempt = self.attempt
        assert attempt is not None
        spec = self._probe_states[kind].spec
        await _wait_forked(attempt)
        if kind is not ProbeKind.STARTUP:
            while not is_started(running=True, startup=self._probe_states.get(ProbeKind.STARTUP)):
                await asyncio.sleep(0.1)
        await asyncio.sleep(max(0.0, attempt.started_at + spec.initial_delay_s - time.time()))
        while not (kind is ProbeKind.STARTUP and self._probe_states[kind].passed):
            failure = await self._check(probe, spec.timeout_s)
            before = self._probe_states[kind].passed
            self._probe_states[kind] = self._probe_states[kind].record(failure is None)
            if failure is not None:
                title = f"{kind.capitalize()} probe failed: {failure}"
                self._record_event("Warning", "Unhealthy", title)
            if self._probe_states[kind].passed != before:
                self._changed()
            await asyncio.sleep(spec.period_s)

    async def _check(self, probe: Json, timeout_s: float) -> str | None:
        try:
            await self._execute(probe, timeout_s)
        except ProbeFailed as error:
            return str(error)
        return None

    async def _execute(self, probe: Json, timeout_s: float) -> None:
        assert self.attempt is not None
        pid, variables = self.attempt.pid, {}
        if "exec" in probe:
            spec: Json = json.loads((self.attempt.directory / "spec.json").read_text())
            variables = spec["environment"]
        await self._probe_executor.run(probe, self.spec, self._pod_ip, pid, variables, timeout_s)


async def _wait_forked(attempt: Attempt) -> None:
    """Wait until the shim has forked the container's process."""
    while attempt.pid is None:
        await asyncio.sleep(0.02)
