"""When a probe changes a container's verdict.  Pure: no clock and no network."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rekindle_testing.embedded.process_node.fields import Json


class ProbeKind(StrEnum):
    STARTUP = "startup"
    LIVENESS = "liveness"
    READINESS = "readiness"


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """The numbers of a probe, with the defaults of Kubernetes."""

    initial_delay_s: float
    period_s: float
    timeout_s: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def parse(cls, probe: Json) -> ProbeSpec:
        return cls(
            initial_delay_s=probe.get("initialDelaySeconds") or 0,
            period_s=probe.get("periodSeconds") or 10,
            timeout_s=probe.get("timeoutSeconds") or 1,
            success_threshold=probe.get("successThreshold") or 1,
            failure_threshold=probe.get("failureThreshold") or 3,
        )


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """Where one probe of one running container stands.

    `verdict` is None until a threshold was reached for the first time.
    """

    spec: ProbeSpec
    successes: int = 0
    failures: int = 0
    verdict: bool | None = None

    def record(self, success: bool) -> ProbeRun:
        if success:
            count = self.successes + 1
            reached = count >= self.spec.success_threshold
            return replace(
                self, successes=count, failures=0, verdict=True if reached else self.verdict
            )
        count = self.failures + 1
        reached = count >= self.spec.failure_threshold
        return replace(
            self, successes=0, failures=count, verdict=False if reached else self.verdict
        )


def is_started(running: bool, startup: ProbeRun | None) -> bool:
    return running and (startup is None or startup.verdict is True)


def is_ready(running: bool, startup: ProbeRun | None, readiness: ProbeRun | None) -> bool:
    """A container without a readiness probe is ready once it has started."""
    return is_started(running, startup) and (readiness is None or readiness.verdict is True)


def must_restart(startup: ProbeRun | None, liveness: ProbeRun | None) -> ProbeKind | None:
    """The probe that condemns the container, if one does."""
    if startup is not None and startup.verdict is False:
        return ProbeKind.STARTUP
    if liveness is not None and liveness.verdict is False:
        return ProbeKind.LIVENESS
    return None
