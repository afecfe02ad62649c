"""A task that has no slot yet: Spark is started, and a file is watched that will name the slot.

The file is the pod's annotation `rekindle.dev/slot`, which the operator writes once, with the
labels of a task, in one request. So a container that restarts finds the slot again, and the task
needs no right in the Kubernetes API. What a slot is given for is not known here.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from rekindle.engine.failure import EngineUnavailable, describe_exit
from rekindle.engine.memory import MIB
from rekindle.protocol import CONTROL_PORT
from rekindle.task.config import BadEnvironment, TaskConfig
from rekindle.task.control import PortServer, probe
from rekindle.task.engine import end_unneeded_spark, warm_up

SLOT_FILE_VARIABLE = "REKINDLE_SLOT_FILE"
"""Set in the pod of a standby, and only there."""
LOOK_EVERY_S = 0.05
_VARIABLES = {
    "segment": "REKINDLE_SEGMENT",
    "partition": "REKINDLE_PARTITION",
    "replica": "REKINDLE_REPLICA",
    "incarnation": "REKINDLE_INCARNATION",
}

_log = logging.getLogger(__name__)


def with_slot(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the task: of a standby, once it has its slot. Raises BadEnvironment,
    EngineUnavailable."""
    env = dict(environment)
    if not (name := env.get(SLOT_FILE_VARIABLE)):
        return env
    path = Path(name)
    if (slot := _read_slot(path)) is not None:
        return env | slot
    config = TaskConfig.from_environment(env)
    standby = _Standby(config)
    while (slot := _read_slot(path)) is None:
        standby.check()
        time.sleep(LOOK_EVERY_S)
    _log.info("the standby becomes a task: %s", json.dumps(slot, sort_keys=True))
    standby.end()
    end_unneeded_spark(TaskConfig.from_environment(env | slot))
    return env | slot


def _read_slot(path: Path) -> dict[str, str] | None:
    """The variables of the slot that the standby was given; None: it has none yet."""
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise BadEnvironment(f"{SLOT_FILE_VARIABLE} {path}: {error}") from error
    if not text:
        return None
    try:
        slot = json.loads(text)
        return {variable: str(slot[key]) for key, variable in _VARIABLES.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise BadEnvironment(
            f"{path}: {text[:200]!r} is no slot ({error!r}): delete the pod, whose annotation "
            "rekindle.dev/slot somebody has changed"
        ) from error


class _Standby:
    """Starts Spark in a thread; serves the probes, which report when it is warm."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._error: BaseException | None = None
        self._exit_status: int | None = None
        self._thread = threading.Thread(target=self._warm_up, name="warm-up", daemon=True)
        self._thread.start()
        self._server = PortServer(config.bind, CONTROL_PORT, self._application())

    def check(self) -> None:
        """Raises the error that keeps Spark from starting, or from running on."""
        if self._error is not None:
            raise self._error
        if (status := self._exit_status) is not None:
            heap = f"{self._config.memory.heap_bytes // MIB} MiB"
            raise EngineUnavailable(f"standby: {describe_exit(status, heap)}", status)

    def end(self) -> None:
        """Once it is warm: two sessions cannot start at once."""
        self._thread.join()
        self._server.stop()
        self.check()

    def _application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get("/startupz", probe(lambda: not self._thread.is_alive())),
                web.get("/livez", probe(lambda: True)),
                web.get("/readyz", probe(lambda: False)),  # it serves nobody
            ]
        )
        return application

    def _warm_up(self) -> None:
        began = time.monotonic()
        try:
            warm_up(self._config, self._jvm_exited)
        except BaseException as error:
            self._error = error
            return
        _log.info("standby: warm after %.1f s", time.monotonic() - began)

    def _jvm_exited(self, status: int) -> None:
        self._exit_status = status
