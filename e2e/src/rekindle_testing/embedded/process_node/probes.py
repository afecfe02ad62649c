"""When a probe changes the state of a container.  Pure: no clock and no network."""

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
class ContainerProbe:
    """State of one probe of one running container.

    `passed` is None until a threshold has been reached for the first time.
    """

    spec: ProbeSpec
    successes: int = 0
    failures: int = 0
    passed: bool | None = None

    def record(self, success: bool) -> ContainerProbe:
        if success:
            count = self.successes + 1
            reached = count >= self.spec.success_threshold
            return replace(
                self, successes=count, failures=0, passed=True if reached else self.passed
            )
        count = self.failures + 1
        reached = count >= self.spec.failure_threshold
        return replace(self, successes=0, failures=count, passed=False if reached else self.passed)


def is_started(running: bool, startup: ContainerProbe | None) -> bool:
    return running and (startup is None or startup.passed is True)


def is_ready(
    running: bool, startup: ContainerProbe | None, readiness: ContainerProbe | None
) -> bool:
    """A container without a readiness probe is ready once it has started."""
    return is_started(running, startup) and (readiness is None or readiness.passed is True)


def must_restart(
    startup: ContainerProbe | None, liveness: ContainerProbe | None
) -> ProbeKind | None:
    """The failed probe because of which the container must be restarted, if there is one."""
    if startup is not None and startup.passed is False:
        return ProbeKind.STARTUP
    if liveness is not None and liveness.passed is False:
        return ProbeKind.LIVENESS
    return None
