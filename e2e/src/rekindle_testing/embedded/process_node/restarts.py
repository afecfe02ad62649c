"""Whether and when a container that ended is started again.  Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """The first restart is immediate, the next waits `base_s`, then twice as long."""

    base_s: float = 10.0
    max_s: float = 300.0
    # A container that ran for so long has no back-off.
    reset_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How one attempt at a container ended; times are seconds since 1970."""

    exit_code: int
    signal: int
    reason: str
    message: str
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class ConsecutiveExits:
    """How many times in a row a container ended, with whatever exit code, for its back-off."""

    count: int = 0

    def after(self, ended: Exit, policy: RestartBackoff) -> ConsecutiveExits:
        ran_s = ended.finished_at - ended.started_at
        return ConsecutiveExits(1 if ran_s >= policy.reset_s else self.count + 1)

    def delay_s(self, policy: RestartBackoff) -> float:
        """How long after the last exit the next attempt may begin."""
        if self.count <= 1:
            return 0.0
        doublings = min(self.count - 2, 30)  # a float overflows after some 1000
        return min(policy.base_s * 2.0**doublings, policy.max_s)


def should_restart(restart_policy: str, ended: Exit) -> bool:
    match restart_policy:
        case "Always":
            return True
        case "OnFailure":
            return ended.exit_code != 0
        case _:
            return False
