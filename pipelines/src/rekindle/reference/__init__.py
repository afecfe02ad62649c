"""The reference execution: a topology in one process. Failure tests compare with its output."""

from rekindle.reference.rewrite import redirect
from rekindle.reference.run import (
    EPOCHS_PER_CALL,
    OpenedSource,
    ReferenceResult,
    RunEvent,
    RunProgress,
    SourcesOpened,
    SparkOptions,
    SparkStarting,
    run_reference,
)

__all__ = [
    "EPOCHS_PER_CALL",
    "OpenedSource",
    "ReferenceResult",
    "RunEvent",
    "RunProgress",
    "SourcesOpened",
    "SparkOptions",
    "SparkStarting",
    "redirect",
    "run_reference",
]
