"""`python -m rekindle.coordinator`: one small process per topology (docs/design/coordinator.md)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import rekindle.early_exit  # before the slow imports: from here on SIGTERM ends the process
from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.kube_access import find_access
from rekindle.coordinator.shell.process import Process
from rekindle.coordinator.shell.settings import read_settings
from rekindle.errors import RekindleError
from rekindle.identity import TOKEN_VARIABLES
from rekindle.json_logs import configure_logging


async def _run() -> int:
    settings = read_settings(os.environ)
    for name in TOKEN_VARIABLES:  # the child process that compiles the spec needs no token
        os.environ.pop(name, None)
    configure_logging(topology=settings.topology, fence=settings.incarnation)
    process = Process(settings, KubeApi(find_access(os.environ)))
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        process.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return rekindle.early_exit.exit_status(await process.run(), received)


def main() -> int:
    try:
        return asyncio.run(_run())
    except RekindleError as error:
        print(f"rekindle.coordinator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
