"""Starts the chain of a task's segment in the background, as soon as the process runs.

Spark takes seconds to start; meanwhile a new task waits for its first poll and loads its state. A
segment without operators needs no JVM. The only module of the task that imports
`rekindle.engine.spark`, and only when it is needed.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rekindle.arrow_types import arrow_schema
from rekindle.engine.failure import EngineUnavailable, describe_exit
from rekindle.engine.memory import MIB
from rekindle.engine.model import Chain
from rekindle.engine.passthrough import PassThroughChain
from rekindle.task.config import TaskConfig
from rekindle.topology.model import Segment, Topology
from rekindle.topology.spec import SourceSpec

_log = logging.getLogger(__name__)


def warm_up(config: TaskConfig, on_exit: Callable[[int], None]) -> None:
    """Start the Spark of a standby, which its task will use: the start of a session in the same
    process uses the JVM that runs. Raises EngineUnavailable."""
    from rekindle.engine.spark.chain import SparkChain
    from rekindle.engine.spark.training import run_training_topology

    session = _start_session(config, on_exit)
    run_training_topology(session)
    for segment in config.topology.segments:  # the first plan of a query takes longest
        if needs_spark(segment, config.topology):
            SparkChain(
                segment,
                config.topology,
                session,
                spark_job_input_bytes=config.memory.spark_job_input_bytes,
                result_bytes=config.memory.epoch_bytes,
                run_files=config.run_files,
            )


def end_unneeded_spark(config: TaskConfig) -> None:
    """Of a standby whose task has no operators: the JVM would keep the memory that the task's own
    buffers are given."""
    if not needs_spark(config.segment, config.topology):
        from rekindle.engine.spark.session import kill_session

        kill_session()


def needs_spark(segment: Segment, topology: Topology) -> bool:
    """A segment of a source alone only passes rows on."""
    nodes = [topology.nodes[name] for name in segment.nodes]
    return len(nodes) > 1 or not isinstance(nodes[0].spec, SourceSpec)


def _start_session(config: TaskConfig, on_exit: Callable[[int], None]) -> Any:
    """A SparkSession, whose package only `rekindle.engine.spark` imports."""
    from rekindle.engine.spark.session import start_session

    cores = max(1, config.segment.resources.cpu_m // 1000)
    return start_session(
        f"{config.topology.name}-{config.segment.name}-{config.ref.partition}",
        master=f"local[{cores}]",
        conf=config.topology.spec.spark_conf,
        cds_archive=config.cds_archive,
        data_dir=config.data,
        memory=config.memory,
        on_exit=on_exit,
    )


class EngineStarter:
    """`chain`: the chain, or the error with which its start failed. If the engine dies later, the
    caller of `lost` and `restart` restarts it."""

    def __init__(self, config: TaskConfig) -> None:
        self.chain: Future[Chain] = Future()
        self._config = config
        self._exit_status: int | None = None
        self._running: Chain | None = None
        self._session: object | None = None
        if not needs_spark(config.segment, config.topology):
            schema = config.topology.nodes[config.segment.nodes[0]].schema
            self.chain.set_result(PassThroughChain(arrow_schema(schema)))
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

        config = self._config
        session = _start_session(config, self._jvm_exited)
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
