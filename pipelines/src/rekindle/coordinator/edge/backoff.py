"""Back-off with jitter, so that coordinators do not all retry at the same time."""

from __future__ import annotations

import asyncio
import random

import aiohttp

from rekindle.coordinator.edge.kube import ApiError

UNREACHABLE = (ApiError, OSError, TimeoutError, aiohttp.ClientError, ValueError)
"""Errors of API calls while the server is away, starting or restarting."""


class BackOff:
    def __init__(self, first_s: float = 0.2, most_s: float = 5.0) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s * random.uniform(0.7, 1.3))
        self._next_s = min(self._most_s, self._next_s * 2)
