"""Results of a task's earlier boots in its output log, and how far they are trusted.

A boot may have computed an epoch wrongly and ended before any poll showed its digest; its log,
which survives it, does not show this. So a task with partners serves nothing of that log: the
partners serve, and the task's epochs are served again as they are computed. Only the log's digests
are kept and compared with what is computed now: a difference means that readers may have read a
wrong epoch.

A task without partners serves its log at once, because nobody else can. Where a computation differs
from it, the log is discarded and the epoch is computed once more, from the checkpoint; two of the
three results decide. A file in the log's directory keeps the results for the next boot. If all
three differ the task stays failed: neither the epoch nor a later one is served or written.

Files that sinks have written from a log that may be wrong are compared with the new results. Until
all of them have been compared, each boot compares them again.

Design: docs/design/task.md#the-log-of-earlier-boots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from rekindle.errors import DifferentResults, LogCorrupt, NotDeterministic
from rekindle.protocol import RestorePoint
from rekindle.streams.epochs import EpochBatch, Result
from rekindle.streams.log import OutputLog
from rekindle.streams.log_files import held_epochs, refuses_shipped
from rekindle.task.discard import end_comparison, is_marked, mark_comparison, must_compare

_log = logging.getLogger(__name__)
_RESULTS_FILE = "disputed.json"
_RESULTS_BEFORE_MAJORITY = 2
"""So many different results of an epoch are stored before a further one decides between them."""


class EarlierBoots:
    """Results of earlier boots after the restore point. `compare_files_from`: the first epoch of
    which they may have written a wrong file; None: they have not. `check` is called by the engine's
    thread."""

    def __init__(
        self,
        directory: Path,
        results: Mapping[int, tuple[Result, ...]],
        has_no_partners: bool,
        compare_files_from: int | None,
    ) -> None:
        self.compare_files_from = compare_files_from
        self._directory = directory
        self._file = directory / _RESULTS_FILE
        self._results = dict(results)
        self._has_no_partners = has_no_partners

    def stop_comparing(self) -> None:
        """Sinks have compared all their files."""
        self.compare_files_from = None
        try:
            end_comparison(self._directory)
        except OSError as error:  # the next boot compares once more
            _log.warning("the end of the comparison of files cannot be recorded: %s", error)

    def check(self, batch: EpochBatch) -> str | None:
        """Compare an epoch before it enters the log. Returns a message if another result may have
        been served, else None. Raises DifferentResults if one more computation decides which is
        right, NotDeterministic if none does."""
        before = self._results.pop(batch.epoch, ())
        now = Result.of(batch)
        if all(now == result for result in before):
            return None
        where = f"epoch {batch.epoch} of stream {batch.stream}/{batch.partition}"
        if not self._has_no_partners:
            return f"{where} differs from what an earlier boot of this replica had in its log"
        if now not in before:
            results = (*before, now)
            self._write_results(batch.epoch, results)
            raise _divergence_error(where, results)
        self._file.unlink()
        if now == before[0]:
            _log.warning("%s equals the output log again; one computation was wrong", where)
            return None
        return (
            f"{where} was wrong in the output log: two computations agree on another result, which "
            f"replaces it. Sinks compare their files from this epoch on"
        )

    def _write_results(self, epoch: int, results: tuple[Result, ...]) -> None:
        try:
            content = {"epoch": epoch, "results": list(map(astuple, results))}
            self._file.write_text(json.dumps(content))
        except OSError as error:  # the next boot finds the log, and the difference, again
            _log.error("the results of epoch %d cannot be written: %s", epoch, error)


def held_log(directory: Path, has_no_partners: bool) -> tuple[int, int] | None:
    """First and last epoch of the log with which the task will begin, if it serves that log, and
    does not doubt it. Damage before the last file is not looked for."""
    if not has_no_partners or _is_own_doubted(directory):
        return None
    try:
        return held_epochs(directory)
    except OSError as error:  # the start, which opens the log, reports it to the coordinator
        _log.warning("what the output log has is not known: %s", error)
        return None


def is_doubted(directory: Path) -> bool:
    """Whether results of earlier boots may be wrong, or the log that is in the store could not be
    used."""
    return _is_own_doubted(directory) or refuses_shipped(directory)


def _is_own_doubted(directory: Path) -> bool:
    marked = is_marked(directory) or must_compare(directory)
    return marked or (directory / _RESULTS_FILE).exists()


def require_held(log: OutputLog, point: RestorePoint) -> None:
    """The log has what the restore point leaves to it. Raises LogCorrupt; the next boot reports
    what is left."""
    first = point.log_from
    if first is not None and not (log.base <= first and log.last >= point.epoch):
        raise LogCorrupt(
            f"the output log has epochs {log.base} to {log.last}; {first} to {point.epoch} are "
            f"needed for readers that are behind, and are computed again from an older checkpoint"
        )


def continue_log(
    log: OutputLog, directory: Path, restored_from: int, has_no_partners: bool
) -> EarlierBoots:
    """Make the log continue after a restore point. `has_no_partners`: of the task. Raises
    NotDeterministic if three computations of an epoch had three results."""
    file = directory / _RESULTS_FILE
    stored = _read_results(file)
    if stored is not None and stored[0] <= restored_from:
        file.unlink()  # a trusted checkpoint covers the epoch
    compare_files_from = restored_from + 1 if must_compare(directory) else None
    if stored is None:
        results = {e: (r,) for e, r in log.results(restored_from + 1).items()}
        log.start_at(restored_from + 1, keep=has_no_partners)
        return EarlierBoots(directory, results, has_no_partners, compare_files_from)
    epoch, differing = stored
    if epoch > restored_from and len(differing) > _RESULTS_BEFORE_MAJORITY:
        raise _divergence_error(f"epoch {epoch} of stream {log.stream}/{log.partition}", differing)
    log.start_at(restored_from + 1, keep=False)
    if epoch <= restored_from:
        return EarlierBoots(directory, {}, has_no_partners, compare_files_from)
    if compare_files_from is None:
        mark_comparison(directory)  # it outlives the file of results, which the decision deletes
        compare_files_from = epoch
    return EarlierBoots(directory, {epoch: differing}, has_no_partners, compare_files_from)


def _divergence_error(where: str, results: tuple[Result, ...]) -> DifferentResults:
    shown = "; ".join(map(str, results))
    if len(results) == _RESULTS_BEFORE_MAJORITY:
        return DifferentResults(
            f"{where} was computed again with another result than the output log has: {shown}. It "
            f"is computed once more from the checkpoint: two of three results decide"
        )
    return NotDeterministic(
        f"{where} was computed with {len(results)} different results: {shown}. The operator is not "
        f"deterministic, or the node's memory is bad: change the operator's definition, or delete "
        f"the pod to compute it on another node. Nothing of it, or after it, is written"
    )


def _read_results(file: Path) -> tuple[int, tuple[Result, ...]] | None:
    try:
        found = json.loads(file.read_text())
        return int(found["epoch"]), tuple(Result(*result) for result in found["results"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s cannot be read and is ignored: %s", file, error)
        file.unlink()
        return None
