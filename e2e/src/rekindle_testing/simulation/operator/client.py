"""The official client of the Kubernetes API, with a simulated network below it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client
from urllib3.exceptions import HTTPError

from rekindle_testing.simulation.kube.objects import ApiRequest, ApiResponse, decoded
from rekindle_testing.simulation.network import API, Network
from rekindle_testing.simulation.operator.program import Program
from rekindle_testing.simulation.scheduler import SimulatedProcess

_TIMEOUT_S = (3.0, 10.0)


class HttpResponse:
    """As urllib3's."""

    def __init__(self, response: ApiResponse) -> None:
        self.status = response.status
        self.reason = response.reason
        self.data = json.dumps(response.body).encode()

    def read(self) -> bytes:
        return self.data


class SimulatedClient(client.ApiClient):
    """`on_write` is called before each request that changes something."""

    def __init__(
        self,
        process: SimulatedProcess,
        network: Network,
        program: Callable[[], Program],  # the simulated thread that calls, and waits
        on_write: Callable[[ApiRequest], None] = lambda _: None,
    ) -> None:
        super().__init__(client.Configuration())
        self._process = process
        self._network = network
        self._program = program
        self._on_write = on_write

    def call_api(self, method: str, url: str, *args: Any, **options: Any) -> Any:
        parts = urlsplit(url)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        body = args[1] if len(args) > 1 else None
        request = ApiRequest(method, path, decoded(body))
        if method != "GET":
            self._on_write(request)
        connect_s, read_s = options.get("_request_timeout") or _TIMEOUT_S
        timeout_s = max(connect_s, read_s)  # a lost request is lost in one of the two phases
        result = self._program().wait(
            lambda done: self._network.call(self._process, API, request, done, timeout_s)
        )
        if not isinstance(result, ApiResponse):
            raise HTTPError(f"{method} {path}: {result!r}")
        return HttpResponse(result)
