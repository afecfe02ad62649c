"""Directories for caches and logs of a user, by the XDG base directory specification. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_root(environment: Mapping[str, str]) -> Path:
    """The cache directory: REKINDLE_CACHE, or rekindle/ in the user's cache directory."""
    if own := environment.get("REKINDLE_CACHE"):
        return Path(own).absolute()
    return _base(environment, "XDG_CACHE_HOME", ".cache") / "rekindle"


def state_root(environment: Mapping[str, str]) -> Path:
    """The directory of logs: rekindle/ in the user's state directory."""
    return _base(environment, "XDG_STATE_HOME", ".local/state") / "rekindle"


def _base(environment: Mapping[str, str], variable: str, default: str) -> Path:
    """The XDG specification says that a relative path in the variable is invalid and ignored."""
    given = Path(environment.get(variable) or "")
    if given.is_absolute():
        return given
    return (Path(environment.get("HOME") or "~") / default).expanduser().absolute()
