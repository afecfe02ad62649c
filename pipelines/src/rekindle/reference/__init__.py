"""The reference execution: a topology in one process, and the oracle of every failure test."""

from rekindle.reference.rewrite import redirect
from rekindle.reference.run import (
    EPOCHS_PER_CALL,
    OpenedSource,
    Progress,
    ReferenceResult,
    RunEvent,
    SourcesOpened,
    SparkOptions,
    SparkStarting,
    run_reference,
)

__all__ = [
    "EPOCHS_PER_CALL",
    "OpenedSource",
    "Progress",
    "ReferenceResult",
    "RunEvent",
    "SourcesOpened",
    "SparkOptions",
    "SparkStarting",
    "redirect",
    "run_reference",
]
