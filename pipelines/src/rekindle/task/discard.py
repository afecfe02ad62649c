"""An output log that must not be used again: what it holds may be wrong.

Replicas that disagree are computed again from the committed checkpoint. A log of the life before
would be served, and compared with what is computed now. A mark beside it is on the disk before the
process ends, so that the next life finds it however the process ends.

Design: docs/design/task.md#failures, docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def mark(log: Path) -> None:
    """The log in this directory is deleted before it is opened again. Raises OSError."""
    path = _mark_of(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def discard_marked(log: Path) -> bool:
    """Delete the log if it is marked; whether it was. Raises OSError."""
    path = _mark_of(log)
    if not path.exists():
        return False
    if log.exists():
        shutil.rmtree(log)
    path.unlink()  # last: a deletion that was interrupted goes on at the next start
    return True


def _mark_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.discard")
