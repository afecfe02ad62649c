"""Discarding an output log that may be wrong.

Replicas that disagree compute again from the committed checkpoint. The log of the boot before would
be served, and compared with what is computed now. A marker file beside it is written before the
process ends, so that the next boot finds it however the process ends.

Design: docs/design/task.md#failures, docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def mark(log: Path) -> None:
    """Have the log in this directory deleted before it is opened again. Raises OSError."""
    marker = _marker_of(log)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def discard_marked(log: Path) -> bool:
    """Delete the log if it is marked; whether it was. Raises OSError."""
    marker = _marker_of(log)
    if not marker.exists():
        return False
    if log.exists():
        shutil.rmtree(log)
    marker.unlink()  # last: an interrupted deletion goes on at the next start
    return True


def _marker_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.discard")
