"""The reference execution: a topology without a cluster, and the oracle of every failure test."""

from rekindle.reference.rewrite import redirect
from rekindle.reference.run import (
    Progress,
    ReferenceResult,
    add_arguments,
    run_command,
    run_reference,
)

__all__ = [
    "Progress",
    "ReferenceResult",
    "add_arguments",
    "redirect",
    "run_command",
    "run_reference",
]
