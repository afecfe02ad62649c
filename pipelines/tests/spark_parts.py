"""Types of the fixtures for tests on Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

StartSession = Callable[..., Any]
"""`start_session` of the engine, with the directory and the archive of the tests' JVM."""
