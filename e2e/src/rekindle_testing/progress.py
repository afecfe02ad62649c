"""Lines of progress of what takes long: builds, installations, the start of a cluster."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str], None]


def no_progress(line: str) -> None:
    """An `OnProgress` that prints nothing."""
