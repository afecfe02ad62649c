"""The output of one boot of a task as a reader sees it that misses nothing, and what it must not
see.

Paper: DPC (Balazinska et al. 2005), sections 3.4 and 3.5.
"""

from __future__ import annotations

from collections.abc import Set


class OutputOrder:
    """Each method says what is wrong with what comes next; "" if nothing is."""

    def __init__(self) -> None:
        self._tentative: set[int] = set()  # epochs that are not corrected
        self._attempt = 0
        self._newest_stable = -1
        self._correcting = False  # between UNDO and REC_DONE

    @property
    def tentative(self) -> Set[int]:
        return self._tentative

    def stable(self, epoch: int) -> str:
        problem = ""
        if self._tentative and not self._correcting:
            problem = f"stable epoch {epoch} follows tentative ones without an UNDO"
        self._newest_stable = max(self._newest_stable, epoch)
        self._tentative -= {e for e in self._tentative if e <= epoch}
        return problem

    def new_tentative(self, attempt: int, epoch: int) -> str:
        begins = attempt != self._attempt
        problem = ""
        if attempt < self._attempt:
            problem = f"attempt {attempt} follows attempt {self._attempt}"
        elif begins and self._correcting:
            problem = f"attempt {attempt} begins while a correction is open"
        elif not begins and epoch <= max(self._tentative, default=epoch - 1):
            problem = f"tentative epoch {epoch} follows {max(self._tentative)}"
        self._attempt = attempt
        self._tentative.add(epoch)
        return problem

    def undo(self, from_epoch: int) -> str:
        self._tentative = {e for e in self._tentative if e < from_epoch}
        problem = ""
        if self._tentative:
            problem = f"UNDO from epoch {from_epoch} leaves tentative ones {self._tentative}"
        elif self._correcting:
            problem = "UNDO follows another one without a REC_DONE"
        self._correcting = True
        return problem

    def reconciliation_done(self, through: int) -> str:
        problem = ""
        if not self._correcting:
            problem = f"REC_DONE through epoch {through} follows no UNDO"
        elif any(e <= through for e in self._tentative):
            problem = f"epochs through {through} are not corrected, although REC_DONE says so"
        self._correcting = False
        return problem

    def settled(self) -> str:
        """The task says that its output is stable."""
        if self._correcting:
            return "output is STABLE without a REC_DONE"
        if self._tentative:
            return f"output is STABLE, and epochs {sorted(self._tentative)} are not corrected"
        return ""
