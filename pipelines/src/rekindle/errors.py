"""Errors that users may see, with one base class. Every message says what is wrong, where, and what
to do. "Names X" in a docstring: the message contains X."""

from __future__ import annotations

from dataclasses import dataclass, replace


class RekindleError(Exception):
    """Base of all errors that Rekindle raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a topology.

    `path` is the field path in the resource (`spec.operators[2].window.size`); it is empty for the
    whole resource, and for SQL until its caller adds it with `at`. `message` says what is wrong
    there, `hint` what to do about it, and `reason` is a stable CamelCase word for conditions and
    Events (`UnknownInput`, `Cycle`, `NotSupportedYet`, ...).
    """

    path: str
    reason: str
    message: str
    hint: str = ""

    def at(self, path: str) -> Problem:
        """The same problem at a field path."""
        return replace(self, path=path)

    def __str__(self) -> str:
        tail = f" ({self.hint})" if self.hint else ""
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.message}{tail}"


class InvalidTopology(RekindleError):
    """The topology cannot run; `problems` lists all problems, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(p) for p in problems))
        self.problems = problems


class OperatorFailed(RekindleError):
    """An operator could not process an epoch (bad SQL at run time, a cast that overflows)."""


class EpochTooLarge(RekindleError):
    """One epoch does not fit into a task's memory, or one of its columns into an Arrow table; names
    the limit to raise."""


class OperatorRefused(OperatorFailed):
    """Spark refuses an operator before its first row: the resource must be changed."""

    def __init__(self, message: str, operator: str) -> None:
        super().__init__(message)
        self.operator = operator


class LogCorrupt(RekindleError):
    """A record inside the output log, not at its truncated end, fails its checksum."""


class LogFull(RekindleError):
    """The output log has reached its budget, and consumers still need all of it; names them."""


class BelowFloor(RekindleError):
    """A reader requested an epoch that is no longer in the log; names the log's first epoch."""


class StoreError(RekindleError):
    """A call of the checkpoint store failed, or an object is damaged; names the URL."""


class ObjectMissing(StoreError):
    """The checkpoint store has no object of this name."""


class StateLost(StoreError):
    """An object that a restored state needs is missing or damaged: the task has to be restored
    again. `object`: the object's name in the store, below the topology's UID."""

    def __init__(self, message: str, object: str) -> None:
        super().__init__(message)
        self.object = object


class StateMismatch(RekindleError):
    """Saved state is not in the format of this release; names operator and column."""


class SinkRefused(RekindleError):
    """A sink belongs to another topology, or cannot be written; names the URL."""


class DifferentResults(RekindleError):
    """The same epoch was computed twice with different results: determinism is violated."""


class NotDeterministic(DifferentResults):
    """Every computation of an epoch gave a different result, so repeating it does not help."""


class SourceFailed(RekindleError):
    """A source's input is missing or cannot be read; names file, row and column."""


class SchemaMismatch(SourceFailed):
    """A source's input does not match its schema; one of the two has to be corrected."""


class SourceRefused(SourceFailed):
    """A source's server refuses it, or what it signs in with is incomplete: the resource or the
    Secret has to be corrected."""
