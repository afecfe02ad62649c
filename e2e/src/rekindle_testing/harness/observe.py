"""Samples a topology's status from outside, as a user would, and records its history."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rekindle.timeline.history import History


class Observer:
    """A thread that samples `read()` (the topology's status) into a `History`.

    If a read fails (the API server is unavailable), there is no sample; `status` is the last one.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], every_s: float = 0.25) -> None:
        self.history = History()
        self.status: dict[str, Any] = {}
        self._read = read
        self._every_s = every_s
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def now(self) -> float:
        """Seconds since the history began."""
        return time.monotonic() - self._began

    def add_event(self, kind: str, text: str) -> float:
        at_s = self.now()
        self.history.add_event(at_s, kind, text)
        return at_s

    def states(self) -> dict[str, str]:
        return {q["name"]: q.get("state", "Waiting") for q in self.status.get("queries", [])}

    def all_live(self) -> bool:
        states = self.states()
        return bool(states) and set(states.values()) == {"Live"}

    def stable_epochs(self) -> dict[str, int]:
        return {q["name"]: q.get("stableEpoch", -1) for q in self.status.get("queries", [])}

    def checkpoint_epoch(self) -> int:
        """Of the newest checkpoint in the status; -1: none."""
        return int((self.status.get("checkpoint") or {}).get("epoch", -1))

    def condition_status(self, condition_type: str) -> str:
        return self._condition(condition_type).get("status", "Unknown")

    def reason(self, condition_type: str) -> str:
        """The reason of a condition."""
        return self._condition(condition_type).get("reason", "")

    def message(self, condition_type: str) -> str:
        """The message of a condition."""
        return self._condition(condition_type).get("message", "")

    def _condition(self, condition_type: str) -> dict[str, str]:
        conditions = self.status.get("conditions", [])
        return next((c for c in conditions if c["type"] == condition_type), {})

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                status = self._read()
            except Exception:  # without a sample, whatever the error; the next read follows
                continue
            self.status = status
            self.history.sample(self.now(), status)
