"""The failure of an engine itself, as opposed to that of an operator. No Spark here."""

from __future__ import annotations

from rekindle.errors import RekindleError


class EngineLost(RekindleError):
    """The JVM is gone. State and inputs are untouched; only a new process can go on."""
