"""`python -m rekindle.task`: the process of a task pod."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import rekindle.early_exit  # first: SIGTERM ends the process during the slow imports, too
import rekindle.task.block_pandas  # before pyarrow, which would import pandas
from rekindle.errors import RekindleError
from rekindle.identity import TOKEN_VARIABLES
from rekindle.json_logs import configure_logging
from rekindle.task.config import TaskConfig
from rekindle.task.runtime import TaskRuntime
from rekindle.task.standby import with_slot
from rekindle.termination import end_process


def main() -> int:
    configure_logging()
    environment = dict(os.environ)
    for name in TOKEN_VARIABLES:  # the JVM and its children do not need them
        os.environ.pop(name, None)
    try:
        config = TaskConfig.from_environment(with_slot(environment))
    except RekindleError as error:
        logging.getLogger(__name__).error("%s", error)
        return 2
    ref = config.ref
    configure_logging(
        logger_levels={"py4j": logging.WARNING},
        topology=config.topology.name,
        segment=config.segment.name,
        partition=ref.partition,
        replica=ref.replica,
        incarnation=ref.incarnation,
    )
    runtime = TaskRuntime(config)
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        runtime.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return rekindle.early_exit.exit_status(runtime.run(), received)


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """The process ends with the status of `run`, or with 1 after an error, whatever its threads
    do."""
    status = 1
    try:
        status = run()
    except Exception:
        logging.getLogger(__name__).exception("the task ends by an error")
    finally:
        logging.shutdown()
        end_process(status)


if __name__ == "__main__":
    run_and_exit(main)
