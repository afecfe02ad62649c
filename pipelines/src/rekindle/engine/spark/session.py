"""A Spark session for continuous queries of small jobs: starts fast, logs little, runs for months.

One JVM and one Spark context for each process, as in PySpark. `start_session` again after
`stop_session(keep_jvm=True)` uses the same JVM.

Design: docs/design/engine.md#jvm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.memory import MemoryPlan, plan_memory
from rekindle.engine.spark import cds, time_zones
from rekindle.engine.spark.jvm import Jvm, JvmSpec, find_jars, find_java, launch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

BATCH_ROWS = 100_000
"""Maximum number of rows of an Arrow batch. A job with fewer rows has one Spark task."""

_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # A row that cannot be cast or divided gives NULL: one row must not end a continuous query.
    "spark.sql.ansi.enabled": "false",
    # Plans must not depend on the size of the input, nor be optimised again at run time.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.execution.replaceHashWithSortAggregate": "true",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.catalogImplementation": "in-memory",
    # 0: rows go to the JVM as Arrow batches. A LocalRelation is evaluated row by row on the driver
    # while the plan is optimised (641 ms instead of 132 ms for 100,000 rows).
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS),
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Send results directly to the driver, which is the same process, not through the block store.
    "spark.task.maxDirectResultSize": "64m",
    # The plans are not used; their long form takes a tenth of the time of a small epoch.
    "spark.sql.ui.explainMode": "simple",
    # Limit what Spark keeps of past jobs: there are millions.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.ui.retainedTasks": "100",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.cleaner.periodicGC.interval": "5min",
    "spark.sql.codegen.cache.maxEntries": "200",
    "spark.metrics.staticSources.enabled": "false",
    "spark.eventLog.enabled": "false",
}
_jvm: Jvm | None = None


def start_session(
    app_name: str,
    *,
    master: str = "local[1]",
    conf: Mapping[str, str] | None = None,
    cds_archive: Path | None = None,
    data_dir: Path | None = None,
    memory: MemoryPlan | None = None,
    on_exit: Callable[[int], None] | None = None,
    log_file: Path | None = None,
) -> SparkSession:
    """Start the JVM, if there is none, and a session in it.

    `conf` is the user's sparkConf, which has precedence. `memory` gives the sizes of the JVM.
    `cds_archive` was created by a training run (`engine.spark.training`); if it does not match, a
    warning is logged and the start is slower. `on_exit` is called in a thread with the exit status
    when the JVM exits unexpectedly. `log_file`: for the output of the JVM. Raises
    EngineUnavailable.
    """
    global _jvm
    user_conf = dict(conf or {})
    directory = (data_dir or Path(tempfile.gettempdir()) / f"rekindle-{os.getpid()}") / "spark"
    bind = os.environ.get("REKINDLE_BIND") or "127.0.0.1"
    if _jvm is None or not _jvm.alive:
        _reset_gateway()
        logging.getLogger().removeFilter(_no_gateway_logs)
        _jvm = launch(
            cds.with_archive(jvm_spec(user_conf, memory), cds_archive),
            directory=directory,
            environment={
                "SPARK_LOCAL_IP": bind,
                "SPARK_LOCAL_DIRS": str(directory),
                # An arena for each thread would waste memory.
                "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2"),
            },
            meanwhile=_import_pyspark,
            log_file=log_file,
        )
    _jvm.on_exit = on_exit
    settings = {
        **_CONF,
        "spark.driver.host": bind,
        "spark.driver.bindAddress": bind,
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        **user_conf,
    }
    from py4j.java_gateway import java_import
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(user_conf.get("spark.master", master)).appName(app_name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = _connect(builder, _jvm)
    # Import this class by name: PySpark imports only packages, so that for every table Py4J would
    # search all jars for the class.
    java_import(session._jvm, "org.apache.spark.sql.api.python.PythonSQLUtils")
    session.sparkContext.setLogLevel(user_conf.get("spark.log.level", "WARN"))
    _require_time_zones(session)
    return session


def _require_time_zones(session: SparkSession) -> None:
    """Results depend on them."""
    jvm: Any = session.sparkContext._jvm
    found = jvm.java.time.zone.ZoneRulesProvider.getVersions("UTC").firstKey()
    if found != time_zones.RELEASE:
        raise EngineUnavailable(
            f"the JVM has the time zones {found} instead of {time_zones.RELEASE}: leave java.home "
            "out of sparkConf"
        )


def jvm_spec(conf: Mapping[str, str] | None = None, memory: MemoryPlan | None = None) -> JvmSpec:
    """The JVM for a user's sparkConf (of which driver memory, Java options and class path are used)
    and the pod's memory."""
    user_conf = conf or {}
    plan = memory or plan_memory()
    extra = user_conf.get("spark.driver.extraClassPath", "")
    jars = find_jars(_spark_home())
    return JvmSpec(
        java=find_java(),
        jars=(*(Path(p) for p in extra.split(os.pathsep) if p), *jars),
        heap=user_conf.get("spark.driver.memory", f"{plan.heap_bytes >> 20}m"),
        direct=f"{plan.direct_bytes >> 20}m",
        extra_flags=tuple(shlex.split(user_conf.get("spark.driver.extraJavaOptions", ""))),
    )


def current_jvm() -> Jvm | None:
    """The JVM of this process, to monitor or to measure it."""
    return _jvm


def use_jvm(jvm: Jvm) -> None:
    """Use an already started JVM for the next session."""
    global _jvm
    _reset_gateway()
    _jvm = jvm


def stop_session(session: SparkSession, *, keep_jvm: bool = False, timeout_s: float = 10.0) -> None:
    """Stop Spark and, unless `keep_jvm`, the JVM. It is not an error if the JVM has exited."""
    global _jvm
    if _jvm is not None and not keep_jvm:
        _jvm.stopping = True
    if _jvm is None or _jvm.alive:
        _stop_context(session)
    if keep_jvm:
        return
    _disconnect_gateway()
    if _jvm is not None:
        _jvm.stop(timeout_s)
        _jvm = None
    _reset_gateway()  # last: Py4J waits for a callback connection of the JVM


def _stop_context(session: SparkSession) -> None:
    """All computations have ended, so if the JVM does not respond that is only logged."""
    from py4j.protocol import Py4JError

    try:
        session.stop()
    except (Py4JError, OSError) as error:
        log.warning("Spark did not stop cleanly: %s", str(error).partition("\n")[0])


def kill_session() -> None:
    """Kill the JVM at once, even if its session is not ready yet."""
    global _jvm
    jvm, _jvm = _jvm, None
    _disconnect_gateway()
    if jvm is not None:
        jvm.kill()
    _reset_gateway()


def _connect(builder: SparkSession.Builder, jvm: Jvm) -> SparkSession:
    """PySpark finds a running gateway through environment variables."""
    gateway = {"PYSPARK_GATEWAY_PORT": str(jvm.port), "PYSPARK_GATEWAY_SECRET": jvm.secret}
    os.environ.update(gateway)
    try:
        return builder.getOrCreate()
    finally:
        for name in gateway:
            os.environ.pop(name, None)


def _spark_home() -> Path:
    """The directory of PySpark, without importing it."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise EngineUnavailable("no pyspark: install rekindle[spark]")
    return Path(spec.origin).parent


def _import_pyspark() -> None:
    """Called while the JVM starts, because it takes half a second. Also imports modules that
    PySpark would import only later: at its first call with an argument, and for its first table."""
    import pyspark.sql.classic.dataframe
    import pyspark.sql.pandas.conversion
    import pyspark.testing.utils  # noqa: F401
    from pyspark.logger import PySparkLogger

    # Otherwise each refused query is logged with its Java stack, besides the operator's error.
    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True


class _NoGatewayLogs(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.module not in ("java_gateway", "clientserver")


_no_gateway_logs = _NoGatewayLogs()


def _disconnect_gateway() -> None:
    """Stop sending to a JVM that exits. A thread of Py4J notifies the JVM of each object that
    Python has released, and logs a traceback to the root logger if there is no response."""
    logging.getLogger().addFilter(_no_gateway_logs)
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext

    if SparkContext._gateway is not None:
        SparkContext._gateway._gateway_client.is_connected = False


def _reset_gateway() -> None:
    """Let PySpark connect to another JVM; it holds its gateway in class attributes."""
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is not None:
        with contextlib.suppress(Exception):  # the JVM may have exited
            SparkContext._gateway.close()
        SparkContext._gateway = None
        SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
