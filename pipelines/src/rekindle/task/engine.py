"""The chain of a task's segment, started in the background as soon as the process runs.

Spark takes seconds to come up, and a new task has to wait for its first poll and load its state
meanwhile. A segment without operators gets no JVM. The one place in the task that reaches into
`rekindle.engine.spark`, and only when it is needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from rekindle.engine.model import Chain
from rekindle.engine.passthrough import PassThroughChain
from rekindle.task.config import TaskConfig
from rekindle.topology.spec import SourceSpec

_log = logging.getLogger(__name__)


class EngineStarter:
    """`chain` is the chain, or what kept it from starting. `on_death(message)` is called when the
    engine dies later."""

    def __init__(self, config: TaskConfig, on_death: Callable[[str], None]) -> None:
        self.chain: Future[Chain] = Future()
        self._config = config
        self._on_death = on_death
        self._session: object | None = None
        nodes = [config.topology.nodes[name] for name in config.segment.nodes]
        if len(nodes) == 1 and isinstance(nodes[0].spec, SourceSpec):
            self.chain.set_result(PassThroughChain(nodes[0].schema))
        else:
            threading.Thread(target=self._start, name="engine-start", daemon=True).start()

    def _start(self) -> None:
        try:
            from rekindle.engine.spark.chain import SparkChain
            from rekindle.engine.spark.session import start_session

            config = self._config
            cores = max(1, config.segment.resources.cpu_m // 1000)
            session = start_session(
                f"{config.topology.name}-{config.segment.name}-{config.ref.partition}",
                master=f"local[{cores}]",
                conf=config.topology.spec.spark_conf,
                cds_archive=config.cds_archive,
                data_dir=config.data,
                memory=config.memory,
                on_death=lambda status: self._on_death(f"the JVM died with status {status}"),
            )
            self._session = session
            self.chain.set_result(SparkChain(config.segment, config.topology, session))
        except BaseException as error:
            self.chain.set_exception(error)

    def stop(self, timeout_s: float) -> None:
        if self._session is None:
            return
        from rekindle.engine.spark.session import stop_session

        try:
            stop_session(self._session, timeout_s=timeout_s)  # type: ignore[arg-type]
        except Exception as error:
            _log.warning("Spark did not stop in order: %s", error)
