"""Executes the probes of containers: httpGet and exec.

Knows networks and processes; `probes` interprets the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Mapping

import aiohttp

from rekindle_testing.embedded.process_node.fields import Json


class ProbeFailed(Exception):
    """The probe could not be executed, or its result is a failure."""


class ProbeExecutor:
    """One object for the agent: all probes share an HTTP session."""

    def __init__(self) -> None:
        # A probe checks whether the server accepts connections, so it opens a new one.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def run(
        self,
        probe: Json,
        container: Json,
        pod_ip: str,
        pid: int | None,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """An httpGet or exec; raises ProbeFailed with the reason."""
        try:
            async with asyncio.timeout(timeout_s):
                if "httpGet" in probe:
                    await self._http(probe["httpGet"], container, pod_ip)
                elif "exec" in probe:
                    await _exec(probe["exec"]["command"], pid, environment)
                else:
                    raise ProbeFailed(f"a process node does not support {sorted(probe)}")
        except TimeoutError:
            raise ProbeFailed(f"timed out after {timeout_s:g} s") from None

    async def _http(self, get: Json, container: Json, pod_ip: str) -> None:
        host = get.get("host") or pod_ip
        scheme = str(get.get("scheme") or "HTTP").lower()
        port = named_port(container, get["port"])
        path = "/" + str(get.get("path") or "/").lstrip("/")
        headers = {h["name"]: h["value"] for h in get.get("httpHeaders") or []}
        headers.setdefault("User-Agent", "kube-probe/process-node")
        try:
            async with self._session.get(
                f"{scheme}://{host}:{port}{path}",
                headers=headers,
                allow_redirects=False,
                ssl=_without_verification() if scheme == "https" else True,
            ) as response:
                if not 200 <= response.status < 400:
                    body = (await response.content.read(200)).decode(errors="replace")
                    raise ProbeFailed(
                        f"HTTP probe failed with statuscode: {response.status} {body}"
                    )
        except (aiohttp.ClientError, OSError) as error:
            raise ProbeFailed(f"Get {scheme}://{host}:{port}{path}: {error}") from error


async def _exec(command: list[str], pid: int | None, environment: Mapping[str, str]) -> None:
    if pid is None:
        raise ProbeFailed("the container has not started")
    process = await asyncio.create_subprocess_exec(
        *enter_command(pid),
        *command,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        # nsenter's child is in the same session: a timeout must not leave it running.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        text = output[:500].decode(errors="replace").strip()
        raise ProbeFailed(f"command exited with {process.returncode}: {text}")


def enter_command(pid: int) -> list[str]:
    """A prefix that runs a command in the namespaces of the process `pid`."""
    return ["nsenter", f"--target={pid}", "--mount", "--uts", "--pid", "--root", "--wd", "--"]


def named_port(container: Json, port: int | str) -> int:
    """The number of a port that a probe gives by its number or its name."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for known in container.get("ports") or []:
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ProbeFailed(f"container {container['name']!r} has no port named {port!r}")


def _without_verification() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
