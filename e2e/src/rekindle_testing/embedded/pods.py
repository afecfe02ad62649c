"""Pods in tests and the demo: create, get, wait, read logs, delete.

HTTPS with an administrator's kubeconfig; knows nothing about what runs in them.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rekindle_testing.embedded.errors import EmbeddedError
from rekindle_testing.embedded.process_node.node_admin import ApiRefusal, Json, JsonApi
from rekindle_testing.waiting import wait_for

_POLL_S = 0.05


class Pods:
    """The pods of one namespace; remembers those that it created, to delete them."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.api = JsonApi(kubeconfig)
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self._namespace = namespace
        self._made: set[str] = set()

    def create(self, name: str, spec: Json, **metadata: Any) -> Json:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, **metadata},
            "spec": spec,
        }
        pod = self.api.call("POST", self.path, body)
        self._made.add(name)
        return pod

    def get(self, name: str) -> Json:
        return self.api.call("GET", f"{self.path}/{name}")

    def exists(self, name: str) -> bool:
        try:
            self.get(name)
        except ApiRefusal as error:
            if error.status != 404:
                raise
            return False
        return True

    def logs(self, name: str, **query: Any) -> str:
        return self.api.text(f"{self.path}/{name}/log?{urllib.parse.urlencode(query)}")

    def follow(self, name: str) -> Iterator[str]:
        """The lines of the log as they are written, until the container has ended."""
        return self.api.lines(f"{self.path}/{name}/log?follow=true")

    def events(self, name: str) -> dict[str, str]:
        """The newest message of each reason."""
        selector = urllib.parse.quote(f"involvedObject.name={name}")
        path = f"/api/v1/namespaces/{self._namespace}/events?fieldSelector={selector}"
        items = self.api.call("GET", path)["items"]
        return {event["reason"]: event["message"] for event in items}

    def delete(self, name: str, *, grace_s: int | None = None) -> None:
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self.api.call("DELETE", f"{self.path}/{name}", options)

    def wait(
        self, name: str, what: str, condition: Callable[[Json], bool], within_s: float = 15.0
    ) -> Json:
        """The pod, once the condition holds of it."""
        deadline = time.monotonic() + within_s
        while not condition(pod := self.get(name)):
            if time.monotonic() > deadline:
                raise EmbeddedError(
                    f"timed out after {within_s:g} s: waiting until pod {name} {what}; "
                    f"its status is {pod.get('status')}, its events {self.events(name)}"
                )
            time.sleep(_POLL_S)
        return pod

    def wait_ready(self, name: str, within_s: float = 15.0) -> Json:
        return self.wait(
            name, "was Ready", lambda p: condition_status_of(p, "Ready") == "True", within_s
        )

    def wait_phase(self, name: str, phase: str, within_s: float = 15.0) -> Json:
        return self.wait(
            name, f"was {phase}", lambda p: p["status"].get("phase") == phase, within_s
        )

    def wait_gone(self, name: str, within_s: float = 15.0) -> None:
        wait_for(f"pod {name} to be deleted", lambda: not self.exists(name), within_s)

    def clear(self) -> None:
        """Delete, without a grace period, the pods that were created here and still exist."""
        for name in self._made:
            if self.exists(name):
                self.delete(name, grace_s=0)
        self._made.clear()


def container_status_of(pod: Json, name: str = "") -> Json:
    """The status of a container, by default the only one; empty before it has one."""
    statuses = [
        status
        for field in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(field) or []
        if name in ("", status["name"])
    ]
    return statuses[-1] if statuses else {"state": {}, "lastState": {}, "restartCount": 0}


def condition_status_of(pod: Json, kind: str) -> str:
    conditions = pod["status"].get("conditions") or []
    return next((str(c["status"]) for c in conditions if c["type"] == kind), "")
