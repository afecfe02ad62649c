"""What earlier lives of a task left in its output log, and how far that is believed.

A life may have computed an epoch wrongly and ended before any poll showed its digest. The log that
outlives it cannot tell. So a task with partners serves nothing of it: they serve, and its epochs
are there again as they are computed. Only what the log says of them is kept, and compared with what
is computed now: a difference means that readers may have taken a wrong epoch.

A task without a partner serves its log at once, for there is nothing else. Where a computation
differs from it, the log is given up and the epoch is computed once more, from the checkpoint, and
two of the three results decide. A note in the log's directory keeps them for the next life. Where
all three differ the task stays failed: nothing of the epoch, or after it, is served or written.

Design: docs/design/task.md#the-log-of-earlier-lives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import Diverged, NotDeterministic
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog, Result

_log = logging.getLogger(__name__)
_NOTE = "disputed.json"
_UNDECIDED = 2
"""Results that differ, of one epoch, before a third one decides."""


class EarlierLives:
    """What they computed after the restore point. `check` is called by the engine's thread."""

    def __init__(self, note: Path, results: Mapping[int, tuple[Result, ...]], alone: bool) -> None:
        self._note = note
        self._results = dict(results)
        self._alone = alone

    @property
    def disputed(self) -> int | None:
        """The epoch that is computed once more, to decide between two results."""
        return next((e for e, said in self._results.items() if len(said) == _UNDECIDED), None)

    def check(self, batch: EpochBatch) -> str | None:
        """Compare an epoch before it is out. In words, what may have been given out otherwise; None
        if nothing was. Raises Diverged where one more computation decides what is right, else
        NotDeterministic."""
        said = self._results.pop(batch.epoch, ())
        now = Result(batch.digest, batch.watermark)
        if all(now == result for result in said):
            return None
        where = f"epoch {batch.epoch} of stream {batch.stream}/{batch.partition}"
        if not self._alone:
            return f"{where} differs from what an earlier life of this replica had in its log"
        if now not in said:
            results = (*said, now)
            self._remember(batch.epoch, results)
            raise _difference(where, results)
        self._note.unlink()
        if now == said[0]:
            _log.warning("%s is as the log had it; it was computed wrongly once", where)
            return None
        return (
            f"{where} was wrong in the output log: two computations agree on another result, which "
            f"replaces it. Sinks compare their files with it from there on"
        )

    def _remember(self, epoch: int, said: tuple[Result, ...]) -> None:
        results = [[r.digest, r.watermark] for r in said]
        try:
            self._note.write_text(json.dumps({"epoch": epoch, "results": results}))
        except OSError as error:  # the next life finds the log, and the difference, again
            _log.error("what was computed of epoch %d is not noted: %s", epoch, error)


def take_over_log(log: OutputLog, directory: Path, restored_from: int, alone: bool) -> EarlierLives:
    """Begin a log after a restore point; `alone`: without partners. Raises NotDeterministic where
    three computations have given three results."""
    note = directory / _NOTE
    noted = _decode(note)
    if noted is not None and noted[0] <= restored_from:
        note.unlink()  # a checkpoint that is trusted is beyond it
    if noted is None:
        results = {e: (r,) for e, r in log.results(restored_from + 1).items()}
        log.start_at(restored_from + 1, keep=alone)
        return EarlierLives(note, results, alone)
    epoch, said = noted
    if epoch > restored_from and len(said) > _UNDECIDED:
        raise _difference(f"epoch {epoch} of stream {log.stream}/{log.partition}", said)
    log.start_at(restored_from + 1, keep=False)
    return EarlierLives(note, {epoch: said} if epoch > restored_from else {}, alone)


def _difference(where: str, said: tuple[Result, ...]) -> Diverged:
    shown = ", ".join(f"{r.digest} (watermark {r.watermark})" for r in said)
    if len(said) == _UNDECIDED:
        return Diverged(
            f"{where} was computed again with another result than the output log has: {shown}. It "
            f"is computed once more from the checkpoint: two of three results decide"
        )
    return NotDeterministic(
        f"{where} was computed with {len(said)} different results: {shown}. The operator is not "
        f"deterministic, or the node's memory is bad: change the operator's definition, or delete "
        f"the pod to compute it on another node. Nothing of it, or after it, is written"
    )


def _decode(note: Path) -> tuple[int, tuple[Result, ...]] | None:
    try:
        found = json.loads(note.read_text())
        return int(found["epoch"]), tuple(Result(str(d), int(w)) for d, w in found["results"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        _log.warning("%s cannot be read and is ignored: %s", note, error)
        note.unlink()
        return None
