"""Starts the chain of a task's segment in the background, as soon as the process runs.

Spark takes seconds to start; meanwhile a new task waits for its first poll and loads its state. A
segment without operators needs no JVM. The only module of the task that imports
`rekindle.engine.spark`, and only when it is needed.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from rekindle.arrow_types import arrow_schema
from rekindle.engine.failure import EngineUnavailable, describe_exit
from rekindle.engine.memory import MIB
from rekindle.engine.model import Chain
from rekindle.engine.passthrough import PassThroughChain
from rekindle.task.config import TaskConfig
from rekindle.topology.spec import SourceSpec

_log = logging.getLogger(__name__)


class EngineStarter:
    """`chain`: the chain, or the error with which its start failed. If the engine dies later, the
    caller of `lost` and `restart` restarts it."""

    def __init__(self, config: TaskConfig) -> None:
        self.chain: Future[Chain] = Future()
        self._config = config
        self._exit_status: int | None = None
        self._running: Chain | None = None
        self._session: object | None = None
        nodes = [config.topology.nodes[name] for name in config.segment.nodes]
        if len(nodes) == 1 and isinstance(nodes[0].spec, SourceSpec):
            self.chain.set_result(PassThroughChain(arrow_schema(nodes[0].schema)))
        else:
            threading.Thread(target=self._start, name="engine-start", daemon=True).start()

    def lost(self) -> EngineUnavailable | None:
        """Why the JVM is gone; None while it runs."""
        if (status := self._exit_status) is None:
            return None
        heap = f"{self._config.memory.heap_bytes // MIB} MiB"
        return EngineUnavailable(f"{describe_exit(status, heap)}; it starts again", status)

    def restart(self, spark_job_input_bytes: int) -> Chain:
        """The chain in a new JVM, or in the running one; counts of dropped rows are kept.
        Raises EngineUnavailable."""
        before = self._running
        chain = self._make(spark_job_input_bytes)
        for operator, rows in (before.dropped if before is not None else {}).items():
            chain.dropped[operator].late += rows.late
            chain.dropped[operator].null_event_time += rows.null_event_time
        return chain

    def _start(self) -> None:
        try:
            self.chain.set_result(self._make(self._config.memory.spark_job_input_bytes))
        except BaseException as error:
            self.chain.set_exception(error)

    def _make(self, spark_job_input_bytes: int) -> Chain:
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
            on_exit=self._jvm_exited,
        )
        self._exit_status = None
        self._session = session
        chain = SparkChain(
            config.segment,
            config.topology,
            session,
            spark_job_input_bytes=spark_job_input_bytes,
            result_bytes=config.memory.epoch_bytes,
            run_files=config.run_files,
        )
        self._running = chain
        return chain

    def _jvm_exited(self, status: int) -> None:
        self._exit_status = status

    def stop(self, timeout_s: float) -> None:
        if self._session is None:
            return
        from rekindle.engine.spark.session import stop_session

        try:
            stop_session(self._session, timeout_s=timeout_s)  # type: ignore[arg-type]
        except Exception as error:
            _log.warning("Spark did not stop cleanly: %s", error)
