"""`python -m rekindle.task`: the process of a task pod."""

from __future__ import annotations

import logging
import os
import signal
import sys

import rekindle.early_exit
import rekindle.task.block_pandas  # noqa: F401
from rekindle.errors import RekindleError
from rekindle.identity import TOKEN_VARIABLE
from rekindle.json_logs import configure_logging
from rekindle.task.config import TaskConfig
from rekindle.task.runtime import TaskRuntime


def main() -> int:
    configure_logging()
    try:
        config = TaskConfig.from_environment(os.environ)
    except RekindleError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    os.environ.pop(TOKEN_VARIABLE, None)  # the JVM and its children do not need it
    ref = config.ref
    configure_logging(
        quiet={"py4j": logging.WARNING},
        topology=config.topology.name,
        segment=config.segment.name,
        partition=ref.partition,
        replica=ref.replica,
        incarnation=ref.incarnation,
    )
    runtime = TaskRuntime(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runtime.stop())
    return runtime.run()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)  # a thread that waits for a dead peer or JVM must not keep the pod alive
