"""Discarding an output log that may be wrong.

Replicas that disagree compute again from the committed checkpoint. Without this, the log of the
previous boot would be served, and compared with new results. A marker file beside the log is
written before the process ends, so that the next boot finds it even after a crash. Sinks may have
written such results: another marker lasts until a boot has compared their files with its own.

Design: docs/design/task.md#failures, docs/design/coordinator.md#when-replicas-disagree.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def mark_for_discard(log: Path) -> bool:
    """Mark the log in this directory, to be deleted before it is opened again. Returns whether it
    was not marked before. Raises OSError."""
    marker = _marker_of(log)
    is_new = not marker.exists()
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return is_new


def is_marked(log: Path) -> bool:
    """Whether the log will be deleted."""
    return _marker_of(log).exists()


def discard_log_if_marked(log: Path) -> bool:
    """Delete the log if it is marked; then files that sinks have written from it are marked for
    comparison. Returns whether it was marked. Raises OSError."""
    marker = _marker_of(log)
    if not marker.exists():
        return False
    if log.exists():
        shutil.rmtree(log)
    marker.replace(_comparison_of(log))  # last: an interrupted deletion continues at the next start
    return True


def mark_comparison(log: Path) -> None:
    """Files that sinks have written from this log may be wrong. Raises OSError."""
    marker = _comparison_of(log)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def must_compare(log: Path) -> bool:
    return _comparison_of(log).exists()


def end_comparison(log: Path) -> None:
    """All files have been compared."""
    _comparison_of(log).unlink(missing_ok=True)


def _marker_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.discard")


def _comparison_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.compare")
