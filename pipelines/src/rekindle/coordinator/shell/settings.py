"""The coordinator's settings, parsed once from the environment.

Design: docs/design/coordinator.md#environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.errors import RekindleError
from rekindle.identity import Identity


class SettingsError(RekindleError):
    """A variable that the operator sets is missing or wrong; names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`incarnation` is the fence in all messages of this process."""

    topology: str
    namespace: str
    topology_uid: str
    incarnation: int
    bind: str
    token: str | None = field(default=None, repr=False)
    previous_token: str | None = field(default=None, repr=False)
    poll_interval_s: float = 0.25
    poll_timeout_s: float = 1.0  # a frozen task blocks one call, which is then retried
    tick_s: float = 0.1
    generation_check_s: float = 1.0
    # Between two writes of the report: each is a new version of the topology, and the operator
    # writes its part of the status only if there is none between its read and its write.
    report_pause_s: float = 0.2
    lease_renew_s: float = 1.0  # each renewal names the report that is still valid
    # While a task is suspected: the operator counts its silence up to the last renewal.
    lease_renew_suspecting_s: float = 0.5
    lease_wait_s: float = 15.0  # maximum wait, before the first renewal, for what polls need
    lease_timeout_s: float = 3.0  # of a renewal: if one is lost, there is time for another
    lease_duration_s: int = 6  # the operator replaces a coordinator whose Lease is older
    store_timeout_s: float = 10.0

    @property
    def identity(self) -> Identity:
        return Identity(self.topology_uid, self.token, self.previous_token)


def read_settings(environment: Mapping[str, str]) -> Settings:
    def value(name: str) -> str:
        found = environment.get(name)
        if not found:
            raise SettingsError(f"the environment has no {name}; the operator sets it in the pod")
        return found

    incarnation = value("REKINDLE_INCARNATION")
    if not incarnation.isdecimal():
        raise SettingsError(f"REKINDLE_INCARNATION is {incarnation!r}; it must be a whole number")
    identity = Identity.from_environment(value("REKINDLE_TOPOLOGY_UID"), environment)
    return Settings(
        topology=value("REKINDLE_TOPOLOGY"),
        namespace=value("REKINDLE_NAMESPACE"),
        topology_uid=identity.topology,
        incarnation=int(incarnation),
        bind=value("REKINDLE_BIND"),
        token=identity.token,
        previous_token=identity.previous_token,
    )
