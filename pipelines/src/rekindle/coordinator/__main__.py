"""`python -m rekindle.coordinator`: one small process per topology (docs/design/coordinator.md)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import rekindle.early_exit  # noqa: F401
from rekindle.coordinator.shell.kube import KubeApi
from rekindle.coordinator.shell.kube_access import find_access
from rekindle.coordinator.shell.process import Process
from rekindle.coordinator.shell.settings import read_settings
from rekindle.errors import RekindleError
from rekindle.identity import TOKEN_VARIABLE
from rekindle.json_logs import configure_logging


async def _run() -> int:
    settings = read_settings(os.environ)
    os.environ.pop(TOKEN_VARIABLE, None)  # the child process that compiles does not need it
    configure_logging(topology=settings.topology, fence=settings.incarnation)
    process = Process(settings, KubeApi(find_access(os.environ)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    return await process.run()


def main() -> int:
    try:
        return asyncio.run(_run())
    except RekindleError as error:
        print(f"rekindle.coordinator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
